"""Clients' records from tables: one row a record, in one table with a column of clients, or a table for each client."""

from __future__ import annotations

import functools
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
from dpfl_lightning.privacy.accounting.units import ID_KEY

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_OF_LINES = ("skiprows", "skipfooter")
_READ = ("sep", "decimal", "thousands", "encoding", "na_values", "keep_default_na", "date_format", *_OF_LINES)
MARKERS = ("?", "-", ".", "na", "n/a", "n.a.", "k.a.", "nan", "null", "none", "missing", "unknown")
NO_IDS = "none"  # as `person`: each row is another person
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


def may_be_ids(column: Series) -> bool:
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


def require_ids_stated(frame: DataFrame, key: str) -> None:
    """Raise UserError if rows repeat in a column that names persons: a guarantee for rows is less than it seems."""
    named = [name for name in frame if names_persons(name) and not _measures(frame[name])]
    several = [str(name) for name in named if frame[name].dropna().duplicated().any()]
    advice = f"Write person: {several[0]}, or person: none if each row is another person." if several else ""
    got = f"null, although values of {', '.join(several)} repeat" if several else ""
    require(not several, f"{key}: person", "name the column with the id of each row's person", got, advice)


def warn_of_copies(table: Table, person: str | None) -> None:
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


def warn_of_footer(frame: DataFrame, key: str) -> None:
    """Warn if the last row has the means or the sums of two or more columns in the rows above it."""
    above, last = frame.iloc[:-1].select_dtypes("number"), frame.iloc[-1]
    above = above.loc[:, above.nunique() > 2]
    for one in (above.mean(), above.sum()):
        rounded = [round(one[name], len(as_text(last[name]).partition(".")[2])) for name in above]
        if len(rounded) > 1 and all(np.isclose(rounded, [float(last[name]) for name in above])):
            told = f"the last row holds the means or sums of the columns {', '.join(map(str, above))}"
            warn_user(f"{key}: {told}: if it is no record, write read: {{skipfooter: 1}}")


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
        given = f"columns: {{{column.name}: {{since: 2020-01-01}}}}"
        advice = f"Write a public first day, as in {given}, or leave the column out."
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
    given = f'columns: {{{column.name}: {{categories: ["a", "b"]}}}}'
    return str(column.dtype), f"Name its public categories, {given}, or leave it out of features."


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
    must = f"name {'a column' if key in ('client', ID_KEY) else 'columns'} of the table ({', '.join(known)})"
    require(unknown is None, key, must, unknown, nearest(str(unknown), known))
