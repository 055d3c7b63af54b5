"""Make cells: skip what is finished, go on with what was begun, and let no cell's error stop the others."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import math
import shlex
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dpfl_lightning.config.load import load
from dpfl_lightning.config.options import Options
from dpfl_lightning.errors import UserError
from dpfl_lightning.runtime.text import duration
from experiments.papers.cells import Cell, circumstances, path_of, read, write
from experiments.papers.experiment import Computation, Training
from experiments.papers.registry import experiments

if TYPE_CHECKING:
    from dpfl_lightning.federated.server.results import RunResult

NOISE_KEY = "0" * 32  # of all cells: they are simulations, and the same command gives the same numbers
#: of MLflow
EXPERIMENT = "reproduce"


@dataclass(frozen=True)
class Work:
    """How cells are made; none of it changes what they hold.

    Args:
        fit: `fit(options, resume, watchers)`, as `dpfl_lightning.fit`.
        results: where finished cells are kept.
        runs: where runs have their folders.
        free: further arguments of `fit` that decide only how a run is executed and told.
        again: make finished cells anew.
    """

    fit: Callable[[Options, bool, Sequence[Any]], Any]
    results: Path
    runs: Path
    free: tuple[str, ...] = ()
    again: bool = False

    def say(self, line: str) -> None:
        """A line of progress."""
        print(line, flush=True)


@dataclass(frozen=True)
class Making:
    """A cell in the making: what a study has at hand.

    Args:
        cell: which.
        work: how cells are made.
    """

    cell: Cell
    work: Work

    @property
    def options(self) -> Options:
        """Of the cell's run."""
        return options_of(self.cell, self.work)

    def run(self, watchers: Sequence[Any] = ()) -> RunResult:
        """The cell's own run, gone on with where it was begun."""
        folder, resume = run_folder(self.cell, self.work)
        return self.work.fit(options_of(self.cell, self.work, folder), resume, watchers)

    def run_of(self, cell: Cell, watchers: Sequence[Any] = ()) -> RunResult:
        """The run of another cell with this one's seed and departures: what is finished is not made again.

        Of several processes that need it at once one makes it, and the others wait.
        """
        alike = cell._replace(seed=self.cell.seed, departures=self.cell.departures)
        folder = self.work.runs / alike.place
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return Making(alike, dataclasses.replace(self.work, again=False)).run(watchers)


def make(cells: Sequence[Cell], work: Work) -> list[str]:
    """Make these cells one after the other.

    Returns:
        One sentence for each that could not be made, also said at once.
    """
    failed = []
    for number, cell in enumerate(cells):
        left = seconds_of(cells[number:], work.results)
        if isinstance(how(cell), Training):
            own = duration(seconds_of([cell], work.results))
            work.say(f"cell {number + 1} of {len(cells)}, {cell}: about {own}; {duration(left)} for all that is left")
        try:
            held = _made(cell, work)
        except UserError as error:
            failed.append(f"{cell}: {error}")
        except Exception as error:  # a bug in one cell: the others are worth their hours
            traceback.print_exc()
            failed.append(f"{cell}: {type(error).__name__}: {error}")
        else:
            path = write(work.results, cell, held)
            work.say(f"{cell}: {headline(held)}in {duration(held['seconds'])}, kept in {path}")
            continue
        work.say(f"not made: {failed[-1]}")
    return failed


def how(cell: Cell) -> Training | Computation:
    """What its experiment declares."""
    return experiments()[cell.experiment].cells[cell.row]


def without_data(cells: Sequence[Cell], work: Work) -> tuple[list[Cell], list[str]]:
    """The cells whose data is here, and a sentence for each data set that is missing.

    Raises:
        UserError: options that are wrong; nothing was run yet.
    """
    lacking: Counter[str] = Counter()
    there = []
    data_of = {cell: options_of(cell, work).data for cell in cells if isinstance(how(cell), Training)}
    for cell in cells:
        data = data_of.get(cell)
        if data is not None and _lacks(data.name, data.folder, data.download):
            lacking[data.name] += 1
        else:
            there.append(cell)
    return there, [
        f"{count} of {len(cells)} cells cannot be made, because the data set {name} is neither on this machine nor can "
        "it be fetched; with its files in a folder, add --data.folder FOLDER."
        for name, count in lacking.items()
    ]


@functools.cache
def _lacks(name: str, folder: str | None, download: bool) -> bool:
    from dpfl_lightning import data
    from dpfl_lightning.data.sources import DataMissing

    try:
        data.load(name, folder, download)
    except DataMissing:
        return True
    return False


# ---- one cell


def words_of(cell: Cell) -> list[str]:
    """The arguments of `fit` that a person would type for it."""
    training = how(cell)
    assert isinstance(training, Training)
    seed = f"--seed={cell.seed}"
    return [*training.words(cell.row, cell.column, cell.scale), seed, *_set_otherwise(cell)]


def _set_otherwise(cell: Cell) -> list[str]:
    return [f"--{key}={text}" for key, text in cell.departures]


def command_of(cell: Cell) -> str:
    """What a person types to make its numbers once more."""
    made = how(cell)
    if isinstance(made, Training) and made.recorder is None and made.study is None:
        options = _options(cell, ())
        key = [] if options.privacy is None else [f"--privacy.noise_key={options.privacy.noise_key}"]
        return shlex.join(["python", "-m", "dpfl_lightning.fit", *words_of(cell), *key])
    return shlex.join(["python", "-m", "experiments.papers", *only(cell), "--again"])


def only(cell: Cell) -> list[str]:
    """The arguments of `reproduce` that ask for this cell alone."""
    experiment = experiments()[cell.experiment]
    rows = [row for row in experiment.rows if experiment.source(row, cell.column)[:2] == (cell.experiment, cell.row)]
    words = [cell.experiment, "--rows", ",".join(rows), "--columns", cell.column, "--scale", cell.scale]
    seed = [] if cell.seed is None else ["--seeds", str(cell.seed)]
    return [*words, *seed, *_set_otherwise(cell)]


def options_of(cell: Cell, work: Work, output_dir: Path | None = None) -> Options:
    """Its run's options.

    Raises:
        UserError: one of them is wrong.
    """
    options = _options(cell, work.free)
    return options if output_dir is None else dataclasses.replace(options, output_dir=str(output_dir))


@functools.cache
def _options(cell: Cell, free: tuple[str, ...]) -> Options:
    place = cell.place.as_posix()
    tags = {name: str(value) for name, value in cell._asdict().items() if name != "departures" and value is not None}
    told = ["--tracking.experiment", EXPERIMENT, "--tracking.run_name", place, "--tracking.tags", json.dumps(tags)]
    options = load([*words_of(cell), *told, *free])[0]
    if options.privacy is None or options.privacy.noise_key is not None:
        return options
    return dataclasses.replace(options, privacy=dataclasses.replace(options.privacy, noise_key=NOISE_KEY))


def _made(cell: Cell, work: Work) -> dict[str, Any]:
    made = how(cell)
    if isinstance(made, Computation):
        return _computed(cell)
    return _trained(cell, work, made) if made.study is None else _studied(cell, work, made.study)


def _trained(cell: Cell, work: Work, made: Training) -> dict[str, Any]:
    from experiments.papers.recorder import Recorder

    folder, resume = run_folder(cell, work)
    recorder = Recorder() if made.recorder is None else made.recorder(cell.row, cell.column)
    result = work.fit(options_of(cell, work, folder), resume, [recorder])
    spent = [client["epsilon_spent"] for client in result.clients]
    found = dict(recorder.found)
    return {
        "values": found.pop("values"),
        "epsilon_max": None if None in spent else max(spent),
        "guarantee": result.guarantee,
        "rounds": result.rounds,
        "seconds": round(result.wall_seconds, 1),
        **circumstances(recorder.device),
        "command": command_of(cell),
        **found,
    }


def _studied(cell: Cell, work: Work, study: Callable[[Making], Mapping[str, Any]]) -> dict[str, Any]:
    import torch

    making = Making(cell, work)
    on_gpu = torch.cuda.is_available() and making.options.engine.device != "cpu"
    begun = time.perf_counter()
    found = dict(study(making))
    seconds = round(time.perf_counter() - begun, 1)
    return {
        "values": found.pop("values"),
        "seconds": seconds,
        **circumstances("cuda" if on_gpu else "cpu"),
        "command": command_of(cell),
        **found,
    }


def _computed(cell: Cell) -> dict[str, Any]:
    made = how(cell)
    assert isinstance(made, Computation)
    begun = time.perf_counter()
    values = dict(made.compute(cell.column, dict(cell.departures)))
    seconds = round(time.perf_counter() - begun, 2)
    return {"values": values, "seconds": seconds, **circumstances("cpu"), "command": command_of(cell)}


def run_folder(cell: Cell, work: Work) -> tuple[Path, bool]:
    """The folder of its run, and whether to go on with what is there.

    A run of the same options is gone on with, also if it is finished (its cell may not have been written); unless
    finished cells are made again. Otherwise it is a new folder beside the others: no ledger is ever deleted.
    """
    folder, later = work.runs / cell.place, 2
    while (following := folder.with_name(f"{(work.runs / cell.place).name}.{later}")).exists():
        folder, later = following, later + 1
    if not folder.exists():
        return folder, False
    finished = (folder / "result.json").is_file()
    if (folder / "checkpoint.pt").is_file() and not (finished and work.again) and _same(cell, work, folder):
        return folder, True
    return following, False


def _same(cell: Cell, work: Work, folder: Path) -> bool:
    from dpfl_lightning.build import so_far

    try:
        so_far(options_of(cell, work, folder))
    except UserError:  # options that this version does not know: another run
        return False
    return True


# ---- how long


def seconds_of(cells: Sequence[Cell], results: Path) -> float:
    """How long they will take: as finished ones of the same row, else as declared; NaN where nobody knows."""
    trained = Counter(cell._replace(column="", seed=None) for cell in cells if isinstance(how(cell), Training))
    return (
        len(cells) - trained.total() + math.fsum(count * _mean_seconds(one, results) for one, count in trained.items())
    )


def _mean_seconds(cell: Cell, results: Path) -> float:
    made = map(read, path_of(results, cell).parent.glob("*_seed*.json"))
    alike = [held["seconds"] for held in made if held["row"] == cell.row]
    return fmean(alike) if alike else 60 * experiments()[cell.experiment].minutes.get(cell.scale, math.nan)


def headline(held: dict[str, Any]) -> str:
    """What a cell came to, in a word."""
    accuracy = held["values"].get("accuracy", held["values"].get("test_accuracy"))
    return "" if accuracy is None else f"accuracy {accuracy:.2f} % "
