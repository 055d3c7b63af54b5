"""Metrics of a model on a set of records, by name: torchmetrics with the inputs that each task gives them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torchmetrics.classification as classes
import torchmetrics.regression as numbers
from torch import Tensor
from torchmetrics import Metric as TorchMetric
from torchmetrics.text import Perplexity
from torchmetrics.utilities.data import dim_zero_cat

from dpfl_lightning.config.registry import users_frame
from dpfl_lightning.errors import nearest, require
from dpfl_lightning.models.tasks import (
    MEASURES,
    PREDICTING_THE_MEAN,
    Binary,
    LanguageModeling,
    Measure,
    Multiclass,
    Multilabel,
    QuantileRegression,
    Regression,
    Segmentation,
    Survival,
    Task,
    class_logits,
    pinball,
)
from dpfl_lightning.privacy.accounting.accountant import finite_or_none

_AT_ONCE = 256  # records that are compared with all
_MOST_SHOWN, _BINS = 20, 10  # classes of a confusion table, and bins of a calibration curve
_FILTERS = threading.Lock()  # those of warnings belong to the whole process, which may have several nodes


def _mean(metric: TorchMetric) -> Tensor:
    return metric.compute().mean()  # type: ignore[no-any-return]


def _mean_of_ranks(metric: TorchMetric) -> Tensor:
    """Return the mean over the classes that some records have, and others do not."""
    value, targets = metric.compute(), dim_zero_cat(metric.target)  # type: ignore[arg-type]
    if isinstance(metric, classes.MulticlassAUROC | classes.MulticlassAveragePrecision):
        targets = torch.nn.functional.one_hot(targets, len(value))
    positive = targets.double().mean(dim=0).reshape(-1)
    return value.reshape(-1)[(positive > 0) & (positive < 1)].mean()  # type: ignore[no-any-return]


def _of_two_records(metric: TorchMetric) -> Tensor:
    return torch.tensor(torch.nan) if int(metric.total) < 2 else _mean(metric)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Metric:
    """A score of a model on a set of records, by a class of torchmetrics whose `higher_is_better` is its direction.

    Args:
        tasks: the classes of tasks that it fits.
        kind: takes `Task.metric_options`, `options` and the fields `of_task` of the task, and makes the metric.
        value: returns its number, NaN if the records do not define it.
        undefined: what they are then: completes "the records ...".
        has_baseline: whether the task's best constant prediction has a score to compare with.
        exact: the score by definition, without rounding errors, of the constants of tasks that are called so.
    """

    tasks: tuple[type[Task], ...]
    kind: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    of_task: tuple[str, ...] = ()
    value: Callable[[TorchMetric], Tensor] = _mean
    undefined: str = "do not define it"
    has_baseline: bool = True
    exact: Mapping[str, float] = field(default_factory=dict)

    def create(self, task: Task, num: int) -> TorchMetric:
        """Return a new metric of torchmetrics for a task with K classes or labels. Only rank 0 evaluates."""
        of_task = {name: getattr(task, name) for name in self.of_task}
        made: TorchMetric = self.kind(**task.metric_options(num), **self.options, **of_task, sync_on_compute=False)
        return made

    def measure(self, task: Task | None = None) -> Measure:
        """Return which values are better; None is the first of the tasks."""
        task = self.tasks[0]() if task is None else task
        made = self.create(task, 2)
        target = made.quantile if isinstance(made, Coverage) else None
        return Measure(made.higher_is_better, target, task.constant if self.has_baseline else "")


class Concordance(TorchMetric):
    """Harrell's c-index: of the pairs of which it is known who had the event first, the share that is in this order.

    Who is censored in the interval of another's event outlived it; equal predictions count as half.
    """

    higher_is_better = True
    survived: list[Tensor]
    labels: list[Tensor]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("survived", [])
        self.add_state("labels", [])

    def update(self, survived: Tensor, labels: Tensor) -> None:
        """Take in predicted survival `[B]` and (interval, event) `[B, 2]`."""
        self.survived.append(survived.double())
        self.labels.append(labels)

    def compute(self) -> Tensor:
        survived, (interval, event) = dim_zero_cat(self.survived), dim_zero_cat(self.labels).T
        right, pairs = survived.new_zeros(()), survived.new_zeros(())
        for first in event.nonzero().flatten().split(_AT_ONCE):
            until, stated = interval[first, None], survived[first, None]
            later = (until < interval) | ((until == interval) & (event == 0))
            pairs += later.sum()
            right += ((stated < survived) & later).sum() + 0.5 * ((stated == survived) & later).sum()
        return right / pairs


class MeanOverNumbers(TorchMetric):
    """The mean of `of` over predicted and true numbers, of which the outputs are a `quantile`."""

    higher_is_better: bool | None = False
    total: Tensor
    count: Tensor

    def __init__(self, quantile: float, **options: Any) -> None:
        super().__init__(**options)
        self.quantile = quantile
        self.add_state("total", torch.zeros((), dtype=torch.float64))
        self.add_state("count", torch.zeros((), dtype=torch.float64))

    def of(self, predicted: Tensor, true: Tensor) -> Tensor:
        """Return a number for each prediction, in its shape."""
        raise NotImplementedError

    def update(self, predicted: Tensor, true: Tensor) -> None:
        """Take in numbers of one shape."""
        self.total = self.total + self.of(predicted, true).double().sum()
        self.count = self.count + true.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


class Pinball(MeanOverNumbers):
    """The mean pinball loss."""

    def of(self, predicted: Tensor, true: Tensor) -> Tensor:
        return pinball(predicted, true, self.quantile)


class Coverage(MeanOverNumbers):
    """The share of labels at or below the output, which is right if it is the quantile."""

    higher_is_better = None

    def of(self, predicted: Tensor, true: Tensor) -> Tensor:
        return true <= predicted


_CLASSES = (Binary, Multiclass, Multilabel)
_PER_CLASS: dict[str, Any] = {"average": "none"}
_OF_RANKS: dict[str, Any] = {"value": _mean_of_ranks, "undefined": "have one class"}
_MACRO: dict[str, Any] = {"options": {"average": "macro"}}
_OF_QUANTILE: dict[str, Any] = {"of_task": ("quantile",)}
#: name -> metric
METRICS: dict[str, Metric] = {
    "auroc": Metric(_CLASSES, classes.AUROC, _PER_CLASS, **_OF_RANKS),
    "average_precision": Metric(_CLASSES, classes.AveragePrecision, _PER_CLASS, **_OF_RANKS),
    "f1": Metric(_CLASSES, classes.F1Score, **_MACRO),
    "precision": Metric(_CLASSES, classes.Precision, **_MACRO),
    "recall": Metric(_CLASSES, classes.Recall, **_MACRO),
    "calibration_error": Metric((Binary, Multiclass), classes.CalibrationError, has_baseline=False),
    "mae": Metric((Regression,), numbers.MeanAbsoluteError),
    "mse": Metric((Regression,), numbers.MeanSquaredError),
    "rmse": Metric((Regression,), numbers.MeanSquaredError, {"squared": False}),
    "pinball": Metric((QuantileRegression,), Pinball, **_OF_QUANTILE),
    "coverage": Metric((QuantileRegression,), Coverage, **_OF_QUANTILE),
    "r2": Metric(
        (Regression,),
        numbers.R2Score,
        value=_of_two_records,
        undefined="are fewer than two, or have one label",
        exact={PREDICTING_THE_MEAN: 0.0},
    ),
    "iou": Metric((Segmentation,), classes.JaccardIndex, **_MACRO),
    "dice": Metric((Segmentation,), classes.F1Score, **_MACRO),
    "c_index": Metric(
        (Survival,),
        Concordance,
        undefined="have no two of which it is known who had the event first",
    ),
    "perplexity": Metric((LanguageModeling,), Perplexity),
}


def metrics_of(task: Task) -> dict[str, Metric]:
    """Return the metrics of the package that fit a task, by name."""
    return {name: metric for name, metric in METRICS.items() if isinstance(task, metric.tasks)}


def chosen_metrics(named: Mapping[str, Metric], task: Task) -> Mapping[str, Metric]:
    """Return the metrics that are named, or else those of the task."""
    return named or {name: METRICS[name] for name in task.metrics}


def measures_of(metrics: Mapping[str, Metric], task: Task) -> dict[str, Measure]:
    """Return what is better of each score of a task, the one that stands for a model first: metrics, accuracy, loss."""
    usual = {
        name: replace(one, constant=one.constant and task.constant)
        for name, one in MEASURES.items()
        if task.has_accuracy or name != "accuracy"
    }
    return {**{name: metric.measure(task) for name, metric in metrics.items()}, **usual}


def check_metrics(metrics: Mapping[str, Metric], task: Task) -> None:
    """Raise UserError unless all metrics are of the task."""
    known = metrics_of(task)
    for name, metric in metrics.items():
        must = f"name metrics of task {task.name} ({', '.join(known)})"
        require(isinstance(task, metric.tasks), "evaluation.metrics", must, name, nearest(name, known))


class Metrics:
    """Metrics of one model on one set of records, of which it sees one batch after the other.

    A metric that raises an exception has no value: a mistake in it does not end a run that was paid for. `failed` has
    the exceptions by name.
    """

    def __init__(self, metrics: Mapping[str, Metric], task: Task, num_classes: int) -> None:
        self._task, self._num_classes, self._chosen = task, num_classes, metrics
        self._made: dict[str, TorchMetric] = {}
        self._finite, self._counted = True, False
        self.failed: dict[str, Exception] = {}

    def update(self, output: Tensor, y: Tensor) -> None:
        """Take in the outputs `[B, ...]` for the labels `y [B, ...]`, B >= 1."""
        if not self._chosen:
            return
        self._finite = self._finite and bool(output.isfinite().all())
        output, y = self._task.aligned(self._task.as_logits(output), y)
        self._counted = self._counted or bool(self._task.counts(y).any())
        whole = self._task.takes_floats or not y.is_floating_point()
        scores, targets = self._task.for_metrics(output, y.long() if whole else y)
        for name in [name for name in self._chosen if name not in self.failed]:
            with self._kept_failure(name):
                if name not in self._made:
                    num = self._task.num_for_metrics(output, y, self._num_classes)
                    self._made[name] = self._chosen[name].create(self._task, num).to(output.device)
                self._made[name].update(scores, targets)

    def values(self) -> dict[str, float | None]:
        """Return the value of each metric; None if the set does not define it, or an output was not finite."""
        values: dict[str, float | None] = dict.fromkeys(self._chosen)
        defined = self._finite and self._counted
        known = {name: one for name, one in self._made.items() if defined and name not in self.failed}
        for name, metric in known.items():
            with self._kept_failure(name), _FILTERS, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of classes without records, which are left out
                values[name] = finite_or_none(float(self._chosen[name].value(metric)))
        return values

    def undefined(self) -> dict[str, str]:
        """Return why metrics have no value: "the records ..." is completed by the words."""
        missing = [name for name, value in self.values().items() if value is None]
        return {name: self._why(name) for name in missing}

    def _why(self, name: str) -> str:
        if not self._finite:
            return "have outputs that are not finite"
        if not self._counted:
            return "have no label that counts"
        if (error := self.failed.get(name)) is not None:  # whose text may have values of records
            frame = users_frame(error)
            where = "" if frame is None else f" ({Path(frame.filename).name}, line {frame.lineno})"
            return f"make it raise {type(error).__name__}{where}"
        return self._chosen[name].undefined

    @contextmanager
    def _kept_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a user's code may raise anything
            self.failed[name] = error


class Tables:
    """What a test set shows of a classifier of at most 20 classes: its confusion, and whether it is calibrated."""

    def __init__(self, task: Task, num_classes: int) -> None:
        self._task, self._classes = task, max(num_classes, 2)
        self._shown = task.one_class and num_classes <= _MOST_SHOWN
        self._confusion = torch.zeros(self._classes**2, dtype=torch.long)
        self._bins = torch.zeros(3, _BINS, dtype=torch.float64)

    def update(self, output: Tensor, y: Tensor) -> None:
        """Take in the outputs `[B, ...]` for the labels `y [B, ...]`."""
        logits = class_logits(self._task.as_logits(output), y).double().cpu()
        if not self._shown or not logits.isfinite().all():
            self._shown = False
            return
        shares, labels = logits.flatten(1).softmax(dim=1), y.flatten().long().cpu()
        predicted = shares.argmax(dim=1)
        places = labels * self._classes + predicted.clamp(max=self._classes - 1)
        self._confusion += places.bincount(minlength=self._classes**2)
        stated, right = self._task.stated(shares, labels)
        places = (stated * _BINS).long().clamp(max=_BINS - 1)
        self._bins.index_add_(1, places, torch.stack([torch.ones_like(stated), stated, right.double()]))

    def values(self) -> dict[str, tuple[tuple[float, ...], ...]]:
        """Return counts `confusion` [label][prediction], and for bins of ten percent that have records `calibration`.

        That is their number, the mean stated probability of class 1 (of several classes: of the predicted one), and
        how often it was right. Empty for other tasks.
        """
        if not self._shown:
            return {}
        count, *sums = self._bins[:, self._bins[0] > 0]
        of_bins = zip(count.tolist(), *((one / count).tolist() for one in sums), strict=True)
        confusion = map(tuple, self._confusion.view(self._classes, self._classes).tolist())
        return {"confusion": tuple(confusion), "calibration": tuple(of_bins)}
