"""Guesses of a server that chooses the weights: was a record among those of a release?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import beta, norm
from torch import Tensor, nn

from dpfl_lightning.auditing.company import hostile
from dpfl_lightning.privacy.accounting.gaussian import gaussian_mu

WIDTH, UNITS = 64, 32
EPSILON, DELTA = 1.0, 1e-5  # what a release claims
MODELS = 600  # of which the server takes the one that tells most
CONFIDENCE = 0.99
LARGE = 1e9  # products of cancelling weights, none of which is above 10^6: a node refuses larger ones
#: how the records of a data set are made: all different, or copies of one
RECORDS = ("different", "equal")

Batch = tuple[Tensor, Tensor]
#: the sum of the clipped gradients `[P]` for weights and records
Sum = Callable[[Mapping[str, Tensor], Batch], Tensor]


class Regression(nn.Sequential):
    """Two matrices, for one number as output."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, UNITS), nn.ReLU(), nn.Linear(UNITS, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 0]


def neighbours(kind: str, count: int) -> tuple[Batch, Batch]:
    """Return `count` records, and the same with one more."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count + 1, WIDTH, generator=generator)
    y = torch.randn(count + 1, generator=generator)
    if kind == "equal":
        x, y = x[:1].repeat(count + 1, 1), y[:1].repeat(count + 1)
    return (x[:count].clone(), y[:count].clone()), (x, y)


@dataclass(frozen=True)
class Worst:
    """Weights of a server, and the sums of the two neighbours without noise, `[P]`, in clip norms."""

    params: Mapping[str, Tensor]
    without: Tensor
    with_record: Tensor

    @property
    def moved(self) -> float:
        return float((self.with_record - self.without).norm())

    def score(self, noisy_sum: Tensor) -> float:
        """Return the score of a noisy sum, above 0 if the record is more likely in it: the best test."""
        middle, direction = (self.with_record + self.without) / 2, self.with_record - self.without
        return float((noisy_sum.double() - middle) @ direction)


def worst_model(summed: Sum, pair: tuple[Batch, Batch], models: int = MODELS) -> Worst:
    """Return the hostile model, of so many, for which the sums of the neighbours are furthest apart."""
    like, best = dict(Regression().named_parameters()), None
    for seed in range(models):
        params = hostile({name: p.detach() for name, p in like.items()}, seed, LARGE)
        found = Worst(params, *(summed(params, batch).double() for batch in pair))
        if best is None or found.moved > best.moved:
            best = found
    assert best is not None  # for mypy
    return best


def multiplier() -> float:
    """Return the noise multiplier of one full-batch release of the claimed epsilon and delta."""
    return 1 / float(gaussian_mu(np.array([EPSILON]), np.array([DELTA]))[0])


def guessed(kind: str, count: int, worst: Worst, trials: int, release: Callable[[bool], Tensor]) -> dict[str, Any]:
    """Guess so many coins from `release(coin)`, a noisy sum `[P]`; return how often it was right, and the claim."""
    coins = np.random.default_rng().random(trials) < 0.5
    right = sum((worst.score(release(bool(coin))) > 0) == coin for coin in coins)
    low = float(beta.ppf((1 - CONFIDENCE) / 2, right, trials - right + 1)) if right else 0.0
    high = float(beta.ppf(1 - (1 - CONFIDENCE) / 2, right + 1, trials - right)) if right < trials else 1.0
    return {
        "records": f"{count} {kind}",
        "moved": worst.moved,
        "trials": trials,
        "right": int(right),
        "accuracy": right / trials,
        "low": low,
        "high": high,
        "claimed": float(norm.cdf(1 / multiplier() / 2)),
    }
