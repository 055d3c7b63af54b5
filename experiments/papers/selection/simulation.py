"""A simulated problem of ten classes and thirty clients, to compare ways to select and to weigh clients.

A linear softmax model, whose clipped gradients have a closed form, with the strategies' quotas, cohorts and noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfl_lightning.algorithms.allocation import allocate_int, anchor_strength
from dpfl_lightning.algorithms.cohorts import systematic
from dpfl_lightning.algorithms.selection_estimates import NoiseModel, gaussian_noise, laplace_noise
from dpfl_lightning.data.partition import partition

Vector = NDArray[np.float64]
Quota = NDArray[np.int64]  # participations of each client, `[N]`

CLIENTS, COHORT, ROUNDS, SEEDS = 30, 6, 100, range(6)
DELTA = 1e-5
_CLASSES, _FEATURES, _RECORDS, _TEST = 10, 64, 7000, 1000
_RATE, _HALF_AFTER = 4.0, 50
_STEPS_TO_OPTIMUM = 300  # full batches without noise: three times those of a run

_WEIGHTS = {"weiavg": "epsilon", "inverse": "noise"}  # weights of equal quotas


@dataclass(frozen=True)
class Setting:
    """One column: mechanism, Dirichlet parameter of the classes, and budgets uniform between two ends."""

    mechanism: str
    alpha: float
    low: float
    high: float

    @property
    def clip_norm(self) -> float:
        """L2 norm of a record's gradient for Gaussian noise, L1 norm for Laplace noise."""
        return 1.0 if self.mechanism == "gaussian" else 4.0


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
        return gaussian_noise(setting.clip_norm, num_params, problem.epsilon, DELTA, problem.records)
    return laplace_noise(setting.clip_norm, num_params, problem.epsilon, problem.records)


def quotas(method: str, problem: Problem, setting: Setting, bias_cost: Vector | float = 0.0) -> NDArray[np.int64]:
    """Quotas of a whole run, `[N]`: equal ones unless `method` is `least_noise` or `anchored`."""
    noise, total = noise_of(problem, setting), COHORT * ROUNDS
    if method not in ("least_noise", "anchored"):
        return allocate_int(np.ones(CLIENTS), total, upper=ROUNDS)
    scale = setting.clip_norm * (1.0 if setting.mechanism == "gaussian" else 0.25)
    anchor = anchor_strength(CLIENTS, ROUNDS, scale) if method == "anchored" else 0.0
    factor = noise.scale * noise.factor
    return allocate_int(factor, total, noise.exponent, bias_cost, upper=ROUNDS, anchor=anchor)


# ---- runs


def accuracy_of(method: str, problem: Problem, setting: Setting, seed: int, quota: NDArray[np.int64]) -> float:
    """Test accuracy after the last round, in per cent; `fedsgd` has neither noise nor clipping."""
    draw = np.random.default_rng([seed, 1])
    order, private = (2 if setting.mechanism == "gaussian" else 1), method != "fedsgd"
    variance = noise_of(problem, setting).variance(quota) / ((_FEATURES + 1) * _CLASSES)  # of one number
    weight_of = {"epsilon": problem.epsilon, "noise": 1 / np.maximum(variance, 1e-300)}.get(_WEIGHTS.get(method, ""))
    model, left = np.zeros((_FEATURES + 1, _CLASSES)), quota.copy()
    for round in range(1, ROUNDS + 1):
        cohort = systematic(left, ROUNDS - round + 1, draw)
        left[cohort] -= 1
        weights = np.ones(len(cohort)) if weight_of is None else weight_of[cohort]
        mean = np.zeros_like(model)
        for client, weight in zip(cohort, weights / weights.sum(), strict=True):
            rows = problem.rows_of[client]
            mean += weight * problem.gradient(model, rows, setting.clip_norm if private else np.inf, order)
            if private:
                mean += weight * _noise(draw, setting.mechanism, variance[client], model.shape)
        model = model - _RATE / (1 + round / _HALF_AFTER) * mean
    return problem.accuracy(model)


def _noise(draw: np.random.Generator, mechanism: str, variance: float, shape: tuple[int, ...]) -> Vector:
    if mechanism == "gaussian":
        return np.sqrt(variance) * draw.standard_normal(shape)
    return draw.laplace(0.0, np.sqrt(variance / 2), shape)


METHODS = ("fedsgd", "uniform", "weiavg", "inverse", "least_noise", "anchored")


def methods_of(**fields: Any) -> dict[str, float]:
    """Mean test accuracy of each method over six draws, in per cent, and `..._std`; `fields` are those of `Setting`."""
    return _accuracies(Setting(**fields), lambda problem, setting: {m: quotas(m, problem, setting) for m in METHODS})


def _accuracies(setting: Setting, quotas_of: Callable[[Problem, Setting], Mapping[str, Quota]]) -> dict[str, float]:
    accuracies: dict[str, list[float]] = {}
    for seed in SEEDS:
        problem = Problem.drawn(setting, seed)
        for name, quota in quotas_of(problem, setting).items():
            accuracies.setdefault(name, []).append(accuracy_of(name, problem, setting, seed, quota))
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
        model = model - _RATE * (x.T @ (error * weight[:, None]))
    return model


def ratios_of(**fields: Any) -> dict[str, float]:
    """As `methods_of`: `uniform`, `anchored`, and `ratio...`, least noise with the paper's bias term.

    A ratio is the cost of one unit of heterogeneity over the geometric mean of the noise factors.
    """

    def quotas_of(problem: Problem, setting: Setting) -> dict[str, Quota]:
        noise, unlike = noise_of(problem, setting), true_heterogeneity(problem)
        unit = noise.scale * float(np.exp(np.log(noise.factor).mean()))
        quota_of = {name: quotas(name, problem, setting) for name in ("uniform", "anchored")}
        return quota_of | {f"ratio{r}": quotas("least_noise", problem, setting, r * unit * unlike) for r in RATIOS}

    return _accuracies(Setting(**fields), quotas_of)
