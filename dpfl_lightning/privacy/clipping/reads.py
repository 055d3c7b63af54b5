"""What the code of a model reads of the records' numbers in a forward pass, such as `mask.all()`, and may decide by.

Such a decision would let a record change how others are computed. In a pass of several records every read therefore
gives what it gave for public records (`FixedReads`). Whether the result is right for each record is checked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.layer_rules import Unsupported
from dpfl_lightning.privacy.clipping.reference import Params, SampleLoss

READS = {
    getattr(Tensor, name)
    for name in ("__bool__", "__contains__", "__float__", "__index__", "__int__", "equal", "item", "tolist")
} | {torch.equal, torch.allclose, Tensor.allclose, torch.is_nonzero, Tensor.is_nonzero}
_OPAQUE = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
#: operators that decide by numbers, though torch does not say so
_DECIDING = frozenset(
    {"_embedding_bag", "_nested_tensor_from_mask", "_pack_padded_sequence", "bincount", "embedding_bag"}
    | {"masked_scatter", "masked_scatter_", "nonzero_static", "segment_reduce", "tensor_split"}
)
RECORDS, DRAWS = 1, 2  # what numbers depend on


@dataclass(frozen=True)
class Read:
    """A number that the code of a model reads: its value, where, and what it depends on (0: on the model alone)."""

    value: Any
    place: str
    depends: int


class FixedReads(TorchFunctionMode):
    """Within it each read of records gives what it gave before, in this order; those of the model alone are done."""

    def __init__(self, reads: Sequence[Read]) -> None:
        super().__init__()
        self._remaining = iter(reads)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            read = next(self._remaining, None)
            if read is None:
                raise Unsupported("the model reads other numbers of a batch of another size")
            if read.depends:
                return read.value
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and next(self._remaining, None) is not None:
            raise Unsupported("the model reads fewer numbers of a batch of another size")


def fixed(sample_loss: SampleLoss, reads: Sequence[Read]) -> SampleLoss:
    """Return the loss in which what is read of records is fixed."""

    def loss(params: Params, x: Inputs, y: Tensor) -> Tensor:
        with FixedReads(reads):
            return sample_loss(params, x, y)

    return loss if any(read.depends for read in reads) else sample_loss


def reads_of(sample_loss: SampleLoss, params: Params, x: Inputs, y: Tensor) -> list[Read]:
    """Return what is read in a pass of the public records `x [B, *X]`, `y [B, ...]`.

    Raises Unsupported if an operator decides by numbers of the records, if code decides by random numbers, and if a
    place reads the same of each record alone: then no record shows whether it matters. Not to be read is a value, too.
    """
    together = _observed(sample_loss, params, x, y)
    places = {read.place for read in together if read.depends}
    if drawn := next((read.place for read in together if read.depends & DRAWS), None):
        raise Unsupported(f"code decides by random numbers ({drawn})")
    if places:
        records = [(take(x, slice(row, row + 1)), y[row : row + 1]) for row in range(len(y))]
        alone = [_observed(sample_loss, params, *one) for one in records]
        seen = {place: {repr([read.value for read in one if read.place == place]) for one in alone} for place in places}
        if untried := next((place for place in places if len(seen[place]) < 2), None):
            raise Unsupported(f"code reads numbers of records ({untried}), for which random records have one value")
    return together


def _observed(sample_loss: SampleLoss, params: Params, x: Inputs, y: Tensor) -> list[Read]:
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}  # code may ask for it
    x, y = take((x, y), [*range(len(y))])  # copies, which code may change
    watch = _Numbers([*tree_leaves(x), y])
    with torch.enable_grad(), watch, _Noting(watch) as noting:
        sample_loss(leaves, x, y)
    return noting.reads


class _Numbers(TorchDispatchMode):
    """Follows what numbers depend on, by the memory that holds them."""

    def __init__(self, records: Sequence[Tensor]) -> None:
        super().__init__()
        self._known: dict[int, tuple[object, int]] = {}  # the storage is kept, so that no other one gets its number
        self.reading = False
        for one in records:
            self._note(one, RECORDS)

    def depends(self, values: Any) -> int:
        """Return on what some of the tensors among the values depend."""
        found = 0
        for one in tree_leaves(values):
            if isinstance(one, Tensor):
                found |= self._known.get(memory(one)[0], (None, 0))[1]
        return found

    def _note(self, value: Tensor, depends: int) -> None:
        number, held = memory(value)
        self._known[number] = held, self._known.get(number, (None, 0))[1] | depends

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        depends = self.depends((args, kwargs))
        if depends and not self.reading and _decides(func, args):
            raise Unsupported(f"`{func.overloadpacket.__name__}` decides by numbers of the records")
        results = func(*args, **kwargs)
        depends |= DRAWS * (torch.Tag.nondeterministic_seeded in func.tags)
        if depends:
            for one in tree_leaves(results):
                if isinstance(one, Tensor):
                    self._note(one, depends)
        return results


class _Noting(TorchFunctionMode):
    """Notes what code reads."""

    def __init__(self, numbers: _Numbers) -> None:
        super().__init__()
        self._numbers, self.reads = numbers, list[Read]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPAQUE and self._numbers.depends(args):
            raise Unsupported(f"`{func.__name__}` takes the records' numbers out of torch ({place_of_code()})")
        if func not in READS:
            return func(*args, **(kwargs or {}))
        self._numbers.reading = True
        try:
            value = func(*args, **(kwargs or {}))
        finally:
            self._numbers.reading = False
        self.reads.append(Read(value, place_of_code(), self._numbers.depends((args, kwargs))))
        return value


def memory(tensor: Tensor) -> tuple[int, object]:
    """Return a number that tells whether tensors share memory, and what has to be kept while it is used."""
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse tensors have none
        return id(tensor), tensor
    return storage._cdata, storage


def _decides(func: Any, args: Any) -> bool:
    """Return whether shapes or code of an operator depend on numbers."""
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"):
        by_mask = any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])
        return by_mask and (len(args) < 3 or args[2].numel() > 1 or args[2].requires_grad)
    dynamic = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return name in _DECIDING or any(tag in func.tags for tag in dynamic)


def place_of_code() -> str:
    """Return file and line of the code that reads, outside of torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_OURS = ("torch", "dpfl_lightning")


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose reads are none of the model: it is a rule's."""

    @functools.wraps(function)
    def of_rule(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return of_rule
