"""Public data sets as normalised tensors, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.data.formats import Raw, check_labels
from dpfl_lightning.data.own_files import READERS
from dpfl_lightning.data.sources import SOURCES, find
from dpfl_lightning.errors import require, require_one_of, warn_user


@dataclass(frozen=True)
class Dataset:
    """A public data set: `x` [n, *X] float32, normalised; `y` [n] int64, or float32 for a regression (1 class).

    `origin` holds public facts for JSON: the name, the licence, and the constants of x = (raw / scale - mean) / std. It
    is empty for other records, also for files with other digests than the published ones: runs charge the account.
    """

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    def stored(self, public_records: int, use_public: bool) -> tuple[Tensor, Tensor, slice, slice, Tensor | None]:
        """Return one storage x, y of all records of a run; its rows to divide, of the test set, and public ones."""
        total = len(self.y)
        must = f"be at least 0 and below the {total} records"
        require(0 <= public_records < total, "data.public_records", must, public_records)
        private = total - public_records
        if use_public:
            advice = "Set it to the number of last training records that are public."
            require(public_records >= 6, "data.public_records", "be at least 6 for use_public", public_records, advice)
            test = slice(public_records - public_records // 6, public_records)
            return self.x[private:], self.y[private:], slice(0, test.start), test, None
        x, y = torch.cat([self.x, self.test_x]), torch.cat([self.y, self.test_y])
        public = torch.arange(private, total) if public_records else None
        return x, y, slice(0, private), slice(total, len(y)), public


def load(name: str, folder: str | None = None, download: bool = True) -> Dataset:
    """Return a data set by its name, normalised as (value / scale - mean) / std with constants of the literature.

    Nothing is charged for the constants, as they are not from the records; those of `diabetes` were computed from all
    its records when it was published. Raises UserError if a file is missing (`DataMissing`), truncated or corrupt.

    Args:
        name: a name in `SOURCES`, `BUILT_IN`, which need no files, or `READERS`, whose records count as your own.
        folder: folder of the files, or its parent if the folder is called `name`. None: the system's package, or the
            cache. Files without the published digests count as your own records, with a warning.
        download: whether to download missing files; False never opens a connection.

    Raises:
        UserError: the name is unknown, or a file is missing (`DataMissing`), truncated or corrupt.

    >>> digits = load("digits")
    >>> tuple(digits.x.shape), tuple(digits.test_x.shape), digits.num_classes
    ((1438, 1, 8, 8), (359, 1, 8, 8), 10)
    """
    require_one_of((*SOURCES, *BUILT_IN, *READERS), "data.name", name)
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if name in READERS:
        must, advice = f"be the folder with your files of {name}", "There are no published ones to download."
        require(folder is not None, "data.folder", must, None, advice)
        return Dataset(name, *READERS[name](Path(str(folder))))
    source = SOURCES[name]
    place = find(name, source, None if folder is None else Path(folder), download)
    raw = source.layout.read(place)
    check_labels(raw, source.num_classes, place)
    origin = {"name": name, "licence": source.licence, "scale": 255, "mean": source.mean, "std": source.std}
    data = _normalised(raw, source.num_classes, origin)
    if not (differing := source.differing(place)):
        return data
    warn_user(
        f"{place} does not hold {name} as published (SHA-256 of {', '.join(differing)}): its records count as "
        "your own, so that runs are charged to the account (privacy.account)"
    )
    return replace(data, origin={})


def _normalised(raw: Raw, num_classes: int, origin: Mapping[str, Any]) -> Dataset:
    scale, mean, std = (origin[name] for name in ("scale", "mean", "std"))

    def inputs(stored: np.ndarray) -> Tensor:
        values = stored.astype(np.float32)
        values -= mean * scale
        values /= std * scale
        return torch.from_numpy(values)

    x, y, test_x, test_y = raw
    labels, test_labels = (torch.from_numpy(stored.astype(np.int64)) for stored in (y, test_y))
    return Dataset(origin["name"], inputs(x), labels, inputs(test_x), test_labels, num_classes, origin)


def _digits() -> Dataset:
    """Return scikit-learn's 1,797 digits with a fixed public 80/20 split."""
    from sklearn.datasets import load_digits  # slow to import, and only this data set needs it

    bunch = load_digits()
    raw = _public_split(bunch.images[:, None], bunch.target)
    origin = {"name": "digits", "licence": "CC BY 4.0", "scale": 16, "mean": 0.5, "std": 0.5}
    return _normalised(raw, num_classes=10, origin=origin)


def _diabetes() -> Dataset:
    """Return 442 patients, ten features of variance 1; the target, a year's progression, as (score - 152) / 77."""
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes()
    x = torch.from_numpy((bunch.data * len(bunch.data) ** 0.5).astype(np.float32))
    y = torch.from_numpy(((bunch.target - 152) / 77).astype(np.float32))
    return Dataset(
        "diabetes", *_public_split(x, y), num_classes=1, origin={"name": "diabetes", "licence": "BSD 3-Clause"}
    )


def _public_split(x: Any, y: Any) -> tuple[Any, Any, Any, Any]:
    train, test = np.split(np.random.default_rng(0).permutation(len(y)), [round(0.8 * len(y))])
    return x[train], y[train], x[test], y[test]


#: name -> data set that scikit-learn contains
BUILT_IN: dict[str, Callable[[], Dataset]] = {"digits": _digits, "diabetes": _diabetes}
