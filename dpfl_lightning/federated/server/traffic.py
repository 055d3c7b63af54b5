"""What a run sends, how long a simulated network would take for it, and what it loses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from dpfl_lightning.config.options import NetworkOptions
from dpfl_lightning.config.per_client import resolve
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.models.model import Model

BYTES = 4  # of a number: float32


class Network:
    """A simulated network of N clients. What happens in a round follows from `seed` and the round.

    An update is lost with the probability `network.dropout`, or if it is later than `network.time_limit`.
    """

    def __init__(self, options: NetworkOptions, num_clients: int, seed: int, names: Sequence[str] = ()) -> None:
        def column(name: str, unset: float = 0.0) -> np.ndarray:
            value = getattr(options, name)
            value = unset if value is None else resolve(f"network.{name}", value, num_clients, seed, names=names)
            return np.broadcast_to(value, num_clients)

        speeds = column("down_megabits_per_second", math.inf), column("up_megabits_per_second", math.inf)
        self._down, self._up = (8 * BYTES / (1e6 * speed) for speed in speeds)  # seconds per number
        self._latency, self._dropout = column("latency_seconds"), column("dropout")
        self._compute, self._limit = column("compute_seconds"), column("time_limit", math.inf)
        self.has_limit, self._seed = options.time_limit is not None, seed

    def seconds(self, down: Mapping[int, int], up: int = 0) -> np.ndarray:
        """Return the time until each client has received `down[client]` numbers and sent `up`, `[C]`."""
        clients = list(down)
        received = np.array([*down.values()]) * self._down[clients]
        return received + up * self._up[clients] + self._latency[clients]

    def training(self, round: int, down: Mapping[int, int], up: int) -> tuple[frozenset[int], int, float]:
        """Return whose updates of a round are lost, how many of them because they are late, and the server's time."""
        clients = list(down)
        trained = np.random.default_rng([self._seed, round, 1]).exponential(self._compute)
        times = self.seconds(down, up) + trained[clients]
        draws = np.random.default_rng([self._seed, round]).random(len(self._dropout))
        dropped, late = (draws < self._dropout)[clients], times > self._limit[clients]
        lost = dropped | late
        longest = self._limit[clients] if self.has_limit else 0.0  # also for a client that has dropped out
        waited = np.where(lost, longest, times).max(initial=0.0)
        return frozenset(np.array(clients)[lost].tolist()), int((late & ~dropped).sum()), float(waited)


class Traffic:
    """Counts what a run sends, round by round."""

    def __init__(self, model: Model, network: Network | None = None) -> None:
        self._model, self._network = model, network
        self.begin_round()

    def begin_round(self) -> None:
        self.asked, self._answered, self._seconds = 0, 0, 0.0  # of the round's queries: numbers sent and received, time
        self._have_all: set[int] = set()  # clients that received all of the server's models with a query
        self.answered: set[int] = set()  # clients that answered a query
        self.lost_updates, self._late = 0, 0

    def lost(self, plan: RoundPlan) -> frozenset[int]:
        """Return the clients whose updates of this round a simulated network loses, or receives too late."""
        return self._lost(plan.round, *self._sizes(plan))

    def _lost(self, round: int, down: Mapping[int, int], up: int) -> frozenset[int]:
        if self._network is None:
            return frozenset()
        lost, self._late, seconds = self._network.training(round, down, up)
        self._seconds += seconds
        return lost

    def ask(self, query: ChargedQuery, models: Tensor, answers: Answers, round: int) -> Answers:
        """Count the numbers of a query of the round and of its answers, and return the answers that are not lost.

        `models` `[K, P]` are the server's. Only answers that replace an update are lost.
        """
        sent = [value for value in vars(query.question).values() if isinstance(value, Tensor)]
        numbers = sum(value.numel() for value in sent)
        self.asked += len(query.clients) * numbers
        self.answered.update(answers)
        sizes = {client: one.numel() if isinstance(one, Tensor) else 1 for client, one in answers.items()}
        if any(value is models for value in sent):
            self._have_all.update(query.clients)
        down, up, lost = dict.fromkeys(query.clients, numbers), max(sizes.values(), default=0), frozenset[int]()
        if query.question.replaces_update:
            lost = self._lost(round, down, up)
            self.lost_updates = len(lost)
        elif self._network is not None:
            self._seconds += float(self._network.seconds(down, up).max(initial=0.0))
        arrived = {client: answer for client, answer in answers.items() if client not in lost}
        self._answered += sum(sizes[client] for client in arrived)
        return arrived

    def metrics(self, plan: RoundPlan, before: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Return how many numbers were sent to clients (`floats_down`) and back (`floats_up`) since the first round.

        A client receives its start, unless a query has sent it already, and its anchor, and sends its release. A
        network adds `network_seconds`, the sum over exchanges of the time of the slowest client. `before` are the
        metrics of the round before. `lost_updates` and `late_updates` are numbers of the updates of this round that did
        not take part; they are left out where nothing can be lost.
        """
        down, release = self._sizes(plan)
        up = self._answered + release * len(plan.clients)
        values = {"floats_down": float(self.asked + sum(down.values())), "floats_up": float(up)}
        if self._network is not None:
            values["network_seconds"] = self._seconds
        since = {name: float(before.get(name, 0.0)) + value for name, value in values.items()}
        if self.lost_updates or self._network is not None:
            since["lost_updates"] = float(self.lost_updates)
        if self._network is not None and self._network.has_limit:
            since["late_updates"] = float(self._late)
        return since

    def _sizes(self, plan: RoundPlan) -> tuple[dict[int, int], int]:
        """Return how many numbers each client of the plan receives, and how many it sends."""
        model = self._model.num_params
        sizes = {name: p.numel() for name, p in self._model.named_trainable.items()}
        release = plan.job.size(sizes)
        anchor = 0 if plan.job.anchors is None else model
        down = {client: anchor + (0 if client in self._have_all else model) for client in plan.clients}
        return down, release
