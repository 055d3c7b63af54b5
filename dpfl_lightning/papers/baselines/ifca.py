"""IFCA: the server has M models, and every client trains the model that fits its records best."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Interval

from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.papers.clustered.cluster_metrics import GroupingStrategy
from dpfl_lightning.papers.clustered.model_selection import ModelSelection, Positive, Selection


@dataclass
class Ifca(GroupingStrategy):
    """f-CDPFL (IFCA): each client trains that of M models with its lowest loss; aggregation is within each group.

    It suits clients of several kinds whose number is known. The result depends strongly on the M initial models: the
    clients may concentrate on few of them. Name the strategy after those that select clients; otherwise clients that
    are not selected are asked, too. A client that has not chosen yet uses a model drawn from the public seed, with
    equally many clients for each model. A model that no client trains is not changed.

    Args:
        num_clusters: M; 1 is the aggregation rule alone.
        selection: how clients choose: `exponential_frozen` (the exponential mechanism in the first `selection_rounds`
            rounds, then the last choice is kept), `exponential` (in every round) or `paper_argmin` (without noise).
        selection_epsilon: bounded range of one choice with noise; null is 0.03 of each client's budget.
        selection_rounds: number of rounds with choices for `exponential_frozen`; null is a tenth of the run's.
        loss_bound: losses of choices with noise are clipped to [0, loss_bound]; null is 2 log(classes).
        init: `distinct`: M independent random models. `random_assignment`, of the papers' code: copies of one model, of
            which each client trains a random one in the first round, without a choice.

    **Privacy** Choices are planned, noised, charged and solved together with the training. Choices of `paper_argmin`
    have no noise and make every epsilon infinite.

    Reference: Ghosh, Chung, Yin and Ramchandran (2020), Algorithm 1 with model averaging; Mansour et al. (2020),
    HypCluster. Malekmohammadi, Taik and Farnadi (2024) compare with `selection: paper_argmin` as "f-CDPFL".
    """

    num_clusters: Annotated[int, Interval(ge=1)] = 4
    selection: Selection = "exponential_frozen"
    selection_epsilon: Positive | None = None
    selection_rounds: Annotated[int, Interval(ge=1)] | None = None
    loss_bound: Positive | None = None
    init: Literal["distinct", "random_assignment"] = "distinct"

    def __post_init__(self) -> None:
        super().__post_init__()
        key = f"strategies.{self.config_name}"
        self._choice = ModelSelection(
            self.selection, self.selection_epsilon, self.selection_rounds, self.loss_bound, key
        )

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        return self._choice.plan_run(schedule, view, schedule.rounds if self.num_clusters > 1 else 0)

    def initialise(self, state: ServerState, view: View) -> ServerState:
        count = self.num_clusters
        of_models, of_clients = np.random.SeedSequence(view.seed).spawn(2)
        if self.init == "random_assignment":
            drawn = np.random.default_rng(of_clients).integers(count, size=view.facts.num_clients)
            return dataclasses.replace(state, models=state.models[:1].repeat(count, 1), model_of=tuple(drawn.tolist()))
        others = [view.new_model(seed) for seed in of_models.generate_state(count)[1:].tolist()]
        models = torch.stack([state.models[0], *others])
        drawn = np.random.default_rng(of_clients).permutation(view.facts.num_clients) % count
        return dataclasses.replace(state, models=models, model_of=tuple(drawn.tolist()))

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        return dataclasses.replace(plan, model_of=self._choice.models_of(plan, view, view.state.models))

    def state_dict(self) -> dict[str, Any]:
        return self._choice.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._choice.load_state_dict(state)
