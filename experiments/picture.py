"""`python -m experiments.picture`: draw the picture of README.md from the finished cells of the leaderboard.

`python -m experiments.papers leaderboard` makes the cells.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from dpfl_lightning.config.published import EPSILONS
from dpfl_lightning.errors import command
from experiments.papers.cells import finished
from experiments.papers.experiment import Cells, Experiment
from experiments.papers.registry import experiments

ROOT = Path(__file__).parents[1]
_COLUMNS = {"dist1": "o", "dist5": "s", "dist9": "^"}  # column -> marker
_LEFT_OUT = {"fedavg", "uniform", "groups"}  # no budget; equal to DPFedAvg; for clients in groups
_SEEDS = 3


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "experiments" / "results")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "strategies.svg")
    known = parser.parse_args(argv)
    table = experiments()["leaderboard.accuracy"]
    cells = finished(known.results, table, "small")
    figure = _figure(table, {place: made for place, made in cells.items() if len(made) == _SEEDS})
    with rc_context({"svg.hashsalt": "dpfl_lightning", "svg.fonttype": "none"}):  # equal figures give equal bytes
        figure.savefig(known.picture, metadata={"Date": None})
    return 0


def _figure(table: Experiment, cells: Cells) -> Figure:
    figure = Figure(figsize=(6, 4.2), layout=ConstrainedLayoutEngine(w_pad=0.2))  # text is legible at 400 pixels
    axes = figure.subplots()
    rows = [row for row in table.rows if row not in _LEFT_OUT]
    shown = [row for row in rows if any((row, column) in cells for column in _COLUMNS)]
    seeds = {place: [run["values"]["accuracy"] for run in made] for place, made in cells.items()}
    shown.sort(key=lambda row: -fmean(seeds.get((row, "dist1"), [0.0])))
    for column, marker in _COLUMNS.items():
        places = [place for place, row in enumerate(shown) if (row, column) in cells]
        means, errors = ([of(seeds[shown[place], column]) for place in places] for of in (fmean, _standard_error))
        epsilons = EPSILONS[column][20]
        label = f"{min(epsilons)} to {max(epsilons)}"
        axes.errorbar(means, places, xerr=errors, fmt=marker, markersize=6, elinewidth=1.5, label=label)
    axes.set_yticks(range(len(shown)), [table.rows[row].title.replace(" and ", "\nand ") for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("accuracy on the test set, percent")
    title = "epsilon of the 20 clients"
    figure.legend(ncols=len(_COLUMNS), title=title, loc="outside upper center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5


if __name__ == "__main__":
    raise SystemExit(main())
