"""The draw of a round's clients so that quotas are kept."""

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


def systematic(remaining: Counts, rounds_left: int, generator: np.random.Generator) -> Counts:
    """Draw the clients whose intervals on a shuffled line hold a point s, s + h, s + 2h, ..., with s uniform below h.

    The interval of client n has the length min(remaining_n, h), h being `rounds_left`, all in integers. Each client is
    drawn at most once, with probability min(remaining_n, h) / h. If no quota exceeds the rounds and their sum is K
    times the rounds, every round has K clients, and every quota is used up. The draw is public, and amplifies nothing.

    >>> draw, remaining = np.random.default_rng(0), np.array([4, 1, 2, 1])
    >>> rounds = []
    >>> for rounds_left in (4, 3, 2, 1):
    ...     rounds.append(systematic(remaining, rounds_left, draw))
    ...     remaining[rounds[-1]] -= 1
    >>> [len(clients) for clients in rounds], remaining.tolist()
    ([2, 2, 2, 2], [0, 0, 0, 0])
    """
    order = generator.permutation(len(remaining))
    ends = np.cumsum(np.minimum(remaining, rounds_left)[order])
    points = np.arange(generator.integers(rounds_left), ends[-1], rounds_left)
    return np.sort(order[np.searchsorted(ends, points, side="right")])


def larger_budgets(epsilon: np.ndarray, grouping: str, top_fraction: float, seed: int) -> np.ndarray:
    """Return which clients are "public" `[N]` bool: the group with the larger mean budget, or all if budgets are equal.

    The options are those of the strategy `pfa`; `epsilon` `[N]` holds the claimed budgets.
    """
    if epsilon.max() == epsilon.min():
        return np.ones(len(epsilon), dtype=bool)
    if grouping == "top":
        count = max(1, round(top_fraction * len(epsilon)))
        return np.isin(np.arange(len(epsilon)), np.argsort(-epsilon, kind="stable")[:count])
    from sklearn.cluster import AgglomerativeClustering, KMeans
    from sklearn.mixture import GaussianMixture

    models = {
        "mixture": GaussianMixture(2, random_state=seed),
        "kmeans": KMeans(2, n_init=10, random_state=seed),
        "hierarchical": AgglomerativeClustering(2, linkage="single"),
    }
    group = models[grouping].fit_predict(((epsilon - epsilon.min()) / (epsilon.max() - epsilon.min()))[:, None])
    means = [epsilon[group == one].mean() if (group == one).any() else -np.inf for one in (0, 1)]
    return group == int(np.argmax(means))
