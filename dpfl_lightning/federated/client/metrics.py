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
from dpfl_lightning.models.tasks import IGNORED, Task, class_logits, expected_intervals
from dpfl_lightning.privacy.accounting.accountant import finite_or_none

_ALONE: dict[str, Any] = {"sync_on_compute": False}  # only rank 0 evaluates
_AT_ONCE = 256  # records that are compared with all
_MOST_SHOWN, _BINS = 20, 10  # classes of a confusion table, and bins of a calibration curve
_FILTERS = threading.Lock()  # those of warnings belong to the whole process, which may have several nodes
_CLASSES = ("binary", "multiclass", "multilabel")


class Metric(NamedTuple):
    """The tasks that a metric fits, and what creates it for a task and K classes or labels."""

    tasks: tuple[str, ...]
    create: Callable[[str, int], TorchMetric]


def _of_classes(kind: Callable[..., Any], **options: Any) -> Callable[[str, int], TorchMetric]:
    """Create a metric of torchmetrics for binary, multiclass or multilabel; the mean over classes, if it has several.

    Segmentation maps are classes of pixels.
    """

    def create(task: str, num: int) -> TorchMetric:
        if task == "binary":
            return kind(task="binary", validate_args=False, **_ALONE)
        several = {"num_labels": num} if task == "multilabel" else {"num_classes": num}
        ignored = {"ignore_index": IGNORED} if task == "segmentation" else {}
        task = "multiclass" if task == "segmentation" else task
        return kind(task=task, **several, **ignored, **options, validate_args=False, **_ALONE)

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


#: name -> metric
METRICS: dict[str, Metric] = {
    "auroc": Metric(_CLASSES, _of_classes(classes.AUROC, average="none")),
    "average_precision": Metric(_CLASSES, _of_classes(classes.AveragePrecision, average="none")),
    "f1": Metric(_CLASSES, _of_classes(classes.F1Score, average="macro")),
    "precision": Metric(_CLASSES, _of_classes(classes.Precision, average="macro")),
    "recall": Metric(_CLASSES, _of_classes(classes.Recall, average="macro")),
    "calibration_error": Metric(_CLASSES[:2], _of_classes(classes.CalibrationError)),
    "mae": Metric(("regression",), lambda task, num: numbers.MeanAbsoluteError(**_ALONE)),
    "mse": Metric(("regression",), lambda task, num: numbers.MeanSquaredError(**_ALONE)),
    "rmse": Metric(("regression",), lambda task, num: numbers.MeanSquaredError(squared=False, **_ALONE)),
    "r2": Metric(("regression",), lambda task, num: numbers.R2Score(**_ALONE)),
    "iou": Metric(("segmentation",), _of_classes(classes.JaccardIndex, average="macro")),
    "dice": Metric(("segmentation",), _of_classes(classes.F1Score, average="macro")),
    "c_index": Metric(("survival",), lambda task, num: Concordance(**_ALONE)),
    "perplexity": Metric(
        ("language_modeling", "causal_lm"), lambda task, num: Perplexity(ignore_index=IGNORED, **_ALONE)
    ),
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
    return tuple(name for name, metric in METRICS.items() if task.name in metric.tasks)


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
        scores, targets = _inputs(self._task, output, y if self._task.real else y.long())
        outputs = class_logits(output, y).shape[1] if self._task.name in ("multiclass", "segmentation") else 0
        for name in self._names:
            if name not in self._metrics:
                num = scores.shape[1] if self._task.name == "multilabel" else max(self._num_classes, outputs)
                self._metrics[name] = METRICS[name].create(self._task.name, num).to(output.device)
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
        self._shown = task.name in ("binary", "multiclass") and num_classes <= _MOST_SHOWN
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
        of_two = self._task.name == "binary"
        stated = shares[:, 1] if of_two else shares.amax(dim=1)
        right = (labels if of_two else predicted == labels).double()
        places = (stated * _BINS).long().clamp(max=_BINS - 1)
        self._bins.index_add_(1, places, torch.stack([torch.ones_like(stated), stated, right]))

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


def _inputs(task: Task, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the metrics of a task take: probabilities, predicted classes of pixels, logits of tokens, numbers."""
    if task.name == "binary":
        return class_logits(output, y).softmax(dim=1)[:, 1].flatten(), y.flatten()
    if task.name == "multiclass":
        return output.softmax(dim=1), y
    if task.name == "multilabel":
        return output.sigmoid(), y
    if task.name == "segmentation":
        return class_logits(output, y).argmax(dim=1).flatten(), y.flatten()
    if task.name == "survival":
        return expected_intervals(output), y
    if task.name == "regression":
        flat = y.reshape(len(y), -1)
        return (output.reshape(flat.shape), flat) if flat.shape[1] > 1 else (output.flatten(), y.flatten())
    return output, y


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
