"""Scaled dot-product attention for records under `vmap`, for which torch calls its kernel of the CPU once a record.

Shapes are queries `[N, H, L, E]`, keys and values `[N, H, S, E]`; N are the sequences of one record, and of all records
in the functions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.privacy.clipping.folded import OfRecords
from dpfl_lightning.privacy.clipping.watched import is_batched

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return `F.scaled_dot_product_attention` of these, or None where torch's kernel of the CPU is not for it."""
    if not _of_kernel(query, key, value) or dropout_p or enable_gqa:
        return None
    if attn_mask is not None:
        if attn_mask.dim() not in (2, 4) or attn_mask.requires_grad or is_causal:
            return None
        if attn_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill(attn_mask.logical_not(), -math.inf)
        if attn_mask.dtype != query.dtype:
            return None
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        if attn_mask.shape[0] not in (1, query.shape[0]) or attn_mask.shape[1] not in (1, query.shape[1]):
            return None  # of more sequences than one record has
        shared = len(attn_mask) == 1 and not is_batched(attn_mask)
        sequences = 1 if shared else len(query)
        attn_mask = attn_mask.expand(sequences, -1, query.shape[2], key.shape[2])
    output, _ = _Attention.apply(query, key, value, attn_mask, is_causal, scale)
    return output


def _of_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether torch's kernel of the CPU has these shapes and dtypes."""
    values = query, key, value
    if any(one.dim() != 4 or one.device.type != "cpu" or not one.numel() for one in values):
        return False
    if torch.is_autocast_enabled("cpu") or not query.is_floating_point() or len({one.dtype for one in values}) > 1:
        return False
    return key.shape == value.shape and query.shape[:2] == key.shape[:2] and query.shape[3] == key.shape[3]


def _in_rows(values: Tensor) -> Tensor:
    """Return values as the kernel reads them, those of a position side by side."""
    return values if values.stride(3) == 1 else values.contiguous()


class _Attention(OfRecords):
    """(queries, keys, values; a mask `[N or 1, H or 1, L, S]` that is added, or None; `is_causal`; `scale`).

    Returns outputs as queries, and what the backward pass needs, logarithms of sums `[N, H, L]`.
    """

    without_steps, as_given, shared = frozenset(range(4)), frozenset({4, 5}), frozenset({3})
    results_without_steps = frozenset({0, 1})

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        *values, mask, is_causal, scale = given
        output, sums = _kernel(*map(_in_rows, values), 0.0, is_causal, attn_mask=mask, scale=scale)
        return output, sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *values, ctx.is_causal, ctx.scale = inputs
        ctx.save_for_backward(*values, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, doutput: Tensor, *_: Any) -> tuple[Any, ...]:
        query, key, value, mask, *output = ctx.saved_tensors
        with torch._C.DisableTorchFunction():  # this code is known: no mode needs to see it
            found = _AttentionBack.apply(doutput, query, key, value, mask, *output, ctx.is_causal, ctx.scale)
        return *found, None, None, None


class _AttentionBack(OfRecords):
    without_steps, as_given, shared = frozenset(range(7)), frozenset({7, 8}), frozenset({4})
    results_without_steps = frozenset({0, 1, 2})

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:
        doutput, query, key, value, mask, output, sums, is_causal, scale = given
        values = map(_in_rows, (doutput, query, key, value, output))
        return tuple(_kernel_back(*values, sums, 0.0, is_causal, attn_mask=mask, scale=scale))


FUNCTIONS = (_Attention, _AttentionBack)
