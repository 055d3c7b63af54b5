"""The private training step of a client as a LightningModule."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from dpfl_lightning.config.registry import users_code
from dpfl_lightning.errors import UserError, require, warn_user
from dpfl_lightning.federated.client.configured import ConfiguredOptimizer, GroupSettings, on_one_vector, rates_of
from dpfl_lightning.federated.client.draws import drawing_alike
from dpfl_lightning.federated.client.lightning_loss import (
    LightningLoss,
    configured_by,
    overrides,
    unused,
)
from dpfl_lightning.federated.messages.plan import ClassGradients
from dpfl_lightning.models.model import Model, forward_chunk
from dpfl_lightning.models.optimizers import PLAIN_SGD, LocalOptimizer
from dpfl_lightning.models.tasks import CUSTOM, Task
from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.reference import ClippedSum, ClipRequest, Params, VmapClippedSum, evaluating
from dpfl_lightning.privacy.mechanism import Gaussian, Mechanism
from dpfl_lightning.privacy.noise import RandomGenerator, Streams

#: what a subclass of ClientModule may override: nothing that clips, adds noise, or trains
_EXTENSIONS = {"loss", "sample_loss", "output", "logits_of", "infer_task", "configure_optimizers"}
_EXTENSIONS |= {"personal", "personal_mask", "probabilities", "task"}


@dataclass(frozen=True)
class LocalTask:
    """The task of a client in one round. The event of its mechanism was charged before; its `norms` are private.

    With an `anchor` `[P]` each step adds `pull * (parameters - anchor)`, which does not depend on data. With
    `optimizer` None the module configures it; its schedule follows `round` and `steps`, the local steps of a round.
    """

    clipped_sum: ClippedSum
    mechanism: Mechanism
    noise: RandomGenerator
    learning_rate: float
    norms: list[Tensor] = field(default_factory=list)
    anchor: Tensor | None = None
    pull: float = 0.0
    optimizer: LocalOptimizer | None = PLAIN_SGD
    round: int = 1
    steps: int = 1

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
    dtypes; `metrics` are keys of `federated.client.metrics.METRICS`, empty for those of the task. Of a LightningModule
    `forward`, the loss of `training_step` and `configure_optimizers` are used, and `unused` lists what is not. To
    change more, override `loss` or `sample_loss`, `configure_optimizers` for another optimiser, or set `personal` to
    the names of parameters that stay with each client. A run refuses a subclass that overrides other methods, such as
    `training_step` or a hook of Lightning.

    With a loss of the user, outputs that stay in [0, 1] on random records (a last Sigmoid or Softmax) are scored as
    probabilities; set `probabilities` to True or False to state it.

    `configure_optimizers` may return a learning rate schedule in Lightning's forms. The optimiser is new in every round
    of a client, but its schedule goes on: an epoch of the schedule is a round of the run, and a step is a local step.

    Raises UserError as `Model`, and for a LightningModule with manual optimisation.

    **Privacy** One `training_step` is one step of the mechanism of `local_task`, which was charged beforehand. It adds
    noise before any record changes the parameters, also for an empty batch. A `lightning.Trainer` alone has no ledger
    and is refused.
    """

    probabilities: bool | None = None

    def __init__(self, net: nn.Module, task: str | None = None, metrics: Sequence[str] = ()) -> None:
        require(not isinstance(net, ClientModule), "net", "be the net of one ClientModule", type(net).__name__)
        if isinstance(net, L.LightningModule):
            net.configure_model()
        super().__init__(net, task)
        self.adapted: LightningLoss | None = None
        if isinstance(net, L.LightningModule) and overrides(net, "training_step"):
            self.adapted = LightningLoss(net)
        self.automatic_optimization = False
        self.metrics = tuple(metrics)
        self.local_task: LocalTask | None = None
        self._settings_of: dict[tuple[float, int], GroupSettings] = {}  # of a schedule, by learning rate and steps
        self._rounds = 1  # of the run

    def overrides(self, hook: str) -> bool:
        """Return whether a subclass overrides a method of this class."""
        return getattr(type(self), hook) is not getattr(ClientModule, hook)

    @property
    def brings_optimizer(self) -> bool:
        """Whether the optimiser is that of `configure_optimizers` of a subclass or of a wrapped LightningModule."""
        net = self.net
        return self.overrides("configure_optimizers") or (
            isinstance(net, L.LightningModule) and overrides(net, "configure_optimizers")
        )

    @property
    def users_loss(self) -> bool:
        """Whether the loss is that of a subclass or of a wrapped LightningModule."""
        return self.adapted is not None or self.overrides("loss") or self.overrides("sample_loss")

    @property
    def unused(self) -> list[str]:
        """Hooks and metrics of a wrapped LightningModule that a run does not use."""
        return unused(self.net) if isinstance(self.net, L.LightningModule) else []

    def plain_sgd(self, optimizer: LocalOptimizer | None) -> bool:
        """Return whether a step with the optimiser of a plan is plain SGD, which engines may compute in other ways."""
        return optimizer is not None and optimizer.plain and not self.brings_optimizer

    def check_extension(self) -> None:
        """Raise UserError if a subclass overrides what it must not, or parameters were frozen after this was made.

        Warns of trainable parameters outside the net.

        **Privacy** Another `training_step`, or a hook that only the engine `trainer` calls, could train without noise.
        """
        changed = [name for name in dir(ClientModule) if not name.startswith("__") and self._changes(name)]
        must = "be that of ClientModule, which clips and adds noise"
        advice = "Override `loss`, `sample_loss` or `configure_optimizers`, or wrap a LightningModule."
        require(not changed, ", ".join(changed), must, type(self).__name__, advice)
        frozen = ", ".join(sorted(self._shapes.keys() ^ self.named_trainable.keys()))
        require(not frozen, "requires_grad", "be set before a ClientModule is made", frozen, "Set it on the net.")
        named = ((name, one) for name, one in self.named_parameters() if not name.startswith("net."))
        if outside := [name for name, one in named if one.requires_grad]:
            words = f"does not train {', '.join(outside)}: only parameters of its net are trained"
            warn_user(f"{type(self).__name__} {words}")

    def _changes(self, name: str) -> bool:
        """Return whether a class or `__init__` replaces an attribute of ClientModule that is no extension."""
        usual = inspect.getattr_static(ClientModule, name, None)
        inherited = inspect.getattr_static(type(self), name, None) is usual
        hidden = name in self._modules or (callable(usual) and name in vars(self))
        return hidden or not (inherited or name in _EXTENSIONS or name.startswith("_abc_"))

    @torch.no_grad()
    def prepare(self, x: Inputs, y: Tensor, num_classes: int) -> None:
        """Look at random records `x [B, *X]`, `y [B]`, before any private record is read. See `LightningLoss`.

        Raises UserError as `LightningLoss.prepare`, and if an evaluation cannot use the outputs of a LightningModule.
        """
        if not isinstance(self.net, L.LightningModule):
            return
        advice = "Define it, such as `def forward(self, x): return self.net(x)`: evaluations need its outputs."
        require(overrides(self.net, "forward"), "forward", "be a method of a LightningModule", "none", advice)
        if self.adapted is None:
            return
        self.adapted.prepare(self.output, self.named_trainable, x, y, num_classes)
        with evaluating(self.net):
            output = self.output(self.named_trainable, x)
        advice = "Return logits or real numbers, and take the argmax in predict_step."
        require(output.is_floating_point(), "forward", "return floating outputs to evaluate", output.dtype, advice)

    def reported_loss(self, model: Tensor, x: Inputs, rows: Tensor, output: Tensor, y: Tensor) -> Tensor:
        """The loss of each record `[B]` in evaluation mode, for parameters `model` `[P]` and `rows` `[B]` of all `x`.

        `output` and `y` are those of the rows.
        """
        with evaluating(self.net):
            if self.adapted is None or not self.adapted.whole:
                return self.loss(output, y)
            params, chunk = self.unflatten(model), forward_chunk(model.device)
            parts = zip(rows.split(chunk), y.split(chunk), strict=True)
            return torch.cat([self.adapted.sample_loss(params, take(x, some), labels) for some, labels in parts])

    def sample_loss(self, params: Params, x: Inputs, y: Tensor) -> Tensor:
        if self.adapted is not None and self.adapted.whole:
            return self.adapted.sample_loss(params, x, y)
        return super().sample_loss(params, x, y)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        if self.adapted is None or self.adapted.whole:
            return super().loss(output, y)
        return self.adapted.loss(output, y)

    def infer_task(self, output: Tensor, y: Tensor, num_classes: int | None = None) -> Task:
        """Return the task as `Model`, and `CUSTOM` if none fits but the loss is the user's."""
        try:
            return super().infer_task(output, y, num_classes)
        except UserError:
            if self.named_task is None and self.users_loss:
                return CUSTOM
            raise

    def configure_optimizers(self) -> Any:
        """The optimiser of the task, or of a wrapped LightningModule. It sees noised gradients only."""
        if self.brings_optimizer:
            assert isinstance(self.net, L.LightningModule)  # for mypy
            return configured_by(self.net, self._rounds, self._require_task().steps)
        task = self._require_task()
        return (task.optimizer or PLAIN_SGD).over(self.trainable, task.learning_rate)

    def check_optimizer(self, rounds: int, clients: Sequence[tuple[float, int]]) -> None:
        """Check that `configure_optimizers` fits a run of so many rounds of clients `(learning rate, local steps)`.

        It is called on a copy for the first and the last round, and for the least and the greatest rate and number of
        steps. The optimiser takes one step.

        Raises UserError if it or the step raises, its answer cannot be used, or it changes parameters. Warns of
        parameters in no group, and of rounds with a learning rate of 0.
        """
        if not self.brings_optimizer:
            return
        self._rounds = rounds
        self._settings_of.clear()
        name = type(self if self.overrides("configure_optimizers") else self.net).__name__
        copied, notices, keys = copy.deepcopy(self), list[str](), (itemgetter(0), itemgetter(1))
        try:
            with users_code("configure_optimizers", name), drawing_alike(self.device), torch.no_grad():
                for learning_rate, steps in {end(clients, key=key) for end in (min, max) for key in keys}:
                    left_out, idle = copied._try_optimizer(self.flat, rounds, learning_rate, steps)
                    if left_out:
                        notices.append(f"leaves out {', '.join(left_out)}: freeze what is not to be trained")
                    if idle:
                        which = ", ".join(map(str, idle))
                        notices.append(f"gives learning rate 0 in round {which}, which costs budget and trains nothing")
        except UserError:
            raise
        except Exception as error:  # of an optimiser or a schedule of a library
            raise UserError(f"`configure_optimizers` must work, got {type(error).__name__}: {error}") from error
        for notice in dict.fromkeys(notices):
            warn_user(f"configure_optimizers of {name} {notice}")

    def _try_optimizer(
        self, start: Tensor, rounds: int, learning_rate: float, steps: int
    ) -> tuple[list[str], list[int]]:
        """Return the parameters in no group, and the rounds with a learning rate of 0. Moves the parameters."""
        mechanism, noise, answers = Gaussian(1.0, 0.0, 1.0, 1.0), Streams().generator("none", 0, 0), []
        task = LocalTask(VmapClippedSum(self.sample_loss), mechanism, noise, learning_rate, optimizer=None, steps=steps)
        self.load(start)
        for round in (1, rounds):
            self.local_task = replace(task, round=round)
            answers.append(ConfiguredOptimizer.of(self.configure_optimizers()))
        same = self._shapes.keys() == self.named_trainable.keys() and torch.equal(self.flat, start)
        require(same, "configure_optimizers", "leave the parameters as they are", "others", "Set them in __init__.")
        first, last = answers
        left_out = first.check(last, self.named_trainable)
        for parameter in self.trainable:
            parameter.grad = torch.ones_like(parameter)
        first.optimizer.step()
        idle = last.idle_rounds(rounds, steps)
        if len(idle) == rounds:  # or the rate follows the round of the task
            rates = rates_of(first.optimizer.param_groups)
            require(any(rates), "configure_optimizers", "give a learning rate above 0 in some round", rates)
            return left_out, []
        return left_out, idle

    def training_step(self, batch: tuple[Inputs, Tensor], batch_idx: int) -> None:
        """Clip -> sum -> noise -> optimiser, on `x [B, *X]`, `y [B]`, B may be 0."""
        task = self._require_task()
        clipped = task.sum_of(self.named_trainable, *batch)  # [1, P]
        step = task.mechanism.privatise(clipped, task.noise, self.flat.dtype)[0]  # [P]
        if task.anchor is not None:
            step += task.pull * (self.flat - task.anchor)
        self.set_gradient(step)
        self.local_optimizer.step()

    def set_gradient(self, gradient: Tensor) -> None:
        """Set the gradients of all trainable parameters from one vector `[P]`, which is copied."""
        for parameter, part in zip(self.trainable, self.unflatten(gradient).values(), strict=True):
            parameter.grad = part.to(parameter.dtype, copy=True)

    def begin(self, task: LocalTask, flat: Tensor) -> None:
        """Start a client's round at `flat` `[P]` with a fresh optimiser."""
        self.load(flat)
        self.local_optimizer = StepOptimizer(self, task)

    def on_fit_start(self) -> None:
        self._require_task()

    def _require_task(self) -> LocalTask:
        if self.local_task is None:
            raise UserError(
                "`ClientModule` must be trained by a FederatedLoop, got a bare Trainer, which has no privacy ledger. "
                "For one client alone, give the loop a Population of one."
            )
        return self.local_task


class StepOptimizer:
    """The optimiser of a client in one round, new at its start, whose schedule continues from the round before.

    Without `flat` it works on the parameters of the module, and otherwise on a vector `[P]`.
    """

    def __init__(self, module: ClientModule, task: LocalTask, flat: Tensor | None = None) -> None:
        if flat is not None:
            module.load(flat)  # an optimiser may use the parameters
        module.local_task, self._round, self._steps, self._taken = task, task.round, task.steps, 0
        self._configured = ConfiguredOptimizer.of(module.configure_optimizers())
        self._settings: GroupSettings | None = None
        if self._configured.scheduler is not None:
            known, key = module._settings_of, (task.learning_rate, task.steps)
            if key not in known:
                known[key] = GroupSettings(ConfiguredOptimizer.of(module.configure_optimizers()))
            self._settings = known[key]
        self._module, self._flat = module, flat
        self._whole = flat is not None and on_one_vector(self._configured.optimizer, module.trainable, flat)

    def step(self) -> None:
        """Take a step by the gradients of the parameters."""
        self._schedule()
        self._configured.optimizer.step()
        self._taken += 1

    def step_by(self, gradient: Tensor) -> None:
        """Take a step of the vector by its gradient `[P]`."""
        assert self._flat is not None  # for mypy
        if self._whole:
            self._flat.grad = gradient
            self.step()
            return
        self._module.set_gradient(gradient)
        self.step()
        self._flat.copy_(self._module.flat)

    def _schedule(self) -> None:
        if self._settings is None:
            return
        number = self._configured.steps_taken(self._round, self._steps, self._taken)
        for group, settings in zip(self._configured.optimizer.param_groups, self._settings.after(number), strict=True):
            group.update(settings)
