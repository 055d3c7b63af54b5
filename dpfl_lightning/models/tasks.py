"""Tasks: what labels and outputs mean, the loss of each record, and which predictions are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfl_lightning.errors import UserError, require, require_one_of

IGNORED = -100  # label of a pixel or token that counts neither in the loss nor in a metric

Shape = tuple[int, ...]


def class_logits(output: Tensor, y: Tensor) -> Tensor:
    """Return logits `[B, K, ...]`, K >= 2, for `y [B, ...]`; a single logit z becomes the two logits (0, z).

    >>> class_logits(torch.tensor([[3.0]]), torch.tensor([1]))
    tensor([[0., 3.]])
    """
    output = output.unsqueeze(1) if output.dim() == y.dim() else output
    return output if output.shape[1] > 1 else torch.cat([torch.zeros_like(output), output], dim=1)


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, y, reduction="none", ignore_index=IGNORED)
    if y.dim() == 1:
        return losses
    return losses.flatten(1).sum(dim=1) / (y != IGNORED).flatten(1).sum(dim=1).clamp(min=1)


def _class_loss(output: Tensor, y: Tensor) -> Tensor:
    return _cross_entropy(class_logits(output, y), (y > 0).long() if y.is_floating_point() else y)


def _label_loss(output: Tensor, y: Tensor) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(output, y.to(output.dtype), reduction="none")
    return losses.flatten(1).mean(dim=1)


def _squared_error(output: Tensor, y: Tensor) -> Tensor:
    losses = F.mse_loss(output.reshape(y.shape), y, reduction="none")
    return losses if y.dim() == 1 else losses.flatten(1).mean(dim=1)


def _right_classes(output: Tensor, y: Tensor) -> Tensor:
    return class_logits(output, y).argmax(dim=1) == y


def _without_channel(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks `[B, 1, ...]` as `[B, ...]`."""
    return output, y.squeeze(1) if y.dim() == output.dim() else y


def _is_mask(output: Shape, y: Shape) -> bool:
    channel = len(y) == len(output) >= 2 and y[0] == 1
    return len(y) >= 1 and len(output) >= 2 and output[1:] == (y[1:] if channel else y)


def _token_loss(output: Tensor, y: Tensor) -> Tensor:
    return _cross_entropy(output.movedim(-1, 1), y)  # logits [B, vocabulary, tokens]


def _next_tokens(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return output[:, :-1], y[:, 1:]


def _hazard_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return minus the log-likelihood `[B]` of logits of hazards `[B, T]` for (interval, event) `[B, 2]`.

    With a hazard h_j in each interval it is prod_{j < t} (1 - h_j) times h_t, or times 1 - h_t without an event in t.
    """
    interval, event = y[:, :1], (y[:, 1:] > 0).to(output.dtype)
    intervals = torch.arange(output.shape[1], device=output.device)
    losses = F.binary_cross_entropy_with_logits(output, event * (intervals == interval), reduction="none")
    return (losses * (intervals <= interval)).sum(dim=1)


def expected_intervals(output: Tensor) -> Tensor:
    """Return how many intervals records survive in the mean `[B]`, for logits of hazards `[B, T]`.

    >>> expected_intervals(torch.zeros(1, 2))
    tensor([0.7500])
    """
    return F.logsigmoid(-output).cumsum(dim=1).exp().sum(dim=1)


@dataclass(frozen=True)
class ClassWeightedLoss:
    """The loss of a record times a public weight of its class; clipping bounds its gradient as any other.

    `of_priors` gives a class the weight smallest share / its share, at most 1: a weight above 1 would be clipped away.
    """

    weights: tuple[float, ...]

    @classmethod
    def of_priors(cls, priors: Any, num_classes: int) -> ClassWeightedLoss:
        """Raises UserError unless `priors` are the shares of the K classes."""
        listed = isinstance(priors, list | tuple) and all(isinstance(one, int | float) for one in priors)
        fits = listed and len(priors) == num_classes > 1 and min(priors) > 0 and abs(sum(priors) - 1) < 0.01
        must = f"be the public shares of the {num_classes} classes, each above 0 and 1 together"
        advice = "For example [0.9, 0.1], of a registry or the literature: those of the records are private."
        require(fits, "model.class_priors", must, priors, advice)
        return cls(tuple(min(priors) / one for one in priors))

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        require(y.dim() == 1, "model.class_priors", "be null unless a record has one class", list(self.weights))
        return _class_loss(output, y) * torch.tensor(self.weights, dtype=output.dtype, device=output.device)[y.long()]


@dataclass(frozen=True)
class Task:
    """What the labels and outputs of a record mean. Shapes are those of one record.

    Args:
        name: a key of `TASKS`.
        expects: shapes of labels and outputs, in words.
        fits: whether outputs and labels of these shapes fit each other.
        loss: function of `output [B, ...]`, `y [B, ...]`; one loss per record `[B]`, the mean over its labels that
            count, and 0 if none counts.
        right: function of the same; whether each prediction is right, in the shape of `y`. None: there is no accuracy.
        metrics: names of the default metrics.
        real: whether labels are real numbers.
        one_class: whether a record has one class.
        probabilities: whether outputs are probabilities of label 1, or of classes, and not logits.
        aligned: function of outputs and labels that returns those that belong together.
        inferred: whether shapes can tell the task; otherwise it is named, or known by the model.
    """

    name: str
    expects: str
    fits: Callable[[Shape, Shape], bool]
    loss: Callable[[Tensor, Tensor], Tensor]
    right: Callable[[Tensor, Tensor], Tensor] | None
    metrics: tuple[str, ...] = ()
    real: bool = False
    one_class: bool = False
    probabilities: bool = False
    aligned: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda output, y: (output, y)
    inferred: bool = True

    @property
    def zero_or_one(self) -> bool:
        """Whether labels are 0 or 1, and may be floating if the task is named."""
        return self.name in ("binary", "multilabel")

    @property
    def takes_floats(self) -> bool:
        """Whether labels are classes that may be floating 0 and 1 if the task is named."""
        return self.zero_or_one or self.name == "segmentation"

    def as_logits(self, output: Tensor) -> Tensor:
        """Return outputs `[B, ...]` as logits: log-odds of probabilities, or logarithms if each class has one."""
        if not self.probabilities:
            return output
        several = not self.zero_or_one or (self.name == "binary" and output.shape[1:] == (2,))
        return output.clamp(min=1e-30).log() if several else output.logit(eps=1e-7)

    def hits(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many predictions of each record are right, and how many count, `[B]` float64 each."""
        if self.right is None:
            nothing = output.new_zeros(len(y), dtype=torch.float64)
            return nothing, nothing
        output, y = self.aligned(output, y)
        counted = y != IGNORED
        right = self.right(self.as_logits(output), y) & counted
        return right.reshape(len(y), -1).sum(dim=1).double(), counted.reshape(len(y), -1).sum(dim=1).double()

    def check(self, y: Tensor) -> None:
        """Raise UserError unless labels `y [n, ...]` have the task's type, and only the values 0 and 1 if binary."""
        if self is CUSTOM:
            return
        advice = "Pass y.long() for classes." if y.is_floating_point() else "Pass y.float() for a regression."
        must = f"be {'floating' if self.real else 'integer'} for task {self.name}"
        require(y.is_floating_point() == self.real or self.takes_floats, "y", must, y.dtype, advice)
        if self.zero_or_one or (y.is_floating_point() and not self.real):
            valid = bool(((y == 0) | (y == 1)).all())
            require(valid, "y", f"hold 0 or 1 for each label of task {self.name}", "other numbers")


#: name -> task
TASKS: dict[str, Task] = {
    "multiclass": Task(
        "multiclass",
        "integer labels [B] and outputs [B, classes]",
        lambda output, y: y == () and len(output) == 1 and output[0] >= 2,
        _class_loss,
        _right_classes,
        one_class=True,
    ),
    "binary": Task(
        "binary",
        "integer labels [B] and outputs [B], [B, 1] or [B, 2]",
        lambda output, y: (y, output) in {((), ()), ((), (1,)), ((), (2,)), ((1,), (1,))},
        _class_loss,
        _right_classes,
        one_class=True,
    ),
    "multilabel": Task(
        "multilabel",
        "labels [B, labels] of 0 and 1 and outputs of the same shape",
        lambda output, y: len(y) == 1 and output == y,
        _label_loss,
        lambda output, y: (output > 0) == (y > 0),
    ),
    "regression": Task(
        "regression",
        "floating labels [B, ...] and as many outputs",
        lambda output, y: torch.Size(output).numel() == torch.Size(y).numel(),
        _squared_error,
        None,
        metrics=("mae", "r2"),
        real=True,
    ),
    "segmentation": Task(
        "segmentation",
        "integer labels [B, ...] or [B, 1, ...] and outputs [B, classes, ...]",
        _is_mask,
        lambda output, y: _class_loss(*_without_channel(output, y)),
        _right_classes,
        metrics=("iou",),
        aligned=_without_channel,
    ),
    "language_modeling": Task(
        "language_modeling",
        "integer labels [B, tokens] and outputs [B, tokens, vocabulary]",
        lambda output, y: len(y) == 1 and len(output) == 2 and output[:1] == y,
        _token_loss,
        lambda output, y: output.argmax(dim=-1) == y,
        metrics=("perplexity",),
    ),
    "causal_lm": Task(
        "causal_lm",
        "the tokens of the record as labels [B, tokens], of which each predicts the next, and outputs "
        "[B, tokens, vocabulary]",
        lambda output, y: len(y) == 1 and len(output) == 2 and output[:1] == y,
        lambda output, y: _token_loss(*_next_tokens(output, y)),
        lambda output, y: output.argmax(dim=-1) == y,
        metrics=("perplexity",),
        aligned=_next_tokens,
        inferred=False,
    ),
    "survival": Task(
        "survival",
        "integer labels [B, 2], the interval and whether the event was in it, and outputs [B, intervals]",
        lambda output, y: y == (2,) and len(output) == 1,
        _hazard_loss,
        None,
        metrics=("c_index",),
        inferred=False,
    ),
}


#: of a module with a user's loss whose outputs fit no task: there is no accuracy, and only the module knows the loss
CUSTOM = Task(
    "custom", "any labels and outputs", lambda output, y: True, lambda output, y: torch.full((len(y),), torch.nan), None
)


def task_of(output: Shape, y: Shape, real: bool, num_classes: int | None = None, named: str | None = None) -> Task:
    """Return the task for outputs and labels of these shapes of one record: the `named` one, or the only one that fits.

    Only shapes, dtypes and `num_classes` decide, never values of labels. Raises UserError if no task fits, or several.

    >>> task_of((1,), (), real=False).name, task_of((5, 9), (5,), real=False).name
    ('binary', 'language_modeling')
    """
    kinds = f"outputs [{_shown(output)}] for {'floating' if real else 'integer'} labels [{_shown(y)}]"
    if named is not None:
        require_one_of(TASKS, "task", named)
        task = TASKS[named]
        fits = (task.real == real or task.takes_floats) and task.fits(output, y)
        advice = "Pass y.long() for classes." if real and not task.real else ""
        require(fits, "task", f"fit the data and the model: {named} needs {task.expects}", kinds, advice)
        return task
    fitting = [task for task in TASKS.values() if task.inferred and task.real == real and task.fits(output, y)]
    names = [task.name for task in fitting]
    if "binary" in names and len(names) > 1:  # two outputs, or one label in a second dimension
        wanted = "multiclass" if names[0] == "multiclass" and num_classes not in (None, 2) else "binary"
        fitting = [TASKS[wanted]]
    if not fitting:
        known = "; ".join(f"{task.name} needs {task.expects}" for task in TASKS.values() if task.real == real)
        advice = " Real numbers as labels make a regression: of classes pass y.long()." * real
        advice = advice or " Pass y.squeeze(1) for one class in each record." * (y == (1,))
        raise UserError(f"`model` must give outputs that fit the labels, got {kinds}. Known tasks: {known}.{advice}")
    advice = f"Name it: task: {names[0]}."
    require(len(fitting) == 1, "task", f"be one of {' and '.join(names)}, which both fit {kinds}", None, advice)
    return fitting[0]


def _shown(shape: Shape) -> str:
    return ", ".join(["B", *map(str, shape)])


def described(task: Task, output: Shape, y: Shape, named: bool) -> str:
    """Return the task in words for reports, with where it comes from."""
    if task is CUSTOM:
        return "custom (the loss of the module)"
    probabilities = "; outputs are probabilities" * task.probabilities
    if named:
        return f"{task.name} (named{probabilities})"
    kind = "floating" if task.real else "integer"
    shapes = f"outputs [{_shown(output)}] and {kind} labels [{_shown(y)}]"
    return f"{task.name} (inferred from {shapes}{probabilities})"


def other_tasks(task: Task, output: Shape, y: Shape) -> list[str]:
    """Return the names of the tasks that the same floating labels would fit if they were 0 and 1.

    Whether they are is not looked at, because labels are private.
    """
    return [one.name for one in TASKS.values() if task.real and one.takes_floats and one.fits(output, y)]
