"""What a trial does: fresh nets trained on a set, or the run itself, scored on records nobody trained on."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfl_lightning import strategies
from dpfl_lightning.algorithms.server_training import Training, public_generator
from dpfl_lightning.build import FederatedLoop, build_loop, build_net, build_population
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
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.events import Caveat, Event, NonPrivateEvent
from dpfl_lightning.privacy.accounting.guarantee import Guarantee, guarantee
from dpfl_lightning.privacy.sampling import SAMPLINGS
from dpfl_lightning.reporting.distilled import load_distilled
from dpfl_lightning.search.options import SweepOptions
from dpfl_lightning.search.train_and_score import train_and_score
from dpfl_lightning.search.trial import Pruned
from dpfl_lightning.strategies.distillation.artefact import DistilledSet

#: tells an accuracy in [0, 1] that is known after a step; answers whether the trial is to end there
Report = Callable[[int, float], bool]
_FEWEST_FOLDS = 3


@dataclass(frozen=True)
class Outcome:
    """What a trial came to.

    Args:
        accuracy: in [0, 1], on records that no net was trained on.
        num_params: of one net.
        seconds: of training and scoring.
    """

    accuracy: float
    num_params: int
    seconds: float


@dataclass(frozen=True)
class Cost:
    """What a trial can cost each client at most.

    Args:
        epsilon: `[N]`; None: no bound.
        delta: `[N]`.
        caveats: what these epsilons do not cover, in words: they are never told without.
    """

    epsilon: tuple[float | None, ...]
    delta: tuple[float, ...]
    caveats: tuple[str, ...] = ()


class Objective(Protocol):
    """Scores the options of one trial.

    Args:
        words: what it does, for people.
        digest: of the records, where they are not what the options name.
        card: of the distilled set, if there is one.
    """

    words: str
    digest: str
    card: Mapping[str, Any]

    def check(self, options: Options) -> None:
        """Raise a UserError if nothing can be built from these options."""
        ...

    def __call__(self, options: Options, folder: Path, report: Report, charge: Callable[[Cost], None]) -> Outcome:
        """Raises `Pruned` where `report` ended it; tells `charge` the most that a private trial can cost, before it."""
        ...


def objective(sweep: SweepOptions, options: Options) -> Objective:
    """The objective of a sweep.

    Raises:
        UserError: a set that is missing or of other data, records that are missing, or that must not choose.
    """
    if sweep.objective == "set":
        return ProxyObjective(sweep, options)
    return FederatedObjective(options, private=sweep.objective == "private")


# ---- nets on a set


class ProxyObjective:
    """Fresh nets trained on a distilled set or on public records, scored on public records or held-out parts.

    **Privacy** Post-processing of the set; public records belong to nobody.
    """

    def __init__(self, sweep: SweepOptions, options: Options) -> None:
        found = None if sweep.distilled is None else load_distilled(sweep.distilled, _uri(options))
        self.card: Mapping[str, Any] = {} if found is None else found.card
        self.digest = "" if found is None else _digest(found)
        public = _public_of(options, found)
        records, scored = (public, None) if found is None else (found.records, public)
        assert records is not None  # for mypy: without a set there are public records
        device = torch.device("cuda" if torch.cuda.is_available() and options.engine.device != "cpu" else "cpu")
        self._facts = Facts((len(records[1]),), _num_classes(found, records), tuple(records[0].shape[1:]))
        parts = _parts(records, scored, self._facts.num_classes, sweep.networks, options.seed)
        self._parts = [(people.to(device), (x.to(device), y.to(device))) for people, (x, y) in parts]
        self._training = _training(sweep.training)
        self._given = set(sweep.training)
        on = "public records" if found is None else "a distilled set"
        where = "others that were held out" if scored is None else f"{len(scored[1]):,} public records"
        nets = f"{sweep.networks} fresh net{'' if sweep.networks == 1 else 's'}"
        self.words = f"each trial trains {nets} on {on} ({len(records[1]):,} records) and scores on {where}"

    def check(self, options: Options) -> None:
        build_net(options, self._facts)
        self._how(options)

    def __call__(self, options: Options, folder: Path, report: Report, charge: Callable[[Cost], None]) -> Outcome:
        begun, accuracies, how = time.perf_counter(), [], self._how(options)

        def new_net(seed: int) -> torch.nn.Module:
            return build_net(dataclasses.replace(options, seed=seed), self._facts)

        for number, (population, records) in enumerate(self._parts):
            accuracies.append(
                train_and_score(new_net, population, records, how, networks=1, seed=options.seed + number).mean
            )
            if report(number, fmean(accuracies)) and number + 1 < len(self._parts):
                raise Pruned(f"after {number + 1} of {len(self._parts)} nets")
        num_params = ClientModule(new_net(options.seed)).num_params
        return Outcome(fmean(accuracies), num_params, time.perf_counter() - begun)

    def _how(self, options: Options) -> Training:
        """The sweep's training, at the clients' learning rate and batch size where it has none of its own."""
        clients: dict[str, Any] = {
            name: getattr(options.clients, name) for name in ("learning_rate", "batch_size") if name not in self._given
        }
        for name, value in clients.items():
            single = isinstance(value, int | float) or value is None
            advice = f"Set sweep.training.{name}, or one value for all clients."
            require(single, f"clients.{name}", "be one number to train on a set", value, advice)
        if clients.get("batch_size", 0) is None:
            clients["batch_size"] = max(len(records[1]) for _, records in self._parts)
        return dataclasses.replace(self._training, **clients)


def _training(given: Mapping[str, Any]) -> Training:
    def training(
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

    return call("sweep.training", {"training": training}, "training", **given)


def _public_of(options: Options, found: DistilledSet | None) -> tuple[Tensor, Tensor] | None:
    """The run's public records, or None where it has none and needs none.

    A record that a client held when the set was made is not public now.
    """
    count = options.data.public_records
    must = "be false with objective set: its nets would be scored on records that clients hold"
    require(not options.data.use_public, "data.use_public", must, True)
    if found is None:
        advice = "Or search on a distilled set: --sweep.distilled runs/NAME."
        require(count > 0, "data.public_records", "be above 0 to search on public records", count, advice)
    else:
        _check_set(options, found)
    if not count:
        return None
    records = build_population(options).public_records()
    shape = tuple(records[0].shape[1:])
    fits = found is None or tuple(found.x.shape[1:]) == shape
    require(fits, "sweep.distilled", f"hold records of shape {shape}", None if found is None else found.x.shape[1:])
    return records


def _check_set(options: Options, found: DistilledSet) -> None:
    made = found.card.get("data") or {}
    name, public = made.get("name"), made.get("public_records")
    require(name in (None, options.data.name), "sweep.distilled", f"be a set of {options.data.name}", name)
    if public is None:
        return
    most, others = public, "as when the set was made: the others were clients' own then"
    if made.get("use_public"):
        # its clients were dealt all but the last sixth of them, which was their run's test set
        most, others = public // 6, "the public records that the set was not distilled from"
    advice = "Without any, nets are scored on images of the set that are held out."
    count = options.data.public_records
    require(count <= most, "data.public_records", f"be at most {most}, {others}", count, advice)


def _digest(found: DistilledSet) -> str:
    return hashlib.blake2b(found.x.numpy().tobytes() + found.y.numpy().tobytes(), digest_size=8).hexdigest()


def _num_classes(found: DistilledSet | None, records: tuple[Tensor, Tensor]) -> int:
    told = None if found is None else found.card.get("num_classes")
    return int(records[1].max()) + 1 if told is None else int(told)


def _parts(
    records: tuple[Tensor, Tensor], scored: tuple[Tensor, Tensor] | None, num_classes: int, networks: int, seed: int
) -> list[tuple[Population, tuple[Tensor, Tensor]]]:
    """For each net what it is scored on (as the test set of a population), and what it is trained on."""
    if scored is not None:
        return [(_tested(records, scored, num_classes), records)] * networks
    x, y = records
    parts = []
    for held in _folds(y, networks, seed):
        own = x[~held], y[~held]
        parts.append((_tested(own, (x[held], y[held]), num_classes), own))
    return parts


def _tested(records: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], num_classes: int) -> Population:
    return Population.from_datasets([records], test=test, held_out=0, num_classes=num_classes)


def _folds(y: Tensor, networks: int, seed: int) -> Iterator[Tensor]:
    """For each net which records are held out, `[n]` bool: a share of every class, never the same twice."""
    counts = torch.bincount(y)
    fewest = int(counts[counts > 0].min())
    advice = "Make more images of each class, or give the run data.public_records to score on."
    require(fewest >= 2, "sweep.distilled", "have 2 records of each class, one of them to hold out", fewest, advice)
    must = f"be at most {fewest}, the records of the rarest class, of which each net is scored on others"
    require(networks <= fewest, "sweep.networks", must, networks, advice)
    folds, fold_of = max(networks, _FEWEST_FOLDS), torch.empty_like(y)
    order = torch.from_numpy(public_generator(seed, "held-out records of a sweep").permutation(len(y)))
    for label in y.unique():
        own = order[y[order] == label]
        fold_of[own] = torch.arange(len(own)) % min(folds, len(own))
    return ((fold_of == number % folds) for number in range(networks))


# ---- the run itself


class FederatedObjective:
    """The federated run of each trial's options, by the loop that `fit` uses.

    Args:
        private: over the clients' own records; else over the public ones, dealt to the clients.

    **Privacy** A private trial plans, charges and noises as any run, and is scored on public records: neither the
    official test set nor a client's held-out records choose.
    """

    def __init__(self, options: Options, private: bool) -> None:
        self.private, self.digest = private, ""
        self.card: Mapping[str, Any] = {}
        count = options.data.public_records
        must = "be above 0, for trials are scored on public records" if private else "be at least 6"
        require(count >= (1 if private else 6), "data.public_records", must, count)
        if private:
            _check_private(options)
        self.words = (
            "each trial is a run on the clients' PRIVATE records, charged to them in full, and scored on "
            f"{count:,} public records"
            if private
            else f"each trial is a run on {count - count // 6:,} public records, scored on {count // 6:,} others"
        )
        self._population: Population | None = None

    def check(self, options: Options) -> None:
        build_net(options, facts_of(self._people(options)))
        strategies.build(options.strategies)

    def __call__(self, options: Options, folder: Path, report: Report, charge: Callable[[Cost], None]) -> Outcome:
        watcher, begun = _Reporting(report), time.perf_counter()
        own = dataclasses.replace(options, output_dir=str(folder))
        loop = build_loop(own, [watcher], self._people(own))
        if self.private:
            charge(_planned(loop))
        result = loop.run()
        if watcher.ended:
            raise Pruned(f"after {result.rounds} of {options.rounds} rounds")
        if result.test_accuracy is None:
            raise UserError(f"`data.name` must have classes to be searched by accuracy, got {options.data.name!r}.")
        return Outcome(result.test_accuracy, loop.module.num_params, time.perf_counter() - begun)

    def _people(self, options: Options) -> Population:
        """Who trains and what scores; the same in every trial, whose data are the same."""
        if self._population is None:
            data = dataclasses.replace(options.data, use_public=not self.private)
            made = build_population(dataclasses.replace(options, data=data))
            if self.private:
                nothing = [rows[:0] for rows in made.train_of]
                made = dataclasses.replace(made, test=made.public, held_out_of=nothing)
            self._population = made
        return self._population


def _check_private(options: Options) -> None:
    own = options.privacy
    must = "be a budget for each trial with objective private"
    require(own is not None and own.epsilon is not None, "privacy.epsilon", must, own and own.epsilon)
    assert own is not None  # for mypy
    must = "be false with objective private: what it shows has no bound, and no search adds that up"
    require(not own.diagnostics, "privacy.diagnostics", must, True)
    must = "be null with objective private: a simulation protects nobody"
    require(own.noise_key is None, "privacy.noise_key", must, "a key")
    require(not options.data.use_public, "data.use_public", "be false with objective private", True)
    must = "be null with objective private: public records belong to no group"
    require(options.data.groups is None, "data.groups", must, options.data.groups)


def _planned(loop: FederatedLoop) -> Cost:
    """What the run may cost each client at most: its whole budget, or what its plan composes to."""
    clients, sampling = loop.plan_schedule().clients, SAMPLINGS[loop.sampling]
    besides: list[Event] = [*map(Caveat, loop.caveats), *map(NonPrivateEvent, loop.unprotected)]
    promises = [guarantee([*own.events(), *besides], own.delta, loop.accountant, sampling) for own in clients]
    most = [max(one.epsilon, own.target_epsilon) for one, own in zip(promises, clients, strict=True)]
    caveats = dict.fromkeys(words for one in promises for words in _caveats(one))
    return Cost(tuple(map(finite_or_none, most)), tuple(own.delta for own in clients), tuple(caveats))


def _caveats(promise: Guarantee) -> tuple[str, ...]:
    """What stands beside its epsilon: that shuffled batches prove none, what has no noise at all, and the caveats."""
    unproven = (promise.sampling,) if promise.sampling == SAMPLINGS["shuffle"] else ()
    return (*unproven, *promise.unprotected, *promise.caveats)


class _Reporting(Strategy, Callback):
    """Tells each evaluation, and stops the run when the answer is that others do better."""

    def __init__(self, report: Report) -> None:
        self._report, self.ended = report, False

    def on_round_end(self, view: View, report: RoundReport) -> None:
        if report.test_accuracy is not None:
            asked = self._report(report.round, report.test_accuracy)
            self.ended = asked and report.round < report.rounds

    def stop(self, view: View) -> str | None:
        return "others do better" if self.ended else None


def _uri(options: Options) -> str | None:
    return None if options.tracking is None else options.tracking.uri
