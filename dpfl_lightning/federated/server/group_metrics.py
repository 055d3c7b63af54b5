"""Accuracy of the true groups of clients, and how well clusters match them.

Only a simulation knows true groups (`Facts.truth["groups"]`). They are for reports, never for a strategy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.cluster import contingency_matrix

from dpfl_lightning.federated.messages.facts import Facts

#: what `clustering` returns
MATCHES = ("clustering_accuracy", "adjusted_rand_index", "minority_recall")


def true_groups(facts: Facts) -> tuple[int, ...] | None:
    """The true group of each client, `[N]`; None if there are no groups."""
    groups = (facts.truth or {}).get("groups")
    return tuple(groups) if isinstance(groups, Sequence) else None


def smallest(groups: Sequence[int]) -> frozenset[int]:
    """The groups with the fewest clients, the minority; none where all have as many.

    >>> sorted(smallest([0, 1, 1, 2, 2])), sorted(smallest([0, 0, 1, 1]))
    ([0], [])
    """
    sizes = {group: list(groups).count(group) for group in set(groups)}
    fewest = min(sizes.values())
    return frozenset(group for group, size in sizes.items() if size == fewest < max(sizes.values()))


def accuracy_of_groups(accuracies: Sequence[float | None], groups: Sequence[int] | None) -> dict[str, float]:
    """Mean accuracy over the clients of the majority, of the minority (see `smallest`) and of each group.

    Args:
        accuracies: `[N]`, None where not measured.
        groups: `[N]`; None is no groups.

    >>> accuracy_of_groups([0.5, 0.75, None, 1.0], [0, 1, 1, 1])
    {'majority': 0.875, 'minority': 0.5, '0': 0.5, '1': 0.875}
    """
    if groups is None or not accuracies:
        return {}
    few, every = smallest(groups), frozenset(groups)
    members = {"majority": every - few if few else few, "minority": few}
    members |= {str(one): frozenset({one}) for one in sorted(every)}
    pairs = [(accuracy, group) for accuracy, group in zip(accuracies, groups, strict=True) if accuracy is not None]
    known = {name: [accuracy for accuracy, group in pairs if group in own] for name, own in members.items()}
    return {name: math.fsum(values) / len(values) for name, values in known.items() if values}


def clustering(found: Sequence[float], groups: Sequence[int]) -> dict[str, float]:
    """How well the clusters of clients are the true groups.

    Clusters have no order: each is matched to at most one group, so that as many clients as possible are right (the
    Hungarian method). A cluster too many is matched to none, and its clients are wrong.

    Args:
        found: `[N]` cluster of each client; NaN: it was in none, and does not count.
        groups: `[N]` true ones.

    Returns:
        `clustering_accuracy`, the share of clients that are right, in [0, 1]: 1 only if the clusters are the groups;
        `adjusted_rand_index`, at most 1, and about 0 for clusters by chance; `minority_recall`, the share of the
        minority's clients that are right, where there is a minority. Nothing if no client counts.

    >>> clustering([7, 7, 5, 5, 5], [0, 0, 1, 1, 1])
    {'clustering_accuracy': 1.0, 'adjusted_rand_index': 1.0, 'minority_recall': 1.0}
    >>> clustering([0] * 5, [0, 0, 1, 1, 1])
    {'clustering_accuracy': 0.6, 'adjusted_rand_index': 0.0, 'minority_recall': 0.0}
    """
    pairs = [(int(own), group) for own, group in zip(found, groups, strict=True) if not math.isnan(own)]
    if not pairs:
        return {}
    clusters, true = zip(*pairs, strict=True)
    counts = contingency_matrix(true, clusters)
    right = np.zeros(counts.shape[0])
    rows, columns = linear_sum_assignment(-counts)
    right[rows] = counts[rows, columns]
    few = [row for row, group in enumerate(sorted(set(true))) if group in smallest(groups)]
    values = [right.sum() / len(pairs), adjusted_rand_score(true, clusters)]
    values += [right[few].sum() / counts[few].sum()] if few else []
    return dict(zip(MATCHES, map(float, values), strict=False))  # without a minority there is no recall


def fairness_gap(values: Sequence[float], references: Sequence[float]) -> float:
    """`max_i d_i - min_i d_i` with `d_i = reference_i - value_i`: how unequally privacy and the method cost clients.

    Args:
        values: `[N]` each client's accuracy (or loss).
        references: `[N]` that of a model trained without privacy for the client's group, on the same records.

    Reference: Malekmohammadi, Taik and Farnadi, F_acc and F_loss, with one trained model in the place of the best one:
    a difference may be negative.

    >>> fairness_gap([80.0, 70.0], [90.0, 85.0])
    5.0
    """
    differences = [reference - value for value, reference in zip(values, references, strict=True)]
    return max(differences) - min(differences)
