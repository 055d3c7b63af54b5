"""Metrics that a user names: those of the package, and classes and objects of torchmetrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric as TorchMetric

from dpfl_lightning.config.registry import USERS, build_object, check_names, users_code
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.client.metrics import METRICS, Metric
from dpfl_lightning.models.tasks import MEASURES, Task

_KEY = "evaluation.metrics"
_RENAME = "Choose another: {class_path: ..., name: ...} in YAML, {name: metric} in Python."
_OF_SEARCHES = ("num_params", "seconds")  # names of other scores
_OF_GUARANTEES = ("epsilon", "delta", "budget")


def _only_number(metric: TorchMetric) -> Tensor:
    value = metric.compute()
    single = isinstance(value, Tensor | int | float) and torch.as_tensor(value).numel() == 1
    if not single:
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"compute() returns {shape}, not one number")
    return torch.as_tensor(value).reshape(())


@dataclass(frozen=True, eq=False)
class OwnMetric(Metric):
    """A metric of a user, which fits every task.

    Args:
        metric: what is copied for each model and set of records.
    """

    metric: TorchMetric | None = None

    def create(self, task: Task, num: int) -> TorchMetric:
        """Return a new copy without records. Only rank 0 evaluates, so nothing is gathered."""
        assert self.metric is not None  # for mypy
        copied = self.metric.clone()
        copied.reset()
        for part in copied.modules():  # a metric may wrap others
            if isinstance(part, TorchMetric):
                part.sync_on_compute = part._to_sync = False
        return copied


def build_metrics(named: Sequence[Any]) -> dict[str, Metric]:
    """Return name -> metric, for names of `METRICS`, classes, objects and class paths; see `docs/howto/model.md`.

    A metric of a user has the name of its class in snake case unless it is `{class_path, init_args, name}`, or
    `{name: class or object}` in Python.

    Raises UserError if one is not known, cannot be made, has no direction or no name of its own.
    """
    require(isinstance(named, list | tuple), _KEY, "be a list", named, "Write [...].")
    check_names(_KEY, named)
    found: dict[str, Metric] = {}
    for place, given in enumerate(named):
        known = isinstance(given, str) and given in METRICS
        name, metric = (given, METRICS[given]) if known else _own(f"{_KEY}.{place}", given)
        require(name not in found, _KEY, "have different names", name, _RENAME)
        found[name] = metric
    return found


def _own(key: str, given: Any) -> tuple[str, Metric]:
    """Return name and metric of a user's class, object or mapping."""
    name: Any = None
    if isinstance(given, str):
        given = {"class_path": given}
    if isinstance(given, Mapping):
        given = dict(given)
        if "class_path" in given:
            name = given.pop("name", None)
            given = build_object(key, given, TorchMetric)  # type: ignore[type-abstract]
        else:
            forms = "be {class_path, init_args, name}, or {name: metric} in Python"
            require(len(given) == 1, key, forms, given)
            ((name, given),) = given.items()
    if isinstance(given, type) and issubclass(given, TorchMetric):
        given = _without_arguments(key, given)
    kinds = f"be a name, or a class or an object that derives from {USERS[_KEY]}"
    require(isinstance(given, TorchMetric), key, kinds, given, "Of a MetricCollection list the metrics.")
    kind = type(given).__name__
    directed = f"say by higher_is_better of class {kind} whether larger values are better"
    way_out = f"Write higher_is_better = True (or False) in class {kind}, or in a class derived from it."
    require(isinstance(given.higher_is_better, bool), key, directed, given.higher_is_better, way_out)
    name = snake_case(kind) if name is None else name
    fits = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name) is not None
    require(fits, f"{key}.name", "have small letters, digits and underscores", name)
    taken = name in METRICS or name in MEASURES or name in _OF_SEARCHES
    require(not taken, f"{key}.name", "differ from the scores of the package", name, _RENAME)
    must = f"differ from the words of a guarantee ({', '.join(_OF_GUARANTEES)})"
    require(name not in _OF_GUARANTEES, f"{key}.name", must, name, _RENAME)
    return name, OwnMetric((Task,), type(given), value=_only_number, metric=given)


def _without_arguments(key: str, kind: type[TorchMetric]) -> TorchMetric:
    try:
        with users_code(key, kind.__name__):
            return kind()
    except TypeError as error:
        way_out = f"Pass an object with its arguments: {kind.__name__}(...)."
        raise UserError(f"`{key}` must be made without arguments, got {kind.__name__}: {error}. {way_out}") from None


def snake_case(name: str) -> str:
    """Return the name of a class in small letters.

    >>> snake_case("BinaryFBetaScore"), snake_case("AUROC"), snake_case("R2Score")
    ('binary_f_beta_score', 'auroc', 'r2_score')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
