"""The fastest clipped sum that is correct for a net, found by comparing the fast one with the reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_lightning.privacy.clipping.fast import CPU_CHUNK, FastClippedSum, units_of
from dpfl_lightning.privacy.clipping.inputs import Inputs as Records
from dpfl_lightning.privacy.clipping.inputs import take
from dpfl_lightning.privacy.clipping.isolation import CROWD, in_companies
from dpfl_lightning.privacy.clipping.reference import (
    DEFAULT_CHUNK,
    ClippedSum,
    ClipRequest,
    Params,
    SampleLoss,
    VmapClippedSum,
    cross_entropy_of,
    evaluating,
)
from dpfl_lightning.privacy.clipping.sequence_layers import tapped_forward

_CPU_NUMBERS = 4 << 20  # numbers in the widest layer's inputs of a pass: more do not fit the caches
_CROWD_NUMBERS = 1 << 20  # numbers in the widest layer's inputs of the batch of a check: more take seconds
_FEWEST_IN_A_CROWD = 24


def clipped_sum_for(
    net: nn.Module, sample_loss: SampleLoss | None, example_x: Records, example_y: Tensor, chunk: int | None = None
) -> tuple[ClippedSum, str]:
    """Return the fastest clipped sum that is correct for this model, and the reason: "fast: ..." or "vmap: ...".

    It is `FastClippedSum` if that agrees with `VmapClippedSum` in every parameter, on three random records, alone and
    in batches with records that try to influence them, to 1e-8 relative in float64 (1e-4 in float32 for a model without
    float64), with dropout off. Otherwise it is the reference, in which no record can influence another. No record is
    read, only shape and dtype of the examples `[B, ...]`, B >= 0; shapes alone decide a `chunk` of None.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> clipped_sum_for(net, None, torch.empty(0, 2, 2), torch.empty(0, dtype=torch.long))[1]
    'fast: exact rules for all layers'
    """
    sample_loss = sample_loss or cross_entropy_of(net)
    device = next(net.parameters()).device
    cause, tolerance = "", 1e-8
    with evaluating(*_dropout_of(net)), torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:  # in float64, rounding cannot be mistaken for an error or push an activation across a kink
            loss, example, expected = _reference_answers(net, sample_loss, example_x, example_y, torch.float64)
        except Exception:  # a device or loss without float64; any other error is raised again
            loss, example, expected = _reference_answers(net, sample_loss, example_x, example_y, torch.float32)
            tolerance = 1e-4
        for channels_last in (True, False):
            try:
                fast = FastClippedSum(net, loss, channels_last=channels_last)
                wrong_parameter = _apart(example[0], _answers(fast, *example), expected, tolerance)
                if wrong_parameter is None:
                    _run_once(FastClippedSum(net, sample_loss, channels_last=channels_last), net, example_x, example_y)
            except Exception as error:  # a user's forward pass may raise anything under hooks
                cause = cause or str(error).strip().split("\n")[0] or type(error).__name__
                continue
            if wrong_parameter is None:
                widest = fast.widest_input(*example)
                if chunk is None and device.type == "cpu":
                    chunk = max(8, min(CPU_CHUNK, _CPU_NUMBERS // widest))
                crowd = max(_FEWEST_IN_A_CROWD, min(CROWD, _CROWD_NUMBERS // widest))
                mixing_unit = _reached_in_company(fast, *example, crowd, tolerance)
                if mixing_unit is not None:
                    cause = f"the inputs or gradients of `{mixing_unit}` depend on the other records of a batch"
                    break
                vmap_modules = ", ".join(fast.under_vmap())
                reason = "fast: exact rules " + (f"but vmap for {vmap_modules}" if vmap_modules else "for all layers")
                sparse = fast.sparse_layers(*example) if device.type == "cpu" else []
                return FastClippedSum(net, sample_loss, chunk, channels_last, sparse), reason
            cause = cause or f"the gradient of `{wrong_parameter}` differs from what the layers' rules give"
    return VmapClippedSum(sample_loss, chunk or DEFAULT_CHUNK), f"vmap: {cause}"


def _dropout_of(net: nn.Module) -> list[nn.Module]:
    """Return the layers whose dropout is switched off, also the tapped ones, which draw it for each record.

    No rule covers the dropout of other units: it stays on and fails the check.
    """
    units = [unit.module for _, unit in units_of(net)]
    inside = {id(m) for module in units for m in module.modules()}
    layers = [m for m in net.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and id(m) not in inside]
    return layers + [module for module in units if tapped_forward(module)]


def _reference_answers(
    net: nn.Module, sample_loss: SampleLoss, x: Records, y: Tensor, dtype: torch.dtype
) -> tuple[SampleLoss, tuple[Params, Records, Tensor], list[Tensor]]:
    """Return the loss with all parameters and buffers in `dtype`, a random example, and the reference's answers."""
    fixed = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    fixed = {name: t.detach().to(dtype) for name, t in fixed.items() if t.is_floating_point()}

    def loss(params: Params, x: Records, y: Tensor) -> Tensor:
        return sample_loss({**fixed, **params}, x, y)

    example = random_example(net, x, y, dtype)
    return loss, example, _answers(VmapClippedSum(loss), *example)


def random_example(net: nn.Module, x: Records, y: Tensor, dtype: torch.dtype) -> tuple[Params, Records, Tensor]:
    """Return three random records and parameters moved off zeros and symmetries, on the net's device."""
    gen = torch.Generator().manual_seed(0)
    device = next(net.parameters()).device
    tokens = min((m.num_embeddings for m in net.modules() if isinstance(m, nn.Embedding)), default=2)

    def like(example: Tensor, high: int) -> Tensor:
        shape = (3, *example.shape[1:])
        if example.is_floating_point():
            return torch.randn(shape, generator=gen).to(device, dtype)
        return torch.randint(high, shape, generator=gen).to(device, example.dtype)

    params = {name: p.detach().to(dtype) for name, p in net.named_parameters() if p.requires_grad}
    for name, p in params.items():
        params[name] = p + 0.05 * torch.randn(p.shape, generator=gen).to(device, dtype)
    return params, tree_map(lambda part: like(part, tokens), x), like(y, 2)


def _answers(clipped_sum: ClippedSum, params: Params, x: Records, y: Tensor) -> list[Tensor]:
    """Return what distinguishes two clipped sums: full gradients and clipped ones, record by record."""
    groups = torch.arange(len(y), device=y.device)
    clips = ((math.inf, 2), (1e-2, 2), (1e-2, 1))
    requests = [ClipRequest(clip_norm, order, groups, len(y)) for clip_norm, order in clips]
    return [clipped_sum(params, x, y, request)[0] for request in requests]


def _run_once(clipped_sum: ClippedSum, net: nn.Module, x: Records, y: Tensor) -> None:
    """Run the clipped sum in the dtypes of the net and of its records: a net under autocast may raise only here."""
    floating = [part.dtype for part in tree_leaves(x) if part.is_floating_point()]
    dtype = floating[0] if floating else torch.get_default_dtype()
    params = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    clipped_sum(params, *random_example(net, x, y, dtype)[1:], ClipRequest(1.0))


def _apart(params: Params, answers: list[Tensor], expected: list[Tensor], tolerance: float) -> str | None:
    """Return the first parameter in which some record's gradients differ by more than rounding, or None."""
    sizes = [p.numel() for p in params.values()]
    for actual, exact in zip(answers, expected, strict=True):
        for name, a, b in zip(params, actual.split(sizes, dim=1), exact.split(sizes, dim=1), strict=True):
            # A parameter whose gradient is zero up to rounding is compared with the whole gradient.
            if not ((a - b).norm(dim=1) <= tolerance * (b.norm(dim=1) + 1e-2 * exact.norm(dim=1))).all():
                return name
    return None


def _reached_in_company(
    fast: FastClippedSum, params: Params, x: Records, y: Tensor, most: int, tolerance: float
) -> str | None:
    """Return the first unit of which what the rules read for a record of `x` changes with other records, or None."""
    alone = [fast.signals(params, take(x, slice(row, row + 1)), y[row : row + 1]) for row in range(len(y))]

    def look(some_x: Records, some_y: Tensor, places: Tensor) -> str | None:
        for name, together in fast.signals(params, some_x, some_y).items():
            for actual, separate in zip(together, zip(*(signals[name] for signals in alone), strict=True), strict=True):
                expected = torch.cat(separate).flatten(1).to(params_dtype)
                distance = (actual[places].flatten(1) - expected).norm(dim=1)
                if not (distance <= tolerance * expected.norm(dim=1)).all():
                    return name
        return None

    params_dtype = next(iter(params.values())).dtype  # inputs may be integers
    return next(filter(None, in_companies(look, x, y, most)), None)
