"""Tables in Markdown, and the files in `experiments/results/` that commands write."""

from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def written(title: str, command: str, *parts: str) -> str:
    """Return the text of a file that a command writes."""
    return "\n\n".join([f"# {title}", f"Written by `{command}`.", *parts]) + "\n"


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
