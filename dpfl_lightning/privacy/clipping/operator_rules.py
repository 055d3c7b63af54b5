"""Each record's gradient with respect to parameters that a function of torch uses, as `layer_rules.py` has for layers.

What holds records has a batch of one, or of a record's parts, behind the dimension of the records: `[B, 1, ...]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfl_lightning.privacy.clipping.layer_rules import (
    ByName,
    Dense,
    convolution_weight_grads,
    linear_gradients,
    lookup_gradients,
    scale_and_shift,
)
from dpfl_lightning.privacy.clipping.reference import Params

#: (arguments that are parameters, the one that holds records, all, gradient of the result) -> gradients by argument
OperatorRule = Callable[[Params, Tensor, Mapping[str, Any], Tensor], ByName]


def operator_gradients(func: Any, own: Params, args: Mapping[str, Any], held: Sequence[str], dy: Tensor) -> ByName:
    """Return the gradients of the arguments `own`, by name; none if the function, or this use of it, has no rule.

    `held` are the arguments that hold records; all have the names of `argument_names`.
    """
    if func not in _RULES or len(held) != (func not in _REPEATING):
        return {}
    x = args[held[0]] if held else dy
    if x.is_floating_point() and x.dtype != dy.dtype:
        return {}
    found = _RULES[func][1](own, x, args, dy)
    return found if found.keys() == own.keys() else {}


def argument_names(func: Any) -> Sequence[str]:
    """Return the names of a function's arguments by position, as far as its rule knows them."""
    return _RULES[func][0] if func in _RULES else ()


def _sum(own: Params, x: Tensor, args: Mapping[str, Any], dy: Tensor) -> ByName:
    (name, one), *others = own.items()
    return {name: Dense(_summed_to(dy, one.shape))} if not others and args.get("alpha", 1) == 1 else {}


def _product(own: Params, x: Tensor, args: Mapping[str, Any], dy: Tensor) -> ByName:
    return _sum(own, x, args, dy * x)


def _summed_to(terms: Tensor, shape: torch.Size) -> Tensor:
    """Sum `[B, ...]` over the dimensions along which a tensor of this shape was repeated: `[B, n]`."""
    terms = terms.flatten(1, terms.dim() - 1 - len(shape)).sum(1) if terms.dim() - 1 > len(shape) else terms
    for dim, size in enumerate(shape, start=1):
        if terms.shape[dim] != size:
            terms = terms.unflatten(dim, (-1, size)).sum(dim)
    return terms.reshape(len(terms), -1)


def _linear(own: Params, x: Tensor, args: Mapping[str, Any], dy: Tensor) -> ByName:
    return linear_gradients(own, x, dy, "weight", "bias")


def _matmul(own: Params, x: Tensor, args: Mapping[str, Any], dy: Tensor) -> ByName:
    """For matrices W: `x W`, `W x`, and torch's `addmm`, `b + x W`."""
    scaled = any(args.get(name, 1) != 1 for name in ("alpha", "beta"))
    if scaled or any(one.dim() != 2 for name, one in own.items() if name != "bias"):
        return {}
    found: ByName = {}
    if "bias" in own:
        found["bias"] = Dense(_summed_to(dy, own["bias"].shape))
    if "other" in own:
        found |= linear_gradients({"other": own["other"]}, dy, x, "other", "")
    if "input" in own:
        found |= linear_gradients({"input": own["input"]}, x.mT, dy.mT, "input", "")
    return found


def _embedding(own: Params, x: Tensor, args: Mapping[str, Any], dy: Tensor) -> ByName:
    if "weight" not in own or any(args.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")):
        return {}
    return {"weight": lookup_gradients(x, dy, len(own["weight"]), args.get("padding_idx"))}


def _layer_norm(own: Params, x: Tensor, args: Mapping[str, Any], dy: Tensor, norm: Callable[..., Tensor]) -> ByName:
    shape = args["normalized_shape"]
    normalised = norm(x, shape, eps=args.get("eps", None if norm is F.rms_norm else 1e-5))
    return scale_and_shift(own, dy, normalised, (len(x), -1, *shape), dim=1)


def _group_norm(own: Params, x: Tensor, args: Mapping[str, Any], dy: Tensor) -> ByName:
    normalised = F.group_norm(x.flatten(0, 1), args["num_groups"], eps=args.get("eps", 1e-5))
    return scale_and_shift(own, dy, normalised.view_as(x), (*dy.shape[:3], -1), dim=(1, 3))


def _prelu(own: Params, x: Tensor, args: Mapping[str, Any], dy: Tensor) -> ByName:
    """The slopes belong to the second dimension of a batch, if there are several."""
    slopes = own["weight"].shape
    shape = (len(x), *slopes, -1) if slopes.numel() == 1 else (*x.shape[:3], -1)
    terms = (dy * x.clamp(max=0)).reshape(shape).sum(-1)
    return {"weight": Dense(terms if slopes.numel() == 1 else terms.sum(1))}


def _convolution(own: Params, x: Tensor, args: Mapping[str, Any], dy: Tensor, transposed: bool = False) -> ByName:
    found: ByName = {"bias": Dense(dy.transpose(1, 2).flatten(2).sum(2))} if "bias" in own else {}
    if "weight" in own and not isinstance(args.get("padding"), str):
        shape = own["weight"].shape

        def option(name: str, default: int) -> list[int]:
            given = args.get(name, default)
            given = [given] if isinstance(given, int) else [*given]
            return given * ((len(shape) - 2) // len(given))

        form = (option("stride", 1), option("padding", 0), option("dilation", 1), args.get("groups", 1))
        further = option("output_padding", 0) if transposed else None
        grads = convolution_weight_grads(x.flatten(0, 1), dy.flatten(0, 1), shape, *form, further)
        found["weight"] = Dense(grads.unflatten(0, x.shape[:2]).sum(1) if x.shape[1] > 1 else grads)
    return found


def _table() -> dict[Any, tuple[Sequence[str], OperatorRule]]:
    transposed = functools.partial(_convolution, transposed=True)
    convolution = "input weight bias stride padding dilation groups"
    turned = "input weight bias stride padding output_padding groups dilation"
    norm = "input normalized_shape weight"
    rules: list[tuple[str, OperatorRule, list[Any]]] = [
        (
            "input other",
            _sum,
            [torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__, Tensor.expand_as],
        ),
        ("input other", _product, [torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__]),
        ("input", _sum, _REPEATING),
        ("input weight bias", _linear, [F.linear]),
        ("input other", _matmul, [torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm]),
        ("bias input other", _matmul, [torch.addmm, Tensor.addmm]),
        ("input weight padding_idx max_norm norm_type scale_grad_by_freq sparse", _embedding, [F.embedding]),
        (f"{norm} bias eps", functools.partial(_layer_norm, norm=F.layer_norm), [F.layer_norm]),
        (f"{norm} eps", functools.partial(_layer_norm, norm=F.rms_norm), [F.rms_norm]),
        ("input num_groups weight bias eps", _group_norm, [F.group_norm]),
        ("input weight", _prelu, [torch.prelu]),
        (convolution, _convolution, [torch.conv1d, torch.conv2d, torch.conv3d]),
        (turned, transposed, [torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d]),
    ]
    return {func: (names.split(), rule) for names, rule, functions in rules for func in functions}


_REPEATING = [Tensor.expand, Tensor.repeat]
_RULES = _table()
