"""`python -m experiments.picture`: draw the picture of README.md from the finished cells of `federations.accuracy`.

`python -m experiments.papers federations` makes the cells.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from dpfl_lightning.errors import command, require
from experiments.papers.cells import finished
from experiments.papers.experiment import Cells, Experiment
from experiments.papers.federations.rates import differences_to_best
from experiments.papers.registry import experiments

ROOT = Path(__file__).parents[1]
_MARKERS = "os^Dv"  # of the federations


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "experiments" / "results")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "strategies.svg")
    known = parser.parse_args(argv)
    table = experiments()["federations.accuracy"]
    figure = _figure(table, finished(known.results, table, "small"))
    with rc_context({"svg.hashsalt": "dpfl_lightning", "svg.fonttype": "none"}):  # equal figures give equal bytes
        figure.savefig(known.picture, metadata={"Date": None})
    return 0


def _figure(table: Experiment, cells: Cells) -> Figure:
    figure = Figure(figsize=(6, 4.2), layout=ConstrainedLayoutEngine(w_pad=0.2))  # text is legible at 400 pixels
    axes = figure.subplots()
    best, differences = differences_to_best(table, cells)
    require(bool(best), table.name, "have a column with cells of all rules", None, "Make them first.")
    below = {row: [-fmean(differences[row, column]) for column in best] for row in table.rows}
    shown = sorted(table.rows, key=lambda row: max(below[row]))
    for number, (column, marker) in enumerate(zip(best, _MARKERS, strict=False)):
        axes.plot(
            [below[row][number] for row in shown],
            range(len(shown)),
            marker,
            markersize=7,
            label=table.columns[column].title,
            clip_on=False,
        )
    axes.set_yticks(range(len(shown)), [table.rows[row].title.replace(" and ", "\nand ") for row in shown])
    axes.invert_yaxis()
    axes.invert_xaxis()
    axes.set_xlim(right=0)
    axes.set_xlabel("points of accuracy below the best rule of a federation")
    figure.legend(ncols=3, loc="outside upper center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
