"""What a run sends, and how long a simulated network would take for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    An update is lost with probability `dropout` `[N]`; which ones follows from `seed` and the round.
    """

    down: Sequence[float]
    up: Sequence[float]
    latency: Sequence[float]
    dropout: Sequence[float] = ()
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
        return cls(*speeds, column("latency_seconds"), column("dropout"), seed)

    def lost(self, round: int, clients: Sequence[int]) -> frozenset[int]:
        """Return those of the clients whose updates of this round are lost."""
        if not any(self.dropout):
            return frozenset()
        draws = np.random.default_rng([self.seed, round]).random(len(self.dropout))
        return frozenset(client for client in clients if draws[client] < self.dropout[client])

    def seconds(self, down: Mapping[int, int], up: int = 0) -> float:
        """Return the time until the slowest client has received `down[client]` numbers and sent `up`, all in parallel.

        >>> Network(down=(1.0, 2.0), up=(3.0, 1.0), latency=(0.5, 0.5)).seconds({0: 10, 1: 10}, up=2)
        22.5
        """
        each = (count * self.down[i] + up * self.up[i] + self.latency[i] for i, count in down.items())
        return max(each, default=0.0)


class Traffic:
    """Counts what a run sends, round by round."""

    def __init__(self, network: Network | None = None) -> None:
        self._network = network
        self.begin_round()

    def begin_round(self) -> None:
        self.asked, self._answered, self._seconds = 0, 0, 0.0  # of the round's queries: numbers sent and received, time
        self._have_all: set[int] = set()  # clients that received all of the server's models with a query

    def lost(self, round: int, clients: Sequence[int]) -> frozenset[int]:
        """Return the clients whose updates of this round a simulated network loses."""
        return frozenset() if self._network is None else self._network.lost(round, clients)

    def ask(self, query: ChargedQuery, models: Tensor, answers: Answers) -> None:
        """Count the numbers of a query of the round and of its answers; `models` `[K, P]` are the server's."""
        sent = [value for value in vars(query.question).values() if isinstance(value, Tensor)]
        numbers = sum(value.numel() for value in sent)
        self.asked += len(query.clients) * numbers
        sizes = [answer.numel() if isinstance(answer, Tensor) else 1 for answer in answers.values()]
        self._answered += sum(sizes)
        if any(value is models for value in sent):
            self._have_all.update(query.clients)
        if self._network is not None:
            self._seconds += self._network.seconds(dict.fromkeys(query.clients, numbers), max(sizes, default=0))

    def metrics(self, plan: RoundPlan, view: View, before: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Return how many numbers were sent to clients (`floats_down`) and back (`floats_up`) since the first round.

        A client receives its start, unless a query has sent it already, and its anchor, and sends its release. A
        network adds `network_seconds`, the sum over exchanges of the time of the slowest client, without computation.
        `before` are the metrics of the round before.
        """
        model = view.module.num_params
        sizes = {name: p.numel() for name, p in view.module.named_trainable.items()}
        release = plan.job.size(sizes) if isinstance(plan.job, ClassGradients) else model
        anchor = 0 if plan.anchors is None else model
        down = {client: anchor + (0 if client in self._have_all else model) for client in plan.clients}
        up = self._answered + release * len(plan.clients)
        sent = {"floats_down": self.asked + sum(down.values()), "floats_up": up}
        values: dict[str, float] = {name: float(count) for name, count in sent.items()}
        if self._network is not None:
            values["network_seconds"] = self._seconds + self._network.seconds(down, release)
        return {name: float(before.get(name, 0.0)) + value for name, value in values.items()}
