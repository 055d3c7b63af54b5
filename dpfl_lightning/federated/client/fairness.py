"""Fairness measures that compare clients with models of their pooled records: simulations have them alone."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.config.registry import call
from dpfl_lightning.data import Population
from dpfl_lightning.errors import require
from dpfl_lightning.federated.client.channel import Channel
from dpfl_lightning.federated.client.evaluation import Scorer
from dpfl_lightning.federated.client.local_clients import LocalClients
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.evaluation import ClientModels, Evaluation, Score
from dpfl_lightning.models.tasks import Measure
from dpfl_lightning.privacy.accounting.noise_source import require_simulated

KEY = "evaluation.fairness"

#: registry name -> (module, class)
FAIRNESS = {"central_models": ("papers.central_models", "CentralModels")}

#: in every guarantee of a run with a measure
CAVEAT = "a simulation: the fairness measures are computed from all records without noise"


class FairnessMeasure:
    """What the models of all clients are compared with. `measures` is name -> which values are better.

    **Privacy** It sees all records and adds no noise.
    """

    measures: ClassVar[Mapping[str, Measure]]

    def values(
        self,
        module: ClientModule,
        population: Population,
        final_models: ClientModels,
        held_out: Sequence[Score],
        engine: Scorer,
    ) -> dict[str, float]:
        """The measures, from the clients' models and their scores on held-out records."""
        raise NotImplementedError

    def clients(
        self, population: Population, module: ClientModule, channel: Channel, privacy: PrivacyOptions | None
    ) -> LocalClients:
        """The clients of a run that is evaluated by this measure, too."""
        return ComparedClients(self, population, module, channel, privacy)


class ComparedClients(LocalClients):
    """Clients of a simulation whose evaluations have a fairness measure.

    Raises UserError where noise protects records, without true groups, and with personal parameters.
    """

    def __init__(
        self,
        measure: FairnessMeasure,
        population: Population,
        module: ClientModule,
        channel: Channel,
        privacy: PrivacyOptions | None,
    ) -> None:
        super().__init__(population, module, channel, privacy)
        why = "It trains models on the pooled records of all clients, without noise, and compares losses on them."
        require_simulated(self.source, KEY, measure, why)
        must, advice = "be null unless clients have true groups", "Set data.groups: each group has one central model."
        require(population.groups is not None, KEY, must, measure, advice)
        advice = "No pooled records have trained them. Leave out model.personal_input."
        require(not module.personal, KEY, "be null if clients have personal parameters", measure, advice)
        self._measure, self.caveats = measure, (*self.caveats, CAVEAT)

    def evaluate(self, final_models: ClientModels) -> Evaluation:
        scores = super().evaluate(final_models)
        values = self._measure.values(self.module, self.population, final_models, scores.clients, self.channel)
        return dataclasses.replace(scores, fairness=values, measures={**scores.measures, **self._measure.measures})


def build_fairness(given: Mapping[str, Any]) -> FairnessMeasure:
    """Return the measure of `evaluation.fairness`, {name, options}."""
    options = {key: value for key, value in given.items() if key != "name"}
    made: FairnessMeasure = call(KEY, classes(), given["name"], **options)
    return made


def classes() -> dict[str, Any]:
    """Return registry name -> class."""
    modules = {name: importlib.import_module(f"dpfl_lightning.{file}") for name, (file, _) in FAIRNESS.items()}
    return {name: getattr(modules[name], kind) for name, (_, kind) in FAIRNESS.items()}
