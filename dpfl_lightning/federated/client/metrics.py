"""Metrics of a model on a set of records, by name: torchmetrics with the inputs that each task gives them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torchmetrics.classification as classes
import torchmetrics.regression as numbers
from torch import Tensor
from torchmetrics import Metric as TorchMetric
from torchmetrics.text import Perplexity
from torchmetrics.utilities.data import dim_zero_cat

from dpfl_lightning.errors import nearest, require
from dpfl_lightning.models.tasks import (
    IGNORED,
    Binary,
    LanguageModeling,
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

_ALONE: dict[str, Any] = {"sync_on_compute": False}  # only rank 0 evaluates
_AT_ONCE = 256  # records that are compared with all
_MOST_SHOWN, _BINS = 20, 10  # classes of a confusion table, and bins of a calibration curve
_FILTERS = threading.Lock()  # those of warnings belong to the whole process, which may have several nodes


class Metric(NamedTuple):
    """The kinds of tasks that a metric fits, and what creates it for a task and K classes or labels."""

    tasks: tuple[type[Task], ...]
    create: Callable[[Task, int], TorchMetric]


def _of_classes(kind: Callable[..., Any], **options: Any) -> Callable[[Task, int], TorchMetric]:
    """Create a metric of torchmetrics for binary, multiclass or multilabel; the mean over classes, if it has several.

    Segmentation maps are classes of pixels.
    """

    def create(task: Task, num: int) -> TorchMetric:
        if task.kind == "binary":
            return kind(task=task.kind, validate_args=False, **_ALONE)
        several = {"num_labels": num} if task.kind == "multilabel" else {"num_classes": num}
        ignored = {"ignore_index": IGNORED} if task.ignores else {}
        return kind(task=task.kind, **several, **ignored, **options, validate_args=False, **_ALONE)

    return create


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
    """The mean of a function of predicted and true numbers, such as a loss."""

    higher_is_better = False
    total: Tensor
    count: Tensor

    def __init__(self, of: Callable[[Tensor, Tensor], Tensor], **options: Any) -> None:
        super().__init__(**options)
        self._of = of
        self.add_state("total", torch.zeros((), dtype=torch.float64))
        self.add_state("count", torch.zeros((), dtype=torch.float64))

    def update(self, predicted: Tensor, true: Tensor) -> None:
        """Take in numbers of one shape."""
        self.total = self.total + self._of(predicted, true).double().sum()
        self.count = self.count + true.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


class Coverage(MeanOverNumbers):
    """The share of labels at or below the output, which is right if it is the quantile of the task."""

    higher_is_better = True

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda predicted, true: true <= predicted, **options)


def _pinball(task: Task, num: int) -> TorchMetric:
    assert isinstance(task, QuantileRegression)  # for mypy
    return MeanOverNumbers(lambda predicted, true: pinball(predicted, true, task.quantile), **_ALONE)


_CLASSES = (Binary, Multiclass, Multilabel)
#: name -> metric
METRICS: dict[str, Metric] = {
    "auroc": Metric(_CLASSES, _of_classes(classes.AUROC, average="none")),
    "average_precision": Metric(_CLASSES, _of_classes(classes.AveragePrecision, average="none")),
    "f1": Metric(_CLASSES, _of_classes(classes.F1Score, average="macro")),
    "precision": Metric(_CLASSES, _of_classes(classes.Precision, average="macro")),
    "recall": Metric(_CLASSES, _of_classes(classes.Recall, average="macro")),
    "calibration_error": Metric((Binary, Multiclass), _of_classes(classes.CalibrationError)),
    "mae": Metric((Regression,), lambda task, num: numbers.MeanAbsoluteError(**_ALONE)),
    "mse": Metric((Regression,), lambda task, num: numbers.MeanSquaredError(**_ALONE)),
    "rmse": Metric((Regression,), lambda task, num: numbers.MeanSquaredError(squared=False, **_ALONE)),
    "pinball": Metric((QuantileRegression,), _pinball),
    "coverage": Metric((QuantileRegression,), lambda task, num: Coverage(**_ALONE)),
    "r2": Metric((Regression,), lambda task, num: numbers.R2Score(**_ALONE)),
    "iou": Metric((Segmentation,), _of_classes(classes.JaccardIndex, average="macro")),
    "dice": Metric((Segmentation,), _of_classes(classes.F1Score, average="macro")),
    "c_index": Metric((Survival,), lambda task, num: Concordance(**_ALONE)),
    "perplexity": Metric((LanguageModeling,), lambda task, num: Perplexity(ignore_index=IGNORED, **_ALONE)),
}
_OF_RANKS = ("auroc", "average_precision")  # need records with a class and records without it
_NO_PAIR = "have no two of which it is known who had the event first"
_UNDEFINED = {
    **dict.fromkeys(_OF_RANKS, "have one class"),
    "r2": "are fewer than two, or have one label",
    "c_index": _NO_PAIR,
}


def metrics_of(task: Task) -> tuple[str, ...]:
    """Return the names of the metrics that fit a task."""
    return tuple(name for name, metric in METRICS.items() if isinstance(task, metric.tasks))


def check_metrics(names: Sequence[str], task: Task) -> None:
    """Raise UserError unless all names are metrics of the task."""
    known = metrics_of(task)
    for name in names:
        must = f"name metrics of task {task.name} ({', '.join(known)})"
        require(name in known, "evaluation.metrics", must, name, nearest(name, known))


class Metrics:
    """Metrics of one model on one set of records, of which it sees one batch after the other."""

    def __init__(self, names: Sequence[str], task: Task, num_classes: int) -> None:
        self._task, self._num_classes, self._names = task, num_classes, names
        self._metrics: dict[str, TorchMetric] = {}
        self._finite = True

    def update(self, output: Tensor, y: Tensor) -> None:
        """Take in the outputs `[B, ...]` for the labels `y [B, ...]`, B >= 1."""
        if not self._names:
            return
        self._finite = self._finite and bool(output.isfinite().all())
        output, y = self._task.aligned(self._task.as_logits(output), y)
        scores, targets = self._task.for_metrics(output, y if self._task.real else y.long())
        for name in self._names:
            if name not in self._metrics:
                num = self._task.num_for_metrics(output, y, self._num_classes)
                self._metrics[name] = METRICS[name].create(self._task, num).to(output.device)
            self._metrics[name].update(scores, targets)

    def values(self) -> dict[str, float | None]:
        """Return the value of each metric; None if the set does not define it, or an output was not finite."""
        values = {name: _value(name, metric) for name, metric in self._metrics.items()}
        return {name: finite_or_none(value) if self._finite else None for name, value in values.items()}

    def undefined(self) -> dict[str, str]:
        """Return why metrics have no value: "the records ..." is completed by the words."""
        missing = [name for name, value in self.values().items() if value is None]
        return {
            name: _UNDEFINED.get(name, "do not define it") if self._finite else "have outputs that are not finite"
            for name in missing
        }


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


def _value(name: str, metric: TorchMetric) -> float:
    if name == "r2" and int(metric.total) < 2:  # type: ignore[arg-type]
        return float("nan")
    with _FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes without records, which are left out below
        value = metric.compute()
    if name in _OF_RANKS:
        targets = dim_zero_cat(metric.target)  # type: ignore[arg-type]
        if isinstance(metric, classes.MulticlassAUROC | classes.MulticlassAveragePrecision):
            targets = torch.nn.functional.one_hot(targets, len(value))
        positive = targets.double().mean(dim=0).reshape(-1)
        value = value.reshape(-1)[(positive > 0) & (positive < 1)]
    return float(value.mean())
