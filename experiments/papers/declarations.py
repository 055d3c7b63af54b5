"""Read the declarations of a paper's tables and figures from its YAML file.

The file `<paper>.yaml` holds `tables: {name: table}`, and whatever else its anchors need. A table has the fields of
`Experiment`, and these:

- `rows`, `columns`: name -> title, mapping or list of mappings. A mapping with `each` (a list) or `product` (lists)
  is repeated, and `{0}`, `{1}` in its name and values are replaced by the item, as in panels. `show` gives every row
  one line per value of its cell; a text of the paper's numbers is then split at `|` among these lines.
- `elsewhere` of a row: column -> the fields of the row that differ there, as `cell` of another row with the same run.
- `options`: dotted keys of a run (or a list of mappings of them), of the table, a row or a column, in this order of
  precedence; `strategies.` may be left out. A value may depend on the cell: `{scale: {small: 60}}`, `{row: {...}}`,
  `{column: {...}}`, or be `{function: module:name, ...}`, called with row, column, scale and the other items; it raises
  `NotYet` if it reads cells that are not finished, and these are made first.
- `recorder`, `study` or `compute`, of the table or a row: the function that makes a cell, as `module:name` below
  `experiments.papers`; `arguments` of the table, the row and the column are passed to it.
- `panels`: pictures that `figures.panel` draws; `draw: module:name` adds others.
"""

import dataclasses
import functools
import importlib
import itertools
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dpfl_lightning.config.options import SECTIONS, Options
from experiments.papers.experiment import (
    Column,
    Comparison,
    Computation,
    Experiment,
    Panel,
    Reference,
    Row,
    Tolerance,
    Training,
)

_MADE_BY = ("compute", "study", "recorder")
_PLAIN = ("title", "shows", "scales", "seeds", "minutes", "decimals", "shown", "ours", "rivals")
_MISSING = object()


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML that reads 1e-4 as a number, and refuses a key that a mapping has twice."""

    def get_single_node(self) -> yaml.Node:
        root = super().get_single_node()
        nodes, seen = [root], set()
        while nodes:
            node = nodes.pop()
            if id(node) in seen or isinstance(node, yaml.ScalarNode):
                continue
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                keys = [key.value for key, _ in node.value]
                if len(set(keys)) < len(keys):
                    raise yaml.constructor.ConstructorError(None, None, "a key occurs twice", node.start_mark)
                nodes += [value for _, value in node.value]
            else:
                nodes += node.value
        return root


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+\.?\d*[eE][-+]?\d+$"), list("-+0123456789")
)


@functools.cache
def read_paper(paper: str) -> Mapping[str, Any]:
    """The content of a paper's YAML file."""
    return yaml.load(Path(__file__).with_name(f"{paper}.yaml").read_text(encoding="utf-8"), Loader=_Loader)


def declared(paper: str) -> list[Experiment]:
    """The experiments of a paper, in the order of its file."""
    return [_experiment(f"{paper}.{name}", table) for name, table in read_paper(paper)["tables"].items()]


def function(path: str) -> Callable[..., Any]:
    """A function or class by `module:name`, imported when it is called: declarations import no torch."""

    def call(*positional: Any, **named: Any) -> Any:
        module, _, name = path.partition(":")
        return getattr(importlib.import_module(f"experiments.papers.{module}"), name)(*positional, **named)

    return call


def merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
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


# ---- a table


def _experiment(name: str, table: Mapping[str, Any]) -> Experiment:
    columns, rows = _entries(table["columns"]), dict(_rows(table))
    lines = {key: Row(**_fields(Row, entry)) for key, entry in rows.items()}
    settings = {key: Column(**_fields(Column, entry)) for key, entry in columns.items()}
    makers: dict[str, Mapping[str, Any]] = {}
    for key, entry in rows.items():
        makers.setdefault(lines[key].cell or key, entry)
    made_here = any(column.experiment is None for column in settings.values())
    cell_rows = [line.cell or key for key, line in lines.items() if made_here and line.experiment is None]
    return Experiment(
        name=name,
        rows=lines,
        columns=settings,
        cells={cell: _spec(table, makers[cell], columns) for cell in dict.fromkeys(cell_rows)},
        paper=dict(_paper(table)),
        comparison=_comparison(table.get("comparison"), lines),
        draw=functools.partial(_draw, table) if "panels" in table or "draw" in table else None,
        summary=function(table["summary"]) if table.get("summary") else None,
        notes=tuple(table.get("notes", ())),
        **{key: table[key] for key in _PLAIN if key in table},
    )


def _entries(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows or columns by name, repeated ones filled in."""
    entries: dict[str, dict[str, Any]] = {}
    for name, given in raw.items():
        for one in given if isinstance(given, list) else [given]:
            for items, entry in _repeated({"title": one} if isinstance(one, str) else one):
                entries[_filled(str(name), items)] = entry
    return entries


def _repeated(entry: Mapping[str, Any]) -> Iterable[tuple[Sequence[Any], dict[str, Any]]]:
    """An entry for each of its items, filled in, with the item's parts."""
    rest = {key: value for key, value in entry.items() if key not in ("each", "product")}
    if len(rest) == len(entry):
        yield (), rest
        return
    for item in entry.get("each") or itertools.product(*entry["product"]):
        items = item if isinstance(item, list | tuple) else [item]
        yield items, _filled(rest, items)


def _filled(value: Any, items: Sequence[Any]) -> Any:
    """`value` with its places replaced; a text that is one place becomes the item itself."""
    if isinstance(value, str) and items:
        place = re.fullmatch(r"\{(\d[^{}:]*)\}", value)
        return string.Formatter().get_field(place[1], items, {})[0] if place else value.format(*items)
    if isinstance(value, Mapping):
        return {_filled(key, items): _filled(one, items) for key, one in value.items()}
    return [_filled(one, items) for one in value] if isinstance(value, list) else value


def _rows(table: Mapping[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    shown = table.get("show")
    for base, entry in _entries(table["rows"]).items():
        entry = {key: table[key] for key in ("cell", "value", "experiment", "reference") if key in table} | entry
        if shown is None:
            named = {"value": base} if "compute" in table else {}
            yield base, {**named, **entry}
            continue
        for suffix in entry.pop("show", shown):
            line = shown[suffix]
            title = f"{entry['title']}{line['title']}"
            yield f"{base}_{suffix}", {"cell": base, "series": entry["title"], **entry, **line, "title": title}


def _paper(table: Mapping[str, Any]) -> Iterable[tuple[str, list[float | None]]]:
    for row, numbers in table.get("paper", {}).items():
        if isinstance(numbers, str):
            for suffix, part in zip(table["show"], numbers.split("|"), strict=True):
                yield f"{row}_{suffix}", [float(number) for number in part.split()]
        else:
            yield row, numbers


def _fields(kind: type, entry: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {field.name: entry[field.name] for field in dataclasses.fields(kind) if field.name in entry}
    if "reference" in chosen:
        raw = chosen["reference"]
        chosen["reference"] = Reference(**{**raw, "values": function(raw["values"])})
    return {**chosen, "title": str(chosen["title"])}


def _comparison(raw: Mapping[str, Any] | None, rows: Mapping[str, Row]) -> Comparison | None:
    if raw is None:
        return None
    special = {
        (row, column): Tolerance(within, why)
        for ending, column, within, why in raw.get("special", ())
        for row in rows
        if row.endswith(ending)
    }
    better = raw.get("better", "")
    if isinstance(better, Mapping):  # by the last part of the rows' names, as for `special`
        better = {row: how for row in rows for suffix, how in better.items() if row.endswith(suffix)}
    return Comparison(raw["tolerance"], raw.get("relative", False), better, special)


def _draw(table: Mapping[str, Any], experiment: Experiment, cells: Any) -> list[Panel]:
    from experiments.papers.figures import panel

    panels = [panel(experiment, cells, **one) for raw in table.get("panels", ()) for _, one in _repeated(raw)]
    return [*panels, *(function(table["draw"])(experiment, cells) if table.get("draw") else ())]


# ---- a cell


def _spec(
    table: Mapping[str, Any], row: Mapping[str, Any], columns: Mapping[str, Mapping[str, Any]]
) -> Training | Computation:
    made_by = next(({kind: part[kind]} for part in (row, table) for kind in _MADE_BY if kind in part), {})
    common = {**table.get("arguments", {}), **row.get("arguments", {})}
    if "compute" in made_by:
        formula = function(made_by["compute"])

        def compute(column: str, overrides: Mapping[str, str]) -> Mapping[str, Any]:
            set_by_user = {key.rpartition(".")[2]: text for key, text in overrides.items()}
            return formula(**{**common, **columns[column].get("arguments", {}), **set_by_user})

        return Computation(compute, tuple(table.get("takes", ())))

    def options(row_name: str, column: str, scale: str) -> dict[str, Any]:
        raw = [part.get("options", {}) for part in (table, row, columns[column])]
        parts = [_whole_keys(part) for one in raw for part in (one if isinstance(one, list) else [one])]
        return _resolved(merged(parts), {"row": row_name, "column": column, "scale": scale})

    recorder = functools.partial(function(made_by["recorder"]), **common) if "recorder" in made_by else None
    study = functools.partial(function(made_by["study"]), **common) if "study" in made_by else None
    return Training(options, recorder, study)


def _whole_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with `strategies.` in front of the keys of a strategy."""
    known = {field.name for field in dataclasses.fields(Options)}
    short = {key for key in options if "." in key and key.partition(".")[0] not in known}
    return {f"strategies.{key}" if key in short else key: value for key, value in options.items()}


def _resolved(options: Mapping[str, Any], cell: Mapping[str, str]) -> dict[str, Any]:
    """The options of one cell; a section that is null ends the keys below it, and longer keys come last."""
    chosen = {key: _value(value, cell) for key, value in options.items()}
    null = tuple(f"{key}." for key, value in chosen.items() if value is None and key in SECTIONS)
    kept = {
        key: value for key, value in chosen.items() if value is not _MISSING and not key.startswith(null or ("\0",))
    }
    return dict(sorted(kept.items(), key=lambda item: any(item[0].startswith(f"{other}.") for other in kept)))


def _value(value: Any, cell: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping) and "function" in value:
        arguments = {key: one for key, one in value.items() if key != "function"}
        return function(value["function"])(**{**cell, **arguments})
    if isinstance(value, Mapping) and len(value) == 1:
        ((by, cases),) = value.items()
        if by in cell and isinstance(cases, Mapping):
            return _value(cases.get(cell[by], cases.get("else", _MISSING)), cell)
    return {key: _value(one, cell) for key, one in value.items()} if isinstance(value, Mapping) else value
