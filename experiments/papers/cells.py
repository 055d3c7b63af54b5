"""Finished cells: one JSON file each, found by experiment, row, column, scale and seed."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import dpfl_lightning
from dpfl_lightning.errors import UserError
from experiments.papers.experiment import Beside, Computation, Experiment
from experiments.papers.registry import experiments

#: where cells are kept, below the working directory
RESULTS = Path("experiments/results")

Departures = tuple[tuple[str, str], ...]


class Cell(NamedTuple):
    """What is made once.

    Args:
        experiment: that declares how.
        row: of cells (`Row.cell`).
        column: of the experiment.
        scale: of the experiment.
        seed: None where nothing is drawn.
        departures: (key, text) of the options that the user set otherwise than the declaration, sorted.
    """

    experiment: str
    row: str
    column: str
    scale: str
    seed: int | None = None
    departures: Departures = ()

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
        return Path(self.experiment) / variant(self.scale, self.departures) / f"{self.column}_{self.row}{seed}"


def variant(scale: str, departures: Departures) -> str:
    """The folder of a scale, with what the user set otherwise."""
    name = "+".join([scale, *(f"{key}={quote(text, safe=',')}" for key, text in departures)])
    return name if len(name) <= 120 else f"{name[:100]}...{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def source(experiment: Experiment, row: str, column: str, scale: str, departures: Departures = ()) -> Cell:
    """The cell of a number, without seed."""
    name, own_row, own_column = experiment.source(row, column)
    return Cell(name, own_row, own_column, _owner(experiment, name).scale(scale), None, departures)


def wanted(experiment: Experiment, scale: str, seeds: Sequence[int] | None, departures: Departures = ()) -> list[Cell]:
    """The cells whose numbers the experiment shows, column by column, each once.

    Args:
        seeds: None takes the declaration's.
    """
    seeds = experiment.seeds.get(scale, (0,)) if seeds is None else seeds
    cells: dict[Cell, None] = {}
    for column in experiment.columns:
        for row in experiment.rows:
            cell = source(experiment, row, column, scale, departures)
            other = experiment.rows[row].beside
            for seed in (None,) if _computed(experiment, cell) else seeds:
                cells[cell._replace(seed=seed)] = None
                if other is not None:
                    cells[_beside(experiment, other, cell._replace(seed=seed))] = None
    return list(cells)


def _beside(experiment: Experiment, other: Beside, cell: Cell) -> Cell:
    """The other cell that one is read together with."""
    scale = _owner(experiment, other.experiment).scale(cell.scale)
    return cell._replace(experiment=other.experiment, row=other.row, column=other.column, scale=scale)


def finished(results: Path, experiment: Experiment, scale: str, departures: Departures = ()) -> dict:
    """(row, column) of the table -> its finished cells, one for each seed there is; numbers without any are absent.

    Raises:
        UserError: a file that is none of ours.
    """
    found = {}
    for row in experiment.rows:
        for column in experiment.columns:
            cell = source(experiment, row, column, scale, departures)
            seeds = [None] if _computed(experiment, cell) else _seeds_of(path_of(results, cell))
            cells = [cell._replace(seed=seed) for seed in seeds]
            held = [_held(results, experiment, row, one) for one in cells if path_of(results, one).is_file()]
            if held:
                found[row, column] = held
    return found


def _held(results: Path, experiment: Experiment, row: str, cell: Cell) -> dict[str, Any]:
    """A finished cell, with the values that follow from the one beside it if that is finished, too."""
    own = read(path_of(results, cell))
    if (other := experiment.rows[row].beside) is None:
        return own
    path = path_of(results, _beside(experiment, other, cell))
    return {**own, "values": {**own["values"], **other.values(own, read(path))}} if path.is_file() else own


def missing_files(cells: Sequence[Cell], results: Path) -> list[Cell]:
    """Those that are not finished."""
    return [cell for cell in cells if not path_of(results, cell).is_file()]


def _owner(experiment: Experiment, name: str) -> Experiment:
    return experiment if name == experiment.name else experiments()[name]


def _computed(experiment: Experiment, cell: Cell) -> bool:
    return isinstance(_owner(experiment, cell.experiment).cells[cell.row], Computation)


def _seeds_of(path: Path) -> list[int]:
    """The seeds of which there are files beside `path`, that of no seed."""
    ends = (re.fullmatch(rf"{re.escape(path.stem)}_seed(\d+)\.json", one.name) for one in path.parent.glob("*.json"))
    return sorted(int(end[1]) for end in ends if end)


def read(path: Path) -> dict[str, Any]:
    """A finished cell.

    Raises:
        UserError: the file is damaged or none of ours.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(held.get("values"), dict) and isinstance(held.get("seconds"), int | float):
            return held
        reason = "it has no values or no seconds"
    except (OSError, ValueError, AttributeError) as error:
        reason = str(error)
    raise UserError(f"`{path}` must be a finished cell, got a file with: {reason}. Delete it to make the cell again.")


def write(results: Path, cell: Cell, held: Mapping[str, Any]) -> Path:
    """Keep a finished cell; a crash leaves the old file or the new one."""
    from dpfl_lightning.runtime.files import write_atomically

    path = path_of(results, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {**cell._asdict(), "departures": dict(cell.departures), **held}
    return write_atomically(path, lambda partial: partial.write_text(_json(whole), encoding="utf-8"))


def path_of(results: Path, cell: Cell) -> Path:
    """Its file, there or not."""
    path = results / cell.place
    return path.with_name(f"{path.name}.json")


def circumstances(device: str) -> dict[str, Any]:
    """When, on what kind of machine and with which versions a cell was made; names neither machine nor user."""
    import torch

    from dpfl_lightning.runtime.threads import cores

    return {
        "machine": {
            "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
            "cores": cores(),
            "device": device,
        },
        "versions": {
            "dpfl_lightning": dpfl_lightning.__version__,
            "python": platform.python_version(),
            **{library: version(library) for library in ("torch", "numpy", "opacus")},
        },
        "date": datetime.date.today().isoformat(),
    }


def _json(whole: Mapping[str, Any]) -> str:
    """One line for each key, and one for each key within a mapping."""
    lines = []
    for key, value in _short(whole).items():
        text = json.dumps(value)
        if isinstance(value, dict) and len(text) > 100:
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in value.items())
            text = f"{{\n{inner}\n }}"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _short(value: Any) -> Any:
    """Numbers to nine digits, None for those that JSON has not."""
    if isinstance(value, Mapping):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value
