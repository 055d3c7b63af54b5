"""Whether a model can be trained with a gradient for each record at all: a plain loop of autograd.

Dropout is switched off, because gradients with different draws cannot be compared; modes of layers stay.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.models import Entry

RECORDS = 6
MIXES = 1e-6  # relative difference, in float64, of a record's gradient beside another record and alone


@dataclass(frozen=True)
class Verdict:
    """`trainable`, `mixing` or `untrainable`, why, and the gradients `[n, P]` of the records alone."""

    category: str
    reason: str
    dtype: torch.dtype
    gradients: Tensor | None = None


def without_draws(model: nn.Module) -> nn.Module:
    """Switch off every dropout of a model, in layers, in attributes that functions read, and in its configuration."""
    for module in model.modules():
        drops = any(word in type(module).__name__ for word in ("Drop", "StochasticDepth"))
        _zero(vars(module), lambda name, drops=drops: "drop" in name or (drops and name == "p"))
        if hasattr(module, "config") and hasattr(module.config, "__dict__"):
            for config in (module.config, *vars(module.config).values()):
                if hasattr(config, "__dict__"):
                    _zero(vars(config), lambda name: "drop" in name)
    return model


def _zero(values: dict[str, Any], chosen: Any) -> None:
    for name, value in values.items():
        if chosen(name) and isinstance(value, float):
            values[name] = 0.0


def of_rows(x: Any, rows: Any) -> Any:
    """Return some of the records of `x`, a tensor, or a tuple or dictionary of tensors."""
    if isinstance(x, dict):
        return {name: part[rows] for name, part in x.items()}
    return tuple(part[rows] for part in x) if isinstance(x, tuple) else x[rows]


def in_dtype(x: Any, dtype: torch.dtype) -> Any:
    """Return the records with floating numbers of this dtype."""
    if isinstance(x, dict):
        return {name: in_dtype(part, dtype) for name, part in x.items()}
    if isinstance(x, tuple):
        return tuple(in_dtype(part, dtype) for part in x)
    return x.to(dtype) if x.is_floating_point() else x


def losses_of(entry: Entry, model: nn.Module, x: Any, y: Tensor) -> Tensor:
    """Return the loss of each record, `[B]`: the mean over the labels of a record that are not -100."""
    out = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    out = entry.output(out) if entry.output else out if isinstance(out, Tensor) else out.logits
    if entry.loss is not None:
        return entry.loss(out, y)
    if entry.kind == "tokens":
        out = out.movedim(-1, 1)
    each, counted = F.cross_entropy(out, y, reduction="none").reshape(len(y), -1), (y != -100).reshape(len(y), -1)
    return each.sum(dim=1) / counted.sum(dim=1).clamp(min=1)


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """Return the gradient of one loss as a vector `[P]`; zero where it depends on nothing."""
    trained = [one for one in model.parameters() if one.requires_grad]
    if not loss.requires_grad:
        return torch.cat([torch.zeros_like(one).reshape(-1) for one in trained])
    parts = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
    return torch.cat([one.reshape(-1) for one in parts])


def loop(entry: Entry, model: nn.Module, x: Any, y: Tensor) -> Tensor:
    """Return the gradient of each record alone, `[n, P]`."""
    rows = ([row] for row in range(len(y)))
    return torch.stack([gradient(model, losses_of(entry, model, of_rows(x, row), y[row])[0]) for row in rows])


def apart(actual: Tensor, expected: Tensor) -> float:
    """Return the largest distance of two vectors `[n, P]` relative to the expected one, infinite if not finite."""
    actual, expected = actual.double(), expected.double()
    if not actual.isfinite().all():
        return float("inf")
    largest = float(torch.cat([actual, expected]).norm(dim=1).max())
    size = expected.norm(dim=1).clamp(min=1e-6 * largest + 1e-300)
    return float(((actual - expected).norm(dim=1) / size).max())


def judged(entry: Entry, seed: int = 0) -> Verdict:
    """Judge a model of the zoo on records of its own, in float64 where it can compute in it."""
    torch.manual_seed(seed)
    model = without_draws(entry.private())
    x, y = entry.records(RECORDS, torch.Generator().manual_seed(seed))
    cause = ""
    for dtype in (torch.float64, torch.float32):
        try:
            return _judged(entry, copy.deepcopy(model).to(dtype), in_dtype(x, dtype), y, dtype)
        except (RuntimeError, ValueError, TypeError) as error:  # a model may know float32 alone
            cause = f"{type(error).__name__}: {error}".split("\n")[0]
    return Verdict("untrainable", cause, torch.float32)


def _judged(entry: Entry, model: nn.Module, x: Any, y: Tensor, dtype: torch.dtype) -> Verdict:
    try:
        alone = loop(entry, model, x, y)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        return Verdict("mixing", f"one record alone: {error}".split(",")[0], dtype)
    if not torch.equal(alone, loop(entry, model, x, y)):
        again = apart(loop(entry, model, x, y), alone)
        if again > MIXES:
            return Verdict("untrainable", f"a second pass gives other gradients ({again:.1e})", dtype, alone)
    if not alone.isfinite().all():
        return Verdict("untrainable", "gradients are not finite", dtype, alone)
    beside = torch.stack(list(_beside(entry, model, x, y)))
    mixed = apart(beside, alone)
    if mixed > (MIXES if dtype == torch.float64 else 1e-4):
        return Verdict("mixing", f"beside another record a gradient differs by {mixed:.1e}", dtype, alone)
    if not alone.any():
        return Verdict("untrainable", "all gradients are zero", dtype, alone)
    return Verdict("trainable", "", dtype, alone)


def _beside(entry: Entry, model: nn.Module, x: Any, y: Tensor) -> Iterable[Tensor]:
    """Yield the gradient of each record in a batch with the next one."""
    for row in range(len(y)):
        pair = [row, (row + 1) % len(y)]
        yield gradient(model, losses_of(entry, model, of_rows(x, pair), y[pair])[0])
