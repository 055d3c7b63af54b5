"""Users' records: pairs of arrays or torch Datasets, as tensors that fit together."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.models.tasks import IGNORED


def pair(source: Any, where: str) -> tuple[Tensor, Tensor]:
    """Return x [n, *X] float32 and y [n, ...] (int64, or float32) of one source, after checking it."""
    if isinstance(source, TorchDataset):
        source = _collected(source, where)
    is_pair = isinstance(source, tuple | list) and len(source) == 2
    require(is_pair, where, "be a pair (x, y) or a torch Dataset of such", type(source).__name__)
    x, y = (_tensor(part, where) for part in source)
    require(x.is_floating_point(), f"{where}: x", "be floating", x.dtype, "Pass x.float() / 255 for bytes.")
    require(x.ndim >= 2, f"{where}: x", "have the shape [records, ...]", tuple(x.shape))
    require(len(x) >= 1, f"{where}: x", "hold at least one record", tuple(x.shape))
    require(y.shape[:1] == x.shape[:1], f"{where}: y", f"have the shape [{len(x)}, ...]", tuple(y.shape))
    for name, part in (("x", x), ("y", y)):
        require(bool(part.isfinite().all()), f"{where}: {name}", "be finite", "NaN or infinity")
    return x.float(), y.float() if y.is_floating_point() else y.long()


def _collected(source: TorchDataset, where: str) -> tuple[Any, ...]:
    if isinstance(source, TensorDataset):
        return source.tensors
    has_length = hasattr(source, "__len__") and not isinstance(source, IterableDataset)
    advice = "Collect its records into tensors."
    require(has_length, where, "be a Dataset with a length and an index", type(source).__name__, advice)
    records = [source[row] for row in range(len(source))]  # type: ignore[arg-type]
    require(len(records) >= 1, where, "hold at least one record", 0)
    columns = []
    for column in zip(*records, strict=True):
        parts = [_tensor(part, where) for part in column]
        shapes = {tuple(part.shape) for part in parts}
        require(len(shapes) == 1, where, "yield records of one shape", sorted(shapes))
        columns.append(torch.stack(parts))
    return tuple(columns)


def _tensor(value: Any, where: str) -> Tensor:
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"{type(value).__name__}: {error}"
        raise UserError(f"`{where}` must hold numbers, got {got}. Convert images to tensors.") from error


def check_alike(pairs: Mapping[str, tuple[Tensor, Tensor]], num_classes: int | None) -> int:
    """Check that every source fits the first one, and return the number of classes, 1 for a regression."""
    first, (first_x, first_y) = next(iter(pairs.items()))
    regression = first_y.is_floating_point()
    for where, (x, y) in pairs.items():
        shape = tuple(first_x.shape[1:])
        require(x.shape[1:] == shape, f"{where}: x", f"have records of shape {shape}, as {first}", tuple(x.shape[1:]))
        require(y.dtype == first_y.dtype, f"{where}: y", f"be {first_y.dtype}, as {first}", y.dtype)
        shape = tuple(first_y.shape[1:])
        require(y.shape[1:] == shape, f"{where}: y", f"have labels of shape {shape}, as {first}", tuple(y.shape[1:]))
    if regression:
        advice = "Pass y.long() for classes."
        require(num_classes in (None, 1), "num_classes", "be 1 if y is floating", num_classes, advice)
        return 1
    advice = "The largest label would reveal that a record has it: state the public number, as in num_classes=3."
    whole = isinstance(num_classes, int) and not isinstance(num_classes, bool) and num_classes >= 1
    require(whole, "num_classes", "be the number of classes (at least 1)", num_classes, advice)
    assert num_classes is not None  # for mypy
    several = first_y.ndim > 1  # of which some may be ignored, or each is 0 or 1
    most = max(num_classes, 2) if several else num_classes
    for where, (_, y) in pairs.items():
        y = y.where(y != IGNORED, 0) if several else y
        label_range = int(y.min()), int(y.max())
        must = f"hold classes from 0 to {most - 1}{f' or {IGNORED} (ignored)' * several}"
        require(label_range[0] >= 0 and label_range[1] < most, f"{where}: y", must, label_range)
    return num_classes
