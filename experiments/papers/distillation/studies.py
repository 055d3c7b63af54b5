"""How cells of the distillation paper are made: sets of several kinds, and fresh nets that learn from them.

What chooses anything is the accuracy on the server's public records; test accuracies are for reports only.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from dpfl_lightning.algorithms.server_training import Training, public_generator, torch_seed, trained_on
from dpfl_lightning.build import build_net, build_population
from dpfl_lightning.config.options import Options
from dpfl_lightning.data import Population
from dpfl_lightning.errors import require
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.evaluation import evaluate
from dpfl_lightning.federated.client.local_clients import facts_of
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.models import ClientModels
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.traffic import BYTES
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.strategies.distillation.artefact import DistilledSet
from dpfl_lightning.strategies.distillation.options import AUGMENTATIONS
from experiments.papers.cells import Cell
from experiments.papers.distillation.baselines import (
    ON_A_SET,
    ON_EVERYTHING,
    images_for_each,
    local_matching,
    noise_set,
    pooled,
    random_subset,
    train_and_score,
    whole,
)
from experiments.papers.recorder import Recorder
from experiments.papers.run import Making

Held = dict[str, Any]

#: passes over a set in place of the condensation paper's 300, with one augmentation a batch
_AUGMENTED_EPOCHS = 1000

#: how many clients' own sets stand for all of them in local matching; their data are drawn alike
LOCAL_CLIENTS = {"small": 4, "paper": 20}
#: fresh nets for each set
NETWORKS = 3


class RunRecorder(Recorder):
    """Test accuracy of what a run delivers over rounds (`curve`, in %), what was sent, and how near gradients came.

    Values: `delivered_accuracy` in %, `gigabytes` sent both ways, `run_seconds`, and every number that strategies tell.
    """

    def on_round_end(self, view: View, report: RoundReport) -> None:
        if report.test_accuracy is not None:
            self._curve[report.round] = 100 * report.test_accuracy

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        told = {name: value for name, value in result.metrics.items() if isinstance(value, float)}
        floats = told.pop("floats_down", 0.0) + told.pop("floats_up", 0.0)
        accuracy = {} if result.test_accuracy is None else {"delivered_accuracy": 100 * result.test_accuracy}
        return {**accuracy, "gigabytes": BYTES * floats / 1e9, "run_seconds": result.wall_seconds, **told}


class LastModel(Callback):
    """Keeps the only model of a run's last round."""

    model: Tensor

    def on_fit_end(self, view: View, result: RunResult) -> None:
        self.model = view.state.models[0].clone()


# ---- sets


def distilled(making: Making) -> Held:
    """The cell's run of strategy distillation, and fresh nets trained on its set."""
    recorder = RunRecorder()
    result = making.run([recorder])
    return _held(result, recorder, _of_nets(making, DistilledSet.load(result.output_dir).records))


def federated(making: Making) -> Held:
    """The cell's run as it is: what it delivers."""
    recorder = RunRecorder()
    result = making.run([recorder])
    return _held(result, recorder, {"test_accuracy": 100 * (result.test_accuracy or 0.0)})


def _held(result: RunResult, recorder: Recorder, values: Mapping[str, float]) -> Held:
    spent = [client["epsilon_spent"] for client in result.clients]
    return {
        **recorder.found,
        "values": {**recorder.found["values"], **values},
        "epsilon_max": None if None in spent else max(spent),
        "guarantee": result.guarantee,
        "rounds": result.rounds,
    }


def random_records(making: Making) -> Held:
    """Nets trained on as many real records as the set has images."""
    population, options = population_of(making), own_options(making.options)
    records = random_subset(population, options["images_per_class"], making.options.seed)
    return {"values": _of_nets(making, records)}


def noise(making: Making) -> Held:
    """Nets trained on the images of noise that distillation begins with."""
    options = own_options(making.options)
    return {
        "values": _of_nets(making, noise_set(population_of(making), options["images_per_class"], making.options.seed))
    }


def all_records(making: Making) -> Held:
    """One net trained on all clients' records together."""
    population = population_of(making)
    found = train_and_score(
        new_net(making.options, population), population, whole(population), ON_EVERYTHING, 1, making.options.seed
    )
    return {"values": {"test_accuracy": 100 * found.mean}}


def local(making: Making) -> Held:
    """Each client's own set, and a net trained on each: the mean over clients, and the worst and the best."""
    options, population = making.options, population_of(making)
    some = dataclasses.replace(population, train_of=population.train_of[: LOCAL_CLIENTS[making.cell.scale]])
    build, how = new_net(options, population), _training(own_options(options))
    sets = _of_clients(making, some)
    means = [100 * train_and_score(build, population, one.records, how, 1, options.seed).mean for one in sets]
    values = {"test_accuracy": fmean(means), "test_accuracy_worst": min(means), "test_accuracy_best": max(means)}
    return {"values": values, "of_clients": means}


def union(making: Making) -> Held:
    """Nets trained on all clients' own sets together, which have about as many images as one set in the other rows."""
    population = population_of(making)
    each = images_for_each(own_options(making.options)["images_per_class"], population.num_clients)
    return {"values": _of_nets(making, pooled(_of_clients(making, population, images_per_class=each)))}


def _of_clients(making: Making, population: Population, **changed: Any) -> list[DistilledSet]:
    """The set that each client of `population` makes by itself, by the cell's options."""
    options = making.options
    own = {name: value for name, value in own_options(options).items() if name != "participation_fraction"}
    build, device = new_net(options, population), str(population.x.device)
    return local_matching(population, build, options.rounds, options.seed, device, **{**own, **changed})


def _of_nets(making: Making, records: tuple[Tensor, Tensor]) -> dict[str, float]:
    population = population_of(making)
    records = (records[0].to(population.x), records[1].to(population.y))
    build, how = new_net(making.options, population), _training(own_options(making.options))
    found = train_and_score(build, population, records, how, NETWORKS, making.options.seed)
    return {"test_accuracy": 100 * found.mean, "test_accuracy_std": 100 * found.std}


def _training(options: Mapping[str, Any]) -> Training:
    """Of fresh nets on a set: augmented where the set was made so."""
    augmentations = AUGMENTATIONS[options.get("augmentation", "none")]
    if not augmentations:
        return ON_A_SET
    return dataclasses.replace(ON_A_SET, epochs=_AUGMENTED_EPOCHS, augmentations=augmentations)


# ---- what gradients give away


def given_away(making: Making) -> Held:
    """How like a client's own records the images are that the server makes of its gradients.

    Values: over the classes that the client has, the mean correlation of a class's image with the nearest record of
    that class: the client's (`own`), and as many of the test set's, which the server has never had to do with
    (`strangers`).
    """
    recorder = RunRecorder()
    result = making.run([recorder])
    population = population_of(making)
    known = population.test_records()
    assert known is not None  # for mypy: Fashion-MNIST has a test set
    images, labels = (one.to(population.x.device) for one in DistilledSet.load(result.output_dir).records)
    rows, (others, classes) = population.train_of[0], known
    own, strangers = [], []
    for label in population.y[rows].unique():
        image, mine = images[labels == label], population.x[rows[population.y[rows] == label]]
        own.append(_nearest(image, mine))
        strangers.append(_nearest(image, others[classes == label][: len(mine)]))
    return _held(result, recorder, {"own": fmean(own), "strangers": fmean(strangers)})


def _nearest(image: Tensor, records: Tensor) -> float:
    """The largest correlation of one image with a record."""
    image, records = (one.flatten(1) - one.flatten(1).mean(dim=1, keepdim=True) for one in (image, records))
    return float((nn.functional.normalize(image) @ nn.functional.normalize(records).T).max())


# ---- searches: which of many nets or hyperparameters is best

#: passes of a candidate net over the set
_NET_EPOCHS = 200
#: passes over the set for each local epoch that the clients would make of a round
_PASSES = 60


def proxy_net(making: Making, scorer: str, of_set: Cell) -> Held:
    """A candidate net trained on the distilled set, or on random records."""
    return _proxy(making, scorer, of_set, dataclasses.replace(ON_A_SET, epochs=_NET_EPOCHS))


def proxy_hyperparameters(making: Making, scorer: str, of_set: Cell) -> Held:
    """The net trained on such a set with a candidate's hyperparameters, as a client would."""
    clients = making.options.clients
    epochs, batch_size = clients.local_epochs, clients.batch_size
    assert isinstance(epochs, int) and isinstance(batch_size, int) and isinstance(clients.learning_rate, float)
    return _proxy(making, scorer, of_set, Training(_PASSES * epochs, clients.learning_rate, batch_size=batch_size))


def candidate(making: Making) -> Held:
    """A candidate in a federated run of its own."""
    recorder, last = RunRecorder(), LastModel()
    result = making.run([recorder, last])
    population = population_of(making)
    scores = scored(new_net(making.options, population), population, last.model.to(population.x.device))
    return _held(result, recorder, {**scores, "trial_seconds": result.wall_seconds})


def _proxy(making: Making, scorer: str, of_set: Cell, how: Training) -> Held:
    population, options = population_of(making), making.options
    cost = {}
    if scorer == "distilled":
        recorder = RunRecorder()
        records = DistilledSet.load(making.run_of(of_set, [recorder]).output_dir).records
        cost = {f"set_{name}": recorder.found["values"][name] for name in ("gigabytes", "run_seconds")}
    else:
        records = random_subset(population, own_options(making.options)["images_per_class"], options.seed)
    build = new_net(options, population)
    begin, order = (torch_seed(public_generator(options.seed, "candidate", which)) for which in (0, 1))
    there = (records[0].to(population.x), records[1].to(population.y))
    begun = time.perf_counter()
    module = ClientModule(build(begin)).to(population.x.device)
    model = trained_on(module, module.flat, there, how, order)
    seconds = time.perf_counter() - begun
    return {"values": {**scored(build, population, model), "trial_seconds": seconds, **cost}}


def scored(build: Callable[[int], nn.Module], population: Population, model: Tensor) -> dict[str, float]:
    """Accuracies of parameters `[P]` in %: `holdout_accuracy` on the server's public records, which chooses, and
    `test_accuracy`, which is reported; and `parameters`."""
    require(population.public is not None, "data.public_records", "be some: they choose", None)
    assert population.public is not None  # for mypy
    both = dataclasses.replace(
        population, train_of=[torch.cat(population.train_of)], held_out_of=[population.public], groups=None
    )
    module, engine = ClientModule(build(0)).to(population.x.device), SerialEngine()
    engine.setup(module, both, Streams(), "poisson")  # no noise is drawn
    found = evaluate(module, both, ClientModels(model[None], (0,)), engine)
    return {
        "holdout_accuracy": 100 * (found.clients[0].accuracy or 0.0),
        "test_accuracy": 100 * (found.test.accuracy or 0.0),
        "parameters": float(len(model)),
    }


# ---- what the options say


def own_options(options: Options) -> dict[str, Any]:
    """Of the strategy, with the defaults of those that studies read."""
    return {"images_per_class": 10, **(options.strategies.get("distillation") or {})}


def population_of(making: Making) -> Population:
    """The clients, where the run would compute."""
    there = torch.cuda.is_available() and making.options.engine.device != "cpu"
    return build_population(making.options).to("cuda" if there else "cpu")


def new_net(options: Options, population: Population) -> Callable[[int], nn.Module]:
    """Builds the run's net from a seed."""
    facts = facts_of(population)
    return lambda seed: build_net(dataclasses.replace(options, seed=seed), facts)
