"""`dpfl COMMAND` or `python -m dpfl_lightning COMMAND`: run a command, or list all commands."""

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning import __version__
from dpfl_lightning.errors import UserError, command, nearest

COMMANDS = ("init", "plan", "fit", "ledger", "evaluate", "report", "sync", "sweep", "audit", "node", "completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: `dpfl fit --config FILE` is `python -m dpfl_lightning.fit --config FILE`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with python -m, so that a configuration finds my_data.py in the working directory
    if words and words[0] in COMMANDS:
        return importlib.import_module(f"dpfl_lightning.{words[0]}").main(words[1:])
    return _about(words)


@command
def _about(words: Sequence[str] | None) -> int:
    words = list(words or ())
    if words in ([], ["--help"], ["-h"], ["help"]):
        width = max(map(len, COMMANDS))
        listing = "\n".join(f"  {name.ljust(width)}  {purpose(name)}" for name in COMMANDS)
        print(
            "usage: dpfl COMMAND [FLAGS]\n\n"
            f"dpfl_lightning {__version__}: federated learning with a privacy budget for each client.\n\n"
            f"commands:\n{listing}\n\n"
            "Start with `dpfl fit --config digits`, or `dpfl init` for files of your own.\n"
            "`dpfl COMMAND --help` explains a command, `dpfl --version` prints the version."
        )
        return 0
    if words[0] in ("--version", "version"):
        print(f"dpfl_lightning {__version__}")
        return 0
    near = nearest(words[0], COMMANDS).replace("`", "`dpfl ", 1)
    raise UserError(f"`COMMAND` must be one of {', '.join(COMMANDS)}, got {words[0]!r}. {near}".rstrip())


def purpose(name: str) -> str:
    """Return the first line of a command's docstring, without importing its module."""
    tree = ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").splitlines()[0].partition("`: ")[2]


if __name__ == "__main__":
    raise SystemExit(main())
