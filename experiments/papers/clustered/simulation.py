"""Simulated updates of a first round in known groups: the separation from which each method finds the groups.

Means lie `2 * separation` apart, noise has standard deviation 1 in every parameter, and nothing else differs, which is
the easiest case.
"""

import itertools
import math
import warnings
from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

from dpfl_lightning.algorithms.update_geometry import Updates, centred_gram
from dpfl_lightning.algorithms.update_groups import Groups, find_groups, simulated
from dpfl_lightning.algorithms.update_mixture import paper_mixture

SIZES = (3, 6, 6, 6)
SEEDS = range(6)
RUNS = 40


def true_groups(sizes: Sequence[int] = SIZES) -> np.ndarray:
    return np.repeat(range(len(sizes)), sizes)


def group_means(separation: float, nested: bool = False) -> np.ndarray:
    """Four means in five dimensions, `2 * separation` apart; nested: two pairs of such, three times as far apart.

    >>> float(np.linalg.norm(group_means(3.0)[0] - group_means(3.0)[3]).round(9))
    6.0
    """
    corners = math.sqrt(2) * separation * np.eye(4, 5)
    if nested:
        corners[:2, 4] = separation * math.sqrt(32)  # inner pairs 2 s apart; from one pair to the other 6 s
    return corners


def updates_at(
    separation: float, num_params: int, seed: int, nested: bool = False, sizes: Sequence[int] = SIZES
) -> Updates:
    """Updates of exactly this law, see `simulated`."""
    return _updates(group_means(separation, nested)[true_groups(sizes)], num_params, seed)


def _updates(points: np.ndarray, num_params: int, seed: int) -> Updates:
    noise_std = np.ones(len(points))
    return Updates(next(simulated(points, noise_std, num_params, 1, [seed]))[0], noise_std, num_params)


def methods_at(separation: float, num_params: int) -> dict[str, float]:
    """Results of each method for 21 updates, mean of six draws: adjusted Rand indices, separations, numbers of groups.

    `raw_` is a spherical mixture of the updates as they are, best of 20 starts; `split_` is our default.
    """
    drawn = [_methods_once(separation, num_params, seed) for seed in SEEDS]
    return {name: fmean(one[name] for one in drawn) for name in drawn[0]}


def _methods_once(separation: float, num_params: int, seed: int) -> dict[str, float]:
    rng, true = np.random.default_rng([seed, num_params]), true_groups()
    directions = rng.standard_normal((4, num_params))
    directions *= math.sqrt(2) * separation / np.linalg.norm(directions, axis=1, keepdims=True)
    x = directions[true] + rng.standard_normal((len(true), num_params))
    updates = Updates(centred_gram(torch.from_numpy(x)), np.ones(len(true)), num_params)
    raw, raw_separation = _raw_mixture(x, seed)
    paper = paper_mixture(torch.from_numpy(x), len(SIZES), seed)
    ward, split = find_groups(updates, len(SIZES)), find_groups(updates)
    return {
        "raw_ari": adjusted_rand_score(true, raw),
        "raw_separation": raw_separation,
        "paper_ari": adjusted_rand_score(true, paper.responsibilities.argmax(dim=1).numpy()),
        "paper_separation": paper.separation,
        "paper_groups": float(paper_mixture(torch.from_numpy(x), None, seed).num_groups),
        "ward_ari": adjusted_rand_score(true, ward.labels),
        "ward_separation": ward.separation,
        "split_ari": adjusted_rand_score(true, split.labels),
        "split_groups": float(len(split.members)),
    }


def _raw_mixture(x: np.ndarray, seed: int) -> tuple[np.ndarray, float]:
    from sklearn.mixture import GaussianMixture

    mixture = GaussianMixture(len(SIZES), covariance_type="spherical", n_init=20, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that EM stopped early: the best start is taken as it is
        labels = mixture.fit_predict(x)
    gaps = np.linalg.norm(mixture.means_[:, None] - mixture.means_[None], axis=2)
    spread = np.sqrt(mixture.covariances_)
    scaled = gaps / (2 * np.maximum(spread[:, None], spread[None, :]))
    return labels, float(scaled[np.triu_indices(len(SIZES), 1)].min())


def recovery(ratio: float, num_params: int, nested: bool = False, sizes: Sequence[int] = SIZES) -> dict[str, float]:
    """How often our default finds the number of groups, in per cent of 40 draws, and the adjusted Rand index.

    `ratio` is separation / `num_params^(1/4)`; 0: there are no groups, and the right number is one.
    """
    true = true_groups(sizes) if ratio else np.zeros(sum(sizes), dtype=int)
    right, rand = 0, []
    for seed in range(RUNS):
        groups = find_groups(updates_at(ratio * num_params**0.25, num_params, seed, nested, sizes))
        right += len(groups.members) == len(set(true))
        rand.append(adjusted_rand_score(true, groups.labels))
    return {"found": 100 * right / RUNS, **({"ari": fmean(rand)} if ratio else {})}


def equal_groups(
    count: int, num_params: int, ratio: float, seed: int, farther: float = 1.0, clients: int = 21
) -> tuple[np.ndarray, Groups]:
    """True labels of groups of nearly equal size at equal distances, and what our default finds.

    They are `farther` times as far apart as the smallest distance that matters, whose separation is `ratio` times the
    fourth root of the number of parameters.
    """
    true, distance = np.sort(np.arange(clients) % count), 2 * ratio * num_params**0.25
    points = farther * distance * math.sqrt(0.5) * np.eye(count)[true]
    return true, find_groups(_updates(points, num_params, seed), distance=distance)


def same_groups(true: np.ndarray, labels: np.ndarray) -> bool:
    """Whether both are the same groups, whatever their names."""
    return np.array_equal(true[:, None] == true, labels[:, None] == labels)


def numbers_of_groups(count: int, ratio: float = 1.5, num_params: int = 28_938) -> dict[str, float]:
    """How often all clients are in the right group, in per cent of 20 draws, and the mean reported probability."""
    drawn = [equal_groups(count, num_params, ratio, seed) for seed in range(20)]
    return {
        "right": fmean(100.0 * same_groups(true, groups.labels) for true, groups in drawn),
        "probability": fmean(100 * groups.probability for _, groups in drawn),
        "least": fmean(float(groups.memberships.max(axis=1).min()) for _, groups in drawn),
    }


def calibration(num_params: int = 2000, draws: int = 300) -> dict[str, float]:
    """Frequency of right groups, in per cent, and the mean reported probability, by classes of that probability.

    Half of the draws have no groups, the others 2 to 6 at 1 to 1.5 times the smallest distance that matters. The noise
    hides or shows groups at that distance: its separation is 0.5 to 2 times the fourth root of the number of
    parameters.
    """
    rng, reported, right = np.random.default_rng(0), [], []
    for seed in range(draws):
        count = 1 if seed % 2 else int(rng.integers(2, 7))
        true, groups = equal_groups(count, num_params, rng.uniform(0.5, 2.0), seed, rng.uniform(1.0, 1.5))
        reported.append(100 * groups.probability)
        right.append(100.0 * same_groups(true, groups.labels))
    values, ends = {}, (0.0, 25.0, 50.0, 75.0, 90.0, 100.1)
    for low, high in itertools.pairwise(ends):
        rows = [row for row, value in enumerate(reported) if low <= value < high]
        values[f"draws_{low:.0f}"] = float(len(rows))
        if rows:
            values |= {
                f"{name}_{low:.0f}": fmean(of[row] for row in rows)
                for name, of in (("reported", reported), ("right", right))
            }
    return values
