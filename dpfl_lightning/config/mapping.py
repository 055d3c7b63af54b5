"""Options from nested mappings and dotted keys, checked, and as YAML. Imports no torch."""

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

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
from dpfl_lightning.config.yaml_text import dump, read_yaml
from dpfl_lightning.errors import UserError, require, shortened

#: keys of mappings whose names are dotted keys of a run
_OF_DOTTED_KEYS = ("sweep.space", "sweep.trials_with")


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
    values = Values()
    values.merge(raw, "the mapping", "in the mapping")
    return values.typed()[0]


def with_values(options: Options, values: Mapping[str, Any], origin: str) -> Options:
    """Return the options with the values of some dotted keys replaced, as if a later override set them.

    A new name drops the options of the old one, except those in `values`. Messages state `origin`.

    >>> with_values(Options(privacy=None), {"model.name": "convnet", "model.width": 8}, "here").model
    {'name': 'convnet', 'width': 8}
    """
    changed = Values()
    changed.merge(dataclasses.asdict(options), "the options", "before")
    for key, value in values.items():
        changed.put(key, value, origin)
    return changed.typed()[0]


def to_yaml(options: Options) -> str:
    """Return the options as YAML that `load` can read."""
    return dump(dataclasses.asdict(options))


class Values:
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


def _takes_mapping(hint: Any) -> bool:
    return dict in [get_origin(one) or one for one in alternatives(hint)]
