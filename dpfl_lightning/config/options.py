"""Options of a run: their types, ranges and `--help` texts. Imports neither torch nor lightning.

A key that selects something by name (partition, model, strategies) keeps its options in a plain mapping, which the
registry of those names checks. All other keys are typed. The `Args` line of each field is its text in `--help`.
`load.py` reads and writes the options.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from dpfl_lightning.config.per_client import Bound, resolve
from dpfl_lightning.errors import nearest, require

#: options that change how a run is executed and reported, but not what it releases; a resumed run may change them
FREE = ("engine", "network", "evaluation", "tracking", "output_dir")

# One value for all clients, a list with one value per client, or a named distribution; see `per_client`.
PerClientInt = int | tuple[int, ...] | dict
PerClientFloat = float | tuple[float, ...] | dict


@dataclass(frozen=True)
class DataOptions:
    """The data set and how its records are distributed to the clients.

    Args:
        name: data set: fashion_mnist, mnist, cifar10, cifar100, or digits and diabetes (a regression), which need no
            download.
        folder: folder with the files of the data set; null uses the system's package or the cache.
        download: download missing files and verify their checksum.
        records_per_client: number of training records of each client, >= 1; null distributes all records.
        held_out_per_client: records that each client sets aside for evaluation, in addition to its training records: a
            fraction in [0, 1) or a number of records; 0 evaluates each client on a share of the test set instead.
        test_per_client: number of test records that each client draws independently of the others, >= 1; clients may
            share test records. null gives clients disjoint shares.
        public_records: number of records at the end of the training set that are public and belong to no client, >= 0.
        use_public: distribute the public records to the clients instead of the private ones. Use it to choose settings
            without access to private records.
        partition: how records are distributed to clients: {name, options}.
        groups: simulated groups of clients with shifted data: {name, sizes: [3, 6, 6, 6]} or {name, count}; null
            simulates none. Test accuracy is then the mean over clients on their held-out or test records, which are
            shifted like their training records.
        mislabelled: simulated wrong labels (y + 1) of training records: {name: records, share: 0.2} affects this share
            of each client's records, {name: clients, share: 0.2} all records of this share of the clients; null
            simulates none.
    """

    name: str = "fashion_mnist"
    folder: str | None = None
    download: bool = True
    records_per_client: int | None = None
    held_out_per_client: float = 0.0
    test_per_client: int | None = None
    public_records: int = 0
    use_public: bool = False
    partition: dict = field(default_factory=lambda: {"name": "iid"})
    groups: dict | None = None
    mislabelled: dict | None = None


@dataclass(frozen=True)
class ClientOptions:
    """Local training of each client in a round.

    Every key except `count` accepts one value, a list with one value per client, or a distribution:
    {name: uniform, low, high}, {name: normal, mean, std, floor}, {name: choice, values}.

    Args:
        count: number of clients, >= 1.
        batch_size: expected number of records in a local step, >= 1; also {name: published}, the batch sizes of the
            noise-aware paper; null uses all records of the client in every step (a full batch).
        local_epochs: passes over the client's records in a round, >= 1.
        learning_rate: learning rate of local SGD, > 0.
        reported_epsilon: budgets that clients report to the server's strategies, > 0, in the forms that privacy.epsilon
            accepts; null reports the true budgets. Noise, ledger and guarantees always follow the true budgets.
    """

    count: int = 20
    batch_size: PerClientInt | None = 32
    local_epochs: PerClientInt = 1
    learning_rate: PerClientFloat = 0.1
    reported_epsilon: PerClientFloat | None = None


@dataclass(frozen=True)
class PrivacyOptions:
    """Bounds on what the releases of each client reveal about one record; `privacy: null` trains without privacy.

    epsilon, delta, clip_norm and noise_multiplier accept one value, a list with one value per client, or a distribution
    as in the section clients. Set epsilon, noise_multiplier or both.

    Args:
        epsilon: budget for the whole run, > 0; also {name: dist1} ... {name: dist9}, the budgets of the noise-aware
            paper (source: published or sampled; scale); null sets no budget, and epsilon is only reported.
        delta: probability with which the bound epsilon may fail, in (0, 1), usually below 1 / records. 0 is possible
            with mechanism laplace; the epsilons of its releases are then added up.
        mechanism: gaussian, or laplace (L1 clipping, full batches), which allows delta 0 but needs far more noise.
        clip_norm: norm to which the gradient of each record is clipped, > 0; the L2 norm, or L1 with mechanism laplace.
        noise_multiplier: std of the noise on the sum of gradients (Laplace: its scale) divided by clip_norm, >= 0; null
            computes it from epsilon. If both are set, a client stops participating when its budget is spent.
        accountant: rdp, prv (tighter, slower), gdp (exact, only for full batches) or paper_ma (of the noise-aware
            paper; valid, but needs more noise than necessary).
        adjacency: relation between neighbouring data sets: add_remove (one record is added or removed) or replace_one
            (one record is replaced; about twice the epsilon).
        sampling: poisson, which the accountants assume, or shuffle, whose epsilon is not proven.
        reserve_rounds: number of rounds of budget kept in reserve, >= 0. A round that a crash interrupts is charged
            again when the run is resumed, which uses one round of the reserve. Without a reserve, the budget then does
            not cover the last round.
        noise_key: 32 hexadecimal digits that make a reproducible SIMULATION: the same configuration gives the same
            bits. It protects nobody, because anyone who knows the digits can remove the noise. null draws fresh noise
            from the operating system for every release.
        diagnostics: report in every round which fraction of each client's gradients was clipped and how many were not
            finite. Both are released without noise, so such a run has no guarantee, and its report states this.
    """

    epsilon: PerClientFloat | None = None
    delta: PerClientFloat = 1e-4
    mechanism: Literal["gaussian", "laplace"] = "gaussian"
    clip_norm: PerClientFloat = 1.0
    noise_multiplier: PerClientFloat | None = None
    accountant: Literal["rdp", "prv", "gdp", "paper_ma"] = "rdp"
    adjacency: Literal["add_remove", "replace_one"] = "add_remove"
    sampling: Literal["poisson", "shuffle"] = "poisson"
    reserve_rounds: int = 0
    noise_key: str | None = None
    diagnostics: bool = False


@dataclass(frozen=True)
class EngineOptions:
    """How local steps are computed. Engines differ in speed, not in meaning.

    Args:
        name: fast, serial (the reference), stacked (many clients as one batch, for small models on a GPU) or trainer
            (one lightning.Trainer per client).
        device: auto uses a GPU if there is one.
        workers: number of clients trained at the same time (engine fast), >= 1; null uses one per core, or one on a
            GPU. With several ranks (torchrun, srun) it is the number on each rank, and null divides the cores of the
            host among its ranks.
    """

    name: Literal["fast", "serial", "stacked", "trainer"] = "fast"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: int | None = None


@dataclass(frozen=True)
class NetworkOptions:
    """A simulated network: how long the messages of a run would take. It does not change the run.

    Args:
        down_megabits_per_second: bandwidth from the server to a client, > 0; null takes no time.
        up_megabits_per_second: bandwidth from a client to the server, > 0; null takes no time.
        latency_seconds: time for one exchange with a client, independent of its size, >= 0.
    """

    down_megabits_per_second: PerClientFloat | None = None
    up_megabits_per_second: PerClientFloat | None = None
    latency_seconds: PerClientFloat = 0.0


@dataclass(frozen=True)
class EvaluationOptions:
    """When the model is evaluated.

    Args:
        every: number of rounds between two evaluations, >= 1; the last round is always evaluated.
    """

    every: int = 1


@dataclass(frozen=True)
class TrackingOptions:
    """How MLflow records the run; `tracking: null` turns tracking off.

    Args:
        experiment: name of the MLflow experiment.
        run_name: name of the run; null uses the name of the output folder.
        uri: MLflow server or store; null uses MLFLOW_TRACKING_URI, or an SQLite file if that is not set.
        tags: additional tags of the run, {name: text}.
    """

    experiment: str = "dpfl_lightning"
    run_name: str | None = None
    uri: str | None = None
    tags: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """All options of a run.

    Args:
        rounds: number of federated rounds, >= 1.
        seed: seed of initialisation, partition and drawn options, >= 0; it never determines the noise.
        data: see DataOptions.
        model: the net: {name, options}. personal_input: true adds an input transformation that each client keeps to
            itself (PRIVATEFL). For your own net: {class_path: package.module.Class, init_args: {...}}.
        clients: see ClientOptions.
        privacy: see PrivacyOptions; None trains without clipping, noise or guarantee.
        strategies: strategies of the server: {name: options}, with at most one base rule (default size_weighted). Name
            a strategy of another package by package.module.Class.
        engine: see EngineOptions.
        network: see NetworkOptions.
        evaluation: see EvaluationOptions.
        tracking: see TrackingOptions; None turns tracking off.
        output_dir: new or empty folder for results, ledger and checkpoints; null creates a folder in runs/.

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
    network: NetworkOptions = field(default_factory=NetworkOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    tracking: TrackingOptions | None = field(default_factory=TrackingOptions)
    output_dir: str | None = None


def to_dict(options: Options) -> dict[str, Any]:
    """Return the resolved configuration as nested dictionaries."""
    return dataclasses.asdict(options)


def departures(options: Options) -> dict[str, Any]:
    """Return the options that differ from their defaults, nested.

    >>> departures(Options(rounds=3, data=DataOptions(name="digits")))
    {'rounds': 3, 'data': {'name': 'digits'}}
    """
    differing: dict[str, Any] = {}
    defaults = to_dict(Options())
    for name, value in to_dict(options).items():
        if name in SECTIONS and value is not None:
            value = {key: one for key, one in value.items() if one != defaults[name][key]}
            if value:
                differing[name] = value
        elif value != defaults[name]:
            differing[name] = value
    return differing


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
    "data.test_per_client": _AT_LEAST_ONE,
    "data.public_records": _AT_LEAST_ZERO,
    "clients.count": _AT_LEAST_ONE,
    "privacy.reserve_rounds": _AT_LEAST_ZERO,
    "privacy.noise_key": _NOISE_KEY,
    "engine.workers": _AT_LEAST_ONE,
    "evaluation.every": _AT_LEAST_ONE,
}
_PER_CLIENT: dict[str, type[int] | type[float]] = {
    "clients.batch_size": int,
    "clients.local_epochs": int,
    "clients.learning_rate": float,
    "clients.reported_epsilon": float,
    "privacy.epsilon": float,
    "privacy.delta": float,
    "privacy.clip_norm": float,
    "privacy.noise_multiplier": float,
    "network.down_megabits_per_second": float,
    "network.up_megabits_per_second": float,
    "network.latency_seconds": float,
}


def check(options: Options) -> None:
    """Check the range of every value, including each client's.

    Raises:
        UserError: the first value that is out of range.
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
    for key in ("data.groups", "data.mislabelled"):
        value = _at(options, key)
        require(value is None or "name" in value, key, "have a `name` or be null", value)
    require(("name" in model) != ("class_path" in model), "model", "have a `name` or a `class_path`", model)
    require(bool(options.strategies), "strategies", "name at least one strategy", options.strategies)
    if options.privacy is not None and options.privacy.noise_multiplier is None:
        advice = "Set it or noise_multiplier, as in --privacy.epsilon 2. Without privacy: --privacy null."
        must = "be a budget from which the noise is computed"
        require(options.privacy.epsilon is not None, "privacy.epsilon", must, None, advice)


def _at(options: Options, key: str) -> Any:
    """Return the value of a dotted key, or None if its section is None."""
    value: Any = options
    for name in key.split("."):
        value = None if value is None else getattr(value, name)
    return value


# ---- keys and their types


class Key(NamedTuple):
    """Type, default and help text of a dotted key."""

    hint: Any
    default: Any
    help: str


def hints(of: type) -> dict[str, Any]:
    """Return the fields of an option class and their types."""
    return get_type_hints(of, globals())


SECTIONS: dict[str, type] = {
    name: kind
    for name, hint in hints(Options).items()
    for kind in (hint, *get_args(hint))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}
MAY_BE_NULL = {name for name, hint in hints(Options).items() if types.NoneType in get_args(hint)}


class Registry(NamedTuple):
    """The place where the names that a key accepts are registered.

    Args:
        module: module inside the package.
        attribute: name of a mapping whose keys are the names.
        given: number of leading arguments that the program passes to a registered function; the others are options.
        functions: name of a function that returns name -> function, if the mapping does not hold functions.
    """

    module: str
    attribute: str
    given: int
    functions: str = ""


REGISTRIES = {
    "strategies": Registry("strategies", "STRATEGIES", 0, "classes"),
    "model": Registry("models", "MODELS", 2),
    "data.partition": Registry("data.partition", "PARTITIONS", 3),
    "data.groups": Registry("data.groups", "GROUPS", 3),
    "data.mislabelled": Registry("data.groups", "UNITS", 2),
}


def names_in(registry: Registry) -> list[str]:
    """Return the names in a registry. They are read from the module's source, because importing it would import torch.

    >>> names_in(REGISTRIES["data.groups"])
    ['rotation', 'label_shift']
    """
    place = Path(__file__).parents[1].joinpath(*registry.module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id == registry.attribute:
                return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    raise LookupError(f"{file} has no registry {registry.attribute}")


@functools.cache
def all_keys() -> dict[str, Key]:
    """Return every dotted key that holds a value. The help of a key that accepts a name lists the names."""
    import docstring_parser

    keys = {}
    for section, kind in [("", Options), *SECTIONS.items()]:
        lines = docstring_parser.parse(kind.__doc__ or "").params
        texts = {line.arg_name: " ".join((line.description or "").split()) for line in lines}
        for name, hint in hints(kind).items():
            if section or name not in SECTIONS:
                key = f"{section}.{name}" if section else name
                more = f" Names: {', '.join(names_in(REGISTRIES[key]))}." if key in REGISTRIES else ""
                keys[key] = Key(hint, getattr(kind(), name), texts[name] + more)
    return keys


def nearest_key(key: str, flags: Iterable[str] = ()) -> str:
    """Return a suggestion for an unknown key: the same last part in another section, else the most similar key."""
    everything = [*all_keys(), *SECTIONS, "model.name", "data.partition.name", "data.groups.name", *flags]
    same_end = [one for one in everything if one.rpartition(".")[2] == key.rpartition(".")[2]]
    return nearest(key, same_end) or nearest(key, everything)


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    types.NoneType: "null",
}


def in_words(hint: Any) -> str:
    """Describe a type: `int | None` is "a whole number or null"."""
    if hint in _WORDS:
        return _WORDS[hint]
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {in_words(get_args(hint)[0]).removeprefix('a ')}s"
    if hint is dict or get_origin(hint) is dict:
        return "a mapping"
    return " or ".join(in_words(one) for one in get_args(hint))
