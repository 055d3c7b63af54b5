"""Clients' records from a table: one row a record, one column the client."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfl_lightning.config.names import check_columns, check_names
from dpfl_lightning.errors import nearest, require

if TYPE_CHECKING:
    from pandas import DataFrame


def frame_of(table: Any, key: str = "df") -> "DataFrame":
    """Return the table that the argument `key` names, which may be the path of a CSV or Parquet file."""
    import pandas

    if isinstance(table, str | Path):
        must = "be a DataFrame or the path of a file"
        require(Path(table).is_file(), key, must, str(table), "There is no such file.")
        table = pandas.read_parquet(table) if Path(table).suffix == ".parquet" else pandas.read_csv(table)
    require(isinstance(table, pandas.DataFrame), key, "be a DataFrame or a path", type(table).__name__)
    columns = list(table.columns)
    wrong = next((one for one in columns if not isinstance(one, str) or columns.count(one) > 1), None)
    advice = "Rename them, as in df.columns = [...]."
    require(wrong is None, key, "have columns of different names, each a text", wrong, advice)
    check_columns(f"columns of {key}", columns)
    return table


def clients_of_frame(table: Any, client: str | None, label: str | Sequence[str]) -> dict[str, "DataFrame"]:
    """Return the rows of each client, in the order of the clients' names; without a column `client` those of one."""
    frame = frame_of(table)
    labels = [label] if isinstance(label, str) else label
    fits = isinstance(labels, Sequence) and len(labels) > 0 and len(set(labels)) == len(labels)
    require(fits, "label", "be the name of a column, or a list of different names", label)
    _check_columns(frame, labels, "label")
    if client is None:
        return {"0": frame}
    require(isinstance(client, str), "client", "be the name of one column", client)
    _check_columns(frame, [client], "client")
    require(client not in labels, "label", "be another column than client", label)
    require(not frame[client].isna().any(), f"df: {client}", "name a client in every row", "a missing value")
    groups = list(frame.groupby(client, sort=True))
    names = [str(name) for name, _ in groups]
    require(len(set(names)) == len(names), f"df: {client}", "hold different names as text", names)
    check_names(f"df: {client}", names)
    return {name: rows for name, (_, rows) in zip(names, groups, strict=True)}


def records_of_frame(
    frame: "DataFrame",
    where: str,
    label: str | Sequence[str],
    features: Sequence[str],
    scale: Mapping[str, Sequence[float]],
    categories: Mapping[str, Sequence[Any]],
) -> tuple[np.ndarray, np.ndarray]:
    """Return x [n, F] float32, with one column for each category of a column in `categories`, and labels [n],
    or [n, L] for a list of columns."""
    import pandas

    labels = [label] if isinstance(label, str) else list(label)
    _check_columns(frame, labels, "label")
    _check_columns(frame, features, "features")
    columns = []
    for name in features:
        column, here = frame[name], f"{where}: {name}"
        _check_complete(column, here)
        if name in categories:
            known = list(categories[name])
            unknown = next((value for value in column.unique().tolist() if value not in known), None)
            require(unknown is None, here, f"hold the given categories only, {known}", unknown)
            columns += [(column == value).to_numpy(np.float32) for value in known]
            continue
        numeric = pandas.api.types.is_numeric_dtype(column) and not pandas.api.types.is_complex_dtype(column)
        require(numeric, here, "hold numbers", *_what_it_holds(column))
        mean, std = scale.get(name, (0.0, 1.0))
        columns.append(((column.to_numpy(np.float64) - mean) / std).astype(np.float32))
    for name in labels:
        _check_complete(frame[name], f"{where}: {name}")
    return np.stack(columns, axis=1), frame[labels[0] if isinstance(label, str) else labels].to_numpy()


def _what_it_holds(column: Any) -> tuple[str, str]:
    """Return what a column that is not numeric seems to hold, without its values, and the way out."""
    import pandas

    texts = column.astype(str)
    if pandas.to_datetime(texts, errors="coerce", format="mixed").notna().all():
        return "dates", "Turn them into numbers, such as days since a public date, or leave the column out of features."
    if texts.nunique() > max(20, len(texts) / 2):
        return "names", "Nearly every row has another one, as an identifier has: leave the column out of features."
    advice = (
        f'Name its public categories, as in categories={{"{column.name}": ["a", "b"]}}, or leave it out of features.'
    )
    return str(column.dtype), advice


def features_of(
    columns: Sequence[str], scale: Mapping[str, Sequence[float]], categories: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Return the names of the inputs of `records_of_frame`, `scale` and `categories`, ready for JSON.

    >>> features_of(["age", "sex"], {"age": (50, 20)}, {"sex": ["f", "m"]})["names"]
    ['age (scaled)', 'sex=f', 'sex=m']
    """
    names: list[str] = []
    for name in columns:
        values = categories.get(name)
        scaled = f"{name} (scaled)" if name in scale else name
        names += [scaled] if values is None else [f"{name}={value}" for value in values]
    constants = {name: list(map(float, pair)) for name, pair in scale.items()}
    return {
        "names": names,
        "scale": constants,
        "categories": {name: list(map(str, categories[name])) for name in categories},
    }


def check_choices(
    frame: "DataFrame",
    others: Sequence[str],
    features: Sequence[str],
    scale: Mapping[str, Sequence[float]],
    categories: Mapping[str, Sequence[Any]],
) -> None:
    """Raise UserError unless `features` are different columns of the table that are not among `others`, client and
    label, and `scale` and `categories` are of different ones of them, and complete."""
    listed = isinstance(features, Sequence) and not isinstance(features, str)
    require(listed, "features", "be a list of columns", features)
    _check_columns(frame, features, "features")
    require(len(features) >= 1, "features", "name at least one column", list(features))
    wrong = next((name for name in features if name in others or list(features).count(name) > 1), None)
    require(wrong is None, "features", "be different columns other than client and label", wrong)
    for key, columns in (("scale", scale), ("categories", categories)):
        unknown = sorted(set(columns) - set(features))
        require(not unknown, key, f"be of columns of features ({', '.join(features)})", unknown)
    for name, values in categories.items():
        listed = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
        must = "be a list of different values"
        require(listed and len(set(values)) == len(values), f"categories: {name}", must, values)
        check_columns(f"categories: {name}", values)
    for name, values in scale.items():
        fits = name not in categories and len(values) == 2 and values[1] > 0
        require(fits, f"scale: {name}", "be the public mean and standard deviation of a column of numbers", values)


def _check_columns(frame: "DataFrame", names: Sequence[str], key: str) -> None:
    unknown, known = next((name for name in names if name not in frame.columns), None), list(map(str, frame.columns))
    must = f"name {'a column' if key == 'client' else 'columns'} of the table ({', '.join(known)})"
    require(unknown is None, key, must, unknown, nearest(str(unknown), known))


def _check_complete(column: Any, where: str) -> None:
    missing, advice = int(column.isna().sum()), "Fill it with a public value: df.fillna({...})."
    require(missing == 0, where, "have no missing value", missing, advice)
