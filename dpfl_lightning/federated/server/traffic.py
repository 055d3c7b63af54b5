"""What a run sends, how long a simulated network would take for it, and what it loses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dpfl_lightning.config.options import NetworkOptions
from dpfl_lightning.config.per_client import resolve
from dpfl_lightning.federated.messages.plan import ClassGradients, RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.federated.server.view import View

BYTES = 4  # of a number: float32


@dataclass(frozen=True)
class Network:
    """A simulated network: seconds per number `down` and `up`, and seconds of `latency` per exchange, each `[N]`.

    An update is lost with probability `dropout` `[N]`, or if it is later than `time_limit` `[N]` seconds. A client
    trains for `compute` `[N]` seconds on average. What happens in a round follows from `seed` and the round.
    """

    down: Sequence[float]
    up: Sequence[float]
    latency: Sequence[float]
    dropout: Sequence[float] = ()
    compute: Sequence[float] = ()
    time_limit: Sequence[float] = ()
    seed: int = 0

    @classmethod
    def of(cls, options: NetworkOptions, num_clients: int, seed: int, names: Sequence[str] = ()) -> Network | None:
        """Return the network of a configuration; None if it simulates none."""
        if options == NetworkOptions():
            return None

        def column(name: str) -> Sequence[float]:
            return resolve(f"network.{name}", getattr(options, name), num_clients, seed, names=names)

        def seconds(name: str) -> Sequence[float]:
            if getattr(options, name) is None:
                return (0.0,) * num_clients
            return tuple(8 * BYTES / (1e6 * speed) for speed in column(name))

        speeds = seconds("down_megabits_per_second"), seconds("up_megabits_per_second")
        limits = () if options.time_limit is None else column("time_limit")
        return cls(*speeds, column("latency_seconds"), column("dropout"), column("compute_seconds"), limits, seed)

    def dropped(self, round: int, clients: Collection[int]) -> frozenset[int]:
        """Return those of the clients that drop out of this round."""
        if not any(self.dropout):
            return frozenset()
        draws = np.random.default_rng([self.seed, round]).random(len(self.dropout))
        return frozenset(client for client in clients if draws[client] < self.dropout[client])

    def training_times(self, round: int, down: Mapping[int, int], up: int) -> dict[int, float]:
        """Return the time of each client for its exchange and its training in this round."""
        draws = np.random.default_rng([self.seed, round, 1]).exponential(self.compute) if any(self.compute) else None
        trained = {client: 0.0 if draws is None else float(draws[client]) for client in down}
        return {client: time + trained[client] for client, time in self.times(down, up).items()}

    def late(self, times: Mapping[int, float]) -> frozenset[int]:
        """Return the clients whose time is above their limit."""
        return frozenset(client for client, time in times.items() if self.time_limit and time > self.time_limit[client])

    def times(self, down: Mapping[int, int], up: int = 0) -> dict[int, float]:
        """Return the time until each client has received `down[client]` numbers and sent `up`.

        >>> Network(down=(1.0, 2.0), up=(3.0, 1.0), latency=(0.5, 0.5)).times({0: 10, 1: 10}, up=2)
        {0: 16.5, 1: 22.5}
        """
        return {i: count * self.down[i] + up * self.up[i] + self.latency[i] for i, count in down.items()}


class Traffic:
    """Counts what a run sends, round by round."""

    def __init__(self, network: Network | None = None) -> None:
        self._network = network
        self.begin_round()

    def begin_round(self) -> None:
        self.asked, self._answered, self._seconds = 0, 0, 0.0  # of the round's queries: numbers sent and received, time
        self._have_all: set[int] = set()  # clients that received all of the server's models with a query
        self._late: int | None = None
        self.lost_updates = 0

    def lost(self, plan: RoundPlan, view: View) -> frozenset[int]:
        """Return the clients whose updates of this round a simulated network loses, or receives too late."""
        return frozenset() if self._network is None else self._lost(self._network, plan.round, *self._sizes(plan, view))

    def _lost(self, network: Network, round: int, down: Mapping[int, int], up: int) -> frozenset[int]:
        times = network.training_times(round, down, up)
        dropped, late = network.dropped(round, down), network.late(times)
        if limits := network.time_limit:  # the server waits as long for a client that has dropped out
            self._late = len(late - dropped)
            times |= {client: limits[client] for client in dropped | late}
        waited = (time for client, time in times.items() if limits or client not in dropped)
        self._seconds += max(waited, default=0.0)
        return dropped | late

    def ask(self, query: ChargedQuery, models: Tensor, answers: Answers, round: int) -> Answers:
        """Count the numbers of a query of the round and of its answers, and return the answers that are not lost.

        `models` `[K, P]` are the server's. Only answers that replace an update are lost.
        """
        sent = [value for value in vars(query.question).values() if isinstance(value, Tensor)]
        numbers = sum(value.numel() for value in sent)
        self.asked += len(query.clients) * numbers
        sizes = {client: one.numel() if isinstance(one, Tensor) else 1 for client, one in answers.items()}
        if any(value is models for value in sent):
            self._have_all.update(query.clients)
        down, up, lost = dict.fromkeys(query.clients, numbers), max(sizes.values(), default=0), frozenset[int]()
        if self._network is not None and query.question.replaces_update:
            lost = self._lost(self._network, round, down, up)
            self.lost_updates = len(lost)
        elif self._network is not None:
            self._seconds += max(self._network.times(down, up).values(), default=0.0)
        arrived = {client: answer for client, answer in answers.items() if client not in lost}
        self._answered += sum(sizes[client] for client in arrived)
        return arrived

    def metrics(self, plan: RoundPlan, view: View, before: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Return how many numbers were sent to clients (`floats_down`) and back (`floats_up`) since the first round.

        A client receives its start, unless a query has sent it already, and its anchor, and sends its release. A
        network adds `network_seconds`, the sum over exchanges of the time of the slowest client. `before` are the
        metrics of the round before. `lost_updates` and `late_updates` are numbers of the updates of this round that did
        not take part; they are left out where nothing can be lost.
        """
        down, release = self._sizes(plan, view)
        up = self._answered + release * len(plan.clients)
        sent = {"floats_down": self.asked + sum(down.values()), "floats_up": up}
        values: dict[str, float] = {name: float(count) for name, count in sent.items()}
        if self._network is not None:
            values["network_seconds"] = self._seconds
        since = {name: float(before.get(name, 0.0)) + value for name, value in values.items()}
        lost = {"lost_updates": float(self.lost_updates)} if self.lost_updates or self._network is not None else {}
        return since | lost | ({} if self._late is None else {"late_updates": float(self._late)})

    def _sizes(self, plan: RoundPlan, view: View) -> tuple[dict[int, int], int]:
        """Return how many numbers each client of the plan receives, and how many it sends."""
        model = view.module.num_params
        sizes = {name: p.numel() for name, p in view.module.named_trainable.items()}
        release = plan.job.size(sizes) if isinstance(plan.job, ClassGradients) else model
        anchor = 0 if plan.anchors is None else model
        down = {client: anchor + (0 if client in self._have_all else model) for client in plan.clients}
        return down, release
