"""Make cells of the distillation paper: sets of several kinds, and fresh models that are trained on them.

Choices depend on the accuracy on the server's public records alone; test accuracies are for reports.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpfl_lightning.algorithms.server_training import Training, public_generator, torch_seed, trained_on
from dpfl_lightning.build import build_net, build_population
from dpfl_lightning.config.options import Options
from dpfl_lightning.data import Population
from dpfl_lightning.errors import require
from dpfl_lightning.federated.client.evaluation import PlainScorer, evaluate
from dpfl_lightning.federated.client.local_clients import facts_of
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.evaluation import ClientModels
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.traffic import BYTES
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.papers.sets.distilled_set import DistilledSet
from experiments.papers.cells import Cell
from experiments.papers.distillation.baselines import (
    ON_A_SET,
    ON_EVERYTHING,
    random_subset,
    train_and_score,
    whole,
)
from experiments.papers.recorder import Recorder, guarantee_of, numbers_of
from experiments.papers.run import CellContext

Content = dict[str, Any]

NETWORKS = 3  # fresh models for each set
SEARCH_SET = Cell("distillation.search_set", "distdd", "set", "small")  # the set that searches train on


class RunRecorder(Recorder):
    """Test accuracy of the delivered models in per cent, `gigabytes` sent both ways, a finite epsilon, and metrics."""

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        metrics = numbers_of(result)
        floats = metrics.pop("floats_down", 0.0) + metrics.pop("floats_up", 0.0)
        accuracy = {} if result.test_accuracy is None else {"delivered_accuracy": 100 * result.test_accuracy}
        spent = {"epsilon": epsilon} if math.isfinite(epsilon := result.guarantee.epsilon) else {}
        return {**accuracy, **spent, "gigabytes": BYTES * floats / 1e9, "run_seconds": result.wall_seconds, **metrics}


class LastModel(Callback):
    """Keeps the only model of a run's last round."""

    model: Tensor

    def on_fit_end(self, view: View, result: RunResult) -> None:
        self.model = view.state.models[0].clone()


# ---- sets


def distilled(context: CellContext) -> Content:
    """The cell's run of strategy distillation, and fresh models trained on its set."""
    result = context.run([recorder := RunRecorder()])
    return _content(result, recorder, _of_nets(context, DistilledSet.load(result.output_dir).records))


def federated(context: CellContext) -> Content:
    """The accuracy of the cell's run."""
    result = context.run([recorder := RunRecorder()])
    return _content(result, recorder, {"test_accuracy": 100 * (result.test_accuracy or 0.0)})


def _content(result: RunResult, recorder: Recorder, values: Mapping[str, float]) -> Content:
    return {**recorder.record, "values": {**recorder.record["values"], **values}, **guarantee_of(result)}


def random_records(context: CellContext) -> Content:
    """Nets trained on as many real records as the set has images."""
    population, options = population_of(context), distillation_options(context.options)
    records = random_subset(population, options["images_per_class"], context.options.seed)
    return {"values": _of_nets(context, records)}


def all_records(context: CellContext) -> Content:
    """One model trained on all clients' records together."""
    return _of_one_net(context, whole(population_of(context)))


def public_records(context: CellContext) -> Content:
    """One model trained on the server's public records alone."""
    return _of_one_net(context, population_of(context).public_records())


def _of_one_net(context: CellContext, records: tuple[Any, Tensor]) -> Content:
    population = population_of(context)
    build, seed = new_net(context.options, population), context.options.seed
    trained = train_and_score(build, population, records, ON_EVERYTHING, 1, seed)
    return {"values": {"test_accuracy": 100 * trained.mean}}


def _of_nets(context: CellContext, records: tuple[Tensor, Tensor]) -> dict[str, float]:
    population = population_of(context)
    records = (records[0].to(population.x), records[1].to(population.y))
    build = new_net(context.options, population)
    score = train_and_score(build, population, records, ON_A_SET, NETWORKS, context.options.seed)
    return {"test_accuracy": 100 * score.mean, "test_accuracy_std": 100 * score.std}


# ---- searches: which of many models or hyperparameters is best

_NET_EPOCHS = 200  # passes of a candidate model over the set
_PASSES = 60  # over the set for each local epoch that the clients would make of a round


def candidate_net(context: CellContext) -> Content:
    """A candidate model by the scorer of the column: a federated run, or trained on a set."""
    return _candidate(context, dataclasses.replace(ON_A_SET, epochs=_NET_EPOCHS))


def candidate_hyperparameters(context: CellContext) -> Content:
    """A candidate's hyperparameters by the scorer of the column; on a set the model trains as a client would."""
    return _candidate(context, _as_clients(context.options, _PASSES))


def _as_clients(options: Options, passes: int) -> Training:
    """The clients' training: so many passes over records for each local epoch."""
    clients = options.clients
    epochs, batch_size = clients.local_epochs, clients.batch_size
    assert isinstance(epochs, int) and isinstance(batch_size, int) and isinstance(clients.learning_rate, float)
    return Training(passes * epochs, clients.learning_rate, batch_size=batch_size)


def _candidate(context: CellContext, training: Training) -> Content:
    """The candidate's federated run, or a model trained on the distilled set or on random records, by the column."""
    population, options, recorder = population_of(context), context.options, RunRecorder()
    build, cost, column = new_net(options, population), {}, context.cell.column
    if column in ("federated", "early"):
        result = context.run([recorder, last := LastModel()])
        scores = scored(build, population, last.model.to(population.x.device))
        return _content(result, recorder, {**scores, "trial_seconds": result.wall_seconds})
    if column == "distilled":
        records = DistilledSet.load(context.run_of(SEARCH_SET, [recorder]).output_dir).records
        cost = {f"set_{name}": recorder.record["values"][name] for name in ("gigabytes", "run_seconds")}
    else:
        records = random_subset(population, distillation_options(context.options)["images_per_class"], options.seed)
    records = records[0].to(population.x), records[1].to(population.y)
    begin, order = (torch_seed(public_generator(options.seed, "candidate", which)) for which in (0, 1))
    begun = time.perf_counter()
    module = ClientModule(build(begin)).to(population.x.device)
    model = trained_on(module, module.flat, records, training, order)
    seconds = time.perf_counter() - begun
    return {"values": {**scored(build, population, model), "trial_seconds": seconds, **cost}}


def scored(build: Callable[[int], nn.Module], population: Population, model: Tensor) -> dict[str, float]:
    """Accuracies of parameters `[P]` in %: on the server's public records, which chooses, and on the test set."""
    require(population.public is not None, "data.public_records", "be some: they choose", None)
    assert population.public is not None  # for mypy
    both = dataclasses.replace(
        population, train_of=[torch.cat(population.train_of)], held_out_of=[population.public], groups=None
    )
    module = ClientModule(build(0)).to(population.x.device)
    evaluation = evaluate(module, both, ClientModels(model[None], (0,)), PlainScorer(module, both))
    return {
        "holdout_accuracy": 100 * (evaluation.clients[0].accuracy or 0.0),
        "test_accuracy": 100 * (evaluation.test.accuracy or 0.0),
        "parameters": float(len(model)),
    }


# ---- options


def distillation_options(options: Options) -> dict[str, Any]:
    """The options of the strategy, with the default of `images_per_class`."""
    given = [one for name, one in options.strategies.items() if "distillation" in name and one]
    return {"images_per_class": 10, **(given[0] if given else {})}


def population_of(context: CellContext) -> Population:
    return build_population(context.options).to(context.device)


def new_net(options: Options, population: Population) -> Callable[[int], nn.Module]:
    """Builds the run's model from a seed."""
    facts = facts_of(population)
    return lambda seed: build_net(dataclasses.replace(options, seed=seed), facts)
