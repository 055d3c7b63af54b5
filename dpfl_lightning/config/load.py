"""Reads options from YAML and the command line, and writes them as YAML. Imports no torch, so `--help` is fast.

`load` merges all `--config FILE` and then dotted overrides (`--rounds 5`, `--privacy null`,
`--clients.batch_size [16,32]`, `--strategies.fedprox.pull 0.1`), and converts and checks every value once.
"""

import argparse
import copy
import dataclasses
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_origin

from dpfl_lightning.config.command_line import CommandParser, add_common_keys, add_sections, key_help
from dpfl_lightning.config.options import (
    MAY_BE_NULL,
    SECTIONS,
    Options,
    SectionKind,
    all_keys,
    check_data,
    how_to_choose,
    nearest_key,
)
from dpfl_lightning.config.per_client import by_client, resolve
from dpfl_lightning.config.registry import names_of
from dpfl_lightning.config.typed import alternatives, of_one_client
from dpfl_lightning.config.yaml_text import dump, parse_yaml, read_yaml
from dpfl_lightning.errors import UserError, require, shortened
from dpfl_lightning.runtime.launcher import invocation

AddFlags = Callable[[argparse.ArgumentParser], object]
#: name of the command that adds a section to the configuration, and of that section
_SEARCH = "sweep"
#: keys of mappings whose names are dotted keys of a run
_OF_DOTTED_KEYS = ("sweep.space", "sweep.trials_with")


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
    values = _Values(section)
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


def options_file(folder: str, key: str) -> str:
    """Return the options file of the run in `folder`, for `config_of`. `key` is the flag that named the folder."""
    path = Path(folder) / "options.yaml"
    if not path.is_file():
        of_seeds = ", ".join(str(one.parent) for one in sorted(Path(folder).glob("seed_*/options.yaml")))
        advice = f"It contains the runs of several seeds: {of_seeds}." if of_seeds else "See runs/."
        raise UserError(f"`{key}` must be the folder of a run, got {folder!r}, which has no options.yaml. {advice}")
    if not read_yaml(str(path)):
        raise UserError(
            f"`{key}` must be the folder of a run with a configuration, got {folder!r}, whose run was built in Python. "
            f"Do it there: FederatedLoop(..., output_dir={folder!r}).run(resume=True) resumes it or returns its result."
        )
    return str(path)


def from_mapping(raw: Mapping[str, Any]) -> Options:
    """Return the options of a nested mapping, as it is read from YAML. Missing keys have their defaults.

    >>> from_mapping({"rounds": 3, "privacy": None}).rounds
    3
    """
    values = _Values()
    values.merge(raw, "the mapping", "in the mapping")
    return values.typed()[0]


def with_values(options: Options, values: Mapping[str, Any], origin: str) -> Options:
    """Return the options with the values of some dotted keys replaced, as if a later override set them.

    A new name drops the options of the old one, except those in `values`. Messages state `origin`.

    >>> with_values(Options(privacy=None), {"model.name": "convnet", "model.width": 8}, "here").model
    {'name': 'convnet', 'width': 8}
    """
    changed = _Values()
    changed.merge(dataclasses.asdict(options), "the options", "before")
    for key, value in values.items():
        changed.put(key, value, origin)
    return changed.typed()[0]


def to_yaml(options: Options) -> str:
    """Return the options as YAML that `load` can read."""
    return dump(dataclasses.asdict(options))


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


# ---- merging values


class _Values:
    """The values that were set, by dotted key, and where each of them was set."""

    def __init__(self, section: SectionKind = None) -> None:
        self._section = section
        self._sections = SECTIONS | ({} if section is None else {section.section: section})
        self._keys = all_keys(section)
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}

    def merge(self, raw: Any, where: str, origin: str) -> None:
        """Set all keys of a file or mapping. Mappings are merged into those of earlier files, as dotted keys are."""
        require(raw is None or isinstance(raw, Mapping), where, "hold a mapping of keys", raw)
        for key, value in (raw or {}).items():
            self._merge(str(key), value, origin)

    def _merge(self, key: str, value: Any, origin: str) -> None:
        if key in self._sections and isinstance(value, Mapping):
            self.put(key, {}, origin)
            for name, one in value.items():
                self._merge(f"{key}.{name}", one, origin)
        elif isinstance(value, Mapping) and isinstance(self._values.get(key), dict):
            self._merge_below(key, [], value, origin)
        else:
            self.put(key, value, origin)

    def _merge_below(self, parent: str, path: Sequence[str], value: Mapping[str, Any], origin: str) -> None:
        """Merge a mapping into the value of `parent`, where `path` leads to a mapping already."""
        # A choice comes first, because a new one drops the options of the old one.
        for name, one in sorted(value.items(), key=lambda item: item[0] not in ("name", "class_path")):
            names, inner = [*path, str(name)], self._values[parent]
            for part in names:
                inner = inner.get(part) if isinstance(inner, dict) else None
            if isinstance(one, Mapping) and isinstance(inner, dict) and parent not in _OF_DOTTED_KEYS:
                self._merge_below(parent, names, one, origin)
            else:
                self._put_below(parent, names, one, origin)

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set one key. It must be a known key, or lie below a key that holds a mapping of options."""
        section = key.partition(".")[0]
        if section in self._sections and (section != key or isinstance(value, Mapping)):
            self._values.pop(section, None)  # setting a key of a section undoes an earlier `section: null`
        if key in self._sections and isinstance(value, Mapping):
            for name, one in value.items():
                self.put(f"{key}.{name}", one, origin)
        elif key in self._sections or key in self._keys:
            for values in (self._values, self._origins):
                for below in [one for one in values if one.startswith(f"{key}.")]:
                    del values[below]
            if key == "data.class_path" and value not in (None, self._values.get(key)):
                self._drop_data_set_before(origin)
            self._values[key], self._origins[key] = value, origin
        else:
            parents = (one for one, known in self._keys.items() if _takes_mapping(known.hint))
            parent = next((one for one in parents if key.startswith(f"{one}.")), None)
            if parent is None:
                near = nearest_key(key, self._keys)
                raise UserError(f"`{shortened(key)}` must be a known key. {near}".rstrip() + f" Set {origin}.")
            self._put_below(parent, self._path(parent, key.removeprefix(f"{parent}."), value), value, origin)

    def _drop_data_set_before(self, origin: str) -> None:
        """Drop the keys of other data; keep those that were set together with the new class_path."""
        for key in [one for one in self._values if one.startswith("data.") or one == "clients.count"]:
            if origin not in {self._origins[one] for one in self._origins if one == key or one.startswith(f"{key}.")}:
                del self._values[key]

    def _path(self, parent: str, rest: str, value: Any) -> list[str]:
        """Return the names below `parent` of a dotted key. The names of some mappings contain dots themselves."""
        if parent in _OF_DOTTED_KEYS:
            return [rest]
        parts = rest.split(".")
        if parent != "strategies" or parts[0] in names_of(parent):
            return parts
        # package.module.Class.option: the class is the first part in upper case, or all parts but that of the option.
        last = next((number for number, part in enumerate(parts) if part[:1].isupper()), max(0, len(parts) - 2))
        name = ".".join(parts[: last + 1])
        whole = value is None or isinstance(value, Mapping)
        return [rest] if whole and not parts[last][:1].isupper() else [name, *parts[last + 1 :]]

    def _put_below(self, parent: str, names: Sequence[str], value: Any, origin: str) -> None:
        """Set one option inside the mapping of `parent`, starting from its current or default value."""
        # Named strategies replace the default, as they do in a file; a run without an aggregation rule gets one later.
        default = {} if parent == "strategies" else self._keys[parent].default
        current = self._values.get(parent, default)
        options = copy.deepcopy(current) if isinstance(current, dict) else {}
        *path, last = names
        rest = ".".join(names)
        if rest in ("name", "class_path") and options.get(rest) != value:
            # Drop the options of the old choice; keep those that were set together with the new name.
            options = {k: one for k, one in options.items() if self._origins.get(f"{parent}.{k}") == origin}
        inner = options
        for part in path:
            inner[part] = inner[part] if isinstance(inner.get(part), dict) else {}
            inner = inner[part]
        inner[last] = value
        self._values[parent] = options
        self._origins[f"{parent}.{rest}"] = origin

    def typed(self) -> tuple[Options, Any]:
        """Return the checked options, and those of the extra section. An error also states where its key was set."""
        try:
            fields: dict[str, dict[str, Any]] = {section: {} for section in ("", *self._sections)}
            for key, value in self._values.items():
                section, _, name = key.rpartition(".")
                if key in self._sections:
                    self._check_null(key, value)
                fields[section][name] = value
            if fields["data"].get("class_path") is not None:  # defaults of other data do not apply
                fields["data"].setdefault("name", None)
                fields["clients"].setdefault("count", None)
            run = fields.pop("")
            run = {name: kind(**fields[name]) for name, kind in self._sections.items()} | run
            extra_options = None if self._section is None else run.pop(self._section.section)
            options = Options(**run)
            check(options)
            return options, extra_options
        except UserError as error:
            match = re.match("`([^`]+)`", str(error))
            key = match[1] if match else ""
            while key and key not in self._origins:
                key = key.rpartition(".")[0]
            raise UserError(f"{error} Set {self._origins[key]}." if key else str(error)) from None

    def _check_null(self, key: str, value: Any) -> None:
        """Raise UserError unless the value of a section is null, and may be."""
        must = "be a mapping of keys" + (" or null" if key in MAY_BE_NULL else "")
        advice = how_to_choose(key, value) if isinstance(value, str) else ""
        require(value is None and key in MAY_BE_NULL, key, must, value, advice)


def check(options: Options) -> None:
    """Raise UserError unless there is one source of records, a value for each client, and noise can be computed."""
    check_data(options)
    for key, known in all_keys().items():
        section, _, name = key.rpartition(".")
        value = getattr(getattr(options, section), name, None) if section else None
        names: tuple[str, ...] = ()
        if options.data.class_path is not None and by_client(value):
            names = tuple(map(str, value))  # the data will say whether they are right
        count = len(names) or options.clients.count
        if value is not None and of_one_client(known.hint) and count is not None:
            resolve(key, value, count, options.seed, names)
    if options.privacy is not None and options.privacy.noise_multiplier is None:
        advice = "Set it or noise_multiplier, as in --privacy.epsilon 2. Without privacy: --privacy null."
        must = "be a budget from which the noise is computed"
        require(options.privacy.epsilon is not None, "privacy.epsilon", must, None, advice)


# ---- command line


def _takes_mapping(hint: Any) -> bool:
    return dict in [get_origin(one) or one for one in alternatives(hint)]


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
