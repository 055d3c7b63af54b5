"""Read a run with true groups."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.summary import (
    MATCHES,
    accuracy_of_groups,
    true_groups,
)
from dpfl_lightning.federated.server.view import View
from experiments.papers.experiment import Values
from experiments.papers.recorder import Recorder, named, numbers_of

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


def fairness(cell: Mapping[str, Any], reference: Mapping[str, Any]) -> Values:
    """F_acc in points, from a cell's file and that of the reference models on the same clients."""
    clients, best = cell["clients"], reference["clients"]
    return {"fairness_gap_accuracy": 100 * float(np.ptp(np.subtract(best["accuracy"], clients["accuracy"])))}
