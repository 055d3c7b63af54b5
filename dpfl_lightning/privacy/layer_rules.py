"""Each record's gradient with respect to one layer, from the layer's input and the gradient of its output.

A rule (`RULES`) is one formula a layer type. It answers with gradients in the form that is cheapest to keep:
in full, or as the factors of a product, whose norm and weighted sum need no full gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F

from dpfl_lightning.privacy import sparse_conv

NARROW = 8  # input channels: below, a CPU's blocked convolutions idle and a matmul over patches wins
LANES = 16  # float32 numbers in a vector register: the shortest inner dimension at which a matmul runs well
#: by torch's float32 matmul precision: rounding of a sum of products, relative to the sum of their absolute values, at
#: most; six times what was measured with 24 bits (3e-7), five times the rounding of four factors to 11 and to 8 bits
_ROUNDING = {"highest": 2e-6, "high": 1e-2, "medium": 1e-1}


class Unsupported(Exception):
    """The fast pass cannot serve this model; the message says why."""


# --- gradients in the form that is cheapest to keep


class Grads(Protocol):
    """Gradients `g_j`, j = 1..B, with respect to one parameter of n numbers."""

    def norms(self, order: int = 2) -> Tensor:
        """Norms `|g_j|`, `[B]`: L2, or L1 for `order` 1."""

    def weighted(self, factors: Tensor) -> Tensor:
        """`sum_j factors[r, j] g_j`: `[R, B] -> [R, n]`."""

    def only(self, keep: Tensor) -> Grads:
        """The same with `g_j = 0` where `keep` `[B]` is False, whatever it was (NaN, too)."""


def _rounding(like: Tensor) -> float:
    """How far off, relative to the sum of absolute values, a sum of products of such numbers may be."""
    if like.dtype == torch.float32:
        return _ROUNDING[torch.get_float32_matmul_precision()]
    return 16 * torch.finfo(like.dtype).eps


def _only(values: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.view(-1, *[1] * (values.dim() - 1)), values, torch.zeros_like(values))


def _root(squared: Tensor, uncancelled: Tensor) -> Tensor:
    """Of a sum of products that may cancel, and be below 0 by rounding: not below the exact one. NaN stays NaN.

    Args:
        squared: `[B]`.
        uncancelled: `[B]`, a bound of the sum of their absolute values.
    """
    return (squared + _rounding(squared) * uncancelled).clamp(min=0).sqrt()


@dataclass(frozen=True)
class Dense:
    """Gradients in full, `[B, ...]`; `order` permutes a sum `[R, ...]` into the parameter's dimensions."""

    grads: Tensor
    order: tuple[int, ...] = ()

    def norms(self, order: int = 2) -> Tensor:
        return torch.linalg.vector_norm(self.grads.flatten(1), ord=order, dim=1)

    def weighted(self, factors: Tensor) -> Tensor:
        total = factors @ self.grads.flatten(1)
        return total.view(-1, *self.grads.shape[1:]).permute(self.order).flatten(1) if self.order else total

    def only(self, keep: Tensor) -> Grads:
        return Dense(_only(self.grads, keep), self.order)


@dataclass(frozen=True)
class Outer:
    """`g_j = sum_t l_jt r_jt^T`, never formed; `left` `[B, T, p]`, `right` `[B, T, d]`.

    `|g_j|^2 = sum_tt' (l_jt . l_jt') (r_jt . r_jt')`, the ghost norm; with T = 1 it is `|l_j|^2 |r_j|^2`. The L1 norm
    has no such form: for T > 1 it takes `g_j` itself.
    `order` permutes a sum viewed as `[R, *shape]`, as in `Dense`.

    **Guarantees** Norms are never too small: where positions cancel, rounding leaves more than they do, and a norm of
    zero would let it through unclipped. So what rounding may have taken is added: 1e-6 of a norm where all T positions
    agree, T times that where they are unrelated, and more where they cancel.
    """

    left: Tensor
    right: Tensor
    shape: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    def norms(self, order: int = 2) -> Tensor:
        if self.left.shape[1] == 1:
            return Dense(self.left).norms(order) * Dense(self.right).norms(order)
        lengths = [torch.linalg.vector_norm(one, ord=order, dim=2) for one in (self.left, self.right)]
        uncancelled = (lengths[0] * lengths[1]).sum(dim=1)
        if order == 1:
            return Dense(torch.bmm(self.left.mT, self.right)).norms(1) + _rounding(self.left) * uncancelled
        squared = ((self.left @ self.left.mT) * (self.right @ self.right.mT)).sum(dim=(1, 2))
        return _root(squared, uncancelled.square())

    def weighted(self, factors: Tensor) -> Tensor:
        left = factors[:, :, None, None] * self.left  # [R, B, T, p]
        total = left.flatten(1, 2).mT @ self.right.flatten(0, 1)  # [R, p, d]
        return total.view(-1, *self.shape).permute(self.order).flatten(1) if self.order else total.flatten(1)

    def only(self, keep: Tensor) -> Grads:
        return Outer(_only(self.left, keep), _only(self.right, keep), self.shape, self.order)


@dataclass(frozen=True)
class Lookup:
    """Gradients of a table: `g_j[r] = sum of dy_jt over t with ids_jt = r`; ids `[B, T]`, dy `[B, T, d]`.

    **Guarantees** Norms are never too small, as those of `Outer`.
    """

    ids: Tensor
    dy: Tensor
    rows: int

    def norms(self, order: int = 2) -> Tensor:
        same = self.ids[:, :, None] == self.ids[:, None, :]
        if order == 1:  # each row of the table once for every place that reads it
            rows = same.to(self.dy.dtype) @ self.dy
            found = (rows.abs().sum(dim=2) / same.sum(dim=2)).sum(dim=1)
            return found + _rounding(self.dy) * self.dy.abs().sum(dim=(1, 2))
        lengths = torch.linalg.vector_norm(self.dy, dim=2)
        uncancelled = (lengths[:, :, None] * lengths[:, None, :] * same).sum(dim=(1, 2))
        return _root(((self.dy @ self.dy.mT) * same).sum(dim=(1, 2)), uncancelled)

    def weighted(self, factors: Tensor) -> Tensor:
        dy = (factors[:, :, None, None] * self.dy).flatten(1, 2)
        total = dy.new_zeros(len(factors), self.rows, dy.shape[-1])
        return total.index_add_(1, self.ids.flatten(), dy).flatten(1)

    def only(self, keep: Tensor) -> Grads:
        return Lookup(self.ids, _only(self.dy, keep), self.rows)


# --- rules

Params = Mapping[str, Tensor]
Inputs = tuple[Tensor, ...]
ByName = dict[str, Grads]
# (layer, its parameters by local name, its inputs, gradient of its output) -> gradients by local name
Rule = Callable[[nn.Module, Params, Inputs, Tensor], ByName]


def _never_form(steps: int, p: int, d: int) -> bool:
    """Whether `Outer` beats `Dense`: `steps^2 (p + d)` products for Gram matrices, or `p d` numbers moved."""
    return steps**2 * (p + d) < 32 * p * d


def linear_rule(layer: nn.Module, params: Params, inputs: Inputs, dy: Tensor) -> ByName:
    """`dW_j = sum_t dy_jt x_jt^T`, `db_j = sum_t dy_jt`, for x `[B, ..., d]` and dy `[B, ..., p]`."""
    x, dy = (a.reshape(len(a), math.prod(a.shape[1:-1]), a.shape[-1]) for a in (inputs[0], dy))
    never = _never_form(dy.shape[1], dy.shape[2], x.shape[2])
    return {"weight": Outer(dy, x) if never else Dense(torch.bmm(dy.mT, x)), "bias": Dense(dy.sum(1))}


def conv2d_rule(layer: nn.Module, params: Params, inputs: Inputs, dy: Tensor) -> ByName:
    """`dW_j[o,c,u,v] = sum_hw dy_j[o,h,w] x_j[c, s h + d u, s w + d v]` (x padded), `db_j = sum_hw dy_j`.

    In one of three ways: never formed, where the map is small beside the kernel; as one convolution whose
    groups are the records; or as a matmul over patches, for few input channels and on accelerators.
    """
    assert isinstance(layer, nn.Conv2d)
    (x,) = inputs
    out, positions, depth = layer.out_channels, dy.shape[2] * dy.shape[3], layer.weight[0].numel()
    window = (*layer.kernel_size, layer.in_channels)
    if layer.groups == 1 and _never_form(positions, out, depth):
        weight: Grads = Outer(dy.flatten(2).mT, _patches(layer, x, dy).mT, (out, *window), (0, 1, 4, 2, 3))
    elif layer.groups > 1 or (x.device.type == "cpu" and layer.in_channels >= NARROW):
        weight = Dense(_grouped_weight_grads(layer, x, dy))
    elif out >= LANES:
        product = torch.bmm(_patches(layer, x, dy), dy.flatten(2).mT)
        weight = Dense(product.view(-1, *window, out), (0, 4, 3, 1, 2))
    else:
        product = torch.bmm(dy.flatten(2), _patches(layer, x, dy).mT)
        weight = Dense(product.view(-1, out, *window), (0, 1, 4, 2, 3))
    return {"weight": weight, "bias": Dense(dy.sum(dim=(2, 3)))}


def has_own_backward(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether `conv2d_backward` can serve the layer."""
    return type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def conv2d_backward(
    layer: nn.Conv2d, weight: Tensor, x: Tensor, dy: Tensor, need_dx: bool
) -> tuple[ByName, Tensor | None]:
    """`conv2d_rule` and the gradient of the input together: few numbers in `dy` (max-pooling) make both cheap."""
    if sparse_conv.suits(layer, x, dy):
        dw, db, dx = sparse_conv.sparse_backward(layer, weight, x, dy, need_dx)
        return {"weight": Dense(dw, (0, 1, 4, 2, 3)), "bias": Dense(db)}, dx
    form = (layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups)
    wanted = [need_dx, False, False]  # of input, weight and bias
    dx = torch.ops.aten.convolution_backward(dy, x, weight, None, *form, wanted)[0] if need_dx else None
    return conv2d_rule(layer, {}, (x,), dy), dx


def _padded(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """`x` as the convolution sees it, padded in its own mode (zeros, "same", reflect, ...)."""
    sides = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, sides, mode=mode) if any(sides) else x


def _patches(layer: nn.Conv2d, x: Tensor, dy: Tensor) -> Tensor:
    """What each place of the kernel meets, `[B, kernel height * kernel width * C, positions]`."""
    wide = layer.in_channels >= NARROW
    x = _padded(layer, x).contiguous(memory_format=torch.channels_last if wide else torch.contiguous_format)
    record, channel, row, column = x.stride()
    (down, right), (apart_down, apart_right) = layer.stride, layer.dilation
    windows = x.as_strided(
        (len(x), *layer.kernel_size, layer.in_channels, *dy.shape[2:]),
        (record, apart_down * row, apart_right * column, channel, down * row, right * column),
    )
    positions = dy.shape[2] * dy.shape[3]
    if wide:  # copy along the channels, which lie side by side
        return windows.permute(0, 4, 5, 1, 2, 3).reshape(len(x), positions, -1).mT
    return windows.reshape(len(x), -1, positions)


def _grouped_weight_grads(layer: nn.Conv2d, x: Tensor, dy: Tensor) -> Tensor:
    """The gradients `[B, O, C / groups, kh, kw]`, as that of one convolution with B times the groups."""
    padding = layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        x, padding = _padded(layer, x), (0, 0)
    out, *kernel = layer.weight.shape
    weight = x.new_empty(len(x) * out, *kernel)  # only its shape matters
    _, grads, _ = torch.ops.aten.convolution_backward(
        dy.reshape(1, -1, *dy.shape[2:]),
        x.reshape(1, -1, *x.shape[2:]),
        weight,
        None,  # bias
        layer.stride,
        padding,
        layer.dilation,
        False,  # transposed
        [0, 0],  # output padding
        len(x) * layer.groups,
        [False, True, False],  # of input, weight and bias, the gradient of the weight alone
    )
    return grads.view(len(x), out, *kernel)


def group_norm_rule(layer: nn.Module, params: Params, inputs: Inputs, dy: Tensor) -> ByName:
    """`dgamma_j = sum_hw dy_j x^_j`, `dbeta_j = sum_hw dy_j`, with `x^` the normalised input."""
    assert isinstance(layer, nn.GroupNorm)
    normalised = F.group_norm(inputs[0], layer.num_groups, eps=layer.eps)
    shape = (*dy.shape[:2], -1)
    return {"weight": Dense((dy * normalised).reshape(shape).sum(2)), "bias": Dense(dy.reshape(shape).sum(2))}


def layer_norm_rule(layer: nn.Module, params: Params, inputs: Inputs, dy: Tensor) -> ByName:
    """`dgamma_j = sum_t dy_jt x^_jt`, `dbeta_j = sum_t dy_jt`, with `x^` the normalised input."""
    assert isinstance(layer, nn.LayerNorm)
    (x,) = inputs
    normalised = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    shape = (len(x), -1, *layer.normalized_shape)
    return {"weight": Dense((dy * normalised).reshape(shape).sum(1)), "bias": Dense(dy.reshape(shape).sum(1))}


def embedding_rule(layer: nn.Module, params: Params, inputs: Inputs, dy: Tensor) -> ByName:
    """`dW_j[r] = sum of dy_jt over the places t where record j holds token r`; none for the padding token."""
    assert isinstance(layer, nn.Embedding)
    if layer.scale_grad_by_freq or layer.sparse or layer.max_norm is not None:
        raise Unsupported("an Embedding has scale_grad_by_freq, sparse or max_norm")
    ids, dy = inputs[0].reshape(len(dy), -1), dy.reshape(len(dy), -1, dy.shape[-1])
    if layer.padding_idx is not None:
        dy = dy * (ids != layer.padding_idx)[:, :, None]
    return {"weight": Lookup(ids, dy, layer.num_embeddings)}


def any_module_rule(module: nn.Module, params: Params, inputs: Inputs, dy: Tensor) -> ByName:
    """Any module from tensors to one tensor: its vector-Jacobian product, record by record under `vmap`."""

    def pull_back(dy: Tensor, *inputs: Tensor) -> dict[str, Tensor]:
        pulled = vjp(lambda p: functional_call(module, p, tuple(a[None] for a in inputs)), dict(params))
        return pulled[1](dy[None])[0]

    return {name: Dense(grads) for name, grads in vmap(pull_back)(dy, *inputs).items()}


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear_rule,
    nn.Conv2d: conv2d_rule,
    nn.GroupNorm: group_norm_rule,
    nn.LayerNorm: layer_norm_rule,
    nn.Embedding: embedding_rule,
}
