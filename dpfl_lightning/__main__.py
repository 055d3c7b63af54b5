"""`dpfl COMMAND` or `python -m dpfl_lightning COMMAND`: run a command, or list all commands."""

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning.config.command_line import VERSION, CommandParser
from dpfl_lightning.errors import command

COMMANDS = (
    "init",
    "plan",
    "noise",
    "fit",
    "ledger",
    "account",
    "evaluate",
    "report",
    "sync",
    "sweep",
    "audit",
    "node",
    "completion",
)
_ABOUT = f"""{VERSION}: federated learning with a privacy budget for each client.

Start with `dpfl fit --config digits`, or `dpfl init` for files of your own.
`dpfl COMMAND --help` explains a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: `dpfl fit --config FILE` is `python -m dpfl_lightning.fit --config FILE`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with python -m, so that a configuration finds my_data.py in the working directory
    if words and words[0] in COMMANDS:  # only the module of this command is imported
        return importlib.import_module(f"dpfl_lightning.commands.{words[0]}").main(words[1:])
    return _about(words)


@command
def _about(words: Sequence[str] | None) -> None:
    parsers()[0].parse_args(words or ["--help"])


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of `dpfl`, and those of its commands, which know no flags yet."""
    parser = CommandParser("", _ABOUT, "COMMAND [FLAGS]")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=argparse.ArgumentParser
    )
    return parser, {name: commands.add_parser(name, help=_purpose(name)) for name in COMMANDS}


def _purpose(name: str) -> str:
    """Return the first line of a command's docstring, without importing its module."""
    tree = ast.parse(Path(__file__).with_name("commands").joinpath(f"{name}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").splitlines()[0].partition("`: ")[2]


if __name__ == "__main__":
    raise SystemExit(main())
