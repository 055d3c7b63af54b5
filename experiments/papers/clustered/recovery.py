"""Claims of the papers about the mixture of first updates, by simulation: M by MSS, Lemma 4.2 and Theorem 4.3.

Updates are 21 points of four groups (3, 6, 6 and 6) in p dimensions, with isotropic noise of standard deviation 1, as
the papers assume. SS is half the distance of two groups' means.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from statistics import fmean

import numpy as np
import torch
from scipy.stats import norm
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from dpfl_lightning.papers.clustered.update_mixture import Mixture, paper_mixture, robust_mixture
from experiments.papers.clustered.formulas import RECORDS, noise_multiplier

TRUE = np.repeat(range(4), [3, 6, 6, 6])
PARAMS = 28_938  # of the papers' network for Fashion-MNIST

#: how the number of groups is found; the mixture of the papers takes the M of the largest MSS
METHODS: Mapping[str, Callable[[Tensor], Mixture]] = {
    "mss": lambda updates: paper_mixture(updates, None),
    "robust": lambda updates: robust_mixture(updates, [1.0] * len(updates)),
}


def grouped(separation: float, params: int, seed: int, nested: bool = False) -> Tensor:
    """Updates `[21, p]`, means `2 * separation` apart in random directions; nested: two pairs, thrice as far apart."""
    rng = np.random.default_rng(seed)
    directions = rng.standard_normal((6, params))
    directions *= math.sqrt(2) * separation / np.linalg.norm(directions, axis=1, keepdims=True)
    means = directions[:4] + (math.sqrt(8) * directions[[4, 4, 5, 5]] if nested else 0)
    return torch.from_numpy(means[TRUE] + rng.standard_normal((len(TRUE), params)))


def number_of_groups(separation: float, params: int, draws: int) -> dict[str, float]:
    """Share of draws in which M is 4, of equidistant and of nested groups; `separation` is in units of p^(1/4)."""
    right: dict[str, list[bool]] = {}
    for seed in range(draws):
        for shape, nested in (("equidistant", False), ("nested", True)):
            updates = grouped(separation * params**0.25, params, seed, nested)
            for name, mixture in METHODS.items():
                right.setdefault(f"{name}_{shape}", []).append(mixture(updates).num_groups == 4)
    return {name: fmean(one) for name, one in right.items()}


# ---- Lemma 4.2


def overlap_by_sampling(separation: float, draws: int, dimensions: int = 10, seed: int = 0) -> float:
    """The integral of min(f, g) of two Gaussians in so many dimensions: the mean of min(1, g / f) over draws of f."""
    return float(_ratios(separation, draws, dimensions, seed).mean())


def overlap(separation: float, draws: int) -> dict[str, float]:
    """Lemma 4.2, the overlap of two components of known means: by sampling, by 2 Q(SS), and how far apart both are.

    `errors` is their distance in standard errors of the sampling.
    """
    ratios, formula = _ratios(separation, draws), 2 * float(norm.sf(separation))
    error, sampled = float(ratios.std(ddof=1)) / math.sqrt(draws), float(ratios.mean())
    return {"sampled": sampled, "formula": formula, "errors": abs(sampled - formula) / error if error else 0.0}


def _ratios(separation: float, draws: int, dimensions: int = 10, seed: int = 0) -> np.ndarray:
    """min(1, g / f) at draws of f."""
    rng = np.random.default_rng(seed)
    points, mean = rng.standard_normal((draws, dimensions)), np.zeros(dimensions)
    mean[0] = 2 * separation
    log_ratio = (np.square(points).sum(axis=1) - np.square(points - mean).sum(axis=1)) / 2
    return np.asarray(np.exp(np.minimum(log_ratio, 0.0)))


def recovery(first_batch: int, distance: float, epsilon: float, draws: int) -> dict[str, float]:
    """Lemma 4.2 and what mixtures recover, for a first round with batches of `first_batch` of 6,600 records.

    `distance` is that of two groups' mean clipped gradients in clip norms, g. One local epoch has N / b steps, so that
    SS = g sqrt(N b) / (2 z), with the z that the budget requires, and SS(k b) = SS(b) sqrt(k) / rho with rho = z(k b) /
    z(b). `bound` is 2 Q(SS). `paper` and `robust` are shares of draws with all 21 clients in the right one of 4 groups.
    """
    z = noise_multiplier(epsilon, first_batch)
    separation = distance * math.sqrt(RECORDS * first_batch) / (2 * z)
    draw = [grouped(separation, PARAMS, seed) for seed in range(draws)]
    mixtures = {
        "paper": [paper_mixture(updates, 4, seed) for seed, updates in enumerate(draw)],
        "robust": [robust_mixture(updates, [1.0] * len(TRUE), 4) for updates in draw],
    }
    return {
        "z": z,
        "separation": separation,
        "bound": 2 * float(norm.sf(separation)),
        "overlap": overlap_by_sampling(separation, draws=200_000),
        **{name: fmean(map(is_right, found)) for name, found in mixtures.items()},
    }


def is_right(mixture: Mixture) -> float:
    """1 if the likeliest groups are the true ones, else 0."""
    return float(adjusted_rand_score(TRUE, mixture.responsibilities.argmax(dim=1).numpy()) == 1.0)


# ---- Theorem 4.3


def em_rate(separation: float, seeds: int, samples: int = 40_000) -> dict[str, float]:
    """Contraction of EM near its limit psi^, for two equally likely Gaussians in one dimension, a mean over seeds.

    `rate` is |psi_(r+1) - psi^| / |psi_r - psi^| for errors just above 1e-8. `order` is O^0.5 with O = 2 Q(SS): as O
    goes to 0, the theorem says, the rate is o(O^(0.5 - gamma)) for any gamma > 0, which bounds no single rate.
    """
    overlap = 2 * float(norm.sf(separation))
    found = [_contraction(separation, samples, seed) for seed in range(seeds)]
    return {"rate": fmean(found), "order": math.sqrt(overlap), "overlap": overlap}


def _contraction(separation: float, samples: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    points = separation * (rng.integers(2, size=samples) * 2 - 1) + rng.standard_normal(samples)
    path = [np.array([-0.8 * separation, 0.8 * separation, 1.3, 1.3, 0.5])]
    while len(path) < 3 or np.linalg.norm(path[-1] - path[-2]) > 1e-13 * np.linalg.norm(path[-1]):
        path.append(em_step(points, path[-1]))
        assert len(path) < 50_000, "EM does not converge"
    errors = [float(np.linalg.norm(one - path[-1])) for one in path]
    return [after / before for before, after in itertools.pairwise(errors) if before > 1e-8][-1]


def em_step(points: np.ndarray, psi: np.ndarray) -> np.ndarray:
    """One iteration of EM; `psi` is (mean, mean, variance, variance, weight of the first)."""
    means, variances, weight = psi[:2, None], psi[2:4, None], np.array([[psi[4]], [1 - psi[4]]])
    logs = np.log(weight) - np.square(points - means) / (2 * variances) - np.log(variances) / 2
    first = 1 / (1 + np.exp(logs[1] - logs[0]))
    shares = np.stack([first, 1 - first])
    totals = shares.sum(axis=1)
    new = shares @ points / totals
    spread = (shares * np.square(points - new[:, None])).sum(axis=1) / totals
    return np.array([*new, *spread, totals[0] / len(points)])
