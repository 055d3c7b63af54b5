"""What a run sends: numbers down and up, and how long a network of given speed would take for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dpfl_lightning.config.options import NetworkOptions
from dpfl_lightning.config.per_client import resolve
from dpfl_lightning.federated.messages.plan import ClassGradients, RoundPlan
from dpfl_lightning.federated.messages.query import ChargedQuery
from dpfl_lightning.federated.server.view import View

BYTES = 4  # of a number: float32


@dataclass(frozen=True)
class Network:
    """A network to simulate.

    Args:
        down: `[N]`, seconds for a number from the server to a client.
        up: `[N]`, seconds for a number from a client to the server.
        latency: `[N]`, seconds of one exchange, however little is sent.
    """

    down: Sequence[float]
    up: Sequence[float]
    latency: Sequence[float]

    @classmethod
    def of(cls, options: NetworkOptions, num_clients: int, seed: int) -> Network | None:
        """The network of a configuration; None where it simulates none."""
        if options == NetworkOptions():
            return None

        def column(name: str) -> Sequence[float]:
            return resolve(f"network.{name}", getattr(options, name), num_clients, seed)

        def seconds(name: str) -> Sequence[float]:
            if getattr(options, name) is None:
                return (0.0,) * num_clients
            return tuple(8 * BYTES / (1e6 * speed) for speed in column(name))

        return cls(seconds("down_megabits_per_second"), seconds("up_megabits_per_second"), column("latency_seconds"))

    def seconds(self, down: Mapping[int, int], up: int = 0) -> float:
        """Until the slowest client is done: all send and receive at the same time.

        Args:
            down: client -> numbers that it receives.
            up: numbers that each of them sends.

        >>> Network(down=(1.0, 2.0), up=(3.0, 1.0), latency=(0.5, 0.5)).seconds({0: 10, 1: 10}, up=2)
        22.5
        """
        each = (count * self.down[one] + up * self.up[one] + self.latency[one] for one, count in down.items())
        return max(each, default=0.0)


class Traffic:
    """Counts what a run sends, round by round.

    Args:
        network: to simulate, if any.
    """

    def __init__(self, network: Network | None = None) -> None:
        self._network = network
        self.begin_round()

    def begin_round(self) -> None:
        self._asked, self._seconds = 0, 0.0  # of the round's queries
        self._have_all: set[int] = set()  # clients to whom one of these brought all of the server's models

    def ask(self, query: ChargedQuery, models: Tensor) -> None:
        """Count the numbers that a query of the round sends; `models` `[K, P]` are the server's."""
        sent = [one for one in vars(query.question).values() if isinstance(one, Tensor)]
        numbers = sum(one.numel() for one in sent)
        self._asked += len(query.clients) * numbers
        if any(one is models for one in sent):
            self._have_all.update(query.clients)
        if self._network is not None:
            self._seconds += self._network.seconds(dict.fromkeys(query.clients, numbers))

    def metrics(self, plan: RoundPlan, view: View, before: Mapping[str, float | Tensor]) -> dict[str, float]:
        """How many numbers were sent to clients (`floats_down`) and back (`floats_up`) since the first round.

        Each client of a round receives its start, unless a query has sent it already, and its anchor, and sends its
        release. With a network also `network_seconds`: the sum over all exchanges of the time until the slowest client
        is done. It contains neither computation nor the size of answers to queries.

        Args:
            plan: of the clients whose updates arrived.
            before: the metrics of the round before.
        """
        sizes = {name: p.numel() for name, p in view.module.named_trainable.items()}
        model = sum(sizes.values())
        release = plan.job.size(sizes) if isinstance(plan.job, ClassGradients) else model
        anchor = 0 if plan.anchors is None else model
        down = {one: anchor + (0 if one in self._have_all else model) for one in plan.clients}
        found = {
            "floats_down": float(self._asked + sum(down.values())),
            "floats_up": float(release * len(plan.clients)),
        }
        if self._network is not None:
            found["network_seconds"] = self._seconds + self._network.seconds(down, release)
        return {name: float(before.get(name, 0.0)) + value for name, value in found.items()}
