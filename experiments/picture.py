"""`python -m experiments.picture`: draw the picture of README.md from the finished cells of the leaderboard.

`python -m experiments.papers leaderboard` makes the cells.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from matplotlib import rc_context
from matplotlib.figure import Figure

from dpfl_lightning.config.published import EPSILONS
from dpfl_lightning.errors import command
from experiments.papers.cells import finished
from experiments.papers.experiment import Cells, Experiment
from experiments.papers.registry import experiments

ROOT = Path(__file__).parents[1]
_COLUMNS = ("dist1", "dist5", "dist9")
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
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    rows = [row for row in table.rows if row not in _LEFT_OUT]
    shown = [row for row in rows if any((row, column) in cells for column in _COLUMNS)]
    for column in _COLUMNS:
        places = [place for place, row in enumerate(shown) if (row, column) in cells]
        seeds = [[run["values"]["accuracy"] for run in cells[shown[place], column]] for place in places]
        means, errors = (list(map(of, seeds)) for of in (fmean, _standard_error))
        epsilons = EPSILONS[column][20]
        label = f"{table.columns[column].title}: epsilon {min(epsilons)} to {max(epsilons)}"
        left.errorbar(means, places, xerr=errors, fmt="o", markersize=5, elinewidth=1.5, label=label)
    left.set_yticks(range(len(shown)), [table.rows[row].title for row in shown], fontsize=9)
    left.invert_yaxis()
    left.set(title="Accuracy on the test set", xlabel="percent")
    figure.legend(loc="outside upper center", ncols=len(_COLUMNS), fontsize=9, frameon=False)
    for number, column in enumerate(_COLUMNS):
        spent = (
            sorted(cells["dpfedavg", column][0]["clients"]["epsilon_spent"]) if ("dpfedavg", column) in cells else []
        )
        right.step(range(1, len(spent) + 1), spent, where="mid", color=f"C{number}")
    right.set(title="Epsilon spent by each client", xlabel="client, in the order of epsilon", ylabel="epsilon", ylim=0)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5


if __name__ == "__main__":
    raise SystemExit(main())
