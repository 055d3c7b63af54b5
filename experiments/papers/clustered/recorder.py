"""Read a run with true groups."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.metrics import silhouette_score
from torch import Tensor

from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.summary import (
    MATCHES,
    accuracy_of_groups,
    true_groups,
)
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.clustering.kmeans_clusters import coordinates
from experiments.papers.experiment import Values
from experiments.papers.recorder import FirstRoundOnly, Recorder, named, numbers_of

_SHARES = ("clustering_accuracy", "minority_recall")  # in per cent here


class GroupRecorder(Recorder):
    """Accuracy of groups and how well clusters match them, in per cent; models sent per client; strategies' metrics.

    `clusters_perfect` is 1 or 0; `curves` are name -> {round: per cent}.
    """

    _kept: tuple[str, ...] = ("_curve", "_curves")

    def __init__(self) -> None:
        super().__init__()
        self._curves: dict[str, dict[int, float]] = {}

    def on_round_end(self, view: View, report: RoundReport) -> None:
        super().on_round_end(view, report)
        points = accuracy_of_groups(report.client_accuracy or (), true_groups(view.facts))
        points |= {name: float(value) for name, value in report.metrics.items() if name == "clustering_accuracy"}
        for name, value in points.items():
            self._curves.setdefault(name, {})[report.round] = 100 * value

    def on_fit_end(self, view: View, result: RunResult) -> None:
        super().on_fit_end(view, result)
        self.record["curves"] = {name: named(curve) for name, curve in self._curves.items()}
        if "clients" in self.record:
            names = ("loss", "true_group", "model")
            self.record["clients"] |= {name: [client[name] for client in result.clients] for name in names}

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        metrics = numbers_of(result)
        sent = {f"models_{way}": metrics.pop(f"floats_{way}") for way in ("down", "up") if f"floats_{way}" in metrics}
        models = view.run.num_params * view.facts.num_clients
        return {
            **super()._values(view, result),
            **{f"accuracy_{name}": 100 * value for name, value in result.accuracy_of_groups.items()},
            **metrics,
            **matches(metrics),
            **{name: floats / models for name, floats in sent.items()},
        }


def matches(metrics: Mapping[str, float]) -> dict[str, float]:
    """How well clusters match groups, shares in per cent, and whether all do.

    >>> matches({"clustering_accuracy": 1.0, "adjusted_rand_index": 1.0, "weight": 3.0})
    {'clustering_accuracy': 100.0, 'adjusted_rand_index': 1.0, 'clusters_perfect': 1.0}
    """
    known = {name: metrics[name] * (100 if name in _SHARES else 1) for name in MATCHES if name in metrics}
    return known | ({"clusters_perfect": float(metrics["clustering_accuracy"] == 1)} if known else {})


class FirstRound(GroupRecorder, FirstRoundOnly):
    """Ends the run after its first round, and keeps each client's update in two principal components.

    `silhouette` is of the true groups in these `points`.
    """

    _kept = ("_curve", "_curves", "_points")

    def __init__(self) -> None:
        super().__init__()
        self._points: list[list[float]] = []

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor | None:
        self._points = principal_points(updates.released.flatten(1)).tolist()
        return None

    def on_fit_end(self, view: View, result: RunResult) -> None:
        super().on_fit_end(view, result)
        self.record["points"] = self._points

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        values = super()._values(view, result)
        if groups := true_groups(view.facts):
            values["silhouette"] = float(silhouette_score(self._points, groups))
        return values


def fairness(cell: Mapping[str, Any], reference: Mapping[str, Any]) -> Values:
    """F_acc in points and F_loss in nats, from a cell's file and that of the reference models on the same clients."""
    clients, best = cell["clients"], reference["clients"]
    return {
        "fairness_gap_accuracy": 100 * float(np.ptp(np.subtract(best["accuracy"], clients["accuracy"]))),
        "fairness_gap_test_loss": float(np.ptp(np.subtract(best["loss"], clients["loss"]))),
    }


def principal_points(deltas: Tensor) -> np.ndarray:
    """Updates `[n, P]` in their first two principal components, the farthest at distance 1: `[n, 2]`.

    >>> principal_points(Tensor([[0, 0, 0], [0, 3, 4], [0, 9, 12]]))[:, 0].round(6).tolist()
    [-0.8, -0.2, 1.0]
    """
    points = coordinates(deltas)[:, [-1, -2]]
    points *= np.where(points[np.abs(points).argmax(axis=0), [0, 1]] < 0, -1, 1)  # one sign, whatever the solver's
    return points / max(np.linalg.norm(points, axis=1).max(), np.finfo(float).tiny)
