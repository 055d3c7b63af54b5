"""Clients' records from tables: one row a record, in one table with a column of clients, or a table for each client."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfl_lightning.config.names import check_columns, check_names
from dpfl_lightning.config.yaml_text import inline
from dpfl_lightning.data.id_names import is_ambiguous, names_identifier, names_persons
from dpfl_lightning.data.raw_rows import cell_digest, joined_cells
from dpfl_lightning.errors import UserError, nearest, require, warn_user

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_OF_LINES = ("skiprows", "skipfooter")
_READ = ("sep", "decimal", "thousands", "encoding", "na_values", "keep_default_na", "date_format", *_OF_LINES)
MARKERS = ("?", "-", ".", "na", "n/a", "n.a.", "k.a.", "nan", "null", "none", "missing", "unknown")
NO_PERSON = "none"  # as `person`: each row is another person
OF_A_TABLE = ("read", "replace", "rename")
MOST_CATEGORIES = 20  # of a column of texts; identifiers and free text have more
MOST_FOOTERS = 3  # rows below a table that are recognised
MARK_WORDS = {"thousands": "separators of thousands", "decimal": "decimal commas"}
_MOST_FORMS = 8  # of texts in a column of numbers
_LONGEST_FORM = 14  # characters
_LEAST_ID = 1000  # smaller numbers under a name that also means a measurement are one
_MOST_CODES = 10  # numbers under the name of an id that may be codes
_FEWEST_NUMBERED = 10  # rows, whose numbers are no measurement
_FEWEST_RUNNING = 50  # rows in which measurements are no running numbers by chance
_MOST_SCALE = 100  # of a column, in units of the other columns
_FAR = 20  # deviations from the mean: of any column with this mean and deviation, at most 1/400 of the values
_MOST_FAR = 0.1  # of the values; scales of textbooks are often a median and quartiles, and tails are heavy


@dataclass(frozen=True)
class Table:
    """A table and how it is read, which only its owner knows.

    Args:
        source: a DataFrame, or the path of a CSV or Parquet file.
        read: arguments of `pandas.read_csv`: sep, decimal, thousands, encoding, na_values, keep_default_na,
            skiprows (lines above the names), skipfooter (rows at the end that are no records); and date_format, for all
            columns or by column.
        replace: {column: {value: other}}, for example where a site writes 1 for yes.
        rename: {column: other name}, before `replace`.
        texts: columns, by their other name, whose values are read from a CSV file as they are written: ids and dates.
        given_cells: those of `cells`, of rows that were read before.
    """

    source: Any
    key: str
    read: Mapping[str, Any] = field(default_factory=dict)
    replace: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    texts: Sequence[str] = ()
    given_cells: Mapping[str, np.ndarray] | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.read if name not in _READ]
        require(not unknown, "read", f"have keys of {', '.join(_READ)}", ", ".join(unknown))
        exact, advice = self.read.get("date_format") != "mixed", "It would guess which number is the day."
        require(exact, "read: date_format", "say how dates are written", "mixed", advice)
        for name, values in self.replace.items():
            require(isinstance(values, Mapping), f"replace: {name}", "map values to others", values)

    @functools.cached_property
    def frame(self) -> DataFrame:
        """The table with columns renamed and values replaced. Raises UserError."""
        frame = self._read()
        require_columns(frame, list(self.rename), "rename")
        frame = frame.rename(columns=dict(self.rename))
        columns = list(frame.columns)
        wrong = next((one for one in columns if not isinstance(one, str) or columns.count(one) > 1), None)
        advice = "Rename them, as in df.columns = [...]."
        require(wrong is None, self.key, "have columns of different names, each a text", wrong, advice)
        check_columns(f"columns of {self.key}", columns)
        require_columns(frame, list(self.replace), "replace")
        return frame.assign(**{name: _replaced(frame[name], values) for name, values in self.replace.items()})

    def _read(self) -> DataFrame:
        import pandas

        if not isinstance(self.source, str | Path):
            must = "be a DataFrame or a path"
            require(isinstance(self.source, pandas.DataFrame), self.key, must, type(self.source).__name__)
            return self.source
        path, must = Path(self.source), "be a DataFrame or the path of a file"
        beside = [str(path.with_name(one.name)) for one in path.parent.glob("*.*")]
        advice = f"There is no such file in {Path.cwd()}. {nearest(str(path), beside)}".rstrip()
        require(path.is_file(), self.key, must, str(path), advice)
        if path.suffix == ".parquet":
            return pandas.read_parquet(path)
        options = {name: value for name, value in self.read.items() if name != "date_format"}
        try:
            first = {name: value for name, value in options.items() if name != "skipfooter"}
            written = pandas.read_csv(path, **first, header=None, nrows=1, dtype=str).iloc[0]
            header = written.str.strip()
            as_written = [one for one, name in zip(written, header, strict=True) if self._is_text(name)]
            options |= {"dtype": dict.fromkeys(as_written, str)}
            options |= {"engine": "python"} if "skipfooter" in options else {}
            with warnings.catch_warnings():
                warnings.simplefilter("error", pandas.errors.ParserWarning)  # it would leave numbers out
                frame = pandas.read_csv(path, **options, index_col=False)
            frame = frame.assign(**_falsely_grouped(path, frame, options))
        except pandas.errors.ParserWarning:
            must = "have a name for each value of a row"
            advice = (
                "If a title or a comment is above the names, remove it, or write read: {skiprows: 1}. If ; separates "
            )
            advice += "values, write read: {sep: ';'}."
            require(False, self.key, must, "more values than names in the first line", advice)
        except (ValueError, LookupError) as error:  # of the parser, or of another encoding
            reason = str(error).strip().splitlines()[0]
            advice = "Write how it is written, as in read: {sep: ';', decimal: ',', encoding: latin-1}."
            raise UserError(f"`{self.key}` must be a table that can be read, got {path}: {reason}. {advice}") from None
        of_excel = str(header.iloc[0]).startswith("sep=")
        require(not of_excel, self.key, "begin with names of columns", header.iloc[0], "Write read: {skiprows: 1}.")
        named = header.notna().to_numpy()  # the numbers of rows that pandas writes have no name
        frame = frame.loc[:, named].rename(columns=str.strip) if len(named) == len(frame.columns) else frame
        header = header.dropna()
        twice = next(iter(header[header.duplicated()]), None)  # which pandas renames to name.1
        require(twice is None, self.key, "have columns of different names", twice, "Leave one of them out.")
        mark = next((one for one in ";\t|," if len(frame.columns) == 1 and one in str(frame.columns[0])), "")
        advice = f"Write read: {{sep: {mark!r}}}."
        require(not mark, self.key, "have several columns", f"one, with {mark!r} in its name", advice)
        require(len(frame) > 0, self.key, "have rows", "a first line alone")
        return frame

    @functools.cached_property
    def cells(self) -> Mapping[str, np.ndarray]:
        """Digests [n] of the cells of every column as they are written, also of those that nothing uses."""
        if self.given_cells is not None:
            return self.given_cells
        written = self._as_written()
        return {
            str(name): np.zeros(len(written), dtype=np.uint64)
            if _is_running(written.iloc[:, place])
            else _cell_digests(written.iloc[:, place])
            for place, name in enumerate(written.columns)
        }

    def _as_written(self) -> DataFrame:
        """Return the table with the texts of a CSV file, whatever `read` says of numbers and missing values."""
        import pandas

        frame = self.frame
        if not self._is_csv:
            return self._read()
        layout = {name: value for name, value in self.read.items() if name in ("sep", "encoding", *_OF_LINES)}
        layout |= {"engine": "python"} if "skipfooter" in layout else {}
        written = pandas.read_csv(self.source, **layout, index_col=False, dtype=str, keep_default_na=False)
        written = written.loc[:, [not str(name).startswith("Unnamed: ") for name in written.columns]]
        return written if len(written) == len(frame) else frame

    @property
    def _is_csv(self) -> bool:
        return isinstance(self.source, str | Path) and Path(self.source).suffix != ".parquet"

    @property
    def commas_separate(self) -> bool:
        """Whether it is a CSV file in which commas separate the columns."""
        return self._is_csv and self.read.get("sep", ",") == ","

    def _is_text(self, name: object) -> bool:
        return self.rename.get(str(name), str(name)) in self.texts

    def days(self, name: str, origin: str) -> Series:
        """Return a column of dates as days since the `origin`; missing ones stay missing."""
        import pandas

        column, given = self.frame[name], self.read.get("date_format", "ISO8601")
        written = given.get(name, "ISO8601") if isinstance(given, Mapping) else given
        try:
            texts = column if pandas.api.types.is_datetime64_any_dtype(column) else without_zone(column)
            dates = pandas.to_datetime(texts, format=written).dt.tz_localize(None)
        except (ValueError, TypeError, AttributeError):
            form = f'read: {{date_format: {{{name}: "%d/%m/%Y"}}}}'
            must, advice = f"hold dates written {written}", f"Write their form, as in {form}."
            if pandas.to_numeric(column, errors="coerce").notna().all():
                advice += " If they are days since 1899-12-30, as Excel counts, write them as dates."
            raise UserError(f"`{self.key}: {name}` must {must}, got others. {advice}") from None
        return (dates - pandas.Timestamp(origin)) / pandas.Timedelta(days=1)


def without_zone(column: Series) -> Series:
    """Return dates as texts in their own time: summer and winter have other offsets."""
    texts = column.map(as_text, na_action="ignore")
    return texts.astype("str").str.replace(r"(:\d\d(?:\.\d+)?) ?(?:Z|[+-]\d\d:?\d\d)$", r"\1", regex=True)


def _cell_digests(column: Series) -> np.ndarray:
    """Return a digest for each cell of a column [n], uint64; 0 where it is missing."""
    import pandas

    try:
        place_of, values = pandas.factorize(column)
    except TypeError:  # lists in cells
        place_of, values = pandas.factorize(column.map(str))
    digests = [cell_digest(str(column.name), as_text(value)) for value in values.tolist()]
    return np.array([*digests, 0], dtype=np.uint64)[place_of]  # of a missing one the place is -1


def _falsely_grouped(path: Path, frame: DataFrame, options: Mapping[str, Any]) -> dict[str, Series]:
    """Return as texts the columns of numbers in which a separator of thousands is not followed by three digits.

    `pandas` leaves out such a separator wherever it is: 42.9 would be 429.
    """
    import pandas

    mark = options.get("thousands")
    if mark is None:
        return {}
    others = {name: value for name, value in options.items() if name not in ("thousands", "decimal", "dtype")}
    texts = pandas.read_csv(path, **others, index_col=False, dtype=str)
    right = f"{_grouped(mark)}([{options.get('decimal', '.')}]\\d*)?([eE][-+]?\\d+)?"
    numbers = [name for name in frame if pandas.api.types.is_numeric_dtype(frame[name])]
    marked = {name: texts[name][texts[name].str.contains(mark, regex=False, na=False)] for name in numbers}
    return {name: texts[name] for name, ours in marked.items() if not ours.str.strip().str.fullmatch(right).all()}


def _grouped(thousands: str) -> str:
    """Return the pattern of a number with separators of thousands."""
    return f"[-+]?[1-9]\\d{{0,2}}([{thousands}]\\d{{3}})+"


def _replaced(column: Series, values: Mapping[Any, Any]) -> Series:
    """Return a column with other values; a number or a truth value that JSON has made a text is what it was."""
    import pandas

    by_text = {as_text(value): other for value, other in values.items()}
    column = column.map(lambda value: by_text.get(as_text(value), value))
    mixed = pandas.api.types.infer_dtype(column, skipna=True) in ("mixed", "mixed-integer")
    numbers = pandas.to_numeric(column, errors="coerce") if mixed else column
    return numbers if numbers.notna().equals(column.notna()) else column  # of texts, some of which became numbers


def as_text(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def table_of(given: Any, key: str, texts: Sequence[str] = (), **usual: Any) -> Table:
    """Return the table of a DataFrame, a path, or {file, read, replace, rename}, which come before the `usual` ones."""
    if isinstance(given, Table):
        return given
    own = dict(given) if isinstance(given, Mapping) else {"file": given}
    unknown = own.keys() - {"file", *OF_A_TABLE}
    require(not unknown and "file" in own, key, f"have file, {', '.join(OF_A_TABLE)}", ", ".join(own))
    options = {name: {**usual.get(name, {}), **own.get(name, {})} for name in OF_A_TABLE}
    return Table(own["file"], key, **options, texts=texts)


def files_in(folder: Path) -> list[Path]:
    """Return the files of tables in a folder, by name."""
    return sorted(one for one in folder.iterdir() if one.suffix in (".csv", ".parquet"))


def tables_of(given: Any, key: str = "df", **usual: Any) -> dict[str, Table]:
    """Return tables by name: those of a folder or of a mapping {client: table}, or one, "", see `table_of`."""
    if isinstance(given, str | Path) and Path(given).is_dir():
        files = files_in(Path(given))
        require(len(files) > 0, key, "have files NAME.csv or NAME.parquet, one for each client", str(given))
        given = {one.stem: one for one in files}
    if not isinstance(given, Mapping) or "file" in given:
        return {"": table_of(given, key, **usual)}
    check_names(key, given)
    return {str(name): table_of(one, f"client {name}", **usual) for name, one in given.items()}


@dataclass(frozen=True)
class Columns:
    """How the columns of a table become inputs and labels. Everything in it is public, and equal for all clients.

    Args:
        label: name of the column with the labels, or names of several.
        features: names of the input columns, in their order; None takes all others, by name.
        drop: names of columns that are no inputs if `features` is None.
        scale: mean and standard deviation of columns, by which they are normalised.
        categories: values of columns, each of which becomes a column of 0 and 1.
        fill: value in place of a missing one. A column of numbers gets another one beside it: 1 where it was missing.
        dates: first day of columns of dates, which become days since this day.
        units: units of columns, in which all clients measure.
        person: name of the column with each record's person, which is no input.
    """

    label: str | Sequence[str]
    features: Sequence[str] | None = None
    drop: Sequence[str] = ()
    scale: Mapping[str, Sequence[float]] = field(default_factory=dict)
    categories: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fill: Mapping[str, Any] = field(default_factory=dict)
    dates: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    person: str | None = None

    @property
    def labels(self) -> list[str]:
        return [self.label] if isinstance(self.label, str) else list(self.label)

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
        for key in ("scale", "categories", "fill", "dates", "units"):
            given = getattr(self, key)
            require(isinstance(given, Mapping), key, "be a mapping from columns", given)
            unknown = sorted(set(given) - {*features, *(self.labels if key == "units" else ())})
            require(not unknown, key, f"be of columns of features ({', '.join(features)})", unknown)
        for name, values in self.categories.items():
            listed = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
            must = "be a list of different values"
            require(listed and len(set(values)) == len(values), f"categories: {name}", must, values)
            check_columns(f"categories: {name}", values)
            known = self.fill.get(name, values[0]) in values
            require(known, f"fill: {name}", f"be one of the categories {list(values)}", self.fill.get(name))
        must = "be the public mean and standard deviation of a column of numbers"
        for name, pair in self.scale.items():
            fits = name not in self.categories and isinstance(pair, Sequence) and len(pair) == 2
            fits = fits and all(isinstance(one, int | float) for one in pair) and pair[1] > 0
            require(fits, f"scale: {name}", must, pair)
        twice = next((name for name in self.inputs if self.inputs.count(name) > 1), None)
        require(twice is None, "features", "give inputs of different names", twice, "Rename the column.")
        for name, origin in self.dates.items():
            require(_is_day(origin), f"dates: {name}", "be a day YYYY-MM-DD", origin)
        for name in self.fill.keys() - self.categories.keys():
            value, is_date = self.fill[name], name in self.dates
            fits = _is_day(value) if is_date else isinstance(value, int | float) and math.isfinite(value)
            must = "be a day YYYY-MM-DD" if is_date else "be a number, true or false if the column has no categories"
            require(fits, f"fill: {name}", must, value, "Name its categories if it is text." * (not is_date))

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs in their order.

        >>> Columns("ill", ["age", "sex"], scale={"age": (50, 20)}, categories={"sex": ["f", "m"]}).inputs
        ['age (scaled)', 'sex=f', 'sex=m']
        """
        names: list[str] = []
        for name in self.features or ():
            values = self.categories.get(name)
            scaled = f"{name} (scaled)" if name in self.scale else name
            names += [scaled] if values is None else [f"{name}={value}" for value in values]
            names += [f"{name} missing"] * (name in self.fill and values is None)
        return names

    def features_facts(self) -> dict[str, Any]:
        """Return how columns become inputs, ready for JSON."""
        return {
            "names": self.inputs,
            "scale": {name: list(map(float, pair)) for name, pair in self.scale.items()},
            "categories": {name: list(map(str, values)) for name, values in self.categories.items()},
        }

    def schema(self) -> dict[str, Any]:
        """Return what else clients must agree on, ready for JSON."""
        return {
            "columns": list(self.features or ()),
            "label": self.labels,
            "fill": {name: as_text(value) for name, value in self.fill.items()},
            "dates": {name: str(origin) for name, origin in self.dates.items()},
            "units": {name: str(unit) for name, unit in self.units.items()},
            "person": self.person,
        }

    def records(self, table: Table) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs [n, F] float32 and labels, [n] or, for a list of columns, [n, L]. Raises UserError."""
        frame = table.frame
        fewer = [name for name in (*self.labels, *(self.features or ())) if name not in frame.columns]
        got, advice = f"no {', '.join(fewer)}" if fewer else "", "Write rename: {its name: other name} if it has them."
        require(not fewer, table.key, "have the columns of label and features", got, advice)
        columns = [column for name in self.features or () for column in self._inputs_of(name, table)]
        for name in self.labels:
            missing, must = int(frame[name].isna().sum()), "have a label in every row"
            advice = (
                "Leave these rows out. If NA or None is a class, write read: {keep_default_na: false, na_values: ['']}."
            )
            require(missing == 0, f"{table.key}: {name}", must, f"{missing} without one", advice)
        x = np.stack(columns, axis=1)
        self._check_scales(x, table)
        _warn_of_copies(table, self.person)
        _warn_of_footer(frame[[*self.labels, *(self.features or ())]], table.key)
        self._warn_of_constants(table)
        return x, frame[self.label if isinstance(self.label, str) else self.labels].to_numpy()

    def _warn_of_constants(self, table: Table) -> None:
        """Tell the owner of the records, and nobody else, which inputs are the same in every row."""
        counts = {name: table.frame[name].nunique() for name in self.features or ()}
        missing = [name for name, count in counts.items() if count == 0]
        same = [name for name, count in counts.items() if count == 1 and not table.frame[name].isna().any()]
        for names, fact in ((missing, "missing in every row"), (same, "the same in every row")):
            if names and len(table.frame) > 1:
                warn_user(f"{table.key}: {', '.join(names)} is {fact}: nothing can be learnt from it here; check it")

    def _inputs_of(self, name: str, table: Table) -> list[np.ndarray]:
        """Return the inputs of a column, [n] float32 each."""
        import pandas

        here, column, value = f"{table.key}: {name}", table.frame[name], self.fill.get(name)
        if name in self.dates:
            column = table.days(name, self.dates[name])
            value = None if value is None else _days(value, self.dates[name])
        gaps = column.isna()
        if name not in self.categories and pandas.api.types.infer_dtype(column, skipna=True) == "boolean":
            column, value = column.astype(float), None if value is None else float(value)
        column = column.where(~gaps, value).infer_objects() if name in self.fill else column
        advice = f"Fill them with a public value, fill: {{{name}: ...}}, or leave the column out."
        require(name in self.fill or not gaps.any(), here, "have no missing value", int(gaps.sum()), advice)
        if name in self.categories:
            known = list(self.categories[name])
            unknown = next((value for value in column.unique().tolist() if value not in known), None)
            advice = f"If it means one of them, write replace: {{{name}: {{{inline(unknown)}: ...}}}}."
            require(unknown is None, here, f"hold the given categories only, {known}", unknown, advice)
            self._check_ids(column, here)
            return [(column == value).to_numpy(np.float32) for value in known]
        numeric = pandas.api.types.is_numeric_dtype(column) and not pandas.api.types.is_complex_dtype(column)
        require(numeric, here, "hold numbers", *not_numeric(column, table))
        if name not in self.dates:
            self._check_ids(column, here)
        values, measured = column.to_numpy(np.float64), ~gaps
        advice = f"Write replace: {{{name}: {{.inf: ...}}}}, or the mark of a missing value into read: {{na_values}}."
        require(bool(np.isfinite(values).all()), here, "be finite", "infinity", advice)
        _warn_of_marks(values[measured], table.frame[name][measured], here)
        mean, std = self.scale.get(name, (0.0, 1.0))
        scaled = ((values - mean) / std).astype(np.float32)
        if name in self.scale:
            self._check_far(scaled[measured], name, here)
        return [scaled, gaps.to_numpy(np.float32)] if name in self.fill else [scaled]

    def _check_ids(self, column: Series, here: str) -> None:
        """Raise UserError if a column holds ids, and warn the owner of the records if a stated one may hold them."""
        import pandas

        if len(column) <= 20:
            return
        is_category, numbers = column.name in self.categories, pandas.to_numeric(column, errors="coerce")
        stated, whole = is_category or column.name in self.scale, not numbers.isna().any()
        got = f"{'whole numbers' if whole else 'texts'} as an identifier has"
        must = f"hold {'categories' if is_category else 'measurements'}" + " if it has no scale" * (not stated)
        advice = "Leave it out of features, by drop" + ", or write its scale" * (not stated) + "."
        ids = is_identifier(column.astype(str)) if is_category else is_identifier(column, stated)
        require(not ids, here, must, got, advice)
        if stated and whole and may_name_persons(numbers):
            warn_user(f"{here} has {got}: if it names persons, write person: {column.name}, or drop it")

    def _check_far(self, scaled: np.ndarray, name: str, here: str) -> None:
        """Raise UserError if many values are far from the public mean, as in another unit, but not for a heavy tail."""
        far = int((np.abs(scaled) > _FAR).sum())
        must = f"be within {_FAR} deviations of its public mean, scale: {{{name}: {list(self.scale[name])}}}"
        na_values = f"read: {{na_values: {{{name}: [999]}}}}"
        advice = f"Write it in the unit of this scale, name marks of missing values, as in {na_values}, or agree "
        advice += "on another scale with all sites."
        fits = far < max(5, _MOST_FAR * len(scaled))
        require(fits, here, must, f"{far} of {len(scaled)} values that are not", advice)

    def _check_scales(self, x: np.ndarray, table: Table) -> None:
        """Raise UserError if a column has numbers that are far larger than those of the others.

        **Privacy** It looks at private records, so it is for their owner's eyes only.
        """
        sizes = np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=0))
        usual = max(1.0, float(np.median(sizes)))
        worst = int(sizes.argmax())
        name = self.inputs[worst].removesuffix(" (scaled)")
        far = bool(sizes[worst] > _MOST_SCALE * usual)
        advice = f"Write its public mean and standard deviation, scale: {{{name}: [mean, std]}}"
        if name in self.scale:
            advice = f"Check the unit in this file, or its scale: {{{name}: {list(self.scale[name])}}}"
        must = "have numbers of the scale of the other columns"
        require(not far, f"{table.key}: {name}", must, f"about {sizes[worst] / usual:.0e} times as large", advice)


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


def is_identifier(column: Series, has_scale: bool = False) -> bool:
    """Whether whole numbers, of which nearly every row has another one, are running, long, or called an identifier.

    Those of a column that is called a person's may repeat. A column that `has_scale` may have large numbers. Texts are
    ids if there are many of a person, or another one in nearly every row.
    """
    values = column.dropna()
    texts = column.dtype.kind not in "biuf"
    if len(values) < 2 or (not texts and (values != values.round()).any()):
        return False
    if names_persons(column.name) and not _measures(column):
        return values.nunique() > _MOST_CODES
    if values.nunique() <= 0.9 * len(values):
        return False
    if texts:
        return True
    running = values.max() - values.min() < 2 * len(values)
    if has_scale:
        return bool((running and len(values) >= _FEWEST_RUNNING) or names_persons(column.name))
    return bool(running or values.abs().max() >= 1e6 or names_identifier(column.name))


def may_name_persons(column: Series) -> bool:
    """Whether whole numbers of one length, of at least five digits, are different in most rows, as those of ids are."""
    values = column.dropna()
    if len(values) <= MOST_CATEGORIES or (values != values.round()).any() or values.min() < 10_000:
        return False
    whole = {str(int(one)) for one in values.unique()}
    counted_exactly = not all(one.endswith("0") for one in whole)  # as cells or costs in thousands are not
    return 2 * len(whole) > len(values) and len({*map(len, whole)}) == 1 and counted_exactly


def _measures(column: Series) -> bool:
    """Whether a column whose name may be that of an id or of a measurement, such as CPR, holds small numbers."""
    import pandas

    if column.nunique() <= 2:
        return True
    return is_ambiguous(column.name) and pandas.api.types.is_numeric_dtype(column) and column.max() < _LEAST_ID


def require_persons_stated(frame: DataFrame, key: str) -> None:
    """Raise UserError if rows repeat in a column that names persons: a guarantee for rows is less than it seems."""
    named = [name for name in frame if names_persons(name) and not _measures(frame[name])]
    several = [str(name) for name in named if frame[name].dropna().duplicated().any()]
    advice = f"Write person: {several[0]}, or person: none if each row is another person." if several else ""
    got = f"null, although values of {', '.join(several)} repeat" if several else ""
    require(not several, f"{key}: person", "name the column with the id of each row's person", got, advice)


def _warn_of_copies(table: Table, person: str | None) -> None:
    """Warn of rows that equal another one in all columns, if a column tells nearly all others apart, or all do."""
    rows = table.frame.drop_duplicates()
    copies = len(table.frame) - len(rows)
    several = copies >= len(rows) > 20 and np.gcd.reduce(table.frame.value_counts(dropna=False)) > 1  # whole tables
    if several or (copies and any(rows[name].nunique() > max(20, 0.9 * len(rows)) for name in rows)):
        means = "with privacy.unit record " * (person is not None)
        means += "the guarantee is for one of them, and k rows of a person have up to k times its epsilon"
        warn_user(f"{table.key}: {copies} of {len(table.frame)} rows are copies of another row: {means}; remove them")


def warn_of_equal_tables(inputs: Mapping[str, np.ndarray]) -> None:
    """Warn if two tables have the same rows of inputs [n, F], in any order, more than by chance."""
    seen: dict[bytes, str] = {}
    for name, x in inputs.items() if len(inputs) > 1 else ():
        rows = np.unique(x, axis=0)
        first = seen.setdefault(rows.tobytes(), name) if len(rows) > 20 else name
        if first != name:
            warn_user(f"{name} has the inputs of {first}, row by row: is one table given twice?")


def _warn_of_footer(frame: DataFrame, key: str) -> None:
    """Warn if the last row has the means or the sums of two or more columns in the rows above it."""
    above, last = frame.iloc[:-1].select_dtypes("number"), frame.iloc[-1]
    above = above.loc[:, above.nunique() > 2]
    for one in (above.mean(), above.sum()):
        rounded = [round(one[name], len(as_text(last[name]).partition(".")[2])) for name in above]
        if len(rounded) > 1 and all(np.isclose(rounded, [float(last[name]) for name in above])):
            told = f"the last row holds the means or sums of the columns {', '.join(map(str, above))}"
            warn_user(f"{key}: {told}: if it is no record, write read: {{skipfooter: 1}}")


def _days(day: Any, origin: Any) -> float:
    return float((np.datetime64(str(day), "D") - np.datetime64(str(origin), "D")) / np.timedelta64(1, "D"))


def require_filled(label: Any, classes: Any, by_column: Mapping[str, Any]) -> None:
    """Raise UserError that names all values which are null, as `dpfl init` writes them."""
    nulls = ["label"] if label is None else []
    for key, given in by_column.items():
        names = [str(name) for name, value in given.items() if value is None] if isinstance(given, Mapping) else []
        nulls += [f"{key}: {', '.join(names)}"] if names else []
    if nulls and classes is None:
        nulls.append("classes, if labels are texts")
    advice = f"Write public values, or leave the column or the line out: {'; '.join(nulls)}."
    require(not nulls, "data.init_args", "have no null that is still to be filled in", f"{len(nulls)} keys", advice)


def _is_day(text: Any) -> bool:
    try:
        np.datetime64(str(text), "D")
    except ValueError:
        return False
    return len(str(text)) == 10


def number_marks(column: Series, commas_separate: bool) -> dict[str, str]:
    """Return the thousands and decimal of `read` for a column of texts that are all numbers; empty for others.

    Without other signs, 1,234 is a decimal number, unless commas separate the columns, so that decimals have points.
    """
    texts = column.dropna().astype(str).str.strip()
    texts = texts[~texts.str.lower().isin(MARKERS)]
    for thousands, decimal in (",.", ".,", " ,", " .", "',", "'."):
        group, part = _grouped(thousands), f"([{decimal}]\\d+)?"
        fits = texts.str.fullmatch(f"{group}{part}|[-+]?\\d+{part}").all()
        is_grouped = texts.str.contains(thousands, regex=False).any()
        both = is_grouped and texts.str.contains(decimal, regex=False).any()
        never_decimal = is_grouped and (thousands in " '" or (commas_separate and thousands == ","))
        if fits and (both or never_decimal or texts.str.fullmatch(f"{group}[{thousands}]\\d{{3}}").any()):
            return {"thousands": thousands} | ({"decimal": ","} if decimal == "," else {})
    is_decimal = texts.str.fullmatch(r"[-+]?\d+(,\d+)?([eE][-+]?\d+)?").all() and texts.str.contains(",").any()
    return {"decimal": ","} if is_decimal else {}


def not_numeric(column: Series, table: Table) -> tuple[str, str]:
    """Return what a column that is not numeric seems to hold, without its values, and the way out."""
    import pandas

    texts = column.astype(str).str.strip()
    marked = texts.str.lower().isin(MARKERS)
    numeric = pandas.to_numeric(texts[~marked], errors="coerce").notna().all()
    if marked.any() and numeric:
        marks = sorted(set(texts[marked]))
        return f"{', '.join(marks)} beside numbers", f"Write read: {{na_values: {marks}}}, and fill."
    read, written = table.read, number_marks(column, table.commas_separate)
    if numeric and not read.keys() & MARK_WORDS.keys():
        return "numbers written as texts", "Make them numbers, as by pandas.to_numeric."
    if numeric or written:
        other = any(read.get(key, mark) != mark for key, mark in written.items())
        other = other or written.get("decimal", "") == read.get("thousands")
        got = " and ".join(MARK_WORDS[name] for name in written) or "decimal points"
        advice = (
            "A file has one decimal mark and one separator of thousands: write all columns in one way, or drop this."
        )
        return f"numbers with {got}", advice if numeric or other else f"Write read: {inline(written)}."
    numbers = pandas.to_numeric(column, errors="coerce").notna() | column.isna()
    last = len(column) - 1 - int(np.flatnonzero(numbers.to_numpy())[-1]) if numbers.any() else 0
    if 0 < last <= MOST_FOOTERS and numbers.iloc[: len(column) - last].all():
        where = "the last row" if last == 1 else f"the last {last} rows"
        return f"text in {where} alone", f"If this is a footer, such as a total, write read: {{skipfooter: {last}}}."
    if pandas.to_datetime(texts, errors="coerce", format="mixed").notna().all():
        advice = f"Write a public first day, as in dates: {{{column.name}: 2020-01-01}}, or leave the column out."
        return "dates", advice
    if texts.nunique() > MOST_CATEGORIES and (forms := _beside_numbers(texts)):
        words = [form for form in forms if "0" not in form]
        advice = f"Name words for a missing value in read: {{na_values: {words}}}, " if words else "Write "
        advice += f"others by replace: {{{column.name}: {{'<5': 2.5}}}}, or numbers alone into the file."
        return f"numbers beside {', '.join(map(repr, forms[:3]))}", advice
    if names_persons(column.name):
        return "ids of persons", f"Write person: {column.name}, or leave the column out of features."
    if texts.nunique() > MOST_CATEGORIES:
        return "many different texts", "Identifiers and free text are like that: leave the column out of features."
    advice = (
        f'Name its public categories, as in categories={{"{column.name}": ["a", "b"]}}, or leave it out of features.'
    )
    return str(column.dtype), advice


def _beside_numbers(texts: Series) -> list[str]:
    """Return the few forms of other texts, with digits as 0, in a column with numbers in most rows; [] for others."""
    forms = texts.str.replace(r"\d+([.,]\d+)*([eE][-+]?\d+)?", "0", regex=True)
    other = sorted(set(forms) - {"0", "-0", "+0", "nan"})
    like_numbers = forms.str.fullmatch(r"\W*0([ '\u2019\u00a0\u202f]0)*[^0]*").mean() > 0.5
    short = all(len(one) <= _LONGEST_FORM for one in other)  # a longer one may be a note on a patient
    return other if like_numbers and short and len(other) <= _MOST_FORMS else []


def by_client(table: Table, client: str | None) -> dict[str, Table]:
    """Return the rows of each client, in the order of the clients' names; without a column `client` those of one."""
    if client is None:
        return {"0": table}
    frame = table.frame
    require(isinstance(client, str), "client", "be the name of one column", client)
    require_columns(frame, [client], "client")
    require(not frame[client].isna().any(), f"df: {client}", "name a client in every row", "a missing value")
    groups = list(frame.groupby(client, sort=True))
    names = [str(name) for name, _ in groups]
    require(len(set(names)) == len(names), f"df: {client}", "hold different names as text", names)
    check_names(f"df: {client}", names)
    places = frame.groupby(client, sort=True).indices
    cells = {column: of_it for column, of_it in table.cells.items() if table.rename.get(column, column) != client}
    tables = {}
    for name, (value, rows) in zip(names, groups, strict=True):
        own = {column: of_it[places[value]] for column, of_it in cells.items()}
        tables[name] = Table(rows, f"client {name}", table.read, given_cells=own)
    return tables


def _is_running(column: Series) -> bool:
    """Return whether a column numbers its rows, or their days, one by one: tables of other holders have the same."""
    import pandas

    numbers = pandas.to_numeric(column, errors="coerce")
    if numbers.isna().any():
        days = pandas.to_datetime(column, errors="coerce", format="ISO8601")
        numbers = (days - pandas.Timestamp(0)) / pandas.Timedelta(days=1)
    if len(column) < _FEWEST_NUMBERED or numbers.isna().any() or (numbers != numbers.round()).any():
        return False
    return bool(numbers.is_unique and numbers.max() - numbers.min() < 2 * len(numbers))


def cells_of(tables: Sequence[Table]) -> np.ndarray:
    """Return digests [n, C] of the cells of all rows of some tables, uint64; 0 for an empty cell."""
    return joined_cells([np.stack([*table.cells.values()], axis=1) for table in tables])


def require_columns(frame: DataFrame, names: Sequence[str], key: str) -> None:
    """Raise UserError unless a table has these columns."""
    unknown, known = next((name for name in names if name not in frame.columns), None), list(map(str, frame.columns))
    must = f"name {'a column' if key in ('client', 'person') else 'columns'} of the table ({', '.join(known)})"
    require(unknown is None, key, must, unknown, nearest(str(unknown), known))
