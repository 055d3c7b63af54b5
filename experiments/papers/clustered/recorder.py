"""Read a run with true groups."""

from collections.abc import Mapping
from typing import Any

from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.summary import MATCHES
from dpfl_lightning.federated.server.view import View
from experiments.papers.recorder import Recorder, numbers_of

_SHARES = ("clustering_accuracy", "minority_recall")  # in per cent here


class GroupRecorder(Recorder):
    """Accuracy of groups and how well clusters match them, in per cent; fairness gaps; strategies' metrics."""

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        metrics = numbers_of(result)
        return {
            **super()._values(view, result),
            **{f"accuracy_{name}": 100 * value for name, value in result.accuracy_of_groups.items()},
            **metrics,
            **matches(metrics),
            **fairness(result.fairness),
        }


def fairness(values: Mapping[str, float]) -> dict[str, float]:
    """F_acc in points and F_loss, of runs with `evaluation.fairness`.

    >>> fairness({"fairness_acc_gap": 0.25, "fairness_loss_gap": 0.5})
    {'fairness_acc': 25.0, 'fairness_loss': 0.5}
    """
    factors = {"fairness_acc": 100, "fairness_loss": 1}
    return {name: factor * values[f"{name}_gap"] for name, factor in factors.items() if f"{name}_gap" in values}


def matches(metrics: Mapping[str, float]) -> dict[str, float]:
    """How well clusters match groups, shares in per cent.

    >>> matches({"clustering_accuracy": 1.0, "adjusted_rand_index": 1.0, "weight": 3.0})
    {'clustering_accuracy': 100.0, 'adjusted_rand_index': 1.0}
    """
    return {name: metrics[name] * (100 if name in _SHARES else 1) for name in MATCHES if name in metrics}
