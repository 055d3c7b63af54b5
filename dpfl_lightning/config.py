"""Options of a run <-> YAML and command line. Imports neither torch nor lightning: `--help` is quick.

`load` reads `--config FILE`, then dotted overrides on top of it (`--rounds 5`, `--privacy null`,
`--clients.batch_size [16,32]`, `--strategies.fedprox.pull 0.1`). What a name chooses (partition, model,
strategies) keeps its options in a plain mapping, which its own registry checks; every other key is typed. The
docstring's line of a field is its text in `--help`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

import yaml

from dpfl_lightning.errors import UserError, nearest, require
from dpfl_lightning.per_client import Bound, resolve

if TYPE_CHECKING:
    import jsonargparse

AddFlags = Callable[[argparse.ArgumentParser], object]

# One value for all clients, a list with one a client, or a named distribution: see `per_client`.
PerClientInt = int | tuple[int, ...] | dict
PerClientFloat = float | tuple[float, ...] | dict


@dataclass(frozen=True)
class DataOptions:
    """Whose records, and how they are dealt to the clients.

    Args:
        name: data set: fashion_mnist, mnist, cifar10, cifar100 or digits (needs no download).
        folder: folder with its files; null looks for the system's package and in the cache.
        download: fetch files that are not found, with checksum.
        records_per_client: training records of each client, >= 1; null deals out all records.
        held_out_per_client: records that each client holds out beside them to be evaluated on: a fraction
            below 1 or a number of records; 0 gives it a share of the test set instead.
        public_records: the last so many training records belong to no client and are public, >= 0.
        use_public: deal out the public records instead, to choose settings without a look at private ones.
        partition: who gets which records: {name, options}; iid, stratified, dirichlet (alpha), shards
            (max_classes), sizes (sizes), overlapping.
    """

    name: str = "fashion_mnist"
    folder: str | None = None
    download: bool = True
    records_per_client: int | None = None
    held_out_per_client: float = 0.0
    public_records: int = 0
    use_public: bool = False
    partition: dict = field(default_factory=lambda: {"name": "iid"})


@dataclass(frozen=True)
class ClientOptions:
    """What each client does in a round.

    All but `count` are one value, a list with one value a client, or {name: uniform, low, high},
    {name: normal, mean, std, floor}, {name: choice, values}.

    Args:
        count: number of clients, >= 1.
        batch_size: expected records of a local step, >= 1; also {name: published}, the noise-aware paper's.
        local_epochs: passes over the own records in a round, >= 1.
        learning_rate: of local SGD, > 0.
    """

    count: int = 20
    batch_size: PerClientInt = 32
    local_epochs: PerClientInt = 1
    learning_rate: PerClientFloat = 0.1


@dataclass(frozen=True)
class PrivacyOptions:
    """What each client's releases may reveal about one record; `privacy: null` is a run without privacy.

    epsilon, delta, clip_norm and noise_multiplier are one value, a list with one value a client, or a named
    distribution as for the clients. Set epsilon, noise_multiplier or both.

    Args:
        epsilon: budget for the whole run, > 0; also {name: dist1} ... {name: dist9}, the noise-aware paper's
            budgets (source: published or sampled; scale); null is no budget: epsilon is only reported.
        delta: probability with which epsilon need not hold, in (0, 1), usually below 1 / records.
        clip_norm: L2 norm to which the gradient of one record is clipped, > 0.
        noise_multiplier: noise std / clip_norm on the sum of gradients, >= 0; null solves it from epsilon.
            With both given, a client whose budget is spent sits out.
        accountant: rdp, prv (tighter, slower) or gdp (exact, for full batches only).
        sampling: poisson, which the accountants assume, or shuffle, whose epsilon is not proven.
        reserve_rounds: rounds of budget set aside for those that a resumed run must charge again, >= 0.
        noise_key: 32 hexadecimal digits that fix all noise, for tests only: who knows them can remove the
            noise. null draws a fresh key.
    """

    epsilon: PerClientFloat | None = None
    delta: PerClientFloat = 1e-4
    clip_norm: PerClientFloat = 1.0
    noise_multiplier: PerClientFloat | None = None
    accountant: Literal["rdp", "prv", "gdp"] = "rdp"
    sampling: Literal["poisson", "shuffle"] = "poisson"
    reserve_rounds: int = 0
    noise_key: str | None = None


@dataclass(frozen=True)
class EngineOptions:
    """How the local steps are computed: speed, never meaning.

    Args:
        name: fast, serial (the reference) or trainer (a lightning.Trainer for each client).
        device: auto takes a GPU where there is one.
        workers: clients trained at the same time (fast engine), >= 1; null is one for each core, one on a GPU.
    """

    name: Literal["fast", "serial", "trainer"] = "fast"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: int | None = None


@dataclass(frozen=True)
class EvaluationOptions:
    """When the model is evaluated.

    Args:
        every: rounds from one evaluation to the next, >= 1; the last round is always evaluated.
    """

    every: int = 1


@dataclass(frozen=True)
class TrackingOptions:
    """Where MLflow keeps the run; `tracking: null` does not track.

    Args:
        experiment: name of the MLflow experiment.
        run_name: name of the run; null takes the name of the output folder.
        uri: MLflow server or store; null takes MLFLOW_TRACKING_URI, else an SQLite file.
    """

    experiment: str = "dpfl_lightning"
    run_name: str | None = None
    uri: str | None = None


@dataclass(frozen=True)
class Options:
    """Everything that decides a run.

    Args:
        rounds: federated rounds, >= 1.
        seed: root of initialisation, partition and drawn options, >= 0; never of the noise.
        data: see DataOptions.
        model: the net: {name, options}; cnn_small, cnn_tiny, lenet5, convnet, resnet18, resnet20, resnet34,
            logistic, linear; or your own: {class_path: package.module.Class, init_args: {...}}.
        clients: see ClientOptions.
        privacy: see PrivacyOptions; None is a run without clipping, noise or guarantee.
        strategies: what the server does: {name: options}, with one base rule of size_weighted, uniform,
            epsilon_weighted, minimum_epsilon; and fedprox (pull); or your own by package.module.Class.
        engine: see EngineOptions.
        evaluation: see EvaluationOptions.
        tracking: see TrackingOptions; None does not track.
        checkpoint_seconds: least time between two checkpoints, >= 0.
        output_dir: new or empty folder for results, ledger and checkpoints; null makes one under runs/.

    >>> Options(rounds=5).clients.count
    20
    """

    rounds: int = 10
    seed: int = 0
    data: DataOptions = field(default_factory=DataOptions)
    model: dict = field(default_factory=lambda: {"name": "cnn_small"})
    clients: ClientOptions = field(default_factory=ClientOptions)
    privacy: PrivacyOptions | None = field(default_factory=PrivacyOptions)
    strategies: dict[str, dict | None] = field(default_factory=lambda: {"size_weighted": {}})
    engine: EngineOptions = field(default_factory=EngineOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    tracking: TrackingOptions | None = field(default_factory=TrackingOptions)
    checkpoint_seconds: float = 10.0
    output_dir: str | None = None


# ---- what a user calls


def load(
    argv: Sequence[str] | None = None,
    extra: AddFlags | None = None,
    *,
    prog: str = "dpfl_lightning",
    description: str | None = None,
    config_of: Callable[[argparse.Namespace], str | None] | None = None,
) -> tuple[Options, argparse.Namespace]:
    """The options of a command line: defaults, `--config FILE`, then overrides; and the command's own flags.

    `--help` and `--print_config` (the resolved YAML, without the noise key) print and end with status 0.

    Args:
        argv: arguments after the program's name; None takes them from the process.
        extra: adds the command's own flags by `add_argument`, as in argparse; their names must differ from
            the fields of `Options`. `--help` shows them above the keys.
        prog: what the help calls the command.
        description: what the help says of it.
        config_of: the file that the command's own flags stand for, if any, in place of `--config`.

    Returns:
        The options, checked, and the values of the command's flags.

    Raises:
        UserError: a missing or malformed file, an unknown key, a wrong type, a value out of range; it says
            which key, which value, where it was set and what to do.

    >>> options, flags = load(["--rounds", "5", "--privacy.epsilon=2", "--dry"],
    ...                       lambda parser: parser.add_argument("--dry", action="store_true"))
    >>> options.rounds, options.privacy.epsilon, flags.dry
    (5, 2.0, True)
    """
    overrides, others = _split(sys.argv[1:] if argv is None else argv)
    flags = _parse_flags(others, extra, prog, description)
    chosen = config_of(flags) if config_of else None
    twice = bool(flags.config and chosen)
    require(not twice, "--config", "be left out", flags.config, f"Other flags choose {chosen}.")
    path = flags.config or chosen
    source = _Source()
    if path:
        source.put_all(_read_yaml(path), path, f"in {path}")
    for key, value in overrides:
        source.put(key, value, "on the command line")
    options = source.options()
    if flags.print_config:
        print(to_yaml(options), end="")
        raise SystemExit(0)
    return options, flags


def from_mapping(raw: Mapping[str, Any]) -> Options:
    """The options of a nested mapping, as a YAML file holds it; missing keys take their defaults.

    Raises:
        UserError: as `load`.

    >>> from_mapping({"rounds": 3, "privacy": None}).rounds
    3
    """
    source = _Source()
    source.put_all(raw, "the mapping", "in the mapping")
    return source.options()


def to_dict(options: Options) -> dict[str, Any]:
    """The resolved configuration, nested, without the noise key: what may be logged."""
    resolved = dataclasses.asdict(options)
    if resolved["privacy"] is not None:
        del resolved["privacy"]["noise_key"]
    return resolved


def departures(options: Options) -> dict[str, Any]:
    """Only what differs from the defaults, nested, without the noise key.

    >>> departures(Options(rounds=3, data=DataOptions(name="digits")))
    {'rounds': 3, 'data': {'name': 'digits'}}
    """
    differing: dict[str, Any] = {}
    defaults = to_dict(Options())
    for name, value in to_dict(options).items():
        if name in _SECTIONS and value is not None:
            value = {key: one for key, one in value.items() if one != defaults[name][key]}
            if value:
                differing[name] = value
        elif value != defaults[name]:
            differing[name] = value
    return differing


def to_yaml(options: Options) -> str:
    """The resolved configuration as YAML that `load` reads back, without the noise key."""
    return dump(to_dict(options))


def dump(raw: Mapping[str, Any]) -> str:
    """A nested mapping of keys as YAML that `load` reads back."""
    return yaml.dump(dict(raw), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110)


def save(options: Options, path: str | Path) -> None:
    """Write `to_yaml(options)` to `path`."""
    Path(path).write_text(to_yaml(options), encoding="utf-8")


# ---- ranges


_AT_LEAST_ONE = Bound("be >= 1", lambda value: value >= 1)
_AT_LEAST_ZERO = Bound("be >= 0", lambda value: value >= 0)
_FRACTION_OR_COUNT = Bound(
    "be a fraction below 1 or a whole number", lambda value: 0 <= value < 1 or (value >= 1 and value % 1 == 0)
)
_NOISE_KEY = Bound("be 32 hexadecimal digits", lambda value: bool(re.fullmatch("[0-9a-fA-F]{32}", value)))
_SCALARS = {
    "rounds": _AT_LEAST_ONE,
    "seed": _AT_LEAST_ZERO,
    "data.records_per_client": _AT_LEAST_ONE,
    "data.held_out_per_client": _FRACTION_OR_COUNT,
    "data.public_records": _AT_LEAST_ZERO,
    "clients.count": _AT_LEAST_ONE,
    "privacy.reserve_rounds": _AT_LEAST_ZERO,
    "privacy.noise_key": _NOISE_KEY,
    "engine.workers": _AT_LEAST_ONE,
    "evaluation.every": _AT_LEAST_ONE,
    "checkpoint_seconds": _AT_LEAST_ZERO,
}
_PER_CLIENT: dict[str, type[int] | type[float]] = {
    "clients.batch_size": int,
    "clients.local_epochs": int,
    "clients.learning_rate": float,
    "privacy.epsilon": float,
    "privacy.delta": float,
    "privacy.clip_norm": float,
    "privacy.noise_multiplier": float,
}


def check(options: Options) -> None:
    """Check the range of every value, also of every client's.

    Raises:
        UserError: the first value out of range.
    """
    for key, bound in _SCALARS.items():
        value = _at(options, key)
        require(value is None or bound.holds(value), key, bound.words, value)
    for key, kind in _PER_CLIENT.items():
        value = _at(options, key)
        if value is not None:
            resolve(key, value, options.clients.count, options.seed, kind)
    partition, model = options.data.partition, options.model
    require("name" in partition, "data.partition", "have a `name`", partition)
    require(("name" in model) != ("class_path" in model), "model", "have a `name` or a `class_path`", model)
    require(bool(options.strategies), "strategies", "name at least one strategy", options.strategies)
    if options.privacy is not None and options.privacy.noise_multiplier is None:
        advice = "Set it or noise_multiplier, as in --privacy.epsilon 2. Without privacy: --privacy null."
        must = "be a budget to solve the noise from"
        require(options.privacy.epsilon is not None, "privacy.epsilon", must, None, advice)


def _at(options: Options, key: str) -> Any:
    """The value at a dotted key; None below a section that is None."""
    value: Any = options
    for name in key.split("."):
        value = None if value is None else getattr(value, name)
    return value


# ---- keys and their types


class _Key(NamedTuple):
    hint: Any
    default: Any
    help: str


def _hints(of: type) -> dict[str, Any]:
    return get_type_hints(of, globals())


_SECTIONS: dict[str, type] = {
    name: kind
    for name, hint in _hints(Options).items()
    for kind in (hint, *get_args(hint))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}
_MAY_BE_NULL = {name for name, hint in _hints(Options).items() if types.NoneType in get_args(hint)}


@functools.cache
def _keys() -> dict[str, _Key]:
    """Every dotted key that holds a value (sections hold keys)."""
    import docstring_parser

    keys = {}
    for section, kind in [("", Options), *_SECTIONS.items()]:
        lines = docstring_parser.parse(kind.__doc__ or "").params
        texts = {line.arg_name: " ".join((line.description or "").split()) for line in lines}
        for name, hint in _hints(kind).items():
            if section or name not in _SECTIONS:
                key = f"{section}.{name}" if section else name
                keys[key] = _Key(hint, getattr(kind(), name), texts[name])
    return keys


def _nearest_key(key: str, flags: Iterable[str] = ()) -> str:
    """The hint for an unknown key: the same last part in another section, else the most alike."""
    everything = [*_keys(), *_SECTIONS, "model.name", "data.partition.name", *flags]
    same_end = [one for one in everything if one.rpartition(".")[2] == key.rpartition(".")[2]]
    return nearest(key, same_end) or nearest(key, everything)


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    types.NoneType: "null",
}


def _in_words(hint: Any) -> str:
    """`int | None` as "a whole number or null"."""
    if hint in _WORDS:
        return _WORDS[hint]
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {_in_words(get_args(hint)[0]).removeprefix('a ')}s"
    if hint is dict or get_origin(hint) is dict:
        return "a mapping"
    return " or ".join(_in_words(one) for one in get_args(hint))


# ---- where values come from


class _Source:
    """Values by dotted key as they were given, and where each of them was set."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}

    def put_all(self, raw: Any, where: str, origin: str) -> None:
        """Set the keys of a whole file or mapping."""
        require(raw is None or isinstance(raw, Mapping), where, "hold a mapping of keys", raw)
        for name, value in (raw or {}).items():
            self.put(str(name), value, origin)

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set one key; it must be known, or lie below one that holds a mapping of options."""
        section = key.partition(".")[0]
        if section in _SECTIONS and (section != key or isinstance(value, Mapping)):
            self._values.pop(section, None)  # a key below a section ends its being null
        if key in _SECTIONS and isinstance(value, Mapping):
            for name, one in value.items():
                self.put(f"{key}.{name}", one, origin)
        elif key in _SECTIONS or key in _keys():
            for values in (self._values, self._origins):
                for below in [one for one in values if one.startswith(f"{key}.")]:
                    del values[below]
            self._values[key], self._origins[key] = value, origin
        else:
            owners = [one for one, known in _keys().items() if "mapping" in _in_words(known.hint)]
            owner = next((one for one in owners if key.startswith(f"{one}.")), None)
            if owner is None:
                raise UserError(f"`{key}` must be a known key. {_nearest_key(key)}".rstrip() + f" Set {origin}.")
            self._put_below(owner, key.removeprefix(f"{owner}."), value, origin)

    def _put_below(self, owner: str, rest: str, value: Any, origin: str) -> None:
        """Set an option inside the mapping that `owner` holds, given or by default."""
        current = self._values.get(owner, _keys()[owner].default)
        options = copy.deepcopy(current) if isinstance(current, dict) else {}
        if rest in ("name", "class_path") and options.get(rest) != value:
            # Options of the old choice do not fit the new one; those set beside the new name do.
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
        """The checked options; an error also says where its key was set."""
        try:
            for key, value in self._values.items():
                _check_null(key, value)
            options = _typed(self._values)
            check(options)
            return options
        except UserError as error:
            found = re.match("`([^`]+)`", str(error))
            key = found[1] if found else ""
            while key and key not in self._origins:
                key = key.rpartition(".")[0]
            raise UserError(f"{error} Set {self._origins[key]}." if key else str(error)) from None


def _check_null(key: str, value: Any) -> None:
    """jsonargparse lets null pass for any type; what a section itself holds here is null or no mapping."""
    if key in _SECTIONS:
        must = "be a mapping of keys" + (" or null" if key in _MAY_BE_NULL else "")
        advice = f"Write {key}: {{name: {value}}}." if isinstance(value, str) else ""
        require(value is None and key in _MAY_BE_NULL, key, must, value, advice)
    elif value is None:
        hint = _keys()[key].hint
        require(types.NoneType in get_args(hint), key, f"be {_in_words(hint)}", value)


def _typed(values: Mapping[str, Any]) -> Options:
    """The values as dataclasses, their types checked and converted by jsonargparse."""
    import jsonargparse

    null = [key for key in values if key in _SECTIONS]
    given: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if key not in null:
            (given.setdefault(section, {}) if section else given)[name] = copy.deepcopy(value)
    try:
        typed = _key_parser().parse_object(given).as_dict()
    except (jsonargparse.ArgumentError, argparse.ArgumentError) as error:
        found = re.search('key "([^"]+)"', str(error))
        if found is None or found[1] not in values:
            raise
        raise _wrong_type(found[1], values[found[1]]) from None
    for key, value in values.items():  # jsonargparse reads a text as YAML once more: a folder "#" would become null
        section, _, name = key.rpartition(".")
        if key in _keys() and isinstance(value, str) and str in (_keys()[key].hint, *get_args(_keys()[key].hint)):
            (typed[section] if section else typed)[name] = value
    sections = {name: None if name in null else kind(**typed[name]) for name, kind in _SECTIONS.items()}
    return Options(**(typed | sections))


def _wrong_type(key: str, value: Any) -> UserError:
    hint = _keys()[key].hint
    advice = ""
    if get_origin(hint) is Literal:
        advice = nearest(str(value), get_args(hint))
    elif isinstance(value, str) and "mapping" in _in_words(hint):
        advice = f"Write {{{value}: {{}}}}." if key == "strategies" else f"Write {{name: {value}}}."
    return UserError(f"`{key}` must be {_in_words(hint)}, got {value!r}. {advice}".rstrip())


# ---- YAML


class _Loader(yaml.SafeLoader):
    """YAML that reads numbers as people write them (1e-4) and refuses what YAML would drop in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                self._refuse(key, f"the key {key.value} a second time")
            if key.value == "privacy" and value.value == "":
                self._refuse(key, "privacy without keys; a run without privacy must say `privacy: null`")
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def _refuse(self, node: yaml.Node, problem: str) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `_Loader` would read as numbers."""


for _style in (_Loader, _Dumper):
    _style.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def _read_yaml(path: str) -> Any:
    try:
        return _parse_yaml(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        near = nearest(path, [str(one) for one in Path(path).parent.glob("*.y*ml")])
        message = f"`--config` must be a file that can be read, got {path!r}: {reason}. {near}"
        raise UserError(message.rstrip()) from None


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f" on line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"`{where}` must be valid YAML, got {problem or error}{line}.") from None


# ---- command line


def _split(argv: Sequence[str]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Overrides of keys of `Options`, and the other arguments."""
    overrides, others = [], []
    words = iter(argv)
    for word in words:
        key, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or key.partition(".")[0] not in _hints(Options):
            others.append(word)
            continue
        if not equals:
            text = next(words, "--")
        require(bool(equals) or not text.startswith("--"), f"--{key}", "be followed by a value", None)
        overrides.append((key, _value(key, text)))
    return overrides, others


def _value(key: str, text: str) -> Any:
    """The text of an override as YAML; for a key that holds text, the text itself."""
    hint = _keys()[key].hint if key in _keys() else None
    if hint is not str and get_origin(hint) is not Literal and str not in get_args(hint):
        return _parse_yaml(text, f"--{key}")
    return None if text == "null" and types.NoneType in get_args(hint) else text


class _CommandParser(argparse.ArgumentParser):
    """The flags of a command. A mistake is a UserError, also one that a flag's `type` raised."""

    def format_help(self) -> str:
        keys = _key_parser().format_help()
        return super().format_help() + "\n" + re.sub(r"<class\s+'(\w+)'>", r"\1", keys)

    def error(self, message: str) -> NoReturn:
        cause = getattr(sys.exc_info()[1], "__context__", None)
        raise cause if isinstance(cause, UserError) else UserError(f"{message}. See --help.")


def _parse_flags(
    words: Sequence[str], extra: AddFlags | None, prog: str, description: str | None
) -> argparse.Namespace:
    usage = f"{prog} [--config FILE] [--KEY VALUE ...] [FLAGS]"
    parser = _CommandParser(prog=prog, usage=usage, description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of the keys below")
    parser.add_argument("--print_config", action="store_true", help="print all keys as YAML and exit")
    if extra is not None:
        extra(parser)
    flags, unknown = parser.parse_known_args(words)
    if unknown:
        word = unknown[0].partition("=")[0]
        near = _nearest_key(word.removeprefix("--"), vars(flags)).replace("`", "`--", 1)
        raise UserError(f"`{word}` must be a known key or flag. {near}".rstrip())
    return flags


@functools.cache
def _key_parser() -> jsonargparse.ArgumentParser:
    """All keys with type, default and text."""
    import docstring_parser
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False, add_help=False, usage=argparse.SUPPRESS)
    groups = {"": parser.add_argument_group("run")}
    for name, kind in _SECTIONS.items():
        text = docstring_parser.parse(kind.__doc__ or "")
        words = f"{text.short_description} {text.long_description or ''}"
        groups[name] = parser.add_argument_group(name, words)
    for key, known in _keys().items():
        group = groups[key.rpartition(".")[0]]
        group.add_argument(f"--{key}", type=known.hint, default=known.default, help=known.help, metavar="VALUE")
    return parser
