"""Read a run with true groups."""

from collections.abc import Mapping
from typing import Any

from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.summary import MATCHES
from dpfl_lightning.federated.server.view import View
from experiments.papers.recorder import Recorder, numbers_of

_SHARES = ("clustering_accuracy", "minority_recall")  # in per cent here


class GroupRecorder(Recorder):
    """Accuracy of groups and how well clusters match them, in per cent; strategies' metrics."""

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        metrics = numbers_of(result)
        return {
            **super()._values(view, result),
            **{f"accuracy_{name}": 100 * value for name, value in result.accuracy_of_groups.items()},
            **metrics,
            **matches(metrics),
        }


def matches(metrics: Mapping[str, float]) -> dict[str, float]:
    """How well clusters match groups, shares in per cent.

    >>> matches({"clustering_accuracy": 1.0, "adjusted_rand_index": 1.0, "weight": 3.0})
    {'clustering_accuracy': 100.0, 'adjusted_rand_index': 1.0}
    """
    return {name: metrics[name] * (100 if name in _SHARES else 1) for name in MATCHES if name in metrics}
