"""Finished cells: one JSON file each, found by experiment, row, column, scale and seed."""

import datetime
import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import dpfl_lightning
from dpfl_lightning.errors import UserError
from experiments.papers.experiment import Computation, Experiment, Reference
from experiments.papers.registry import experiments

#: where cells are kept, below the working directory
RESULTS = Path("experiments/results")

Overrides = tuple[tuple[str, str], ...]


class Cell(NamedTuple):
    """One run, study or computation.

    Args:
        row: row of cells (`Row.cell`).
        seed: None if nothing is random.
        overrides: (key, text) of the options that the user set, sorted.
    """

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
        """Its file below the results' folder, without suffix.

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


def required_cells(
    experiment: Experiment, scale: str, seeds: Sequence[int] | None, overrides: Overrides = ()
) -> list[Cell]:
    """The cells whose numbers the experiment shows, column by column, each once; by default of the declared seeds."""
    seeds = experiment.seeds.get(scale, (0,)) if seeds is None else seeds
    cells: dict[Cell, None] = {}
    for column in experiment.columns:
        for row, line in experiment.rows.items():
            cell = source(experiment, row, column, scale, overrides)
            for seed in (None,) if _computed(experiment, cell) else seeds:
                cells[cell._replace(seed=seed)] = None
                if line.reference is not None:
                    cells[_reference_cell(experiment, line.reference, cell._replace(seed=seed))] = None
    return list(cells)


def _reference_cell(experiment: Experiment, reference: Reference, cell: Cell) -> Cell:
    scale = _owner(experiment, reference.experiment).scale(cell.scale)
    return cell._replace(experiment=reference.experiment, row=reference.row, column=reference.column, scale=scale)


def finished(results: Path, experiment: Experiment, scale: str, overrides: Overrides = ()) -> dict:
    """(row, column) of the table -> its finished cells, one per seed.

    Raises:
        UserError: a file is not a finished cell.
    """
    cells = {}
    for row in experiment.rows:
        for column in experiment.columns:
            cell = source(experiment, row, column, scale, overrides)
            seeds = [None] if _computed(experiment, cell) else _seeds_of(path_of(results, cell))
            places = [cell._replace(seed=seed) for seed in seeds]
            made = [one for one in places if path_of(results, one).is_file()]
            if runs := [_read_with_reference(results, experiment, row, one) for one in made]:
                cells[row, column] = runs
    return cells


def _read_with_reference(results: Path, experiment: Experiment, row: str, cell: Cell) -> dict[str, Any]:
    """A finished cell, with the values that follow from its reference if that is finished, too."""
    content, reference = read(path_of(results, cell)), experiment.rows[row].reference
    other = None if reference is None else path_of(results, _reference_cell(experiment, reference, cell))
    if reference is None or other is None or not other.is_file():
        return content
    return {**content, "values": {**content["values"], **reference.values(content, read(other))}}


def missing_cells(cells: Sequence[Cell], results: Path) -> list[Cell]:
    return [cell for cell in cells if not path_of(results, cell).is_file()]


def _owner(experiment: Experiment, name: str) -> Experiment:
    return experiment if name == experiment.name else experiments()[name]


def _computed(experiment: Experiment, cell: Cell) -> bool:
    return isinstance(_owner(experiment, cell.experiment).cells[cell.row], Computation)


def _seeds_of(path: Path) -> list[int]:
    """The seeds whose files lie beside `path`, the path without seed."""
    seeds = (one.stem.removeprefix(f"{path.stem}_seed") for one in path.parent.glob(f"{path.stem}_seed*.json"))
    return sorted(int(seed) for seed in seeds if seed.isdecimal())


def read(path: Path) -> dict[str, Any]:
    """The content of a finished cell.

    Raises:
        UserError: the file is damaged or not a finished cell.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content.get("values"), dict) and isinstance(content.get("seconds"), int | float):
            return content
        reason = "it has no values or no seconds"
    except (OSError, ValueError, AttributeError) as error:
        reason = str(error)
    raise UserError(f"`{path}` must be a finished cell, got a file with: {reason}. Delete it to make the cell again.")


def write(results: Path, cell: Cell, content: Mapping[str, Any]) -> Path:
    """Write a finished cell atomically."""
    from dpfl_lightning.runtime.files import write_atomically

    path = path_of(results, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {**cell._asdict(), "overrides": dict(cell.overrides), **content}
    return write_atomically(path, lambda partial: partial.write_text(_json(whole), encoding="utf-8"))


def path_of(results: Path, cell: Cell) -> Path:
    """Its file, finished or not."""
    return results / f"{cell.place}.json"


def circumstances(device: str) -> dict[str, Any]:
    """Date, kind of machine and versions; names neither machine nor user."""
    import torch

    from dpfl_lightning.runtime.threads import cores

    processor = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    libraries = {library: version(library) for library in ("torch", "numpy", "opacus")}
    return {
        "machine": {"processor": processor, "cores": cores(), "device": device},
        "versions": {"dpfl_lightning": dpfl_lightning.__version__, "python": platform.python_version(), **libraries},
        "date": datetime.date.today().isoformat(),
    }


def _json(whole: Mapping[str, Any]) -> str:
    """One line for each key, and one for each key within a long mapping."""
    lines = []
    for key, value in _short(whole).items():
        text = json.dumps(value)
        if isinstance(value, dict) and len(text) > 100:
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
            text = f"{{\n{inner}\n }}"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _short(value: Any) -> Any:
    """Numbers to nine digits, None for infinite ones and NaN."""
    if isinstance(value, Mapping):
        return {name: _short(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value
