"""Reads options from YAML and the command line, and writes them as YAML. Imports no torch, so `--help` is fast.

`load` reads `--config FILE`, then applies dotted overrides (`--rounds 5`, `--privacy null`,
`--clients.batch_size [16,32]`, `--strategies.fedprox.pull 0.1`).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from dpfl_lightning.config import option_help
from dpfl_lightning.config.options import (
    MAY_BE_NULL,
    SECTIONS,
    Options,
    all_keys,
    check,
    hints,
    in_words,
    nearest_key,
    to_dict,
)
from dpfl_lightning.config.yaml_text import dump, parse_yaml, read_yaml
from dpfl_lightning.errors import UserError, nearest, require

if TYPE_CHECKING:
    import jsonargparse

AddFlags = Callable[[argparse.ArgumentParser], object]

#: name of the command that adds a section to the configuration, and of that section
_SEARCH = "sweep"


def load(
    argv: Sequence[str] | None = None,
    extra: AddFlags | None = None,
    *,
    prog: str = "dpfl_lightning",
    description: str | None = None,
    config_of: Callable[[argparse.Namespace], str | None] | None = None,
    section: tuple[str, type] | None = None,
    takes: Sequence[str] = (),
) -> tuple[Options, argparse.Namespace]:
    """Return the options of a command line, and the values of the command's own flags.

    Options are the defaults, then `--config FILE`, then the overrides. `--help`, `--print_config` (the resolved YAML)
    and `--strategies.help` print and exit with status 0.

    Args:
        argv: arguments after the program's name; None reads those of the process.
        extra: adds the command's flags by `add_argument`, as in argparse. Their names must differ from the fields of
            `Options`. `--help` shows them above the option keys.
        prog: name of the command in its help.
        description: description of the command in its help.
        config_of: returns the configuration file that the command's flags imply, if any; it replaces `--config`.
        section: name and dataclass of a section that only this command has. Its value is returned as the flag of that
            name.
        takes: sections whose keys the command line may set; empty allows all keys.

    Returns:
        The checked options and the values of the command's flags.

    Raises:
        UserError: a missing or malformed file, an unknown key, a wrong type or a value out of range. The message names
            the key, the value, where it was set and what to do.

    >>> options, flags = load(["--rounds", "5", "--privacy.epsilon=2", "--dry"],
    ...                       lambda parser: parser.add_argument("--dry", action="store_true"))
    >>> options.rounds, options.privacy.epsilon, flags.dry
    (5, 2.0, True)
    """
    own_section = None if section is None else _Section(*section)
    overrides, flag_words = split(
        sys.argv[1:] if argv is None else argv, () if own_section is None else (own_section.name,)
    )
    for key, text in overrides:
        _check_taken(key, text, takes)
    flags = _parse_flags(flag_words, extra, prog, description, own_section, takes)
    implied = config_of(flags) if config_of else None
    twice = bool(flags.config and implied)
    require(not twice, "--config", "be left out", flags.config, f"Other flags choose {implied}.")
    path = flags.config or implied
    source = _Source()
    if path:
        raw = read_yaml(path)
        _check_meant(raw, path, own_section, [key for key, _ in overrides])
        if own_section is not None and isinstance(raw, Mapping):
            own_section.put_all(raw.get(own_section.name), f"in {path}")
            raw = {name: value for name, value in raw.items() if name != own_section.name}
        source.put_all(raw, path, f"in {path}")
    for key, text in overrides:
        if own_section is not None and key.partition(".")[0] == own_section.name:
            own_section.put(key, parse_yaml(text, f"--{key}"), "on the command line")
        else:
            source.put(key, parse_value(key, text), "on the command line")
    options = source.options()
    if own_section is not None:
        setattr(flags, own_section.name, own_section.typed())
    if flags.print_config:
        print(to_yaml(options), end="")
        if own_section is not None:
            print(dump({own_section.name: dataclasses.asdict(own_section.typed())}), end="")
        raise SystemExit(0)
    return options, flags


def options_file(folder: str, key: str) -> str:
    """Return the options file of the run in `folder`, for `config_of`. `key` is the flag that named the folder.

    Raises:
        UserError: `folder` is not the folder of a run.
    """
    path = Path(folder) / "options.yaml"
    if not path.is_file():
        of_seeds = ", ".join(str(one.parent) for one in sorted(Path(folder).glob("seed_*/options.yaml")))
        advice = f"It contains the runs of several seeds: {of_seeds}." if of_seeds else "See runs/."
        raise UserError(f"`{key}` must be the folder of a run, got {folder!r}, which has no options.yaml. {advice}")
    return str(path)


def from_mapping(raw: Mapping[str, Any]) -> Options:
    """Return the options of a nested mapping, as it is read from YAML. Missing keys have their defaults.

    Raises:
        UserError: see `load`.

    >>> from_mapping({"rounds": 3, "privacy": None}).rounds
    3
    """
    source = _Source()
    source.put_all(raw, "the mapping", "in the mapping")
    return source.options()


def with_values(options: Options, values: Mapping[str, Any], origin: str) -> Options:
    """Return the options with some values replaced, as if they were set by a later override.

    A new name of a model or a strategy drops the options of the old one, except those that `values` also sets.

    Args:
        options: options before the change.
        values: dotted key -> value.
        origin: description of where the values were set, for messages.

    Raises:
        UserError: see `load`.

    >>> with_values(Options(privacy=None), {"model.name": "convnet", "model.width": 8}, "here").model
    {'name': 'convnet', 'width': 8}
    """
    source = _Source()
    source.put_all(to_dict(options), "the options", "before")
    for key, value in values.items():
        source.put(key, value, origin)
    return source.options()


def to_yaml(options: Options) -> str:
    """Return the resolved configuration as YAML that `load` can read."""
    return dump(to_dict(options))


def save(options: Options, path: str | Path) -> None:
    """Write `to_yaml(options)` to `path`."""
    Path(path).write_text(to_yaml(options), encoding="utf-8")


# ---- keys that a command accepts


def _check_taken(key: str, text: str, takes: Sequence[str]) -> None:
    """Raise UserError if `key` is outside the sections `takes`; empty allows all keys."""
    taken = not takes or key.partition(".")[0] in takes
    known = " and ".join(f"--{one}.*" for one in takes)
    advice = f"It accepts only {known}; all other options are those of the run."
    require(taken, f"--{key}", "be left out of this command", text, advice)


def _check_meant(raw: Any, path: str, own_section: _Section | None, keys: Sequence[str]) -> None:
    """Raise UserError if a search gets the file of a run, or a run that of a search. The section tells them apart."""
    if not isinstance(raw, Mapping):
        return
    if own_section is None:
        advice = f"It configures a search: python -m dpfl_lightning.{_SEARCH} --config {path}."
        require(_SEARCH not in raw, "--config", f"be a file without a section {_SEARCH}", path, advice)
        return
    has_section = own_section.name in raw or any(key.partition(".")[0] == own_section.name for key in keys)
    advice = f"It configures a single run: python -m dpfl_lightning.fit --config {path}."
    require(has_section, "--config", f"be a file with a section {own_section.name}", path, advice)


# ---- collecting values


class _Source:
    """The values that were set, by dotted key, and where each of them was set."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}

    def put_all(self, raw: Any, where: str, origin: str) -> None:
        """Set all keys of a file or mapping."""
        require(raw is None or isinstance(raw, Mapping), where, "hold a mapping of keys", raw)
        for name, value in (raw or {}).items():
            self.put(str(name), value, origin)

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set one key. It must be a known key, or lie below a key that holds a mapping of options."""
        section = key.partition(".")[0]
        if section in SECTIONS and (section != key or isinstance(value, Mapping)):
            self._values.pop(section, None)  # setting a key of a section undoes an earlier `section: null`
        if key in SECTIONS and isinstance(value, Mapping):
            for name, one in value.items():
                self.put(f"{key}.{name}", one, origin)
        elif key in SECTIONS or key in all_keys():
            for values in (self._values, self._origins):
                for below in [one for one in values if one.startswith(f"{key}.")]:
                    del values[below]
            self._values[key], self._origins[key] = value, origin
        else:
            owners = [one for one, known in all_keys().items() if "mapping" in in_words(known.hint)]
            owner = next((one for one in owners if key.startswith(f"{one}.")), None)
            if owner is None:
                raise UserError(f"`{key}` must be a known key. {nearest_key(key)}".rstrip() + f" Set {origin}.")
            self._put_below(owner, key.removeprefix(f"{owner}."), value, origin)

    def _put_below(self, owner: str, rest: str, value: Any, origin: str) -> None:
        """Set one option inside the mapping of `owner`, starting from its current or default value."""
        # Named strategies replace the default, as they do in a file; a run without a base rule gets one later.
        default = {} if owner == "strategies" else all_keys()[owner].default
        current = self._values.get(owner, default)
        options = copy.deepcopy(current) if isinstance(current, dict) else {}
        if rest in ("name", "class_path") and options.get(rest) != value:
            # Drop the options of the old choice; keep those that were set together with the new name.
            beside = [one for one in options if self._origins.get(f"{owner}.{one}") == origin]
            options = {one: options[one] for one in beside}
        *path, last = rest.split(".")
        inner = options
        for part in path:
            inner[part] = inner[part] if isinstance(inner.get(part), dict) else {}
            inner = inner[part]
        inner[last] = value
        self._values[owner] = options
        self._origins[f"{owner}.{rest}"] = origin

    def options(self) -> Options:
        """Return the checked options. An error also states where its key was set."""
        try:
            for key, value in self._values.items():
                _check_null(key, value)
            options = _typed(self._values)
            check(options)
            return options
        except UserError as error:
            match = re.match("`([^`]+)`", str(error))
            key = match[1] if match else ""
            while key and key not in self._origins:
                key = key.rpartition(".")[0]
            raise UserError(f"{error} Set {self._origins[key]}." if key else str(error)) from None


class _Section:
    """A section of one command: a dataclass whose fields are numbers, texts, or mappings of names to values."""

    def __init__(self, name: str, kind: type) -> None:
        self.name, self._kind = name, kind
        self._hints = get_type_hints(kind)
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}

    def put_all(self, raw: Any, origin: str) -> None:
        require(raw is None or isinstance(raw, Mapping), self.name, "hold a mapping of keys", raw)
        for name, value in (raw or {}).items():
            self.put(f"{self.name}.{name}", value, origin)

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set `section.field` or `section.field.name`. For a field with a mapping, the rest of the key is one name."""
        field, _, inner = key.removeprefix(f"{self.name}.").partition(".")
        near = nearest(field, self._hints).replace("`", f"`{self.name}.", 1)
        if field not in self._hints or (inner and "mapping" not in in_words(self._hints[field])):
            raise UserError(f"`{key}` must be a known key. {near}".rstrip() + f" Set {origin}.")
        kept = {} if inner == "name" else self._values.get(field) or {}  # a new name drops the options of the old one
        self._values[field] = {**kept, inner: value} if inner else value
        self._origins[field] = origin

    def typed(self) -> Any:
        """Return the dataclass; jsonargparse checks and converts the types."""
        import jsonargparse

        for field, value in self._values.items():
            hint, key = self._hints[field], f"{self.name}.{field}"
            must = f"be {in_words(hint)}"
            require(value is not None or types.NoneType in get_args(hint), key, must, value, self._where(field))
        try:
            typed = self.parser().parse_object({self.name: copy.deepcopy(self._values)}).as_dict()[self.name]
        except (jsonargparse.ArgumentError, argparse.ArgumentError) as error:
            match = re.search(rf'key "{self.name}\.([^"]+)"', str(error))
            if match is None or match[1] not in self._values:
                raise
            hint, value = self._hints[match[1]], self._values[match[1]]
            near = nearest(str(value), get_args(hint)) if get_origin(hint) is Literal else ""
            key = f"{self.name}.{match[1]}"
            raise UserError(
                f"`{key}` must be {in_words(hint)}, got {value!r}. {near} {self._where(match[1])}".replace("  ", " ")
            ) from None
        # Keep texts and mappings as they are, because jsonargparse would parse texts as YAML a second time.
        kept = {name: value for name, value in self._values.items() if isinstance(value, str | Mapping)}
        return self._kind(**{**typed, **kept})

    def keys(self) -> list[str]:
        """Return the dotted keys, with the section's name."""
        return [f"{self.name}.{field}" for field in self._hints]

    def parser(self) -> jsonargparse.ArgumentParser:
        """Return a parser with each key's type, default and help."""
        import docstring_parser
        import jsonargparse

        text = docstring_parser.parse(self._kind.__doc__ or "")
        lines = {line.arg_name: " ".join((line.description or "").split()) for line in text.params}
        parser = jsonargparse.ArgumentParser(exit_on_error=False, add_help=False, usage=argparse.SUPPRESS)
        group = parser.add_argument_group(self.name, f"{text.short_description} {text.long_description or ''}")
        for name, hint in self._hints.items():
            default = getattr(self._kind(), name)
            group.add_argument(f"--{self.name}.{name}", type=hint, default=default, help=lines[name], metavar="VALUE")
        return parser

    def _where(self, field: str) -> str:
        return f"Set {self._origins[field]}."


def _check_null(key: str, value: Any) -> None:
    """Check for null, which jsonargparse accepts for every type. A section's own value must be null or a mapping."""
    if key in SECTIONS:
        must = "be a mapping of keys" + (" or null" if key in MAY_BE_NULL else "")
        advice = f"Write {key}: {{name: {value}}}." if isinstance(value, str) else ""
        require(value is None and key in MAY_BE_NULL, key, must, value, advice)
    elif value is None:
        hint = all_keys()[key].hint
        require(types.NoneType in get_args(hint), key, f"be {in_words(hint)}", value)


def _typed(values: Mapping[str, Any]) -> Options:
    """Return the values as dataclasses; jsonargparse checks and converts the types."""
    import jsonargparse

    null = [key for key in values if key in SECTIONS]
    given: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if key not in null:
            (given.setdefault(section, {}) if section else given)[name] = copy.deepcopy(value)
    try:
        typed = _key_parser().parse_object(given).as_dict()
    except (jsonargparse.ArgumentError, argparse.ArgumentError) as error:
        match = re.search('key "([^"]+)"', str(error))
        if match is None or match[1] not in values:
            raise
        raise _wrong_type(match[1], values[match[1]]) from None
    for key, value in values.items():  # jsonargparse parses texts as YAML a second time: folder "#" would become null
        section, _, name = key.rpartition(".")
        hint = all_keys()[key].hint if key in all_keys() else None
        if isinstance(value, str) and (hint is str or _may_be_text(hint)):
            (typed[section] if section else typed)[name] = value
    sections = {name: None if name in null else kind(**typed[name]) for name, kind in SECTIONS.items()}
    return Options(**(typed | sections))


def _wrong_type(key: str, value: Any) -> UserError:
    hint = all_keys()[key].hint
    advice = ""
    if get_origin(hint) is Literal:
        advice = nearest(str(value), get_args(hint))
    elif isinstance(value, str) and "mapping" in in_words(hint):
        advice = f"Write {{{value}: {{}}}}." if key == "strategies" else f"Write {{name: {value}}}."
    return UserError(f"`{key}` must be {in_words(hint)}, got {value!r}. {advice}".rstrip())


# ---- command line


def split(argv: Sequence[str], also: Sequence[str] = ()) -> tuple[list[tuple[str, str]], list[str]]:
    """Separate overrides of options from all other arguments.

    Args:
        argv: arguments of the command line.
        also: names of further sections whose keys count as overrides.

    Returns:
        The overrides as (key, text), and the other arguments, which include `--KEY.help`.

    Raises:
        UserError: a key has no value.

    >>> split(["--rounds", "5", "--resume", "runs/x", "--privacy.epsilon=2"])
    ([('rounds', '5'), ('privacy.epsilon', '2')], ['--resume', 'runs/x'])
    """
    overrides, others = [], []
    words = iter(argv)
    for word in words:
        key, equals, text = word.removeprefix("--").partition("=")
        ours = word.startswith("--") and f"--{key}" not in option_help.FLAGS
        if not ours or key.partition(".")[0] not in (*hints(Options), *also):
            others.append(word)
            continue
        if not equals:
            text = next(words, "--")
        require(bool(equals) or not text.startswith("--"), f"--{key}", "be followed by a value", None)
        overrides.append((key, text))
    return overrides, others


def parse_value(key: str, text: str) -> Any:
    """Parse the text of an override as YAML; a key that holds text keeps the text itself."""
    hint = all_keys()[key].hint if key in all_keys() else None
    if not (hint is str or get_origin(hint) is Literal or _may_be_text(hint)):
        return parse_yaml(text, f"--{key}")
    return None if text == "null" and types.NoneType in get_args(hint) else text


def _may_be_text(hint: Any) -> bool:
    """Return whether the type is a union that includes text."""
    return isinstance(hint, types.UnionType) and str in get_args(hint)


class _CommandParser(argparse.ArgumentParser):
    """Parser for the flags of a command. Mistakes raise UserError, including those raised by a flag's `type`."""

    section: _Section | None = None
    takes: Sequence[str] = ()

    def format_help(self) -> str:
        keys = [_key_parser(*self.takes), *([] if self.section is None else [self.section.parser()])]
        texts = [re.sub(r"<class\s+'(\w+)'>", r"\1", one.format_help()) for one in reversed(keys)]
        return "\n".join([super().format_help(), *texts])

    def error(self, message: str) -> NoReturn:
        cause = getattr(sys.exc_info()[1], "__context__", None)
        raise cause if isinstance(cause, UserError) else UserError(f"{message}. See --help.")


class _NamesHelp(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, name: Any, option: str | None = None) -> NoReturn:
        print(option_help.help_text(option_help.FLAGS[str(option)], name))
        raise SystemExit(0)


def _parse_flags(
    words: Sequence[str],
    extra: AddFlags | None,
    prog: str,
    description: str | None,
    section: _Section | None,
    takes: Sequence[str],
) -> argparse.Namespace:
    usage = f"{prog} [--config FILE] [--KEY VALUE ...] [FLAGS]"
    parser = _CommandParser(prog=prog, usage=usage, description=description, allow_abbrev=False)
    parser.section, parser.takes = section, takes
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with any of the keys below, or the name of a preset such as fmnist"
    )
    parser.add_argument("--print_config", action="store_true", help="print all keys as YAML and exit")
    helps = [flag for flag, key in option_help.FLAGS.items() if not takes or key.partition(".")[0] in takes]
    text = "list the names that the key accepts and exit; with NAME, show the options of that name"
    parser.add_argument(*helps, action=_NamesHelp, nargs="?", metavar="NAME", help=text)
    if extra is not None:
        extra(parser)
    flags, unknown = parser.parse_known_args(words)
    if unknown:
        word = unknown[0].partition("=")[0]
        section_keys = [] if section is None else section.keys()
        near = nearest_key(word.removeprefix("--"), [*vars(flags), *section_keys]).replace("`", "`--", 1)
        raise UserError(f"`{word}` must be a known key or flag. {near}".rstrip())
    return flags


@functools.cache
def _key_parser(*sections: str) -> jsonargparse.ArgumentParser:
    """Return a parser for all keys, or for those of some sections, with type, default and help."""
    import docstring_parser
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False, add_help=False, usage=argparse.SUPPRESS)
    groups = {} if sections else {"": parser.add_argument_group("run")}
    for name, kind in ((name, kind) for name, kind in SECTIONS.items() if not sections or name in sections):
        text = docstring_parser.parse(kind.__doc__ or "")
        words = f"{text.short_description} {text.long_description or ''}"
        groups[name] = parser.add_argument_group(name, words)
    for key, known in all_keys().items():
        if (group := groups.get(key.rpartition(".")[0])) is None:
            continue
        group.add_argument(f"--{key}", type=known.hint, default=known.default, help=known.help, metavar="VALUE")
    return parser
