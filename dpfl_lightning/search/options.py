"""The section `sweep` of a search's file: types, texts of `--help`, ranges. Imports neither torch nor optuna."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dpfl_lightning.errors import nearest, require

#: what a trial can be judged by -> whether more is better
SCORES = {"accuracy": True, "num_params": False, "seconds": False}
#: sections of a run that nets on a set know
_ON_A_SET = ("model", "clients", "data", "engine")


@dataclass(frozen=True)
class SweepOptions:
    """What is searched, on whose records, and how. All other keys are those of the run that is searched for.

    Args:
        name: of the study in its storage; null is the file's name.
        space: dotted key of a run -> {choices: [a, b]}, {choices: {label: value}} (a value may be a mapping), or {low,
            high}, with step or log: true; whole numbers give whole numbers. Beside it, when: {key: value} asks for the
            key only where another key above it has that value.
        objective: set (fresh nets are trained on a set, by the server alone), public (the run itself on its public
            records, dealt to its clients) or private (the run itself on its clients' records: every trial is charged to
            them in full).
        distilled: objective set: folder of a distilled set, or runs:/ID of its MLflow run; null is the run's public
            records. Nets are scored on public records that they were not trained on; without any, on images of the
            set that were held out.
        networks: objective set: nets a trial, from different initialisations, >= 1.
        training: objective set: how a net is trained: {epochs, learning_rate, momentum, weight_decay, decayed,
            batch_size}; a learning_rate or batch_size that is left out is that of the clients.
        trials_with: dotted key -> value that holds in trials only, such as fewer rounds; best.yaml does not have it. It
            cannot make other records public.
        scores: what trials are judged by, the first one for best.yaml: accuracy (high), num_params (low), seconds
            (low). Several make a Pareto front.
        trials: of the study, over all workers and restarts, >= 1.
        sampler: {name, options}: tpe, random, grid, qmc, gp or nsga2. Its seed, if not given, is the run's.
        pruner: {name, options}: none, median, percentile, halving or hyperband, for one score only.
        storage: URL of the database that the workers share; null is study.db (SQLite) in output_dir.
        heartbeat_seconds: how often a trial says that it lives, >= 1; silent for three times that, it is given to
            another worker.
    """

    name: str | None = None
    space: dict = field(default_factory=dict)
    objective: Literal["set", "public", "private"] = "set"
    distilled: str | None = None
    networks: int = 1
    training: dict = field(default_factory=dict)
    trials_with: dict = field(default_factory=dict)
    scores: tuple[str, ...] = ("accuracy",)
    trials: int = 30
    sampler: dict = field(default_factory=lambda: {"name": "tpe"})
    pruner: dict = field(default_factory=lambda: {"name": "none"})
    storage: str | None = None
    heartbeat_seconds: int = 20


def check(sweep: SweepOptions) -> None:
    """Check what needs neither the run's options nor its data.

    Raises:
        UserError: the first value out of range, or the first two that contradict each other.
    """
    require(bool(sweep.space), "sweep.space", "name at least one key to search", sweep.space)
    for key in ("networks", "trials", "heartbeat_seconds"):
        require(getattr(sweep, key) >= 1, f"sweep.{key}", "be >= 1", getattr(sweep, key))
    require(bool(sweep.scores), "sweep.scores", "name at least one score", sweep.scores)
    for score in sweep.scores:
        require(score in SCORES, "sweep.scores", f"be of {', '.join(SCORES)}", score, nearest(score, SCORES))
    fits = len(set(sweep.scores)) == len(sweep.scores)
    require(fits, "sweep.scores", "be different ones", sweep.scores)
    for key in ("sampler", "pruner"):
        require("name" in getattr(sweep, key), f"sweep.{key}", "have a `name`", getattr(sweep, key))
    single = len(sweep.scores) == 1 or sweep.pruner["name"] == "none"
    must = "be none where trials have several scores: nothing says which of two unfinished trials is the worse one"
    require(single, "sweep.pruner.name", must, sweep.pruner["name"], "Take one score, or prune nothing.")
    first = sweep.scores[0] == "accuracy" or sweep.pruner["name"] == "none"
    must = "be none unless accuracy is the score: only it is known while a trial goes on"
    require(first, "sweep.pruner.name", must, sweep.pruner["name"])
    if sweep.objective == "set":
        _check_training(sweep)
    else:
        default = SweepOptions()
        for key in ("distilled", "networks", "training"):
            given, must = (
                getattr(sweep, key),
                f"be left out with objective {sweep.objective}, which trains no such nets",
            )
            require(given == getattr(default, key), f"sweep.{key}", must, given)


def _check_training(sweep: SweepOptions) -> None:
    """Refuse what nets that are trained on a set would not hear of."""
    for name in ("learning_rate", "batch_size"):
        searched = f"clients.{name}" in sweep.space or f"clients.{name}" in sweep.trials_with
        must = f"be left out where clients.{name} is given for trials: it would hold in its place"
        require(not searched or name not in sweep.training, f"sweep.training.{name}", must, sweep.training.get(name))
    for key, value in sweep.trials_with.items():
        must = f"be of {', '.join(_ON_A_SET)} with objective set, whose nets know nothing of a run"
        require(key.split(".")[0] in _ON_A_SET, f"sweep.trials_with.{key}", must, value)


def study_name(sweep: SweepOptions, config: str | None) -> str:
    """Its own name, or that of the file.

    >>> study_name(SweepOptions(), "sweeps/nas_digits.yaml")
    'nas_digits'
    """
    return sweep.name or (Path(config).stem if config else "sweep")
