"""Any question to a client other than training: noised at the client, with an event that is charged first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpfl_lightning.client import FORWARD_CHUNK, ClientModule
from dpfl_lightning.privacy.clipping import VmapClippedSum, evaluating, summing_dtype
from dpfl_lightning.privacy.events import Caveat, Event, SelectionEvent, Unprotected
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.noise import RandomGenerator

Answers = Mapping[int, object]  # client -> noised answer


class Query(Protocol):
    """A question with a price: a dataclass."""

    @property
    def purpose(self) -> str:
        """The line of every asked client's schedule that pays."""
        ...

    @property
    def clients(self) -> tuple[int, ...]:
        """Who is asked."""
        ...

    def event_of(self, client: int) -> Event:
        """What the client's answer releases; must be the event that was planned."""
        ...

    def answer(self, client: int, module: ClientModule, x: Tensor, y: Tensor, generator: RandomGenerator) -> object:
        """The noised answer of one client for its records `x [n, *X]`, `y [n]`. Runs at the client."""
        ...


@dataclass(frozen=True)
class SelectModel:
    """Which of M models fits a client best: the exponential mechanism on clipped losses.

    `argmax_m [ -sum_j min(loss_j(theta_m), loss_bound) / loss_bound + Gumbel(0, 1 / epsilon) ]`. One record moves every
    utility in the same direction by at most 1, so the range is bounded by `epsilon`.

    Args:
        models: `[M, P]`.
        epsilon: client -> bounded range of its selection, > 0 and finite.
        loss_bound: losses are clipped to [0, loss_bound]; log(classes) to 2 log(classes) is sensible.

    **Privacy** `SelectionEvent(epsilon)` for each asked client. Where one record is replaced by another a utility moves
    either way, and the accountant charges twice the range.
    """

    clients: tuple[int, ...]
    models: Tensor
    epsilon: Mapping[int, float]
    loss_bound: float
    purpose: str = "select"

    def event_of(self, client: int) -> SelectionEvent:
        return SelectionEvent(self.epsilon[client])

    def answer(self, client: int, module: ClientModule, x: Tensor, y: Tensor, generator: RandomGenerator) -> int:
        utilities = -summed_losses(module, self.models, x, y, (0.0, self.loss_bound)) / self.loss_bound
        noise = generator.gumbel(0.0, 1.0 / self.epsilon[client], len(utilities))
        return int((utilities + torch.from_numpy(noise)).argmax())


@dataclass(frozen=True)
class LowestLoss:
    """Which of M models has the lowest mean loss on a client's records: neither clipped nor noised.

    Args:
        models: `[M, P]`; of equal losses the first wins.
        events: client -> what is said of its answer.

    **Privacy** None: the answer is a plain function of private records. Its event says so in words: a `Caveat` beside
    an epsilon that does not cover it, `Unprotected` where nothing is covered anyway.
    """

    clients: tuple[int, ...]
    models: Tensor
    events: Mapping[int, Caveat | Unprotected]
    purpose: str = "select"

    def event_of(self, client: int) -> Caveat | Unprotected:
        return self.events[client]

    def answer(self, client: int, module: ClientModule, x: Tensor, y: Tensor, generator: RandomGenerator) -> int:
        return int(summed_losses(module, self.models, x, y, (-math.inf, math.inf)).argmin())


@dataclass(frozen=True)
class MeanLoss:
    """The mean loss of each client's records, clipped and noised.

    `(sum_j (min(loss_j, bound) - bound / 2) + noise) / records + bound / 2`: around the middle one record more, less or
    other moves the sum by half of the bound, half of it, or all of it.

    Args:
        models: `[M, P]`.
        row_of: client -> row of the model at which it is asked.
        mechanism_of: client -> full-batch mechanism; its clip norm is half of `loss_bound`.
        loss_bound: losses are clipped to [0, loss_bound].

    **Privacy** One step of the client's mechanism.
    """

    clients: tuple[int, ...]
    models: Tensor
    row_of: Mapping[int, int]
    mechanism_of: Mapping[int, Mechanism]
    loss_bound: float
    purpose: str = "loss"

    def event_of(self, client: int) -> Event:
        return self.mechanism_of[client].event(1)

    def answer(self, client: int, module: ClientModule, x: Tensor, y: Tensor, generator: RandomGenerator) -> float:
        model, middle = self.models[self.row_of[client]][None], self.loss_bound / 2
        total = summed_losses(module, model, x, y, (0.0, self.loss_bound)) - middle * len(y)
        return float(self.mechanism_of[client].privatise(total[:, None], generator)) + middle


@dataclass(frozen=True)
class LossesAroundStep:
    """Each client's mean loss at a model, and after its own clipped full-batch step from there, before noise.

    What the selection paper's clients report: neither loss is clipped, and the step without noise holds all records, so
    that no bound of what one record moves is known.

    Args:
        model: `[P]`.
        mechanism_of: client -> of the noise that is added to either loss.
        step_of: client -> clip norm, its order and learning rate of the step.
        words: what the guarantee says of the answers.

    **Privacy** None that is known, as `words` must say.
    """

    clients: tuple[int, ...]
    model: Tensor
    mechanism_of: Mapping[int, Mechanism]
    step_of: Mapping[int, tuple[float, int, float]]
    words: str
    purpose: str = "loss"

    def event_of(self, client: int) -> Event:
        return Caveat(self.words)

    def answer(
        self, client: int, module: ClientModule, x: Tensor, y: Tensor, generator: RandomGenerator
    ) -> tuple[float, float]:
        clip_norm, order, rate = self.step_of[client]
        clipped_sum = VmapClippedSum(module.sample_loss)
        step = clipped_sum(module.unflatten(self.model), x, y, clip_norm, order=order)[0]
        models = torch.stack([self.model, self.model - rate * step / len(y)])
        totals = summed_losses(module, models, x, y, (-math.inf, math.inf))
        before, after = self.mechanism_of[client].privatise(totals[None], generator)[0].tolist()
        return before, after


@torch.no_grad()
def summed_losses(module: ClientModule, models: Tensor, x: Tensor, y: Tensor, bounds: tuple[float, float]) -> Tensor:
    """The sum over records of each model's loss, clipped to `bounds`, `[M]` float64 on the CPU.

    A loss that is no number counts as the upper bound. A chunk of records at a time: memory does not grow with them.
    Each loss is of its own record alone: nets that mix records were refused (`check_fits`).

    Args:
        models: `[M, P]`.
        x: `[n, *X]`, private, as is y.
        y: `[n]`.
    """
    totals = models.new_zeros(len(models), dtype=summing_dtype(models))
    with evaluating(module.net):
        for row, model in enumerate(models):
            params = module.unflatten(model)
            for inputs, targets in zip(x.split(FORWARD_CHUNK), y.split(FORWARD_CHUNK), strict=True):
                losses = module.sample_loss(params, inputs, targets).clamp(*bounds)
                totals[row] += losses.nan_to_num(nan=bounds[1], posinf=bounds[1]).sum(dtype=totals.dtype)
    return totals.cpu().double()
