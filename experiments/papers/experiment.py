"""What a table or figure of a paper is: rows, columns, the paper's numbers, and how each cell is made.

Declarations are data: they import neither torch nor matplotlib, and a new paper needs no other code than its own
declarations (`example.py` is the smallest).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dpfl_lightning.errors import nearest, require

if TYPE_CHECKING:
    from experiments.papers.recorder import Recorder

T = TypeVar("T")

#: `{name: number or list of numbers}`, what a finished cell came to
Values = Mapping[str, Any]
#: (row, column) -> the finished cells of all seeds, as their files hold them
Found = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Training:
    """A cell that is one run of `fit`, or a study with the data and the net of its options.

    Args:
        words: `words(row, column, scale)`, arguments of `python -m dpfl_lightning.fit` without seed, as a person types
            them.
        recorder: makes the watcher that reads the cell's values off the run; None: accuracies, see `Recorder`.
        study: makes the cell from a `Making`, in place of that run, or from it and more: `values` and the rest.
    """

    words: Callable[[str, str, str], Sequence[str]]
    recorder: Callable[[str, str], Recorder] | None = None
    study: Callable[[Any], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Computation:
    """A cell that is computed in seconds, without data and without seed.

    Args:
        compute: `compute(column, departures) -> values`.
        takes: keys that a user may set for it, such as privacy.accountant.
    """

    compute: Callable[[str, Mapping[str, str]], Values]
    takes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Beside:
    """A second cell that a row's numbers need, such as a reference: of the same scale, seed and departures.

    Args:
        experiment: whose cell it is.
        row: of cells.
        column: of cells.
        values: `values(own, beside)` -> further values of the row's cell, from what both files hold.
    """

    experiment: str
    row: str
    column: str
    values: Callable[[Mapping[str, Any], Mapping[str, Any]], Values]


@dataclass(frozen=True)
class Row:
    """A line of numbers, all read off one kind of cell.

    Args:
        title: what the table calls it.
        value: which of the cell's values it shows.
        cell: whose cells they are; None is the row's own. Rows that read different values of the same cells share it.
        experiment: that has these cells; None is the row's own.
        beside: the other cell that each of them is read together with.
        column: of the cells, for a row that reads the same one in every column because settings do not touch it.
    """

    title: str
    value: str = "accuracy"
    cell: str | None = None
    experiment: str | None = None
    beside: Beside | None = None
    column: str | None = None


@dataclass(frozen=True)
class Column:
    """A setting. Another experiment's column may hold its cells, as when two tables show the same run."""

    title: str
    cell: str | None = None
    experiment: str | None = None


def as_words(options: Mapping[str, str]) -> list[str]:
    """Options of `fit` as a person types them."""
    return [word for key, text in options.items() for word in (f"--{key}", text)]


class Tolerance(NamedTuple):
    """How far from the paper's a number may be, and why if that is special; `within` None is not compared."""

    within: float | None
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """How ours is held to the paper's.

    Args:
        tolerance: of every cell, >= 0.
        relative: differences and tolerances are shares of the paper's number instead of in its unit.
        better: `higher` or `lower`: a number that is better than the paper's by more is fine, too, and the best row of
            a column is told; empty: neither. Row -> one of these, where rows are numbers of several kinds: nobody is
            best then.
        special: (row, column) -> the tolerance of that cell; column "" is all of the row's.
    """

    tolerance: float
    relative: bool = False
    better: str | Mapping[str, str] = ""
    special: Mapping[tuple[str, str], Tolerance] = field(default_factory=dict)

    def difference(self, ours: float, paper: float) -> float:
        """Ours - the paper's, or that as a share of the paper's."""
        return (ours - paper) / paper if self.relative else ours - paper

    def of(self, row: str, column: str) -> Tolerance:
        """The tolerance of a cell."""
        return self.special.get((row, column)) or self.special.get((row, ""), Tolerance(self.tolerance))

    def holds(self, row: str, column: str, ours: float, paper: float) -> bool:
        """Whether ours is within the tolerance, or better."""
        difference = self.difference(ours, paper)
        better = self.better if isinstance(self.better, str) else self.better.get(row, "")
        beyond = {"higher": difference > 0, "lower": difference < 0}.get(better, False)
        return beyond or self.near(row, column, difference)

    def near(self, row: str, column: str, difference: float) -> bool:
        """Whether a difference is within the tolerance, to either side."""
        within = self.of(row, column).within
        return within is None or abs(difference) <= within


@dataclass(frozen=True)
class Panel:
    """One picture of a figure, as data.

    Args:
        title: above it.
        x: label of the horizontal axis; `y` of the vertical one.
        series: name -> points (x, y) or (x, y, half height of the band around y); x are words where `kind` is bars.
        kind: lines, points, or bars (side by side for each x).
        log: axes with a logarithmic scale: "", "x", "y" or "xy".
    """

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple]]
    kind: str = "lines"
    log: str = ""


@dataclass(frozen=True)
class Experiment:
    """A table or figure.

    Args:
        name: `paper.table`, what a person types.
        title: which table or figure, and of what; a few words.
        shows: what its numbers are, with the unit.
        rows: name -> row.
        columns: name -> column.
        cells: row's name -> how that row's cells are made; rows that only read other cells have none.
        scales: name -> what it means, for example "60 rounds"; the first one is the default.
        paper: row's name -> the paper's number for each column, None where it has none.
        comparison: of ours and the paper's; None where the paper's numbers cannot be compared.
        seeds: scale -> its seeds; others have seed 0.
        minutes: scale -> guess for one cell on two cores, until a finished one tells.
        decimals: of the numbers that are shown.
        shown: whether it is a table; a figure without numbers of its own is not.
        draw: the figure's panels from the cells found; None is no figure.
        summary: Markdown of what follows from many cells together, such as a rank correlation; empty where there are
            too few. None is none.
        notes: what a reader must know, one sentence each.
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
    shown: bool = True
    draw: Callable[[Found], Sequence[Panel]] | None = None
    summary: Callable[[Found], str] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row, numbers in self.paper.items():
            assert row in self.rows and len(numbers) == len(self.columns), f"{self.name}: the paper's {row}"
        own = {self.source(row, column)[1] for row in self.rows for column in self.columns if self.owns(row, column)}
        assert own <= set(self.cells), f"{self.name}: how are the cells of {own - set(self.cells)} made?"

    def source(self, row: str, column: str) -> tuple[str, str, str]:
        """(experiment, row, column) of the cell in which a number of this table stands."""
        line, setting = self.rows[row], self.columns[column]
        where = line.column or setting.cell or column
        return line.experiment or setting.experiment or self.name, line.cell or row, where

    def owns(self, row: str, column: str) -> bool:
        """Whether that cell is its own."""
        return self.source(row, column)[0] == self.name

    def reference(self, row: str, column: str) -> float | None:
        """The paper's number."""
        return self.paper[row][list(self.columns).index(column)] if row in self.paper else None

    def scale(self, name: str | None) -> str:
        """A scale by its name, the default for None or where there is only one.

        Raises:
            UserError: there is no such scale.
        """
        known = list(self.scales)
        if name is None or len(known) == 1:
            return known[0]
        require(name in known, "--scale", f"be one of {', '.join(known)} for {self.name}", name, nearest(name, known))
        return name

    def restricted(self, rows: Sequence[str] | None, columns: Sequence[str] | None) -> Experiment:
        """The same with some rows and columns only.

        Raises:
            UserError: it has no such row or column.
        """
        lines = self._some("--rows", rows, self.rows)
        settings = self._some("--columns", columns, self.columns)
        places = [list(self.columns).index(name) for name in settings]
        paper = {row: [numbers[i] for i in places] for row, numbers in self.paper.items() if row in lines}
        return dataclasses.replace(self, rows=lines, columns=settings, paper=paper)

    def _some(self, key: str, names: Sequence[str] | None, known: Mapping[str, T]) -> dict[str, T]:
        for name in names or ():
            must = f"be some of {', '.join(known)} for {self.name}"
            require(name in known, key, must, name, nearest(name, known))
        return {name: one for name, one in known.items() if names is None or name in names}
