"""Make cells: skip finished ones, resume interrupted runs, and go on after the error of a cell."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import gc
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

import yaml

from dpfl_lightning.config.load import parse_override, split
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.config.options import Options
from dpfl_lightning.config.yaml_text import read_yaml
from dpfl_lightning.errors import UserError
from dpfl_lightning.runtime.text import duration
from experiments.papers.cells import (
    Cell,
    circumstances,
    code_version,
    contents,
    declaration,
    declared_keys,
    package_digest,
    read,
    write,
)
from experiments.papers.declarations import merged
from experiments.papers.experiment import Computation, NotYet, Training
from experiments.papers.registry import experiments

if TYPE_CHECKING:
    from dpfl_lightning.federated.server.results import RunResult

NOISE_KEY = "0" * 32  # all cells are simulations: the same command gives the same numbers
EXPERIMENT = "reproduce"  # in MLflow


@dataclass(frozen=True)
class RunnerOptions:
    """How cells are made; none of it changes their numbers.

    Args:
        runs: folder of the runs' folders.
        free: further arguments of `fit`, which decide only how a run is executed and reported.
        again: make finished cells again.
    """

    fit: Callable[[Options, bool, Sequence[Any]], Any]
    results: Path
    runs: Path
    free: tuple[str, ...] = ()
    again: bool = False

    def log(self, line: str) -> None:
        print(line, flush=True)


@dataclass(frozen=True)
class CellContext:
    """What a study knows of the cell that it makes."""

    cell: Cell
    runner: RunnerOptions

    @property
    def options(self) -> Options:
        return options_of(self.cell, self.runner)

    @property
    def device(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() and self.options.engine.device != "cpu" else "cpu"

    def run(self, callbacks: Sequence[Any] = ()) -> RunResult:
        """The run of the cell, resumed if it was interrupted."""
        folder, resume = run_folder(self.cell, self.runner)
        if not resume:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _code_of(folder).write_text(package_digest())
        try:
            return self.runner.fit(options_of(self.cell, self.runner, folder), resume, callbacks)
        finally:
            gc.collect()  # the objects of a run form cycles; without this, its data would stay during the next cell

    def run_of(self, cell: Cell, callbacks: Sequence[Any] = ()) -> RunResult:
        """The run of another cell with this seed and these overrides, which one process makes while others wait."""
        same = cell._replace(seed=self.cell.seed, overrides=self.cell.overrides)
        folder = self.runner.runs / same.place
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return CellContext(same, dataclasses.replace(self.runner, again=False)).run(callbacks)


def make(cells: Sequence[Cell], runner: RunnerOptions) -> list[str]:
    """Make these cells one after the other; prints and returns one sentence for each cell that failed."""
    failures = []
    for number, cell in enumerate(cells):
        if isinstance(spec(cell), Training):
            about, left = (duration(seconds_of(some, runner.results)) for some in ([cell], cells[number:]))
            runner.log(f"cell {number + 1} of {len(cells)}, {cell}: about {about}; {left} for all that is left")
        try:
            content = _made(cell, runner)
        except Exception as error:  # a bug in one cell must not stop the others
            known = isinstance(error, UserError)
            if not known:
                traceback.print_exc()
            failures.append(f"{cell}: {error}" if known else f"{cell}: {type(error).__name__}: {error}")
            runner.log(f"not made: {failures[-1]}")
        else:
            path = write(runner.results, cell, content)
            runner.log(f"{cell}: {headline(content)}in {duration(content['seconds'])}, kept in {path}")
    return failures


def spec(cell: Cell) -> Training | Computation:
    """How the cell is made, as its experiment declares."""
    return experiments()[cell.experiment].cells[cell.row]


def ready(cells: Sequence[Cell], runner: RunnerOptions) -> tuple[list[Cell], Counter[str]]:
    """The cells that can be made now, and each reason why others cannot, with their number."""
    reasons = {cell: reason for cell in cells if isinstance(spec(cell), Training) and (reason := _reason(cell, runner))}
    return [cell for cell in cells if cell not in reasons], Counter(reasons.values())


def _reason(cell: Cell, runner: RunnerOptions) -> str:
    """Why the cell cannot be made now; empty if it can."""
    try:
        data = options_of(cell, runner).data
    except NotYet as error:
        return str(error)
    if data.name is None or not _lacks(data.name, data.folder, data.download):
        return ""
    advice = "with its files in a folder, add --data.folder FOLDER."
    return f"the data set {data.name} is neither on this machine nor can it be fetched; {advice}"


@functools.cache
def _lacks(name: str, folder: str | None, download: bool) -> bool:
    from dpfl_lightning import data
    from dpfl_lightning.data.sources import DataMissing

    try:
        data.load(name, folder, download)
    except DataMissing:
        return True
    return False


# ---- options of one cell


def declared_options(cell: Cell) -> dict[str, Any]:
    """Dotted keys of the cell's run with its seed, as declared; `config` is a file of further options."""
    training = spec(cell)
    assert isinstance(training, Training)
    return {**declared_keys(training, cell), "seed": cell.seed}


def command_of(cell: Cell) -> str:
    """The command that makes the cell's numbers again."""
    made_by = spec(cell)
    if isinstance(made_by, Computation) or made_by.recorder is not None or made_by.study is not None:
        return shlex.join(["python", "-m", "experiments.papers", *cli_args(cell), "--again"])
    declared = declared_options(cell)
    seed = f"--seed={declared.pop('seed')}"
    words = [word for key, value in declared.items() for word in (f"--{key}", _text(value))]
    privacy = _options(cell, ()).privacy
    key = [] if privacy is None else [f"--privacy.noise_key={privacy.noise_key}"]
    return shlex.join(["python", "-m", "dpfl_lightning.fit", *words, seed, *_override_args(cell), *key])


def cli_args(cell: Cell) -> list[str]:
    """The arguments of the command that ask for this cell alone."""
    experiment = experiments()[cell.experiment]
    rows = [row for row in experiment.rows if experiment.source(row, cell.column)[:2] == (cell.experiment, cell.row)]
    words = [cell.experiment, "--rows", ",".join(rows), "--columns", cell.column, "--scale", cell.scale]
    seed = [] if cell.seed is None else ["--seeds", str(cell.seed)]
    return [*words, *seed, *_override_args(cell)]


def _override_args(cell: Cell) -> list[str]:
    return [f"--{key}={text}" for key, text in cell.overrides]


def _text(value: Any) -> str:
    """A value as an argument of the command line.

    >>> _text({"distillation": {"image_steps": 10}}), _text(None), _text(5e-05)
    ('{distillation: {image_steps: 10}}', 'null', '5.0e-05')
    """
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip().removesuffix("\n...")


def options_of(cell: Cell, runner: RunnerOptions, output_dir: Path | None = None) -> Options:
    """The options of the cell's run; a UserError if one of them is wrong."""
    options = _options(cell, runner.free)
    return options if output_dir is None else dataclasses.replace(options, output_dir=str(output_dir))


@functools.cache
def _options(cell: Cell, free: tuple[str, ...]) -> Options:
    tags = {name: str(value) for name, value in cell._asdict().items() if name != "overrides" and value is not None}
    tracking = {"experiment": EXPERIMENT, "run_name": cell.place.as_posix(), "tags": tags}
    declared = declared_options(cell)
    config = read_yaml(declared.pop("config")) if "config" in declared else {}
    set_by_user = [{key: parse_override(key, text)} for key, text in (*cell.overrides, *split(free)[0])]
    options = from_mapping(merged([config, declared, {"tracking": tracking}, *set_by_user]))
    if options.privacy is None or options.privacy.noise_key is not None:
        return options
    return dataclasses.replace(options, privacy=dataclasses.replace(options.privacy, noise_key=NOISE_KEY))


# ---- making one cell


def _made(cell: Cell, runner: RunnerOptions) -> dict[str, Any]:
    made_by, context, made_with, code = spec(cell), CellContext(cell, runner), declaration(cell), code_version()
    begun = time.perf_counter()
    content: Mapping[str, Any]
    if isinstance(made_by, Computation):
        content = {"values": dict(made_by.compute(cell.column))}
        seconds, device = round(time.perf_counter() - begun, 2), "cpu"
    elif made_by.study is not None:
        content = made_by.study(context)
        seconds, device = round(time.perf_counter() - begun, 2), context.device
    else:
        from experiments.papers.recorder import Recorder, guarantee_of

        recorder = (made_by.recorder or Recorder)()
        result = context.run([recorder])
        content = {**recorder.record, **guarantee_of(result)}
        seconds, device = round(result.wall_seconds, 2), recorder.device
    names = ("values", "epsilon_max", "accountant", "guarantee", "rounds")
    first = {key: content[key] for key in names if key in content}
    return {
        **first,
        "seconds": seconds,
        **circumstances(device, code),
        "command": command_of(cell),
        **content,
        "declared": made_with,
    }


def run_folder(cell: Cell, runner: RunnerOptions) -> tuple[Path, bool]:
    """The folder of its run, and whether to resume the run in it, even a finished one, as its cell may be missing.

    Runs of other options or other code of the package, and cells that are made again, have a new folder beside it: no
    ledger is ever deleted.
    """
    folder, number = runner.runs / cell.place, 2
    while (following := folder.with_name(f"{(runner.runs / cell.place).name}.{number}")).exists():
        folder, number = following, number + 1
    if not folder.exists():
        return folder, False
    finished = (folder / "result.json").is_file()
    again = runner.again or read(runner.results, cell) is not None  # a cell of another declaration
    same_code = _code_of(folder).is_file() and _code_of(folder).read_text() == package_digest()
    if same_code and (folder / "checkpoint.pt").is_file() and not (finished and again) and _same(cell, runner, folder):
        return folder, True
    return following, False


def _code_of(folder: Path) -> Path:
    """The file beside a run's folder with the digest of the code that began the run."""
    return folder.with_name(f"{folder.name}.code")


def _same(cell: Cell, runner: RunnerOptions, folder: Path) -> bool:
    from dpfl_lightning.loop import so_far

    try:
        so_far(options_of(cell, runner, folder))
    except UserError:  # other options, or options that this version does not know
        return False
    return True


# ---- how long


def seconds_of(cells: Sequence[Cell], results: Path) -> float:
    """Estimated seconds: from finished cells of the same row, else as declared; NaN if neither is known."""
    trained = Counter(cell._replace(column="", seed=None) for cell in cells if isinstance(spec(cell), Training))
    seconds = math.fsum(count * _mean_seconds(cell, results) for cell, count in trained.items())
    return len(cells) - trained.total() + seconds


def _mean_seconds(cell: Cell, results: Path) -> float:
    folder = cell.place.parent  # of its scale and overrides
    made = [content for place, content in contents(results, cell.experiment).items() if place.parent == folder]
    seconds = [one["seconds"] for one in made if one["row"] == cell.row and one["seed"] is not None]
    return fmean(seconds) if seconds else 60 * experiments()[cell.experiment].minutes.get(cell.scale, math.nan)


def headline(content: Mapping[str, Any]) -> str:
    """The accuracy of a finished cell, if it has one."""
    accuracy = content["values"].get("accuracy", content["values"].get("test_accuracy"))
    return "" if accuracy is None else f"accuracy {accuracy:.2f} % "
