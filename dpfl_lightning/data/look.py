"""How a CSV file is written and what its columns hold, for the eyes of its owner: values of its rows are private."""

from __future__ import annotations

import codecs
import csv
import dataclasses
import io
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl_lightning.config.yaml_text import inline
from dpfl_lightning.data.frames import (
    MARK_WORDS,
    MARKERS,
    MOST_CATEGORIES,
    MOST_FOOTERS,
    Table,
    is_identifier,
    may_be_ids,
    not_numeric,
    number_marks,
    without_zone,
)
from dpfl_lightning.data.id_names import names_persons
from dpfl_lightning.errors import require

if TYPE_CHECKING:
    from pandas import Series

_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_DATES = ("%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%Y/%m/%d", "%d/%m/%Y %H:%M", "%d.%m.%Y %H:%M")
_OF_A_LABEL = re.compile("label|target|outcome|class|died|dead|death|mortal|survi|diagnos|readmi|event|^ill$|^y$")
_OF_A_SUM = re.compile("(grand |sub)?(total|sum|summe|gesamt|insgesamt)s?:?")
_OF_A_FOOTER = re.compile("(total|sum|summe|gesamt|insgesamt|mean|average|source|quelle|note|end of)\\b|#")


@dataclass(frozen=True)
class Column:
    """A column of a private table.

    Args:
        kind: number, category, date, or other: identifiers and free text.
        facts: what its rows hold, in words. They are private.
        may_be_label: whether it has few values.
        values: the values of a category, or of a label. They are private.
    """

    name: str
    kind: str
    facts: str
    may_be_label: bool = False
    values: tuple[str, ...] = ()


def look(path: Path) -> tuple[dict[str, Any], list[Column]]:
    """Return the options with which `from_dataframe` can read a CSV or Parquet file, and its columns.

    Raises UserError if it is no table.
    """
    read = {} if path.suffix == ".parquet" else _how_written(path)
    table = Table(str(path), str(path), read)
    frame, commas = table.frame, table.commas_separate
    texts = {name: column for name in frame if _is_text(column := frame[name])}
    marks = sorted({mark for column in texts.values() for mark in _marks(column)})
    read |= {"na_values": marks} if marks else {}
    if any("decimal" in number_marks(column, commas) for column in texts.values()):
        read |= {"decimal": ","}
    if read:
        table = Table(str(path), str(path), read)
        frame = table.frame
    marks_of = {name: _grouped(frame[name], read, commas) for name in frame}
    thousands = {name: found["thousands"] for name, found in marks_of.items() if "thousands" in found}
    unsure = {name for name in thousands if "thousands" not in number_marks(frame[name], commas_separate=False)}
    if thousands:
        read |= {"thousands": next(iter(thousands.values()))}
        dated = [name for name in frame if _is_text(frame[name]) and _date_forms(frame[name])]
        table = Table(str(path), str(path), read, texts=dated)
        frame = table.frame
    forms = {name: found for name in frame if _is_text(frame[name]) and (found := _date_forms(frame[name]))}
    written = {str(name): found[0] for name, found in forms.items() if "ISO8601" not in found}
    one_form = len(set(written.values())) == 1 and len(written) == len(forms)
    read |= {"date_format": next(iter(written.values())) if one_form else written} if written else {}
    columns = [_described(frame[name], forms.get(name, []), table) for name in frame]
    return read, [_to_check(one, frame[one.name], read, one.name in unsure) for one in columns]


def likely_label(columns: list[Column]) -> str | None:
    """Return the only column whose name is one of an outcome and which has few values, or None."""
    named = [one.name for one in columns if one.may_be_label and _OF_A_LABEL.search(one.name.lower())]
    return named[0] if len(named) == 1 else None


def likely_person(columns: list[Column]) -> str | None:
    """Return the only column whose name is one of a person's identifier, or None."""
    named = [one.name for one in columns if names_persons(one.name)]
    return named[0] if len(named) == 1 else None


def differences(looked: Mapping[str, tuple[Mapping[str, Any], Sequence[Column]]], label: str | None) -> list[str]:
    """Return in words what differs between files, by their names: private, as it tells values of their rows."""
    every = {name: {one.name: one for one in columns} for name, (_, columns) in looked.items()}
    lines = []
    for column in dict.fromkeys(one for columns in every.values() for one in columns):
        there = {name: columns[column] for name, columns in every.items() if column in columns}
        if len(there) < len(every):
            lines.append(f"{column}: not in {', '.join(name for name in every if name not in there)}")
        of_values = column == label or all(one.kind == "category" for one in there.values())
        facts = {name: ", ".join(one.values) if of_values else one.kind for name, one in there.items()}
        lines += _if_different(column, facts)
    for key in dict.fromkeys(key for read, _ in looked.values() for key in read):
        written = {name: inline(read[key]) if key in read else "default" for name, (read, _) in looked.items()}
        lines += _if_different(f"read: {key}", written)
    return lines


def _if_different(what: str, of_file: Mapping[str, str]) -> list[str]:
    """Return one line that groups files by what they hold, or nothing if all hold the same."""
    files: dict[str, list[str]] = {}
    for name, value in of_file.items():
        files.setdefault(value, []).append(name)
    groups = (f"{value} in {', '.join(names)}" for value, names in files.items())
    return [f"{what}: {'; '.join(groups)}"] if len(files) > 1 else []


def _how_written(path: Path) -> dict[str, Any]:
    require(path.is_file(), "--from", "be a CSV or Parquet file", str(path), "There is no such file.")
    content = path.read_bytes()
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS.items() if content.startswith(mark)), "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        encoding, text = "cp1252", content.decode("cp1252", errors="replace")
    read = {} if encoding.startswith("utf-8") else {"encoding": encoding}
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    above = next((number for number, line in enumerate(lines) if not _is_above_names(line)), 0)
    sep, header = _separator(lines[above]), _cells(lines[above])
    must = f"have the names of its columns in the first line of {path.name}"
    require(len(header) > 1, "--from", must, "one name", "If a title or a comment is above the names, remove it.")
    advice = "Names of columns leave the site: the values of a row must not. Write the names into the first line."
    is_row = any(re.fullmatch(r"[-+]?[\d.,:/-]*\d[\d.,:/-]*", cell.strip()) for cell in header)
    require(not is_row, "--from", must, "a number", advice)
    footers = _footers(csv.reader(io.StringIO("\n".join(lines[above:]), newline=""), delimiter=sep))
    found = {"sep": sep, "skiprows": above, "skipfooter": footers}
    return {name: value for name, value in found.items() if value not in (",", 0)} | read


def _is_above_names(line: str) -> bool:
    """Whether it is blank, a comment or Excel's sep=;. A title is not known from a name, which leaves the site."""
    return bool(re.fullmatch(r"\W*(sep=.\W*)?", line)) or (line.startswith("#") and len(_cells(line)) == 1)


def _separator(line: str) -> str:
    return max(",;\t|", key=lambda sep: len(next(csv.reader([line], delimiter=sep), [])))


def _cells(line: str) -> list[str]:
    return next(csv.reader([line.strip()], delimiter=_separator(line)), [])


def _footers(rows: Iterator[list[str]]) -> int:
    """Return how many of the last rows are no records: a total, or a comment in fewer cells than a row has."""
    width = len(next(rows, []))
    last = list(deque(rows, MOST_FOOTERS + 1))[::-1]
    no_record = [len(row) < width or _is_footer([cell.strip().lower() for cell in row]) for row in last]
    count = no_record.index(False) if False in no_record else 0
    return count if any(last[:count]) else 0  # lines without anything are read as none


def _is_footer(cells: list[str]) -> bool:
    return bool(_OF_A_FOOTER.match(cells[0])) or any(map(_OF_A_SUM.fullmatch, cells))


def _is_text(column: Series) -> bool:
    return column.dtype == object or str(column.dtype) in ("str", "string")


def _values(column: Series) -> Series:
    return column.dropna().astype(str).str.strip()


def _marks(column: Series) -> set[str]:
    """Return what stands for a missing value: signs, or words beside numbers."""
    values = _values(column)
    marked = values.str.lower().isin(MARKERS)
    numbers = _numbers(values[~marked])
    found = set(values[marked])
    return found if len(numbers) and numbers.all() else found & {"?", "-", "."}


def _numbers(values: Series) -> Series:
    return values.str.fullmatch(r"[-+]?(\d+|[1-9]\d{0,2}([.,]\d{3})+)([.,]\d+)?([eE][-+]?\d+)?")


def _grouped(column: Series, read: dict[str, Any], commas_separate: bool) -> dict[str, str]:
    """Return `number_marks` of a text column; beside decimal commas, 1.234 is grouped, too."""
    if not _is_text(column):
        return {}
    whole = _values(column).str.fullmatch(r"[-+]?[1-9]\d{0,2}(\.\d{3})*(,\d+)?")
    points = "decimal" in read and len(whole) and whole.all()
    return {"thousands": "."} if points else number_marks(column, commas_separate)


def _to_check(column: Column, values: Series, read: Mapping[str, Any], is_unsure: bool) -> Column:
    """Return the column with a word on its points, if its rows do not tell whether they group thousands."""
    taken = f"{read['thousands']!r} is taken for a separator of thousands" if is_unsure else ""
    if "sep" in read and not read.keys() & MARK_WORDS.keys() and values.dtype == float:
        thousandths = values.dropna() * 1000
        three = (thousandths.round(6) % 1 == 0).all() and (thousandths.round() % 10 != 0).mean() > 0.5
        taken = "'.' is taken for a decimal point" if three else ""
    return dataclasses.replace(column, facts=f"{column.facts}; {taken}: check it") if taken else column


def _date_forms(column: Series) -> list[str]:
    """Return the forms in which all values of a column are dates."""
    import pandas

    values = _values(column)
    if values.empty or not values.str.contains(r"\d\D\d").all():
        return []
    forms = ("ISO8601", *_DATES)
    values = without_zone(values)
    return [one for one in forms if pandas.to_datetime(values, format=one, errors="coerce").notna().all()]


def _described(column: Series, forms: list[str], table: Table) -> Column:
    name, gaps = str(column.name), int(column.isna().sum())
    values, after = column.dropna(), f", {gaps} missing" if gaps else ""
    if values.empty:
        return Column(name, "other", "no value in any row")
    several = 2 <= values.nunique() <= 10
    if names_persons(name):
        most = values.value_counts().max()
        return Column(name, "other", f"{values.nunique()} persons with at most {most} rows each{after}")
    if forms:
        other = f"; {' or '.join(forms[1:])} fits, too: check it" if len(forms) > 1 else ""
        return Column(name, "date", f"dates written {forms[0]}{other}{after}")
    identifier = values.nunique() > max(MOST_CATEGORIES, len(values) / 2)
    if not _is_text(column) and column.dtype != bool:
        whole = bool((values == values.round()).all())
        if identifier and is_identifier(column):
            return Column(name, "other", "another whole number in nearly every row, as an identifier has")
        if may_be_ids(column):
            rows = values.value_counts().max()
            fact = f"{values.nunique()} whole numbers of one length in at most {rows} rows each, as ids of persons have"
            return Column(name, "other", fact + after)
        if several and whole:
            return Column(name, "number", _counted(values) + after, may_be_label=True, values=_different(values))
        spread = f"{values.min():g} to {values.max():g}, mean {values.mean():.3g}, deviation {values.std():.3g}"
        return Column(name, "number", spread + after)
    if identifier or values.nunique() > MOST_CATEGORIES:
        if (held := not_numeric(column, table))[0].startswith("numbers"):
            return Column(name, "number", ". ".join(held))
        return Column(name, "other", f"{values.nunique()} different texts, as identifiers or free text have{after}")
    return Column(name, "category", _counted(values) + after, several, _different(values))


def _different(values: Series) -> tuple[str, ...]:
    return tuple(sorted(" ".join(str(value).split()) for value in values.unique()))


def _counted(values: Series) -> str:
    counts = values.value_counts().items()
    return ", ".join(f"{' '.join(str(value).split())} {count}" for value, count in counts)  # on one line
