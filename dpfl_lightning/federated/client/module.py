"""One client's DPSGD step as a LightningModule: the seam between a model owner and every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import lightning as L
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.models import check_net
from dpfl_lightning.privacy.clipping.reference import Params
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.noise import RandomGenerator

FORWARD_CHUNK = 100  # records of a forward pass without gradients: their activations stay in the caches


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


class ClientModule(L.LightningModule):
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

    #: names of parameters of `net` that never leave the client; the engine keeps them for each client. Empty: those
    #: that the net itself names in an attribute `personal`, if any
    personal: tuple[str, ...] = ()

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        check_net(net)
        self.net = net
        self.automatic_optimization = False
        self.task: LocalTask | None = None
        self.personal = self.personal or tuple(getattr(net, "personal", ()))
        self._shapes = {name: p.shape for name, p in net.named_parameters() if p.requires_grad}
        for name in self.personal:
            require(name in self._shapes, "personal", f"name parameters of the net ({', '.join(self._shapes)})", name)

    # -- what a model owner may override

    def sample_loss(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        """One loss per record `[B]` for `x [B, *X]`, `y [B]`; record j's loss may depend on record j alone.

        What every engine differentiates: with a batch of one under `vmap` by the reference, with whole chunks by the
        fast engine.
        """
        return self.loss(functional_call(self.net, dict(params), (x,)), y)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """One loss per record `[B]`: cross entropy for integer targets, squared error for real ones."""
        if y.is_floating_point():
            return F.mse_loss(output.reshape(y.shape), y, reduction="none")
        return F.cross_entropy(output, y, reduction="none")

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

    # -- what engines use

    def begin(self, task: LocalTask, flat: Tensor) -> None:
        """Start a client's round at `flat` `[P]` with a fresh optimiser."""
        self.task = task
        with torch.no_grad():
            for parameter, value in zip(self.trainable, self.unflatten(flat).values(), strict=True):
                parameter.copy_(value)
        self.local_optimizer = self.configure_optimizers()

    @property
    def num_params(self) -> int:
        """P: trainable parameters of the net."""
        return sum(shape.numel() for shape in self._shapes.values())

    @property
    def named_trainable(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    @property
    def trainable(self) -> list[Tensor]:
        return list(self.named_trainable.values())

    @property
    def flat(self) -> Tensor:
        """All trainable parameters as one new vector `[P]`, detached."""
        return torch.cat([p.detach().reshape(-1) for p in self.trainable])

    @property
    def personal_mask(self) -> Tensor:
        """Which entries of the flat vector `[P]` (bool) stay with the client."""
        parts = [torch.full((shape.numel(),), name in self.personal) for name, shape in self._shapes.items()]
        return torch.cat(parts)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """`flat` `[P]` as named views that share its memory."""
        parts = flat.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def on_fit_start(self) -> None:
        self._require_task()

    def _require_task(self) -> LocalTask:
        if self.task is None:
            raise UserError(
                "`ClientModule` must be trained by a FederatedLoop, got a bare Trainer, which has no privacy ledger. "
                "For one client alone, give the loop a Population of one."
            )
        return self.task
