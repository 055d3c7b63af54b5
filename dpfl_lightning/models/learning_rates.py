"""Schedules of the clients' learning rate over the rounds of a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from dpfl_lightning.config.registry import call
from dpfl_lightning.config.typed import Interval


@dataclass(frozen=True)
class Constant:
    """The learning rate stays as it is.

    Args:
        warmup_rounds: number of first rounds in which the learning rate rises linearly; the decay starts after them.
    """

    warmup_rounds: Annotated[int, Interval(ge=0)] = 0

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
        final: share of the learning rate.
    """

    final: Annotated[float, Interval(ge=0, le=1)] = 0.0

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
        every: number of rounds with one learning rate.
        gamma: factor.
    """

    every: Annotated[int, Interval(ge=1)] = 10
    gamma: Annotated[float, Interval(gt=0, le=1)] = 0.5

    def decay(self, round: int, rounds: int) -> float:
        return self.gamma ** ((round - 1) // self.every)


@dataclass(frozen=True)
class Inverse(Constant):
    """Divides the learning rate in round t by `1 + t / half_after`.

    Args:
        half_after: number of rounds after which the learning rate has halved.

    Reference: Ma et al., "The Power of Bias", section VI, with `half_after` 200, or 100 on CIFAR-10.
    """

    half_after: Annotated[float, Interval(gt=0, lt=math.inf)] = 200.0

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
