"""The records of a DataLoader: its collate function is applied to each sample, and a choice of samples is refused."""

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data import Dataset as TorchDataset

from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.errors import UserError, require, warn_user

_POISSON = (
    "Batches are Poisson samples of all records: pass torch.utils.data.Subset(dataset, rows) for some of them, and "
    "weigh records in the loss."
)
_ALONE = "Pad to one public length, and mix or augment samples in the model's `training_step`."


def records_of(loader: DataLoader, where: str) -> Any:
    """Return the data set of a loader, whose records are what its collate function makes of single samples.

    Raises UserError if the loader chooses among samples, or its collate function does not treat each sample alone.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):  # which has no records to draw
        return dataset
    usual = type(loader.batch_sampler) is BatchSampler
    kind = type(loader.batch_sampler).__name__
    require(usual, f"{where}: batch_sampler", "be left out, with a batch_size", kind, _POISSON)
    sampler = loader.batch_sampler.sampler  # type: ignore[union-attr]  # `loader.sampler` is not that of a batch sampler
    usual = type(sampler) in (SequentialSampler, RandomSampler) and not getattr(sampler, "replacement", False)
    all_of_them = isinstance(sampler, Sized) and len(sampler) == len(dataset)
    must = "be left out, or draw each sample once"
    require(usual and all_of_them, f"{where}: sampler", must, type(sampler).__name__, _POISSON)
    return dataset if loader.collate_fn is default_collate else _Collated(dataset, loader.collate_fn, where)


def warn_of_batch_sizes(loaders: Iterable[Any]) -> None:
    """Say which batch sizes of training loaders are ignored; a default one is no loss."""
    usual = ClientOptions().batch_size, 1
    given = {loader.batch_size for loader in loaders if isinstance(loader, DataLoader)}
    if sizes := [size for size in given if size is not None and size not in usual]:
        warn_user(
            f"batch_size {', '.join(map(str, sorted(sizes)))} of the loaders is ignored: batches are drawn by Poisson "
            "sampling with clients.batch_size"
        )


class _Collated(TorchDataset):
    """The records that a collate function makes of single samples, without the dimension of the batch."""

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Any], where: str) -> None:
        self.samples, self._collate, self._key = samples, collate, f"{where}: collate_fn"
        two = [samples[0], samples[min(1, len(samples) - 1)]] if len(samples) else []
        alone = [self._records([one])[0] for one in two]
        same = all(map(_equal, alone, self._records(two))) if two else True
        require(same, self._key, "treat each sample alone", "other records for two samples together", _ALONE)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> Any:
        return self._records([self.samples[row]])[0]

    def _records(self, samples: list[Any]) -> list[Any]:
        try:
            batch = self._collate(samples)
        except Exception as error:  # a user's function may raise anything, and its words may hold values
            got = f"{type(error).__name__} for {len(samples)}"
            raise UserError(f"`{self._key}` must make a batch of any number of samples, got {got}. {_ALONE}") from error
        return [self._record(batch, number, len(samples)) for number in range(len(samples))]

    def _record(self, batch: Any, number: int, count: int) -> Any:
        """Return one record of a batch, whose tensors, arrays and lists of values have `count` rows."""
        if isinstance(batch, Mapping):
            return {name: self._record(part, number, count) for name, part in batch.items()}
        of_parts = isinstance(batch, tuple | list) and any(
            isinstance(part, Tensor | np.ndarray | Mapping | tuple | list) for part in batch
        )
        if of_parts:
            return tuple(self._record(part, number, count) for part in batch)
        rows = len(batch) if np.ndim(batch) else None
        must = "return tensors with one row for each sample, in a tuple or dictionary"
        require(rows == count, self._key, must, f"{type(batch).__name__} for {count}", "Stack them.")
        return batch[number]


def _equal(one: Any, other: Any) -> bool:
    (parts, form), (others, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(map(_close, parts, others))


def _close(one: Any, other: Any) -> bool:
    """Whether two values are equal, up to rounding in batches of another size."""
    if not isinstance(one, Tensor | np.ndarray):
        return bool(one == other)
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
