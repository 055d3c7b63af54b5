"""Pages of the docs whose figures a command writes, between two marks that bear its name."""

from __future__ import annotations

from pathlib import Path

from dpfl_lightning.errors import require


def fill_page(path: Path, name: str, text: str) -> None:
    """Put the text between the marks of that name.

    Raises:
        UserError: there is no such page, or it has no marks.
    """
    before, after = split_page(path, name)
    path.write_text(f"{before}\n{text}\n{after}")


def split_page(path: Path, name: str) -> tuple[str, str]:
    """The page down to the first mark of that name, and from the second on.

    Raises:
        UserError: there is no such page, or it has no marks.
    """
    opening, closing = f"<!-- {name}: written by the command -->", f"<!-- /{name} -->"
    require(path.is_file(), "--page", "be a Markdown file", str(path))
    before, begin, rest = path.read_text().partition(opening)
    _, end, after = rest.partition(closing)
    marks = f"hold the marks {opening} and {closing}"
    require(bool(begin and end), "--page", marks, str(path), "The figures go between them.")
    return before + begin, end + after
