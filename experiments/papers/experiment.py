"""The parts of an experiment: rows, columns, the paper's numbers, and how each cell is made. It imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dpfl_lightning.errors import UserError, nearest, require

if TYPE_CHECKING:
    from experiments.papers.recorder import Recorder

T = TypeVar("T")

#: `{name: number or list of numbers}`, the values of a finished cell
Values = Mapping[str, Any]
#: (row, column) -> the contents of the finished cells of all seeds
Cells = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


class NotYet(UserError):
    """The options of a cell follow from other cells, which are not finished."""


class NotNeeded(UserError):
    """Finished cells show that a cell need not be made."""


@dataclass(frozen=True)
class Training:
    """A cell that is one run of `fit`, read by a recorder (None: `Recorder`), or a study with the run's data and model.

    Args:
        options: `options(row, column, scale)`: dotted keys of the run without seed, and `config`, a file of options.
        study: makes the cell from a `CellContext` and returns `values` and other keys of the file.
    """

    options: Callable[[str, str, str], Mapping[str, Any]]
    recorder: Callable[[], Recorder] | None = None
    study: Callable[[Any], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Computation:
    """A cell without data and seed, `compute(column) -> values`."""

    compute: Callable[[str], Values]


@dataclass(frozen=True)
class Row:
    """A line of numbers: `value` of the cells of `experiment`, row `cell` and `column`; None is the row's own.

    `elsewhere` is column -> the fields of the row that differ there.
    """

    title: str
    value: str = "accuracy"
    cell: str | None = None
    experiment: str | None = None
    column: str | None = None
    elsewhere: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """A setting. `seeds`, scale -> seeds of the cells of this column, replaces that of their table."""

    title: str
    seeds: Mapping[str, Sequence[int]] = field(default_factory=dict)


class Tolerance(NamedTuple):
    """The allowed distance from the paper's number (None: not compared), and why it is special."""

    within: float | None
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """How our numbers are compared with the paper's.

    Args:
        relative: differences and tolerances are shares of the paper's number.
        better: `higher` or `lower`, and the report names the best row of a column; a mapping row -> one of these if
            rows hold several quantities, of which none is then the best.
        special: (row, column) -> the tolerance of that cell; column "" is the whole row.
    """

    tolerance: float
    relative: bool = False
    better: str | Mapping[str, str] = ""
    special: Mapping[tuple[str, str], Tolerance] = field(default_factory=dict)

    def difference(self, ours: float, paper: float) -> float:
        return (ours - paper) / paper if self.relative else ours - paper

    def of(self, row: str, column: str) -> Tolerance:
        return self.special.get((row, column)) or self.special.get((row, ""), Tolerance(self.tolerance))

    def holds(self, row: str, column: str, ours: float, paper: float) -> bool:
        """Whether our number is within the tolerance, to either side."""
        within = self.of(row, column).within
        return within is None or abs(self.difference(ours, paper)) <= within

    def improves(self, row: str, difference: float) -> bool:
        """Whether a difference from the paper's number is to the better side."""
        better = self.better if isinstance(self.better, str) else self.better.get(row, "")
        return {"higher": difference > 0, "lower": difference < 0}.get(better, False)


@dataclass(frozen=True)
class Experiment:
    """A table, `paper.table`.

    Args:
        shows: what its numbers are, with the unit.
        cells: row of cells -> how they are made.
        scales: name -> description, for example "60 rounds"; the first one is the default.
        paper: row -> the paper's number for each column, or None.
        seeds: scale -> its seeds; other scales have seed 0.
        minutes: scale -> guess for one cell on two cores, until a finished one exists.
        ours, rivals: rows; with rivals a report has paired differences to ours and the best rival.
        upper_bounds: row -> rows that it cannot be below if all are tuned; where it is, the table has no verdict.
        summary: Markdown of what follows from many cells together.
    """

    name: str
    title: str
    shows: str
    rows: Mapping[str, Row]
    columns: Mapping[str, Column]
    cells: Mapping[str, Training | Computation]
    scales: Mapping[str, str]
    paper: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    comparison: Comparison | None = None
    seeds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    minutes: Mapping[str, float] = field(default_factory=dict)
    decimals: int = 2
    ours: str = ""
    rivals: Sequence[str] = ()
    upper_bounds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    summary: Callable[[Experiment, Cells], str] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row, numbers in self.paper.items():
            assert row in self.rows and len(numbers) == len(self.columns), f"{self.name}: the paper's {row}"
        sources = [self.source(row, column) for row in self.rows for column in self.columns]
        missing = {row for name, row, _ in sources if name == self.name} - set(self.cells)
        assert not missing, f"{self.name}: how are the cells of {missing} made?"

    def source(self, row: str, column: str) -> tuple[str, str, str]:
        """(experiment, row, column) of the cell that holds a number of this table."""
        line = self.rows[row]
        line = dataclasses.replace(line, **line.elsewhere.get(column, {}))
        return line.experiment or self.name, line.cell or row, line.column or column

    def paper_number(self, row: str, column: str) -> float | None:
        return self.paper[row][list(self.columns).index(column)] if row in self.paper else None

    def scale(self, name: str | None) -> str:
        """A scale by its name (a UserError if there is none); the first one for None, and if there is only one."""
        known = list(self.scales)
        if name is None or len(known) == 1:
            return known[0]
        if name not in known:
            require(False, "--scale", f"be one of {', '.join(known)} for {self.name}", name, nearest(name, known))
        return name

    def restricted(
        self, rows: Sequence[str] | None, columns: Sequence[str] | None, seeds: Sequence[int] | None = None
    ) -> Experiment:
        """The same experiment with some rows and columns only, or other seeds; a UserError names one that it lacks."""
        lines = self._some("--rows", rows, self.rows)
        settings = self._some("--columns", columns, self.columns)
        paper = {row: [self.paper_number(row, column) for column in settings] for row in self.paper if row in lines}
        of_scale = self.seeds if seeds is None else dict.fromkeys(self.scales, tuple(seeds))
        if seeds is not None:
            settings = {name: dataclasses.replace(column, seeds={}) for name, column in settings.items()}
        bounds = {
            bound: [row for row in others if row in lines]
            for bound, others in self.upper_bounds.items()
            if bound in lines
        }
        return dataclasses.replace(self, rows=lines, columns=settings, paper=paper, seeds=of_scale, upper_bounds=bounds)

    def _some(self, key: str, names: Sequence[str] | None, known: Mapping[str, T]) -> dict[str, T]:
        for name in names or ():
            if name not in known:
                must = f"be some of {', '.join(known)} for {self.name}"
                require(False, key, must, name, nearest(name, known))
        return {name: entry for name, entry in known.items() if names is None or name in names}
