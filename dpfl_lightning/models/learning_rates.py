"""Schedules of the clients' learning rate over the rounds of a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpfl_lightning.config.registry import call
from dpfl_lightning.errors import require


def _check(name: str, must: str, value: float, ok: bool) -> None:
    require(ok, f"clients.schedule.{name}", must, value)


@dataclass(frozen=True)
class Constant:
    """The learning rate stays as it is.

    Args:
        warmup_rounds: number of first rounds in which the learning rate rises linearly, >= 0; the decay starts after
            them.
    """

    warmup_rounds: int = 0

    def __post_init__(self) -> None:
        _check("warmup_rounds", "be >= 0", self.warmup_rounds, self.warmup_rounds >= 0)

    def factor(self, round: int, rounds: int) -> float:
        """Return the factor of every client's learning rate in one of the rounds 1 ... `rounds`; it is public."""
        if round <= self.warmup_rounds:
            return round / (self.warmup_rounds + 1)
        return self.decay(round - self.warmup_rounds, max(1, rounds - self.warmup_rounds))

    def decay(self, round: int, rounds: int) -> float:
        """Return the factor in a round after the warm-up, counted from 1."""
        return 1.0


@dataclass(frozen=True)
class Cosine(Constant):
    """Half a cosine from the full learning rate to the share `final` of it, which would follow the last round.

    Args:
        final: share of the learning rate, in [0, 1].
    """

    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("final", "be in [0, 1]", self.final, 0 <= self.final <= 1)

    def decay(self, round: int, rounds: int) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * (round - 1) / rounds)) / 2


@dataclass(frozen=True)
class Linear(Cosine):
    """A straight line from the full learning rate to the share `final` of it, which would follow the last round."""

    def decay(self, round: int, rounds: int) -> float:
        return 1 - (1 - self.final) * (round - 1) / rounds


@dataclass(frozen=True)
class Step(Constant):
    """Multiplies the learning rate by `gamma` after every `every` rounds; with `every` 1 it decays exponentially.

    Args:
        every: number of rounds with one learning rate, >= 1.
        gamma: factor, in (0, 1].
    """

    every: int = 10
    gamma: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("every", "be >= 1", self.every, self.every >= 1)
        _check("gamma", "be in (0, 1]", self.gamma, 0 < self.gamma <= 1)

    def decay(self, round: int, rounds: int) -> float:
        return self.gamma ** ((round - 1) // self.every)


@dataclass(frozen=True)
class Inverse(Constant):
    """Divides the learning rate in round t by `1 + t / half_after`.

    Args:
        half_after: number of rounds after which the learning rate has halved, > 0.

    Reference: Ma et al., "The Power of Bias", section VI, with `half_after` 200, or 100 on CIFAR-10.
    """

    half_after: float = 200.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("half_after", "be above 0 and finite", self.half_after, 0 < self.half_after < math.inf)

    def decay(self, round: int, rounds: int) -> float:
        return 1 / (1 + round / self.half_after)


CONSTANT = Constant()

#: registry name -> class, whose fields are the options
SCHEDULES: dict[str, type[Constant]] = {
    "constant": Constant,
    "cosine": Cosine,
    "linear": Linear,
    "step": Step,
    "inverse": Inverse,
}


def build_schedule(options: Mapping[str, Any]) -> Constant:
    """Return the schedule `{name, options}`. Raises UserError for an unknown name or option, or a value out of range.

    >>> [round(build_schedule({"name": "linear", "warmup_rounds": 1}).factor(t, 5), 2) for t in range(1, 6)]
    [0.5, 1.0, 0.75, 0.5, 0.25]
    """
    given = dict(options)
    return call("clients.schedule", SCHEDULES, given.pop("name", "constant"), **given)
