"""Peak memory of whole runs with more and more clients, each in a separate process."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from dpfl_lightning.errors import UserError

CLIENTS = (100, 1000, 10_000)
RECORDS = 24  # of each client, drawn from one pool: draws of different clients overlap

#: the command, and then its peak: Linux hands getrusage's on from the process that started it, but not VmHWM
_MEASURED = """
import pathlib, resource, sys
from dpfl_lightning.fit import main
status = main(sys.argv[1:])
told = pathlib.Path("/proc/self/status")
if told.exists():
    peak = next(int(line.split()[1]) * 1024 for line in told.read_text().splitlines() if line.startswith("VmHWM"))
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("PEAK", peak)
sys.exit(status)
"""


def peak_memory(
    say: Callable[[str], None], clients: Sequence[int] = CLIENTS, data: str = "fashion_mnist"
) -> dict[str, Any]:
    """Peak resident memory of one round of `fit`, ledger, evaluation, checkpoint and report included.

    Returns:
        `peak_mib` by number of clients, `growth` (largest / smallest - 1), `records` of each client, `data`.

    Raises:
        UserError: a run failed; with its last line.
    """
    peaks = {}
    for count in clients:
        with tempfile.TemporaryDirectory() as folder:
            options = {
                "data.name": data,
                "data.partition.name": "overlapping",
                "data.records_per_client": RECORDS,
                "clients.count": count,
                "clients.batch_size": RECORDS,
                "privacy.epsilon": 4,
                "rounds": 1,
                "tracking": "null",
                "output_dir": f"{folder}/run",
            }
            words = [f"--{key}={value}" for key, value in options.items()]
            done = subprocess.run([sys.executable, "-c", _MEASURED, *words], capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
            raise UserError(f"`--cases` can hold memory only where `fit` runs with {count} clients, got: {last}")
        peaks[str(count)] = round(int(done.stdout.split()[-1]) / 2**20)
        say(f"memory: {count} clients, {peaks[str(count)]} MiB")
    return {
        "peak_mib": peaks,
        "growth": round(max(peaks.values()) / min(peaks.values()) - 1, 3),
        "records": RECORDS,
        "data": data,
    }
