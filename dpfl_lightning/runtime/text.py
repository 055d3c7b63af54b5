"""Formatting of tables, counts, durations and data sizes, and progress messages of slow computations."""

import json
import math
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

_LONGEST = 6000  # characters of a flattened value


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Format rows as aligned columns; all cells are right-aligned.

    >>> print(columns([["a", "bc"], [10, 2]]))
     a  bc
    10   2
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def shown(text: str) -> str:
    """Wrap the paragraphs of a text between words if the output is a terminal. A log gets long lines."""
    if not sys.stdout.isatty():
        return text
    width = min(80, shutil.get_terminal_size().columns)
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    # lines of tables, whose cells have several spaces between them, stay as they are
    return "\n".join(line if "  " in line else wrapper.fill(line) for line in text.split("\n"))


def distinct(names: Sequence[str]) -> list[str]:
    """Number the names that occur more than once.

    >>> distinct(["a", "b", "a"])
    ['a (1)', 'b', 'a (2)']
    """
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)
    ]


def counted(count: int, noun: str) -> str:
    """Format a number of things.

    >>> counted(1, "client"), counted(2_000, "client")
    ('1 client', '2,000 clients')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def at_most(value: float, digits: int = 6) -> str:
    """Format an upper bound: every epsilon, delta or budget that is shown. The text, read as a number, is not below it.

    The text grows with the value, so a spent epsilon within its budget is not shown above it.

    >>> at_most(1.2345614), at_most(1.9999999), at_most(0.1), at_most(math.inf)
    ('1.23457', '2', '0.1', 'inf')
    """
    return _rounded(value, digits, ROUND_CEILING)


def at_least(value: float, digits: int = 6) -> str:
    """Format a lower bound, such as the remaining part of a budget: rounded down.

    >>> at_least(1.2345678), at_least(0.1)
    ('1.23456', '0.1')
    """
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return str(value)
    written = repr(float(value))  # the shortest decimal number that is read as this value: 0.1 is not above 0.1
    return f"{float(Context(digits, rounding).create_decimal(written)):.{digits}g}"


def span(values: Iterable[float], shown: Callable[[float], str] = "{:g}".format) -> str:
    """Format the range of some numbers.

    >>> span([1e-3, 1e-3]), span([2, 0.5])
    ('0.001', '0.5 to 2')
    """
    distinct = sorted(set(values))
    return " to ".join(dict.fromkeys(map(shown, distinct[:1] + distinct[1:][-1:])))


def duration(seconds: float) -> str:
    """Format a duration in seconds.

    >>> duration(7.2), duration(200), duration(7500), duration(math.nan)
    ('7 s', '3 min 20 s', '2 h 05 min', 'unknown')
    """
    if not math.isfinite(seconds):
        return "unknown"
    if 0 < seconds < 1:
        return "under 1 s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes_rest = divmod(minutes, 60)
    return f"{hours} h {minutes_rest:02} min" if hours else f"{minutes} min {rest:02} s"


def rounded_up_duration(seconds: float) -> float:
    """Round a duration up to a power of two seconds, at least 1 s, so that it reveals little about the computation.

    >>> rounded_up_duration(0.2), rounded_up_duration(254.0)
    (1.0, 256.0)
    """
    return 2.0 ** math.ceil(math.log2(max(seconds, 1.0)))


def data_size(count: float) -> str:
    """Format a number of bytes, in powers of 1,000.

    >>> data_size(512), data_size(1_234_567), data_size(176e9), data_size(3.2e15)
    ('512 bytes', '1.23 MB', '176 GB', '3,200 TB')
    """
    if count < 1000:
        return f"{count:.0f} bytes"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            break
    return f"{count:,.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"


def slow_notice(what: str, patience_seconds: float = 2.0) -> Callable[[int, int], None]:
    """Return a callback `(done, total)` that prints the progress to stderr, at most once in `patience_seconds`."""
    last = time.monotonic()

    def notify(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > patience_seconds:
            last = time.monotonic()
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    return notify


def without_credentials(text: str) -> str:
    """Return a text without user names and passwords of the addresses in it, and without the values of their queries.

    >>> without_credentials("postgresql://me:secret@db.example.org/runs")
    'postgresql://db.example.org/runs'
    >>> without_credentials("http://host/api?token=secret&page=2")
    'http://host/api?token=***&page=***'
    """
    without = re.sub(r"""(?<=://)[^/\s'"]*@""", "", text)
    return re.sub(r"""(://[^/\s?'"][^\s?'"]*\?[^\s'"]*)""", lambda found: re.sub(r"=[^&]*", "=***", found[0]), without)


_SECRET = re.compile(r"passw|passphrase|pwd|secret|token|credential|api_?key|^pin$|^auth|^dsn$", re.IGNORECASE)


def without_secrets(value: Any) -> Any:
    """Return options without credentials in addresses, and without the values of keys that name a secret.

    >>> without_secrets({"init_args": {"url": "postgresql://me:x@db/a", "password": "x", "tables": ["t"]}})
    {'init_args': {'url': 'postgresql://db/a', 'password': '***', 'tables': ['t']}}
    """
    if isinstance(value, Mapping):
        return {name: "***" if _SECRET.search(str(name)) else without_secrets(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(one) for one in value]
    return without_credentials(value) if isinstance(value, str) else value


def flattened(options: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return dotted name -> text, shortened to 6,000 characters; a list is one value.

    >>> flattened({"seed": 0, "model": {"name": "cnn"}, "strategies": {"uniform": {}}, "budgets": [1.5, 2]})
    {'seed': '0', 'model.name': 'cnn', 'strategies.uniform': '{}', 'budgets': '[1.5, 2]'}
    """
    flat: dict[str, str] = {}
    for name, value in options.items():
        key = prefix + re.sub(r"[^\w\-. :/]", "_", str(name))
        if isinstance(value, Mapping) and value:
            flat.update(flattened(value, f"{key}."))
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat[key] = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return flat
