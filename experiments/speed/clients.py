"""Whole runs with more and more clients, each in a separate process: time of their parts, and peak memory."""

import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.loop import build_loop

CLIENTS = (100, 1000, 10_000, 100_000)
COHORT = 100  # clients in a round
ROUNDS = 6
RECORDS = 24  # of each client, drawn from one pool: draws of different clients overlap


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
        row = found[str(count)] = measured_apart([], __name__, options, f"{count} clients")
        say(f"clients: {count}, {row['round']:.2f} s a round, {row['peak_mib']} MiB")
    measured = f"{datetime.date.today().isoformat()}, load {load:.1f} before"
    return {"of": found, "cohort": cohort, "records": RECORDS, "data": data, "measured": measured}


def measured_apart(launcher: Sequence[str], module: str, options: dict[str, Any], what: str) -> dict[str, float]:
    """What `python -m launcher -m module options` prints as JSON on its last line; a UserError if it fails."""
    words = [sys.executable, *launcher, "-m", module, json.dumps(options)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    if done.returncode:
        last = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise UserError(f"`--cases` can hold scaling only where runs with {what} work, got: {last}")
    return json.loads(done.stdout.splitlines()[-1])


class Clock(Callback):
    """Notes the time when rounds start and end."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self.starts, self.ends = now, list[float](), list[float]()

    def on_round_start(self, view: Any) -> None:
        self.starts.append(self._now())

    def on_round_end(self, view: Any, report: Any) -> None:
        self.ends.append(self._now())


def seconds_of_rounds(clock: Clock) -> list[float]:
    """Those of all but the first round, which compiles, and the last one, which evaluates."""
    seconds = [end - start for start, end in zip(clock.starts, clock.ends, strict=True)]
    return seconds[1:-1] or seconds


def _measured(count: int, cohort: int | None, data: str, rounds: int) -> dict[str, float]:
    """Run once in this process."""
    clock, begun = Clock(time.process_time), time.process_time()
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
    a_round = median(seconds_of_rounds(clock))
    return {
        "setup": round(clock.starts[0] - begun, 3),
        "round": round(a_round, 4),
        "end": round(ended - clock.starts[-1] - a_round, 3),
        "peak_mib": round(_peak_bytes() / 2**20),
    }


def _peak_bytes() -> int:
    """The peak of this process alone: Linux hands getrusage's on from the process that started it, but not VmHWM."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    print(json.dumps(_measured(**json.loads(sys.argv[1]))))
