"""Operators of torch that keep the records of a pass under `vmap` apart, by name: no other one runs in a pass.

`tests/privacy/test_independent.py` runs them on random arguments and compares records in different company.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: functions, methods and operators; those in place, whose name ends with "_", are meant, too
_LISTED = frozenset(Path(__file__).with_suffix(".txt").read_text().split())
_NAMES = frozenset(name for name in _LISTED if "::" not in name)
#: overloads that did not run when all were tried; "!" ends the names of those that are wrong, and of their packets
NOT_CALLED = frozenset(name.removesuffix("!") for name in _LISTED - _NAMES)
_WRONG = frozenset(name.partition(".")[0].removesuffix("!") for name in _LISTED if name.endswith("!"))
#: libraries of functions whose rules were all tried
_LIBRARIES = ("linalg_", "fft_", "special_")
_UNLIKE = frozenset({"linalg_lstsq"})  # of these: equal records get other bits
_SPECIAL = _names(
    """
    __abs__ __add__ as_strided __and__ __bool__ __complex__ __contains__ __div__ __eq__ __float__ __floordiv__
    __format__ __ge__ __getitem__ __gt__ __hash__ __iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imod__
    __imul__ __index__ __int__ __invert__ __ior__ __ipow__ __irshift__ __isub__ __iter__ __itruediv__ __ixor__
    __le__ __len__ __long__ __lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __nonzero__ __or__ __pos__
    __pow__ __radd__ __rand__ __rdiv__ __reversed__ __rfloordiv__ __rlshift__ __rmatmul__ __rmod__ __rmul__ __ror__
    __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__ __setitem__ __sub__ __truediv__ __xor__ _assert
    _assert_async _is_all_true _is_any_true _is_view _weight_norm _sym_sqrt _shape_as_tensor _dim_arange _softmax
    _log_softmax _scaled_dot_product_attention_math _masked_softmax _threshold _make_dual _unpack_dual
    _set_grad_enabled stride _scaled_dot_product_flash_attention_for_cpu
    """
)
#: attributes that may be asked for, and set
_ATTRIBUTES = _names(
    """
    H T data device dtype grad imag is_cpu is_cuda is_leaf is_meta is_mkldnn is_mps is_mtia is_nested is_quantized
    is_sparse is_sparse_csr is_xla is_xpu itemsize layout mH mT name names nbytes ndim output_nr real requires_grad
    retains_grad shape volatile
    """
)
_SET = frozenset({"grad", "imag", "real", "requires_grad"})
#: types of arguments that hold no code
_PLAIN = (
    *(bool, int, float, complex, str, range, type(None), type(...)),
    *(one for one in np.sctypeDict.values() if not issubclass(one, np.void | np.object_)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_NUMBERS = (bool, int, float, complex)
_KINDS_OF_TENSORS = tuple(
    one for name, one in vars(torch).items() if name.endswith("Tensor") and isinstance(one, type) and name != "Tensor"
)
_RETURNED = tuple(one for one in vars(torch.return_types).values() if isinstance(one, type) and issubclass(one, tuple))
#: types of tensors whose operators run no code of a user
TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_TENSOR_IDS, _OF_TENSORS = frozenset(map(id, TENSORS)), frozenset(dir(torch.Tensor))
_PLAIN_IDS = frozenset(map(id, _PLAIN))  # a metaclass may say that a class equals another


def keeps_records_apart(func: Any, name: str) -> bool:
    """Return whether a function of torch, of this name, is known to do so; of an attribute, to get or to set it."""
    if name in ("__get__", "__set__"):
        return attribute_of(func) in (_ATTRIBUTES if name == "__get__" else _SET)
    if name.startswith(_LIBRARIES):
        return name not in _UNLIKE
    return name.removesuffix("_") in _NAMES or name in _SPECIAL


def is_tried(func: OpOverload | OpOverloadPacket) -> bool:
    """Return whether an overload ran and kept records apart when all were tried; of a packet, if none is wrong."""
    if isinstance(func, OpOverload):
        return func.name() not in NOT_CALLED
    return func._qualified_op_name not in _WRONG


def attribute_of(func: Any) -> str:
    """Return the name of the attribute that a function gets or sets, "" for other functions."""
    return getattr(getattr(func, "__self__", None), "__name__", "") if func.__name__ in ("__get__", "__set__") else ""


def not_plain(values: Iterable[Any]) -> Any:
    """Return the first argument that could run a user's code within an operator, None if there is none."""
    for value in values:
        kind = type(value)
        if id(kind) in _TENSOR_IDS:
            if not _OF_TENSORS.isdisjoint(vars(value)):  # a function in place of a method
                return value
            continue
        if id(kind) in _PLAIN_IDS or any(value is one for one in _NUMBERS):
            continue
        if kind is np.ndarray and not value.dtype.hasobject:
            continue
        if any(value is one for one in _KINDS_OF_TENSORS):
            continue
        if kind is tuple or kind is list or kind is torch.Size or any(kind is one for one in _RETURNED):
            found = not_plain(value)
        elif kind is dict:
            found = not_plain((*value, *value.values()))
        elif kind is slice:
            found = not_plain((value.start, value.stop, value.step))
        else:
            found = value
        if found is not None:
            return found
    return None


#: functions whose shapes are not compared: frequent ones whose rules were all tried, those whose inner calls are seen,
#: and those that read numbers, differentiate, or move numbers between devices
_NOT_COMPARED = _names(
    """
    relu gelu silu tanh sigmoid exp softmax log_softmax dropout detach linear flatten reshape size dim numel add sub mul
    div __add__ __radd__ __iadd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__ multi_head_attention_forward
    one_hot grad backward _make_dual _unpack_dual cpu cuda to type new_tensor requires_grad_ lstm gru rnn_tanh rnn_relu
    """
)
_TURNED = frozenset({"T", "H", "mT", "mH"})  # attributes whose shapes the number of dimensions decides


def is_compared(func: Any) -> bool:
    """Return whether the shapes of what a function gives a record are compared with those that it gives one alone."""
    name = getattr(func, "__name__", "")
    return name not in _NOT_COMPARED and (name != "__get__" or attribute_of(func) in _TURNED)


#: shapes of results of operators on single records, or why there are none, by the shapes and options that they get
_ALONE: dict[Hashable, list[torch.Size] | str | None] = {}
_MOST_ALONE = 1 << 14


def shapes_alone(func: Any, args: Any, kwargs: Any) -> list[torch.Size] | str | None:
    """Return the shapes of the tensors that an operator gives one record, or the text of its error; None: any.

    Rules of `vmap` may take the records for another dimension where an operator alone would refuse its arguments, or
    give a result of another shape. It runs without numbers, once for equal shapes and options.
    """
    key = (func, _shapes_in(args), _shapes_in((*kwargs, *kwargs.values()))) if kwargs else (func, _shapes_in(args))
    found = _ALONE.get(key, _ALONE)
    if found is _ALONE:
        if not any(map(is_batched, tree_leaves((args, kwargs)))):
            return None
        if len(_ALONE) >= _MOST_ALONE:
            _ALONE.clear()
        found = _ALONE[key] = _computed_alone(func, args, kwargs)
    return found  # type: ignore[return-value]


def is_batched(value: Any) -> bool:
    while isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        if torch._C._functorch.is_batchedtensor(value):
            return True
        value = torch._C._functorch.get_unwrapped(value)
    return False


def _shapes_in(values: Any) -> Hashable:
    return tuple([(one.shape, one.dtype) if isinstance(one, Tensor) else _option(one) for one in values])


def _option(value: Any) -> Hashable:
    """Return an argument by its value, which may decide a shape; of other objects their kind."""
    kind = type(value)
    if isinstance(value, list | tuple):
        return _shapes_in(value)
    if kind is dict:
        return _shapes_in((*value, *value.values()))
    if kind is slice:
        return kind.__name__, _shapes_in((value.start, value.stop, value.step))
    if kind is np.ndarray:
        return value.shape, value.dtype.str, value.tobytes()
    if kind is float or kind is complex:  # one that is no number does not equal itself
        return id(kind), repr(value)
    if id(kind) not in _PLAIN_IDS:
        return id(kind)
    return id(kind), value.tobytes() if isinstance(value, np.generic) else value


def _computed_alone(func: Any, args: Any, kwargs: Any) -> list[torch.Size] | str | None:
    def alone(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, list | tuple):
            return [*map(alone, value)] if isinstance(value, list) else tuple(map(alone, value))
        return value

    try:
        with temporarily_clear_interpreter_stack(), warnings.catch_warnings(action="ignore"), torch.no_grad():
            found = func(*map(alone, args), **{name: alone(one) for name, one in kwargs.items()})
    except NotImplementedError:  # it runs on numbers alone
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if func is torch.Tensor.__setitem__ else shapes_of(found)


def shapes_of(values: Any) -> list[torch.Size]:
    """Return the shapes of tensors in what an operator returns."""
    if isinstance(values, Tensor):
        return [values.shape]
    return [one.shape for one in tree_leaves(values) if isinstance(one, Tensor)]


#: operators that end the process, or read other memory, for arguments that they do not check
_ATEN = torch.ops.aten
_CTC = frozenset({F.ctc_loss, torch.ctc_loss, torch._ctc_loss, _ATEN.ctc_loss, _ATEN._ctc_loss})
_CTC |= {getattr(one, name) for one in (_ATEN.ctc_loss, _ATEN._ctc_loss) for name in one.overloads()}
_NORMS = frozenset({torch._weight_norm, _ATEN._weight_norm, _ATEN._weight_norm.default})
CHECKED = _CTC | _NORMS


def check_arguments(func: Any, args: Any, kwargs: Any) -> None:
    """Raise ValueError for arguments with which an operator would leave its memory, or that it cannot show."""
    if func in _CTC:
        if any(isinstance(one, Tensor) and is_functorch_wrapped_tensor(one) for one in (*args, *kwargs.values())):
            raise ValueError("ctc_loss needs numbers, which `vmap` does not show")
        _check_ctc(*args, **kwargs)
    if func in _NORMS:
        _check_norm(*args, **kwargs)


class CheckedOperators(TorchFunctionMode):
    """Within it such operators raise ValueError instead; under `vmap`, which cannot read numbers, they may always."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_arguments(func, args, kwargs)
        return func(*args, **kwargs)


def _check_norm(v: Tensor, g: Tensor, dim: int = 0) -> None:
    """Raise ValueError unless there is a norm of each part of v: the kernel would read beyond them."""
    of_each = [size if place == dim % max(v.dim(), 1) else 1 for place, size in enumerate(v.shape)]
    if g.numel() != 1 if dim == -1 else [*g.shape] != of_each:
        raise ValueError(f"_weight_norm takes a norm of each part of dimension {dim}, got shape {tuple(g.shape)}")


def _check_ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | tuple[int, ...],
    target_lengths: Tensor | tuple[int, ...],
    blank: int = 0,
    *_: Any,
    **__: Any,
) -> None:
    """Raise ValueError for labels or lengths by which the kernel would write beyond its memory."""
    steps, classes = log_probs.shape[0], log_probs.shape[-1]
    lengths, given = torch.as_tensor(target_lengths).reshape(-1), torch.as_tensor(input_lengths).reshape(-1)
    most = int(targets.shape[1]) if targets.dim() == 2 else targets.numel()
    fits = 0 <= blank < classes and bool(((targets >= 0) & (targets < classes)).all())
    fits = fits and bool(((given >= 0) & (given <= steps)).all() and ((lengths >= 0) & (lengths <= most)).all())
    if not fits or (targets.dim() == 1 and int(lengths.sum()) > targets.numel()):
        raise ValueError(f"ctc_loss takes labels from 0 to {classes - 1}, and lengths within its tensors")
