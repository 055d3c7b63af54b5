"""What operators do in a pass that no check by random records finds, because few numbers show it.

A vectorised loop over the numbers of a tensor computes those behind the last whole two registers by other code, which
may round otherwise: for one of the 65,536 numbers of two bytes, say. A sum over a dimension outside the records, such
as time before records, adds columns in another order behind the last whole four registers. The size of a pass has to be
such that these numbers are none. And the derivative of some operators, such as `prod`, asks whether any number is zero.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler_legacy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TRACED = 31  # records of a pass in which operators are seen: a prime number, by which few other dimensions divide
_AT_ONCE = 128  # bytes of two registers of AVX-512, the largest
_MOST_NUMBERS = 64  # at once: of two bytes in two registers, or those whose sums in four bytes fill four registers

#: operators that move numbers or round once, by which any code gives the same bits
_EXACT = """
    _to_copy _unsafe_view abs cat clamp clamp_max clamp_min clone constant_pad_nd copy_ embedding empty empty_like
    empty_strided fill_ flip full full_like gather hardtanh index index_put_ index_select leaky_relu
    masked_fill masked_fill_ max max_pool2d_with_indices max_pool2d_with_indices_backward maximum min minimum mse_loss
    mul mul_ neg new_empty new_empty_strided new_full new_ones new_zeros nll_loss_backward nll_loss_forward ones
    ones_like relu relu_ repeat roll round scatter sign sqrt stack threshold_backward where zero_ zeros zeros_like
"""
#: operators that compute each row, or number of a product, by code of their own, which the check of a size compares
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
_READING = ("item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")


def multiple_of(compute: Callable[[], object]) -> int:
    """Return the multiple for passes like that of `TRACED` records which `compute` computes."""
    with _Multiple() as found:
        try:
            compute()
        except Exception:  # a user's code may refuse to be watched; what fails anyway fails in the check of a size
            return _MOST_NUMBERS
    return found.multiple


def reads_numbers(compute: Callable[[], object]) -> str:
    """Return an operator of `compute` that reads numbers of a tensor, by which code may decide; empty if there is none.

    A `TorchDispatchMode` would not see it: derivatives of torch take other formulas within one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the newer profiler prints
        with profiler_legacy.profile() as seen:
            compute()
    names = {event.name.removeprefix("aten::") for event in seen.function_events}
    return next((name for name in _READING if name in names), "")


class _Multiple(TorchDispatchMode):
    multiple = 1

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if not (func.is_view or _same_by_any_code(func, args, kwargs or {})):
            for part in tree_leaves(results):
                if isinstance(part, Tensor) and part.device.type == "cpu" and part.layout is torch.strided:
                    elementwise = any(one.shape == part.shape for one in tree_leaves(args) if isinstance(one, Tensor))
                    elementwise &= func.overloadpacket.__name__ not in _REDUCING
                    self.multiple = max(self.multiple, _multiple_for(part, elementwise))
        return results


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
    if name in _REDUCING:
        return _reduces_inside(args[0], args[_REDUCING[name]] if len(args) > _REDUCING[name] else None)
    return name in _BY_ANY_CODE


def _reduces_inside(whole: Tensor, reduced: int | Sequence[int] | None) -> bool:
    """Return whether the `reduced` dimensions (None: all) are inside those that count records, in the order of memory.

    A sum over records is no record's: what the rules read of a record does not depend on it.
    """
    dimensions = list(zip(whole.shape, whole.stride(), strict=True))
    records = [step for length, step in dimensions if length % TRACED == 0]
    numbers = [reduced] if isinstance(reduced, int) else reduced or range(whole.dim())
    others = [dimensions[number] for number in numbers if whole.dim()]
    outermost = max((step for length, step in others if length % TRACED and length > 1), default=-1)
    return not records or outermost < min(records)


def _multiple_for(part: Tensor, elementwise: bool) -> int:
    """Return the multiple for the size of the dimension that counts records; 1 if there is none.

    The numbers inside that dimension, in the order of memory, are a record's. Of several such dimensions, or where a
    loop ends earlier because memory has gaps, the smallest number of them counts.
    """
    if not (part.is_floating_point() or part.is_complex()):
        return 1
    at_once, multiple = max(1, _AT_ONCE // part.element_size()) if elementwise else _MOST_NUMBERS, 1
    dimensions = list(zip(part.shape, part.stride(), strict=True))
    for length, stride in dimensions:
        if length and length % TRACED == 0:
            inside = math.prod(other for other, step in dimensions if step < stride)
            multiple = max(multiple, at_once // math.gcd(at_once, inside))
    return multiple
