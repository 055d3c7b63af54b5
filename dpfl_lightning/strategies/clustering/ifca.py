"""IFCA: the server has M models, and every client trains the model that fits its records best."""

import dataclasses
from typing import Any

import numpy as np
import torch

from dpfl_lightning.errors import require, require_one_of
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.strategies.clustering.cluster_metrics import GroupingStrategy
from dpfl_lightning.strategies.clustering.model_selection import ModelSelection


class Ifca(GroupingStrategy):
    """f-CDPFL (IFCA): each client trains that of M models with its lowest loss; aggregation is within each group.

    It suits clients of several kinds whose number is known. The result depends strongly on the models of the first
    choices: from distinct random models the clients may concentrate on few of them. Name the strategy after those that
    select clients; otherwise clients that are not selected are asked, too. A client that has not chosen yet uses a
    model drawn from the public seed, with equally many clients for each model. A model that no client trains is not
    changed.

    Args:
        num_clusters: M, >= 1; 1 is the aggregation rule alone.
        init: `distinct` uses M independent random initialisations. `random_assignment` uses one initialisation for all
            M models, which become different in the first round, because their clients are drawn at random.
        selection: how clients choose: `exponential_frozen` (the exponential mechanism in the first `selection_rounds`
            rounds, then the last choice is kept), `exponential` (in every round) or `paper_argmin` (without noise).
        selection_epsilon: bounded range of one choice with noise, > 0; null is 0.03 of each client's budget.
        selection_rounds: number of rounds with choices for `exponential_frozen`, >= 1; null is a tenth of the run's.
        loss_bound: losses of choices with noise are clipped to [0, loss_bound], > 0; null is 2 log(classes).

    **Privacy** Choices are planned, noised, charged and solved together with the training. Choices of `paper_argmin`
    have no noise and make every epsilon infinite.

    Reference: Ghosh, Chung, Yin and Ramchandran (2020), Algorithm 1 with model averaging; Mansour et al. (2020),
    HypCluster. Malekmohammadi, Taik and Farnadi (2024) compare with `selection: paper_argmin` as "f-CDPFL".
    """

    def __init__(
        self,
        num_clusters: int = 4,
        init: str = "distinct",
        selection: str = "exponential_frozen",
        selection_epsilon: float | None = None,
        selection_rounds: int | None = None,
        loss_bound: float | None = None,
    ) -> None:
        key = "strategies.ifca"
        require(num_clusters >= 1, f"{key}.num_clusters", "be >= 1", num_clusters)
        require_one_of(("distinct", "random_assignment"), f"{key}.init", init)
        self._num_clusters, self._init = num_clusters, init
        self._choice = ModelSelection(selection, selection_epsilon, selection_rounds, loss_bound, key)

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        first = 1 if self._init == "distinct" else 2  # a choice between equal models is not needed
        return self._choice.plan_run(schedule, view, schedule.rounds + 1 - first if self._num_clusters > 1 else 0)

    def initialise(self, state: ServerState, view: View) -> ServerState:
        count, first = self._num_clusters, state.models[0]
        of_models, of_clients = np.random.SeedSequence(view.seed).spawn(2)
        models = [first] * count
        if self._init == "distinct":
            models[1:] = [view.new_model(seed) for seed in of_models.generate_state(count)[1:].tolist()]
        drawn = np.random.default_rng(of_clients).permutation(view.facts.num_clients) % count
        return dataclasses.replace(state, models=torch.stack(models), model_of=tuple(drawn.tolist()))

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        return dataclasses.replace(plan, model_of=self._choice.models_of(plan, view, view.state.models))

    def state_dict(self) -> dict[str, Any]:
        return self._choice.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._choice.load_state_dict(state)
