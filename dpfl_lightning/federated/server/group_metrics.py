"""Accuracy of the true groups of clients (`Facts.truth`, known in simulations), and how well clusters match them.

They are for reports, never for a strategy.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

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
