"""Objectives of a search: a trial trains fresh nets on a set, or is a federated run, and is scored on other records."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning import strategies
from dpfl_lightning.algorithms.server_training import Training, public_generator
from dpfl_lightning.build import build_loop, build_net, build_population
from dpfl_lightning.config.options import Options
from dpfl_lightning.config.registry import call
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.client.local_clients import facts_of
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RoundReport
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.search.costs import Cost, planned_cost
from dpfl_lightning.search.options import SweepOptions
from dpfl_lightning.search.study import Pruned
from dpfl_lightning.search.train_and_score import train_and_score
from dpfl_lightning.strategies.distillation.artefact import DistilledSet

#: receives a step and the accuracy in [0, 1] after it; returns whether the trial should end there
Report = Callable[[int, float], bool]
_FEWEST_FOLDS = 3


@dataclass(frozen=True)
class Outcome:
    """Accuracy of a trial in [0, 1] on records that trained no net, parameters of one net, and seconds of the trial."""

    accuracy: float
    num_params: int
    seconds: float


def objective(sweep: SweepOptions, options: Options, distilled: DistilledSet | None = None) -> Objective:
    """Return the objective of a search, on a set if it is given; raises UserError if it or the records do not fit."""
    on_public = sweep.objective != "set" or distilled is None
    must = "be null for a search that is scored on public records, because your own data have none"
    own, advice = (
        options.data.class_path,
        "Or search on a set: --sweep.objective set --sweep.distilled runs/NAME.",
    )
    require(own is None or not on_public, "data.class_path", must, own, advice)
    if sweep.objective == "set":
        return ProxyObjective(sweep, options, distilled)
    return FederatedObjective(options, private=sweep.objective == "private")


# ---- nets trained on a set


class ProxyObjective:
    """Trains fresh nets on a distilled set or on public records, and scores them on public records or held-out parts.

    `words` describes the objective, `digest` identifies the set, which the options do not determine, and `card` is the
    card of the set, or empty.

    **Privacy** Post-processing of the set. Public records belong to no client.
    """

    def __init__(self, sweep: SweepOptions, options: Options, distilled: DistilledSet | None) -> None:
        public = _public_of(options, distilled)
        self.card: Mapping[str, Any] = {}
        if distilled is None:
            assert public is not None  # for mypy: without a set there are public records
            records, scored, self.digest = public, None, ""
        else:
            records, scored, self.card = distilled.records, public, distilled.card
            content = distilled.x.numpy().tobytes() + distilled.y.numpy().tobytes()
            self.digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        _require_classes(records[1], options)
        device = torch.device("cuda" if torch.cuda.is_available() and options.engine.device != "cpu" else "cpu")
        num_classes = self.card.get("num_classes")
        num_classes = int(records[1].max()) + 1 if num_classes is None else int(num_classes)
        self._facts = Facts((len(records[1]),), num_classes, tuple(records[0].shape[1:]))
        parts = _parts(records, scored, num_classes, sweep.networks, options.seed)
        self._parts = [(people.to(device), (x.to(device), y.to(device))) for people, (x, y) in parts]
        self._training = call("sweep.training", {"training": _training}, "training", **sweep.training)
        self._given = set(sweep.training)
        on = "public records" if distilled is None else "a distilled set"
        where = "held-out records" if scored is None else f"{len(scored[1]):,} public records"
        nets = f"{sweep.networks} new model{'' if sweep.networks == 1 else 's'}"
        self.words = f"each trial trains {nets} on {on} ({len(records[1]):,} records) and scores on {where}"

    def check(self, options: Options) -> None:
        """Raise UserError if nothing can be built from these options."""
        build_net(options, self._facts)
        self._training_of(options)

    def __call__(self, options: Options, folder: Path, report: Report, charge: Callable[[Cost], None]) -> Outcome:
        """Run a trial and return its outcome; raises `Pruned` if `report` ends it."""
        begun, accuracies, training = time.perf_counter(), [], self._training_of(options)

        def new_net(seed: int) -> torch.nn.Module:
            return build_net(dataclasses.replace(options, seed=seed), self._facts)

        for number, (population, records) in enumerate(self._parts):
            scored = train_and_score(new_net, population, records, training, networks=1, seed=options.seed + number)
            accuracies.append(scored.mean)
            if report(number, fmean(accuracies)) and number + 1 < len(self._parts):
                raise Pruned(f"after {number + 1} of {len(self._parts)} nets")
        num_params = ClientModule(new_net(options.seed)).num_params
        return Outcome(fmean(accuracies), num_params, time.perf_counter() - begun)

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
    epochs: int = 60,
    learning_rate: float = 0.01,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    decayed: bool = False,
    batch_size: int = 256,
) -> Training:
    for name, value in (("epochs", epochs), ("batch_size", batch_size)):
        require(value >= 1, f"sweep.training.{name}", "be >= 1", value)
    require(learning_rate > 0, "sweep.training.learning_rate", "be above 0", learning_rate)
    require(0 <= momentum < 1, "sweep.training.momentum", "be in [0, 1)", momentum)
    require(weight_decay >= 0, "sweep.training.weight_decay", "be >= 0", weight_decay)
    return Training(epochs, learning_rate, momentum, weight_decay, decayed, batch_size)


def _public_of(options: Options, distilled: DistilledSet | None) -> tuple[Tensor, Tensor] | None:
    """Return the run's public records, or None if it has none and needs none."""
    count = options.data.public_records
    must = "be false with objective set: its models would be scored on records that clients hold"
    require(not options.data.use_public, "data.use_public", must, True)
    if distilled is None:
        advice = "Or search on a distilled set: --sweep.distilled runs/NAME."
        require(count > 0, "data.public_records", "be above 0 to search on public records", count, advice)
        return build_population(options).public_records()
    _check_set(options, distilled)
    if not count:
        return None
    records = build_population(options).public_records()
    shape, got = tuple(records[0].shape[1:]), tuple(distilled.x.shape[1:])
    require(got == shape, "sweep.distilled", f"hold records of shape {shape}", got)
    return records


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
    """Return, for each net, a population whose test set scores it, and the records on which it is trained."""

    def tested(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> tuple[Population, tuple[Tensor, Tensor]]:
        return Population.from_datasets([train], test=test, held_out=0, num_classes=num_classes), train

    if scored is not None:
        return [tested(records, scored)] * networks
    x, y = records
    return [tested((x[~held], y[~held]), (x[held], y[held])) for held in folds(y, networks, seed)]


def folds(y: Tensor, networks: int, seed: int) -> Iterator[Tensor]:
    """Return, for each net, which records are held out, `[n]` bool: a share of every class, different for each net."""
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

    **Privacy** A private trial is planned, charged and noised like any run. It is scored on public records, so neither
    the official test set nor a client's held-out records influence the choice.
    """

    def __init__(self, options: Options, private: bool) -> None:
        self._private, self.digest = private, ""
        self.card: Mapping[str, Any] = {}
        count = options.data.public_records
        must = "be above 0, because trials are scored on public records" if private else "be at least 6"
        require(count >= (1 if private else 6), "data.public_records", must, count)
        self.words = f"each trial is a run on {count - count // 6:,} public records, scored on {count // 6:,} others"
        if private:
            _check_private(options)
            self.words = (
                "each trial is a run on the clients' PRIVATE records, charged to them in full, and scored on "
                f"{count:,} public records"
            )
        self._population: Population | None = None
        _require_classes(self._people(options).y, options)

    def check(self, options: Options) -> None:
        """Raise UserError if nothing can be built from these options."""
        build_net(options, facts_of(self._people(options)))
        strategies.build(options.strategies)

    def __call__(self, options: Options, folder: Path, report: Report, charge: Callable[[Cost], None]) -> Outcome:
        """Run a trial and return its outcome; raises `Pruned` if `report` ends it.

        `charge` receives the most that a private trial can cost, before it starts.
        """
        watcher, begun = _Reporting(report), time.perf_counter()
        trial_options = dataclasses.replace(options, output_dir=str(folder))
        loop = build_loop(trial_options, [watcher], self._people(trial_options))
        if self._private:
            charge(planned_cost(loop))
        result = loop.run()
        if watcher.ended:
            raise Pruned(f"after {result.rounds} of {options.rounds} rounds")
        if result.test_accuracy is None:
            raise UserError(f"`data` must have records for evaluation, got none of {options.data.name!r}.")
        seconds = result.wall_seconds if self._private else time.perf_counter() - begun
        return Outcome(result.test_accuracy, loop.module.num_params, seconds)

    def _people(self, options: Options) -> Population:
        """Return the population that trains and scores. It is the same in all trials, which have the same data."""
        if self._population is None:
            data = dataclasses.replace(options.data, use_public=not self._private)
            self._population = build_population(dataclasses.replace(options, data=data))
            if self._private:
                nothing = [rows[:0] for rows in self._population.train_of]
                self._population = dataclasses.replace(
                    self._population, test=self._population.public, held_out_of=nothing
                )
        return self._population


Objective = ProxyObjective | FederatedObjective


def _require_classes(y: Tensor, options: Options) -> None:
    must = "have classes, because accuracy is the score"
    require(not y.is_floating_point(), "data.name", must, options.data.name)


def _check_private(options: Options) -> None:
    """Raise UserError if the cost of private trials would be unbounded, or if an option conflicts with them."""
    privacy = options.privacy
    must = "be a budget for each trial with objective private"
    require(privacy is not None and privacy.epsilon is not None, "privacy.epsilon", must, privacy and privacy.epsilon)
    assert privacy is not None  # for mypy
    must = "be false with objective private: it releases values without a bound, which the search cannot add up"
    require(not privacy.diagnostics, "privacy.diagnostics", must, True)
    must = "be null with objective private: a simulation protects nobody"
    require(privacy.noise_key is None, "privacy.noise_key", must, "a key")
    require(not options.data.use_public, "data.use_public", "be false with objective private", True)
    must = "be null with objective private: public records belong to no group"
    require(options.data.groups is None, "data.groups", must, options.data.groups)


class _Reporting(Strategy, Callback):
    """Reports each evaluation, and stops the run if other trials do better."""

    def __init__(self, report: Report) -> None:
        self._report, self.ended = report, False

    def on_round_end(self, view: View, report: RoundReport) -> None:
        if report.test_accuracy is not None:
            asked = self._report(report.round, report.test_accuracy)
            self.ended = asked and report.round < report.rounds

    def stop(self, view: View) -> str | None:
        return "other trials do better" if self.ended else None
