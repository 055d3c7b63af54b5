"""Finished cells: one line of JSON each, in one file a table, found by row, column, scale, seed and overrides."""

import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import math
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import dpfl_lightning
from dpfl_lightning.config.yaml_text import read_yaml
from dpfl_lightning.errors import UserError
from experiments.papers.declarations import merged
from experiments.papers.experiment import Computation, Experiment, NotNeeded, NotYet, Training
from experiments.papers.registry import experiments

#: where cells are kept, below the working directory; a command may set another folder
RESULTS = Path("experiments/results")

Overrides = tuple[tuple[str, str], ...]

_written = 0  # number of cells that this process has written


@contextlib.contextmanager
def in_folder(results: Path) -> Iterator[None]:
    """Let options that follow from finished cells read those of this folder."""
    global RESULTS
    before, RESULTS = RESULTS, results
    try:
        yield
    finally:
        RESULTS = before


class Cell(NamedTuple):
    """One run, study or computation (whose seed is None); `overrides` are (key, text) of the user's options, sorted."""

    experiment: str
    row: str
    column: str
    scale: str
    seed: int | None = None
    overrides: Overrides = ()

    def __str__(self) -> str:
        seed = [] if self.seed is None else [f"seed {self.seed}"]
        return ", ".join([f"{self.experiment}: {self.column}", self.row, *seed])

    @property
    def place(self) -> Path:
        """The folder of its run, below that of all runs; also its name in MLflow.

        >>> Cell("a.table1", "ours", "dist1", "small", 0, (("clients.learning_rate", "0.02"),)).place.as_posix()
        'a.table1/small+clients.learning_rate=0.02/dist1_ours_seed0'
        """
        seed = "" if self.seed is None else f"_seed{self.seed}"
        return Path(self.experiment) / variant(self.scale, self.overrides) / f"{self.column}_{self.row}{seed}"


def variant(scale: str, overrides: Overrides) -> str:
    """The folder of a scale and of the user's overrides."""
    name = "+".join([scale, *(f"{key}={quote(text, safe=',')}" for key, text in overrides)])
    return name if len(name) <= 120 else f"{name[:100]}...{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def source(experiment: Experiment, row: str, column: str, scale: str, overrides: Overrides = ()) -> Cell:
    """The cell of a number, without seed."""
    name, cell_row, cell_column = experiment.source(row, column)
    return Cell(name, cell_row, cell_column, _owner(experiment, name).scale(scale), None, overrides)


def required_cells(experiment: Experiment, scale: str, overrides: Overrides = ()) -> list[Cell]:
    """The cells whose numbers the experiment shows, column by column, each once."""
    places = itertools.product(experiment.columns, experiment.rows)
    cells = (_seeded(experiment, row, column, scale, overrides) for column, row in places)
    return list(dict.fromkeys(itertools.chain.from_iterable(cells)))


def _seeded(experiment: Experiment, row: str, column: str, scale: str, overrides: Overrides) -> list[Cell]:
    """The cells of a number, one for each seed; none if it is not needed."""
    cell = source(experiment, row, column, scale, overrides)
    maker = _owner(experiment, cell.experiment).cells[cell.row]
    if isinstance(maker, Computation):
        return [cell]
    declared = (experiment.columns[column].seeds or experiment.seeds).get(scale, (0,))
    return [cell._replace(seed=seed) for seed in declared] if is_needed(maker, cell) else []


def is_needed(maker: Training | Computation, cell: Cell) -> bool:
    """Whether no finished cells show that this one is not needed."""
    return not isinstance(maker, Training) or not isinstance(_declared(maker, cell, _options), NotNeeded)


def finished(results: Path, experiment: Experiment, scale: str, overrides: Overrides = ()) -> dict:
    """(row, column) of the table -> its finished cells, one per seed; a UserError names a damaged line."""
    cells = {}
    for row, column in itertools.product(experiment.rows, experiment.columns):
        done = [one for one in _seeded(experiment, row, column, scale, overrides) if is_finished(one, results)]
        if runs := [kept(results, one) for one in done]:
            cells[row, column] = runs
    return cells


def is_finished(cell: Cell, results: Path) -> bool:
    """Whether the cell is there and, if it is trained, was made with what is declared now."""
    content = read(results, cell)
    if content is None:
        return False
    try:
        now = declaration(cell)
    except NotYet:  # what is declared depends on cells that are not finished
        return False
    return _ordered(content.get("declared", now)) == _ordered(now)


def _ordered(declaration: Mapping[str, Any]) -> tuple[Any, str]:
    """A declaration for comparison: strategies have an order, other keys none."""
    return declaration, json.dumps(declaration.get("options", {}).get("strategies"))


def declaration(cell: Cell) -> dict[str, Any]:
    """What a table declares of a trained cell: the keys of its run, with its file of options, and a study's arguments.

    Raises:
        NotYet: it depends on cells that are not finished.
    """
    training = experiments()[cell.experiment].cells[cell.row]
    if isinstance(training, Computation):
        return {}
    return _raised(_declared(training, cell, _whole_declaration))


def declared_keys(training: Training, cell: Cell) -> Mapping[str, Any]:
    """The options that a table declares of a cell, without seed; NotYet or NotNeeded as its functions raise them."""
    return _raised(_declared(training, cell, _options))


def _raised(found: Any) -> Any:
    if isinstance(found, UserError):
        raise found.with_traceback(None)
    return found


def _declared(training: Training, cell: Cell, read_off: Callable[..., Any]) -> Any:
    """`read_off(training, row, column, scale)`, or the error that it raised; once for each state of the results."""
    status = RESULTS.stat() if RESULTS.is_dir() else None  # a folder changes when a file in it is replaced
    state = str(RESULTS), _written, status and (status.st_ino, status.st_mtime_ns)
    return _once(read_off, training, cell.row, cell.column, cell.scale, state)


@functools.lru_cache(maxsize=50_000)
def _once(read_off: Callable[..., Any], training: Training, row: str, column: str, scale: str, state: Any) -> Any:
    try:
        return read_off(training, row, column, scale)
    except (NotYet, NotNeeded) as error:
        return error


def _options(training: Training, row: str, column: str, scale: str) -> Mapping[str, Any]:
    return training.options(row, column, scale)


def _whole_declaration(training: Training, row: str, column: str, scale: str) -> dict[str, Any]:
    options = dict(training.options(row, column, scale))
    config = _options_of_file(options.pop("config")) if "config" in options else {}
    keys = {key: value for key, value in merged([config, options]).items() if key.partition(".")[0] != "tracking"}
    arguments = getattr(training.study or training.recorder, "keywords", {})
    return json.loads(json.dumps(_short({"options": keys, "arguments": arguments})))


@functools.cache  # thousands of cells name one file
def _options_of_file(path: str) -> dict[str, Any]:
    return read_yaml(path)


def missing_cells(cells: Sequence[Cell], results: Path) -> list[Cell]:
    return [cell for cell in cells if not is_finished(cell, results)]


def _owner(experiment: Experiment, name: str) -> Experiment:
    return experiment if name == experiment.name else experiments()[name]


# ---- files


def read(results: Path, cell: Cell) -> dict[str, Any] | None:
    """The content of a cell, whatever was declared when it was made; None if it is not there.

    Raises:
        UserError: a line of its file is damaged.
    """
    return contents(results, cell.experiment).get(cell.place)


def kept(results: Path, cell: Cell) -> dict[str, Any]:
    """The content of a cell that is there."""
    content = read(results, cell)
    assert content is not None, cell
    return content


def contents(results: Path, experiment: str) -> Mapping[Path, dict[str, Any]]:
    """The contents of all cells in the file of an experiment, by their places."""
    path = file_of(results, experiment)
    try:
        status = path.stat()
    except FileNotFoundError:
        return {}
    return _contents(path.absolute(), (status.st_ino, status.st_mtime_ns, status.st_size))


@functools.lru_cache(maxsize=128)  # more than there are tables
def _contents(path: Path, version: tuple[int, ...]) -> Mapping[Path, dict[str, Any]]:
    """The cells of a file, which is read again when it has another version."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    return dict(_parsed(line, f"{path}:{number}") for number, line in lines)


def _parsed(line: str, where: str) -> tuple[Path, dict[str, Any]]:
    try:
        content = json.loads(line)
        if isinstance(content["values"], dict) and isinstance(content["seconds"], int | float):
            names = [content[name] for name in Cell._fields[:-1]]
            return Cell._make([*names, tuple(content["overrides"].items())]).place, content
        reason = "it has no values or no seconds"
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        reason = repr(error)
    raise UserError(f"`{where}` must be a finished cell, got a line with: {reason}. Delete it to make the cell again.")


def write(results: Path, cell: Cell, content: Mapping[str, Any]) -> Path:
    """Write the line of a finished cell, in place of an older one; several processes may do so at once."""
    from dpfl_lightning.runtime.files import locked_folder, write_text

    results.mkdir(parents=True, exist_ok=True)
    path = file_of(results, cell.experiment)
    global _written
    whole = _short({**cell._asdict(), "overrides": dict(cell.overrides), **content})
    with locked_folder(results):
        cells = {**contents(results, cell.experiment), cell.place: whole}
        _written += 1
        return write_text(path, "".join(f"{json.dumps(cells[place])}\n" for place in sorted(cells)))


def file_of(results: Path, experiment: str) -> Path:
    """The file of the cells of an experiment."""
    return results / f"{experiment}.jsonl"


def circumstances(device: str, code: str) -> dict[str, Any]:
    """Date, kind of machine, versions and the code that made a cell; names neither machine nor user."""
    import torch

    from dpfl_lightning.runtime.threads import cores

    processor = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    libraries = {library: version(library) for library in ("torch", "numpy", "opacus")}
    return {
        "machine": {"processor": processor, "cores": cores(), "device": device},
        "versions": {"dpfl_lightning": dpfl_lightning.__version__, "python": platform.python_version(), **libraries},
        "commit": code,
        "date": datetime.date.today().isoformat(),
    }


@functools.cache
def package_digest() -> str:
    """SHA-256 of the Python files of the package, as they were at the first call."""
    digest, folder = hashlib.sha256(), Path(dpfl_lightning.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def code_version() -> str:
    """The commit of the working directory, with `+` if code differs from it; empty without git or a repository."""
    from dpfl_lightning.reporting.description import commit

    if not (found := commit()):
        return ""
    code = ["git", "status", "--porcelain", "--", "dpfl_lightning", "experiments/*.py", "conf"]
    return found + "+" * bool(subprocess.run(code, capture_output=True, text=True, timeout=30).stdout)


def _short(value: Any) -> Any:
    """Numbers to nine digits, None for infinite ones and NaN."""
    if isinstance(value, Mapping):
        return {name: _short(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value
