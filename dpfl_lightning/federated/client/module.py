"""The private training step of a client as a LightningModule."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import lightning as L
import torch
from torch import Tensor, nn

from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.plan import ClassGradients
from dpfl_lightning.models.model import Model
from dpfl_lightning.privacy.clipping.inputs import Inputs
from dpfl_lightning.privacy.clipping.reference import ClippedSum, ClipRequest, Params
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.noise import RandomGenerator


@dataclass(frozen=True)
class LocalTask:
    """The task of a client in one round. The event of its mechanism was charged before; its `norms` are private.

    With an `anchor` `[P]` each step adds `pull * (parameters - anchor)`, which does not depend on data.
    """

    clipped_sum: ClippedSum
    mechanism: Mechanism
    noise: RandomGenerator
    learning_rate: float
    norms: list[Tensor] = field(default_factory=list)
    anchor: Tensor | None = None
    pull: float = 0.0

    def sum_of(self, params: Params, x: Inputs, y: Tensor, request: ClipRequest | None = None) -> Tensor:
        """The sum of the clipped gradients of `x [B, *X]`, `y [B]`, `[1, P]`, or what `request` asks for."""
        default = ClipRequest(self.mechanism.clip_norm, self.mechanism.clip_order)
        sums, norms = self.clipped_sum(params, x, y, request or default)
        self.norms.append(norms)
        return sums

    def class_gradients(
        self, job: ClassGradients, sums: Tensor, dtype: torch.dtype, drawn: Tensor, labels: Tensor
    ) -> Tensor:
        """What the client sends for the job: clipped `sums` `[num_classes, p]`, noised and divided, and exact counts of
        the labels of `drawn` records `[B]` and of all records `[n]` if it asks for them.

        **Privacy** One step of the mechanism; for the counts see `ClassGradients.counts`.
        """
        noised = self.mechanism.privatise(sums, self.noise, dtype)
        if not job.counts:
            return noised
        numbers = torch.stack([one.bincount(minlength=job.num_classes) for one in (drawn, labels)], dim=1)
        return torch.cat([noised, numbers.to(noised.dtype) / self.mechanism.expected_batch_size], dim=1)


class ClientModule(Model, L.LightningModule):
    """The local DPSGD step of a client. One module serves all clients, whose parameters are swapped in.

    Wrap any `torch.nn.Module` that maps records `[B, *X]` one by one to outputs `[B, ...]`, or to a dictionary or
    object with such `logits` (Hugging Face). `task` is a key of `models.tasks.TASKS`, None to infer it from shapes and
    dtypes; `metrics` are keys of `federated.client.metrics.METRICS`, empty for those of the task. To change more,
    override `loss` or `sample_loss`, `configure_optimizers` for another optimiser (not with the engine `stacked`), or
    set `personal` to the names of parameters that stay with each client. Raises as `Model`.

    **Privacy** One `training_step` is one step of the mechanism of `local_task`, which was charged beforehand. It adds
    noise before any record changes the parameters, also for an empty batch. A `lightning.Trainer` alone has no ledger
    and is refused.
    """

    def __init__(self, net: nn.Module, task: str | None = None, metrics: Sequence[str] = ()) -> None:
        super().__init__(net, task)
        self.automatic_optimization = False
        self.metrics = tuple(metrics)
        self.local_task: LocalTask | None = None

    @property
    def plain_sgd(self) -> bool:
        """Whether a step is plain SGD, which engines may compute in other ways: neither hook below is overridden."""
        hooks = ("configure_optimizers", "training_step")
        return all(getattr(type(self), hook) is getattr(ClientModule, hook) for hook in hooks)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD over the net; it sees noised gradients only, so any optimiser is post-processing."""
        return torch.optim.SGD(self.trainable, lr=self._require_task().learning_rate)

    def training_step(self, batch: tuple[Inputs, Tensor], batch_idx: int) -> None:
        """Clip -> sum -> noise -> optimiser, on `x [B, *X]`, `y [B]`, B may be 0."""
        task = self._require_task()
        clipped = task.sum_of(self.named_trainable, *batch)  # [1, P]
        step = task.mechanism.privatise(clipped, task.noise, self.flat.dtype)[0]  # [P]
        if task.anchor is not None:
            step += task.pull * (self.flat - task.anchor)
        for parameter, gradient in zip(self.trainable, self.unflatten(step).values(), strict=True):
            parameter.grad = gradient.to(parameter.dtype, copy=True)
        self.local_optimizer.step()

    def begin(self, task: LocalTask, flat: Tensor) -> None:
        """Start a client's round at `flat` `[P]` with a fresh optimiser."""
        self.local_task = task
        with torch.no_grad():
            for parameter, value in zip(self.trainable, self.unflatten(flat).values(), strict=True):
                parameter.copy_(value)
        self.local_optimizer = self.configure_optimizers()

    def on_fit_start(self) -> None:
        self._require_task()

    def _require_task(self) -> LocalTask:
        if self.local_task is None:
            raise UserError(
                "`ClientModule` must be trained by a FederatedLoop, got a bare Trainer, which has no privacy ledger. "
                "For one client alone, give the loop a Population of one."
            )
        return self.local_task
