"""What the size of a pass has to be a multiple of, so that its vectorised loops end where they end for every record.

A vectorised loop over the numbers of a tensor computes those behind the last whole two registers by other code, which
may round otherwise. No check by random records finds this: of the 65,536 numbers of two bytes one may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TRACED = 31  # records of a pass in which operators are seen: a prime number, by which few other dimensions divide
_AT_ONCE = 128  # bytes of two registers of AVX-512, the largest
_ANY_DTYPE = _AT_ONCE // 2  # numbers of two bytes at once: no dtype of gradients has shorter ones

#: operators that move numbers or round once, by which any code gives the same bits
_EXACT = """
    _to_copy _unsafe_view abs cat clamp clamp_max clamp_min clone constant_pad_nd copy_ embedding empty empty_like
    empty_strided fill_ flip full full_like gather hardtanh hardtanh_backward index index_put_ index_select leaky_relu
    masked_fill masked_fill_ max max_pool2d_with_indices max_pool2d_with_indices_backward maximum min minimum mse_loss
    mul mul_ neg new_empty new_empty_strided new_full new_ones new_zeros nll_loss_backward nll_loss_forward ones
    ones_like relu relu_ repeat roll round scatter sign sqrt stack threshold_backward where zero_ zeros zeros_like
"""
#: operators that compute each row, or number of a product, by code of their own, which the check of sizes compares
_BY_ROW = """
    _fused_rms_norm _fused_rms_norm_backward _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward addmm baddbmm bmm
    convolution convolution_backward linalg_vector_norm mean mm native_group_norm native_group_norm_backward
    native_layer_norm native_layer_norm_backward sum
"""
_BY_ANY_CODE = frozenset((_EXACT + _BY_ROW).split())


def multiple_of(compute: Callable[[], object]) -> int:
    """Return the multiple for passes like that of `TRACED` records which `compute` computes."""
    with _Multiple() as found:
        try:
            compute()
        except Exception:  # a user's code may refuse to be watched; what fails anyway fails in the check of sizes
            return _ANY_DTYPE
    return found.multiple


class _Multiple(TorchDispatchMode):
    multiple = 1

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if not (func.is_view or _same_by_any_code(func, args, kwargs or {})):
            for part in tree_leaves(results):
                if isinstance(part, Tensor) and part.device.type == "cpu" and part.layout is torch.strided:
                    self.multiple = max(self.multiple, _multiple_for(part))
        return results


def _same_by_any_code(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = func.overloadpacket.__name__
    if any(isinstance(one, Tensor) and one.is_complex() for one in args):
        return False
    if name in ("add", "add_", "sub", "sub_", "rsub"):
        return kwargs.get("alpha", 1) == 1
    if name in ("div", "div_"):
        return kwargs.get("rounding_mode") is None
    return name in _BY_ANY_CODE or (name == "pow" and tuple(args[1:]) == (2,))


def _multiple_for(part: Tensor) -> int:
    """Return the multiple for the size of the dimension that counts records; 1 if there is none.

    The numbers inside that dimension, in the order of memory, are a record's. Of several such dimensions, or where a
    loop ends earlier because memory has gaps, the smallest number of them counts.
    """
    if not (part.is_floating_point() or part.is_complex()):
        return 1
    at_once, multiple = max(1, _AT_ONCE // part.element_size()), 1
    dimensions = list(zip(part.shape, part.stride(), strict=True))
    for length, stride in dimensions:
        if length and length % TRACED == 0:
            inside = math.prod(other for other, step in dimensions if step < stride)
            multiple = max(multiple, at_once // math.gcd(at_once, inside))
    return multiple
