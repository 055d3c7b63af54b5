"""Tasks: what labels and outputs mean, the loss of each record, and which predictions are right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor
from torch.nn import functional as F

from dpfl_lightning.config.registry import call
from dpfl_lightning.config.typed import options_of, valid
from dpfl_lightning.errors import UserError, require, require_one_of

PREDICTING_THE_MEAN = "predicting the mean"
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


def _mean_of(losses: Tensor) -> Tensor:
    """Return the mean loss of each record `[B]`, of `[B, ...]`."""
    return losses if losses.dim() == 1 else losses.flatten(1).mean(dim=1)


def _log_odds(y: Tensor) -> Tensor:
    return y.double().mean(dim=0).logit(eps=1e-7)


def _log_shares(y: Tensor, num_classes: int) -> Tensor:
    """Return the logarithm of the share of each class `[K]` among the labels that count."""
    counts = y[y != IGNORED].long().bincount(minlength=num_classes).double()
    return (counts / counts.sum()).clamp(min=1e-30).log()


def pinball(output: Tensor, y: Tensor, quantile: float) -> Tensor:
    """Return the loss whose mean is smallest at the quantile of `y` (Koenker and Bassett 1978), in its shape.

    >>> pinball(torch.zeros(2), torch.tensor([1.0, -1.0]), 0.9)
    tensor([0.9000, 0.1000])
    """
    above = y - output
    return torch.maximum(quantile * above, (quantile - 1) * above)


def _is_mask(output: Shape, y: Shape) -> bool:
    channel = len(y) == len(output) >= 2 and y[0] == 1
    return len(y) >= 1 and len(output) >= 2 and output[1:] == (y[1:] if channel else y)


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
class Measure:
    """Which values of a score are better, and what its baseline is.

    Args:
        higher_is_better: whether the best value is the largest one; None if it is neither the largest nor the smallest.
        target: the best value of a score that is right between others; None if it is an extreme one.
        constant: the constant prediction of the baseline, in words; empty if the score has no baseline.
    """

    higher_is_better: bool | None = True
    target: float | None = None
    constant: str = "best constant"

    def merit(self, value: float) -> float:
        """Return a number that is larger for better values.

        >>> Measure().merit(2.0), Measure(higher_is_better=False).merit(2.0), Measure(target=3.0).merit(2.0)
        (2.0, -2.0, -1.0)
        """
        if self.target is not None:
            return -abs(value - self.target)
        return value if self.higher_is_better else -value

    def worst(self, values: Iterable[float]) -> float:
        """Return the worst value of a score."""
        return min(values, key=self.merit)

    def gap(self, values: Iterable[float]) -> float:
        """Return how far the worst value is from the best one; with a target, of the distances to it."""
        merits = [self.merit(value) for value in values]
        return max(merits) - min(merits)


#: the scores beside metrics, which come before them
MEASURES = {
    "accuracy": Measure(),
    "loss": Measure(higher_is_better=False, constant=""),
}


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
    """What the labels and outputs of a record mean. A subclass is a task, and its further fields are its options.

    Shapes are those of one record; `output` is `[B, ...]` and `y` is `[B, ...]`. Labels are integers unless `real`.

    Attributes:
        expects: shapes of labels and outputs, in words.
        metrics: names of the default metrics.
        kind: of classification, as torchmetrics names it; empty if labels are no classes.
        ignores: whether `IGNORED` is a label that counts in nothing.
        real: whether labels are real numbers.
        one_class: whether a record has one class.
        zero_or_one: whether labels are 0 or 1, and may be floating if the task is named.
        inferred: whether shapes can tell the task; otherwise it is named, or known by the model.
        has_accuracy: whether a prediction is right or wrong.
        constant: what `best_constant` is, in words.
        note: what a user reads if the model, and nobody else, says that this is the task.
    """

    expects: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[str] = ""
    ignores: ClassVar[bool] = False
    real: ClassVar[bool] = False
    one_class: ClassVar[bool] = False
    zero_or_one: ClassVar[bool] = False
    inferred: ClassVar[bool] = True
    has_accuracy: ClassVar[bool] = True
    constant: ClassVar[str] = "best constant"
    note: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Raise UserError unless the options have values that are allowed."""
        given = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        hints = options_of(type(self)) if given else {}
        for name in given:
            valid(f"task.{name}", getattr(self, name), hints[name])

    @property
    def name(self) -> str:
        """The key of `TASKS`."""
        return next((name for name, task in TASKS.items() if type(task) is type(self)), "custom")

    def __str__(self) -> str:
        """The name, with the options of a task that has some."""
        return " ".join([self.name, *(f"{one.name} {getattr(self, one.name)}" for one in fields(self))])

    def fits(self, output: Shape, y: Shape) -> bool:
        """Whether outputs and labels of these shapes fit each other."""
        raise NotImplementedError

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return one loss per record `[B]`: the mean over its labels that count, and 0 if none counts."""
        raise NotImplementedError

    def right(self, output: Tensor, y: Tensor) -> Tensor:
        """Return whether each prediction is right, in the shape of `y`; `output` are logits."""
        raise NotImplementedError

    def best_constant(self, y: Tensor, num_classes: int) -> Tensor:
        """Return the output of one record whose loss is smallest for all labels `y [n, ...]`, such as their mean."""
        raise NotImplementedError

    def aligned(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return those outputs and labels that belong together."""
        return output, y

    def for_metrics(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return what metrics take, of aligned logits and labels: probabilities, predicted classes, or numbers."""
        return output, y

    def num_for_metrics(self, output: Tensor, y: Tensor, num_classes: int) -> int:
        """Return the number of classes, or of labels, for metrics."""
        return num_classes

    def metric_options(self, num: int) -> dict[str, Any]:
        """Return the arguments that torchmetrics needs for this task with `num` classes or labels."""
        of_classes = {"task": self.kind, "num_classes": num, "validate_args": False} if self.kind else {}
        return {**of_classes, **({"ignore_index": IGNORED} if self.ignores else {})}

    def largest_label(self, num_classes: int) -> int:
        """Return the largest integer that may be a label."""
        return num_classes - 1

    @property
    def takes_floats(self) -> bool:
        """Whether labels are classes that may be floating 0 and 1 if the task is named."""
        return self.zero_or_one

    @property
    def shifted(self) -> Task | None:
        """The task for a model that compares an output with the next label."""
        return None

    def stated(self, shares: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability that a prediction states `[B]`, and whether what it states is so `[B]`.

        `shares` `[B, K]` are probabilities of the classes. It is that of the predicted class.
        """
        return shares.amax(dim=1), shares.argmax(dim=1) == y

    def surplus(self, output: Shape, num_classes: int) -> int:
        """Return how many outputs no class has. Raises UserError if a task needs just as many as there are classes."""
        return 0

    def as_logits(self, output: Tensor) -> Tensor:
        """Return outputs `[B, ...]` as metrics take them: of classes as logits."""
        return output

    def of_logits(self) -> Task:
        """Return the task for a model whose outputs are no probabilities."""
        return self

    def hits(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many predictions of each record are right, and how many count, `[B]` float64 each."""
        if not self.has_accuracy:
            nothing = output.new_zeros(len(y), dtype=torch.float64)
            return nothing, nothing
        output, y = self.aligned(output, y)
        counted = self.counts(y)
        right = self.right(self.as_logits(output), y) & counted
        return right.reshape(len(y), -1).sum(dim=1).double(), counted.reshape(len(y), -1).sum(dim=1).double()

    def counts(self, y: Tensor) -> Tensor:
        """Return whether each label of aligned ones counts, in the shape of `y`."""
        return y != IGNORED if self.ignores else torch.ones_like(y, dtype=torch.bool)

    def check(self, y: Tensor) -> None:
        """Raise UserError unless labels `y [n, ...]` have the task's type, and only the values 0 and 1 if binary."""
        advice = "Pass y.long() for classes." if y.is_floating_point() else "Pass y.float() for a regression."
        must = f"be {'floating' if self.real else 'integer'} for task {self.name}"
        require(y.is_floating_point() == self.real or self.takes_floats, "y", must, y.dtype, advice)
        if self.zero_or_one or (y.is_floating_point() and not self.real):
            valid = bool(((y == 0) | (y == 1)).all())
            require(valid, "y", f"hold 0 or 1 for each label of task {self.name}", "other numbers")

    def wrong_labels(self, y: Tensor, num_classes: int, columns: Sequence[str]) -> Iterator[tuple[Tensor, str, str]]:
        """Yield which records `[n]` have labels that the task cannot have, what records must have, and advice.

        `columns` are the names of the label's columns; empty without a table.
        """
        if not self.ignores and not y.is_floating_point():
            ignored = (y == IGNORED).reshape(len(y), y.shape[1:].numel()).any(dim=1)
            yield ignored, f"have no label {IGNORED} with task {self.name}", "None is ignored: leave out the record."


@dataclass(frozen=True)
class Classification(Task):
    """Labels are classes; outputs are logits.

    Args:
        probabilities: whether outputs are probabilities of label 1, or of classes, and not logits.
    """

    probabilities: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return self.name

    def gives_each_class(self, output: Shape) -> bool:
        """Whether an output of this shape has a number for each class, and not one for label 1 alone."""
        return not self.zero_or_one

    def as_logits(self, output: Tensor) -> Tensor:
        """Return outputs `[B, ...]` as logits: log-odds of probabilities, or logarithms if each class has one."""
        if not self.probabilities:
            return output
        several = self.gives_each_class(tuple(output.shape[1:]))
        return output.clamp(min=1e-30).log() if several else output.logit(eps=1e-7)

    def of_logits(self) -> Task:
        return replace(self, probabilities=False)


class OfClasses(Classification):
    """One class for each label; losses are cross entropies of logits."""

    kind = "multiclass"
    constant = "class shares"

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return _class_loss(output, y)

    def right(self, output: Tensor, y: Tensor) -> Tensor:
        return class_logits(output, y).argmax(dim=1) == y

    def best_constant(self, y: Tensor, num_classes: int) -> Tensor:
        constant = _log_shares(y, num_classes)
        return constant.view(-1, *[1] * (y.dim() - 1)).expand(-1, *y.shape[1:])

    def num_for_metrics(self, output: Tensor, y: Tensor, num_classes: int) -> int:
        return max(num_classes, class_logits(output, y).shape[1])


class Multiclass(OfClasses):
    """One of several classes."""

    expects = "integer labels [B] and outputs [B, classes]"
    one_class = True

    def fits(self, output: Shape, y: Shape) -> bool:
        return y == () and len(output) == 1 and output[0] >= 2

    def for_metrics(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return output.softmax(dim=1), y

    def surplus(self, output: Shape, num_classes: int) -> int:
        return max(0, output[0] - num_classes)


class Binary(OfClasses):
    """Class 0 or 1, by one logit or two."""

    expects = "integer labels [B] and outputs [B], [B, 1] or [B, 2]"
    kind = "binary"
    one_class = zero_or_one = True

    def fits(self, output: Shape, y: Shape) -> bool:
        return (y, output) in {((), ()), ((), (1,)), ((), (2,)), ((1,), (1,))}

    def best_constant(self, y: Tensor, num_classes: int) -> Tensor:
        return _log_odds(y)

    def for_metrics(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return class_logits(output, y).softmax(dim=1)[:, 1].flatten(), y.flatten()

    def num_for_metrics(self, output: Tensor, y: Tensor, num_classes: int) -> int:
        return num_classes

    def gives_each_class(self, output: Shape) -> bool:
        return output == (2,)

    def stated(self, shares: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """As of `Task`, for class 1 instead of the predicted one."""
        return shares[:, 1], y == 1


class Multilabel(Classification):
    """Several labels of 0 and 1, each by a logit of its own."""

    expects = "labels [B, labels] of 0 and 1 and outputs of the same shape"
    kind = "multilabel"
    constant = "label shares"
    zero_or_one = True

    def fits(self, output: Shape, y: Shape) -> bool:
        return len(y) == 1 and output == y

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return _label_loss(output, y)

    def right(self, output: Tensor, y: Tensor) -> Tensor:
        return (output > 0) == (y > 0)

    def best_constant(self, y: Tensor, num_classes: int) -> Tensor:
        return _log_odds(y)

    def for_metrics(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return output.sigmoid(), y

    def num_for_metrics(self, output: Tensor, y: Tensor, num_classes: int) -> int:
        return output.shape[1]

    def metric_options(self, num: int) -> dict[str, Any]:
        return {"task": self.kind, "num_labels": num, "validate_args": False}

    def largest_label(self, num_classes: int) -> int:
        return 1


class Regression(Task):
    """Real numbers; the loss is the squared error."""

    expects = "floating labels [B, ...] and as many outputs"
    metrics = ("mae", "r2")
    constant = PREDICTING_THE_MEAN
    real = True
    has_accuracy = False

    def fits(self, output: Shape, y: Shape) -> bool:
        return torch.Size(output).numel() == torch.Size(y).numel()

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return _mean_of(F.mse_loss(output.reshape(y.shape), y, reduction="none"))

    def best_constant(self, y: Tensor, num_classes: int) -> Tensor:
        return y.double().mean(dim=0)

    def for_metrics(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        flat = y.reshape(len(y), -1)
        return (output.reshape(flat.shape), flat) if flat.shape[1] > 1 else (output.flatten(), y.flatten())


@dataclass(frozen=True)
class QuantileRegression(Regression):
    """A quantile of real numbers; the loss is the pinball loss.

    Args:
        quantile: the share of labels that shall lie below the output.
    """

    metrics = ("pinball", "coverage")
    constant = "predicting the quantile"
    inferred = False
    quantile: Annotated[float, Interval(gt=0, lt=1)] = 0.5

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return _mean_of(pinball(output.reshape(y.shape), y, self.quantile))

    def best_constant(self, y: Tensor, num_classes: int) -> Tensor:
        return y.double().kthvalue(math.ceil(self.quantile * len(y)), dim=0).values


class Segmentation(OfClasses):
    """A class for each pixel."""

    expects = "integer labels [B, ...] or [B, 1, ...] and outputs [B, classes, ...]"
    metrics = ("iou",)
    ignores = True

    def fits(self, output: Shape, y: Shape) -> bool:
        return _is_mask(output, y)

    @property
    def takes_floats(self) -> bool:
        return True

    def aligned(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return masks `[B, 1, ...]` as `[B, ...]`."""
        return output, y.squeeze(1) if y.dim() == output.dim() else y

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return _class_loss(*self.aligned(output, y))

    def for_metrics(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return class_logits(output, y).argmax(dim=1).flatten(), y.flatten()


class LanguageModeling(Classification):
    """The token at each place."""

    expects = "integer labels [B, tokens] and outputs [B, tokens, vocabulary]"
    metrics = ("perplexity",)
    constant = "token shares"
    ignores = True

    def fits(self, output: Shape, y: Shape) -> bool:
        return len(y) == 1 and len(output) == 2 and output[:1] == y

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        output, y = self.aligned(output, y)
        return _cross_entropy(output.movedim(-1, 1), y)  # logits [B, vocabulary, tokens]

    def right(self, output: Tensor, y: Tensor) -> Tensor:
        return output.argmax(dim=-1) == y

    def best_constant(self, y: Tensor, num_classes: int) -> Tensor:
        return _log_shares(self.aligned(y, y)[1], num_classes).expand(*y.shape[1:], -1)

    @property
    def shifted(self) -> Task | None:
        return TASKS["causal_lm"]


class CausalLM(LanguageModeling):
    """The next token at each place: labels are the tokens of the record itself."""

    expects = (
        "the tokens of the record as labels [B, tokens], of which each predicts the next, and outputs "
        "[B, tokens, vocabulary]"
    )
    inferred = False
    note = "labels are the tokens of the record, and each output is compared with the next one"

    def aligned(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return output[:, :-1], y[:, 1:]

    @property
    def shifted(self) -> Task | None:
        return None


class Survival(Task):
    """The interval of an event, or the last one in which a record was seen; outputs are logits of hazards."""

    expects = "integer labels [B, 2], the interval and whether the event was in it, and outputs [B, intervals]"
    metrics = ("c_index",)
    constant = "mean hazards"
    inferred = False
    has_accuracy = False

    def fits(self, output: Shape, y: Shape) -> bool:
        return y == (2,) and len(output) == 1

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return _hazard_loss(output, y)

    def best_constant(self, y: Tensor, num_classes: int) -> Tensor:
        at_risk = (y[:, :1] >= torch.arange(num_classes, device=y.device)).double().sum(dim=0)
        events = y[y[:, 1] > 0, 0].bincount(minlength=num_classes).double()
        return (events / at_risk.clamp(min=1)).logit(eps=1e-7)

    def for_metrics(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return expected_intervals(output), y

    def surplus(self, output: Shape, num_classes: int) -> int:
        advice = "Change the model, or num_classes, which is the number of intervals."
        must = f"give {num_classes} outputs, one for each interval"
        require(output == (num_classes,), "model", must, output[0], advice)
        return 0

    def wrong_labels(self, y: Tensor, num_classes: int, columns: Sequence[str]) -> Iterator[tuple[Tensor, str, str]]:
        interval, event = y.unbind(dim=1)
        order = f"The order is label: [time, event], got {[*columns]}." if columns else "The order is [time, event]."
        coded = f"Of events coded 1 and 2 write replace: {{{[*columns, 'time', 'event'][1]}: {{1: 0, 2: 1}}}}."
        must = "have the event, 0 or 1, in the second column of task survival"
        yield (event != 0) & (event != 1), must, f"{order} {coded}"
        must = f"have an interval from 0 to {num_classes - 1} in the first column of task survival"
        advice = "None is ignored: leave out the record, or write the last interval in which it was seen, and event 0."
        yield (interval < 0) | (interval >= num_classes), must, advice


class Custom(Task):
    """Of a module with a user's loss whose outputs fit no task: there is no accuracy, and only it knows the loss."""

    expects = "any labels and outputs"
    inferred = False
    has_accuracy = False

    def fits(self, output: Shape, y: Shape) -> bool:
        return True

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return torch.full((len(y),), torch.nan)

    def check(self, y: Tensor) -> None:
        """Nothing: labels are what the user's loss takes."""

    def wrong_labels(self, y: Tensor, num_classes: int, columns: Sequence[str]) -> Iterator[tuple[Tensor, str, str]]:
        """None, as in `check`."""
        yield from ()


CUSTOM = Custom()
#: name -> task with its default options
TASKS: dict[str, Task] = {
    "multiclass": Multiclass(),
    "binary": Binary(),
    "multilabel": Multilabel(),
    "regression": Regression(),
    "quantile_regression": QuantileRegression(),
    "segmentation": Segmentation(),
    "language_modeling": LanguageModeling(),
    "causal_lm": CausalLM(),
    "survival": Survival(),
}


def build_task(named: Any) -> Task:
    """Return a task by its name, by `{"name": ..., **options}`, or as an object or a class. Raises UserError.

    >>> build_task({"name": "quantile_regression", "quantile": 0.9}) == build_task(QuantileRegression(quantile=0.9))
    True
    """
    if isinstance(named, Task):
        return named
    if isinstance(named, type) and issubclass(named, Task):
        return named()
    must = f"be a name ({', '.join(TASKS)}), a mapping with a name, or a Task or its class"
    require(isinstance(named, str | Mapping), "task", must, named)
    options = {"name": named} if isinstance(named, str) else dict(named)
    name = options.pop("name", None)
    require_one_of(TASKS, "task", name)
    return call("task", {one: type(task) for one, task in TASKS.items()}, str(name), **options)


def task_of(output: Shape, y: Shape, real: bool, num_classes: int | None = None, named: Task | None = None) -> Task:
    """Return the task for outputs and labels of these shapes of one record: the `named` one, or the only one that fits.

    Only shapes, dtypes and `num_classes` decide, never values of labels. Raises UserError if no task fits, or several.

    >>> task_of((1,), (), real=False).name, task_of((5, 9), (5,), real=False).name
    ('binary', 'language_modeling')
    """
    kinds = f"outputs [{_shown(output)}] for {'floating' if real else 'integer'} labels [{_shown(y)}]"
    if named is not None:
        fits = (named.real == real or named.takes_floats) and named.fits(output, y)
        advice = "Pass y.long() for classes." if real and not named.real else ""
        require(fits, "task", f"fit the data and the model: {named.name} needs {named.expects}", kinds, advice)
        return named
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
    probabilities = "; outputs are probabilities" * (task.of_logits() != task)
    if named:
        return f"{task} (named{probabilities})"
    kind = "floating" if task.real else "integer"
    shapes = f"outputs [{_shown(output)}] and {kind} labels [{_shown(y)}]"
    return f"{task.name} (inferred from {shapes}{probabilities})"


def other_tasks(task: Task, output: Shape, y: Shape) -> list[str]:
    """Return the names of the tasks that the same floating labels would fit if they were 0 and 1.

    Whether they are is not looked at, because labels are private.
    """
    return [one.name for one in TASKS.values() if task.real and one.takes_floats and one.fits(output, y)]
