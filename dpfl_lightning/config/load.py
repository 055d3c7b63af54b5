"""Reads options from YAML files and the command line. Imports no torch, so `--help` is fast.

`load` merges all `--config FILE` and then dotted overrides (`--rounds 5`, `--privacy null`,
`--clients.batch_size [16,32]`, `--strategies.fedprox.pull 0.1`), and converts and checks every value once.
"""

import argparse
import dataclasses
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_origin

from dpfl_lightning.config.command_line import CommandParser, add_common_keys, add_sections, key_help
from dpfl_lightning.config.mapping import Values, to_yaml
from dpfl_lightning.config.options import (
    Options,
    SectionKind,
    all_keys,
    nearest_key,
)
from dpfl_lightning.config.typed import alternatives
from dpfl_lightning.config.yaml_text import dump, parse_yaml, read_yaml
from dpfl_lightning.errors import UserError, require, shortened
from dpfl_lightning.runtime.launcher import invocation

AddFlags = Callable[[argparse.ArgumentParser], object]
#: name of the command that adds a section to the configuration, and of that section
_SEARCH = "sweep"


def load(
    argv: Sequence[str] | None = None,
    extra: AddFlags | None = None,
    *,
    name: str = "fit",
    description: str = "",
    examples: Sequence[str] = (),
    config_of: Callable[[argparse.Namespace], str | None] | None = None,
    section: SectionKind = None,
    takes: Sequence[str] = (),
    decided: Callable[[argparse.Namespace], Mapping[str, Any]] | None = None,
) -> tuple[Options, argparse.Namespace]:
    """Return the options of a command line, and the values of the command's flags (`config`: the list of files).

    `--help`, `--version`, `--print_config` (the resolved YAML) and `--KEY.help` print and exit with status 0. Raises
    UserError.

    Args:
        extra: adds the command's flags by `add_argument`. Their names must differ from the fields of `Options`.
        name: name of the command.
        description: what the command does, for its help.
        examples: arguments of the command, for its help.
        config_of: returns the configuration file that the command's flags imply, if any; it replaces `--config`.
        section: a section that only this command has. Its value is returned as the flag of that name.
        takes: sections whose keys the command line may set; empty allows all keys.
        decided: returns keys that the command's flags decide, whatever the files have.

    >>> options, flags = load(["--rounds", "5", "--privacy.epsilon=2", "--dry"],
    ...                       lambda parser: parser.add_argument("--dry", action="store_true"))
    >>> options.rounds, options.privacy.epsilon, flags.dry
    (5, 2.0, True)
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _show_key_help(words, section)
    overrides, flag_words = split(words, () if section is None else (section.section,))
    accepted = " and ".join(f"--{one}.*" for one in takes)
    advice = f"It accepts only {accepted}; all other options are those of the run."
    for key, text in overrides:
        taken = not takes or key.partition(".")[0] in takes
        require(taken, f"--{key}", "be left out of this command", text, advice)
    parser = _command_parser(name, description, examples, section, takes, extra)
    flags, unknown = parser.parse_known_args(flag_words)
    if unknown:
        word = unknown[0].partition("=")[0]
        near = nearest_key(word.removeprefix("--"), [*vars(flags), *all_keys(section)]).replace("`", "`--", 1)
        raise UserError(f"`{shortened(word)}` must be a known key or flag. {near}".rstrip())
    implied = config_of(flags) if config_of else None
    twice = bool(flags.config and implied)
    require(not twice, "--config", "be left out", ", ".join(flags.config), f"Other flags choose {implied}.")
    values = Values(section)
    files = {path: read_yaml(path) for path in (*flags.config, *([implied] if implied else []))}
    _check_kind_of_files(files, section, [key.partition(".")[0] for key, _ in overrides])
    for path, raw in files.items():
        values.merge(raw, path, f"in {path}")
    for key, text in overrides:
        values.put(key, parse_override(key, text, section), "on the command line")
    for key, value in (decided(flags) if decided else {}).items():
        given = dict(overrides).get(key, str(value))
        require(given == str(value), f"--{key}", f"be {value} or left out: other flags decide it", given)
        values.put(key, value, "by other flags")
    options, extra_options = values.typed()
    if section is not None:
        setattr(flags, section.section, extra_options)
    if flags.print_config:
        more = "" if section is None else dump({section.section: dataclasses.asdict(extra_options)})
        print(to_yaml(options) + more, end="")
        raise SystemExit(0)
    return options, flags


def _check_kind_of_files(files: Mapping[str, Any], section: SectionKind, overridden: Sequence[str]) -> None:
    """Raise UserError if a search gets only files of a run, or a run that of a search. The section tells them apart."""
    for path, raw in files.items():
        advice = f"It configures a search: {invocation(_SEARCH)} --config {path}."
        known = section is not None or not isinstance(raw, Mapping) or _SEARCH not in raw
        require(known, "--config", f"be a file without a section {_SEARCH}", path, advice)
    mappings = [raw for raw in files.values() if isinstance(raw, Mapping)]
    if section is not None and mappings and section.section not in overridden:
        known, paths = any(section.section in raw for raw in mappings), ", ".join(files)
        advice = f"It configures a single run: {invocation('fit')} --config {paths}."
        require(known, "--config", f"be a file with a section {section.section}", paths, advice)


def split(argv: Sequence[str], also: Sequence[str] = ()) -> tuple[list[tuple[str, str]], list[str]]:
    """Separate overrides (key, text) of the fields of `Options` and of the sections `also` from all other arguments.

    >>> split(["--rounds", "5", "--resume", "runs/x", "--privacy.epsilon=2"])
    ([('rounds', '5'), ('privacy.epsilon', '2')], ['--resume', 'runs/x'])
    """
    first_parts = {*also, *(field.name for field in dataclasses.fields(Options))}
    overrides, others = [], []
    words = iter(argv)
    for word in words:
        key, equals, text = word.removeprefix("--").partition("=")
        ours = word.startswith("--") and not key.endswith(".help")
        if not ours or key.partition(".")[0] not in first_parts:
            others.append(word)
            continue
        if not equals:
            text = next(words, "--")
        if not equals and text.startswith("--"):
            raise UserError(f"`--{key}` must be followed by a value.")
        overrides.append((key, text))
    return overrides, others


def parse_override(key: str, text: str, section: SectionKind = None) -> Any:
    """Parse the text of an override as YAML; a key that holds text keeps the text itself."""
    keys = all_keys(section)
    hint = keys[key].hint if key in keys else None
    kinds = [get_origin(one) or one for one in alternatives(hint)]
    if dict in kinds and text.startswith("{"):
        return parse_yaml(text, f"--{key}")
    if str in kinds or kinds[0] is Literal:
        return None if text == "null" and types.NoneType in kinds else text
    return parse_yaml(text, f"--{key}")


def _show_key_help(words: Sequence[str], section: SectionKind) -> None:
    """Print the help of the first word `--KEY.help [NAME]` and exit; return if there is none."""
    for number, word in enumerate(words):
        key, equals, name = word.removeprefix("--").partition("=")
        if word.startswith("--") and key.endswith(".help"):
            after = "".join(words[number + 1 : number + 2])
            name = name if equals else "" if after.startswith("-") else after
            print(key_help(key.removesuffix(".help"), name or None, section))
            raise SystemExit(0)


def _command_parser(
    name: str,
    description: str,
    examples: Sequence[str],
    section: SectionKind,
    takes: Sequence[str],
    extra: AddFlags | None,
) -> CommandParser:
    """Return a parser of the command's flags and those that all commands have. It knows keys only for its help."""

    class Help(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
            if value not in (None, "all"):
                print(key_help(value.removeprefix("--"), None, section))
                raise SystemExit(0)
            add_sections(parser, section, takes or None) if value else add_common_keys(parser, section, takes)
            parser.print_help()
            raise SystemExit(0)

    parser = CommandParser(name, description, "[--config FILE] [--KEY VALUE ...] [FLAGS]", examples, add_help=False)
    help_text = "show the flags and the most used keys, all keys, or one key or section, and exit"
    parser.add_argument("-h", "--help", action=Help, nargs="?", metavar="all | KEY", help=help_text)
    about = "YAML file, or name of a preset such as fmnist; may be given several times: the files are merged, and "
    about += "later ones win. Keys on the command line win over files"
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help=about)
    parser.add_argument("--print_config", action="store_true", help="print all keys as YAML and exit")
    if extra is not None:
        extra(parser)
    return parser
