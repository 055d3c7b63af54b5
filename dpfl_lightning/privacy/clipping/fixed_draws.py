"""Draws that are the same for each record, for checks that compare passes; and generators that stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

from dpfl_lightning.runtime.dispatch import DispatchMode

_FIRST = 16  # draws of a record, of which coins and single numbers are constants: nothing is skipped or dropped
_NUMBER = 0.618  # of a uniform draw of a single number
_LEAST, _MOST = 2**-12, 1 - 2**-8  # of uniform draws, in any dtype
_WITHOUT_END = 1 << 24  # numbers of `random_()`
_ONE_BY_ONE = frozenset({"randperm"})  # `vmap` calls them once for each record

Given = Mapping[str, Any]  # arguments of an operator by their names
Uniforms = Callable[..., Tensor]  # of a shape: numbers in (0, 1)
Rule = Callable[[Tensor, Given, Uniforms], Tensor]


def _normals(uniforms: Tensor) -> Tensor:
    return math.sqrt(2) * torch.erfinv(2 * uniforms - 1)


def _leaky(result: Tensor, given: Given, uniforms: Uniforms) -> Tensor:
    if not given["training"]:
        return result  # of one slope for all
    x = result / given["noise"]  # with slopes that were drawn
    drawn = given["lower"] + uniforms(result.shape) * (given["upper"] - given["lower"])
    slopes = torch.where(x >= 0, 1.0, drawn)
    given["noise"].copy_(slopes)  # which the backward pass reads
    return x * slopes


def _bernoulli(result: Tensor, given: Given, uniforms: Uniforms) -> Tensor:
    p = torch.as_tensor(given["self"] if given.get("p") is None else given["p"], device=result.device)
    drawn = uniforms(result.shape)
    return p.to(drawn.dtype) > (drawn if uniforms.later else 0 * drawn)  # type: ignore[attr-defined]


def _binomial(result: Tensor, given: Given, uniforms: Uniforms) -> Tensor:
    count, p = given["count"], given["prob"]
    drawn = count * p + (count * p * (1 - p)).sqrt() * _normals(uniforms(result.shape))
    return torch.minimum(drawn.round().clamp(min=0), count)


def _multinomial(result: Tensor, given: Given, uniforms: Uniforms) -> Tensor:
    logits = given["self"].double().log()
    if given.get("replacement"):
        return (logits.unsqueeze(-2) + _gumbels(uniforms(*result.shape, logits.shape[-1]))).argmax(dim=-1)
    return (logits + _gumbels(uniforms(logits.shape))).topk(result.shape[-1], dim=-1).indices


def _gumbels(uniforms: Tensor) -> Tensor:
    return -(-uniforms.log()).log()


def _whole(low: str, high: str) -> Rule:
    def rule(result: Tensor, given: Given, uniforms: Uniforms) -> Tensor:
        first, end = given.get(low) or 0, given.get(high)
        return (first + uniforms(result.shape) * ((_most(result) if end is None else end) - first)).floor()

    return rule


def _most(result: Tensor) -> int:
    return _WITHOUT_END if result.is_floating_point() else min(_WITHOUT_END, 1 + torch.iinfo(result.dtype).max)


def _normal(result: Tensor, given: Given, uniforms: Uniforms) -> Tensor:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    return mean + std * _normals(uniforms(result.shape))


def _uniform(result: Tensor, given: Given, uniforms: Uniforms) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return low + (high - low) * uniforms(result.shape)


def _gamma(result: Tensor, given: Given, uniforms: Uniforms) -> Tensor:
    return given["self"] * (_normals(uniforms(result.shape)) / 2).exp()


def _dirichlet(result: Tensor, given: Given, uniforms: Uniforms) -> Tensor:
    gammas = _gamma(result, given, uniforms)
    return gammas / gammas.sum(dim=-1, keepdim=True)


#: name of an operator without `_` at its end -> numbers that it could have drawn
_RULES: dict[str, Rule] = {
    "bernoulli": _bernoulli,
    "binomial": _binomial,
    "cauchy": lambda one, given, u: given["median"] + given["sigma"] * (math.pi * (u(one.shape) - 0.5)).tan(),
    "exponential": lambda one, given, u: -(-u(one.shape)).log1p() / given["lambd"],
    "geometric": lambda one, given, u: ((-u(one.shape)).log1p() / math.log1p(-given["p"])).ceil().clamp(min=1),
    "log_normal": lambda one, given, u: (given["mean"] + given["std"] * _normals(u(one.shape))).exp(),
    "multinomial": _multinomial,
    "normal": _normal,
    "poisson": lambda one, given, u: (given["self"] + given["self"].sqrt() * _normals(u(one.shape))).round().clamp(0),
    "rand": _uniform,
    "rand_like": _uniform,
    "randint": _whole("low", "high"),
    "randint_like": _whole("low", "high"),
    "randn": _normal,
    "randn_like": _normal,
    "random": _whole("from", "to"),
    "randperm": lambda one, given, u: u(one.shape).argsort(),
    "rrelu_with_noise": _leaky,
    "_sample_dirichlet": _dirichlet,
    "_standard_gamma": _gamma,
    "uniform": _uniform,
}
_DROPOUT = ("dropout_p", "dropout")  # arguments of attention and recurrent layers


class FixedDraws(DispatchMode):
    """Within it each record draws the same numbers, in functions, layers and `vmap`; an operator could have drawn them.

    A draw depends on how many the record has drawn before (`begin_records`) and on the place in its own tensor. So a
    sampler that rejects ends, and noise has a variance. At first no layer is skipped and nothing is dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator()  # no other code draws from it
        self.begin(1)

    def begin(self, records: int) -> None:
        """Begin with records that are computed together, which have the first dimension of what operators draw."""
        self._records, self._drawn = records, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # no call of a user
            if torch.Tag.nondeterministic_seeded not in func.tags:
                return func(*args, **(kwargs or {}))
            given = _arguments(func, args, kwargs or {})
            if dropped := [name for name in _DROPOUT if name in given]:
                return _called(func, {**given, **dict.fromkeys(dropped, 0.0)})
            results = func(*args, **(kwargs or {}))  # tensors of the right shape, dtype and place in memory
            if func is torch.ops.aten.native_dropout.default:
                return args[0].clone(), torch.ones_like(results[1])
            name = func._schema.name.partition("::")[2].removesuffix("_")
            self._drawn += 1 / self._records if name in _ONE_BY_ONE else 1
            return tree_map(lambda one: self._fixed(one, name, given) if isinstance(one, Tensor) else one, results)

    def _fixed(self, result: Tensor, name: str, given: Given) -> Tensor:
        records = 1 if name in _ONE_BY_ONE else self._records
        uniforms = _Uniforms(self._generator, math.ceil(self._drawn - 1e-6), records, result.device)
        if (rule := _RULES.get(name)) is not None:
            return result.copy_(rule(result, given, uniforms))
        return result.copy_(uniforms(result.shape)) if result.is_floating_point() else result.zero_()


class _Uniforms:
    """Numbers in (0, 1) of one draw, `[*shape]`: those of each record are the same."""

    def __init__(self, generator: torch.Generator, number: int, records: int, device: torch.device) -> None:
        self._generator, self._number, self._records, self._device = generator, number, records, device
        self.later = number > _FIRST

    def __call__(self, *sizes: Any) -> Tensor:
        shape = torch.Size(*sizes) if len(sizes) == 1 and not isinstance(sizes[0], int) else torch.Size(sizes)
        records = self._records if shape and shape[0] % self._records == 0 else 1
        count = shape.numel() // records
        if count == 1 and not self.later:
            return torch.full(shape, _NUMBER, dtype=torch.float64, device=self._device)
        self._generator.manual_seed(self._number)
        drawn = torch.rand(count, dtype=torch.float64, generator=self._generator).clamp(_LEAST, _MOST)
        return drawn.repeat(records).view(shape).to(self._device)


def begin_records(records: int) -> None:
    """Tell `FixedDraws`, if there is one, that a pass of so many records begins, each of which has drawn nothing."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, FixedDraws):
            mode.begin(records)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    declared = func._schema.arguments
    defaults = {one.name: one.default_value for one in declared if one.has_default_value()}
    return {**defaults, **dict(zip((one.name for one in declared), args, strict=False)), **kwargs}


def _called(func: Any, given: Given) -> Any:
    declared = func._schema.arguments
    named = {one.name: given[one.name] for one in declared if one.kwarg_only and one.name in given}
    return func(*(given[one.name] for one in declared if not one.kwarg_only), **named)


def generators_kept(net: nn.Module) -> AbstractContextManager[Any]:
    """Restore the generators of random numbers at the end."""
    device = next(net.parameters()).device
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
