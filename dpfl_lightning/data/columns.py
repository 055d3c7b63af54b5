"""What is public of the columns of tables: how they become inputs and labels, equal for all clients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfl_lightning.config.names import check_columns
from dpfl_lightning.config.yaml_text import inline
from dpfl_lightning.data.frames import (
    Table,
    as_text,
    is_identifier,
    may_be_ids,
    not_numeric,
    require_columns,
    warn_of_copies,
    warn_of_footer,
)
from dpfl_lightning.errors import nearest, require, warn_user

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_MOST_SCALE = 100  # of a column, in units of the other columns
_FAR = 20  # deviations from the mean: of any column with this mean and deviation, at most 1/400 of the values
_MOST_FAR = 0.1  # of the values; scales of textbooks are often a median and quartiles, and tails are heavy


@dataclass(frozen=True)
class Column:
    """What is public of one column. All of it may be left out: numbers then become inputs as they are.

    Args:
        scale: mean and standard deviation, by which numbers (of dates, days) are normalised.
        categories: values of texts, each of which becomes an input of 0 and 1.
        fill: value in place of a missing one. A column of numbers gets another input: 1 where it was missing.
        since: first day of a column of dates, "2020-01-01", which become days since then.
        unit: unit in which all clients measure.
    """

    scale: Sequence[float] | None = None
    categories: Sequence[Any] | None = None
    fill: Any = None
    since: Any = None
    unit: str | None = None

    @classmethod
    def of(cls, key: str, given: Any) -> Column:
        """Return a column as a configuration writes it, {scale: [50, 20]}. Raises UserError."""
        if isinstance(given, Column):
            return given
        known = [one.name for one in dataclasses.fields(cls)]
        require(isinstance(given, Mapping), key, f"be a mapping with some of {', '.join(known)}", given)
        other = next((name for name in given if name not in known), None)
        require(other is None, key, f"have some of {', '.join(known)} only", other, nearest(str(other), known))
        return cls(**given)

    @property
    def kind(self) -> str:
        """What the values are: "category", "date" or "number"."""
        return "category" if self.categories is not None else "date" if self.since is not None else "number"

    def check(self, key: str, is_label: bool) -> None:
        """Raise UserError, about the `key` of the column, if its parts do not fit."""
        values, pair, fill = self.categories, self.scale, self.fill
        given = [name for name, value in vars(self).items() if value is not None and name != "unit"]
        require(not (is_label and given), key, "have a unit alone, as the column is a label", ", ".join(given))
        if values is not None:
            listed = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
            must = "be a list of different values"
            require(listed and len(set(values)) == len(values), f"{key}: categories", must, values)
            check_columns(f"{key}: categories", values)
        if pair is not None:
            fits = self.kind != "category" and isinstance(pair, Sequence) and len(pair) == 2
            fits = fits and all(isinstance(one, int | float) for one in pair) and pair[1] > 0
            must = "be the public mean and standard deviation of a column of numbers"
            require(fits, f"{key}: scale", must, pair)
        if self.since is not None:
            require(_is_day(self.since), f"{key}: since", "be a day YYYY-MM-DD", self.since)
        if fill is None:
            return
        fits, must, advice = {
            "category": (fill in (values or ()), f"be one of the categories {list(values or ())}", ""),
            "date": (_is_day(fill), "be a day YYYY-MM-DD", ""),
            "number": (
                isinstance(fill, int | float) and math.isfinite(fill),
                "be a number, true or false if the column has no categories",
                "Name its categories if it is text.",
            ),
        }[self.kind]
        require(fits, f"{key}: fill", must, fill, advice)

    def inputs(self, name: str) -> list[str]:
        """Return the names of the inputs that a column of this name becomes.

        >>> Column(scale=(50, 20), fill=60).inputs("age"), Column(categories=["f", "m"]).inputs("sex")
        (['age (scaled)', 'age missing'], ['sex=f', 'sex=m'])
        """
        if self.categories is not None:
            return [f"{name}={value}" for value in self.categories]
        return [f"{name} (scaled)" if self.scale else name] + [f"{name} missing"] * (self.fill is not None)

    def facts(self) -> dict[str, Any]:
        """Return what is given, ready for JSON."""
        found = {
            "scale": None if self.scale is None else list(map(float, self.scale)),
            "categories": None if self.categories is None else list(map(str, self.categories)),
            "fill": None if self.fill is None else as_text(self.fill),
            "since": None if self.since is None else str(self.since),
            "unit": None if self.unit is None else str(self.unit),
        }
        return {name: value for name, value in found.items() if value is not None}

    def arrays(self, name: str, table: Table) -> list[np.ndarray]:
        """Return the inputs of a column, [n] float32 each. Raises UserError, which the owner of the table sees."""
        import pandas

        here, column, value = f"{table.key}: {name}", table.frame[name], self.fill
        if self.since is not None:
            column = table.days(name, self.since)
            value = None if value is None else _days(value, self.since)
        gaps = column.isna()
        if self.kind != "category" and pandas.api.types.infer_dtype(column, skipna=True) == "boolean":
            column, value = column.astype(float), None if value is None else float(value)
        column = column if value is None else column.where(~gaps, value).infer_objects()
        advice = f"Fill them with a public value, {_written(name, 'fill', '...')}, or leave the column out."
        require(value is not None or not gaps.any(), here, "have no missing value", int(gaps.sum()), advice)
        if self.categories is not None:
            known = list(self.categories)
            unknown = next((value for value in column.unique().tolist() if value not in known), None)
            advice = f"If it means one of them, write replace: {{{name}: {{{inline(unknown)}: ...}}}}."
            require(unknown is None, here, f"hold the given categories only, {known}", unknown, advice)
            self._check_ids(column, here)
            return [(column == value).to_numpy(np.float32) for value in known]
        numeric = pandas.api.types.is_numeric_dtype(column) and not pandas.api.types.is_complex_dtype(column)
        require(numeric, here, "hold numbers", *not_numeric(column, table))
        if self.since is None:
            self._check_ids(column, here)
        values, measured = column.to_numpy(np.float64), ~gaps
        advice = f"Write replace: {{{name}: {{.inf: ...}}}}, or the mark of a missing value into read: {{na_values}}."
        require(bool(np.isfinite(values).all()), here, "be finite", "infinity", advice)
        _warn_of_marks(values[measured], table.frame[name][measured], here)
        mean, std = self.scale or (0.0, 1.0)
        scaled = ((values - mean) / std).astype(np.float32)
        if self.scale is not None:
            self._check_far(scaled[measured], name, here)
        return [scaled] if self.fill is None else [scaled, gaps.to_numpy(np.float32)]

    def _check_ids(self, column: Series, here: str) -> None:
        """Raise UserError if a column holds ids, and warn the owner of the records if a stated one may hold them."""
        import pandas

        if len(column) <= 20:
            return
        is_category, numbers = self.kind == "category", pandas.to_numeric(column, errors="coerce")
        stated, whole = is_category or self.scale is not None, not numbers.isna().any()
        got = f"{'whole numbers' if whole else 'texts'} as an identifier has"
        must = f"hold {'categories' if is_category else 'measurements'}" + " if it has no scale" * (not stated)
        advice = "Leave it out of features, by drop" + ", or write its scale" * (not stated) + "."
        ids = is_identifier(column.astype(str)) if is_category else is_identifier(column, stated)
        require(not ids, here, must, got, advice)
        if stated and whole and may_be_ids(numbers):
            warn_user(f"{here} has {got}: if it names persons, write person: {column.name}, or drop it")

    def _check_far(self, scaled: np.ndarray, name: str, here: str) -> None:
        """Raise UserError if many values are far from the public mean, as in another unit, but not for a heavy tail."""
        far = int((np.abs(scaled) > _FAR).sum())
        must = f"be within {_FAR} deviations of its public mean, {_written(name, 'scale', list(self.scale or ()))}"
        na_values = f"read: {{na_values: {{{name}: [999]}}}}"
        advice = f"Write it in the unit of this scale, name marks of missing values, as in {na_values}, or agree "
        advice += "on another scale with all sites."
        fits = far < max(5, _MOST_FAR * len(scaled))
        require(fits, here, must, f"{far} of {len(scaled)} values that are not", advice)


def _written(name: str, part: str, value: Any) -> str:
    """Return a part of a column as a configuration writes it."""
    return f"columns: {{{name}: {{{part}: {value}}}}}"


_AS_IT_IS = Column()


@dataclass(frozen=True)
class Columns:
    """Which columns of a table become inputs and labels, and how.

    Args:
        label: name of the column with the labels, or names of several.
        features: names of the input columns, in their order; None takes all others, by name.
        drop: names of columns that are no inputs if `features` is None.
        columns: what is public of a column, by its name.
        person: name of the column with each record's person, which is no input.
    """

    label: str | Sequence[str]
    features: Sequence[str] | None = None
    drop: Sequence[str] = ()
    columns: Mapping[str, Column] = field(default_factory=dict)
    person: str | None = None

    @classmethod
    def given(cls, label: Any, features: Any, drop: Any, columns: Any, person: Any) -> Columns:
        """Return columns as a configuration writes them. Raises UserError."""
        require(isinstance(columns, Mapping), "columns", "be a mapping {COLUMN: {scale: [mean, std], ...}}", columns)
        found = {str(name): Column.of(f"columns: {name}", one) for name, one in columns.items()}
        return cls(label, features, drop, found, person)

    @property
    def labels(self) -> list[str]:
        return [self.label] if isinstance(self.label, str) else list(self.label)

    @property
    def dates(self) -> list[str]:
        """The names of columns of dates."""
        return [name for name, one in self.columns.items() if one.kind == "date"]

    def of(self, tables: Mapping[str, Table], client: str | None = None) -> Columns:
        """Return these columns with the names of the features. Raises UserError if they do not fit the tables."""
        fits = isinstance(self.label, str | Sequence) and len(set(self.labels)) == len(self.labels) > 0
        require(fits, "label", "be the name of a column, or a list of different names", self.label)
        require(client not in self.labels, "label", "be another column than client", self.label)
        (first_name, first), *others = tables.items()
        require_columns(first.frame, self.labels, "label")
        if self.person is not None:
            require(isinstance(self.person, str), "person", "be the name of one column", self.person)
            require_columns(first.frame, [self.person], "person")
            apart = self.person not in (client, *self.labels)
            require(apart, "person", "be another column than label and client", self.person)
        for key, names in (("features", self.features or ()), ("drop", self.drop if self.features is None else ())):
            listed = isinstance(names, Sequence) and not isinstance(names, str)
            require(listed, key, "be a list of columns", names)
            require_columns(first.frame, names, key)
        unused = {client, self.person, *self.labels, *(() if self.features is not None else self.drop)}
        features = self.features
        if features is None:
            every = {name: set(table.frame.columns) - unused for name, table in tables.items()}
            features = sorted(every[first_name])
            for name, table in others:
                more, fewer = sorted(every[name] - every[first_name]), sorted(every[first_name] - every[name])
                got = " and ".join(filter(None, [f"no columns {fewer}" * bool(fewer), f"also {more}" * bool(more)]))
                advice = "Name them in drop, or name features."
                require(not got, table.key, f"have the columns of {first.key}", got, advice)
        columns = dataclasses.replace(self, features=tuple(features), drop=())
        columns._check(unused)
        return columns

    def _check(self, unused: set[str | None]) -> None:
        features = list(self.features or ())
        require(len(features) >= 1, "features", "name at least one column", features)
        wrong = next((name for name in features if name in unused or features.count(name) > 1), None)
        require(wrong is None, "features", "be different columns other than client, person and label", wrong)
        unknown = sorted(set(self.columns) - {*features, *self.labels})
        require(not unknown, "columns", f"be columns of features ({', '.join(features)}) or labels", unknown)
        for name, column in self.columns.items():
            column.check(f"columns: {name}", name in self.labels)
        twice = next((name for name in self.inputs if self.inputs.count(name) > 1), None)
        require(twice is None, "features", "give inputs of different names", twice, "Rename the column.")

    def __getitem__(self, name: str) -> Column:
        return self.columns.get(name, _AS_IT_IS)

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs in their order.

        >>> Columns("ill", ["age", "sex"], columns={"sex": Column(categories=["f", "m"])}).inputs
        ['age', 'sex=f', 'sex=m']
        """
        return [one for name in self.features or () for one in self[name].inputs(name)]

    def features_facts(self) -> dict[str, Any]:
        """Return how columns become inputs, ready for JSON."""
        return {"names": self.inputs, "encoding": {name: one.facts() for name, one in self.columns.items()}}

    def schema(self) -> dict[str, Any]:
        """Return what else clients must agree on, ready for JSON."""
        return {"columns": list(self.features or ()), "label": self.labels, "person": self.person}

    def records(self, table: Table) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs [n, F] float32 and labels, [n] or, for a list of columns, [n, L]. Raises UserError."""
        frame = table.frame
        fewer = [name for name in (*self.labels, *(self.features or ())) if name not in frame.columns]
        got, advice = f"no {', '.join(fewer)}" if fewer else "", "Write rename: {its name: other name} if it has them."
        require(not fewer, table.key, "have the columns of label and features", got, advice)
        arrays = [one for name in self.features or () for one in self[name].arrays(name, table)]
        for name in self.labels:
            missing, must = int(frame[name].isna().sum()), "have a label in every row"
            advice = (
                "Leave these rows out. If NA or None is a class, write read: {keep_default_na: false, na_values: ['']}."
            )
            require(missing == 0, f"{table.key}: {name}", must, f"{missing} without one", advice)
        x = np.stack(arrays, axis=1)
        self._check_scales(x, table)
        warn_of_copies(table, self.person)
        warn_of_footer(frame[[*self.labels, *(self.features or ())]], table.key)
        self._warn_of_constants(frame, table.key)
        return x, frame[self.label if isinstance(self.label, str) else self.labels].to_numpy()

    def _warn_of_constants(self, frame: DataFrame, key: str) -> None:
        """Tell the owner of the records, and nobody else, which inputs are the same in every row."""
        counts = {name: frame[name].nunique() for name in self.features or ()}
        missing = [name for name, count in counts.items() if count == 0]
        same = [name for name, count in counts.items() if count == 1 and not frame[name].isna().any()]
        for names, fact in ((missing, "missing in every row"), (same, "the same in every row")):
            if names and len(frame) > 1:
                warn_user(f"{key}: {', '.join(names)} is {fact}: nothing can be learnt from it here; check it")

    def _check_scales(self, x: np.ndarray, table: Table) -> None:
        """Raise UserError if a column has numbers that are far larger than those of the others.

        **Privacy** It looks at private records, so it is for their owner's eyes only.
        """
        sizes = np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=0))
        usual = max(1.0, float(np.median(sizes)))
        worst = int(sizes.argmax())
        name = self.inputs[worst].removesuffix(" (scaled)")
        far = bool(sizes[worst] > _MOST_SCALE * usual)
        advice = f"Write its public mean and standard deviation, {_written(name, 'scale', '[mean, std]')}"
        if (scale := self[name].scale) is not None:
            advice = f"Check the unit in this file, or its scale, {_written(name, 'scale', list(scale))}"
        must = "have numbers of the scale of the other columns"
        require(not far, f"{table.key}: {name}", must, f"about {sizes[worst] / usual:.0e} times as large", advice)


def require_filled(label: Any, classes: Any, columns: Any) -> None:
    """Raise UserError that names all values which are null, as `dpfl init` writes them."""
    nulls = ["label"] if label is None else []
    for name, given in columns.items() if isinstance(columns, Mapping) else ():
        parts = [part for part, value in given.items() if value is None] if isinstance(given, Mapping) else []
        nulls += [f"columns: {name}: {', '.join(parts)}"] if parts else []
    if nulls and classes is None:
        nulls.append("classes, if labels are texts")
    advice = f"Write public values, or leave the column or the line out: {'; '.join(nulls)}."
    require(not nulls, "data.init_args", "have no null that is still to be filled in", f"{len(nulls)} keys", advice)


def _warn_of_marks(values: np.ndarray, written: Series, here: str) -> None:
    """Warn of the smallest or largest value if it repeats far from all others, as a mark of a missing one does."""
    for value in {values.min(), values.max()} if len(values) else ():
        rest, rows = values[values != value], np.flatnonzero(values == value)
        if len(rows) < 3 or len(np.unique(rest)) < 3:
            continue
        far = np.abs(rest - value).min() > 3 * np.ptp(rest)
        if far or (value < 0 <= rest.min() and len(np.unique(rest)) > 10):
            mark = as_text(written.iloc[rows[0]])
            way_out = f"read: {{na_values: {{{written.name}: [{mark}]}}}}, and fill"
            found = f"{mark} in {len(rows)} rows, far from all other values"
            warn_user(f"{here} is {found}: if it marks a missing one, write {way_out}")


def _days(day: Any, origin: Any) -> float:
    return float((np.datetime64(str(day), "D") - np.datetime64(str(origin), "D")) / np.timedelta64(1, "D"))


def _is_day(text: Any) -> bool:
    try:
        np.datetime64(str(text), "D")
    except ValueError:
        return False
    return len(str(text)) == 10
