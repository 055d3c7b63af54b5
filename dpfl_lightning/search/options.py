"""The section `sweep` of a search: types, ranges and `--help` texts. Imports neither torch nor optuna."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval

from dpfl_lightning.config.names import check_names
from dpfl_lightning.config.options import Count, Named, Section
from dpfl_lightning.config.typed import That
from dpfl_lightning.config.yaml_text import inline
from dpfl_lightning.errors import require
from dpfl_lightning.search.space import NEVER, below

#: scores that are known only when a trial ends
AT_THE_END = ("num_params", "seconds")
#: sections of a run that apply to models trained on a set
_ON_A_SET = ("model", "clients", "data", "engine")
#: options that apply to models trained on a set only
_ONLY_SET = ("distilled", "set_share", "set_with", "networks", "training")
#: keys that the run of `set_share` may change
_OF_THE_SET = ("rounds", "model", "clients", "strategies", "privacy.clip_norm", "engine")


@dataclass(frozen=True)
class SweepOptions(Section, section="sweep"):
    """What is searched, on which records, and how. All other keys are those of the run.

    Args:
        name: name of the study in its storage; null uses the name of the file.
        space: dotted key of a run -> {choices: [a, b]}, {choices: {label: value}} (a value may be a mapping), or {low,
            high} with an optional step or log: true; whole-number bounds give whole numbers. An additional
            when: {key: value} searches this key only if a key above it has that value.
        objective: set (the server trains new models on a set), public (the run on public records, which are divided
            among its clients) or private (the run on its clients' records, a release of its own in every trial).
        distilled: (objective set) folder of a distilled set, or runs:/ID of its MLflow run; null uses the run's public
            records.
        set_share: (objective set, instead of distilled) share of each client's epsilon for a distilled
            set, which the command makes first. Its --final run gets the rest.
        set_with: (with set_share) dotted key -> value of the run that makes the set. For a set from one release:
            {rounds: 1, strategies: {feature_means: {}}}.
        networks: (objective set) number of models per trial, from different initialisations.
        training: (objective set) how a model is trained: {epochs, learning_rate, momentum, weight_decay, decayed,
            batch_size}; a missing learning_rate or batch_size is that of the clients.
        seeds: (objective public or private) number of runs per trial, whose scores are averaged.
        trials_with: dotted key -> value that applies to trials only, such as fewer rounds; best.yaml does not contain
            it. With objective public it names your own public data: {data.init_args.df: public.csv}.
        scores: accuracy, loss, any metric of evaluation.metrics, num_params, seconds. The first one selects best.yaml;
            several give a Pareto front.
        trials: number of trials of the study, over all workers and restarts.
        sampler: {name, options}. The default of its option seed is the run's seed.
        pruner: {name, options}; only with a single score that is known during a trial.
        storage: URL of the database that the workers share; null is study.db (SQLite) in output_dir.
        heartbeat_seconds: interval in seconds between the heartbeats of a trial. After three intervals without a
            heartbeat, another worker repeats the trial.
    """

    name: str | None = None
    space: dict = field(default_factory=dict)
    objective: Literal["set", "public", "private"] = "set"
    distilled: str | None = None
    set_share: Annotated[float, Interval(gt=0, le=0.999)] | None = None
    set_with: dict = field(default_factory=dict)
    networks: Count = 1
    training: dict = field(default_factory=dict)
    seeds: Count = 1
    trials_with: dict = field(default_factory=dict)
    scores: Annotated[tuple[str, ...], That(bool, "with at least one score")] = ("accuracy",)
    trials: Count = 30
    sampler: Named = field(default_factory=lambda: {"name": "tpe"})
    pruner: Named = field(default_factory=lambda: {"name": "none"})
    storage: str | None = None
    heartbeat_seconds: Count = 20


def check(sweep: SweepOptions) -> None:
    """Raise UserError if no key is searched, or an option contradicts another one."""
    check_names("sweep.name", [] if sweep.name is None else [sweep.name])
    require(bool(sweep.space), "sweep.space", "name at least one key to search", sweep.space)
    fits = len(set(sweep.scores)) == len(sweep.scores)
    require(fits, "sweep.scores", "be different scores", inline(list(sweep.scores)))
    pruner = sweep.pruner["name"]
    must = "be none if trials have several scores, because unfinished trials cannot be ranked by several scores"
    single = len(sweep.scores) == 1 or pruner == "none"
    require(single, "sweep.pruner.name", must, pruner, "Use one score, or no pruner.")
    must = f"be none with the score {sweep.scores[0]}, which is known only at the end of a trial"
    require(sweep.scores[0] not in AT_THE_END or pruner == "none", "sweep.pruner.name", must, pruner)
    if sweep.objective != "set":
        for key in _ONLY_SET:
            value = getattr(sweep, key)
            must = f"be left out with objective {sweep.objective}, because it is only for objective set"
            require(value == getattr(SweepOptions(), key), f"sweep.{key}", must, value)
        return
    must = "be left out with objective set, whose models are repeated by sweep.networks"
    require(sweep.seeds == 1, "sweep.seeds", must, sweep.seeds)
    _check_share(sweep)
    for name in ("learning_rate", "batch_size"):
        searched = f"clients.{name}" in sweep.space or f"clients.{name}" in sweep.trials_with
        must = f"be left out if clients.{name} is given for trials, because it would replace that value"
        require(not searched or name not in sweep.training, f"sweep.training.{name}", must, sweep.training.get(name))
    for key, value in sweep.trials_with.items():
        must = f"be a key of {', '.join(_ON_A_SET)} with objective set, whose models ignore all other keys"
        require(key.split(".")[0] in _ON_A_SET, f"sweep.trials_with.{key}", must, value)


def _check_share(sweep: SweepOptions) -> None:
    """Raise UserError if an option contradicts `set_share`."""
    if sweep.set_share is None:
        advice = "Set sweep.set_share, or make the set by itself with fit."
        require(not sweep.set_with, "sweep.set_with", "be left out without sweep.set_share", sweep.set_with, advice)
        return
    require(sweep.distilled is None, "sweep.distilled", "be null with sweep.set_share", sweep.distilled)
    advice = "Other machines can search on the finished set: --sweep.distilled FOLDER/set."
    must = "be null with sweep.set_share, because another machine would make, and charge, another set"
    require(sweep.storage is None, "sweep.storage", must, sweep.storage, advice)
    why = "because records and budget of the set are those of the run"
    for key, value in sweep.set_with.items():
        must = f"be a key of {', '.join(_OF_THE_SET)}, {why}"
        require(below(key, _OF_THE_SET), f"sweep.set_with.{key}", must, value)
        for one, inner in _keys(key, value):
            require(not below(one, NEVER), f"sweep.set_with.{one}", f"be left out, {why}", inner)


def _keys(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a dotted key and all keys below it, with their values."""
    yield key, value
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        yield from _keys(f"{key}.{name}", inner)
