"""The private training step of a client as a LightningModule."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, final

import lightning as L
import torch
from torch import Tensor, nn

from dpfl_lightning.config.registry import users_code
from dpfl_lightning.errors import UserError, in_one_line, require, warn_user
from dpfl_lightning.federated.client.configured import ConfiguredOptimizer, GroupSettings, on_one_vector
from dpfl_lightning.federated.client.draws import fixed_rng
from dpfl_lightning.federated.client.lightning_hooks import configured_by, is_lightning, overrides, unused
from dpfl_lightning.federated.client.metrics import Metric
from dpfl_lightning.federated.messages.jobs import ClassGradients
from dpfl_lightning.models import fixed
from dpfl_lightning.models.model import Model, forward_chunk
from dpfl_lightning.models.optimizers import PLAIN_SGD, LocalOptimizer
from dpfl_lightning.models.tasks import CUSTOM, Task
from dpfl_lightning.privacy.clipping.inputs import PAIR, BatchForm, Block, Inputs, take
from dpfl_lightning.privacy.clipping.reference import (
    ClippedSum,
    ClipRequest,
    Params,
    VmapClippedSum,
    evaluating,
    scoring,
)
from dpfl_lightning.privacy.mechanism import Gaussian, Mechanism
from dpfl_lightning.privacy.noise import RandomGenerator, Streams

if TYPE_CHECKING:
    from dpfl_lightning.federated.client.lightning_loss import LightningLoss

T = TypeVar("T")


@dataclass(frozen=True)
class LocalTask:
    """The task of a client in one round. The event of its mechanism was charged before; its `norms` are private.

    With an `anchor` `[P]` each step adds `pull * (parameters - anchor)`, which does not depend on data. With
    `optimizer` None the module configures it; its schedule follows `round` and `steps`, the local steps of a round.
    `expected` is the public number of records that decides the size of passes (None: very many). `kept` is what stays
    with the client between its releases, which a mechanism may change.
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
    expected: float | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)

    def sum_of(self, params: Params, x: Inputs, y: Tensor, request: ClipRequest | None = None) -> Tensor:
        """The sum of the clipped gradients of `x [B, *X]`, `y [B]`, `[1, P]`, or what `request` asks for."""
        request = request or ClipRequest(self.mechanism.clip_norm, self.mechanism.clip_order)
        sums, norms = self.clipped_sum(params, x, y, replace(request, expected=self.expected, released=True))
        self.norms.append(norms)
        return sums

    def class_gradients(
        self, job: ClassGradients, sums: Tensor, dtype: torch.dtype, drawn: Tensor, labels: Tensor
    ) -> Tensor:
        """What the client sends for the job: clipped `sums` `[num_classes, p]`, noised and divided, and exact counts of
        the labels of `drawn` records `[B]` and of all records `[n]` if it asks for them.

        **Privacy** One step of the mechanism; for the counts see `ClassGradients.counts`.
        """
        noised = self.mechanism.privatise(sums, self.noise, dtype, kept=self.kept)
        if not job.counts:
            return noised
        numbers = torch.stack([one.bincount(minlength=job.num_classes) for one in (drawn, labels)], dim=1)
        return torch.cat([noised, numbers.to(noised.dtype) / self.mechanism.expected_batch_size], dim=1)


def dp_step(
    task: LocalTask, clipped: Tensor, theta: Tensor, move: Callable[[Tensor], T], into: Tensor | None = None
) -> T:
    """One local step of a client at parameters `theta` `[P]`, from `clipped` `[1, P]`, its sum of clipped gradients.

    The sum is noised and divided by the expected batch size, and the proximal term is added; `move` steps along this
    gradient `[P]`. `into` `[1, P]` is memory for it.

    **Privacy** One step of the task's mechanism, also for an empty batch.
    """
    gradient = task.mechanism.privatise(clipped, task.noise, theta.dtype, into, task.kept)[0]
    if task.anchor is not None:
        gradient.add_(theta - task.anchor, alpha=task.pull)
    return move(gradient)


def named_metrics(named: Sequence[Any]) -> dict[str, Metric]:
    """Return metrics by name, see `own_metrics.build_metrics`."""
    if not named:
        return {}
    from dpfl_lightning.federated.client import own_metrics  # only for these

    return own_metrics.build_metrics(named)


@final
class ClientModule(Model, L.LightningModule):
    """A model with the local DPSGD step of a client. One module serves all clients, whose parameters are swapped in.

    Args:
        model: maps records `[B, *X]` one by one to outputs `[B, ...]`, or to a dictionary or object with such `logits`.
            Of a LightningModule `forward`, the loss of `training_step` and `configure_optimizers` are used.
        loss: `loss(output, y)` returns one loss for each record, `[B]`; by default that of the task.
        optimizer: `optimizer(parameters)` returns a new torch optimiser, also with a learning rate schedule in
            Lightning's forms. An epoch of the schedule is a round of the run, and a step is a local step.
        personal: names of the model's parameters that stay with each client.
        output: returns the outputs `[B, ...]` from what the model returns.
        task: a key of `models.tasks.TASKS`, {"name": key, **options}, or a `Task` or its class; None to infer it from
            shapes and dtypes.
        metrics: keys of `federated.client.metrics.METRICS`, or a `torchmetrics.Metric` of your own: its class path, its
            class, an object, or {name: class or object}. Empty for those of the task.
        probabilities: whether outputs are probabilities; None finds it out on random records if the loss is given.
        fix: replace layers that mix records, such as BatchNorm by GroupNorm, in a copy of the model.
        per_record: train with the losses of single records also if those of a batch are others, as contrastive ones.

    The class is final. Raises UserError as `Model`, and for a LightningModule with manual optimisation.

    **Privacy** One `training_step` is one step of the mechanism of `local_task`, which was charged beforehand. A
    `lightning.Trainer` alone has no ledger and is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        optimizer: Callable[[list[Tensor]], Any] | None = None,
        personal: Sequence[str] = (),
        output: Callable[[Any], Tensor] | None = None,
        task: str | Mapping[str, Any] | Task | type[Task] | None = None,
        metrics: Sequence[Any] = (),
        probabilities: bool | None = None,
        fix: bool = False,
        per_record: bool = False,
    ) -> None:
        require(not isinstance(model, ClientModule), "model", "be the model of one ClientModule", type(model).__name__)
        advice = "Such as lambda parameters: torch.optim.Adam(parameters): each round of a client has a new one."
        must = "be a function that returns an optimizer"
        require(optimizer is None or callable(optimizer), "optimizer", must, type(optimizer).__name__, advice)
        if type(model).__name__ == "OptimizedModule":
            warn_user("torch.compile is not used: its code is another for every number of records")
            model = model.get_submodule("_orig_mod")
        if is_lightning(model):
            model.configure_model()
        model = fixed(model) if fix else model
        super().__init__(model, loss, personal, output, task)
        self.adapted: LightningLoss | None = None
        if loss is None and is_lightning(model) and overrides(model, "training_step"):
            from dpfl_lightning.federated.client import lightning_loss  # only for these

            self.adapted = lightning_loss.LightningLoss(model)
        self.given_optimizer = optimizer
        by_method = "configure_optimizers" if self._defines("configure_optimizers") else ""
        #: the argument or method that gives the optimiser, "" for `clients.optimizer`
        self.optimizer_from = "optimizer" if optimizer is not None else by_method
        self.automatic_optimization = False
        self.loss_factor = 1.0  # of each record; an audit shrinks it
        self.per_record = per_record
        self.large = False  # checks then compare few records; found before a run
        self.metrics, self.probabilities = named_metrics(metrics), probabilities
        self.local_task: LocalTask | None = None
        self._settings_of: dict[int, GroupSettings] = {}  # of a schedule, by local steps
        self._rounds = 1  # of the run

    def __init_subclass__(cls) -> NoReturn:
        raise UserError(
            f"`ClientModule` must not be derived from, got class {cls.__name__}. Pass loss=..., optimizer=... or "
            "output=... to it, or wrap a LightningModule."
        )

    def _defines(self, hook: str) -> bool:
        """Return whether the model is a LightningModule that overrides a method."""
        return is_lightning(self.net) and overrides(self.net, hook)

    @property
    def users_loss(self) -> bool:
        """Whether the loss was given, or is that of a wrapped LightningModule."""
        return self.adapted is not None or self.given_loss is not None

    @property
    def unused(self) -> list[str]:
        """Hooks and metrics of the model that a run does not use."""
        given = {"training_step": self.given_loss, "configure_optimizers": self.given_optimizer}
        replaced = [hook for hook, one in given.items() if one is not None and self._defines(hook)]
        return replaced + unused(self.net)

    def plain_sgd(self, optimizer: LocalOptimizer | None) -> bool:
        """Return whether a step with the optimiser of a plan is plain SGD, which engines may compute in other ways."""
        return optimizer is not None and optimizer.plain and not self.optimizer_from

    def check_parameters(self) -> None:
        """Raise UserError if other parameters are trainable than when this was made."""
        frozen = ", ".join(sorted(self._shapes.keys() ^ self.named_trainable.keys()))
        require(not frozen, "requires_grad", "be set before a ClientModule is made", frozen, "Set it on the model.")

    @torch.no_grad()
    def prepare(self, x: Inputs, y: Tensor, num_classes: int, form: BatchForm = PAIR) -> None:
        """Look at random records `x [B, *X]`, `y [B]`, before any private record is read. See `LightningLoss`.

        Raises UserError as `LightningLoss.prepare`, and if an evaluation cannot use the outputs of a LightningModule.
        """
        if not is_lightning(self.net):
            return
        advice = "Define it, such as `def forward(self, x): return self.net(x)`: evaluations need its outputs."
        require(self._defines("forward"), "forward", "be a method of a LightningModule", "none", advice)
        if self.adapted is None:
            return
        self.adapted.prepare(x, y, num_classes, form, self.per_record)
        with evaluating(self.net):
            try:
                output = self.output(self.named_trainable, x)
            except UserError:
                raise
            except Exception as error:  # a user's code may raise anything
                raise UserError(
                    f"`forward` must take what the records hold beside labels, got {in_one_line(error)}. Evaluations "
                    "need its outputs: give further arguments values by default."
                ) from error
        advice = "Return logits or real numbers, and take the argmax in predict_step."
        require(output.is_floating_point(), "forward", "return floating outputs to evaluate", output.dtype, advice)

    def reported_loss(self, model: Tensor, x: Inputs, rows: Tensor, output: Tensor, y: Tensor) -> Tensor:
        """The loss of each record `[B]` in evaluation mode, for parameters `model` `[P]` and `rows` `[B]` of all `x`.

        `output` and `y` are those of the rows.
        """
        with scoring(self.net, self.sample_loss):
            if self.adapted is None:
                return self.loss(output, y)
            params, chunk = self.unflatten(model), forward_chunk(model.device)
            parts = zip(rows.split(chunk), y.split(chunk), strict=True)
            return torch.cat([self.adapted.sample_loss(params, take(x, some), labels) for some, labels in parts])

    def sample_loss(self, params: Params, x: Inputs, y: Tensor) -> Tensor:
        if isinstance(x, Block):
            return x.means(self.sample_loss(params, x.rows, y.flatten(0, 1)))
        losses = super().sample_loss(params, x, y) if self.adapted is None else self.adapted.sample_loss(params, x, y)
        return losses if self.loss_factor == 1 else losses * self.loss_factor

    @property
    def loss_is_known(self) -> bool:
        return self.adapted is None and super().loss_is_known

    def infer_task(self, output: Tensor, y: Tensor, num_classes: int | None = None) -> Task:
        """Return the task as `Model`, and `CUSTOM` if none fits but the loss is the user's."""
        try:
            return super().infer_task(output, y, num_classes)
        except UserError:
            if self.named_task is None and self.users_loss:
                return CUSTOM
            raise

    def configure_optimizers(self) -> Any:
        """The optimiser of the task, the given one, or that of a LightningModule. It sees noisy gradients only."""
        task = self._require_task()
        if self.optimizer_from == "optimizer" and self.given_optimizer is not None:
            return self.given_optimizer(self.trainable)
        if self.optimizer_from and is_lightning(self.net):
            return configured_by(self.net, self._rounds, task.steps)
        return (task.optimizer or PLAIN_SGD).over(self.trainable, task.learning_rate)

    def configured(self) -> ConfiguredOptimizer:
        """The answer of `configure_optimizers`. Raises UserError if a run cannot use it."""
        return ConfiguredOptimizer.of(self.configure_optimizers(), self.optimizer_from)

    def check_optimizer(self, rounds: int, steps: Collection[int]) -> None:
        """Check that the user's optimiser fits a run of so many rounds, of clients with so many local steps each.

        It is made twice on a copy, for the least and the greatest number of steps, and takes one step.

        Raises UserError if it or the step raises, its answer cannot be used, or it changes parameters. Warns of
        parameters in no group, and of rounds with a learning rate of 0.
        """
        if not self.optimizer_from:
            return
        self._rounds = rounds
        self._settings_of.clear()
        key, copied, notices = self.optimizer_from, copy.deepcopy(self), list[str]()
        try:
            name = type(self if key == "optimizer" else self.net).__name__
            with users_code(key, name), fixed_rng(self.device), torch.no_grad():
                for number in {min(steps), max(steps)}:
                    left_out, idle = copied._try_optimizer(self.flat, rounds, number)
                    if left_out:
                        notices.append(f"leaves out {', '.join(left_out)}: freeze what is not to be trained")
                    if idle:
                        which = ", ".join(map(str, idle))
                        notices.append(f"gives learning rate 0 in round {which}, which costs budget and trains nothing")
        except UserError:
            raise
        except Exception as error:  # of an optimiser or a schedule of a library
            raise UserError(f"`{key}` must work, got {type(error).__name__}: {error}") from error
        for notice in dict.fromkeys(notices):
            warn_user(f"{key} {notice}")

    def _try_optimizer(self, start: Tensor, rounds: int, steps: int) -> tuple[list[str], list[int]]:
        """Return the parameters in no group, and the rounds with a learning rate of 0. Moves the parameters."""
        mechanism, noise = Gaussian(1.0, 0.0, 1.0, 1.0), Streams().generator("none", 0, 0)
        self.local_task = LocalTask(VmapClippedSum(self.sample_loss), mechanism, noise, 1.0, steps=steps)
        self.load(start)
        first, last = self.configured(), self.configured()
        same = self._shapes.keys() == self.named_trainable.keys() and torch.equal(self.flat, start)
        require(same, self.optimizer_from, "leave the parameters as they are", "others", "Set them before the run.")
        left_out = first.check(last, self.named_trainable)
        for parameter in self.trainable:
            parameter.grad = torch.ones_like(parameter)
        first.optimizer.step()
        idle = last.idle_rounds(rounds, steps)
        require(len(idle) < rounds, self.optimizer_from, "give a learning rate above 0 in some round", 0)
        return left_out, idle

    def training_step(self, batch: tuple[Inputs, Tensor], batch_idx: int) -> None:
        """Clip -> sum -> noise -> optimiser, on `x [B, *X]`, `y [B]`, B may be 0."""
        task = self._require_task()
        dp_step(task, task.sum_of(self.named_trainable, *batch), self.flat, self._move)

    def _move(self, gradient: Tensor) -> None:
        self.set_gradient(gradient)
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
        if is_lightning(self.net):
            self.net.trainer = None  # which changes in a pass, in which the model must keep nothing

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
        self._configured = module.configured()
        self._settings: GroupSettings | None = None
        if self._configured.scheduler is not None:
            known = module._settings_of
            if task.steps not in known:
                known[task.steps] = GroupSettings(module.configured())
            self._settings = known[task.steps]
        self._module, self._flat = module, flat
        self._whole = flat is not None and on_one_vector(self._configured.optimizer, module.trainable, flat)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._configured.optimizer

    def step(self) -> None:
        """Take a step by the gradients of the parameters."""
        self.schedule()
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

    def schedule(self) -> None:
        """Set the learning rate of the next step."""
        if self._settings is None:
            return
        number = self._configured.steps_taken(self._round, self._steps, self._taken)
        for group, settings in zip(self._configured.optimizer.param_groups, self._settings.after(number), strict=True):
            group.update(settings)
