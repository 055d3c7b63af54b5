"""From a configuration to what a client has: records, model and engine."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dpfl_lightning import models
from dpfl_lightning.config.options import EngineOptions, Options
from dpfl_lightning.config.registry import made_by
from dpfl_lightning.data import Population
from dpfl_lightning.data.arrival import arrival_of
from dpfl_lightning.errors import require
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.engines.trainer import TrainerEngine
from dpfl_lightning.federated.client.module import ClientModule, named_metrics
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.models.tasks import ClassWeightedLoss, build_task

ENGINES: dict[str, type[SerialEngine]] = {
    "fast": FastEngine,
    "serial": SerialEngine,
    "trainer": TrainerEngine,
}


def build_population(options: Options) -> Population:
    """Return the clients of a configuration, with the records of its data set."""
    return arrival_of(options.data).population(options.clients.count, options.seed)


def build_test_set(options: Options) -> Population | None:
    """Return a population with the test set of a run over sites, which has no records of theirs; None without."""
    return arrival_of(options.data).test_set(options.clients.count, options.seed)


def build_module(options: Options, population: Population | Facts) -> ClientModule:
    """Return the module that clients train: the model of `build_net`, wrapped unless it is a ClientModule.

    Raises UserError if a ClientModule has another task or other metrics than the configuration.
    """
    model, metrics = _build_model(options, population), options.evaluation.metrics
    priors, per_record = options.model.get("class_priors"), options.model.get("per_record", False)
    require(isinstance(per_record, bool), "model.per_record", "be true or false", per_record)
    if not isinstance(model, ClientModule):
        loss = None if priors is None else ClassWeightedLoss.of_priors(priors, population.num_classes)
        return ClientModule(model, loss, task=options.task, metrics=metrics, per_record=per_record)
    advice = "Write ClientModule(model, per_record=True)."
    require(not per_record, "model.per_record", "be left out", per_record, advice)
    require(priors is None, "model.class_priors", "be left out: the ClientModule has a loss", priors)
    task = None if options.task is None else build_task(options.task)
    advice = "The ClientModule sets it, too: set it in one place."
    require(task is None or model.named_task in (None, task), "task", f"be '{model.named_task}'", f"{task}", advice)
    given = named_metrics(metrics)
    same = not given or not model.metrics or model.metrics.keys() == given.keys()
    require(same, "evaluation.metrics", f"be {list(model.metrics)}", list(given), advice)
    model.named_task, model.metrics = model.named_task or task, model.metrics or given
    return model


def build_net(options: Options, population: Population | Facts) -> nn.Module:
    """Return a model by name, or a user-defined one by `class_path`, initialised from `seed`.

    Of a ClientModule it is the `net`, whose parameters are those of the saved models.
    """
    model = _build_model(options, population)
    return model.net if isinstance(model, ClientModule) else model


def _build_model(options: Options, population: Population | Facts) -> nn.Module:
    torch.manual_seed(options.seed)
    model = {key: value for key, value in options.model.items() if key not in models.OF_LOSS}
    if "class_path" in model:
        path, arguments, fix = model.pop("class_path"), model.pop("init_args", None) or {}, model.pop("fix", False)
        require(isinstance(fix, bool), "model.fix", "be true or false", fix)
        must = "have class_path, init_args, fix, per_record and class_priors only"
        require(not model, "model", must, ", ".join(model))
        made = made_by("model", path, arguments)
        require(isinstance(made, nn.Module), "model.class_path", "return a torch.nn.Module", type(made).__name__)
        of_module = isinstance(made, ClientModule)
        require(not (fix and of_module), "model.fix", "be left out", fix, "Write ClientModule(model, fix=True).")
        return models.fixed(made) if fix else made
    return models.named(model, population.input_shape, population.num_classes)


def build_engine(name: str, workers: int | None = None, trainer: Mapping[str, Any] | None = None) -> SerialEngine:
    """Return the engine `name` of `ENGINES`, not set up yet; see `EngineOptions`.

    Raises UserError for options of another engine.
    """
    return ENGINES[name].of(EngineOptions(name, workers=workers, trainer=dict(trainer or {})))
