"""The loss of a user's LightningModule: that of its `training_step`, for each record alone."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torchmetrics import Metric, MetricCollection

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.client.draws import fixed_rng, generator_states
from dpfl_lightning.federated.client.lightning_hooks import ClientTrainer, replaced
from dpfl_lightning.models.derivatives import Differentiating
from dpfl_lightning.privacy.clipping.checked import dropout_layers
from dpfl_lightning.privacy.clipping.fixed_draws import FixedDraws, begin_records
from dpfl_lightning.privacy.clipping.independent import CheckedOperators
from dpfl_lightning.privacy.clipping.inputs import PAIR, BatchForm, take
from dpfl_lightning.privacy.clipping.reference import Params, evaluating
from dpfl_lightning.privacy.clipping.restored import tensors_restored
from dpfl_lightning.privacy.clipping.state import Kept
from dpfl_lightning.privacy.clipping.stateless import call, further_names
from dpfl_lightning.privacy.clipping.trial_records import moved_parameters
from dpfl_lightning.privacy.clipping.watched import Watch
from dpfl_lightning.runtime.dispatch import Rounding

_WITHIN = 1e-3  # relative: losses that are equal
_ROUNDINGS = 4  # rounding errors of results in bfloat16 or float16, of which more are allowed
_FACTORS = (1.0, -1.0, 0.0, 1e-3, 10.0, 100.0, 1e4)  # of floating labels


class LightningLoss:
    """`training_step` of a LightningModule as a loss for each record; its metrics and `log` are silent meanwhile.

    The loss of a record is what `training_step(batch, 0)` returns for a batch of this record alone, 0 for None.

    A mean of torch that is weighted by classes becomes the mean of weighted losses: its divisor, the sum of the
    weights, would cancel the weight of a record.
    """

    def __init__(self, module: L.LightningModule) -> None:
        manual = "Manual optimisation cannot be combined with noise on every step."
        require(module.automatic_optimization, "automatic_optimization", "be true for a LightningModule", False, manual)
        self.module, self.form = module, PAIR
        self.calls_forward = True  # whether `training_step` calls the module, on whose outputs metrics are computed
        self.runs_under_vmap = True
        self._step, self._differentiating = _TrainingStep(module), Differentiating()
        self._further_names = further_names(self._step)  # known once, as in `Model`
        metrics = [one for one in module.modules() if isinstance(one, Metric | MetricCollection)]
        silent: dict[str, Any] = dict.fromkeys(("log", "log_dict", "print"), _says_nothing)
        silent["_trainer"] = ClientTrainer("training_step")
        self._silent: list[tuple[nn.Module, dict[str, Any]]] = [(module, silent)]
        self._silent += [(one, {"forward": _zero_for_each_name, "update": _says_nothing}) for one in metrics]

    def prepare(self, x: Any, y: Tensor, num_classes: int, form: BatchForm, per_record: bool) -> None:
        """Try `training_step` on random records `x [B, *X]`, `y [B]`, in batches of the `form`.

        Raises UserError if it cannot run on one record, gives no loss, depends on `batch_idx` or the trainer, or keeps
        something for the next call; and, without `per_record`, if it is no mean or sum of losses of single records.
        """
        self.form, params, trials = form, moved_parameters(self.module), _trials(y, num_classes)
        watch = Watch([self.module], under_vmap=False)
        watch.begin()
        with tensors_restored(self.module), fixed_rng(y.device), evaluating(*dropout_layers(self.module)):
            self.runs_under_vmap = True
            try:
                self.sample_loss(params, x, trials[0])
            except Exception:  # a user's code may raise anything
                self.runs_under_vmap = False
            for labels in trials:
                self._require_losses_of_records(params, x, labels, per_record)
            self._try_once(x, y)
        watch.check()

    def sample_loss(self, params: Params, x: Any, y: Tensor) -> Tensor:
        """The loss of each record, `[B]`."""
        if len(y) == 1:
            return self._of_batch(params, x, y).reshape(1)
        if self.runs_under_vmap and not is_functorch_wrapped_tensor(y):
            of_one = partial(self._of_one, params)
            begin_records(len(y))
            return vmap(of_one, randomness="different")(x, y)
        rows = (slice(row, row + 1) for row in range(len(y)))
        return torch.cat([self._of_next(params, *take((x, y), row)) for row in rows])

    def _of_next(self, params: Params, x: Any, y: Tensor) -> Tensor:
        begin_records(1)
        return self.sample_loss(params, x, y)

    def _of_one(self, params: Params, x: Any, y: Tensor) -> Tensor:
        return self._of_batch(params, take(x, None), y[None])

    def _of_batch(self, params: Params, x: Any, y: Tensor, index: int = 0) -> Tensor:
        """The loss of a batch, of which the module gets a copy that it may change."""

        def loss(params: Params) -> Tensor:
            named = {f"module.{name}": value for name, value in params.items()}
            batch = self.form.batch(*tree_map(torch.clone, (x, y)))
            with replaced(self._silent), _StepOperators():
                return call(self._step, named, self._further_names, (batch, index)).reshape(())  # type: ignore[no-any-return]

        return self._differentiating.run(loss, params)

    def _require_losses_of_records(self, params: Params, x: Any, y: Tensor, per_record: bool) -> None:
        of_first, kept = partial(self._of_batch, params, *take((x, y), slice(1))), Kept([self.module])
        try:
            first, later = (_drawn(y.device, partial(of_first, index))[0] for index in (0, 7))
            of_records = per_record or self._is_of_records(params, x, y)
            self.sample_loss(params, x, y)
        except UserError:
            raise
        except Exception as error:  # a user's code may raise anything
            raise self._failed(params, x, y, error) from error
        if not _close(later, first):
            kept.require_same()
            must = "give the same loss for the same batch and the same random numbers"
            again = _drawn(y.device, of_first)[0]
            two = [first.item(), again.item()]
            require(_close(again, first), "training_step", must, two, "Look for what it keeps or updates.")
            advice = "A client draws its batches at random: remove what depends on it."
            two = [first.item(), later.item()]
            require(False, "training_step", "give the same loss for every batch_idx", two, advice)
        if not of_records:
            raise UserError(
                "`training_step` must return the mean or the sum of the losses of single records, got a loss that "
                "depends on other records of the batch. Often outputs of shape [B, 1] meet labels of shape [B], which "
                "pairs all records: give both one shape, as by squeeze(1). Training uses the losses of single "
                "records, which train nothing of what pairs records, as contrastive losses and Mixup do. Pass "
                "ClientModule(model, loss=...), or set `model.per_record: true`, or ClientModule(model, "
                "per_record=True), to train with the losses of single records."
            )

    def _is_of_records(self, params: Params, x: Any, y: Tensor) -> bool:
        """Whether the loss of a batch is the mean or the sum of those of its records.

        All records draw the same random numbers. If a batch draws other ones, as one noise for weights, half of the
        records has to change the loss equally whatever the other half is, with the same draws.
        """
        with suppress(RuntimeError), Rounding() as rounding, FixedDraws():  # such as for one noise of a batch
            begin_records(len(y))
            of_batch, alone = self._of_batch(params, x, y), self.sample_loss(params, x, y)
            within = max(_WITHIN, _ROUNDINGS * rounding.largest)
            if any(_close(of_batch, total, within) for total in (alone.mean(), alone.sum())):
                return True

        def drawn(chosen: Tensor) -> tuple[Tensor, list[object]]:
            return _drawn(y.device, partial(self._of_batch, params, *take((x, y), chosen)))

        rows = torch.arange(len(y), device=y.device)
        others, upper = rows.roll(1), rows >= len(y) // 2
        both, states = drawn(rows)
        if states == _drawn(y.device, lambda: None)[1]:  # it draws nothing
            return False
        low, high, none = (drawn(one)[0] for one in (rows.where(upper, others), others.where(upper, rows), others))
        error, changes = (both - low - high + none).abs(), (both - low).abs() + (both - high).abs()
        rounding = 1e-5 * torch.stack([both, low, high, none]).abs().max()
        return not bool(error > 1e-2 * changes + rounding)  # NaN is another check's

    def _failed(self, params: Params, x: Any, y: Tensor, error: Exception) -> UserError:
        reason = (str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__).rstrip(".")
        if "between 0 and 1" in reason:  # of torch's binary_cross_entropy; labels are tried that a regression may have
            return UserError(
                "`training_step` must take any floating labels, got an error of binary_cross_entropy. Use "
                "binary_cross_entropy_with_logits, or labels y.long() with y.float() in training_step."
            )
        try:
            self._of_batch(params, x, y)
        except Exception:  # the cause is not that a batch has one record
            pass
        else:
            try:
                self._of_batch(params, *take((x, y), slice(1)))
            except Exception:
                return UserError(
                    f"`training_step` must also work for a batch of one record, got: {reason}. Write squeeze(-1) for "
                    "squeeze(), which removes the dimension of records, too."
                )
        forms = {"pair": "(x, y)", "parts": "a tuple that ends with y", "dictionary": "a dictionary"}
        return UserError(
            f"`training_step` must take a batch of records, {forms[self.form.layout]}, without loggers, got "
            f"{type(error).__name__}: {reason}. Move other work to validation_step, or pass ClientModule(model, "
            "loss=...)."
        )

    def _try_once(self, x: Any, y: Tensor) -> None:
        """Note whether `training_step` calls the module; raise UserError if it gives no loss of any random record."""
        called, forward = [], self.module.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            called.append(True)
            return forward(*args, **kwargs)

        batches = (self.form.batch(*tree_map(torch.clone, take((x, y), [row]))) for row in range(len(y)))
        with replaced([*self._silent, (self.module, {"forward": noted})]), _StepOperators(), torch.enable_grad():
            answered = any(self._step.answer(batch) is not None for batch in batches)
        require(answered, "training_step", "return a loss of random records", "None", "Return it.")
        self.calls_forward = bool(called)


class _TrainingStep(nn.Module):
    """A module whose forward pass is the `training_step` of another one."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module
        self._takes_index = len(inspect.signature(module.training_step).parameters) > 1

    def forward(self, batch: Any, index: int) -> Tensor:
        """The loss that `training_step` returns for a batch; 0 for None, as Lightning skips such a batch."""
        answer = self.answer(batch, index)
        if answer is None:
            return next(self.module.parameters()).flatten()[:0].sum()  # has a derivative, which is 0
        loss = answer.get("loss") if isinstance(answer, Mapping) else answer
        if not isinstance(loss, Tensor):
            raise TypeError(f"training_step must return a loss, got {type(loss).__name__}.")
        return loss

    def answer(self, batch: Any, index: int = 0) -> Any:
        step = self.module.training_step
        return step(batch, index) if self._takes_index else step(batch)


class _StepOperators(CheckedOperators):
    """Within it a mean of torch that is weighted by classes is the mean of the weighted losses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _WEIGHTED:
            return super().__torch_function__(func, types, args, kwargs)
        bound = _WEIGHTED[func].bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        given = bound.arguments
        if given["weight"] is None or given["reduction"] != "mean":
            return func(*args, **(kwargs or {}))
        losses = func(**{**given, "reduction": "none"})
        if given["target"].shape != losses.shape:  # shares of classes
            return losses.mean()
        return losses.sum() / (given["target"] != given["ignore_index"]).sum()


_WEIGHTED = {one: inspect.signature(one) for one in (F.cross_entropy, F.nll_loss)}


def _trials(y: Tensor, num_classes: int) -> list[Tensor]:
    """Return labels of several classes, or of several sizes, for which losses are compared."""
    rows = torch.arange(len(y), device=y.device)
    if y.is_floating_point():
        factors = torch.tensor(_FACTORS, dtype=y.dtype, device=y.device)[rows % len(_FACTORS)]
        return [y, (y.movedim(0, -1) * factors).movedim(-1, 0)]
    known = num_classes if y.dim() == 1 else 2  # labels of several positions may all be 0 or 1
    labels = y.clone()
    labels.view(len(y), -1)[:, 0] = (rows * max(1, known // len(y)) % known).to(y.dtype)
    return [labels]


def _drawn(device: torch.device, work: Callable[..., Any]) -> tuple[Any, list[object]]:
    """Return the result of `work`, whose random draws are always the same, and the generators' states after it."""
    with fixed_rng(device):
        return work(), generator_states(device)


def _close(actual: Tensor, expected: Tensor, within: float = _WITHIN) -> bool:
    return torch.allclose(actual, expected, rtol=within, atol=1e-5, equal_nan=True)


def _says_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero_for_each_name(*args: Any, **kwargs: Any) -> Any:
    return defaultdict(lambda: torch.zeros(()))
