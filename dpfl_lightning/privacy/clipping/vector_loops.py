"""What operators do in a pass that no check by random records finds, because few numbers show it.

A vectorised loop over the numbers of a tensor computes those behind the last whole two registers by other code, which
may round otherwise: for one of the 65,536 numbers of two bytes, say. A sum over a dimension outside the records, such
as time before records, adds columns in another order behind the last whole four registers. The size of a pass has to be
such that these numbers are none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpfl_lightning.runtime.dispatch import DispatchMode

_FEW = 7  # records of the first pass in which operators are seen
_MANY = (11, 17, 29, 37, 41, 53, 59, 67, 73, 83, 89, 97)  # of the second one; parts of such a pass are unequal
_AT_ONCE = 128  # bytes of two registers of AVX-512, the largest
_MOST_NUMBERS = 64  # at once: of two bytes in two registers, or those whose sums in four bytes fill four registers

#: operators that move numbers or round once, by which any code gives the same bits
_EXACT = """
    _to_copy _unsafe_view abs bernoulli bernoulli_ cat clone constant_pad_nd copy_ embedding empty empty_like
    empty_strided fill_ flip full full_like gather hardtanh index index_put_ index_select leaky_relu
    masked_fill masked_fill_ max max_pool2d_with_indices max_pool2d_with_indices_backward min mse_loss
    mul mul_ neg new_empty new_empty_strided new_full new_ones new_zeros nll_loss_backward nll_loss_forward ones
    ones_like relu relu_ repeat roll round scatter select_backward sign slice_backward sqrt stack threshold_backward
    where zero_ zeros zeros_like
"""
#: operators that compute each row, or number of a product, by code of their own, which is one in passes of one size
_BY_ROW = """
    _fused_rms_norm _fused_rms_norm_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward addmm baddbmm bmm convolution convolution_backward mm
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
"""
_BY_ANY_CODE = frozenset((_EXACT + _BY_ROW).split())
#: those that do so if they reduce dimensions inside the records, by the position of the argument that names these
_REDUCING = {
    "_log_softmax": 1,
    "_log_softmax_backward_data": 2,
    "_softmax": 1,
    "_softmax_backward_data": 2,
    "linalg_vector_norm": 2,
    "mean": 1,
    "sum": 1,
}


def multiple_of(compute: Callable[[int], object], largest: int) -> int | None:
    """Return what the size of a pass has to be a multiple of; `compute` computes a pass of so many records.

    No pass has more than the `largest` size, at most 96. None if no size will do, because the model computes parts of a
    pass, each of which has last numbers, or refuses to be watched. Of small passes one is watched that is as large.
    """
    with suppress(Exception):  # it is raised below
        compute(min(2, largest))  # compiled loops are checked on first use, by operators that are none of a pass
    if largest <= _FEW + 1:
        return _multiple(compute, largest - 1, largest)
    return _multiple(compute, _FEW, next(many for many in _MANY if many > largest))


def computes_whole(compute: Callable[[int], object], size: int) -> bool:
    """Return whether a pass of this size has the operators of a pass of few records, and no parts."""
    return _multiple(compute, _FEW, size) is not None


def _multiple(compute: Callable[[int], object], few: int, many: int) -> int | None:
    seen, traced = [], (few, many)
    try:
        for records in traced:
            with _Seen() as watch:
                compute(records)
            seen.append(Counter(watch.operators).items())  # different ones in the order in which they are first seen
        return max((_multiple_for(few, more, traced) for few, more in zip(seen[0], seen[1], strict=True)), default=1)
    except Exception:  # a user's code may refuse to be watched; ValueError: it computes parts of a pass
        return None


@dataclass(frozen=True)
class _Layout:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_size: int

    @classmethod
    def of(cls, part: Tensor) -> _Layout:
        return cls(tuple(part.shape), part.stride(), part.element_size())


@dataclass(frozen=True)
class _Operator:
    """An operator whose last numbers may differ: its results, and what it reduces, which is nothing for most."""

    results: tuple[_Layout, ...]
    elementwise: bool
    whole: _Layout | None = None
    reduced: tuple[int, ...] = ()


class _Seen(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[_Operator] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # a mode that watches a user's calls sees none of those within them
            results = func(*args, **(kwargs or {}))
        if not (func.is_view or _same_by_any_code(func, args, kwargs or {})):
            parts = [one for one in tree_leaves(results) if isinstance(one, Tensor) and one.layout is torch.strided]
            numbers = [one for one in parts if one.is_floating_point() or one.is_complex()]
            layouts = tuple(_Layout.of(one) for one in numbers if one.device.type == "cpu")
            if layouts:
                self.operators.append(_operator(func.overloadpacket.__name__, layouts, args))
        return results


def _operator(name: str, results: tuple[_Layout, ...], args: Sequence[Any]) -> _Operator:
    if name not in _REDUCING:
        shapes = {tuple(one.shape) for one in tree_leaves(args) if isinstance(one, Tensor)}
        return _Operator(results, all(one.shape in shapes for one in results))
    whole = results[0] if "softmax" in name else _Layout.of(args[0])  # it computes a contiguous copy
    reduced = args[_REDUCING[name]] if len(args) > _REDUCING[name] else None
    numbers = (reduced,) if isinstance(reduced, int) else tuple(reduced or range(len(whole.shape)))
    return _Operator(results, False, whole, numbers if whole.shape else ())


def _same_by_any_code(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = func.overloadpacket.__name__
    if any(isinstance(one, Tensor) and one.is_complex() for one in args):
        return False
    if name in ("add", "add_", "sub", "sub_"):
        return kwargs.get("alpha", 1) == 1
    if name in ("div", "div_"):
        return kwargs.get("rounding_mode") is None
    if name == "pow":
        return isinstance(args[1], int | float) and args[1] == 2
    if name.startswith("clamp"):  # of zeros of both signs, by a tensor either one may result
        return not any(isinstance(one, Tensor) for one in (*args[1:], *kwargs.values()))
    return name in _BY_ANY_CODE


def _multiple_for(few: tuple[_Operator, int], many: tuple[_Operator, int], traced: tuple[int, int]) -> int:
    """Return the multiple for an operator as it is in two passes, and how often; 1 if no result counts records.

    ValueError if it is computed neither equally often nor once more for each record more.
    """
    (first, times), (second, times_of_many) = few, many
    if (times_of_many - times) % (traced[1] - traced[0]):
        raise ValueError("it is computed for parts of a pass")
    pairs = zip(first.results, second.results, strict=True)
    layouts = [(one, _counting_records(one, other, traced)) for one, other in pairs]
    if first.whole and second.whole:
        records = _counting_records(first.whole, second.whole, traced)
        if _inside(first.whole, first.reduced, records):
            return 1
    multiple = 1
    for layout, records in layouts:
        at_once = max(1, _AT_ONCE // layout.element_size) if first.elementwise else _MOST_NUMBERS
        for number in records:  # the numbers inside, in the order of memory, are a record's
            steps = zip(layout.shape, layout.strides, strict=True)
            inside = math.prod(length for length, step in steps if step < layout.strides[number])
            multiple = max(multiple, at_once // math.gcd(at_once, inside))
    return multiple


def _counting_records(few: _Layout, many: _Layout, traced: tuple[int, int]) -> list[int]:
    """Return the dimensions whose length grows with the number of records; ValueError if one grows otherwise."""
    lengths = list(zip(few.shape, many.shape, strict=True))
    grown = [number for number, (first, second) in enumerate(lengths) if first != second]
    if any(lengths[number][0] * traced[1] != lengths[number][1] * traced[0] for number in grown):
        raise ValueError(f"{few.shape} and {many.shape} do not count whole records")
    return grown


def _inside(whole: _Layout, reduced: Sequence[int], records: Sequence[int]) -> bool:
    """Return whether the reduced dimensions are inside those that count records, in the order of memory.

    A sum over records is no record's: what the rules read of a record does not depend on it.
    """
    others = [number % len(whole.shape) for number in reduced]
    steps = [whole.strides[one] or math.inf for one in others if one not in records and whole.shape[one] > 1]
    return not records or not steps or max(steps) < min(whole.strides[number] for number in records)
