"""Simulated updates of a first round in known groups: the separation from which each method finds the groups.

Means lie `2 * separation` apart, noise has standard deviation 1 in every parameter, and nothing else differs, which is
the easiest case.
"""

import math
import warnings
from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

from dpfl_lightning.algorithms.update_geometry import Updates, centred_gram
from dpfl_lightning.algorithms.update_groups import GroupOptions, find_groups, noise_alone
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
    """Updates of exactly this law, at a cost that does not grow with the number of parameters.

    Five dimensions hold the means; noise in all others is a Wishart Gram matrix.
    """
    rng = np.random.default_rng([seed, num_params, len(true_groups(sizes))])
    seen = group_means(separation, nested)[true_groups(sizes)]
    seen = seen + rng.standard_normal(seen.shape)
    clients, others = len(seen), num_params - seen.shape[1]
    rest = next(noise_alone(others, [1.0] * clients, draws=1, seed=[seed]))
    return Updates(seen @ seen.T + rest.gram, np.ones(clients), num_params, np.zeros(clients))


def methods_at(separation: float, num_params: int) -> dict[str, float]:
    """Results of each method for 21 updates, mean of six draws: adjusted Rand indices, separations, numbers of groups.

    Returns:
        `raw_...`: a spherical mixture of the updates as they are, best of 20 starts; `paper_...`: the papers' in two
        dimensions; `ward_...`: Ward's four groups and their separation without noise; `split_...`: our default.
    """
    drawn = [_methods_once(separation, num_params, seed) for seed in SEEDS]
    return {name: fmean(one[name] for one in drawn) for name in drawn[0]}


def _methods_once(separation: float, num_params: int, seed: int) -> dict[str, float]:
    rng, true = np.random.default_rng([seed, num_params]), true_groups()
    directions = rng.standard_normal((4, num_params))
    directions *= math.sqrt(2) * separation / np.linalg.norm(directions, axis=1, keepdims=True)
    x = directions[true] + rng.standard_normal((len(true), num_params))
    updates = Updates(centred_gram(torch.from_numpy(x)), np.ones(len(true)), num_params, np.zeros(len(true)))
    raw, raw_separation = _raw_mixture(x, seed)
    paper = paper_mixture(torch.from_numpy(x), len(SIZES), seed)
    ward, split = find_groups(updates, GroupOptions(len(SIZES))), find_groups(updates)
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


def recovery(
    ratio: float, num_params: int, rule: str, nested: bool = False, sizes: Sequence[int] = SIZES
) -> dict[str, float]:
    """How often a rule finds the number of groups, in per cent of 40 draws (`found`), and the mean adjusted Rand index
    (`ari`).

    Args:
        ratio: separation / `num_params^(1/4)`; 0: there are no groups, and the right number is one.
        rule: split or mss.
        nested: see `group_means`.
    """
    true = true_groups(sizes) if ratio else np.zeros(sum(sizes), dtype=int)
    options, right, rand = GroupOptions(choose=rule), 0, []
    for seed in range(RUNS):
        updates = updates_at(ratio * num_params**0.25, num_params, seed, nested, sizes)
        groups = find_groups(updates, options)
        right += len(groups.members) == len(set(true))
        rand.append(adjusted_rand_score(true, groups.labels))
    return {"found": 100 * right / RUNS, **({"ari": fmean(rand)} if ratio else {})}
