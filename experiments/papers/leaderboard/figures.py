"""The figure of the leaderboard."""

import dataclasses
from statistics import fmean, pstdev

from dpfl_lightning.config.published import EPSILONS
from experiments.papers.experiment import Cells, Experiment, Panel
from experiments.papers.figures import panel


def accuracy_by_spread(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Accuracy over the coefficient of variation of the 20 budgets of each column Dist.

    Points are not joined, because the columns differ in their mean budgets, too. FedAvg has no budget, and uniform is
    DPFedAvg here.
    """
    spreads = {name: spread(name) for name in experiment.columns if name in EPSILONS}
    columns = {name: dataclasses.replace(experiment.columns[name], x=x) for name, x in spreads.items()}
    with_spreads = dataclasses.replace(experiment, columns=columns, paper={})
    x = "standard deviation of epsilon / its mean"
    rows = "(?!fedavg|uniform).*"
    return [panel(with_spreads, cells, title="Alike data", x=x, y="accuracy, %", rows=rows, kind="points")]


def spread(name: str) -> float:
    """The coefficient of variation of published budgets.

    >>> round(spread("dist1"), 3), round(spread("dist5"), 3)
    (0.284, 0.506)
    """
    return pstdev(EPSILONS[name][20]) / fmean(EPSILONS[name][20])
