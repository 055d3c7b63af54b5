"""Objectives of a search: a trial trains new models on a set, or is a federated run, and is scored on other records."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.algorithms.server_training import Training, public_generator
from dpfl_lightning.build import build_module, build_population
from dpfl_lightning.config.options import Options
from dpfl_lightning.config.registry import call
from dpfl_lightning.data import Population
from dpfl_lightning.data.lazy import LazyInputs, record_digests
from dpfl_lightning.errors import require
from dpfl_lightning.federated.client.checks import check_fits
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RoundReport
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.loop import FederatedLoop, build_loop
from dpfl_lightning.papers.sets.distilled_set import DistilledSet
from dpfl_lightning.privacy.accounting.noise_source import source_of
from dpfl_lightning.privacy.clipping.inputs import take
from dpfl_lightning.search.costs import Cost, planned_cost
from dpfl_lightning.search.options import SweepOptions
from dpfl_lightning.search.scores import Measured, Outcome, check_scores, measured, reported
from dpfl_lightning.search.space import PAID_FOR
from dpfl_lightning.search.study import Pruned
from dpfl_lightning.search.train_and_score import train_and_score

#: receives a step and the first score after it; returns whether the trial should end there
Report = Callable[[int, float], bool]
#: receives the most that the runs of a private trial can cost, before the first of them
Charge = Callable[[Sequence[Cost]], None]
_FEWEST_FOLDS = 3
_AtLeastOne = Annotated[int, Interval(ge=1)]


def objective(sweep: SweepOptions, options: Options, distilled: DistilledSet | None = None) -> Objective:
    """Return the objective of a search, on a set if it is given; raises UserError if it or the records do not fit."""
    if sweep.objective == "set":
        return ProxyObjective(sweep, options, distilled)
    return FederatedObjective(sweep, options)


# ---- models trained on a set


class ProxyObjective:
    """Trains new models on a distilled set or on public records, and scores them on public records or held-out parts.

    `words` describes the objective, `identity` what the options do not determine, `card` is that of the set, or empty.

    **Privacy** Post-processing of the set. Public records belong to no client.
    """

    choice = caution = ""

    def __init__(self, sweep: SweepOptions, options: Options, distilled: DistilledSet | None) -> None:
        public = _public_of(options, distilled)
        self.card: Mapping[str, Any] = {} if distilled is None else distilled.card
        if distilled is None:
            assert public is not None  # for mypy: without a set there are public records
            records, scored, digest = public.public_records(), None, ""
        else:
            records, scored = distilled.records, None if public is None else public.public_records()
            content = distilled.x.numpy().tobytes() + distilled.y.numpy().tobytes()
            digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        self.identity: Mapping[str, Any] = {"sweep.distilled": digest}
        of_population = int(records[1].max()) + 1 if public is None else public.num_classes
        num_classes = int(self.card.get("num_classes") or of_population)
        device = torch.device("cuda" if torch.cuda.is_available() and options.engine.device != "cpu" else "cpu")
        parts = _parts(records, scored, num_classes, sweep.networks, options.seed)
        self._parts = [(people.to(device), (x.to(device), y.to(device))) for people, (x, y) in parts]
        self._training = call("sweep.training", {"training": _training}, "training", **sweep.training)
        self._given, self._scores = set(sweep.training), sweep.scores
        on = "public records" if distilled is None else "a distilled set"
        where = "held-out records" if scored is None else f"{len(scored[1]):,} public records"
        models = f"{sweep.networks} new model{'' if sweep.networks == 1 else 's'}"
        self.words = f"each trial trains {models} on {on} ({len(records[1]):,} records) and scores on {where}"

    def check(self, options: Options) -> None:
        """Raise UserError if nothing can be built from these options, or the model does not have the scores."""
        population = self._parts[0][0]
        module = build_module(options, population).to(population.y.device)
        check_fits(module, population)
        assert module.task is not None  # for mypy: `check_fits` sets it
        check_scores(self._scores, module.task, options, module.undefined_scores)
        self._training_of(options)

    def __call__(self, options: Options, folder: Path, report: Report, charge: Charge) -> Outcome:
        """Run a trial and return its outcome; raises `Pruned` if `report` ends it."""
        begun, found, training = time.perf_counter(), list[Measured](), self._training_of(options)
        options = reported(self._scores, options)

        def new_model(seed: int) -> ClientModule:
            return build_module(dataclasses.replace(options, seed=seed), self._parts[0][0])

        for number, (population, records) in enumerate(self._parts):
            score = train_and_score(new_model, population, records, training, options.seed + number)
            found.append(measured(score.accuracy, score.loss, score.metrics))
            done = number + 1 == len(self._parts)
            values = [value for one in found if (value := one.get(self._scores[0])) is not None]
            if values and report(number, fmean(values)) and not done:
                raise Pruned(f"after {number + 1} of {len(self._parts)} models")
        return Outcome(found, new_model(options.seed).num_params, time.perf_counter() - begun)

    def _training_of(self, options: Options) -> Training:
        """Return the training of the sweep. The clients' learning rate and batch size are its defaults."""
        clients: dict[str, Any] = {
            name: getattr(options.clients, name) for name in ("learning_rate", "batch_size") if name not in self._given
        }
        for name, value in clients.items():
            single = isinstance(value, int | float) or value is None
            advice = f"Set sweep.training.{name}, or give all clients the same value."
            require(single, f"clients.{name}", "be one number if models are trained on a set", value, advice)
        if clients.get("batch_size", 0) is None:
            clients["batch_size"] = max(len(records[1]) for _, records in self._parts)
        return dataclasses.replace(self._training, **clients)


def _training(
    epochs: _AtLeastOne = 60,
    learning_rate: Annotated[float, Interval(gt=0)] = 0.01,
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.0,
    weight_decay: Annotated[float, Interval(ge=0)] = 0.0,
    decayed: bool = False,
    batch_size: _AtLeastOne = 256,
) -> Training:
    return Training(epochs, learning_rate, momentum, weight_decay, decayed, batch_size)


def _public_of(options: Options, distilled: DistilledSet | None) -> Population | None:
    """Return the population with the run's public records, or None if it has none and needs none."""
    count, own = options.data.public_records, options.data.class_path
    must = "be false with objective set: its models would be scored on records that clients hold"
    require(not options.data.use_public, "data.use_public", must, True)
    if distilled is None:
        advice = "Or search on a distilled set: --sweep.distilled runs/NAME."
        must = "be null with objective set without a distilled set, because your own data have no public records"
        others = f"{advice} Objectives public and private search on your own data."
        require(own is None, "data.class_path", must, own, others)
        require(count > 0, "data.public_records", "be above 0 to search on public records", count, advice)
        return build_population(options)
    _check_set(options, distilled)
    if not count:
        return None
    population = build_population(options)
    shape, got = tuple(population.input_shape), tuple(distilled.x.shape[1:])
    require(got == shape, "sweep.distilled", f"hold records of shape {shape}", got)
    return population


def _check_set(options: Options, distilled: DistilledSet) -> None:
    """Raise UserError if the set has other data, or if records that its clients held would be public now."""
    set_data = distilled.card.get("data") or {}
    name, public = set_data.get("name"), set_data.get("public_records")
    require(name in (None, options.data.name), "sweep.distilled", f"be a set of {options.data.name}", name)
    if public is None:
        return
    most, others = public, "as when the set was made, because clients held the other records then"
    if set_data.get("use_public"):
        # Its clients held all but the last sixth of the public records, which was the test set of that run.
        most, others = public // 6, "the public records from which the set was not distilled"
    advice = "With 0, models are scored on held-out images of the set."
    count = options.data.public_records
    require(count <= most, "data.public_records", f"be at most {most}, {others}", count, advice)


def _parts(
    records: tuple[Tensor, Tensor], scored: tuple[Tensor, Tensor] | None, num_classes: int, networks: int, seed: int
) -> list[tuple[Population, tuple[Tensor, Tensor]]]:
    """Return, for each model, a population whose test set scores it, and the records on which it is trained."""

    def tested(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> tuple[Population, tuple[Tensor, Tensor]]:
        return Population.from_datasets([train], test=test, held_out=0, num_classes=num_classes), train

    if scored is not None:
        return [tested(records, scored)] * networks
    x, y = records
    return [tested((x[~held], y[~held]), (x[held], y[held])) for held in folds(y, networks, seed)]


def folds(y: Tensor, networks: int, seed: int) -> Iterator[Tensor]:
    """Return, for each model, which records are held out, `[n]` bool: a share of every class, different for each one.

    Records without one class each, such as those of a regression, are divided as if they had the same class.
    """
    y = y if y.ndim == 1 and not y.is_floating_point() else torch.zeros(len(y), dtype=torch.long)
    counts = torch.bincount(y)
    fewest = int(counts[counts > 0].min())
    advice = "Make more images of each class, or set data.public_records, on which models are then scored."
    require(fewest >= 2, "the distilled set", "have 2 records of each class, one of them to hold out", fewest, advice)
    must = f"be at most {fewest}, the number of records of the rarest class, as each model is scored on other records"
    require(networks <= fewest, "sweep.networks", must, networks, advice)
    folds, fold_of = max(networks, _FEWEST_FOLDS), torch.empty_like(y)
    order = torch.from_numpy(public_generator(seed, "held-out records of a sweep").permutation(len(y)))
    for label in y.unique():
        rows = order[y[order] == label]
        fold_of[rows] = torch.arange(len(rows)) % min(folds, len(rows))
    return (fold_of == number % folds for number in range(networks))


# ---- federated runs


class FederatedObjective:
    """Trains the federated run of a trial's options on the clients' records, or on public ones, with the loop of `fit`.

    Every seed of a trial has the same clients and records, so that the costs of all runs can be composed.

    **Privacy** A private trial is planned, charged and noised like any run, with all its seeds before the first one.
    It is scored on public records. Your own data without public records are scored as by `fit`, on the test set or the
    clients' held-out records, which no guarantee covers: `choice` and `caution` say so.
    """

    def __init__(self, sweep: SweepOptions, options: Options) -> None:
        self._private, self._scores, self._seeds = sweep.objective == "private", sweep.scores, sweep.seeds
        self.card: Mapping[str, Any] = {}
        if self._private:
            _check_private(options)
        self.population, scored, self.choice = _scored_people(options, self._private)
        same, name_of = self._private and self.population.public is None, self.population.name_of
        sizes = enumerate(self.population.num_records)
        self.identity: Mapping[str, Any] = {f"training records of client {name_of(k)}": size for k, size in sizes}
        self.caution = "these records also chose the trial, so the score is optimistic" if same else ""
        on = f"{sum(self.population.num_records):,} public records"
        on = "the clients' PRIVATE records, charged to them in full" if self._private else on
        runs = "a run" if self._seeds == 1 else f"{self._seeds} runs, one for each seed,"
        self.words = f"each trial is {runs} on {on}, and is scored on {scored}"

    def check(self, options: Options) -> None:
        """Raise UserError if nothing can be built from these options, or the model does not have the scores."""
        module = self._loop(options).module
        assert module.task is not None  # for mypy: the loop sets it
        check_scores(self._scores, module.task, options, module.undefined_scores)
        build_module(reported(self._scores, options), self.population)

    def __call__(self, options: Options, folder: Path, report: Report, charge: Charge) -> Outcome:
        """Run a trial and return its outcome; raises `Pruned` if `report` ends it."""
        begun, options = time.perf_counter(), reported(self._scores, options)
        seeds = range(options.seed, options.seed + self._seeds)
        folders = [folder] if self._seeds == 1 else [folder / f"seed_{seed}" for seed in seeds]
        watchers = [_Reporting(report, self._scores[0], number * options.rounds) for number in range(self._seeds)]
        loops = [
            self._loop(dataclasses.replace(options, seed=seed, output_dir=str(one)), watcher)
            for seed, one, watcher in zip(seeds, folders, watchers, strict=True)
        ]
        if self._private:
            charge(list(map(planned_cost, loops)))
        num_params, results = loops[0].module.num_params, []
        for number, watcher in enumerate(watchers):
            results.append(loops.pop(0).run())
            done = results[-1].rounds + number * options.rounds
            if watcher.asked and done < options.rounds * self._seeds:
                raise Pruned(f"after {done} of {options.rounds * self._seeds} rounds")
        own = sum(result.wall_seconds for result in results)  # rounded, as those of a private run must be
        found = [measured(one.test_accuracy, one.test_loss, one.test_metrics) for one in results]
        return Outcome(found, num_params, own if self._private else time.perf_counter() - begun)

    def _loop(self, options: Options, *more: Callback) -> FederatedLoop:
        return build_loop(options, more, self.population)


def _scored_people(options: Options, private: bool) -> tuple[Population, str, str]:
    """Return the clients of every trial, which records score it, and what that means for the choice of the best one.

    The run scores on these records, which are a test set or held out by clients. UserError if there are none.
    """
    own, count = options.data.class_path is not None, options.data.public_records
    must = "be above 0, because trials are scored on public records" if private else "be at least 6"
    require(own or count >= (1 if private else 6), "data.public_records", must, count)
    data = dataclasses.replace(options.data, use_public=not own and not private)
    population = build_population(dataclasses.replace(options, data=data))
    if private and population.public is not None:
        nothing = [rows[:0] for rows in population.train_of]
        scored = dataclasses.replace(population, test=population.public, held_out_of=nothing)
        on = f"{len(population.public):,} public records"
        return scored, on, "Scores on public records choose, at no cost."
    held_out = sum(population.num_held_out)
    on = f"{held_out:,} held-out records" if population.test is None else f"{len(population.test):,} test records"
    advice = "Name a test set, such as data.init_args.test, or hold out records of the clients (held_out: 0.2)."
    require(population.test is not None or held_out > 0, "data", "have records that score trials", "none", advice)
    choice = f"Scores on {on} choose: no guarantee covers this, and the score of the best trial on them is optimistic."
    return population, on, choice


def check_public(of_trials: Population, of_run: Population) -> None:
    """Raise UserError if public trials would have a record of the run's clients or of its test set."""
    common = _digests(of_trials) & _digests(of_run)
    must = "name data without records of the run, which are not public"
    require(not common, "sweep.trials_with", must, f"{len(common)} records of it", PAID_FOR)


def _digests(population: Population) -> set[bytes]:
    test = [] if population.test is None else [population.test]
    rows, x = torch.cat([*population.train_of, *population.held_out_of, *test]), population.x
    lazy = isinstance(x, LazyInputs)
    found = x.digests[rows].numpy() if lazy else record_digests(take(x, rows), population.y[rows], b"", size=16)
    return set(map(bytes, found))


Objective = ProxyObjective | FederatedObjective


def _check_private(options: Options) -> None:
    """Raise UserError if the cost of private trials would be unbounded, or if an option conflicts with them."""
    privacy = options.privacy
    must = "be a budget for each trial with objective private"
    require(privacy is not None and privacy.epsilon is not None, "privacy.epsilon", must, privacy and privacy.epsilon)
    assert privacy is not None  # for mypy
    must = "be false with objective private: it releases values without a bound, which the search cannot add up"
    require(not privacy.diagnostics, "privacy.diagnostics", must, True)
    source = source_of(privacy)
    require(
        source.protects, source.option, f"{source.must} with objective private: a simulation protects nobody", "a key"
    )
    require(not options.data.use_public, "data.use_public", "be false with objective private", True)
    must = "be null with objective private: public records belong to no group"
    require(options.data.groups is None, "data.groups", must, options.data.groups)


class _Reporting(Strategy, Callback):
    """Reports a score at each evaluation, `before` rounds after the trial began, and stops the run if asked to."""

    def __init__(self, report: Report, name: str, before: int) -> None:
        self._report, self._score, self._before, self.asked = report, name, before, False

    def on_round_end(self, view: View, report: RoundReport) -> None:
        scores = measured(report.test_accuracy, report.test_loss, report.test_metrics)
        if (value := scores.get(self._score)) is not None:
            self.asked = self._report(self._before + report.round, value)

    def stop(self, view: View) -> str | None:
        return "other trials do better" if self.asked else None
