"""Data sets of the papers that have no published files: LEAF's FEMNIST, and loans of Lending Club.

They are read from a folder of the user's. Their records count as the user's own: runs are charged to the account.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.config.reading import read_text
from dpfl_lightning.errors import UserError, require

CLASSES, SIDE = 62, 28  # of FEMNIST: digits, capitals and small letters; pixels
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
    advice = "Run LEAF's data/femnist/preprocess.sh, and set data.folder to its folder `data`."
    require(bool(files), str(folder), "hold JSON files of LEAF", "none", advice)
    parts = [one for file in files for one in _writers(file)]
    x = torch.from_numpy(np.concatenate([pixels for pixels, _ in parts]))
    return x.mul_(2).sub_(1).view(-1, 1, SIDE, SIDE), torch.from_numpy(np.concatenate([labels for _, labels in parts]))


def _writers(file: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    try:
        content = json.loads(read_text(file))
        users = [content["user_data"][name] for name in content["users"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"`{file}` must be a JSON file of LEAF, with users and user_data, got {type(error).__name__}: {error}."
        ) from None
    for user in users:
        x, y = np.asarray(user["x"], dtype=np.float32), np.asarray(user["y"], dtype=np.int64)
        fits = x.shape == (len(y), SIDE * SIDE) and (not len(y) or (x.min() >= 0 and x.max() <= 1))
        require(fits, str(file), f"hold images of {SIDE * SIDE} numbers from 0 to 1, one per label", x.shape)
        known = not len(y) or (y.min() >= 0 and y.max() < CLASSES)
        require(known, str(file), f"hold classes from 0 to {CLASSES - 1}", sorted({*y.tolist()})[-1:])
        yield x, y


def lending_club(folder: Path, public: int = PUBLIC_LOANS) -> Records:
    """Read the CSV file of accepted loans: ten principal components of a loan, and its interest rate in percent.

    Encoding, components and their scale are those of the first `public` loans, which take no further part. The papers
    take them from all records, which no guarantee covers. Columns with missing values there, identifiers and free
    text are left out. Every fifth of the other loans is a test record.
    """
    import pandas as pd

    files = sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")])
    advice = "Such as accepted_2007_to_2018Q4.csv."
    require(len(files) == 1, str(folder), "hold one CSV file of loans", [one.name for one in files], advice)
    table = pd.read_csv(files[0], low_memory=False)
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
