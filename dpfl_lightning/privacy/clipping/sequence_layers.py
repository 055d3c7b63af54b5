"""Forward passes of attention and norms that show what their rules need.

Each linear map is tapped: `tap(part, rule, inputs, output)` watches its output in the graph and returns it. A rule then
gets the gradient of this output, as that of a layer does, and returns gradients by names in the layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dpfl_lightning.privacy.clipping.layer_rules import (
    Inputs,
    Rule,
    Unsupported,
    group_norm_rule,
    is_short,
    kind_of,
    layer_norm_rule,
    linear_rule,
    rms_norm_rule,
)

Tap = Callable[[str, Rule, Inputs, Tensor], Tensor]
TappedForward = Callable[..., Any]  # (layer, tap, *the layer's arguments) -> the layer's outputs


def tapped_forward(layer: nn.Module) -> TappedForward | None:
    """Return the tapped forward pass of a layer, or None if there is none for its type and options, or a user's."""
    if "forward" in vars(layer):
        return None
    supported = True
    if isinstance(layer, nn.MultiheadAttention):
        plain = layer._qkv_same_embed_dim and layer.bias_k is None and not layer.add_zero_attn
        supported = layer.batch_first and plain
    elif isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        supported = not layer.track_running_stats
    kind = kind_of(layer, TAPPED) if supported else None
    return None if kind is None else TAPPED[kind]


def layer_norm_forward(layer: nn.LayerNorm, tap: Tap, x: Tensor) -> Tensor:
    """Do what `nn.LayerNorm` does; its rule needs the means and scales, which take as long as the rest."""
    output, *moments = torch.native_layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)
    return tap("output", layer_norm_rule, (x, *moments), output)


def rms_norm_forward(layer: nn.RMSNorm, tap: Tap, x: Tensor) -> Tensor:
    """Do what `nn.RMSNorm` does, with one operator behind it in the graph instead of one for each step."""
    if is_short(x):
        normalised = F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
        return tap("output", rms_norm_rule, (normalised,), layer.weight * normalised)
    eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
    output, normalised = _RMSNorm.apply(x, layer.weight.detach(), eps)
    return tap("output", rms_norm_rule, (normalised,), output)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        dims = tuple(range(-weight.dim(), 0))
        lengths = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
        scale = (lengths.square() / weight.numel() + eps).rsqrt()
        normalised = x * scale
        ctx.save_for_backward(normalised, weight, scale)
        ctx.mark_non_differentiable(normalised)
        return normalised * weight, normalised

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        normalised, weight, scale = ctx.saved_tensors
        dy = dy * weight
        along = (dy * normalised).mean(tuple(range(-weight.dim(), 0)), keepdim=True)
        return torch.addcmul(dy, normalised, along, value=-1).mul_(scale), None, None


def instance_norm_forward(layer: nn.InstanceNorm2d, tap: Tap, x: Tensor) -> Tensor:
    """Do what an `InstanceNorm` does, as a GroupNorm: bits of a record then do not depend on the size of a pass."""
    output = F.group_norm(x, x.shape[1], layer.weight, layer.bias, layer.eps)
    return tap("output", group_norm_rule, (x,), output)


def attention_forward(
    layer: nn.MultiheadAttention,
    tap: Tap,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Do what `nn.MultiheadAttention` does in self-attention over x `[B, T, E]`; masks may be boolean or added."""
    if query is not key or key is not value or query.dim() != 3:
        raise Unsupported("MultiheadAttention attends to something else than its query [B, T, E]")
    if (attn_mask is not None and attn_mask.dim() != 2) or (is_causal and attn_mask is None):
        raise Unsupported("MultiheadAttention has no attn_mask [T, T]")
    projected = F.linear(query, layer.in_proj_weight, layer.in_proj_bias)
    in_rule = functools.partial(linear_rule, weight="in_proj_weight", bias="in_proj_bias")
    projected = tap("in_proj", in_rule, (query,), projected)
    q, k, v = projected.unflatten(2, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, heads, T, E / heads]
    padding = None if key_padding_mask is None else _added(key_padding_mask, q.dtype)[:, None, None]
    masks = [mask for mask in (padding, None if attn_mask is None else _added(attn_mask, q.dtype)) if mask is not None]
    mask = functools.reduce(torch.add, masks) if masks else None
    dropout, weights = layer.dropout if layer.training else 0.0, None
    if need_weights:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        attended = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    attended = attended.transpose(1, 2).flatten(2)
    out_rule = functools.partial(linear_rule, weight="out_proj.weight", bias="out_proj.bias")
    output = F.linear(attended, layer.out_proj.weight, layer.out_proj.bias)
    return tap("out_proj", out_rule, (attended,), output), weights


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores: a boolean one is true where nothing may be read."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


TAPPED: dict[type[nn.Module], TappedForward] = {
    nn.MultiheadAttention: attention_forward,
    nn.LayerNorm: layer_norm_forward,
    nn.RMSNorm: rms_norm_forward,
    nn.InstanceNorm1d: instance_norm_forward,
    nn.InstanceNorm2d: instance_norm_forward,
    nn.InstanceNorm3d: instance_norm_forward,
}
