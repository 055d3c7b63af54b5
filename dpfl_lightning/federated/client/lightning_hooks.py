"""What a user's LightningModule overrides, and what a run uses of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, TypeGuard

import lightning as L
from torch import nn
from torchmetrics import Metric, MetricCollection

from dpfl_lightning.errors import UserError

#: what a run uses of a LightningModule, or what changes nothing in it
_USED = {"forward", "training_step", "configure_optimizers", "configure_model"}


def is_lightning(module: nn.Module) -> TypeGuard[L.LightningModule]:
    """Return whether a module is a LightningModule, of `lightning` or of the older package `pytorch_lightning`."""
    return any(kind.__name__ == "LightningModule" for kind in type(module).__mro__)


def overrides(module: nn.Module, name: str) -> bool:
    """Return whether the class of a module overrides a method of LightningModule."""
    kinds = iter(type(module).__mro__)
    return any(name in vars(kind) for kind in takewhile(lambda kind: kind.__name__ != "LightningModule", kinds))


def unused(module: nn.Module) -> list[str]:
    """Names of the hooks and metrics of a module that a run does not use; of no LightningModule none is used."""
    if not is_lightning(module):
        return [name for name in ("training_step", "configure_optimizers") if callable(getattr(module, name, None))]
    public = (name for name in dir(L.LightningModule) if not name.startswith("_") and name not in _USED)
    hooks = [name for name in public if overrides(module, name)]
    return hooks + [name for name, one in module.named_children() if isinstance(one, Metric | MetricCollection)]


class ClientTrainer:
    """What a LightningModule sees as its trainer; UserError for all that a run does not know."""

    logger, loggers, global_rank, local_rank = None, (), 0, 0

    def __init__(self, reader: str, **known: int) -> None:
        self._reader, self._known = reader, known

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._known:
            return self._known[name]
        raise UserError(
            f"`{self._reader}` must not read the trainer (nor current_epoch, global_step, optimizers() or "
            f"lr_schedulers()), got `trainer.{name}`. A client has no Trainer: let a learning rate schedule in "
            "configure_optimizers change what changes with time; it may read trainer.max_epochs (rounds) and "
            "trainer.estimated_stepping_batches (rounds x local steps)."
        )


def configured_by(module: L.LightningModule, rounds: int, steps: int) -> Any:
    """Return what `configure_optimizers` of a module returns for a run of so many rounds and local steps in each."""
    trainer = ClientTrainer("configure_optimizers", max_epochs=rounds, estimated_stepping_batches=rounds * steps)
    with replaced([(module, {"_trainer": trainer})]):
        return module.configure_optimizers()


@contextmanager
def replaced(attributes: Sequence[tuple[nn.Module, dict[str, Any]]]) -> Iterator[None]:
    """Replace attributes of objects for a while."""
    before = [{name: vars(one)[name] for name in new if name in vars(one)} for one, new in attributes]
    try:
        for one, new in attributes:
            vars(one).update(new)
        yield
    finally:
        for (one, new), old in zip(attributes, before, strict=True):
            for name in new.keys() - old.keys():
                del vars(one)[name]
            vars(one).update(old)
