"""From a configuration to a loop: the only place that knows both."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpfl_lightning import data, models, strategies
from dpfl_lightning.config.options import Options, to_dict
from dpfl_lightning.data import Facts, Population
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.federated.client.engines.serial import SerialEngine, TrainerEngine
from dpfl_lightning.federated.client.engines.stacked import StackedEngine
from dpfl_lightning.federated.client.identity import deciding_options
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.folder import RunFolder
from dpfl_lightning.federated.server.loop import FederatedLoop
from dpfl_lightning.federated.server.strategy import ServerCallback
from dpfl_lightning.privacy.accounting.schedule import ClientSchedule
from dpfl_lightning.privacy.ledger.ledger import check_same

ENGINES: dict[str, type[SerialEngine]] = {
    "fast": FastEngine,
    "serial": SerialEngine,
    "stacked": StackedEngine,
    "trainer": TrainerEngine,
}


def build_population(options: Options) -> Population:
    """The clients of a configuration, from the data set it names."""
    own = options.data
    partition = dict(own.partition)
    return Population.partitioned(
        data.load(own.name, own.folder, own.download),
        num_clients=options.clients.count,
        partition=(partition.pop("name", "iid"), partition),
        records_per_client=own.records_per_client,
        held_out_per_client=own.held_out_per_client,
        test_per_client=own.test_per_client,
        public_records=own.public_records,
        use_public=own.use_public,
        groups=_named(own.groups),
        mislabelled=_named(own.mislabelled),
        seed=options.seed,
    )


def _named(options: dict | None) -> tuple[str, dict] | None:
    """A name and its options, of `{name, options}`."""
    if options is None:
        return None
    rest = dict(options)
    return rest.pop("name", ""), rest


def build_net(options: Options, population: Population | Facts) -> nn.Module:
    """A model by name, or a user's own by `class_path`, initialised from `seed`."""
    torch.manual_seed(options.seed)
    model = dict(options.model)
    if "class_path" in model:
        kind, arguments = _import(model["class_path"]), model.get("init_args") or {}
        try:
            return kind(**arguments)
        except TypeError as error:
            raise UserError(f"`model.init_args` must fit {kind.__name__}, got {arguments}: {error}.") from None
    name, personal = model.pop("name", "cnn_small"), model.pop("personal_input", False)
    require(isinstance(personal, bool), "model.personal_input", "be true or false", personal)
    net = models.build(name, population.input_shape, population.num_classes, **model)
    return models.PersonalInput(net, population.input_shape) if personal else net


def build_engine(name: str, workers: int | None = None) -> SerialEngine:
    """An engine of `ENGINES`, not set up yet; `workers` is how many clients `fast` trains at once."""
    return FastEngine(workers) if name == "fast" else ENGINES[name]()


def build_loop(
    options: Options, watchers: Sequence[ServerCallback] = (), population: Population | None = None
) -> FederatedLoop:
    """The loop of a configuration, with `watchers` after its strategies.

    Args:
        population: in place of the one that the configuration names.

    Raises:
        UserError: whatever in the configuration cannot be built.
    """
    population = build_population(options) if population is None else population
    facts = population.facts()  # not the records: they may move to another device
    return FederatedLoop(
        population,
        ClientModule(build_net(options, facts)),
        rounds=options.rounds,
        clients=options.clients,
        privacy=options.privacy,
        network=options.network,
        callbacks=[*strategies.build(options.strategies), *watchers],
        engine=build_engine(options.engine.name, options.engine.workers),
        seed=options.seed,
        output_dir=options.output_dir,
        device=options.engine.device,
        evaluate_every=options.evaluation.every,
        options=to_dict(options),
        new_net=lambda seed: build_net(dataclasses.replace(options, seed=seed), facts),
    )


def planned_clients(options: Options) -> tuple[FederatedLoop, tuple[ClientSchedule, ...]]:
    """Every client's solved schedule without training: what `plan --config` prints."""
    loop = build_loop(options)
    return loop, loop.plan_schedule().clients


def so_far(options: Options) -> tuple[bool, dict | None]:
    """Whether the run in `output_dir` has begun, and its result if it has one.

    Raises:
        UserError: it began with other options.
    """
    folder = RunFolder(Path(str(options.output_dir)))
    if (header := folder.begun()) is None:
        return folder.options.exists(), None
    now = deciding_options(to_dict(options))
    result = folder.path / "result.json"
    if not result.exists():
        del now["rounds"]  # fewer are possible, and the run refuses more
    check_same(folder.path, {key: header.identity.get(key) for key in now}, now)
    return True, json.loads(result.read_text()) if result.exists() else None


def _import(class_path: str) -> Any:
    module, _, name = class_path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"`model.class_path` must be importable, got {class_path!r}: {error}. Is it on PYTHONPATH?"
        ) from None
    require(
        isinstance(kind, type) and issubclass(kind, nn.Module), "model.class_path", "be a torch.nn.Module", class_path
    )
    return kind
