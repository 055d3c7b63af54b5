"""The data sets in a LightningDataModule."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Subset

from dpfl_lightning.data.loaders import records_of, warn_of_batch_sizes
from dpfl_lightning.errors import require
from dpfl_lightning.privacy.accounting.units import ID_KEY

_OF_BATCHES = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")


def is_datamodule(value: object) -> bool:
    return hasattr(value, "train_dataloader") and hasattr(value, "prepare_data")


def datasets_of(datamodule: Any, client: Any, ids: Any = None) -> tuple[Any, Any, Any]:
    """Return the training sets or loaders (a list, or a mapping by name), that of the test or None, and ids."""
    for hook in _OF_BATCHES:
        advice = "Change records in the data set, or in the model."
        require(
            not _defines(datamodule, hook), hook, "be left out: there are no batches of a loader", "a method", advice
        )
    datamodule.prepare_data()
    datamodule.setup("fit")
    loaders = datamodule.train_dataloader()
    loaders = getattr(loaders, "iterables", loaders)  # of a CombinedLoader
    if isinstance(loaders, DataLoader):
        warn_of_batch_sizes([loaders])
        train, ids = _divided(loaders, client, ids, datamodule)
    else:
        require(client is None, "client", "be left out if every client has a loader", client)
        named = loaders if isinstance(loaders, Mapping) else dict(enumerate(loaders))
        sets = {name: _loader(loader, f"train_dataloader: {name}") for name, loader in named.items()}
        train = sets if isinstance(loaders, Mapping) else list(sets.values())  # type: ignore[assignment]
    return train, _test_set(datamodule), ids


def _divided(loader: DataLoader, client: Any, given: Any, datamodule: Any) -> tuple[dict[str, Any], Any]:
    """Return the records of each client of one data set by name, and the ids of their units."""
    advice = "Or return one loader for each client, as in {'berlin': DataLoader(...), 'rome': ...}."
    must = "give the client of each record if there is one loader: a list, or the name of an attribute of the data set"
    require(client is not None, "client", must, None, advice)
    dataset, records = loader.dataset, records_of(loader, "train_dataloader")
    names = np.array([str(name) for name in _of_each("client", client, dataset, datamodule)])
    rows_of = {name: np.flatnonzero(names == name).tolist() for name in sorted(set(names.tolist()))}
    sets = {name: Subset(records, rows) for name, rows in rows_of.items()}
    if given is None:
        return sets, None
    ids = _of_each(ID_KEY, given, dataset, datamodule)
    return sets, {name: [ids[row] for row in rows] for name, rows in rows_of.items()}


def _of_each(key: str, given: Any, dataset: Any, datamodule: Any) -> list[Any]:
    """Return the client or the id of each record of one data set; `given` may name an attribute."""
    if isinstance(given, str):
        place = next((one for one in (dataset, datamodule) if hasattr(one, given)), None)
        require(place is not None, key, "be an attribute of the training set or of the datamodule", given)
        given = getattr(place, given)
    values = given.tolist() if hasattr(given, "tolist") else list(given)
    require(len(values) == len(dataset), key, f"give one {key} for each of the {len(dataset)} records", len(values))
    return values


def _test_set(datamodule: Any) -> Any:
    """Return the loader of `test_dataloader`, else that of `val_dataloader`, else None."""
    if _defines(datamodule, "test_dataloader"):
        datamodule.setup("test")
        return _loader(_sole(datamodule.test_dataloader(), "test_dataloader"), "test_dataloader")
    if _defines(datamodule, "val_dataloader"):
        return _loader(_sole(datamodule.val_dataloader(), "val_dataloader"), "val_dataloader")
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


def _loader(loader: Any, where: str) -> Any:
    require(isinstance(loader, DataLoader), where, "be a DataLoader", type(loader).__name__)
    return loader
