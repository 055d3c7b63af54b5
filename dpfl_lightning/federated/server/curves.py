"""The curves of a run: what a finished round, and the result of the run, add to them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.server.history import Round, Values
from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.scores import number
from dpfl_lightning.federated.server.summary import accuracy_of_groups, true_groups

MOST_CLIENTS = 100  # of more clients, only quantiles are kept
_TIMES = ("wall_seconds", "client_seconds", "records_per_second")


def of_round(report: RoundReport, facts: Facts) -> Round:
    """Return the curves of a finished round."""
    diagnostics, scores = report.diagnostics, report.client_scores
    clients: dict[str, Sequence[float | None]] = {
        "val_accuracy": report.client_accuracy or (),
        "val_loss": [score.loss for score in scores],
        **{
            f"val_{name}": [score.metrics.get(name) for score in scores]
            for name in dict.fromkeys(name for score in scores for name in score.metrics)
        },
        "train_epsilon": report.epsilon_spent,
        "train_clip_fraction": () if diagnostics is None else diagnostics.clip_fraction,
        "train_gradients_not_finite": () if diagnostics is None else diagnostics.not_finite,
        **{f"train_{name}": value.tolist() for name, value in report.metrics.items() if isinstance(value, Tensor)},
    }
    over_all = {name: quantiles(name, values) for name, values in clients.items()}
    groups = accuracy_of_groups(report.client_accuracy or (), true_groups(facts))
    values = {
        **(on_test(report.test_accuracy, report.test_loss, report.test_metrics) if facts.test_set else {}),
        **{curve: value for found in over_all.values() for curve, value in found.items()},
        **of_groups(groups),
        **{f"val_{name}": value for name, value in report.fairness.items()},
        **{f"train_{name}": value for name, value in report.metrics.items() if not isinstance(value, Tensor)},
        "train_participants": len(report.participants),
        "train_records_per_second": report.seconds and report.records / max(report.seconds, 1e-9),
    }
    named: dict[str, Values] = {}
    if facts.num_clients <= MOST_CLIENTS:
        names = facts.names or tuple(map(str, range(facts.num_clients)))  # `name_of`, without a call for each client
        columns = {name: _known(column) for name, column in clients.items() if over_all[name]}
        named = {name: dict(zip(names, column, strict=True)) for name, column in columns.items()}
    return Round(report.round, dict(zip(values, _known(list(values.values())), strict=True)), named)


def completed(rounds: Sequence[Round], result: RunResult) -> list[Round]:
    """Return the rounds, the last one with the results of the run under the names of the curves that end in them."""
    last = next((one for one in rounds if one.round == result.rounds), Round(result.rounds, {}, {}))
    clients = {
        "val_accuracy": [client["accuracy"] for client in result.clients],
        "train_epsilon": [number(client["epsilon_spent"]) for client in result.clients],
    }
    values = {
        **(on_test(result.test_accuracy, result.test_loss, result.test_metrics) if result.test_set else {}),
        **{curve: value for name, column in clients.items() for curve, value in quantiles(name, column).items()},
        **of_groups(result.accuracy_of_groups),
        **{f"val_{name}": value for name, value in result.fairness.items()},
        **{f"train_{name}": getattr(result, name) for name in _TIMES},
    }
    spent = _known(clients["train_epsilon"])  # of a run that may end by its results, more than its rounds have spent
    known = {
        name: value
        for name, value in last.values.items()
        if name not in values or (value is not None and not name.startswith("train_epsilon"))
    }
    values = {**dict(zip(values, _known(list(values.values())), strict=True)), **known}
    columns = {
        name: dict(zip(column, spent, strict=True)) if name == "train_epsilon" else column
        for name, column in last.clients.items()
    }
    return [*(one for one in rounds if one is not last), dataclasses.replace(last, values=values, clients=columns)]


def on_test(accuracy: float | None, loss: float | None, metrics: Values) -> dict[str, float | None]:
    """Name the scores on test records."""
    return {"test_accuracy": accuracy, "test_loss": loss, **{f"test_{name}": value for name, value in metrics.items()}}


def score_curves(names: Iterable[str], measures: Iterable[str]) -> dict[str, str]:
    """Return score -> its curve: on the test set, else the mean over held-out records, in the order of `measures`.

    The first one stands for the run.

    >>> score_curves(["test_loss", "test_accuracy", "test_auroc", "val_accuracy_mean"], ["auroc", "accuracy", "loss"])
    {'auroc': 'test_auroc', 'accuracy': 'test_accuracy', 'loss': 'test_loss'}
    """
    known = {*names}
    test = {score: f"test_{score}" for score in measures}
    found = test if known.intersection(test.values()) else {score: f"val_{score}_mean" for score in test}
    return {score: curve for score, curve in found.items() if curve in known}


def of_groups(accuracies: Mapping[str, float]) -> dict[str, float]:
    """Name the accuracies of `summary.accuracy_of_groups`.

    >>> of_groups({"minority": 0.5, "0": 0.75})
    {'val_accuracy_minority': 0.5, 'val_accuracy_group_0': 0.75}
    """
    return {f"val_accuracy_{'group_' * name.isdigit()}{name}": value for name, value in accuracies.items()}


def quantiles(name: str, values: Sequence[float | None]) -> dict[str, float]:
    """Return the smallest, median, mean and largest value over clients, for scores also the standard deviation.

    None and NaN are left out. An epsilon without a bound is infinite, and so is then the largest.

    >>> quantiles("epsilon", [1.0, None, 4.0])
    {'epsilon_min': 1.0, 'epsilon_median': 2.5, 'epsilon_mean': 2.5, 'epsilon_max': 4.0}
    """
    known = np.array(values, dtype=np.float64)  # None becomes NaN
    known = known[~np.isnan(known)]
    if not known.size:
        return {}
    found = {"min": known.min(), "median": np.median(known), "mean": known.mean(), "max": known.max()}
    found |= {"std": known.std()} if name.startswith("val_") else {}
    return {f"{name}_{key}": float(value) for key, value in found.items()}


def _known(values: Sequence[float | None]) -> list[float | None]:
    """Replace values that are not finite by None."""
    return [value if value is not None and math.isfinite(value) else None for value in values]
