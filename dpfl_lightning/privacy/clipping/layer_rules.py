"""Each record's gradient with respect to one layer, from the layer's input and the gradient of its output.

A rule (`RULES`) returns gradients in the cheapest form: in full, or as the factors of a product, whose norm and
weighted sum do not need the full gradient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl_lightning.privacy.clipping.convolutions import Form, convolutions, output_size, spread
from dpfl_lightning.privacy.clipping.float64_sums import kept, one_hot, row_norms, summing_dtype
from dpfl_lightning.privacy.clipping.reference import CANCELLING, Params
from dpfl_lightning.runtime.loops import LANES

NARROW = 8  # input channels; below this, a matmul over patches is faster than a CPU's blocked convolution
#: on a CPU, numbers of a gradient that are formed, measured and summed as fast as one position is summed in float64
FORMED = 12_000
#: CUDA's largest second or third dimension of a grid, by which kernels may number the channels of a convolution
CUDA_GRID = 65_535


class Unsupported(Exception):
    """The fast pass does not support the model; the message says why."""


class Grads(ABC):
    """Gradients `g_j`, j = 1..B, with respect to one parameter of n numbers."""

    @property
    def terms(self) -> int:
        """Number of terms of one gradient that are summed together with those of the other records."""
        return 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of a gradient that is not in the order of the parameter."""
        return ()

    @property
    def order(self) -> tuple[int, ...]:
        """Permutation of the dimensions of a sum `[G, *shape]` into those of the parameter; empty if it is in order."""
        return ()

    @property
    @abstractmethod
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors `[B, ...]` that hold the gradients."""

    @abstractmethod
    def first(self, count: int) -> Grads:
        """Return the gradients of the first `count` records."""

    @abstractmethod
    def summed(self, rows: int) -> Grads:
        """Return the gradients of B units, each the sum of so many gradients that follow each other."""

    def pair(self) -> tuple[Tensor, Tensor] | None:
        """Return left `[B, p]` and right `[B, d]` if the gradients are `left[j]^T right[j]` (n = p d) in this order."""
        return None

    def measurable(self, order: int) -> Grads:
        """Return the same gradients in a form that has norms of this order."""
        return self

    @abstractmethod
    def formed(self) -> Tensor:
        """Return the gradients in full and in the order of the parameter, `[B, n]`."""

    @abstractmethod
    def norms(self, order: int = 2) -> Tensor:
        """Return norms `|g_j|`, `[B]` float64: L2, or L1 for `order` 1. They are never too small by more than 2^-27."""

    @abstractmethod
    def add(self, totals: Tensor, factors: Tensor, group: Tensor | None) -> None:
        """Add `factors[j] g_j` to row `group[j]` of `totals` (None: to its only row); a factor of 0 adds nothing.

        `totals` `[G, n]` is float64, contiguous, reordered later (`arranged`); `factors` `[B]` float64, `group` `[B]`.
        """


def arranged(totals: Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Return a view of `totals` `[G, n]` in the order of the parameter, `[G, ...]` (`shape`, `order` of `Grads`)."""
    return totals.view(-1, *shape).permute(order) if order else totals


def _scaled(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor `[B, ...]` in the dtype of sums and a scale `[B]`, whose product is `values`.

    Squares of float32 numbers need no scale in float64. Other numbers are divided by the largest one of their record.
    """
    converted = values.to(summing_dtype(values))
    if values.dtype != converted.dtype:
        return converted, converted.new_ones(len(converted))
    largest = converted.abs().flatten(1).amax(dim=1).clamp(min=torch.finfo(converted.dtype).tiny)
    return converted / largest.view(-1, *[1] * (converted.dim() - 1)), largest


@dataclass(frozen=True)
class Dense(Grads):
    """Gradients in full, `[B, ...]`."""

    grads: Tensor
    order: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.grads.shape[1:]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.grads,)

    def first(self, count: int) -> Grads:
        return Dense(self.grads[:count], self.order)

    def summed(self, rows: int) -> Grads:
        return Dense(self.grads.unflatten(0, (-1, rows)).sum(1), self.order)

    def pair(self) -> tuple[Tensor, Tensor]:
        return self.grads.new_ones(len(self.grads), 1), self.grads.flatten(1)

    def formed(self) -> Tensor:
        return arranged(self.grads.flatten(1), self.shape, self.order).flatten(1)

    def norms(self, order: int = 2) -> Tensor:
        return row_norms(self.grads.flatten(1), order)

    def add(self, totals: Tensor, factors: Tensor, group: Tensor | None) -> None:
        totals += one_hot(factors, group, len(totals)) @ kept(self.grads.flatten(1), factors)


@dataclass(frozen=True)
class Outer(Grads):
    """`g_j = sum_t l_jt r_jt^T`, never formed; `left` `[B, T, p]`, `right` `[B, T, d]`.

    `|g_j|^2 = sum_tt' (l_jt . l_jt') (r_jt . r_jt')`, the ghost norm; with T = 1 it is `|l_j|^2 |r_j|^2`. The L1 norm
    has no such form: for T > 1 the gradients are formed.

    If positions cancel, rounding leaves more of a gradient than the exact sum. The square of a norm is therefore
    enlarged by the possible rounding error, and by `(U / CANCELLING)^2` with `U = sum_t |l_jt| |r_jt|`, which bounds
    the rounding of a sum over records (not in float64, which is for checks). If all T positions agree, this adds 5e-7.
    """

    left: Tensor
    right: Tensor

    @property
    def terms(self) -> int:
        return self.left.shape[1]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.left, self.right

    def first(self, count: int) -> Grads:
        return Outer(self.left[:count], self.right[:count])

    def summed(self, rows: int) -> Grads:
        return Outer(*(part.unflatten(0, (-1, rows)).flatten(1, 2) for part in (self.left, self.right)))

    def pair(self) -> tuple[Tensor, Tensor] | None:
        return (self.left[:, 0], self.right[:, 0]) if self.terms == 1 else None

    def measurable(self, order: int) -> Grads:
        if order == 2 or self.terms == 1:
            return self
        return Dense(self.formed())

    def formed(self) -> Tensor:
        return torch.bmm(self.left.mT, self.right).flatten(1)

    def norms(self, order: int = 2) -> Tensor:
        (left, left_scale), (right, right_scale) = _scaled(self.left), _scaled(self.right)
        lengths = torch.linalg.vector_norm(left, ord=order, dim=2) * torch.linalg.vector_norm(right, ord=order, dim=2)
        uncancelled = lengths.sum(dim=1)
        if self.terms == 1:
            return uncancelled * left_scale * right_scale
        assert order == 2, "`measurable` forms gradients that need an L1 norm"
        squared = ((left @ left.mT) * (right @ right.mT)).sum(dim=(1, 2))
        roundings = self.terms**2 + left.shape[2] + right.shape[2]
        enlargement = 2 * roundings * torch.finfo(left.dtype).eps + (self.left.dtype != left.dtype) * CANCELLING**-2
        return (squared + enlargement * uncancelled.square()).clamp(min=0).sqrt() * left_scale * right_scale

    def add(self, totals: Tensor, factors: Tensor, group: Tensor | None) -> None:
        left, right = kept(self.left, factors) * factors[:, None, None], kept(self.right, factors)
        by_group = totals.view(len(totals), left.shape[2], right.shape[2])
        if group is None:
            by_group[0].addmm_(left.flatten(0, 1).mT, right.flatten(0, 1))
        elif totals.device.type == "cpu":  # one product for each record: the cost does not depend on the groups
            for j, row in enumerate(group.tolist()):
                by_group[row].addmm_(left[j].mT, right[j])
        else:
            chosen = one_hot(torch.ones_like(factors), group, len(totals))
            by_group += (chosen[:, :, None, None] * left).flatten(1, 2).mT @ right.flatten(0, 1)


@dataclass(frozen=True)
class Lookup(Grads):
    """Gradients of a table: `g_j[r]` is the sum of `dy_jt` over t with `ids_jt = r`; ids `[B, T]`, dy `[B, T, d]`.

    Positions that read the same row are merged into the first of them, so that no terms can cancel.
    """

    ids: Tensor
    dy: Tensor
    rows: int

    @classmethod
    def merged(cls, ids: Tensor, dy: Tensor, rows: int) -> Lookup:
        same = ids[:, :, None] == ids[:, None, :]
        first = ~same.tril(-1).any(dim=2)
        return cls(ids, torch.where(first[:, :, None], same.to(dy.dtype) @ dy, 0.0), rows)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.ids, self.dy

    def first(self, count: int) -> Grads:
        return Lookup(self.ids[:count], self.dy[:count], self.rows)

    def summed(self, rows: int) -> Grads:
        ids, dy = (part.unflatten(0, (-1, rows)).flatten(1, 2) for part in (self.ids, self.dy))
        return Lookup.merged(ids, dy, self.rows)

    def formed(self) -> Tensor:
        formed = self.dy.new_zeros(len(self.dy), self.rows, self.dy.shape[2])
        places = self.ids[:, :, None].expand_as(self.dy)
        return formed.scatter_add_(1, places, self.dy).flatten(1)

    def norms(self, order: int = 2) -> Tensor:
        return row_norms(self.dy.flatten(1), order)

    def add(self, totals: Tensor, factors: Tensor, group: Tensor | None) -> None:
        dy = kept(self.dy, factors) * factors[:, None, None]
        places = self.ids if group is None else self.ids + self.rows * group[:, None]
        totals.view(-1, dy.shape[2]).index_add_(0, places.flatten(), dy.flatten(0, 1))


Inputs = tuple[Tensor, ...]
ByName = dict[str, Grads]
# (layer, its parameters by local name, its inputs, gradient of its output) -> gradients by local name
Rule = Callable[[nn.Module, Params, Inputs, Tensor], ByName]


def _never_form(steps: int, p: int, d: int) -> bool:
    """Return whether `Outer` beats `Dense`: `steps^2 (p + d)` products for Gram matrices, or `p d` numbers moved."""
    return steps**2 * (p + d) < 32 * p * d


def _only(params: Params, **forms: Callable[[], Grads]) -> ByName:
    """Compute the gradients of the parameters that are wanted."""
    return {name: form() for name, form in forms.items() if name in params}


def linear_gradients(params: Params, x: Tensor, dy: Tensor, weight: str, bias: str) -> ByName:
    """Return those of a linear map by these names: `dW_j = sum_t dy_jt x_jt^T`, `db_j = sum_t dy_jt`.

    x is `[B, ..., d]`, and dy, the gradient of the output, `[B, ..., p]`.
    """
    x, dy = (a.reshape(len(a), math.prod(a.shape[1:-1]), a.shape[-1]) for a in (x, dy))
    steps, p, d = dy.shape[1], dy.shape[2], x.shape[2]
    factored = steps == 1 or (FORMED * steps < p * d if dy.device.type == "cpu" else _never_form(steps, p, d))

    def weight_grads() -> Grads:
        if factored:
            return Outer(dy, x)
        if d < LANES:  # products with long rows are several times faster
            return Dense(torch.bmm(x.mT, dy), (0, 2, 1))
        return Dense(torch.bmm(dy.mT, x))

    return _only(params, **{weight: weight_grads, bias: lambda: Dense(dy.sum(1))})


def linear_rule(
    layer: nn.Module, params: Params, inputs: Inputs, dy: Tensor, weight: str = "weight", bias: str = "bias"
) -> ByName:
    """Return the gradients of `linear_gradients`."""
    return linear_gradients(params, inputs[0], dy, weight, bias)


def conv2d_rule(layer: nn.Module, params: Params, inputs: Inputs, dy: Tensor, count: int | None = None) -> ByName:
    """`dW_j[o,c,u,v] = sum_hw dy_j[o,h,w] x_j[c, s h + d u, s w + d v]` (x padded), `db_j = sum_hw dy_j`.

    One of four ways: the gradient is never formed if the map is small compared with the kernel; compiled loops
    (`convolutions.py`); one convolution whose groups are the records; or a matmul over patches, for few input channels
    and on accelerators.
    """
    assert isinstance(layer, nn.Conv2d)
    forms = {
        "weight": lambda: _conv2d_weight_grads(layer, inputs[0], dy, count or len(dy)),
        "bias": lambda: Dense(dy.sum(dim=(2, 3))),
    }
    return _only(params, **forms)


def _conv2d_weight_grads(layer: nn.Conv2d, x: Tensor, dy: Tensor, count: int) -> Grads:
    out, positions, depth = layer.out_channels, dy.shape[2] * dy.shape[3], layer.weight[0].numel()
    window = (*layer.kernel_size, layer.in_channels)
    if layer.groups == 1 and _never_form(positions, out, depth):
        return Outer(
            dy.flatten(2).mT, _windows(layer, x, dy).permute(0, 4, 5, 3, 1, 2).reshape(len(x), positions, depth)
        )
    if has_special_backward(layer):
        dw = convolutions().weight_gradients(x, layer.weight, dy, _form(layer), count)
        if dw is not None:
            return Dense(dw, (0, 1, 4, 2, 3))
    if layer.groups > 1 or (x.device.type == "cpu" and layer.in_channels >= NARROW):
        at_once = len(x) if x.device.type == "cpu" else CUDA_GRID // max(layer.in_channels, out)
        return Dense(_grouped_weight_grads(layer, x, dy, max(1, at_once)))
    if out >= LANES:
        product = torch.bmm(_patches(layer, x, dy), dy.flatten(2).mT)
        return Dense(product.view(-1, *window, out), (0, 4, 3, 1, 2))
    product = torch.bmm(dy.flatten(2), _patches(layer, x, dy).mT)
    return Dense(product.view(-1, out, *window), (0, 1, 4, 2, 3))


def has_special_backward(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether `conv2d_backward` supports the layer."""
    return type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def conv2d_forward(layer: nn.Conv2d, x: Tensor, count: int) -> Tensor:
    """Return the layer's output; on a CPU without a graph, for a layer that `has_special_backward`.

    Compiled loops compute that of the first `count` records only.
    """
    if x.device.type != "cpu" or x.dim() != 4:
        return nn.Conv2d.forward(layer, x)
    with torch.no_grad():
        return convolutions().forward(x, layer.weight, layer.bias, _form(layer), count)


def conv2d_backward(
    layer: nn.Conv2d,
    params: Params,
    weight: Tensor,
    x: Tensor,
    dy: Tensor,
    need_dx: bool,
    sparse: bool,
    winners: Tensor | None,
    count: int,
) -> tuple[ByName, Tensor | None]:
    """Return the result of `conv2d_rule`, and the gradient of the input if it is needed.

    Compiled loops compute those of the first `count` records only: the results of others are missing, or zero.

    `sparse` means that `dy` is known to be mostly zeros (after max-pooling), which makes both cheap. With `winners` of
    `Convolutions.max_relu`, `dy` is the gradient of the pooled map.
    """
    found = None
    if sparse or winners is not None:
        found = convolutions().sparse_backward(layer, weight, x, dy, need_dx, winners, count)
    if found is not None:
        dw, db, dx = found
        return _only(params, weight=lambda: Dense(dw, (0, 1, 4, 2, 3)), bias=lambda: Dense(db)), dx
    if winners is not None:
        dy = spread(dy, winners, output_size(x, weight, *_form(layer)[:3]))
    dx = convolutions().input_gradient(x, weight, dy, _form(layer), count) if need_dx else None
    return conv2d_rule(layer, params, (x,), dy, count), dx


def _form(layer: nn.Conv2d) -> Form:
    assert not isinstance(layer.padding, str)
    return layer.stride, layer.padding, layer.dilation, layer.groups


def _padded(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Return `x` padded in the mode of the convolution (zeros, "same", reflect, ...)."""
    sides = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, sides, mode=mode) if any(sides) else x


def _patches(layer: nn.Conv2d, x: Tensor, dy: Tensor) -> Tensor:
    """Return the inputs of each position of the kernel, `[B, kernel height * kernel width * C, positions]`."""
    windows, positions = _windows(layer, x, dy), dy.shape[2] * dy.shape[3]
    if layer.in_channels >= NARROW:  # copy along the channels, which are contiguous
        return windows.permute(0, 4, 5, 1, 2, 3).reshape(len(x), positions, -1).mT
    return windows.reshape(len(x), -1, positions)


def _windows(layer: nn.Conv2d, x: Tensor, dy: Tensor) -> Tensor:
    """Return a view of the padded inputs, `[B, kernel height, kernel width, C, *positions]`."""
    channels_last = layer.in_channels >= NARROW
    x = _padded(layer, x).contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    record, channel, row, column = x.stride()
    (down, right), (apart_down, apart_right) = layer.stride, layer.dilation
    return x.as_strided(
        (len(x), *layer.kernel_size, layer.in_channels, *dy.shape[2:]),
        (record, apart_down * row, apart_right * column, channel, down * row, right * column),
    )


def _grouped_weight_grads(layer: nn.Conv2d, x: Tensor, dy: Tensor, at_once: int) -> Tensor:
    """Return the gradients `[B, O, C / groups, kh, kw]`, of at most so many records at once."""
    padding = layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        x, padding = _padded(layer, x), (0, 0)
    form = (layer.weight.shape, layer.stride, padding, layer.dilation, layer.groups)
    parts = zip(x.split(at_once), dy.split(at_once), strict=True)
    grads = [convolution_weight_grads(some_x, some_dy, *form) for some_x, some_dy in parts]
    return grads[0] if len(grads) == 1 else torch.cat(grads)


def convolution_weight_grads(
    x: Tensor,
    dy: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_padding: Sequence[int] | None = None,
) -> Tensor:
    """Return each record's gradients `[B, *shape]` of the weight of a convolution, which has any number of dimensions.

    They are those of one convolution with more groups: one for each record and group. A transposed one has an
    `output_padding`.
    """
    weight = x.new_empty(len(x) * shape[0], *shape[1:])  # only its shape matters
    turned, further = output_padding is not None, output_padding or [0] * len(stride)
    dy, x, groups = dy.reshape(1, -1, *dy.shape[2:]), x.reshape(1, -1, *x.shape[2:]), len(x) * groups
    form = (stride, padding, dilation, turned, further, groups)
    grads = torch.ops.aten.convolution_backward(dy, x, weight, None, *form, [False, True, False])[1]
    return grads.view(-1, *shape)


def group_norm_rule(layer: nn.Module, params: Params, inputs: Inputs, dy: Tensor) -> ByName:
    """`dgamma_j = sum_hw dy_j x^_j`, `dbeta_j = sum_hw dy_j`, with `x^` the normalised input.

    An `InstanceNorm` has one group for each channel.
    """
    groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else inputs[0].shape[1]
    normalised = F.group_norm(inputs[0], groups, eps=layer.eps)  # type: ignore[arg-type]
    return scale_and_shift(params, dy, normalised, (*dy.shape[:2], -1), dim=2)


def layer_norm_rule(layer: nn.Module, params: Params, inputs: Inputs, dy: Tensor) -> ByName:
    """`dgamma_j = sum_t dy_jt x^_jt`, `dbeta_j = sum_t dy_jt`, with `x^ = (x - mean) scale` the normalised input."""
    assert isinstance(layer, nn.LayerNorm)
    x, mean, scale = inputs
    normalised = F.layer_norm(x, layer.normalized_shape, eps=layer.eps) if is_short(x) else (x - mean).mul_(scale)
    return scale_and_shift(params, dy, normalised, (len(x), -1, *layer.normalized_shape), dim=1)


def rms_norm_rule(layer: nn.Module, params: Params, inputs: Inputs, dy: Tensor) -> ByName:
    """`dgamma_j = sum_t dy_jt x^_jt`, with `x^` the normalised input, which is the given one."""
    assert isinstance(layer, nn.RMSNorm)
    return scale_and_shift(params, dy, inputs[0], (len(dy), -1, *layer.normalized_shape), dim=1)


def is_short(x: Tensor) -> bool:
    """Return whether the moments of x are rounded too coarsely to normalise it by them."""
    return x.dtype in (torch.float16, torch.bfloat16)


def conv1d_rule(layer: nn.Module, params: Params, inputs: Inputs, dy: Tensor) -> ByName:
    """`dW_j[o,c,u] = sum_t dy_j[o,t] x_j[c, s t + d u]` (x padded): a linear map of patches, as there are no groups."""
    assert isinstance(layer, nn.Conv1d)
    x = inputs[0]
    sides = layer._reversed_padding_repeated_twice
    if any(sides):
        x = F.pad(x, sides, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    x = x.contiguous()
    record, channel, place = x.stride()
    patches = x.as_strided(
        (len(x), dy.shape[2], layer.in_channels, layer.kernel_size[0]),
        (record, layer.stride[0] * place, channel, layer.dilation[0] * place),
    )
    return linear_gradients(params, patches.flatten(2), dy.mT, "weight", "bias")


def scale_and_shift(
    params: Params, dy: Tensor, normalised: Tensor, shape: tuple[int, ...], dim: int | tuple[int, ...]
) -> ByName:
    """Return `dgamma_j`, `dbeta_j`: sums over dimensions of the tensors viewed in this shape."""

    def summed(terms: Tensor) -> Grads:
        return Dense(terms.reshape(shape).sum(dim))

    return _only(params, weight=lambda: summed(dy * normalised), bias=lambda: summed(dy))


def embedding_rule(layer: nn.Module, params: Params, inputs: Inputs, dy: Tensor) -> ByName:
    """`dW_j[r] = sum of dy_jt over the positions t where record j has token r`; none for the padding token."""
    assert isinstance(layer, nn.Embedding)
    if layer.scale_grad_by_freq or layer.sparse or layer.max_norm is not None:
        raise Unsupported("an Embedding has scale_grad_by_freq, sparse or max_norm")
    return {"weight": lookup_gradients(inputs[0], dy, layer.num_embeddings, layer.padding_idx)}


def lookup_gradients(ids: Tensor, dy: Tensor, rows: int, padding_idx: int | None = None) -> Lookup:
    """Return those of a table with so many rows, of which ids `[B, ...]` were read; dy is `[B, ..., d]`."""
    ids, dy = ids.reshape(len(dy), -1), dy.reshape(len(dy), -1, dy.shape[-1])
    if padding_idx is not None:
        dy = dy * (ids != padding_idx % rows)[:, :, None]
    return Lookup.merged(ids, dy, rows)


def kind_of(module: nn.Module, kinds: Mapping[type[nn.Module], Any]) -> type[nn.Module] | None:
    """Return which of the `kinds` a module computes: its own, or that of a base whose forward pass it has."""
    if type(module) in kinds:
        return type(module)
    return next((kind for kind in kinds if isinstance(module, kind) and type(module).forward is kind.forward), None)


def rule_of(module: nn.Module) -> Rule | None:
    """Return the rule of a module, or None."""
    kind = kind_of(module, RULES)
    in_groups = isinstance(module, nn.Conv1d) and module.groups > 1
    return None if kind is None or in_groups else RULES[kind]


def rule_of_units(rule: Rule, rows: int) -> Rule:
    """Return the rule for gradients that are each a sum over so many rows of the inputs.

    Rules of linear maps and tables take the rows of a unit as positions of one record; those of others are summed.
    """
    if rows == 1:
        return rule

    def summed(layer: nn.Module, params: Params, inputs: Inputs, dy: Tensor) -> ByName:
        if getattr(rule, "func", rule) in OF_POSITIONS:
            *inputs_of, dy = (part.unflatten(0, (-1, rows)) for part in (*inputs, dy))
            return rule(layer, params, tuple(inputs_of), dy)
        return {name: form.summed(rows) for name, form in rule(layer, params, inputs, dy).items()}

    return summed


#: rules that take inputs `[B, ..., d]` with any number of dimensions
OF_POSITIONS: set[Callable[..., ByName]] = {linear_rule, embedding_rule, layer_norm_rule, rms_norm_rule}

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear_rule,
    nn.Conv1d: conv1d_rule,
    nn.Conv2d: conv2d_rule,
    nn.GroupNorm: group_norm_rule,
    nn.Embedding: embedding_rule,
}
