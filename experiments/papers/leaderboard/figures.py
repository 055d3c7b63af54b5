"""The figure of the leaderboard."""

import dataclasses
from statistics import fmean, pstdev

from dpfl_lightning.config.published import EPSILONS
from experiments.papers.experiment import Cells, Experiment, Panel
from experiments.papers.figures import panel


def accuracy_by_spread(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Accuracy in each column Dist, in the order of the coefficient of variation of its 20 budgets.

    The columns differ in their mean budgets, too. FedAvg has no budget, and uniform is DPFedAvg here.
    """
    columns = {}
    for name in sorted(EPSILONS.keys() & experiment.columns.keys(), key=spread):
        title = f"{experiment.columns[name].title}\n{spread(name):.2f}"
        columns[name] = dataclasses.replace(experiment.columns[name], title=title)
    by_spread = dataclasses.replace(experiment, columns=columns, paper={})
    words = {"title": "Alike data", "x": "budgets: standard deviation of epsilon / its mean", "y": "accuracy, %"}
    return [panel(by_spread, cells, **words, rows="(?!fedavg|uniform).*", band="always", kind="dots")]


def spread(name: str) -> float:
    """The coefficient of variation of published budgets.

    >>> round(spread("dist1"), 3), round(spread("dist5"), 3)
    (0.284, 0.506)
    """
    return pstdev(EPSILONS[name][20]) / fmean(EPSILONS[name][20])
