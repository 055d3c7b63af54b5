"""Selection of clients: a cohort in each round, and a quota of rounds for each client."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray
from torch import Tensor

from dpfl_lightning.algorithms.cohorts import larger_budgets, systematic
from dpfl_lightning.algorithms.selection_estimates import jain_index
from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.federated.messages.jobs import TRAINING
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, once_each
from dpfl_lightning.privacy.noise import stream_words
from dpfl_lightning.strategies.aggregation.uniform import Uniform

Counts = NDArray[np.int64]

PURPOSE, LATER = "train", "later_train"  # purposes of the releases that quotas limit
_USUAL_SHARE = 5  # by default one in this many clients takes part in a round
_FEWEST = 2  # clients in a round, whose updates can be compared
_DRAWS = 20  # attempts to draw a round that contains a client with a large budget


def with_quotas(schedule: RunSchedule, quota: Sequence[int] | Counts) -> RunSchedule:
    """Return the schedule in which client n trains `quota[n]` times, and has the reserve if its quota is not 0."""

    def change(client: tuple[ClientSchedule, int]) -> ClientSchedule:
        client_schedule, rounds = client
        count = rounds + schedule.reserve if rounds else 0
        lines = [
            dataclasses.replace(line, count=count) if line.purpose == PURPOSE else line
            for line in client_schedule.planned
        ]
        return dataclasses.replace(client_schedule, planned=tuple(lines))

    pairs = [*zip(schedule.clients, map(int, quota), strict=True)]
    return dataclasses.replace(schedule, clients=tuple(once_each(change, pairs)))


def exact_exponent(schedule: RunSchedule) -> float | None:
    """Return the exponent with which noise grows with participations; None unless only full batches share budgets."""
    events = [(event, client.delta) for client in schedule.clients for event in client.noised]
    if len(events) > len(schedule.clients):
        return None
    exponents = {event.growth(delta) for event, delta in events} or {1.0}
    return exponents.pop() if len(exponents) == 1 else None


@dataclass
class QuotaSelection(Strategy, Callback):
    """Selects K clients in each round; client n trains in T_n rounds, and its noise is solved for T_n releases.

    A subclass defines the quotas T_n. The strategy is combined with an aggregation rule; the default is `uniform`.

    Args:
        clients_per_round: number K of clients in each round, at most N. The noise of a round's mean is ~ K^(z - 1) if
            that of an update is ~ T_n^z. So null is 2 for delta 0 (z = 2). Otherwise it is a fifth
            of the clients, and at least 2, whose updates can be compared: with Gaussian noise of full batches (z = 1),
            K does not matter. In a short run it is as many as it takes for every client to take part.
        top_fraction: a share of the clients: a round is drawn again, at most 20 times, until it
            contains one of this share of clients with the largest claimed budgets. Use it with `pfa`, which projects
            onto their updates.

    **Guarantees** No client trains more often than its quota. A client that an earlier strategy excludes from a round
    keeps its slot. A client that is lost after it was charged has used its slot.

    **Privacy** Post-processing of public facts: claimed budgets and numbers of records, which are trusted. The server
    knows which clients take part, so there is no amplification by selection.
    """

    clients_per_round: Annotated[int, Interval(ge=1)] | None = None
    top_fraction: Annotated[float, Interval(gt=0, lt=1)] | None = None

    default_base = Uniform
    jobs = TRAINING
    role = "selection"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cohort_size, self._horizon = 0, 0  # K, and the rounds among which quotas are divided
        self._quota = self._taken = np.zeros(0, dtype=np.int64)  # T_n and the participations so far, [N]
        self._settled = False  # whether quotas are what budgets can pay for
        self._top = np.zeros(0, dtype=bool)  # [N], whom each round needs one of
        self._drawn_in = 0  # the round of the last cohort

    def _quotas(self, total: int, upper: Counts, schedule: RunSchedule, view: View) -> Counts:
        """Return quotas `[N]` with sum `total`, each at most `upper` `[N]`. Subclasses implement it."""
        raise NotImplementedError

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        count = view.facts.num_clients
        upper = self._paid_rounds(schedule)
        self._horizon = int(upper.max())
        turns = math.ceil(count / max(self._horizon, 1))  # of which every client takes part once
        least_noise = (exact_exponent(schedule) or 1.0) > 1
        usual = max(turns, _FEWEST, 0 if least_noise else round(count / _USUAL_SHARE))
        self._cohort_size = min(usual, count) if self.clients_per_round is None else self.clients_per_round
        must = f"be at most the {count} clients"
        require(self._cohort_size <= count, self._key("clients_per_round"), must, self._cohort_size)
        total = min(self._cohort_size * self._horizon, int(upper.sum()))
        self._quota = self._quotas(total, upper, schedule, view)
        self._taken, self._settled = np.zeros(count, dtype=np.int64), False
        if self.top_fraction is not None:
            epsilon = np.array(view.facts.reported_epsilon)
            self._top = larger_budgets(epsilon, "top", self.top_fraction, view.seed)
        return with_quotas(schedule, self._quota)

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        if plan.purpose != PURPOSE:
            return plan
        self._settle(view)
        here = np.zeros(len(self._quota), dtype=bool)
        here[np.array(plan.clients, dtype=np.int64)] = True
        cohort = set(self._cohort(np.where(here, self._quota, 0), view).tolist())
        self._drawn_in = view.round
        return plan.only(cohort.__contains__)

    def _paid_rounds(self, schedule: RunSchedule) -> Counts:
        """Return the number of rounds `[N]` that each client's releases pay for, without the reserve."""
        return np.maximum([client.count_of(PURPOSE) - schedule.reserve for client in schedule.clients], 0)

    def _settle(self, view: View) -> None:
        """Reduce quotas to what budgets can pay for, once in a run; with given noise that may be less than planned."""
        if not self._settled:
            self._quota, self._settled = np.minimum(self._quota, self._paid_rounds(view.schedule)), True

    def _cohort(self, quota: Counts, view: View) -> Counts:
        """Return the clients of this round. A subclass that overrides it has to respect or refuse `top_fraction`."""
        key = np.random.SeedSequence(view.seed, spawn_key=stream_words("selection", view.round))
        generator = np.random.Generator(np.random.PCG64DXSM(key))
        left = min(self._horizon, view.run.rounds - view.round + 1)  # at most the rounds that budgets can pay for
        for _ in range(_DRAWS):
            cohort = systematic(np.maximum(quota - self._taken, 0), left, generator)
            if self.top_fraction is None or self._top[cohort].any():
                break
        return cohort

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        if self._drawn_in == view.round:
            self._taken[[*updates.clients, *updates.lost]] += 1
        return state

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        left = min(self._horizon, view.run.rounds - view.state.round)
        metrics: dict[str, float | Tensor] = {
            "quota": torch.from_numpy(self._quota).double(),
            "participations": torch.from_numpy(self._taken).double(),
            "forfeited_participations": float(np.maximum(self._quota - self._taken - left, 0).sum()),
        }
        return {**metrics, "participation_equality": jain_index(self._taken)} if self._taken.any() else metrics

    def describe(self, view: View) -> tuple[str, ...]:
        self._settle(view)
        quota = np.sort(self._quota)
        never = int((quota == 0).sum())
        return (
            f"{self._cohort_size} of {len(quota)} clients a round; quotas from {quota[0]} to {quota[-1]} of "
            f"{self._horizon} rounds, median {np.median(quota):g}; {never} clients have quota 0; Jain index of "
            f"participation {jain_index(quota):.3f}.",
        )

    def on_fit_end(self, view: View, result: RunResult) -> None:
        unused = int((self._quota - self._taken).sum())
        if result.finished and unused:
            warn_user(
                f"{self.config_name}: {unused} of {int(self._quota.sum())} planned participations were not "
                "used, because clients were away or the run ended early. The noise of these clients was solved "
                "for them, so it was larger than necessary."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"taken": torch.from_numpy(self._taken.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = state["taken"].cpu().numpy().copy()
