"""Tables in Markdown, and pages of the docs that a command writes, between two marks with its name."""

from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning.errors import require


def fill_page(path: Path, name: str, text: str) -> None:
    """Put `text` between the marks `name` of the page."""
    before, after = split_page(path, name)
    path.write_text(f"{before}\n{text}\n{after}")


def split_page(path: Path, name: str) -> tuple[str, str]:
    """Return the page up to the first mark `name`, and from the second mark on; UserError if there are none."""
    opening, closing = f"<!-- {name}: written by the command -->", f"<!-- /{name} -->"
    require(path.is_file(), "--page", "be a Markdown file", str(path))
    before, begin, rest = path.read_text().partition(opening)
    _, end, after = rest.partition(closing)
    marks = f"have the marks {opening} and {closing}"
    require(bool(begin and end), "--page", marks, str(path), "The figures are written between them.")
    return before + begin, end + after


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with padded columns.

    >>> print(markdown(["a", "b"], [["1", "long"]]))
    | a | b    |
    | - | ---- |
    | 1 | long |
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)
