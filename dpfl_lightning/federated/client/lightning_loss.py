"""The loss of a user's LightningModule: that of its `training_step`, for each record alone."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torchmetrics import Metric, MetricCollection

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.clipping.inputs import arguments
from dpfl_lightning.privacy.clipping.reference import Params, evaluating

#: what a run uses of a LightningModule, or what changes nothing in it
_USED = {"forward", "training_step", "configure_optimizers", "configure_model"}


class LightningLoss:
    """`training_step` of a LightningModule as a loss for each record; its metrics and `log` are silent meanwhile.

    The loss of a record is what `training_step((x, y), 0)` returns for a batch of this record alone. If it depends on
    the records only by the outputs of `forward` (or of one child module) and by y, these are computed for all records
    of a batch at once, so that engines can use layer rules. Otherwise the whole `training_step` runs under `vmap`, and
    an evaluation reports the loss of `Model.loss`.
    """

    def __init__(self, module: L.LightningModule) -> None:
        manual = "Manual optimisation cannot be combined with noise on every step."
        require(module.automatic_optimization, "automatic_optimization", "be true for a LightningModule", False, manual)
        self.module = module
        self.part: str | None = None  # name of the child whose outputs `loss` takes; "" is the module itself
        self.example: Any = None
        self.unreduced = False  # whether `training_step` gives a loss for each record if torch's losses are not reduced
        self.whole = True  # whether every loss is computed by the whole `training_step`; until `prepare`

    def prepare(self, params: Params, x: Any, y: Tensor) -> None:
        """Find out, on random records `x [B, *X]`, `y [B]`, how losses are computed; before any private record is read.

        Raises UserError if `training_step` cannot run on one record, is no mean or sum of losses of single records, or
        keeps something for the next call.
        """
        before = _kept(self.module)
        self.example = tree_map(lambda one: one[:1].clone(), x)
        with torch.no_grad(), evaluating(self.module):
            params = {name: 0.9 * p + 0.01 for name, p in params.items()}  # so that a loss from others is noticed
            try:
                together = self._of_all(params, x, y)
                alone = self._of_each(params, x, y)
            except Exception as error:  # a user's code may raise anything
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise UserError(
                    "`training_step` must take (x, y) of records, and run under torch.func.vmap (without .item(), "
                    f"loggers or functional metrics), got {type(error).__name__}: {reason} Move other work to "
                    "validation_step, or wrap the net alone by ClientModule(net)."
                ) from error
            if not any(_close(together, total) for total in (alone.mean(), alone.sum())):
                raise UserError(
                    "`training_step` must return the mean of the losses of single records, got a loss that depends on "
                    "other records of the batch (or weighs classes by a mean). Override `loss` of a ClientModule."
                )
            changed = [name for name, value in _kept(self.module).items() if before.get(name) != value]
            must = "not keep anything of a batch for the next call"
            require(not changed, "training_step", must, ", ".join(changed), "Remove these attributes.")
            self.whole = False
            for name in ("", *(name for name, _ in self.module.named_children())):
                for self.unreduced in (True, False):
                    self.part = name
                    if self._agrees(params, x, y, alone):
                        return
        self.part, self.whole = None, True

    def sample_loss(self, params: Params, x: Any, y: Tensor) -> Tensor:
        """The loss of each record, `[B]`, by the whole `training_step`."""
        return self._of_each(params, x, y)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The loss of each record `[B]` from outputs `[B, ...]` of the module."""
        part = self.module if not self.part else self.module.get_submodule(self.part)

        def of(output: Any, y: Tensor) -> Tensor:
            with _replaced([(part, {"forward": lambda *args, **kwargs: output})]):
                return _step(self.module, self.example, y)

        def of_one(output: Any, y: Tensor) -> Tensor:
            return of(tree_map(lambda one: one[None], output), y[None]).reshape(())

        with self._silent():
            if not self.unreduced:
                return vmap(of_one, randomness="different")(output, y)
            with _Unreduced():
                losses = of(output, y)
            return losses.flatten(1).mean(dim=1) if losses.ndim > 1 else losses

    def _agrees(self, params: Params, x: Any, y: Tensor, expected: Tensor) -> bool:
        try:
            output = functional_call(self.module, dict(params), *arguments(x))
            return _close(self.loss(output, y), expected)
        except Exception:  # a user's code may raise anything for an unexpected output
            return False

    def _of_each(self, params: Params, x: Any, y: Tensor) -> Tensor:
        def of_one(x: Any, y: Tensor) -> Tensor:
            return self._of_all(params, tree_map(lambda one: one[None], x), y[None])

        return vmap(of_one, randomness="different")(x, y)

    def _of_all(self, params: Params, x: Any, y: Tensor) -> Tensor:
        named = {f"module.{name}": value for name, value in params.items()}
        with self._silent():
            return functional_call(_TrainingStep(self.module), named, (x, y)).reshape(())

    @contextmanager
    def _silent(self) -> Iterator[None]:
        metrics = [one for one in self.module.modules() if isinstance(one, Metric | MetricCollection)]
        quiet = [(one, {"forward": _no_metric, "update": _nothing}) for one in metrics]
        with _replaced([(self.module, {"log": _nothing, "log_dict": _nothing, "print": _nothing}), *quiet]):
            yield


class _TrainingStep(nn.Module):
    """A module whose forward pass is the `training_step` of another one."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any, y: Tensor) -> Tensor:
        return _step(self.module, x, y)


class _Unreduced(TorchFunctionMode):
    """Within it the losses of torch.nn.functional, which the loss modules call, are not reduced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"reduction": "none"} if func in _LOSSES else {})})


_FUNCTIONS = (one for name, one in vars(F).items() if inspect.isfunction(one) and not name.startswith("_"))
_LOSSES = {one for one in _FUNCTIONS if "reduction" in inspect.signature(one).parameters}


def _step(module: L.LightningModule, x: Any, y: Tensor) -> Tensor:
    """The loss that `training_step` returns for a batch."""
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    answer = module.training_step((x, y), 0) if takes_index else module.training_step((x, y))
    loss = answer.get("loss") if isinstance(answer, Mapping) else answer
    if not isinstance(loss, Tensor):
        raise TypeError(f"training_step must return a loss, got {type(loss).__name__}.")
    return loss


def overrides(module: L.LightningModule, name: str) -> bool:
    """Return whether the class of a module overrides a method of LightningModule."""
    kinds = type(module).__mro__
    return any(name in vars(kind) for kind in kinds[: kinds.index(L.LightningModule)])


def unused(module: L.LightningModule) -> list[str]:
    """Names of the hooks and metrics of a module that a run does not use."""
    public = (name for name in dir(L.LightningModule) if not name.startswith("_") and name not in _USED)
    hooks = [name for name in public if overrides(module, name)]
    return hooks + [name for name, one in module.named_children() if isinstance(one, Metric | MetricCollection)]


def _kept(module: nn.Module) -> dict[str, int]:
    """What tells whether attributes of a module or of its parts were set, or filled."""
    return {
        f"{name}.{key}".lstrip("."): len(value) if isinstance(value, list | dict | set) else id(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if not key.startswith("_") and key != "training" and not isinstance(part, Metric | MetricCollection)
    }


def _close(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-3, atol=1e-5)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _no_metric(*args: Any, **kwargs: Any) -> Any:
    return defaultdict(lambda: torch.zeros(()))


@contextmanager
def _replaced(attributes: list[tuple[nn.Module, dict[str, Callable[..., Any]]]]) -> Iterator[None]:
    """Replace attributes of objects for a while."""
    before = [(vars(one), {name: vars(one).get(name) for name in new}) for one, new in attributes]
    try:
        for one, new in attributes:
            vars(one).update(new)
        yield
    finally:
        for space, old in before:
            for name, value in old.items():
                if value is None:
                    del space[name]
                else:
                    space[name] = value
