"""The optimisers of clients: how a local step uses a noisy gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.config.registry import call
from dpfl_lightning.errors import require

Share = Annotated[float, Interval(ge=0, lt=1)]
Penalty = Annotated[float, Interval(ge=0, lt=math.inf)]


class LocalOptimizer:
    """An optimiser by its options. Every client starts each round with a new one, so momentum does not cross rounds.

    **Privacy** Post-processing: it sees noisy gradients only.
    """

    plain = False  # whether a step is `parameters -= learning_rate * gradient`

    def over(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """Return a new torch optimiser over the parameters."""
        raise NotImplementedError

    def independent_steps(self, steps: int) -> float:
        """Return the variance of the noise in an update of `steps` steps, in units of one plain step.

        NaN if it is not known, because the update is not a linear function of the noise. Weight decay is neglected.
        """
        return math.nan


@dataclass(frozen=True)
class SGD(LocalOptimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`.

    Args:
        momentum: factor of the momentum.
        nesterov: whether to use Nesterov momentum, which requires momentum > 0.
        weight_decay: L2 penalty.

    >>> SGD(momentum=0.5).independent_steps(2)  # the noise of the first step counts 1.5 times
    3.25
    """

    momentum: Share = 0.0
    nesterov: bool = False
    weight_decay: Penalty = 0.0

    def __post_init__(self) -> None:
        possible = not self.nesterov or self.momentum > 0
        require(possible, "clients.optimizer.nesterov", "be false without momentum", self.nesterov)

    @property
    def plain(self) -> bool:  # type: ignore[override]
        return self == SGD()

    def over(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"momentum": self.momentum, "nesterov": self.nesterov}
        return torch.optim.SGD(parameters, learning_rate, weight_decay=self.weight_decay, fused=True, **options)

    def independent_steps(self, steps: int) -> float:
        if self.momentum == 0:
            return steps
        ahead = range(1, steps + 1) if not self.nesterov else range(2, steps + 2)
        return math.fsum(((1 - self.momentum**n) / (1 - self.momentum)) ** 2 for n in ahead)


@dataclass(frozen=True)
class Adam(LocalOptimizer):
    """Adam, as `torch.optim.Adam`. Use a smaller learning rate than for SGD, such as 0.001.

    Args:
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: L2 penalty.
    """

    betas: tuple[float, ...] = (0.9, 0.999)
    eps: Annotated[float, Interval(gt=0)] = 1e-8
    weight_decay: Penalty = 0.0

    def __post_init__(self) -> None:
        fits = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(fits, "clients.optimizer.betas", "be two numbers in [0, 1)", list(self.betas))

    def over(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        first, second = self.betas
        return self.kind(parameters, learning_rate, (first, second), self.eps, self.weight_decay, fused=True)

    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.Adam


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`. Use a smaller learning rate than for SGD.

    Args:
        weight_decay: share of each parameter that a step removes, divided by the learning rate.
    """

    weight_decay: Penalty = 0.01
    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.AdamW


PLAIN_SGD = SGD()

#: registry name -> class, whose fields are the options
OPTIMIZERS: dict[str, type[LocalOptimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def build_optimizer(options: Mapping[str, Any]) -> LocalOptimizer:
    """Return the optimiser `{name, options}`. Raises UserError for an unknown name or option, or a value out of range.

    >>> build_optimizer({"name": "sgd", "momentum": 0.9})
    SGD(momentum=0.9, nesterov=False, weight_decay=0.0)
    """
    given = dict(options)
    return call("clients.optimizer", OPTIMIZERS, given.pop("name", "sgd"), **given)
