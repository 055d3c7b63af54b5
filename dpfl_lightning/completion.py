"""`dpfl completion bash|zsh|fish`: print a script for tab completion in a shell."""

import argparse
import functools
import importlib
from collections.abc import Sequence
from typing import Literal, get_args, get_origin

from dpfl_lightning.__main__ import COMMANDS, purpose
from dpfl_lightning.config.command_line import CommandParser
from dpfl_lightning.config.options import all_keys
from dpfl_lightning.config.registry import NAMES, REGISTRIES, names_of
from dpfl_lightning.config.yaml_text import presets
from dpfl_lightning.errors import command
from dpfl_lightning.search.options import SweepOptions

_SWEEP = ("sweep", SweepOptions)

_ABOUT = 'Print a script for tab completion. For bash add to ~/.bashrc: eval "$(dpfl completion bash)". For zsh add '
_ABOUT += "the same with zsh to ~/.zshrc. For fish: dpfl completion fish > ~/.config/fish/completions/dpfl.fish"

_BASH = """\
_dpfl() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="%(commands)s --help --version"
  else
    case "$before" in
%(values)s
      *) case "${COMP_WORDS[1]}" in
%(flags)s
      esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [ ${#COMPREPLY[@]} -gt 0 ] || COMPREPLY=($(compgen -f -- "$word"))
}
complete -o filenames -F _dpfl dpfl
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `completion` with command-line arguments, and return its exit status."""
    parser = CommandParser("completion", _ABOUT, "SHELL", ("bash",))
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    shell = parser.parse_args(argv).shell
    print(_fish() if shell == "fish" else _ZSH * (shell == "zsh") + _bash(), end="")
    return 0


def _bash() -> str:
    values = [f'      {flag}) words="{" ".join(words)}" ;;' for flag, words in _values().items()]
    flags = [f'        {name}) words="{" ".join(_flags(name))}" ;;' for name in COMMANDS]
    parts = {"commands": " ".join(COMMANDS), "values": "\n".join(values), "flags": "\n".join(flags)}
    return _BASH % parts


def _fish() -> str:
    lines = [
        f"complete -c dpfl -n __fish_use_subcommand -f -a {name} -d {purpose(name).partition(':')[0]!r}"
        for name in COMMANDS
    ]
    for name in COMMANDS:
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        for flag in _flags(name):
            names = _values().get(flag)
            shown = f"-l {flag.removeprefix('--')}" if flag.startswith("--") else f"-f -a {flag}"
            lines.append(f"complete -c dpfl {seen} {shown}" + (f" -x -a '{' '.join(names)}'" if names else ""))
    return "\n".join([*lines, ""])


@functools.cache
def _values() -> dict[str, list[str]]:
    """Return flag -> the words that may follow it."""
    keys = all_keys(_SWEEP)
    words = {"--config": sorted(presets()), "--help": ["all"]}
    for key in (*NAMES, *REGISTRIES):
        hint = keys[key].hint
        chosen = key if any(get_origin(one) is Literal for one in (hint, *get_args(hint))) else f"{key}.name"
        words |= {f"--{chosen}": names_of(key)} if key != "strategies" else {}
        words |= {f"--{key}.help": names_of(key)} if key in REGISTRIES else {}
    return words


def _flags(name: str) -> list[str]:
    """Return the flags and keys of a command."""
    if name in ("init", "completion"):
        return ["bash", "zsh", "fish"] if name == "completion" else []
    parser = argparse.ArgumentParser()
    if (add_flags := getattr(importlib.import_module(f"dpfl_lightning.{name}"), "_flags", None)) is not None:
        add_flags(parser)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    flags = [one for action in shown for one in action.option_strings if one.startswith("--")] + ["--version"]
    if name in ("report", "sync", "node", "ledger"):
        return flags
    keys = [f"--{key}" for key in all_keys(_SWEEP if name == "sweep" else None)]
    keys = [key for key in keys if name != "evaluate" or key.startswith("--data.")]
    sections = {key.partition(".")[0] for key in keys}
    named = [flag for flag in _values() if flag.partition(".")[0] in sections]
    flags += [] if name == "evaluate" else ["--config"]
    return [*flags, "--print_config", *dict.fromkeys([*keys, *named])]


if __name__ == "__main__":
    raise SystemExit(main())
