"""The loss of a user's LightningModule: that of its `training_step`, for each record alone."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torchmetrics import Metric, MetricCollection

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.client.draws import fixed_rng, generator_states
from dpfl_lightning.federated.client.lightning_hooks import ClientTrainer, replaced
from dpfl_lightning.models.operators import CheckedOperators
from dpfl_lightning.privacy.clipping.checked import dropout_layers
from dpfl_lightning.privacy.clipping.inputs import PAIR, BatchForm, take
from dpfl_lightning.privacy.clipping.reference import Params, evaluating
from dpfl_lightning.privacy.clipping.stateless import call, further_names

Output = Callable[[Params, Any], Tensor]
LIVELY = (1.0, -1.0, 0.0, 1e-3, 10.0, 100.0, 1e4)

#: what a log of a batch's loss gets while ways are compared: a decision by it shows
_LOGGED = (-math.inf, math.inf, math.nan)


class LightningLoss:
    """`training_step` of a LightningModule as a loss for each record; its metrics and `log` are silent meanwhile.

    The loss of a record is what `training_step(batch, 0)` returns for a batch of this record alone, 0 for None. If it
    reads the records only by the outputs of `forward` (or of one child module) and by y, in training and in evaluation
    mode, these are computed for all records at once, so that engines can use layer rules. Otherwise the whole step
    runs: for a batch at once if its losses of torch can be kept apart and it decides nothing by numbers, else for each.

    A mean of torch that is weighted by classes becomes the mean of weighted losses: its divisor, the sum of the
    weights, would depend on other records.
    """

    def __init__(self, module: L.LightningModule) -> None:
        manual = "Manual optimisation cannot be combined with noise on every step."
        require(module.automatic_optimization, "automatic_optimization", "be true for a LightningModule", False, manual)
        self.module = module
        self.part: str | None = None  # name of the child whose outputs `loss` takes; "" is the module itself
        self.example: Any = None
        self.unreduced = False  # whether `training_step` gives a loss for each record if torch's losses are not reduced
        self.calls_forward = True  # whether `training_step` calls the module, on whose outputs metrics are computed
        self._logged: float | None = None  # what a log of a batch's loss gets, None for the mean
        self.whole = True  # whether every loss is computed by the whole `training_step`; until `prepare`
        self.form = PAIR
        self._further_names = further_names(_TrainingStep(self))  # known once, as in `Model`
        self.runs_under_vmap = True

    def prepare(self, output: Output, params: Params, x: Any, y: Tensor, num_classes: int, form: BatchForm) -> None:
        """Find out, on random records `x [B, *X]`, `y [B]`, how losses are computed; before any private record is read.

        `output(params, x)` are the outputs that `loss` takes; `training_step` gets batches of the `form`.

        Raises UserError if `training_step` cannot run on one record, is no mean or sum of losses of single records,
        depends on `batch_idx` or the trainer, or keeps something for the next call.
        """
        before, self.form = _kept(self.module), form
        self.example = tree_map(lambda one: one[:1].clone(), x)
        parts = ("", *(name for name, _ in self.module.named_children()))
        ways = [*((part, unreduced) for part in parts for unreduced in (True, False)), (None, True)]

        def agrees(part: str | None, unreduced: bool) -> bool:
            for mode in (evaluating(self.module), nullcontext()):
                with mode, warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of torch, about ways that fail
                    trials = _trials(params, x, y, num_classes)
                    if not all(self._agrees(output, part, unreduced, *trial) for trial in trials):
                        return False
            return True

        with torch.no_grad():
            self.runs_under_vmap = self._runs_under_vmap(params, x, y)
            for mode in (evaluating(self.module), nullcontext()):
                with mode:
                    for trial in _trials(params, x, y, num_classes):
                        self._require_mean_of_records(*trial)
            way = next((way for way in ways if agrees(*way)), (None, False))
            self._try_once(x, y)
        changed = [name for name, value in _kept(self.module).items() if before.get(name) != value]
        must = "not keep anything of a batch for the next call"
        require(not changed, "training_step", must, ", ".join(changed), "Remove these attributes.")
        self.part, self.unreduced = way
        self.whole = self.part is None

    def _try_once(self, x: Any, y: Tensor) -> None:
        """Note whether `training_step` calls the module; raise UserError if it gives no loss of random records."""
        called, forward = [], self.module.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            called.append(True)
            return forward(*args, **kwargs)

        with self._silent(), replaced([(self.module, {"forward": noted})]):
            answer = self._answer(x, y)
        require(answer is not None, "training_step", "return a loss of random records", "None", "Return it.")
        self.calls_forward = bool(called)

    def _runs_under_vmap(self, params: Params, x: Any, y: Tensor) -> bool:
        try:
            vmap(functools.partial(self._of_one, params), randomness="different")(x, y)
        except Exception:  # a user's code may raise anything
            return False
        return True

    def sample_loss(self, params: Params, x: Any, y: Tensor) -> Tensor:
        """The loss of each record, `[B]`, by the whole `training_step`."""
        if self.whole and self.unreduced:
            return self._of_all(params, x, y, records=len(y))
        return self._one_by_one(params, x, y)

    def _one_by_one(self, params: Params, x: Any, y: Tensor) -> Tensor:
        if self.runs_under_vmap and len(y) != 1:
            return vmap(functools.partial(self._of_one, params), randomness="different")(x, y)
        return torch.stack([self._of_one(params, take(x, row), y[row]) for row in range(len(y))])

    def _of_one(self, params: Params, x: Any, y: Tensor) -> Tensor:
        return self._of_all(params, tree_map(lambda one: one[None], x), y[None])

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The loss of each record `[B]` from outputs `[B, ...]` of the module."""
        part = self.module if not self.part else self.module.get_submodule(self.part)

        def of(output: Any, y: Tensor) -> Tensor:
            def given(*args: Any, **kwargs: Any) -> Any:
                further = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
                if not all(isinstance(one, _Unread) for one in further):  # perhaps a mask by y
                    raise _differing("another argument of forward")
                return output

            with replaced([(part, {"forward": given})]):
                return self._step(tree_map(_Unread, self.example), y)

        def of_one(output: Any, y: Tensor) -> Tensor:
            return of(tree_map(lambda one: one[None], output), y[None]).reshape(())

        with self._silent():
            if not self.unreduced:
                with _SeparateLosses():
                    return vmap(of_one, randomness="different")(output, y)
            with _SeparateLosses(len(y), self._logged):
                return of(output, y)

    def _require_mean_of_records(self, params: Params, x: Any, y: Tensor) -> None:
        one = take(x, slice(1)), y[:1]
        try:
            together, drawn = _drawn(y.device, lambda: self._of_all(params, x, y))
            one_alone, _ = _drawn(y.device, lambda: self._of_all(params, *one))
            others = [_drawn(y.device, lambda: self._of_all(params, *one, index))[0] for index in (1, 7)]  # noqa: B023
            alone = self._one_by_one(params, x, y)
        except UserError:
            raise
        except Exception as error:  # a user's code may raise anything
            raise self._failed(params, x, y, error) from error
        later = "A client draws its batches at random: remove what depends on it."
        same = all(_close(other, one_alone) for other in others)
        require(same, "training_step", "give the same loss for every batch_idx", "another one", later)
        if drawn == _drawn(y.device, lambda: None)[1]:
            separate = any(_close(together, total) for total in (alone.mean(), alone.sum()))
        else:
            separate = self._is_additive(params, x, y)
        if not separate:
            raise UserError(
                "`training_step` must return the mean of the losses of single records, got a loss that depends on "
                "other records of the batch. Pass ClientModule(model, loss=...)."
            )

    def _is_additive(self, params: Params, x: Any, y: Tensor) -> bool:
        """Whether half of the records change the loss equally whatever the other half is, with the same random draws.

        A loss that draws for a batch cannot be compared with those of single records. Mixup is not additive.
        """
        rows = torch.arange(len(y), device=y.device)
        others, upper = rows.roll(1), rows >= len(y) // 2

        def loss(chosen: Tensor) -> Tensor:
            return _drawn(y.device, lambda: self._of_all(params, take(x, chosen), y[chosen]))[0]

        both, low, high, none = map(loss, (rows, rows.where(upper, others), others.where(upper, rows), others))
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
            self._of_all(params, x, y)
        except Exception:  # the cause is not that a batch has one record
            pass
        else:
            try:
                self._of_all(params, take(x, slice(1)), y[:1])
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

    def _agrees(self, output: Output, part: str | None, unreduced: bool, params: Params, x: Any, y: Tensor) -> bool:
        """Whether outputs of `forward` give, by this way, the loss of each record alone, with the same random draws.

        False if anything but dropout draws random numbers, and if the step decides by numbers of several records.
        """
        self.part, self.unreduced = part, unreduced

        def losses(x: Any, y: Tensor) -> Tensor:
            if part is None:
                return self._of_all(params, x, y, records=len(y))
            return self.loss(output(params, tree_map(torch.clone, x)), y)

        try:
            for row in range(min(4, len(y))):
                one_x, one_y = take(x, slice(row, row + 1)), y[row : row + 1]
                expected, drawn = _drawn(y.device, lambda: self._of_all(params, one_x, one_y))  # noqa: B023
                alone, drawn_alone = _drawn(y.device, lambda: losses(one_x, one_y))  # noqa: B023
                if drawn != drawn_alone or not _close(alone, expected[None]):
                    return False
            # Dropout draws otherwise for a batch; by any other draw code may mix records now and then.
            with fixed_rng(y.device), evaluating(*dropout_layers(self.module)), _WithoutDropout():
                before = generator_states(y.device)
                # Also beside extreme records, by which code may decide for all.
                same = all(self._same_together(losses, some, y) for some in (x, tree_map(_with_extremes, x)))
                return same and generator_states(y.device) == before
        except Exception:  # a user's code may raise anything for an unexpected output
            return False

    def _same_together(self, losses: Callable[[Any, Tensor], Tensor], x: Any, y: Tensor) -> bool:
        alone = torch.cat([losses(take(x, slice(row, row + 1)), y[row : row + 1]) for row in range(len(y))])
        try:
            for self._logged in _LOGGED:
                with self._undecided() if self.unreduced else nullcontext():  # `vmap` refuses such code by itself
                    together = losses(x, y)
                if not _close(together, alone):
                    return False
        finally:
            self._logged = None
        return True

    @contextmanager
    def _undecided(self) -> Iterator[None]:
        """Within it `training_step` raises an error if it decides by numbers; what layers decide, engines check."""
        watch = _Undecided()
        layers = (one for one in self.module.modules() if any(True for _ in one.parameters()))
        with replaced([(one, {"forward": watch.unwatched(one.forward)}) for one in layers]), watch:
            yield

    def _answer(self, x: Any, y: Tensor, index: int = 0) -> Any:
        step, batch = self.module.training_step, self.form.batch(x, y)
        takes_index = len(inspect.signature(step).parameters) > 1
        with CheckedOperators():
            return step(batch, index) if takes_index else step(batch)

    def _step(self, x: Any, y: Tensor, index: int = 0) -> Tensor:
        """The loss that `training_step` returns for a batch; 0 for None, as Lightning skips such a batch."""
        answer = self._answer(x, y, index)
        if answer is None:
            return next(self.module.parameters()).flatten()[:0].sum()  # has a derivative, which is 0
        loss = answer.get("loss") if isinstance(answer, Mapping) else answer
        if not isinstance(loss, Tensor):
            raise TypeError(f"training_step must return a loss, got {type(loss).__name__}.")
        return loss

    def _of_all(self, params: Params, x: Any, y: Tensor, index: int = 0, records: int | None = None) -> Tensor:
        """The loss of a batch, or those of so many records, `[records]`, if all are losses of torch.

        The module gets a copy of the batch, which it may change.
        """
        x = tree_map(torch.clone, x)
        named = {f"module.{name}": value for name, value in params.items()}
        with self._silent(), _SeparateLosses(records, self._logged):
            loss = call(_TrainingStep(self), named, self._further_names, (x, y, index))
        return loss.reshape(()) if records is None else loss

    @contextmanager
    def _silent(self) -> Iterator[None]:
        metrics = [one for one in self.module.modules() if isinstance(one, Metric | MetricCollection)]
        quiet = [(one, {"forward": _no_metric, "update": _nothing}) for one in metrics]
        silent = {"log": _nothing, "log_dict": _nothing, "print": _nothing, "_trainer": ClientTrainer("training_step")}
        with replaced([(self.module, silent), *quiet]):
            yield


def _trials(params: Params, x: Any, y: Tensor, num_classes: int) -> Iterator[tuple[Params, Any, Tensor]]:
    """Yield parameters, records and labels of several classes, on which ways to compute a loss are compared."""
    generator = torch.Generator().manual_seed(0)
    for number, scale in enumerate((1.0, 5.0)):
        labels = y.roll(number, 0)
        if number and y.is_floating_point():
            factors = torch.tensor(LIVELY, dtype=y.dtype, device=y.device)[torch.arange(len(y)) % len(LIVELY)]
            labels = (labels.movedim(0, -1) * factors).movedim(-1, 0)
        elif not y.is_floating_point():
            known = num_classes if y.dim() == 1 else 2  # labels of several positions may all be 0 or 1
            spread = torch.arange(len(y), device=y.device) * max(1, known // len(y)) + number
            labels = labels.clone()
            labels.view(len(y), -1)[:, 0] = (spread % known).to(y.dtype)
        moved = {
            name: 0.9 * p + 0.05 * torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            for name, p in params.items()
        }
        yield moved, tree_map(lambda one: scale * one if one.is_floating_point() else one, x), labels  # noqa: B023


def _drawn(device: torch.device, work: Callable[[], Any]) -> tuple[Any, list[object]]:
    """Return the result of `work`, whose random draws are always the same, and the generators' states after it."""
    with fixed_rng(device):
        return work(), generator_states(device)


class _TrainingStep(nn.Module):
    """A module whose forward pass is the `training_step` of another one."""

    def __init__(self, loss: LightningLoss) -> None:
        super().__init__()
        self.module, self._loss = loss.module, loss

    def forward(self, x: Any, y: Tensor, index: int) -> Tensor:
        return self._loss._step(x, y, index)


class _SeparateLosses(TorchFunctionMode):
    """Within it the losses of torch.nn.functional, which the loss modules call, are those of each of `records`, `[B]`.

    What reads such losses as one number, for a log, gets `logged`, or their mean. Lists of numbers cannot be read.
    Without `records` only means weighted by classes change: to the mean of the weighted losses.
    """

    def __init__(self, records: int | None = None, logged: float | None = None) -> None:
        super().__init__()
        self._records, self._logged = records, logged

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._records and func in (Tensor.item, Tensor.__float__) and args[0].numel() > 1:
            return func(args[0].mean()) if self._logged is None else self._logged
        if self._records and func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            raise _differing(func.__name__)
        if func not in _LOSSES:
            return func(*args, **kwargs)
        bound = _LOSSES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        weighted = (
            func in (F.cross_entropy, F.nll_loss) and given["weight"] is not None and given["reduction"] == "mean"
        )
        if given["reduction"] == "none" or not (weighted or self._records):
            return func(*args, **kwargs)
        losses = func(**{**given, "reduction": "none"})
        of_each = losses.reshape(self._records or 1, -1)
        if given["reduction"] != "mean":
            return of_each.sum(dim=1)
        counted = torch.ones_like(of_each)
        if "ignore_index" in given and given["target"].shape == losses.shape:
            counted = (given["target"] != given["ignore_index"]).reshape(of_each.shape)
        means = of_each.sum(dim=1) / counted.sum(dim=1)
        return means if self._records else means[0]


_FUNCTIONS = (one for name, one in vars(F).items() if inspect.isfunction(one) and not name.startswith("_"))
_SIGNATURES = {one: inspect.signature(one) for one in _FUNCTIONS}
_LOSSES = {one: of for one, of in _SIGNATURES.items() if "reduction" in of.parameters}
_DROPOUTS = {
    one: of
    for one, of in _SIGNATURES.items()
    if "training" in of.parameters and of.parameters.keys() & {"p", "dropout_p"}
}


class _WithoutDropout(TorchFunctionMode):
    """Within it the functions of torch with dropout, which layers and models call, drop nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            return func(**{**given, **(kwargs or {}), "dropout_p": 0.0})
        if func not in _DROPOUTS:
            return func(*args, **(kwargs or {}))
        bound = _DROPOUTS[func].bind(*args, **(kwargs or {}))
        return func(**{**bound.arguments, "training": False})


class _Unread(Tensor):
    """Inputs `[B, *X]` of which shape, dtype and device can be read, and no number: UserError.

    Views of them are such inputs, too, and copies in a dtype that holds all their numbers.
    """

    _numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers: Tensor) -> _Unread:
        made = Tensor._make_wrapper_subclass(
            cls, numbers.shape, numbers.stride(), dtype=numbers.dtype, device=numbers.device
        )
        made._numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if not isinstance(args[0], _Unread):
            raise _differing(name)
        own = args[0].dtype
        asked = kwargs.get("dtype") or own
        args, kwargs = tree_map_only(_Unread, lambda one: one._numbers, (args, kwargs))
        if name.startswith("new_") or name.endswith("_like"):
            return func(*args, **kwargs)
        if not (func.is_view or name == "clone" or (name == "_to_copy" and torch.promote_types(own, asked) == asked)):
            raise _differing(name)  # of no type that an operator of Python, such as !=, catches
        return tree_map_only(Tensor, _Unread, func(*args, **kwargs))


class _Undecided(TorchDispatchMode):
    """Within it code that decides by numbers, such as `mask.any()`, raises an error, but in `unwatched` functions."""

    def __init__(self) -> None:
        super().__init__()
        self._watching = True

    def unwatched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def of_layer(*args: Any, **kwargs: Any) -> Any:
            before, self._watching = self._watching, False
            try:
                return function(*args, **kwargs)
            finally:
                self._watching = before

        return of_layer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._watching and any(tag in func.tags for tag in _DECIDING) and not _by_places(func, args):
            raise _differing(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


_DECIDING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def _by_places(func: Any, args: Any) -> bool:
    """Whether an operator takes the numbers at places, and not those where a mask is true."""
    if func.overloadpacket is not torch.ops.aten.index:
        return False
    return not any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def _differing(what: str) -> UserError:
    """Of code that was not run for the random records."""
    return UserError(
        f"`training_step` must do the same with all records, got {what} for some only. Compute it for all, and choose "
        "by torch.where."
    )


def _kept(module: nn.Module) -> dict[str, int]:
    """What tells whether attributes of a module or of its parts were set, or filled."""
    return {
        f"{name}.{key}".lstrip("."): len(value) if isinstance(value, list | dict | set | deque) else id(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if not key.startswith("_") and key != "training" and not isinstance(part, Metric | MetricCollection)
    }


def _with_extremes(part: Tensor) -> Tensor:
    """Return a copy in which every second record is 10,000 times as large."""
    if not part.is_floating_point():
        return part
    part = part.clone()
    part[1::2] *= 1e4
    return part


def _close(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-3, atol=1e-5, equal_nan=True)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _no_metric(*args: Any, **kwargs: Any) -> Any:
    return defaultdict(lambda: torch.zeros(()))
