"""`table` makes an `Experiment` of plain lists and dicts: rows, columns, and how their cells are made."""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dpfl_lightning.config.options import SECTIONS
from experiments.papers.experiment import Column, Computation, Experiment, Row, Training

Entry = Mapping[str, Any]

_LEFT_OUT = object()
_MAKERS = ("compute", "study", "recorder")
_OF_CELLS = (*_MAKERS, "options", "arguments")


def table(
    name: str,
    *,
    rows: Sequence[Entry],
    columns: Sequence[Entry],
    options: Entry | None = None,
    arguments: Entry | None = None,
    compute: str | None = None,
    study: str | None = None,
    recorder: str | None = None,
    summary: str | None = None,
    **fields: Any,
) -> Experiment:
    """Return the experiment `paper.table`.

    Args:
        rows, columns: the fields of `Row` and `Column` with a `name` each, and those of their cells: `options`,
            `arguments`, and in rows also `compute`, `study` or `recorder`.
        options: dotted keys of a run. Those of the row and of the column replace them. A value may be a function of
            row, column and scale; it raises `NotYet` if it reads cells that are not finished.
        arguments: further arguments of the function that makes a cell; a row and, for `compute`, a column add to them.
        compute, study, recorder: that function, as `module:name` below `experiments.papers`. With `compute` a row shows
            the value of its name, where it does not say another.
        fields: the other fields of `Experiment`.
    """
    common: dict[str, Any] = {"options": options or {}, "arguments": arguments or {}}
    common |= {key: path for key, path in zip(_MAKERS, (compute, study, recorder), strict=True) if path}
    lines = {row["name"]: Row(**({"value": row["name"]} if compute else {}) | _fields(row)) for row in rows}
    settings = {column["name"]: Column(**_fields(column)) for column in columns}
    makers: dict[str, Training | Computation] = {}
    for row in rows:
        if lines[row["name"]].experiment is None and (cell := row.get("cell", row["name"])) not in makers:
            makers[cell] = _maker(common, row, {column["name"]: column for column in columns})
    return Experiment(
        name=name,
        rows=lines,
        columns=settings,
        cells=makers,
        summary=lazy(summary) if summary else None,
        **fields,
    )


def entry(name: str, title: str, options: Entry | None = None, **fields: Any) -> dict[str, Any]:
    """A row or column, or a line of `with_lines`."""
    return {"name": name, "title": title, **fields, **({} if options is None else {"options": options})}


def named(titles: Mapping[str, str], **fields: Any) -> list[dict[str, Any]]:
    """Rows or columns of which only name and title differ."""
    return [entry(name, title, **fields) for name, title in titles.items()]


def with_lines(rows: Iterable[Entry], lines: Iterable[Entry]) -> list[dict[str, Any]]:
    """Each row once for every line, whose name and title are added to the row's; they show one cell.

    >>> with_lines([{"name": "a", "title": "A"}], [{"name": "std", "title": ": deviation", "value": "accuracy_std"}])
    [{'cell': 'a', 'name': 'a_std', 'title': 'A: deviation', 'value': 'accuracy_std'}]
    """
    return [
        {
            "cell": row["name"],
            **row,
            **line,
            **{"name": f"{row['name']}_{line['name']}", "title": f"{row['title']}{line['title']}"},
        }
        for row, line in itertools.product(rows, lines)
    ]


def lazy(path: str, **arguments: Any) -> Callable[..., Any]:
    """A function by `module:name`, imported when it is called: tables import no torch."""

    def call(*positional: Any, **named: Any) -> Any:
        module, _, name = path.partition(":")
        return getattr(importlib.import_module(f"experiments.papers.{module}"), name)(*positional, **named, **arguments)

    return call


def by_scale(**values: Any) -> Callable[..., Any]:
    """A value of options for each scale; other scales lack the key."""
    return lambda row, column, scale: values.get(scale, _LEFT_OUT)


def by_column(values: Mapping[str, Any], otherwise: Any = _LEFT_OUT) -> Callable[..., Any]:
    """A value of options for each column."""
    return lambda row, column, scale: values.get(column, otherwise)


def by_row(values: Mapping[str, Any], otherwise: Any = _LEFT_OUT) -> Callable[..., Any]:
    """A value of options for the cells of each row."""
    return lambda row, column, scale: values.get(row, otherwise)


def merged(parts: Iterable[Entry]) -> dict[str, Any]:
    """Options by dotted key; a later one replaces an earlier one of the same key and all below it.

    >>> merged([{"data": {"name": "mnist"}, "privacy.epsilon": 1}, {"data.name": "digits", "privacy": None}])
    {'data.name': 'digits', 'privacy': None}
    """
    options: dict[str, Any] = {}
    for key, value in itertools.chain.from_iterable(part.items() for part in parts):
        if key in SECTIONS and isinstance(value, Mapping):
            options.pop(key, None)
            options = merged([options, {f"{key}.{name}": one for name, one in value.items()}])
        else:
            kept = {name: one for name, one in options.items() if name != key and not name.startswith(f"{key}.")}
            options = {**kept, key: value}
    return options


def _fields(entry: Entry) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in ("name", *_OF_CELLS)}


def _maker(common: Entry, row: Entry, columns: Mapping[str, Entry]) -> Training | Computation:
    """How the cells of a row are made."""
    made_by = next(({key: part[key]} for part in (row, common) for key in _MAKERS if key in part), {})
    arguments = {**common["arguments"], **row.get("arguments", {})}
    if "compute" in made_by:

        def compute(column: str) -> Mapping[str, Any]:
            return lazy(made_by["compute"])(**{**arguments, **columns[column].get("arguments", {})})

        return Computation(compute)

    def options(row_name: str, column: str, scale: str) -> dict[str, Any]:
        parts = merged([common["options"], row.get("options", {}), columns[column].get("options", {})])
        return _resolved(parts, {"row": row_name, "column": column, "scale": scale})

    recorder, study = (
        functools.partial(lazy(made_by[key]), **arguments) if key in made_by else None for key in ("recorder", "study")
    )
    return Training(options, recorder, study)


def _resolved(options: Entry, cell: Mapping[str, str]) -> dict[str, Any]:
    """The options of one cell; a section that is None ends the keys below it, and longer keys come last."""
    chosen = {key: _value(value, cell) for key, value in options.items()}
    ended = tuple(f"{key}." for key, value in chosen.items() if value is None and key in SECTIONS)
    kept = {key: value for key, value in chosen.items() if value is not _LEFT_OUT and not key.startswith(ended)}
    return dict(sorted(kept.items(), key=lambda item: any(item[0].startswith(f"{other}.") for other in kept)))


def _value(value: Any, cell: Mapping[str, str]) -> Any:
    if callable(value):
        return value(**cell)
    return {key: _value(one, cell) for key, one in value.items()} if isinstance(value, Mapping) else value
