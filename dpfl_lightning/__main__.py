"""`dpfl COMMAND` or `python -m dpfl_lightning COMMAND`: run a command, or list all commands."""

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning import __version__
from dpfl_lightning.errors import UserError, command, nearest

COMMANDS = ("fit", "evaluate", "plan", "sweep", "report", "audit")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: `dpfl fit --config FILE` is `python -m dpfl_lightning.fit --config FILE`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return importlib.import_module(f"dpfl_lightning.{words[0]}").main(words[1:])
    return _about(words)


@command
def _about(words: Sequence[str] | None) -> int:
    words = list(words or ())
    if words in ([], ["--help"], ["-h"]):
        width = max(map(len, COMMANDS))
        listing = "\n".join(f"dpfl {name.ljust(width)}  {_purpose(name)}" for name in COMMANDS)
        print(f"dpfl_lightning {__version__}: add --help to a command for its options\n\n{listing}")
        return 0
    if words == ["--version"]:
        print(f"dpfl_lightning {__version__}")
        return 0
    near = nearest(words[0], COMMANDS).replace("`", "`dpfl ", 1)
    raise UserError(f"`COMMAND` must be one of {', '.join(COMMANDS)}, got {words[0]!r}. {near}".rstrip())


def _purpose(name: str) -> str:
    """Return the first line of a command's docstring, without importing its module."""
    tree = ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").splitlines()[0].partition("`: ")[2]


if __name__ == "__main__":
    raise SystemExit(main())
