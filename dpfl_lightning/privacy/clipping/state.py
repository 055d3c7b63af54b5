"""What a net keeps from one pass to the next, which neither clipping nor noise covers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def tensors_restored(net: nn.Module) -> Iterator[None]:
    """Restore what the net keeps in tensors besides its trainable parameters: a pass must leave nothing for the next.

    These are buffers, frozen parameters and attributes. They are restored whether they were changed in place or
    replaced, and new ones are deleted.
    """
    spaces: list[dict[str, Any]] = [s for part in net.modules() for s in (part._buffers, part._parameters, vars(part))]
    before = [
        (space, {name: (value, value.detach().clone()) for name, value in space.items() if _fixed(value)})
        for space in spaces
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for space, tensors in before:
                for name in [name for name, value in space.items() if _fixed(value) and name not in tensors]:
                    del space[name]
                for name, (tensor, value) in tensors.items():
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)
                    space[name] = tensor


def _fixed(value: Any) -> bool:
    return isinstance(value, Tensor) and not (isinstance(value, nn.Parameter) and value.requires_grad)


def contents(net: nn.Module) -> dict[str, object]:
    """Return what tells whether two copies of a net keep the same: by name, parameters, buffers and attributes.

    Attributes of any depth count, in lists, mappings, queues, arrays and objects.
    """
    return {
        f"{name}.{key}".lstrip("."): _content(value, set())
        for name, part in net.named_modules()
        for key, value in {**part._parameters, **part._buffers, **vars(part)}.items()
        if key not in ("_parameters", "_buffers", "_modules")
    }


def _content(value: Any, above: set[int]) -> object:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), _bytes_of(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.dtype, value.shape, hash(value.tobytes())
    if value is None or isinstance(value, str | bytes | int | float | complex | type | ModuleType):
        return repr(value)
    if id(value) in above:  # objects that refer to each other
        return None
    above = above | {id(value)}
    if isinstance(value, Mapping):
        return tuple((repr(key), _content(one, above)) for key, one in value.items())
    if isinstance(value, list | tuple | deque | np.ndarray):
        return tuple(_content(one, above) for one in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted(str(_content(one, above)) for one in value))
    return type(value), _content(getattr(value, "__dict__", None), above)


def _bytes_of(tensor: Tensor) -> object:
    try:
        flat = tensor.detach().cpu().resolve_conj().reshape(-1)
        return hash(flat.view(torch.uint8).numpy().tobytes())
    except (RuntimeError, TypeError, NotImplementedError):  # what is left of a transform, or has no plain memory
        return object()  # equals nothing
