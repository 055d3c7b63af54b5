"""`dpfl completion bash|zsh|fish`: print a script for tab completion in a shell."""

import argparse
import importlib
from collections.abc import Sequence
from typing import Literal, get_args, get_origin

from dpfl_lightning.__main__ import parsers
from dpfl_lightning.config.command_line import CommandParser
from dpfl_lightning.config.options import all_keys
from dpfl_lightning.config.registry import REGISTRIES, names_of
from dpfl_lightning.config.typed import alternatives
from dpfl_lightning.config.yaml_text import presets
from dpfl_lightning.errors import command

_ABOUT = 'Print a script for tab completion. For bash add to ~/.bashrc: eval "$(dpfl completion bash)". For zsh add '
_ABOUT += "the same with zsh to ~/.zshrc. For fish: dpfl completion fish > ~/.config/fish/completions/dpfl.fish"

#: commands that take keys of a configuration, and the sections whose keys they take; () takes all keys
_WITH_KEYS: dict[str, tuple[str, ...]] = {"plan": (), "fit": (), "sweep": (), "audit": (), "evaluate": ("data",)}


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `completion` with command-line arguments, and return its exit status."""
    import shtab

    parser = CommandParser("completion", _ABOUT, "SHELL", ("bash",))
    parser.add_argument("shell", metavar="SHELL", choices=shtab.SUPPORTED_SHELLS, help="bash, zsh, fish or tcsh")
    shell = parser.parse_args(argv).shell
    everything, commands = parsers()
    for name, one in commands.items():
        add_flags = getattr(importlib.import_module(f"dpfl_lightning.commands.{name}"), "_flags", None)
        if add_flags is not None:
            add_flags(one)
        for action in one._actions:
            if action.choices is None and action.nargs != 0:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        if name in _WITH_KEYS:
            _add_keys(one, name, _WITH_KEYS[name])
    print(shtab.complete(everything, shell, "dpfl"), end="")
    return 0


def _add_keys(parser: argparse.ArgumentParser, name: str, takes: Sequence[str]) -> None:
    """Add the keys of a configuration, with the names that they accept."""
    from dpfl_lightning.search.options import SweepOptions

    if not takes:
        words = " ".join(sorted(presets()))
        config = parser.add_argument("--config")
        config.complete = {  # type: ignore[attr-defined]
            "bash": "_dpfl_configurations",
            "zsh": f"{{compadd {words}; _files}}",
            "fish": f"{words} (__fish_complete_path (commandline -ct))",
            "preamble": {"bash": f'_dpfl_configurations() {{ compgen -W "{words}" -- $1 || compgen -f -- $1; }}'},
        }
    parser.add_argument("--print_config", action="store_true")
    for key, known in all_keys(SweepOptions if name == "sweep" else None).items():
        if takes and key.partition(".")[0] not in takes:
            continue
        kinds = [kind for one in alternatives(known.hint) for kind in (one, *get_args(one))]
        literals = [one for one in kinds if get_origin(one) is Literal]
        parser.add_argument(f"--{key}", choices=[word for one in literals for word in get_args(one)] or None)
        if key in REGISTRIES:
            parser.add_argument(f"--{key}.help", choices=names_of(key))
        if names_of(key) and not literals and key != "strategies":
            parser.add_argument(f"--{key}.name", choices=names_of(key))
