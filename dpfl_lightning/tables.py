"""How tables and epsilons are shown in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from dpfl_lightning.privacy.accountant import rounded_up


def epsilon(value: float) -> str:
    """Four decimals, rounded up.

    >>> epsilon(1.00001), epsilon(float("inf"))
    ('1.0001', 'inf')
    """
    return f"{rounded_up(value, 4):.4f}"  # inf reads "inf"


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Cells in columns, numbers and words alike to the right.

    >>> print(columns([["a", "bc"], [10, 2]]))
     a  bc
    10   2
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
