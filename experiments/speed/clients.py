"""Whole runs with more and more clients, each in a separate process: time of their parts, and peak memory."""

import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dpfl_lightning.errors import UserError

CLIENTS = (100, 1000, 10_000, 100_000)
COHORT = 100  # clients in a round
ROUNDS = 6
RECORDS = 24  # of each client, drawn from one pool: draws of different clients overlap
PARTS = {"setup": "set-up", "round": "a round", "end": "end of the run"}


def client_times(
    say: Callable[[str], None],
    clients: Sequence[int] = CLIENTS,
    cohort: int | None = COHORT,
    data: str = "digits",
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """CPU seconds of the parts of a run, and its peak memory, by number of clients; a UserError if a run fails.

    `cohort` None trains all clients in each round.
    """
    found, load = {}, os.getloadavg()[0]
    for count in clients:
        options = {"count": count, "cohort": cohort and min(cohort, count), "data": data, "rounds": rounds}
        words = [sys.executable, "-m", __name__, json.dumps(options)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2])
        if done.returncode:
            last = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
            raise UserError(f"`--cases` can hold clients only where runs with {count} clients work, got: {last}")
        found[str(count)] = json.loads(done.stdout.splitlines()[-1])
        say(f"clients: {count}, {found[str(count)]['round']:.2f} s a round, {found[str(count)]['peak_mib']} MiB")
    measured = f"{datetime.date.today().isoformat()}, load {load:.1f} before"
    return {"of": found, "cohort": cohort, "records": RECORDS, "data": data, "measured": measured}


def _measured(count: int, cohort: int | None, data: str, rounds: int) -> dict[str, float]:
    """Run once in this process. The first round compiles, and the last one evaluates: the median is of the others."""
    from dpfl_lightning.build import build_loop
    from dpfl_lightning.config.load import from_mapping
    from dpfl_lightning.federated.server.callback import Callback

    class Clock(Callback):
        """Notes the CPU time when rounds start and end."""

        def __init__(self) -> None:
            self._starts: list[float] = []
            self._ends: list[float] = []

        def on_round_start(self, view: Any) -> None:
            self._starts.append(time.process_time())

        def on_round_end(self, view: Any, report: Any) -> None:
            self._ends.append(time.process_time())

    clock, begun = Clock(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "rounds": rounds,
            "data": {"name": data, "records_per_client": RECORDS, "partition": {"name": "overlapping"}},
            "model": {"name": "logistic"},
            "clients": {"count": count, "batch_size": RECORDS // 2},
            "privacy": {"epsilon": None, "noise_multiplier": 1.0},
            "strategies": {} if cohort is None else {"uniform_selection": {"clients_per_round": cohort}},
            "evaluation": {"every": rounds},
            "engine": {"device": "cpu"},
            "tracking": None,
            "output_dir": f"{folder}/run",
        }
        build_loop(from_mapping(options), [clock]).run()
    ended = time.process_time()
    seconds = [end - start for start, end in zip(clock._starts, clock._ends, strict=True)]
    a_round = median(seconds[1:-1] or seconds)
    return {
        "setup": round(clock._starts[0] - begun, 3),
        "round": round(a_round, 4),
        "end": round(ended - clock._starts[-1] - a_round, 3),
        "peak_mib": round(_peak_bytes() / 2**20),
    }


def _peak_bytes() -> int:
    """The peak of this process alone: Linux hands getrusage's on from the process that started it, but not VmHWM."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def draw_clients(found: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw the CPU seconds of the parts of a run by the number of clients."""
    from dpfl_lightning.reporting.figures import log_scale, new_axes  # imports matplotlib

    figure, axes = new_axes("CPU time of the parts of a run", "clients", "seconds")
    clients = [int(count) for count in found]
    for part, words in PARTS.items():
        axes.plot(clients, [row[part] for row in found.values()], marker="o", label=words)
    log_scale(axes, "x")
    log_scale(axes, "y")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    print(json.dumps(_measured(**json.loads(sys.argv[1]))))
