"""`dpfl sweep --config sweeps/nas_digits.yaml`: search hyperparameters and architectures.

The same command resumes a search that was stopped. On another machine that can reach the storage, it joins the search.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dpfl_lightning.config.load import load
from dpfl_lightning.errors import command, require
from dpfl_lightning.runtime.launcher import launched
from dpfl_lightning.runtime.stopping import part_of, passed_on
from dpfl_lightning.search.options import SweepOptions


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `sweep` with command-line arguments, and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    options, flags = load(
        words,
        _flags,
        name="sweep",
        description="Search the best values for keys of a run, on distilled, public or private records. The same "
        "command resumes a search that was stopped.",
        examples=("--config sweeps/nas_digits.yaml", "--config search.yaml --workers 4 --final"),
        section=SweepOptions,
    )
    require(launched().size == 1, "sweep", "be one process", launched().size, "--workers runs several trials at once.")
    require(flags.workers >= 1, "--workers", "be >= 1", flags.workers)
    if flags.helping:
        part_of(flags.helping[1])
    name = flags.sweep.name or (Path(flags.config[0]).stem if flags.config else "sweep")
    from dpfl_lightning.commands.fit import fit  # these import torch
    from dpfl_lightning.search.search import Search

    sweep = dataclasses.replace(flags.sweep, name=name)
    workers = flags.helping[0] if flags.helping else flags.workers
    search = Search(sweep, options, fit, workers=workers, helping=bool(flags.helping))
    if flags.helping:
        search.work()
        return 0
    try:
        search.introduce()
        with _helpers(words, flags.workers):
            search.work()
    except KeyboardInterrupt:
        search.stopped()
        print("Finished trials are kept. The same command resumes the search.", file=sys.stderr)
        raise
    return search.finish(flags.final)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="number of parallel trials, >= 1 (1)")
    parser.add_argument("--final", action="store_true", help="train the best trial's configuration on the clients")
    # Internal flag of the processes that --workers starts: this is one of N workers of process PID, for trials only
    parser.add_argument("--helping", type=int, nargs=2, metavar=("N", "PID"), help=argparse.SUPPRESS)


@contextlib.contextmanager
def _helpers(words: Sequence[str], workers: int) -> Iterator[None]:
    """Run `workers - 1` more processes of this command, which end when the study has all its trials.

    Ctrl-C reaches them as it reaches this process, and SIGTERM is passed on to them. If this process is killed, they
    charge nothing more. If a worker is killed, another worker repeats its trial.
    """
    arguments = [word for word in words if word != "--final"]
    helping = ["--workers", "1", "--helping", str(workers), str(os.getpid())]
    line = [sys.executable, "-m", "dpfl_lightning", "sweep", *arguments, *helping]
    threads = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers))}
    helpers = [subprocess.Popen(line, env=threads) for _ in range(workers - 1)]
    try:
        with passed_on(helpers):
            yield
    finally:
        for helper in helpers:
            status = helper.wait()
            if status not in (0, 130, 143):
                print(f"A worker ended with status {status}; its trial was repeated.", file=sys.stderr)
