"""Tensors of a model as they were before a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpfl_lightning.errors import require

MOST_COPIED = 1 << 16  # numbers of a tensor that is copied, so that it can be restored


@contextmanager
def tensors_restored(net: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Restore what the model keeps in tensors besides its trainable parameters: a pass must leave nothing for the next.

    These are buffers, frozen parameters and attributes. They are restored whether they were changed in place or
    replaced, and new ones are deleted. Yields a function that restores them at once, and returns their names. Of large
    ones there is no copy: RuntimeError if they were changed in place. UserError if trainable parameters were replaced.
    """
    compiled = next((name for name, part in net.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    require(compiled is None, "model", "have no compiled module", compiled, "Give the module before torch.jit.script.")
    spaces = [
        (name, space) for name, part in net.named_modules() for space in (part._buffers, part._parameters, vars(part))
    ]
    values = ((f"{part}.{name}".lstrip("."), one) for part, space in spaces for name, one in space.items())
    inference = next((name for name, one in values if _is_tensor(one) and _is_inference(one)), None)
    advice = "Make it under torch.no_grad(), or replace it by its clone()."
    require(inference is None, "model", "have no tensor that was made in torch.inference_mode()", inference, advice)
    before: list[dict[str, tuple[Tensor, Tensor | None, int]]] = [
        {name: (value, _copied(value), version_of(value)) for name, value in space.items() if _fixed(value)}
        for _, space in spaces
    ]
    trained = [{name: value for name, value in space.items() if _trained(value)} for _, space in spaces]
    empty = [{name for name, value in space.items() if value is None} for _, space in spaces]

    @torch.no_grad()
    def restore() -> list[str]:
        changed = []
        for (part, space), tensors, parameters, nothing in zip(spaces, before, trained, empty, strict=True):
            replaced = [f"{part}.{name}".lstrip(".") for name, one in parameters.items() if space.get(name) is not one]
            space.update(parameters)
            advice = "functional_call swaps those of a module with two names twice: call it with tie_weights=False."
            must = "leave the parameters of the model in their places"
            require(not replaced, "sample_loss", must, f"others for {', '.join(replaced)}", advice)
            for name in [name for name, value in space.items() if _fixed(value) and name not in tensors]:
                changed.append(f"{part}.{name}".lstrip("."))
                del space[name]
                space |= {name: None} if name in nothing else {}
            for name, (tensor, value, version) in tensors.items():
                if not _same(tensor, value, version):
                    if value is None:
                        raise RuntimeError(f"the model changes `{f'{part}.{name}'.lstrip('.')}` in a forward pass")
                    if not tensor.is_nested and tensor.shape != value.shape:  # such as a table that grew
                        tensor.resize_(value.shape)
                    tensor.copy_(value)
                    changed.append(f"{part}.{name}".lstrip("."))
                elif space.get(name) is not tensor:
                    changed.append(f"{part}.{name}".lstrip("."))
                space[name] = tensor
        return changed

    try:
        yield restore
    finally:
        restore()


def _is_inference(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and tensor.is_inference()


def version_of(tensor: Tensor) -> int:
    """Return the version of a tensor, which one that was made in `torch.inference_mode` has not."""
    return 0 if _is_inference(tensor) else tensor._version


def _copied(tensor: Tensor) -> Tensor | None:
    return None if is_large(tensor) else tensor.detach().clone()


def is_large(tensor: Tensor) -> bool:
    """Whether a tensor is so large that a change in place is noticed by its version, without a copy."""
    large = tensor.layout is torch.strided and tensor.numel() > MOST_COPIED and tensor.element_size() <= 8
    return large and not _is_inference(tensor)


def _same(tensor: Tensor, value: Tensor | None, version: int) -> bool:
    """Whether a tensor still has a value, NaN included; whether a sparse or large one was not changed in place."""
    if value is None or tensor.layout is not torch.strided or tensor.is_meta:
        return version_of(tensor) == version
    if tensor.is_nested:
        return bytes_of(tensor) == bytes_of(value)
    return torch.equal(tensor, value) or bytes_of(tensor) == bytes_of(value)


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), Tensor)  # without asking the value, which may be a dead weakref.proxy


def _fixed(value: Any) -> bool:
    return _is_tensor(value) and not _trained(value)


def _trained(value: Any) -> bool:
    return _is_tensor(value) and isinstance(value, nn.Parameter) and value.requires_grad


def large_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model of which checks make no copy, by their first names."""
    return {name: one for name, one in (*net.named_parameters(), *net.named_buffers()) if is_large(one)}


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor | None:
    """Return a view of a tensor's numbers as integers, None if its memory is not plain."""
    plain = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)
    if not plain or not tensor.is_contiguous() or tensor.element_size() not in _BITS:
        return None
    return tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])


def bytes_of(tensor: Tensor) -> object:
    if tensor.is_meta:  # without numbers
        return None
    if tensor.is_nested:
        return tuple((tuple(one.shape), bytes_of(one)) for one in tensor.detach().unbind())
    if tensor.is_quantized:
        return bytes_of(tensor.int_repr()), tensor.qscheme()
    try:
        flat = tensor.detach().to_dense().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        return hash(
            flat.view(torch.uint8).clone().numpy().tobytes()
        )  # a copy: what numpy holds cannot be resized by the model
    except (RuntimeError, TypeError, NotImplementedError):  # what a transform leaves behind, or has no plain memory
        return Unread()


class Unread:
    """Numbers of a tensor that nobody can read: they equal nothing."""
