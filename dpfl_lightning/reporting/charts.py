"""Charts of a report: lines and points as data, drawn by matplotlib as SVG, with the values as a table."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.ticker import MaxNLocator

from dpfl_lightning.reporting.figures import missing_letters_allowed, new_axes

_MOST_ROWS = 200  # of values below a chart
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dpfl_lightning",  # equal charts are equal files
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,  # names of runs are no formulas
}


@dataclass(frozen=True)
class Series:
    """Points of a chart, joined by a line unless `joined` is false.

    Args:
        std: half the width of the band around the line, for each point; empty: no band.
        labels: what each point is; empty: its place alone says it.
        marked: whether each point stands out; empty: none does.
    """

    name: str
    x: Sequence[Any]
    y: Sequence[float]
    std: Sequence[float] = ()
    labels: Sequence[str] = ()
    marked: Sequence[bool] = ()
    joined: bool = True


@dataclass(frozen=True)
class Chart:
    """A chart with the titles of its axes."""

    title: str
    x: str
    y: str
    series: Sequence[Series] = field(default_factory=list)

    def image(self, colours: Mapping[str, str]) -> str:
        """Return the chart as SVG in base64, with the colour of each series by its name.

        A legend names the series if charts of the page have several.
        """
        with matplotlib.rc_context(_STYLE), missing_letters_allowed():
            figure, axes = new_axes("", self.x, self.y)
            figure.set_size_inches(6.6, 3.7)
            for one in self.series:
                self._draw(axes, one, colours[one.name])
            if all(isinstance(x, int) for one in self.series for x in one.x):  # such as rounds
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if len(colours) > 1:
                figure.legend(loc="outside lower left", ncols=3, frameon=False)
            buffer = io.BytesIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return base64.b64encode(buffer.getvalue()).decode()

    def _draw(self, axes: Any, one: Series, colour: str) -> None:
        if one.joined:
            axes.plot(one.x, one.y, color=colour, marker="o", markersize=3, linewidth=1.4, label=one.name)
        else:
            edges = ["black" if marked else "none" for marked in one.marked] or "none"
            axes.scatter(one.x, one.y, 36, color=colour, edgecolors=edges, alpha=0.75, label=one.name)
        if one.std:
            pairs = list(zip(one.y, one.std, strict=True))
            axes.fill_between(one.x, [y - s for y, s in pairs], [y + s for y, s in pairs], color=colour, alpha=0.2)

    def rows(self, several: bool) -> list[dict[str, str]]:
        """Return the values as rows of a table, the last ones of many; `several` series have names."""
        rows = []
        for one in self.series:
            for place, (x, y) in enumerate(zip(one.x, one.y, strict=True)):
                row = {"run": one.name} if several else {}
                row |= {"": one.labels[place]} if one.labels else {}
                row |= {self.x: _text(x), self.y: _text(y)}
                rows.append(row | ({"±": _text(one.std[place])} if one.std else {}))
        return rows[-_MOST_ROWS:]


def _text(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
