"""Scores of every client on its held-out records, as a planned release with noise."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.algorithms.binned_scores import binned_scores, edges_of
from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.jobs import TRAINING
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import ScoreCounts
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.mechanism import Mechanism, mechanism_of
from dpfl_lightning.runtime.text import at_most, counted

PURPOSE = "scores"
_SHARE = 0.1  # of a budget
_MOST_NAMES = 10  # of clients in a sentence


@dataclass
class ReleasedScores(Strategy):
    """Asks every client for noisy counts, from which its accuracy, AUROC and calibration error follow.

    Records are counted by label and by bin of predicted probability. Without this strategy no server learns a score of
    a site, which keeps its scores to itself (`dpfl node status`).

    Args:
        epsilon: what all these releases of a client cost alone, at its delta; null is a tenth of its budget. The rest
            is for training.
        every: number of rounds between two releases; null is one after the last planned round.
        bins: of predicted probability, equally wide in logits. More lose less of the AUROC, and have more noise.

    **Privacy** Counts of held-out records, with noise for sensitivity 1, composed with the training of the client. Each
    `privacy.unit` counts once, by the mean of its rows.
    """

    epsilon: Annotated[float, Interval(gt=0, le=1000)] | None = None
    every: Annotated[int, Interval(ge=1, le=1_000_000)] | None = None
    bins: Annotated[int, Interval(ge=4, le=200)] = 20

    jobs = TRAINING

    def __post_init__(self) -> None:
        super().__post_init__()
        self._read: dict[str, Tensor] = {}  # curve of the round -> value of each client `[N]`
        self._asked = 0  # the last round after which clients were asked

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        self._of_two(view)
        personal, advice = ", ".join(view.module.personal), "Their values are private, and scores would show them."
        require(not personal, "personal", f"be empty with {self.config_name}", personal, advice)
        must = f"not hold {self.config_name} beside a strategy that changes the plan of the run later"
        require(not view.run.replans, "strategies", must, "both", "Remove one of them.")
        must, advice = "be a number of rounds beside a strategy that may end the run", "The last round may not come."
        require(self.every is not None or not view.run.ends_by_results, self._key("every"), must, None, advice)
        bare = not all(client.adds_noise for client in schedule.clients)
        require(not bare, self._key("epsilon"), "be left out of a run without noise", self.epsilon)
        every = schedule.rounds if self.every is None else self.every
        count = math.ceil(schedule.rounds / every) + schedule.reserve

        def alone(_: int, client: ClientSchedule) -> ClientSchedule:
            epsilon = _SHARE * client.target_epsilon if self.epsilon is None else self.epsilon
            require(math.isfinite(epsilon), self._key("epsilon"), "be a number where a client has no budget", None)
            counts = client.main.of(1.0, None, 1).of_held_out()
            return ClientSchedule(epsilon, client.delta, (Planned(PURPOSE, counts, count),))

        lines = [client.planned for client in view.solve(schedule.replan(alone)).clients]
        return schedule.replan(lambda i, one: dataclasses.replace(one, planned=(*one.planned, *lines[i])))

    def describe(self, view: View) -> tuple[str, ...]:
        cost = "a tenth of its budget" if self.epsilon is None else f"epsilon {at_most(self.epsilon)}"
        times = "after the last round" if self.every is None else f"every {counted(self.every, 'round')}"
        words = (
            f"Each client releases counts of its held-out records by label and predicted probability {times}, and "
            f"scores follow from them. They cost {cost} alone. A record is held out or trained on; the cost is added "
            "as if it were both."
        )
        return (words,)

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        self._read = {}
        return plan

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        if view.round == view.run.rounds or (self.every and view.round % self.every == 0):
            self._ask(state, view)
        return state

    def _ask(self, state: ServerState, view: View) -> None:
        edges, clients = edges_of(self.bins), range(view.facts.num_clients)
        mechanism = {client: self._mechanism(client, view) for client in clients}
        row_of, noise = dict(enumerate(state.model_of)), {one: mechanism[one].noise_std(1, 1.0) for one in clients}
        question = ScoreCounts(mechanism_of=mechanism, models=state.models, row_of=row_of, edges=edges)
        self._asked = view.round
        for client, counts in view.ask(question).items():
            for name, reading in binned_scores(counts, noise[client], edges, self._of_two(view)).items():
                for curve, value in ((f"released_{name}", reading.value), (f"noise_of_{name}", reading.noise)):
                    row = self._read.setdefault(curve, torch.full((len(clients),), math.nan, dtype=torch.float64))
                    row[client] = math.nan if value is None else value

    def _mechanism(self, client: int, view: View) -> Mechanism:
        return mechanism_of(view.schedule.noised(client, PURPOSE), clip_norm=1.0, num_records=1)

    def _of_two(self, view: View) -> bool:
        """Return whether there are two classes. Raises UserError for a task that does not predict one class."""
        task, advice = view.module.task, "Its scores are counts of right predictions."
        one_class, got = task is not None and task.one_class, "another one" if task is None else task.name
        require(one_class, "task", f"have one class for each record with {self.config_name}", got, advice)
        assert task is not None  # for mypy
        return task.zero_or_one

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        return self._read

    def remarks(self, view: View) -> tuple[str, ...]:
        if not self._asked:
            return ("No scores were released: the run ended before clients were asked.",)
        if not self._read:
            return (f"Scores were released after round {self._asked}; metrics.jsonl has them.",)
        words = "The \N{PLUS-MINUS SIGN} of a released score is the standard deviation of its noise alone."
        missing = torch.stack([values for curve, values in self._read.items() if curve.startswith("released_")]).isnan()
        names = [view.facts.name_of(client) for client in missing.any(dim=0).nonzero().flatten().tolist()]
        if names:
            listed = f"{', '.join(names[:_MOST_NAMES])}{' and more' if len(names) > _MOST_NAMES else ''}"
            words += f" A released score is - where its records are too few for the noise: clients {listed}."
        return (words,)

    def state_dict(self) -> dict[str, Any]:
        return {"read": dict(self._read), "asked": self._asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._read, self._asked = dict(state["read"]), state["asked"]
