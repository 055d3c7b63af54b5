"""Rounds of the common work on one rank and on several: processes of one thread each, which torchrun starts."""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.runtime.launcher import launched
from experiments.speed.baselines import build_net, our_loop, random_records
from experiments.speed.cases import CASES
from experiments.speed.clients import Clock, measured_apart, seconds_of_rounds

RANKS = (1, 2)
RECORDS = 600  # of each of the 20 clients: a quarter of the common work
ROUNDS = 5


def rank_times(say: Callable[[str], None]) -> dict[str, Any]:
    """Records a second by number of ranks, and as a multiple of the first number's; a UserError if a run fails."""
    found: dict[str, Any] = {}
    clients = CASES["common"].clients
    for count in RANKS:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        with tempfile.TemporaryDirectory() as folder:
            options = {"records": RECORDS, "rounds": ROUNDS, "folder": f"{folder}/run"}
            seconds = measured_apart(launcher, __name__, options, f"{count} ranks")["round"]
        first = found[str(RANKS[0])]["seconds"] if found else seconds
        rate = round(clients * RECORDS / seconds)
        found[str(count)] = {"seconds": seconds, "rate": rate, "speedup": round(first / seconds, 3)}
        say(f"ranks: {count}, {rate:,} records/s")
    return {"of": found, "clients": clients, "records": RECORDS}


def _measured(records: int, rounds: int, folder: str) -> float:
    """Seconds of the fastest round of the run, of which this process is a rank."""
    torch.set_num_threads(1)
    case, clock = dataclasses.replace(CASES["common"], records=records), Clock(time.perf_counter)
    options: dict[str, Any] = {"rounds": rounds, "callbacks": [clock], "output_dir": folder, "evaluate_every": rounds}
    our_loop(case, build_net(case), random_records(case), torch.device("cpu"), FastEngine(1), **options)[0].run()
    return min(seconds_of_rounds(clock)) if launched().rank == 0 else 0.0


if __name__ == "__main__":
    seconds = _measured(**json.loads(sys.argv[1]))
    if launched().rank == 0:
        print(json.dumps({"round": seconds}))
