"""Metrics of a round, of true groups of clients (`Facts.truth`, in simulations), and the summary of a run."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.server.callback import answer_of
from dpfl_lightning.federated.server.scores import client_scores
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.models.tasks import Measure
from dpfl_lightning.privacy.accounting.accountant import finite_or_none

#: what `clustering` returns
MATCHES = ("clustering_accuracy", "adjusted_rand_index", "minority_recall")
# names of metrics that the run itself reports
_TAKEN = ("epsilon", "accuracy", "clip_fraction", "gradients_not_finite", *MATCHES)


def of_all(clients: Sequence[int], values: Sequence[float] | Tensor, num_clients: int) -> Tensor:
    """Spread `values` `[C]` of a round's `clients` over all N clients: float64, NaN for absent clients.

    >>> of_all((2, 0), [7, 8], 3)
    tensor([8., nan, 7.], dtype=torch.float64)
    """
    spread = torch.full((num_clients,), math.nan, dtype=torch.float64)
    spread[list(clients)] = torch.as_tensor(values, dtype=torch.float64)
    return spread


def round_metrics(
    strategies: Sequence[Strategy], view: View, plan: RoundPlan, weights: Tensor, sent: Mapping[str, float]
) -> dict[str, float | Tensor]:
    """Return the metrics of a round beside accuracy and epsilon: numbers, or `[N]` with NaN for absent clients.

    `view` is that after the round, `plan` that of the C clients whose updates arrived with `weights` `[K, C]`, `sent`
    is `Traffic.metrics`. `weight` is a client's weight in the model that it changes most, `effective_clients` is
    `sum_k 1 / sum_i w_ki^2`. A `group` of each client is compared with true groups (`clustering`). Post-processing.
    """
    num_clients = view.facts.num_clients
    squares = weights.square().sum(dim=1)
    values: dict[str, float | Tensor] = {"weight": of_all(plan.clients, weights.amax(dim=0), num_clients)}
    if plan.clients:  # zeros say that no update had a weight
        values["largest_weight"] = float(weights.max())
        values["effective_clients"] = float((1 / squares[squares > 0]).sum())
    values |= sent
    for strategy in strategies:
        for name, value in answer_of(strategy, "metrics", view).items():
            reported = f"{strategy.config_name} reports {name!r}"
            if name in values or name in _TAKEN:
                raise RuntimeError(f"{reported}, which is reported already: rename it")
            if isinstance(value, Tensor) and value.shape != (num_clients,):
                raise RuntimeError(f"{reported} of shape {tuple(value.shape)}, not one for each client")
            values[name] = value.to("cpu", torch.float64) if isinstance(value, Tensor) else float(value)
    groups, clusters = true_groups(view.facts), values.get("group")
    return values | (clustering(clusters.tolist(), groups) if groups and isinstance(clusters, Tensor) else {})


def for_json(metrics: Mapping[str, float | Tensor]) -> dict[str, float | list[float | None] | None]:
    """Convert tensors to lists, and infinity and NaN to None.

    >>> for_json({"converged": 1.0, "weight": torch.tensor([0.5, math.nan])})
    {'converged': 1.0, 'weight': [0.5, None]}
    """
    return {
        name: [finite_or_none(one) for one in value.tolist()] if isinstance(value, Tensor) else finite_or_none(value)
        for name, value in metrics.items()
    }


def headline_over_clients(clients: Sequence[Mapping[str, Any]], measures: Mapping[str, Measure]) -> dict[str, Any]:
    """Summarise the score that stands for the rows of `clients` in a result.

    >>> headline_over_clients([{"accuracy": value} for value in (0.5, None, 0.75)], {"accuracy": Measure()})
    {'headline': 'accuracy', 'headline_mean': 0.625, 'headline_std': 0.125, 'headline_worst': 0.5, 'headline_gap': 0.25}
    """
    name, (known,) = client_scores([{"clients": clients}])
    if not known:
        return {}
    measure = measures.get(name, Measure())
    return {
        "headline": name,
        "headline_mean": fmean(known),
        "headline_std": pstdev(known),
        "headline_worst": measure.worst(known),
        "headline_gap": measure.gap(known),
    }


def true_groups(facts: Facts) -> tuple[int, ...] | None:
    """The true group of each client, `[N]`; None if there are no groups."""
    groups = (facts.truth or {}).get("groups")
    return tuple(groups) if isinstance(groups, Sequence) else None


def smallest(groups: Sequence[int]) -> frozenset[int]:
    """The groups with the fewest clients, the minority; none where all have equally many.

    >>> sorted(smallest([0, 1, 1, 2, 2])), sorted(smallest([0, 0, 1, 1]))
    ([0], [])
    """
    sizes = Counter(groups)
    fewest, most = min(sizes.values()), max(sizes.values())
    return frozenset(group for group, size in sizes.items() if size == fewest < most)


def accuracy_of_groups(accuracies: Sequence[float | None], groups: Sequence[int] | None) -> dict[str, float]:
    """Mean accuracy (None: not measured) over clients of the majority, of the minority (`smallest`), of each group.

    >>> accuracy_of_groups([0.5, 0.75, None, 1.0], [0, 1, 1, 1])
    {'majority': 0.875, 'minority': 0.5, '0': 0.5, '1': 0.875}
    """
    if groups is None or not accuracies:
        return {}
    few, every = smallest(groups), frozenset(groups)
    parts = {"majority": every - few if few else few, "minority": few, **{str(one): {one} for one in sorted(every)}}
    pairs = [(accuracy, group) for accuracy, group in zip(accuracies, groups, strict=True) if accuracy is not None]
    known = {name: [accuracy for accuracy, group in pairs if group in part] for name, part in parts.items()}
    return {name: fmean(values) for name, values in known.items() if values}


def clustering(clusters: Sequence[float], groups: Sequence[int]) -> dict[str, float]:
    """Compare the cluster of each client `[N]` (NaN: in none, not counted) with its true group `[N]`.

    Each cluster is matched to at most one group, so that as many clients as possible are right (the Hungarian method).
    `clustering_accuracy` and `minority_recall` are the shares of all clients and of the minority's that are right.
    `adjusted_rand_index` is at most 1, and about 0 for clusters by chance.

    >>> clustering([7, 7, 5, 5, 5], [0, 0, 1, 1, 1])
    {'clustering_accuracy': 1.0, 'adjusted_rand_index': 1.0, 'minority_recall': 1.0}
    >>> clustering([0] * 5, [0, 0, 1, 1, 1])
    {'clustering_accuracy': 0.6, 'adjusted_rand_index': 0.0, 'minority_recall': 0.0}
    """
    from sklearn.metrics import adjusted_rand_score  # slow to import, and only clusters need it
    from sklearn.metrics.cluster import contingency_matrix

    pairs = [(int(cluster), group) for cluster, group in zip(clusters, groups, strict=True) if not math.isnan(cluster)]
    if not pairs:
        return {}
    found, true = zip(*pairs, strict=True)
    counts = contingency_matrix(true, found)
    right = np.zeros(counts.shape[0])
    rows, columns = linear_sum_assignment(-counts)
    right[rows] = counts[rows, columns]
    few = [row for row, group in enumerate(sorted(set(true))) if group in smallest(groups)]
    values = [right.sum() / len(pairs), adjusted_rand_score(true, found)]
    values += [right[few].sum() / counts[few].sum()] if few else []
    return dict(zip(MATCHES, map(float, values), strict=False))  # without a minority there is no recall
