"""The data sets in a LightningDataModule."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset, default_collate

from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.errors import require, warn_user


def is_datamodule(value: object) -> bool:
    return hasattr(value, "train_dataloader") and hasattr(value, "prepare_data")


def datasets_of(datamodule: Any, client: Any, person: Any = None) -> tuple[Any, Any, Any]:
    """Return the clients' training sets (a list, or a mapping by name), the test set or None, and their persons."""
    datamodule.prepare_data()
    datamodule.setup("fit")
    loaders = datamodule.train_dataloader()
    loaders = getattr(loaders, "iterables", loaders)  # of a CombinedLoader
    if isinstance(loaders, DataLoader):
        train, person = _divided(loaders.dataset, client, person, datamodule)
    else:
        require(client is None, "client", "be left out if every client has a loader", client)
        named = loaders if isinstance(loaders, Mapping) else dict(enumerate(loaders))
        sets = {name: _dataset(loader, f"train_dataloader: {name}") for name, loader in named.items()}
        train = sets if isinstance(loaders, Mapping) else list(sets.values())  # type: ignore[assignment]
    test = _test_set(datamodule)
    each = [loaders] if isinstance(loaders, DataLoader) else list(named.values())
    if unused := sorted({what for loader in each for what in _unused(loader)}):
        warn_user(
            f"{', '.join(unused)} of the loaders are ignored: only their data sets are used, and batches are drawn by "
            "Poisson sampling with clients.batch_size"
        )
    return train, test, person


def _unused(loader: DataLoader) -> list[str]:
    """Return what a user gave a loader and a run does not use. To shuffle, or a default batch size, is no loss."""
    usual = ClientOptions().batch_size, 1
    if type(loader.batch_sampler) is not BatchSampler:
        return ["batch_sampler"]
    found = {
        f"batch_size {loader.batch_size}": loader.batch_size not in usual,
        "sampler": type(loader.sampler) not in (SequentialSampler, RandomSampler)
        or getattr(loader.sampler, "replacement", False),
        "collate_fn": loader.collate_fn is not default_collate,
    }
    return [what for what, differs in found.items() if differs]


def _divided(dataset: Any, client: Any, person: Any, datamodule: Any) -> tuple[dict[str, Any], Any]:
    """Return the records of each client of one data set by name, and the ids of their persons."""
    advice = "Or return one loader for each client, as in {'berlin': DataLoader(...), 'rome': ...}."
    must = "give the client of each record if there is one loader: a list, or the name of an attribute of the data set"
    require(client is not None, "client", must, None, advice)
    names = np.array([str(name) for name in _of_each("client", client, dataset, datamodule)])
    rows_of = {name: np.flatnonzero(names == name).tolist() for name in sorted(set(names.tolist()))}
    sets = {name: Subset(dataset, rows) for name, rows in rows_of.items()}
    if person is None:
        return sets, None
    ids = _of_each("person", person, dataset, datamodule)
    return sets, {name: [ids[row] for row in rows] for name, rows in rows_of.items()}


def _of_each(key: str, given: Any, dataset: Any, datamodule: Any) -> list[Any]:
    """Return the client or person of each record of one data set; `given` may name an attribute."""
    if isinstance(given, str):
        place = next((one for one in (dataset, datamodule) if hasattr(one, given)), None)
        require(place is not None, key, "be an attribute of the training set or of the datamodule", given)
        given = getattr(place, given)
    values = given.tolist() if hasattr(given, "tolist") else list(given)
    require(len(values) == len(dataset), key, f"give one {key} for each of the {len(dataset)} records", len(values))
    return values


def _test_set(datamodule: Any) -> Any:
    """Return the data set of `test_dataloader`, else that of `val_dataloader`, else None."""
    if _defines(datamodule, "test_dataloader"):
        datamodule.setup("test")
        return _dataset(_sole(datamodule.test_dataloader(), "test_dataloader"), "test_dataloader")
    if _defines(datamodule, "val_dataloader"):
        return _dataset(_sole(datamodule.val_dataloader(), "val_dataloader"), "val_dataloader")
    return None


def _sole(loaders: Any, where: str) -> Any:
    if isinstance(loaders, Sequence) and not isinstance(loaders, str):
        require(len(loaders) == 1, where, "return one loader, of the common test set", len(loaders))
        return loaders[0]
    return loaders


def _defines(datamodule: Any, hook: str) -> bool:
    """Return whether a class of the user has the hook; Lightning's raises an error."""
    kind = next((one for one in type(datamodule).__mro__ if hook in vars(one)), object)
    return kind is not object and not kind.__module__.startswith(("lightning.", "pytorch_lightning."))


def _dataset(loader: Any, where: str) -> Any:
    require(isinstance(loader, DataLoader), where, "be a DataLoader", type(loader).__name__)
    return loader.dataset
