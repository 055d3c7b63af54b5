"""What `configure_optimizers` of a module returns: the optimiser of a client, and its learning rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dpfl_lightning.errors import UserError

#: optimisers that treat every number alike, so that several tensors may be one
_ELEMENTWISE = {getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad")}


@dataclass(frozen=True)
class ConfiguredOptimizer:
    """An optimiser, and possibly a schedule that takes a step after every `frequency` rounds (or local steps)."""

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None = None
    every_step: bool = False
    frequency: int = 1

    @classmethod
    def of(cls, answer: Any) -> ConfiguredOptimizer:
        """Read an answer in one of the forms that Lightning accepts.

        Raises UserError for several optimisers, an optimiser that needs a closure, and `ReduceLROnPlateau`.
        """
        if isinstance(answer, list | tuple) and len(answer) == 2 and all(isinstance(one, list) for one in answer):
            optimizers, schedulers = answer
            optimizer, schedule = _only(optimizers), _only(schedulers) if schedulers else None
        elif isinstance(answer, Mapping):
            optimizer, schedule = answer.get("optimizer"), answer.get("lr_scheduler")
        elif isinstance(answer, list | tuple):
            return cls.of(_only(answer))
        else:
            optimizer, schedule = answer, None
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
            none = "no optimizer (remove the method to train with clients.optimizer)"
            raise _refused(none if optimizer is None else type(optimizer).__name__)
        if schedule is None:
            return cls(optimizer)
        settings = dict(schedule) if isinstance(schedule, Mapping) else {"scheduler": schedule}
        scheduler, interval = settings.get("scheduler"), settings.get("interval", "epoch")
        frequency = settings.get("frequency", 1)
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise _refused(f"a schedule by {type(scheduler).__name__}")
        if interval not in ("step", "epoch") or not (isinstance(frequency, int) and frequency >= 1):
            raise _refused(f"a schedule with interval {interval!r} and frequency {frequency!r}")
        return cls(optimizer, scheduler, interval == "step", frequency)

    def steps_taken(self, round: int, steps: int, step: int) -> int:
        """Steps of the schedule before a local step of a round, both counted from 1 and 0, with `steps` in a round."""
        passed = (round - 1) * steps + step if self.every_step else round - 1
        return passed // self.frequency


class GroupSettings:
    """The settings of an optimiser's parameter groups (`lr`, `momentum`, ...) after any number of schedule steps."""

    def __init__(self, configured: ConfiguredOptimizer) -> None:
        assert configured.scheduler is not None
        self._optimizer, self._scheduler = configured.optimizer, configured.scheduler
        for group in self._optimizer.param_groups:
            group["params"] = [torch.zeros(()) for _ in group["params"]]  # a step without gradients changes nothing
        self._known = [self._now()]

    def after(self, number: int) -> list[dict[str, Any]]:
        """Return the settings of each group after `number` steps of the schedule."""
        while len(self._known) <= number:
            self._optimizer.step()
            try:
                self._scheduler.step()
            except ValueError as error:  # such as OneCycleLR after its last step
                reason = f"a schedule that ends after {len(self._known) - 1} steps ({error})"
                raise _refused(reason) from None
            self._known.append(self._now())
        return self._known[number]

    def _now(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]


def on_one_vector(optimizer: torch.optim.Optimizer, views: Mapping[Tensor, Tensor], flat: Tensor) -> list[Tensor]:
    """Let an optimiser work on `flat` `[P]` in place of parameters, and return the tensors that need a gradient.

    `views` maps each parameter to its view of `flat`. An optimiser that treats all numbers alike works on the whole
    vector at once, and any other one on the views.
    """
    groups = optimizer.param_groups
    for group in groups:
        group["params"] = [views[parameter] for parameter in group["params"] if parameter in views]
    if type(optimizer) in _ELEMENTWISE and len(groups) == 1 and len(groups[0]["params"]) == len(views):
        groups[0]["params"] = [flat]
        return [flat]
    return list(views.values())


def _only(several: Any) -> Any:
    if len(several) != 1:
        raise _refused(f"{len(several)} optimizers or schedules")
    return several[0]


def _refused(got: str) -> UserError:
    return UserError(
        "`configure_optimizers` must return one torch optimizer that needs no closure, alone or with one learning rate "
        f"schedule that needs no metric, got {got}."
    )
