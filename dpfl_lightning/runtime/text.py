"""Formatting of tables, durations and data sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Format rows as aligned columns; all cells are right-aligned.

    >>> print(columns([["a", "bc"], [10, 2]]))
     a  bc
    10   2
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with padded columns, so that its source is readable, too.

    >>> print(markdown(["a", "b"], [["1", "long"]]))
    | a | b    |
    | - | ---- |
    | 1 | long |
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )


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
