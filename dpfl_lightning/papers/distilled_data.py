"""A distilled set for your training: loaded from a folder or from MLflow, as a Dataset or a LightningDataModule."""

from __future__ import annotations

from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpfl_lightning.data import load
from dpfl_lightning.errors import require, require_whole
from dpfl_lightning.papers.sets.distilled_set import CARD, TENSORS, DistilledSet

Transform = Callable[[Tensor], Any]


def load_distilled(source: str | Path, uri: str | None = None, transform: Transform | None = None) -> DistilledSet:
    """Load a set from a folder, or from an MLflow run `runs:/<run id>` in the store `uri` (see `store_uri`).

    Raises UserError if there is no set or run, the set is damaged, or the store does not answer.

    **Privacy** Post-processing: the set's guarantee (`card["guarantee"]`) covers everything that is computed from it.

    Args:
        source: the folder of the run that made the set, or `runs:/<run id>`.
        uri: the MLflow store, by default the one of a run without `tracking.uri`.
        transform: applied to each image `[*X]` that is read by its index.
    """
    is_path = isinstance(source, (str, Path))
    require(is_path, "source", "be the folder of a distilled set, or runs:/<run id>", source)
    if not str(source).startswith("runs:/"):
        return DistilledSet.load(source, transform)
    from dpfl_lightning.reporting.mlflow import downloaded  # imports MLflow

    with downloaded(str(source).removeprefix("runs:/"), (TENSORS, CARD), uri) as folder:
        return DistilledSet.load(folder, transform)


class DistilledDataModule(LightningDataModule):
    """Trains on a distilled set and tests on the official test set of the data from which it was made.

    Test records are normalised as the images of the set (`distilled.card["origin"]`). They are fetched if necessary, as
    in a run. There is no validation set: choose settings on other records than those of the test set.

    Args:
        source: a `DistilledSet`, the folder of one, or `runs:/<run id>`; see `load_distilled`.
        batch_size: images of a training batch, >= 1.
        transform: applied to each training image `[*X]`, not to test records.
        test: the test set, a Dataset of pairs (x, y) normalised as the set's images; required by `test_dataloader` if
            the set was made from your own data.
        uri: the MLflow store of `runs:/<run id>`.
        folder: folder with the files of the official test set; None uses the system's package or the cache.
        download: download missing files and verify their checksum.

    Attributes:
        distilled: the set, with its `card`.

    Raises:
        UserError: there is no set, or test records have another shape than its images.
    """

    def __init__(
        self,
        source: str | Path | DistilledSet,
        batch_size: int = 32,
        transform: Transform | None = None,
        test: Dataset[Any] | None = None,
        uri: str | None = None,
        folder: str | None = None,
        download: bool = True,
    ) -> None:
        super().__init__()
        require_whole("batch_size", batch_size, 1)
        made = source if isinstance(source, DistilledSet) else load_distilled(source, uri)
        self.distilled = DistilledSet(made.x, made.y, made.card, transform or made.transform)
        self.batch_size, self._test, self._files = batch_size, test, (folder, download)

    def prepare_data(self) -> None:
        self._official_test()  # fetches files once, before several processes read them

    def train_dataloader(self) -> DataLoader[Any]:
        require(len(self.distilled) > 0, "distilled", "hold at least one image", 0)
        return DataLoader(self.distilled, self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader[Any]:
        test, shape = self._official_test() if self._test is None else self._test, tuple(self.distilled.x.shape[1:])
        advice = "Pass a Dataset of (x, y) as DistilledDataModule(..., test=...)."
        made_from = self.distilled.card.get("data", {}) or {}
        must = "be given for a set of your own data"
        require(test is not None, "test", must, made_from.get("class_path"), advice)
        sized = isinstance(test, Sized) and hasattr(test, "__getitem__")
        require(sized, "test", "be a map-style Dataset, with a length", type(test).__name__, advice)
        assert test is not None and isinstance(test, Sized)  # for mypy
        require(len(test) > 0, "test", "hold at least one record", 0)
        got = tuple(test[0][0].shape)
        require(got == shape, "test", f"have records of shape {shape}, as the images of the set", got)
        return DataLoader(test, 256)

    def _official_test(self) -> Dataset[Any] | None:
        name = (self.distilled.card.get("origin") or {}).get("name")
        if name is None or self._test is not None:
            return None
        require(isinstance(name, str), "card.origin.name", "be text or null", name)
        data = load(name, *self._files)
        return TensorDataset(data.test_x, data.test_y)
