"""The optimiser of a client and its learning rate schedule, as the user's function or LightningModule returns them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dpfl_lightning.errors import UserError, require

#: optimisers of torch that treat every number in the same way, so that several tensors may be one
_ELEMENTWISE = {getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad")}


@dataclass(frozen=True)
class ConfiguredOptimizer:
    """An optimiser, and possibly a schedule that takes a step after every `frequency` rounds (or local steps).

    `key` names in errors what returned it: the argument `optimizer` or the method `configure_optimizers`.
    """

    key: str
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None = None
    every_step: bool = False
    frequency: int = 1

    @classmethod
    def of(cls, answer: Any, key: str) -> ConfiguredOptimizer:
        """Read an answer in one of the forms that Lightning accepts.

        Raises UserError for several optimisers, an optimiser that needs a closure, and `ReduceLROnPlateau`.
        """
        if isinstance(answer, list | tuple) and len(answer) == 2 and all(isinstance(one, list) for one in answer):
            optimizers, schedulers = answer
            optimizer, schedule = _only(key, optimizers), _only(key, schedulers) if schedulers else None
        elif isinstance(answer, Mapping):
            optimizer, schedule = answer.get("optimizer"), answer.get("lr_scheduler")
        elif isinstance(answer, list | tuple):
            return cls.of(_only(key, answer), key)
        else:
            optimizer, schedule = answer, None
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
            none = "no optimizer (remove it to train with clients.optimizer)"
            raise _refused(key, none if optimizer is None else type(optimizer).__name__)
        if schedule is None:
            return cls(key, optimizer)
        settings = dict(schedule) if isinstance(schedule, Mapping) else {"scheduler": schedule}
        scheduler, interval = settings.get("scheduler"), settings.get("interval", "epoch")
        frequency = settings.get("frequency", 1)
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise _refused(key, f"a schedule by {type(scheduler).__name__}")
        if interval not in ("step", "epoch") or not (isinstance(frequency, int) and frequency >= 1):
            raise _refused(key, f"a schedule with interval {interval!r} and frequency {frequency!r}")
        return cls(key, optimizer, scheduler, interval == "step", frequency)

    def check(self, again: ConfiguredOptimizer, trainable: Mapping[str, Tensor]) -> list[str]:
        """Return the names of `trainable` parameters that no group contains.

        Raises UserError if `again`, the answer to a second call, is the same optimiser, the schedule is that of another
        one, or a parameter is not one of `trainable`. Frozen parameters are ignored.
        """
        new, advice = self.optimizer is not again.optimizer, "Each round of a client starts with a new one."
        require(new, self.key, "return a new optimizer in every call", "one object", advice)
        if getattr(self.scheduler, "optimizer", self.optimizer) is not self.optimizer:
            raise _refused(self.key, "a schedule of another optimizer")
        grouped = {one for group in self.optimizer.param_groups for one in group["params"]}
        moved = {one for one in grouped if one.requires_grad}
        advice = "Use self.parameters(), or those that ClientModule(optimizer=...) is given."
        fits = {*trainable.values()} >= moved > set()
        require(fits, self.key, "use the parameters that the run trains", "other ones", advice)
        return [name for name, one in trainable.items() if one not in moved]

    def idle_rounds(self, rounds: int, steps: int) -> list[int]:
        """Return the rounds in which every learning rate is 0. The optimiser cannot be used afterwards.

        Raises UserError if a learning rate is negative or not finite.
        """
        settings, idle = GroupSettings(self), []
        for round in range(1, rounds + 1):
            numbers = {self.steps_taken(round, steps, step) for step in range(steps)}
            groups = [group for number in numbers for group in settings.after(number)]
            rates = [float(group.get("lr", 1.0)) for group in groups]  # some optimisers have none
            for rate in rates:
                must = f"give learning rates >= 0 that are finite, also in round {round}"
                require(0 <= rate < math.inf, self.key, must, rate)
            idle += [] if any(rates) else [round]
        return idle

    def steps_taken(self, round: int, steps: int, step: int) -> int:
        """Steps of the schedule before a local step of a round, both counted from 1 and 0, with `steps` in a round."""
        if self.scheduler is None:
            return 0
        passed = (round - 1) * steps + step if self.every_step else round - 1
        return passed // self.frequency


class GroupSettings:
    """The settings of an optimiser's parameter groups (`lr`, `momentum`, ...) after any number of schedule steps."""

    def __init__(self, configured: ConfiguredOptimizer) -> None:
        self._key, self._optimizer, self._scheduler = configured.key, configured.optimizer, configured.scheduler
        for group in self._optimizer.param_groups:
            group["params"] = [torch.zeros(()) for _ in group["params"]]  # a step without gradients changes nothing
        self._known = [self._now()]

    def after(self, number: int) -> list[dict[str, Any]]:
        """Return the settings of each group after `number` steps of the schedule."""
        while len(self._known) <= number:
            assert self._scheduler is not None  # for mypy
            self._optimizer.step()
            try:
                self._scheduler.step()
            except ValueError as error:  # such as OneCycleLR after its last step
                reason = f"a schedule that ends after {len(self._known) - 1} steps ({error})"
                raise _refused(self._key, reason) from None
            self._known.append(self._now())
        return self._known[number]

    def _now(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]


def on_one_vector(optimizer: torch.optim.Optimizer, trainable: Sequence[Tensor], flat: Tensor) -> bool:
    """Let an optimiser work on `flat` `[P]` in place of all `trainable` parameters, if this is known to be the same.

    Returns False if it may treat parameters differently, or knows them otherwise: then it is unchanged.
    """
    groups, hooks = optimizer.param_groups, (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if type(optimizer) not in _ELEMENTWISE or len(groups) > 1 or any(hooks):
        return False
    if not {*trainable} <= {*groups[0]["params"]}:
        return False
    groups[0]["params"] = [flat]
    return True


def _only(key: str, several: Any) -> Any:
    if len(several) != 1:
        raise _refused(key, f"{len(several)} optimizers or schedules")
    return several[0]


def _refused(key: str, got: str) -> UserError:
    return UserError(
        f"`{key}` must return one torch optimizer that needs no closure, alone or with one learning rate schedule that "
        f"needs no metric, got {got}."
    )
