"""Several cells at once: each is a process of this command of its own, with its share of the cores."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from dpfl_lightning.runtime.stopping import passed_on
from experiments.papers.cells import Cell, path_of, read
from experiments.papers.run import Work, duration, headline, only, options_of, seconds_of


def fitting(cells: Sequence[Cell], work: Work) -> int:
    """How many runs leave no core without work: one run's clients are trained side by side, but no more than these."""
    import torch

    from dpfl_lightning.runtime.threads import cores

    if not cells:
        return 1
    options = [options_of(cell, work) for cell in cells]
    on_gpu = torch.cuda.is_available() and any(one.engine.device != "cpu" for one in options)
    return 1 if on_gpu else max(1, min(len(cells), cores() // max(one.clients.count for one in options)))


def make_at_once(cells: Sequence[Cell], work: Work, jobs: int) -> list[str]:
    """As `make`, `jobs` trained cells at the same time; what each says goes into a log beside its run.

    Ctrl-C reaches every process, which ends as it would alone; SIGTERM is passed on.
    """
    from dpfl_lightning.runtime.threads import cores

    share = ["--engine.workers", str(max(1, cores() // jobs))]
    work.say(f"{len(cells)} cells, {jobs} at once: about {duration(seconds_of(cells, work.results) / jobs)}")
    failed: list[str] = []
    started: list[subprocess.Popen] = []
    with ThreadPoolExecutor(jobs) as pool, passed_on(started):
        running = {pool.submit(_process, cell, work, share, started): cell for cell in cells}
        try:
            for number, done in enumerate(as_completed(running), start=1):
                cell, problem = running[done], done.result()
                if problem:
                    failed.append(f"{cell}: {problem}")
                    work.say(f"not made ({number} of {len(cells)}): {failed[-1]}")
                else:
                    held = read(path_of(work.results, cell))
                    work.say(f"{number} of {len(cells)}, {cell}: {headline(held)}in {duration(held['seconds'])}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def _process(cell: Cell, work: Work, share: Sequence[str], started: list[subprocess.Popen]) -> str:
    """Make one cell in a process, which joins those that were started; returns why it could not be made, or nothing."""
    log = work.runs / cell.place.with_name(f"{cell.place.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = ["--results", str(work.results), "--runs", str(work.runs), "--jobs", "1", "--no_table"]
    command = [sys.executable, "-m", "experiments.papers", *only(cell), *flags, *["--again"] * work.again]
    with open(log, "w") as file:
        process = subprocess.Popen([*command, *share, *work.free], stdout=file, stderr=subprocess.STDOUT)
        started.append(process)
        status = process.wait()
    return "" if status == 0 else f"{_last_line(log).removeprefix(f'not made: {cell}: ')} (all of it in {log})"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "the process said nothing"
