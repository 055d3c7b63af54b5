"""Options of a run: their types, ranges and `--help` texts. Imports neither torch nor lightning.

A key that selects something by name (partition, model, strategies) keeps its options in a mapping, which the registry
of those names checks. The `Args` line of each field is its text in `--help`.
"""

import dataclasses
import functools
import inspect
import math
import operator
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval

from dpfl_lightning.config.published import DRAWN
from dpfl_lightning.config.registry import NAMES, REGISTRIES, USERS, check_names, described, names_of
from dpfl_lightning.config.typed import PerClient, That, alternatives, in_words, valid
from dpfl_lightning.errors import nearest, require, shortened
from dpfl_lightning.runtime.text import without_credentials

#: options that change how a run is executed and reported, but not what it releases; a resumed run may change them
FREE = ("engine", "network", "evaluation", "tracking", "output_dir")

MOST_ROWS = 1024  # of a person
_MOST = 10**9
_NOISE_KEY = That(lambda value: re.fullmatch("[0-9a-fA-F]{32}", value) is not None, "of 32 hexadecimal digits")
_ONE_CHOICE = That(lambda value: ("name" in value) != ("class_path" in value), "with a `name` or a `class_path`")

Count = Annotated[int, Interval(ge=1, le=_MOST)]
Rounds = Annotated[int, Interval(ge=1, le=1_000_000)]
Positive = Annotated[float, Interval(gt=0)]
PositiveFinite = Annotated[float, Interval(gt=0, lt=math.inf)]
NotNegative = Annotated[float, Interval(ge=0, lt=math.inf)]
Named = Annotated[dict, That(lambda value: "name" in value, "with a `name`")]
Strategies = Annotated[dict[str, dict | None], That(bool, "of at least one strategy")]


#: a class that derives from Section, or None; mypy does not know that a class can be the key of a cache
SectionKind = Any


class Section:
    """Checks the types and ranges of its values when it is made, in Python as in YAML. Raises UserError."""

    section: ClassVar[str]

    def __init_subclass__(cls, section: str) -> None:
        cls.section = section

    def __post_init__(self) -> None:
        kind: SectionKind = type(self)
        for key, hint in hints_of(kind).items():
            name = key.rpartition(".")[2]
            object.__setattr__(self, name, checked(key, getattr(self, name), hint))


@dataclass(frozen=True)
class DataOptions(Section, section="data"):
    """A public data set and how its records are distributed to simulated clients, or your own clients (class_path).

    Args:
        name: data set; digits and diabetes (a regression) need no download; femnist (JSON of LEAF) and lending_club
            (CSV of loans) are read from data.folder, as your own records. null with class_path.
        folder: folder with the files of the data set; null uses the system's package or the cache. Files without the
            published digests are records of your own, see privacy.account.
        download: download missing files and verify their checksum.
        records_per_client: number of training records of each client; null distributes all records.
        records_per_person: simulated persons: each client's records are grouped at random, this many a person; null
            simulates none.
        held_out_per_client: records that each client sets aside for evaluation, in addition to its training records: a
            fraction in [0, 1) or a number of records; 0 evaluates each client on a share of the test set instead.
        test_per_client: number of test records that each client draws independently of the others; clients may
            share test records. null gives clients disjoint shares.
        public_records: number of records at the end of the training set that are public and belong to no client.
        use_public: distribute the public records to the clients instead of the private ones. Use it to choose settings
            without access to private records.
        partition: how records are distributed to clients: {name, options}.
        groups: simulated groups of clients with shifted data: {name, sizes: [3, 6, 6, 6]} or {name, count}; null
            simulates none. Test accuracy is then the mean over clients on their held-out or test records, which are
            shifted like their training records.
        label_noise: simulated wrong labels (y + 1) of training records: {name: records, share: 0.2} affects this share
            of each client's records, {name: clients, share: 0.2} all records of this share of the clients; null
            simulates none.
        class_path: your own data: package.module.Class or a function that returns a Population, a list of data sets
            with one for each client, a mapping from the clients' names to data sets, or a LightningDataModule. For
            example dpfl_lightning.Population.from_dataframe with init_args {df: FILE.csv, client: COLUMN, label:
            COLUMN}. The other keys of this section, but init_args and population_args, have to be left out.
        init_args: arguments of class_path.
        population_args: arguments of Population.from_datasets or from_datamodule, such as num_classes, held_out and
            lazy, for what class_path returns if it is no Population.
    """

    name: str | None = "fashion_mnist"
    folder: str | None = None
    download: bool = True
    records_per_client: Count | None = None
    records_per_person: Count | None = None
    held_out_per_client: Annotated[float, Interval(ge=0, lt=1)] | Count = 0.0
    test_per_client: Count | None = None
    public_records: Annotated[int, Interval(ge=0, le=_MOST)] = 0
    use_public: bool = False
    partition: Named = field(default_factory=lambda: {"name": "iid"})
    groups: Named | None = None
    label_noise: Named | None = None
    class_path: str | None = None
    init_args: dict = field(default_factory=dict)
    population_args: dict = field(default_factory=dict)


#: keys of the section data for clients that a user's class or function makes
OWN_DATA = ("class_path", "init_args", "population_args")


@dataclass(frozen=True)
class ClientOptions(Section, section="clients"):
    """Local training of each client in a round.

    batch_size, local_epochs, learning_rate and reported_epsilon accept one value, a mapping from the clients' names to
    values such as {berlin: 16, oslo: 64}, a list with one value per client in the order of their names, or a
    distribution: {name: uniform, low, high}, {name: normal, mean, std, floor}, {name: choice, values}.

    Args:
        count: number of clients; null with data.class_path, which decides it.
        batch_size: expected number of records in a local step; also {name: published}, the batch sizes of the
            noise-aware paper; null uses all records of the client in every step (a full batch).
        local_epochs: passes over the client's records in a round.
        learning_rate: learning rate of local steps.
        optimizer: what local steps do with noisy gradients: {name: sgd, momentum: 0.9}, {name: adam} or {name: adamw};
            every client starts each round with a new optimiser. It costs no privacy. A LightningModule with
            `configure_optimizers` or ClientModule(optimizer=...) uses that instead, and its learning rate.
        schedule: factor of the learning rate in each round, such as {name: cosine, warmup_rounds: 5}, {name: linear},
            {name: step, every: 10, gamma: 0.5}, {name: inverse, half_after: 200}.
        reported_epsilon: budgets that clients report to the server's strategies, in the forms that privacy.epsilon
            accepts; null reports the true budgets. Noise, ledger and guarantees always follow the true budgets.
    """

    count: Annotated[int, Interval(ge=1, le=1_000_000)] | None = 20
    batch_size: PerClient[Count] | None = 32
    local_epochs: PerClient[Annotated[int, Interval(ge=1, le=100_000)]] = 1
    learning_rate: PerClient[PositiveFinite] = 0.1
    optimizer: Named = field(default_factory=lambda: {"name": "sgd"})
    schedule: Named = field(default_factory=lambda: {"name": "constant"})
    reported_epsilon: PerClient[Positive] | None = None


@dataclass(frozen=True)
class PrivacyOptions(Section, section="privacy"):
    """Bounds on what the releases of each client reveal about a record or person; `privacy: null` trains without them.

    epsilon, delta, clip_norm and noise_multiplier accept one value, a mapping from the clients' names to values, a list
    with one value per client, or a distribution, as in the section clients. Set epsilon, noise_multiplier or both.

    Args:
        epsilon: budget for the whole run; also {name: dist1} ... {name: dist9}, the budgets of the noise-aware
            paper (source: published or sampled; scale); null sets no budget, and epsilon is only reported.
        delta: probability with which the bound epsilon may fail, usually below 1 / records (persons). 0 is possible
            with mechanism laplace; the epsilons of its releases are then added up.
        mechanism: gaussian, or laplace (L1 clipping, full batches), which allows delta 0 but needs far more noise.
        clip_norm: norm to which the gradient of each record is clipped; the L2 norm, or L1 with mechanism laplace.
        noise_multiplier: std of the noise on the sum of gradients (Laplace: its scale) divided by clip_norm; null
            computes it from epsilon. If both are set, a client stops participating when its budget is spent.
        accountant: computes epsilon. pld is tight, so that a budget needs the least noise; rdp needs more noise, and
            paper_ma, the accountant of the noise-aware paper, still more.
        adjacency: relation between neighbouring data sets: add_remove (one record is added or removed) or replace_one
            (one record is replaced; about twice the epsilon).
        sampling: poisson, which the accountants assume, or shuffle, whose epsilon is not proven.
        reserve_rounds: number of rounds of budget kept in reserve. A round that a crash interrupts is charged
            again when the run is resumed, which uses one round of the reserve. Without a reserve, the budget then does
            not cover the last round.
        noise_key: 32 hexadecimal digits that make a reproducible SIMULATION: the same configuration gives the same
            bits. It protects nobody, because anyone who knows the digits can remove the noise. null draws fresh noise
            from the operating system for every release.
        unit: what epsilon protects, and what batch_size, delta and steps count: record is a row of the data; person has
            all rows with the same id, of which up to rows_per_person are used, and needs data that name persons.
        rows_per_person: with unit person, the number of rows that a person has in training at most; which ones is
            secret and stays the same for a run. With unit record, a public maximum up to which the guarantee also says
            what holds for persons with several rows. null with unit record says nothing about persons.
        account: file to which all runs on the same records are charged, so that their epsilons are added up (`dpfl
            account`). auto: your file (DPFL_ACCOUNT, or under your data folder) for records of your own, none for
            public data sets and simulations with noise_key; null: none.
        diagnostics: report in every round which fraction of each client's gradients was clipped and how many were not
            finite. Both are released without noise, so such a run has no guarantee, and its report states this.
    """

    epsilon: PerClient[Positive] | None = None
    delta: PerClient[Annotated[float, Interval(ge=0, lt=1)]] = 1e-4
    mechanism: str = "gaussian"
    clip_norm: PerClient[PositiveFinite] = 1.0
    noise_multiplier: PerClient[NotNegative] | None = None
    accountant: str = "pld"
    adjacency: Literal["add_remove", "replace_one"] = "add_remove"
    sampling: Literal["poisson", "shuffle"] = "poisson"
    reserve_rounds: Annotated[int, Interval(ge=0, le=1_000_000)] = 0
    noise_key: Annotated[str, _NOISE_KEY] | None = None
    unit: str = "record"
    rows_per_person: Annotated[int, Interval(ge=1, le=MOST_ROWS)] | None = None
    account: str | None = "auto"
    diagnostics: bool = False


@dataclass(frozen=True)
class EngineOptions(Section, section="engine"):
    """How local steps are computed. Engines differ in speed, not in meaning.

    Args:
        name: fast is the default, also on a GPU, where it trains one client after the other; serial is the reference;
            trainer uses one lightning.Trainer per client.
        device: auto uses a GPU if there is one.
        workers: number of clients trained at the same time (engine fast); null uses one per core, or one on a
            GPU. With several ranks (torchrun, srun) it is the number on each rank, and null divides the cores of the
            host among its ranks.
        trainer: arguments of the lightning.Trainer of each client and round (engine trainer): callbacks, [package.Class
            or {class_path, init_args}]; a logger {class_path, init_args}; profiler; enable_progress_bar;
            enable_model_summary; log_every_n_steps; default_root_dir. Others are refused with the reason.
    """

    name: str = "fast"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: Annotated[int, Interval(ge=1, le=MOST_ROWS)] | None = None
    trainer: dict = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkOptions(Section, section="network"):
    """A simulated network: how long the rounds of a run would take, and which updates are lost.

    Args:
        down_megabits_per_second: bandwidth from the server to a client; null takes no time.
        up_megabits_per_second: bandwidth from a client to the server; null takes no time.
        latency_seconds: time for one exchange with a client, independent of its size.
        dropout: probability that a client's update of a round is lost. The client is charged all the same,
            and its release may have been seen. With `feature_means` the release of features is lost.
        compute_seconds: mean time in which a client trains in a round. The time in each round is drawn from an
            exponential distribution.
        time_limit: seconds after which a client's update is lost in the same way; null waits. The time is that of
            this section: messages and `compute_seconds`. For nodes of sites see `fit --node_wait`.
        min_participants: fewest updates with which a round changes models, of all models together and before strategies
            leave some out and at most the number of clients. If fewer clients can pay, none is charged.
    """

    down_megabits_per_second: PerClient[Positive] | None = None
    up_megabits_per_second: PerClient[Positive] | None = None
    latency_seconds: PerClient[NotNegative] = 0.0
    dropout: PerClient[Annotated[float, Interval(ge=0, le=1)]] = 0.0
    compute_seconds: PerClient[NotNegative] = 0.0
    time_limit: PerClient[Positive] | None = None
    min_participants: Count = 1


@dataclass(frozen=True)
class EvaluationOptions(Section, section="evaluation"):
    """When the model is evaluated, and how exactly times are reported.

    Args:
        every: number of rounds between two evaluations; the last round is always evaluated.
        metrics: list of metrics beside accuracy, such as [auroc, f1]; empty uses those of the task. Values of several
            classes are averaged (macro). A torchmetrics.Metric of your own is package.module.Class or {class_path,
            init_args, name}; without a name it has that of its class in snake case.
        exact_times: report the times of rounds and of the run as measured, which a caveat of the guarantee states. By
            default only times of the whole run are reported, rounded up to a power of two seconds, because a time can
            depend on records. Simulations and runs without privacy always report exact times. A resumed run cannot
            change it.
        fairness: compare clients with models of the pooled records of their true group, without noise: {name:
            central_models, epochs: 20} has the gaps F_acc and F_loss. Needs data.groups, and privacy.noise_key or no
            privacy, because it sees all records. null compares nothing. A resumed run cannot change it.
    """

    every: Count = 1
    metrics: tuple[str | dict, ...] = ()
    exact_times: bool = False
    fairness: Named | None = None


@dataclass(frozen=True)
class TrackingOptions(Section, section="tracking"):
    """How MLflow and other loggers record the run; `tracking: null` turns tracking off.

    Args:
        experiment: name of the MLflow experiment.
        run_name: name of the run; null names it by its strategies and budgets, such as noise_aware eps 0.9-2.9.
        uri: MLflow server or store, without credentials; null uses MLFLOW_TRACKING_URI, which is written nowhere, or an
            SQLite file if that is not set.
        tags: additional tags of the run, {name: text}.
        per_client: send the curves of every client, in addition to the smallest, median, mean and largest value.
        pickles: send models as pickles, for mlflow.pytorch.load_model, instead of safetensors; who loads a pickle runs
            whatever code is in it, with all rights of that user.
        loggers: Lightning loggers beside MLflow, [{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {...}}].
    """

    experiment: str = "dpfl_lightning"
    run_name: str | None = None
    uri: str | None = None
    tags: dict = field(default_factory=dict)
    per_client: bool = False
    pickles: bool = False
    loggers: tuple[dict, ...] = ()


@dataclass(frozen=True)
class Options(Section, section=""):
    """All options of a run.

    Args:
        rounds: number of federated rounds.
        seed: seed of initialisation, partition and drawn options; it never determines the noise.
        data: see DataOptions.
        model: the model: {name, options}. personal_input: true adds an input transformation that each client keeps to
            itself (PRIVATEFL). For your own model: {class_path: package.module.class_or_function, init_args: {...}}.
            fix: true replaces layers that mix records, such as BatchNorm by GroupNorm, by Opacus' ModuleValidator.
            per_record: true trains with the losses of single records also if those of a batch are others.
            class_priors: [0.9, 0.1] weighs the loss of each record by the inverse of its class's public share.
        task: what labels and outputs mean, which gives loss, accuracy and metrics: a name, or {name, options}; null
            infers it from the shapes of the model's outputs and the labels, and the plan shows it.
        clients: see ClientOptions.
        privacy: see PrivacyOptions; None trains without clipping, noise or guarantee.
        strategies: of the server: {name: options}, with at most one aggregation rule (default size_weighted). Name a
            strategy of another package by package.module.Class.
        engine: see EngineOptions.
        network: see NetworkOptions.
        evaluation: see EvaluationOptions.
        tracking: see TrackingOptions; None turns tracking off.
        output_dir: new or empty folder for results, ledger and checkpoints; null creates a folder in runs/.

    >>> Options(rounds=5).clients.count
    20
    """

    rounds: Rounds = 10
    seed: Annotated[int, Interval(ge=0, lt=2**63)] = 0
    data: DataOptions = field(default_factory=DataOptions)
    model: Annotated[dict, _ONE_CHOICE] = field(default_factory=lambda: {"name": "cnn_small"})
    task: str | Named | None = None
    clients: ClientOptions = field(default_factory=ClientOptions)
    privacy: PrivacyOptions | None = field(default_factory=PrivacyOptions)
    strategies: Strategies = field(default_factory=lambda: {"size_weighted": {}})
    engine: EngineOptions = field(default_factory=EngineOptions)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    tracking: TrackingOptions | None = field(default_factory=TrackingOptions)
    output_dir: str | None = None


def changed_options(options: Options | Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from their defaults, nested; of a mapping also what is no option of a run.

    >>> changed_options(Options(rounds=3, data=DataOptions(name="digits")))
    {'rounds': 3, 'data': {'name': 'digits'}}
    """
    differing, defaults = {}, dataclasses.asdict(Options())
    for name, value in (dataclasses.asdict(options) if isinstance(options, Options) else options).items():
        if value != defaults.get(name):
            partly = name in SECTIONS and value is not None
            differing[name] = {k: one for k, one in value.items() if one != defaults[name][k]} if partly else value
    return differing


def named(options: Options, name: str, tags: Mapping[str, Any]) -> Options:
    """Return the options of a run with its name and further tags in MLflow."""
    if options.tracking is None:
        return options
    tracking = dataclasses.replace(options.tracking, run_name=name, tags={**options.tracking.tags, **tags})
    return dataclasses.replace(options, tracking=tracking)


def check_data(options: Options) -> None:
    """Raise UserError unless there is one source of records, and all keys of the data are about it."""
    data, name, own = options.data, options.data.name, options.data.class_path is not None
    require(own or name is not None, "data.name", "be a data set if there is no data.class_path", name)
    require(own or options.clients.count is not None, "clients.count", "be a number without data.class_path", None)
    need_not = [key for key in vars(data) if (key not in OWN_DATA if own else key in OWN_DATA[1:])]
    for key in need_not:
        value, unset = getattr(data, key), None if key == "name" else getattr(DataOptions(), key)
        must = f"be null or left out {'with' if own else 'without'} data.class_path"
        require(value == unset, f"data.{key}", must, value)


# ---- keys and their types


class Key(NamedTuple):
    """Type, default and help text of a dotted key."""

    hint: Any
    default: Any
    help: str


SECTIONS: dict[str, type[Section]] = {
    name: kind
    for name, hint in get_type_hints(Options).items()
    for kind in alternatives(hint)
    if isinstance(kind, type) and issubclass(kind, Section)
}
MAY_BE_NULL = {name for name, hint in get_type_hints(Options).items() if types.NoneType in get_args(hint)}


@functools.cache
def all_keys(extra: SectionKind = None) -> dict[str, Key]:
    """Return every dotted key that holds a value, also those of an `extra` section."""
    keys = {}
    for kind in (*([extra] if extra else []), Options, *SECTIONS.values()):
        texts, fields = described(inspect.getdoc(kind) or ""), {one.name: one for one in dataclasses.fields(kind)}
        for key, hint in hints_of(kind).items():
            name = key.rpartition(".")[2]
            listed = any(word in in_words(hint) for word in names_of(key))
            names = [] if listed else names_of(key)
            more = f" Names: {', '.join(names)}." if names else ""
            make = fields[name].default_factory
            default = fields[name].default if make is dataclasses.MISSING else make()
            keys[key] = Key(hint, default, " ".join(texts[name].split()).partition(": ")[2] + more)
    return keys


@functools.cache
def hints_of(kind: SectionKind) -> dict[str, Any]:
    """Return dotted key -> type of each value of a section."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        key = f"{kind.section}.{name}".removeprefix(".")
        if key in NAMES and str in (hint, *get_args(hint)):
            one: Any = Literal[*names_of(key)]
            kinds = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
            named = (one if kind is str else kind for kind in kinds)
            hint = functools.reduce(operator.or_, named) if str in kinds else tuple[one, ...]
        if name != "section" and key not in SECTIONS:
            found[key] = hint
    return found


def checked(key: str, value: Any, hint: Any) -> Any:
    """Return the value of a key with its type. Raises UserError unless it has this type, range and known names."""
    value = valid(key, value, hint, how_to_write(key, value, hint))
    _check_parts(key, value)
    if key == "tracking.uri" and value is not None:
        public, must = without_credentials(value), "have no user name, password or token"
        advice = "Set MLFLOW_TRACKING_URI instead, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
        require(value == public, key, must, public, advice)
    if isinstance(value, Mapping) or key in USERS:
        check_names(key, value)
    return value


def _check_parts(key: str, value: Any) -> None:
    """Raise UserError for a text with a null character, and for absurd numbers among the options of a choice by name.

    The arguments of a user's class are not checked.
    """
    if isinstance(value, str):
        require("\0" not in value, key, "have no null character", value)
    elif isinstance(value, Mapping) and key.startswith(tuple(REGISTRIES)):
        for name, one in value.items():
            if name != "init_args" and "." not in str(name):
                _check_parts(f"{key}.{name}", one)
    elif isinstance(value, list | tuple):
        for one in value:
            _check_parts(key, one)
    elif isinstance(value, int | float) and key.startswith(tuple(REGISTRIES)):
        require(abs(value) <= _MOST, key, f"be a finite number of at most {_MOST:,}", value)


def how_to_write(key: str, value: Any, hint: Any) -> str:
    """Return how to write a value of another type than YAML reads; empty if there is no such way."""
    kinds = [get_origin(one) or one for one in alternatives(hint)]
    if not isinstance(value, str):
        quoted = "Write it in quotation marks." if str in kinds and isinstance(value, int | float) else ""
        return "Choose a delta below 1 / records of a client, such as 1e-5." if key == "privacy.delta" else quoted
    if {int, float} & {*kinds} and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value):
        return "Write it without quotation marks."
    if tuple in kinds and ("," in value or dict not in kinds):
        return f"Write [{value}], in square brackets."
    return how_to_choose(key, value) if dict in kinds and (tuple not in kinds or nearest(value, DRAWN)) else ""


def how_to_choose(key: str, value: str) -> str:
    """Return how to write the choice `value`, where a key that takes a mapping got a text."""
    value = shortened(value)
    near = "" if "." in value or value in names_of(key) else nearest(value, names_of(key))
    name = near.split("`")[1] if near else value
    if key == "strategies":
        return f"{near} Write {{{name}: {{}}}}, or --strategies.{name} {{}}.".strip()
    own = "." in name and (key == "model" or f"{key}.class_path" in all_keys())
    by = "class_path" if own else "name"
    written = f"{key}: {{{by}: {name}}}" if key in SECTIONS else f"{{{by}: {name}}}"
    return f"{near} Write {written}, or --{key}.{by} {name}.".strip()


def nearest_key(key: str, more: Iterable[str] = ()) -> str:
    """Return a suggestion for an unknown key: the same last part in another section, else the most similar key."""
    everything = [*all_keys(), *SECTIONS, *(f"{one}.name" for one in REGISTRIES if one != "strategies"), *more]
    same_end = [one for one in everything if one.rpartition(".")[2] == key.rpartition(".")[2]]
    return nearest(key, same_end) or nearest(key, everything)
