"""A simulated problem of ten classes and thirty clients, to compare ways to select and to weigh clients.

A linear softmax model, whose clipped gradients have a closed form, with the strategies' quotas, cohorts and noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpfl_lightning.algorithms.allocation import allocate_int, anchor_strength
from dpfl_lightning.algorithms.cohorts import systematic
from dpfl_lightning.data.partition import partition
from experiments.papers.selection.estimates import NoiseModel, gaussian_noise, laplace_noise
from experiments.papers.selection.random_effects import excess_spread, shares

Vector = NDArray[np.float64]
Quota = NDArray[np.int64]  # participations of each client, `[N]`

CLIENTS, COHORT, ROUNDS, SEEDS = 30, 6, 100, range(20)
DELTA = 1e-5
_CLASSES, _FEATURES, _RECORDS, _TEST = 10, 64, 7000, 1000
_HALF_AFTER = 50  # rounds after which the learning rate is half
_STEPS_TO_OPTIMUM = 300  # full batches without noise: three times those of a run


@dataclass(frozen=True)
class Setting:
    """One column: mechanism, Dirichlet parameter of the classes, and budgets uniform between two ends."""

    mechanism: str
    alpha: float
    low: float
    high: float
    clip_norm: float | None = None  # None is 1, the L2 norm, for Gaussian noise; 4, the L1 norm, for Laplace noise
    rate: float = 4.0  # at first

    @property
    def clip(self) -> float:
        return self.clip_norm or (1.0 if self.mechanism == "gaussian" else 4.0)

    @property
    def scale(self) -> float:
        """The L2 norm that `biased_selection` takes a gradient to have."""
        return self.clip * (1.0 if self.mechanism == "gaussian" else 0.25)


@dataclass(frozen=True, eq=False)
class Problem:
    """Records of length 1 with a constant 0.3, `x [n, 65]` and `y [n]`; `test`: rows of nobody; `epsilon [N]`."""

    x: Vector
    y: NDArray[np.int64]
    rows_of: Sequence[NDArray[np.int64]]
    test: NDArray[np.int64]
    epsilon: Vector

    @classmethod
    def drawn(cls, setting: Setting, seed: int) -> Problem:
        """Class means of size 0.35 in unit noise; at least eight records a client."""
        draw = np.random.default_rng(seed)
        y = draw.integers(_CLASSES, size=_RECORDS)
        x = 0.35 * draw.standard_normal((_CLASSES, _FEATURES))[y] + draw.standard_normal((_RECORDS, _FEATURES))
        x = np.hstack([x / np.linalg.norm(x, axis=1, keepdims=True), np.full((_RECORDS, 1), 0.3)])
        num_train = _RECORDS - _TEST
        rows_of = partition("dirichlet", y[:num_train], CLIENTS, draw, alpha=setting.alpha, min_records=8)
        epsilon = draw.uniform(setting.low, setting.high, CLIENTS)
        return cls(x, y, rows_of, np.arange(num_train, _RECORDS), epsilon)

    @property
    def records(self) -> Vector:
        return np.array([len(rows) for rows in self.rows_of], dtype=float)

    def accuracy(self, model: Vector) -> float:
        """Accuracy of a model `[65, 10]` on the test records, in per cent."""
        return 100 * float((np.argmax(self.x[self.test] @ model, axis=1) == self.y[self.test]).mean())

    def loss(self, model: Vector, client: int) -> float:
        """Mean cross entropy on a client's records."""
        rows = self.rows_of[client]
        return float(-np.log(_softmax(self.x[rows] @ model)[np.arange(len(rows)), self.y[rows]]).mean())

    def gradient(self, model: Vector, rows: NDArray[np.int64], clip_norm: float, order: int) -> Vector:
        """Mean of the records' gradients, each clipped to `clip_norm` in the norm of that order, `[65, 10]`."""
        x, error = self.x[rows], _softmax(self.x[rows] @ model)
        error[np.arange(len(rows)), self.y[rows]] -= 1
        norms = np.linalg.norm(x, order, axis=1) * np.linalg.norm(error, order, axis=1)  # of an outer product
        return x.T @ (error / np.maximum(1.0, norms / clip_norm)[:, None]) / len(rows)


def _softmax(logits: Vector) -> Vector:
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


# ---- quotas


def noise_of(problem: Problem, setting: Setting) -> NoiseModel:
    """Noise of one update; neighbours differ in one replaced record."""
    num_params = (_FEATURES + 1) * _CLASSES
    if setting.mechanism == "gaussian":
        return gaussian_noise(setting.clip, num_params, problem.epsilon, DELTA, problem.records)
    return laplace_noise(setting.clip, num_params, problem.epsilon, problem.records)


def quotas(
    method: str,
    problem: Problem,
    setting: Setting,
    bias_cost: Vector | float = 0.0,
    dissimilarity: float = 0.1,
    cohort: int = COHORT,
) -> Quota:
    """Quotas of a whole run, `[N]`: equal ones unless `method` is `least_noise` or `anchored`."""
    noise, total = noise_of(problem, setting), cohort * ROUNDS
    if method not in ("least_noise", "anchored"):
        return allocate_int(np.ones(CLIENTS), total, upper=ROUNDS)
    anchor = anchor_strength(CLIENTS, ROUNDS, setting.scale, dissimilarity) if method == "anchored" else 0.0
    factor = noise.scale * noise.factor
    return allocate_int(factor, total, noise.exponent, bias_cost, upper=ROUNDS, anchor=anchor)


# ---- runs


def accuracy_of(
    method: str, problem: Problem, setting: Setting, seed: int, quota: Quota, between: float | None = None
) -> float:
    """Test accuracy after the last round, in per cent; `fedsgd` has neither noise nor clipping.

    `effects` has random-effects weights: `between` is the variance between clients, None estimates it.
    """
    draw = np.random.default_rng([seed, 1])
    order, private = (2 if setting.mechanism == "gaussian" else 1), method != "fedsgd"
    noise = noise_of(problem, setting).variance(quota)
    variance = noise / ((_FEATURES + 1) * _CLASSES)  # of one number
    weight_of = {"weiavg": problem.epsilon, "inverse": 1 / np.maximum(variance, 1e-300)}.get(method, np.ones(CLIENTS))
    model, left, found = np.zeros((_FEATURES + 1, _CLASSES)), quota.copy(), np.zeros(2)
    for round in range(1, ROUNDS + 1):
        cohort = systematic(left, ROUNDS - round + 1, draw)
        left[cohort] -= 1
        updates = []
        for client in cohort:
            gradient = problem.gradient(model, problem.rows_of[client], setting.clip if private else np.inf, order)
            updates.append(gradient + private * _noise(draw, setting.mechanism, variance[client], model.shape))
        weights = weight_of[cohort] / weight_of[cohort].sum()
        if method == "effects":
            found += excess_spread(torch.from_numpy(np.reshape(updates, (len(cohort), -1))), noise[cohort])
            known = max(found[0] / found[1], 0.0) if between is None else between
            weights = (shares(noise, quota.astype(float), known) * ROUNDS)[cohort] / quota[cohort]
        model = model - setting.rate / (1 + round / _HALF_AFTER) * np.tensordot(weights, updates, 1)
    return problem.accuracy(model)


def _noise(draw: np.random.Generator, mechanism: str, variance: float, shape: tuple[int, ...]) -> Vector:
    if mechanism == "gaussian":
        return np.sqrt(variance) * draw.standard_normal(shape)
    return draw.laplace(0.0, np.sqrt(variance / 2), shape)


METHODS = ("fedsgd", "uniform", "weiavg", "inverse", "least_noise", "anchored", "effects")
COHORTS = (2, 12)  # of `effects`, beside the usual one
#: assumed variances between clients, as shares of the squared clip norm: of quotas, and of weights
GRID = (0.0, 0.001, 0.01, 0.1, 1.0)
RATES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

Runs = Mapping[str, tuple[str, Quota, float | None]]  # name -> method, quotas, `between`


def methods_of(**fields: Any) -> dict[str, float]:
    """Mean test accuracy of each method over the draws, in per cent, and `..._std`; `fields` are those of `Setting`.

    `quota_regret` and `weight_regret` are how much better the best value of `GRID` is than the default of `anchored`
    and than the estimate of `effects`, in points, with standard errors `..._error` of paired differences.
    """

    def runs(problem: Problem, setting: Setting) -> Runs:
        equal = quotas("uniform", problem, setting)
        made: dict[str, tuple[str, Quota, float | None]] = {}
        made |= {name: (name, quotas(name, problem, setting), None) for name in METHODS}
        made |= {f"effects{size}": ("effects", quotas("", problem, setting, cohort=size), None) for size in COHORTS}
        for value in GRID:
            made[f"quota{value:g}"] = ("anchored", quotas("anchored", problem, setting, dissimilarity=value), None)
            made[f"weight{value:g}"] = ("effects", equal, value * setting.scale**2)
        return made

    accuracies = _accuracies(Setting(**fields), runs)
    values = _means({name: accuracies[name] for name in (*METHODS, *(f"effects{size}" for size in COHORTS))})
    for kind, ours in (("quota", "anchored"), ("weight", "effects")):
        best = max((accuracies[f"{kind}{value:g}"] for value in GRID), key=fmean)
        values |= _gain(f"{kind}_regret", best, accuracies[ours])
    return values | _gain("gain", accuracies["effects"], accuracies["anchored"])


def participations_of(**fields: Any) -> dict[str, float]:
    """Mean test accuracy, and `..._std`, of quotas, of weights and of `both`, with 2, 6 and 12 clients in a round.

    `gain2` is `effects2` minus `anchored2`, and `both_gain` is `both6` minus `effects6`, with the standard errors
    `..._error` of paired differences.
    """

    def runs(problem: Problem, setting: Setting) -> Runs:
        ways = {"anchored": ("anchored", "anchored"), "effects": ("effects", ""), "both": ("effects", "anchored")}
        return {
            f"{name}{size}": (method, quotas(quota, problem, setting, cohort=size), None)
            for name, (method, quota) in ways.items()
            for size in (2, COHORT, 12)
        }

    accuracies = _accuracies(Setting(**fields), runs)
    values = _means(accuracies)
    for gain, one, other in (("gain2", "effects2", "anchored2"), ("both_gain", "both6", "effects6")):
        values |= _gain(gain, accuracies[one], accuracies[other])
    return values


def tuned_of(**fields: Any) -> dict[str, float]:
    """As `methods_of`, each method with the rate of `RATES` that is best on 20 other draws, `..._rate`."""

    def runs(problem: Problem, setting: Setting) -> Runs:
        return {name: (name, quotas(name, problem, setting), None) for name in METHODS}

    others = {rate: _accuracies(Setting(**fields, rate=rate), runs, range(20, 40)) for rate in RATES}
    best = {name: max(RATES, key=lambda rate: fmean(others[rate][name])) for name in METHODS}
    shown = {rate: _accuracies(Setting(**fields, rate=rate), runs) for rate in {*best.values()}}
    means = _means({name: shown[rate][name] for name, rate in best.items()})
    return means | {f"{name}_rate": rate for name, rate in best.items()}


def _accuracies(
    setting: Setting, runs_of: Callable[[Problem, Setting], Runs], seeds: Sequence[int] = SEEDS
) -> dict[str, list[float]]:
    accuracies: dict[str, list[float]] = {}
    for seed in seeds:
        problem = Problem.drawn(setting, seed)
        for name, (method, quota, between) in runs_of(problem, setting).items():
            accuracies.setdefault(name, []).append(accuracy_of(method, problem, setting, seed, quota, between))
    return accuracies


def _gain(name: str, ours: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Mean of the paired differences, and its standard error as `..._error`."""
    gains = [a - b for a, b in zip(ours, others, strict=True)]
    return {name: fmean(gains), f"{name}_error": stdev(gains) / len(gains) ** 0.5}


def _means(accuracies: Mapping[str, Sequence[float]]) -> dict[str, float]:
    means = {name: fmean(values) for name, values in accuracies.items()}
    return means | {f"{name}_std": stdev(values) for name, values in accuracies.items()}


# ---- the paper's bias term, with true values

RATIOS = (0, 3, 30, 300)


def true_heterogeneity(problem: Problem) -> Vector:
    """`F_n(w*) - F_n*` of each client, `[N]`; all optima are approached without noise."""
    everyone = [problem.rows_of[client] for client in range(CLIENTS)]
    common = _optimum(problem, everyone)
    return np.array(
        [problem.loss(common, n) - problem.loss(_optimum(problem, [everyone[n]]), n) for n in range(CLIENTS)]
    )


def _optimum(problem: Problem, parts: Sequence[NDArray[np.int64]]) -> Vector:
    """Optimum of the mean over parts of their mean losses."""
    rows = np.concatenate(parts)
    weight = np.concatenate([np.full(len(part), 1 / (len(part) * len(parts))) for part in parts])
    x, model = problem.x[rows], np.zeros((_FEATURES + 1, _CLASSES))
    for _ in range(_STEPS_TO_OPTIMUM):
        error = _softmax(x @ model)
        error[np.arange(len(rows)), problem.y[rows]] -= 1
        model = model - Setting.rate * (x.T @ (error * weight[:, None]))
    return model


def ratios_of(**fields: Any) -> dict[str, float]:
    """As `methods_of`: `uniform`, `anchored`, and `ratio...`, least noise with the paper's bias term.

    A ratio is the cost of one unit of heterogeneity over the geometric mean of the noise factors.
    """

    def runs(problem: Problem, setting: Setting) -> Runs:
        noise, unlike = noise_of(problem, setting), true_heterogeneity(problem)
        unit = noise.scale * float(np.exp(np.log(noise.factor).mean()))
        quota_of = {name: quotas(name, problem, setting) for name in ("uniform", "anchored")}
        quota_of |= {f"ratio{r}": quotas("least_noise", problem, setting, r * unit * unlike) for r in RATIOS}
        return {name: (name, quota, None) for name, quota in quota_of.items()}

    return _means(_accuracies(Setting(**fields), runs, SEEDS[:6]))
