"""One client's DPSGD step as a LightningModule: the seam between a model owner and every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import lightning as L
import torch
from torch import Tensor, nn

from dpfl_lightning.errors import UserError
from dpfl_lightning.models.model import Model
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.noise import RandomGenerator


@dataclass(frozen=True)
class LocalTask:
    """What one client does in one round, as its module sees it.

    Args:
        clipped_sum: sums per-record gradients clipped in the mechanism's norm: a `ClippedSum`, which notes the norms.
        mechanism: bounds, noises and divides the sum; its event is charged before the task exists.
        noise: the generator of this (round, client)'s noise.
        learning_rate: of plain SGD, unless `configure_optimizers` says otherwise.
        norms: of the gradients so far, as `clipped_sum` notes them; private.
        anchor: `[P]`, or None; the step is pulled to it by `pull * (parameters - anchor)`. Data-free: costs nothing.
    """

    clipped_sum: Callable[..., Tensor]
    mechanism: Mechanism
    noise: RandomGenerator
    learning_rate: float
    norms: list[Tensor] = field(default_factory=list)
    anchor: Tensor | None = None
    pull: float = 0.0


class ClientModule(Model, L.LightningModule):
    """One client's local DPSGD step; one module serves all clients (parameters are swapped, not rebuilt).

    Wrap any `torch.nn.Module` whose outputs for one record depend on that record alone, or subclass it and override
    `loss` or `sample_loss`, `configure_optimizers` for another optimiser (engines `serial` and `trainer`), or
    `personal` for parameters that stay with each client.

    Args:
        net: maps `[B, *X]` to `[B, num_classes]` (classification) or `[B, 1]` (regression).

    **Guarantees** `training_step` adds noise before anything of a record reaches the parameters, even for an empty
    batch.

    **Privacy** One `training_step` is one step of `task.mechanism`; the loop charges it beforehand. A bare
    `lightning.Trainer` has no ledger, so fitting with one is refused.

    Raises:
        UserError: a layer mixes records (BatchNorm), nothing is trainable, or `personal` names no parameter.

    >>> module = ClientModule(nn.Linear(4, 3))
    >>> module.num_params
    15
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False
        self.task: LocalTask | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD over the net; it sees noised gradients only, so any optimiser is post-processing."""
        return torch.optim.SGD(self.trainable, lr=self._require_task().learning_rate)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Clip -> sum -> noise -> optimiser, on `x [B, *X]`, `y [B]`, B may be 0."""
        task = self._require_task()
        clipped = task.clipped_sum(self.named_trainable, *batch, task.mechanism.clip_norm)  # [1, P]
        step = task.mechanism.privatise(clipped, task.noise, self.flat.dtype)[0]  # [P]
        if task.anchor is not None:
            step += task.pull * (self.flat - task.anchor)
        for parameter, gradient in zip(self.trainable, self.unflatten(step).values(), strict=True):
            parameter.grad = gradient.to(parameter.dtype, copy=True)
        self.local_optimizer.step()

    def begin(self, task: LocalTask, flat: Tensor) -> None:
        """Start a client's round at `flat` `[P]` with a fresh optimiser."""
        self.task = task
        with torch.no_grad():
            for parameter, value in zip(self.trainable, self.unflatten(flat).values(), strict=True):
                parameter.copy_(value)
        self.local_optimizer = self.configure_optimizers()

    def on_fit_start(self) -> None:
        self._require_task()

    def _require_task(self) -> LocalTask:
        if self.task is None:
            raise UserError(
                "`ClientModule` must be trained by a FederatedLoop, got a bare Trainer, which has no privacy ledger. "
                "For one client alone, give the loop a Population of one."
            )
        return self.task
