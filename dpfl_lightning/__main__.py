"""`python -m dpfl_lightning`: the commands there are; each is a module of its own."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning import __version__
from dpfl_lightning.errors import UserError, command, nearest

COMMANDS = ("fit", "evaluate", "plan", "sweep", "audit")


@command
def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words in ([], ["--help"], ["-h"]):
        print(f"dpfl_lightning {__version__}: each command explains itself with --help\n\n{_listing()}")
        return 0
    if words == ["--version"]:
        print(f"dpfl_lightning {__version__}")
        return 0
    near = nearest(words[0], COMMANDS).replace("`", "`python -m dpfl_lightning.", 1)
    raise UserError(f"`COMMAND` must be one of {', '.join(COMMANDS)}, got {words[0]!r}. {near}".rstrip())


def _listing() -> str:
    """Each command with what the first line of its module says of it; nothing is imported."""
    width = max(map(len, COMMANDS))
    return "\n".join(f"python -m dpfl_lightning.{name.ljust(width)}  {_purpose(name)}" for name in COMMANDS)


def _purpose(name: str) -> str:
    tree = ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").splitlines()[0].partition("`: ")[2]


if __name__ == "__main__":
    raise SystemExit(main())
