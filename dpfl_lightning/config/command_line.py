"""The parser of every command: one style of help in 80 columns, `--version`, and mistakes in one sentence."""

import argparse
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from dpfl_lightning import __version__
from dpfl_lightning.config.options import SECTIONS, Key, Options, SectionKind, all_keys
from dpfl_lightning.config.registry import REGISTRIES, help_text
from dpfl_lightning.config.typed import in_words
from dpfl_lightning.config.yaml_text import inline
from dpfl_lightning.errors import UserError, nearest, require, shortened

#: keys that the short help shows
COMMON_KEYS = (
    *("rounds", "seed", "output_dir", "data.name", "data.partition", "model", "strategies", "clients.count"),
    *("clients.batch_size", "clients.local_epochs", "clients.learning_rate", "privacy.epsilon", "privacy.delta"),
    *("privacy.clip_norm", "engine.device"),
)
VERSION = f"dpfl_lightning {__version__}"
_KINDS = {"int": "a whole number", "float": "a number"}


class _Style(argparse.HelpFormatter):
    """Help in at most 80 columns. Paragraphs are wrapped; indented lines, such as examples, stay as they are."""

    def __init__(self, prog: str) -> None:
        width = min(80, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=26, width=width)
        self._action_max_length = 14  # argparse forgets that the names of commands are indented twice

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = (one if "\n " in one else textwrap.fill(one, width) for one in text.split("\n\n"))
        return textwrap.indent("\n\n".join(paragraphs), indent)


class CommandParser(argparse.ArgumentParser):
    """Parser for the flags of a command. Mistakes raise UserError, including those raised by a flag's `type`."""

    def __init__(self, command: str, description: str, usage: str = "", examples: Sequence[str] = (), **more: Any):
        name = f"dpfl {command}".strip()
        shown = "\n".join(["examples:", *(f"  {name} {one}".rstrip() for one in examples)])
        about = "\n\n".join([description, *([shown] if examples else [])])
        usage = f"{name} {usage}" if usage else ""
        super().__init__(
            name, usage or None, about, formatter_class=_Style, allow_abbrev=False, **{"add_help": True, **more}
        )
        self._optionals.title = "flags"
        self.add_argument("--version", action="version", version=VERSION, help="print the version and exit")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            known = nearest(word, self._option_string_actions) or "See --help."
            raise UserError(f"`{shortened(word)}` must be a known flag. {known}")
        return options

    def error(self, message: str) -> NoReturn:
        cause = getattr(sys.exc_info()[1], "__context__", None)
        raise cause if isinstance(cause, UserError) else UserError(_sentence(message))


def _sentence(message: str) -> str:
    """Return a message of argparse in the form of all other errors.

    >>> _sentence("argument --resume: expected one argument")
    '`--resume` must be followed by a value.'
    """
    if found := re.fullmatch(r"argument (\S+): expected .*argument", message):
        return f"`{found[1]}` must be followed by a value."
    if found := re.fullmatch(r"argument (\S+): invalid (int|float) value: (.*)", message):
        return f"`{found[1]}` must be {_KINDS[found[2]]}, got {found[3]}."
    if found := re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message):
        names = found[3].replace("'", "")
        near = nearest(found[2], names.split(", "))
        return f"`{found[1]}` must be one of {names}, got {found[2]!r}. {near}".rstrip()
    if found := re.fullmatch(r"argument (\S+): ignored explicit argument (.*)", message):
        return f"`{found[1]}` must be given without a value, got {found[2]}."
    if found := re.fullmatch(r"the following arguments are required: (.*)", message):
        return f"`{found[1]}` must be given. See --help."
    return f"{message}. See --help."


# ---- help of the keys of a configuration


def add_common_keys(parser: argparse.ArgumentParser, extra: SectionKind, takes: Sequence[str]) -> None:
    """Show the keys of the `extra` section and the most used other keys, each with its first sentence."""
    keys = all_keys(extra)
    sections = [name for name in [*([extra.section] if extra else []), *SECTIONS] if not takes or name in takes]
    more = f"--help all explains all {sum(_taken(key, takes) for key in keys)} keys, --SECTION.help those of a section "
    more += f"({', '.join(sections)}), and --KEY.help the names of a key, such as --data.partition.help."
    group = parser.add_argument_group("most used keys", more)
    common = [key for key in keys if (extra and key.startswith(f"{extra.section}.")) or key in COMMON_KEYS]
    _add_keys(group, {key: keys[key] for key in common if _taken(key, takes)}, brief=True)


def add_sections(parser: argparse.ArgumentParser, extra: SectionKind, sections: Iterable[str] | None = None) -> None:
    """Show every key with its whole text, in a group for each section (default: all sections; "" is the top level)."""
    kinds: dict[str, Any] = {one.section: one for one in (*([extra] if extra else []), Options, *SECTIONS.values())}
    for name in kinds if sections is None else sections:
        about = (inspect.getdoc(kinds[name]) or "").partition("\n\nArgs:")[0] if name else None
        group = parser.add_argument_group(f"section {name}" if name else "run", about)
        _add_keys(group, {key: one for key, one in all_keys(extra).items() if key.rpartition(".")[0] == name})


def _add_keys(group: Any, keys: dict[str, Key], brief: bool = False) -> None:
    for key, known in keys.items():
        about, kind = known.help, in_words(known.hint)
        if brief:
            first, (_, names, listed) = re.split(r"[.;] ", about)[0].rstrip("."), about.partition(" Names: ")
            about, kind = f"{first}.{names}{listed}", kind if kind.startswith("one of") else ""
        text = f"{about} ({'; '.join(filter(None, [kind, f'default {inline(known.default)}']))})"
        group.add_argument(f"--{key}", default=argparse.SUPPRESS, metavar="VALUE", help=text.replace("%", "%%"))


def _taken(key: str, takes: Sequence[str]) -> bool:
    return not takes or key.partition(".")[0] in takes


def sections_help(extra: SectionKind, section: str) -> str:
    """Return the help of all keys of a section."""
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS, formatter_class=_Style)
    add_sections(parser, extra, [section])
    return parser.format_help().strip()


def key_help(key: str, name: str | None, extra: SectionKind) -> str:
    """Return the text of `--KEY.help [NAME]`, for a key, a section, or a name in a registry."""
    keys = all_keys(extra)
    if key in REGISTRIES:
        return help_text(key, name, keys[key].help)
    sections = [*SECTIONS, *([extra.section] if extra else [])]
    known = [*sections, *keys]
    require(key in known, f"--{key}.help", "name a key or a section", key, nearest(key, known))
    require(name is None, f"--{key}.help", "be given without a value", name)
    if key in sections:
        return sections_help(extra, key)
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS, formatter_class=_Style)
    _add_keys(parser.add_argument_group(f"key {key}"), {key: keys[key]})
    return parser.format_help().strip()
