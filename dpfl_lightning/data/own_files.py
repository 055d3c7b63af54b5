"""Data sets of the papers that have no published files: LEAF's FEMNIST, and loans of Lending Club.

They are read from a folder of the user's. Their records count as the user's own: runs are charged to the account.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.config.reading import expecting, read_json
from dpfl_lightning.errors import UserError, in_one_line, require, shortened

CLASSES, SIDE = 62, 28  # of FEMNIST: digits, capitals and small letters; pixels
_LEAF = "Run LEAF's data/femnist/preprocess.sh, and set data.folder to its folder `data`."
_LOANS = "Such as accepted_2007_to_2018Q4.csv."
PUBLIC_LOANS = 10_000  # first rows, by which the columns of all others are encoded; they are in no client
COMPONENTS = 10  # principal components of a loan
_RATE, _FORBIDDEN = "int_rate", ("id", "member_id", "url", "desc", "title", "emp_title")
_MOST_CATEGORIES = 60


class Records(NamedTuple):
    """Training and test records: inputs `[n, *X]` float32 and labels `[n]`."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int


def femnist(folder: Path) -> Records:
    """Read the JSON files that LEAF's `preprocess.sh` writes into `train` and `test`; pixels become -1 (ink) to 1.

    Writers are not kept apart: the papers divide records anew. Raises UserError for files that are not LEAF's.
    """
    (x, y), (test_x, test_y) = (_of_leaf(folder / part) for part in ("train", "test"))
    return Records(x, y, test_x, test_y, CLASSES)


def _of_leaf(folder: Path) -> tuple[Tensor, Tensor]:
    files = sorted(folder.glob("*.json"))
    require(bool(files), str(folder), "hold JSON files of LEAF", "none", _LEAF)
    parts = [one for file in files for one in _writers(file)]
    x = torch.from_numpy(np.concatenate([pixels for pixels, _ in parts]))
    return x.mul_(2).sub_(1).view(-1, 1, SIDE, SIDE), torch.from_numpy(np.concatenate([labels for _, labels in parts]))


def _writers(file: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the images `[n, 784]` float32 in [0, 1] and labels `[n]` int64 of each writer in a file."""
    content = read_json(file, advice=_LEAF)
    with expecting(file, "be a JSON file of LEAF, with users and user_data", _LEAF):
        users = [content["user_data"][name] for name in content["users"]]
        read = [(np.asarray(one["x"], dtype=np.float32), np.asarray(one["y"], dtype=np.float64)) for one in users]
    require(bool(read), str(file), "hold at least one writer", "none", _LEAF)
    for x, y in read:
        fits = y.ndim == 1 and x.shape == (len(y), SIDE * SIDE) and bool(((x >= 0) & (x <= 1)).all())
        require(fits, str(file), f"hold images of {SIDE * SIDE} numbers from 0 to 1, one per label", x.shape, _LEAF)
        unknown = sorted({*y.tolist()} - {*range(CLASSES)})
        require(not unknown, str(file), f"hold classes from 0 to {CLASSES - 1}", unknown[:1], _LEAF)
    return [(x, y.astype(np.int64)) for x, y in read]


def lending_club(folder: Path, public: int = PUBLIC_LOANS) -> Records:
    """Read the CSV file of accepted loans: ten principal components of a loan, and its interest rate in percent.

    Encoding, components and their scale are those of the first `public` loans, which take no further part. The papers
    take them from all records, which no guarantee covers. Columns with missing values there, identifiers and free
    text are left out. Every fifth of the other loans is a test record.
    """
    import pandas as pd

    files = sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")])
    require(len(files) == 1, str(folder), "hold one CSV file of loans", [one.name for one in files], _LOANS)
    table = _table(files[0])
    require(_RATE in table, str(files[0]), f"have a column {_RATE}", list(table)[:5])
    rate = pd.to_numeric(table[_RATE].astype(str).str.rstrip("% "), errors="coerce")
    table, rate = table[rate.notna()].reset_index(drop=True), rate[rate.notna()].reset_index(drop=True)
    require(len(table) > public + COMPONENTS, str(files[0]), f"have more than {public + COMPONENTS} loans", len(table))
    encoded = _encoded(table.drop(columns=[_RATE, *(one for one in _FORBIDDEN if one in table)]), public)
    x, y = torch.from_numpy(_components(encoded, public)), torch.from_numpy(rate.to_numpy(np.float32))
    rows = torch.arange(public, len(y))
    test = rows[::5]
    train = rows[(rows - public) % 5 != 0]
    return Records(x[train], y[train], x[test], y[test], 1)


def _table(file: Path) -> Any:
    """Read a CSV file, which may be larger than the files that `read_bytes` reads."""
    import pandas as pd

    try:
        return pd.read_csv(file, low_memory=False)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        got = shortened(in_one_line(error))
        raise UserError(f"`{file}` must be a CSV file of loans, got {got}. {_LOANS}") from None


def _encoded(table: Any, public: int) -> np.ndarray:
    """Return a number for each value of the columns that are complete and have few categories among public rows."""
    first, columns = table[:public], []
    for name in table:
        if first[name].isna().any():
            continue
        if table[name].dtype.kind in "ifb":
            columns.append(table[name].astype(float).fillna(first[name].astype(float).mean()).to_numpy())
        elif (known := first[name].astype(str).unique()).size <= _MOST_CATEGORIES:
            places: Mapping[str, int] = {one: place for place, one in enumerate(sorted(known))}
            columns.append(table[name].astype(str).map(places).fillna(len(places)).to_numpy(float))
    must = f"have at least {COMPONENTS} columns without missing values"
    require(len(columns) >= COMPONENTS, "data.folder", must, len(columns))
    return np.stack(columns, axis=1)


def _components(encoded: np.ndarray, public: int) -> np.ndarray:
    """Return principal components of variance 1, `[n, COMPONENTS]`; mean, scale and axes are those of public rows."""
    first = encoded[:public]
    scaled = (encoded - first.mean(axis=0)) / np.where(first.std(axis=0) > 0, first.std(axis=0), 1.0)
    _, _, axes = np.linalg.svd(scaled[:public], full_matrices=False)
    components = scaled @ axes[:COMPONENTS].T
    spread = components[:public].std(axis=0)
    return (components / np.where(spread > 0, spread, 1.0)).astype(np.float32)


#: name -> what reads its files
READERS: dict[str, Callable[[Path], Records]] = {"femnist": femnist, "lending_club": lending_club}
