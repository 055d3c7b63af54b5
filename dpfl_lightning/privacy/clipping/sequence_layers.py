"""Forward passes of LSTM, GRU, attention and norms that show what their rules need.

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
    OF_POSITIONS,
    ByName,
    Inputs,
    Rule,
    Unsupported,
    group_norm_rule,
    is_short,
    kind_of,
    layer_norm_rule,
    linear_gradients,
    linear_rule,
    rms_norm_rule,
)
from dpfl_lightning.privacy.clipping.reference import Params

Tap = Callable[[str, Rule, Inputs, Tensor], Tensor]
TappedForward = Callable[..., Any]  # (layer, tap, *the layer's arguments) -> the layer's outputs
State = tuple[Tensor, ...]  # hidden `[B, H]`, and cell `[B, H]` of an LSTM


def tapped_forward(layer: nn.Module) -> TappedForward | None:
    """Return the tapped forward pass of a layer, or None if there is none for its type and options, or a user's."""
    if "forward" in vars(layer):
        return None
    supported = True
    if isinstance(layer, nn.RNNBase):
        supported = layer.batch_first and not layer.proj_size
    elif isinstance(layer, nn.MultiheadAttention):
        plain = layer._qkv_same_embed_dim and layer.bias_k is None and not layer.add_zero_attn
        supported = layer.batch_first and plain
    elif isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        supported = not layer.track_running_stats
    kind = kind_of(layer, TAPPED) if supported else None
    return None if kind is None else TAPPED[kind]


# ---- recurrent layers


def recurrent_forward(
    layer: nn.RNNBase, tap: Tap, x: Tensor, hx: Any = None, *, recurrence: Callable[..., tuple[Tensor, State]]
) -> tuple[Tensor, Any]:
    """Do what `nn.LSTM` or `nn.GRU` does with x `[B, T, I]`; dropout between layers is drawn for each record."""
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise Unsupported(f"{type(layer).__name__} gets something else than a tensor [B, T, I]")
    given = hx if isinstance(hx, tuple) or hx is None else (hx,)
    directions = ("", "_reverse") if layer.bidirectional else ("",)
    last: list[State] = []
    for depth in range(layer.num_layers):
        x = F.dropout(x, layer.dropout, layer.training) if depth else x
        outputs = []
        for suffix in directions:
            zeros = (x.new_zeros(len(x), layer.hidden_size),) * (2 if isinstance(layer, nn.LSTM) else 1)
            state = zeros if given is None else tuple(every[len(last)] for every in given)
            ordered = x.flip(1) if suffix else x
            output, final = recurrence(layer, tap, f"_l{depth}{suffix}", ordered, *state)
            outputs.append(output.flip(1) if suffix else output)
            last.append(final)
        x = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
    states = tuple(torch.stack(part) for part in zip(*last, strict=True))
    return x, states if len(states) > 1 else states[0]


def lstm_recurrence(
    layer: nn.Module, tap: Tap, suffix: str, x: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, State]:
    """Run one direction of one layer over x `[B, T, I]`; return outputs `[B, T, H]` and the last state."""
    w_ih, w_hh, b_ih, b_hh = _weights(layer, suffix)
    gates = _time_major_linear(x, w_ih, None if b_ih is None else b_ih + b_hh)
    hiddens, cells, tanhs = _lstm_steps(gates.detach(), w_hh, hidden, cell)
    rule = functools.partial(_recurrent_rule, suffix=suffix)
    gates = tap(suffix.lstrip("_"), rule, (x, hiddens[:-1].transpose(0, 1)), gates.transpose(0, 1))
    output, hidden, cell = _LSTMBackward.apply(gates, hidden, cell, w_hh, hiddens, cells, tanhs)
    return output, (hidden, cell)


def _weights(layer: nn.Module, suffix: str) -> tuple[Any, ...]:
    """Return both weights, and both biases or None, of one direction of one layer."""
    return tuple(getattr(layer, name + suffix, None) for name in _RECURRENT)


def _time_major_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x weight^T + bias` for x `[B, T, d]`, contiguous in `[T, B, p]`."""
    return F.linear(x.transpose(0, 1).contiguous(), weight, bias)


def _recurrent_rule(layer: nn.Module, params: Params, inputs: Inputs, dgates: Tensor, suffix: str) -> ByName:
    """`dW_ih = sum_t dgates_t x_t^T`, `dW_hh = sum_t dgates_t h_(t-1)^T`; both biases have the same gradient.

    The hidden part of a GRU's last gate was multiplied by its reset gate, the third of the inputs.
    """
    x, previous, *reset = inputs
    w_ih, w_hh, b_ih, b_hh = [name + suffix for name in _RECURRENT]
    from_hidden = dgates
    if reset:
        *others, dnew = dgates.chunk(3, dim=-1)
        from_hidden = torch.cat((*others, dnew * reset[0]), dim=-1)
    of_x, of_hidden = (x, dgates, w_ih, b_ih), (previous, from_hidden, w_hh, b_hh)
    return linear_gradients(params, *of_x) | linear_gradients(params, *of_hidden)


def _lstm_steps(gates: Tensor, w_hh: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all hidden states and cells `[T + 1, B, H]`, and the tangents of the cells after each step `[T, B, H]`.

    `gates` `[T, B, 4 H]` holds the inputs' part of the gates i, f, g, o, and afterwards the activated gates.
    """
    steps, size = len(gates), hidden.shape[1]
    hiddens, cells = (first.new_empty(steps + 1, *first.shape) for first in (hidden, cell))
    hiddens[0], cells[0] = hidden.detach(), cell.detach()
    tanhs = torch.empty_like(cells[1:])
    h, c, recurrent = hiddens.unbind(), cells.unbind(), w_hh.detach().mT
    i, f, g, o = (gate.unbind() for gate in gates.chunk(4, dim=2))
    i_and_f = gates[:, :, : 2 * size].unbind()
    for t, (step, tanh) in enumerate(zip(gates.unbind(), tanhs.unbind(), strict=True)):
        step.addmm_(h[t], recurrent)
        i_and_f[t].sigmoid_()
        g[t].tanh_()
        o[t].sigmoid_()
        torch.mul(f[t], c[t], out=c[t + 1]).addcmul_(i[t], g[t])
        torch.mul(o[t], torch.tanh(c[t + 1], out=tanh), out=h[t + 1])
    return hiddens, cells, tanhs


class _LSTMBackward(torch.autograd.Function):
    """Outputs that `_lstm_steps` has computed, and their backward pass through time."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, hidden: Tensor, cell: Tensor, w_hh: Tensor, hiddens: Tensor, *cells_and_tanhs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(gates, w_hh, *cells_and_tanhs)
        return hiddens[1:].transpose(0, 1).clone(), hiddens[-1].clone(), cells_and_tanhs[0][-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, doutput: Tensor, dhidden: Tensor, dcell: Tensor) -> tuple[Tensor | None, ...]:
        gates, w_hh, cells, tanhs = ctx.saved_tensors
        i, f, g, o = gates.transpose(0, 1).chunk(4, dim=2)
        dgates = tanhs.new_empty(*tanhs.shape[:2], 4, tanhs.shape[2])
        # at first the derivatives of the cell by its three gates, and of the output by the last one
        to_i, to_f, to_g, to_o = dgates.unbind(2)
        torch.addcmul(i, i, i, value=-1, out=to_i).mul_(g)
        torch.addcmul(f, f, f, value=-1, out=to_f).mul_(cells[:-1])
        torch.addcmul(i, i * g, g, value=-1, out=to_g)
        torch.addcmul(o, o, o, value=-1, out=to_o).mul_(tanhs)
        to_cell = torch.addcmul(o, o * tanhs, tanhs, value=-1).unbind()
        of_cell, of_output, flat = dgates[:, :, :3].unbind(), to_o.unbind(), dgates.flatten(2).unbind()
        dh, dc, f, doutputs = dhidden, dcell.clone(), f.unbind(), doutput.unbind(1)
        for t in reversed(range(len(dgates))):
            dh = dh + doutputs[t]
            dc.addcmul_(dh, to_cell[t])
            of_cell[t].mul_(dc[:, None])
            of_output[t].mul_(dh)
            dc.mul_(f[t])
            dh = flat[t] @ w_hh
        return dgates.flatten(2).transpose(0, 1), dh, dc, None, None, None, None


def gru_recurrence(layer: nn.Module, tap: Tap, suffix: str, x: Tensor, hidden: Tensor) -> tuple[Tensor, State]:
    """Run one direction of one layer over x `[B, T, I]`; return outputs `[B, T, H]` and the last state."""
    w_ih, w_hh, b_ih, b_hh = _weights(layer, suffix)
    gates = _time_major_linear(x, w_ih, b_ih)
    hiddens, candidates = _gru_steps(gates.detach(), w_hh, b_hh, hidden)
    reset = gates.detach()[:, :, : hidden.shape[1]].transpose(0, 1)
    rule = functools.partial(_recurrent_rule, suffix=suffix)
    inputs = (x, hiddens[:-1].transpose(0, 1), reset)
    gates = tap(suffix.lstrip("_"), rule, inputs, gates.transpose(0, 1))
    output, hidden = _GRUBackward.apply(gates, hidden, w_hh, hiddens, candidates)
    return output, (hidden,)


def _gru_steps(gates: Tensor, w_hh: Tensor, b_hh: Tensor | None, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return all hidden states `[T + 1, B, H]`, and the hidden part of the last gate `[T, B, H]` before its reset.

    `gates` `[T, B, 3 H]` holds the inputs' part of the gates r, z, n, and afterwards the activated gates.
    """
    size, weight = hidden.shape[1], w_hh.detach().mT
    bias = w_hh.new_zeros(3 * size) if b_hh is None else b_hh.detach()
    hiddens, recurrent = hidden.new_empty(len(gates) + 1, *hidden.shape), torch.empty_like(gates)
    hiddens[0] = hidden.detach()
    h, r, z, n = hiddens.unbind(), *(gate.unbind() for gate in gates.chunk(3, dim=2))
    r_and_z, from_h = (part[:, :, : 2 * size].unbind() for part in (gates, recurrent))
    candidates = recurrent[:, :, 2 * size :]
    for t, (step, candidate) in enumerate(zip(recurrent.unbind(), candidates.unbind(), strict=True)):
        torch.addmm(bias, h[t], weight, out=step)
        r_and_z[t].add_(from_h[t]).sigmoid_()
        n[t].addcmul_(r[t], candidate).tanh_()
        torch.lerp(n[t], h[t], z[t], out=h[t + 1])
    return hiddens, candidates


class _GRUBackward(torch.autograd.Function):
    """Outputs that `_gru_steps` has computed, and their backward pass through time."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, hidden: Tensor, w_hh: Tensor, hiddens: Tensor, candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(gates, w_hh, hiddens, candidates)
        return hiddens[1:].transpose(0, 1).clone(), hiddens[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, doutput: Tensor, dhidden: Tensor) -> tuple[Tensor | None, ...]:
        gates, w_hh, hiddens, candidates = ctx.saved_tensors
        r, z, n = gates.transpose(0, 1).chunk(3, dim=2)
        dhiddens = torch.empty_like(hiddens[1:])
        drecurrent = dhiddens.new_empty(*dhiddens.shape[:2], 3, dhiddens.shape[2])
        # at first the derivatives of the hidden state by the hidden part of the gates
        to_r, to_z, to_n = drecurrent.unbind(2)
        to_new = torch.addcmul(1 - z, (1 - z).mul_(n), n, value=-1)
        torch.mul(to_new, r, out=to_n)
        torch.addcmul(to_n, to_n, r, value=-1, out=to_r).mul_(candidates)
        torch.addcmul(z, z, z, value=-1, out=to_z).mul_(hiddens[:-1] - n)
        flat, z, doutputs = drecurrent.flatten(2).unbind(), z.unbind(), doutput.unbind(1)
        steps = list(zip(dhiddens.unbind(), drecurrent.unbind(), strict=True))
        dh = dhidden
        for t in reversed(range(len(steps))):
            total, parts = steps[t]
            torch.add(dh, doutputs[t], out=total)
            parts.mul_(total[:, None])
            dh = torch.addmm(total * z[t], flat[t], w_hh)
        torch.mul(to_new, dhiddens, out=to_n)  # the inputs' part of the last gate is not reset
        return drecurrent.flatten(2).transpose(0, 1), dh, None, None, None


# ---- normalisation and attention


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


OF_POSITIONS.add(_recurrent_rule)
_RECURRENT = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

TAPPED: dict[type[nn.Module], TappedForward] = {
    nn.LSTM: functools.partial(recurrent_forward, recurrence=lstm_recurrence),
    nn.GRU: functools.partial(recurrent_forward, recurrence=gru_recurrence),
    nn.MultiheadAttention: attention_forward,
    nn.LayerNorm: layer_norm_forward,
    nn.RMSNorm: rms_norm_forward,
    nn.InstanceNorm1d: instance_norm_forward,
    nn.InstanceNorm2d: instance_norm_forward,
    nn.InstanceNorm3d: instance_norm_forward,
}
