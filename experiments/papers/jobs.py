"""Make several cells at once, each in a process of this command with its share of the cores."""

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from dpfl_lightning.runtime.stopping import passed_on
from experiments.papers.cells import Cell, kept
from experiments.papers.run import CellContext, RunnerOptions, cli_args, duration, headline, options_of, seconds_of


def fitting(cells: Sequence[Cell], runner: RunnerOptions) -> int:
    """The number of runs that keeps all cores busy: a run trains its clients in parallel, at most one core each."""
    from dpfl_lightning.runtime.threads import cores

    if any(CellContext(cell, runner).device == "cuda" for cell in cells):
        return 1
    clients = max((options_of(cell, runner).clients.count or 1 for cell in cells), default=1)
    return max(1, min(len(cells), cores() // clients))


def make_at_once(cells: Sequence[Cell], runner: RunnerOptions, jobs: int) -> list[str]:
    """As `make`, `jobs` trained cells at the same time, each with a log beside its run; signals reach all of them."""
    from dpfl_lightning.runtime.threads import cores

    share = ["--engine.workers", str(max(1, cores() // jobs))]
    runner.log(f"{len(cells)} cells, {jobs} at once: about {duration(seconds_of(cells, runner.results) / jobs)}")
    failures: list[str] = []
    started: list[subprocess.Popen] = []
    with ThreadPoolExecutor(jobs) as pool, passed_on(started):
        running = {pool.submit(_process, cell, runner, share, started): cell for cell in cells}
        try:
            for number, done in enumerate(as_completed(running), start=1):
                cell, problem = running[done], done.result()
                if problem:
                    failures.append(f"{cell}: {problem}")
                    runner.log(f"not made ({number} of {len(cells)}): {failures[-1]}")
                else:
                    content = kept(runner.results, cell)
                    took = duration(content["seconds"])
                    runner.log(f"{number} of {len(cells)}, {cell}: {headline(content)}in {took}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failures


def _process(cell: Cell, runner: RunnerOptions, share: Sequence[str], started: list[subprocess.Popen]) -> str:
    """Make one cell in a process, which is added to `started`; returns the reason of a failure, or nothing."""
    log = runner.runs / cell.place.with_name(f"{cell.place.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = ["--results", str(runner.results), "--runs", str(runner.runs), "--jobs", "1", "--no_table"]
    command = [sys.executable, "-m", "experiments.papers", *cli_args(cell), *flags, *["--again"] * runner.again]
    with open(log, "w") as file:
        process = subprocess.Popen([*command, *share, *runner.free], stdout=file, stderr=subprocess.STDOUT)
        started.append(process)
        status = process.wait()
    *_, last = ["the process printed nothing", *log.read_text(errors="replace").strip().splitlines()]
    return "" if status == 0 else f"{last.removeprefix(f'not made: {cell}: ')} (all of it in {log})"
