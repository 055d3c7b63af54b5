"""How a run reaches the clients whose records are in its own processes."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.engines.engine import Engine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.inbox import Inbox
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.requests import Charged, charged_requests
from dpfl_lightning.federated.messages.update import UpdateBuffer
from dpfl_lightning.privacy.noise import Streams

T = TypeVar("T")


class Channel(Protocol):
    """Sends requests to clients in this process, or on the ranks of the run. It changes speed and place, never a bit.

    Attributes:
        engine: computes for the clients of this process.
        workers: how many clients compute at the same time; after `setup`.
        description: of the place, in words; may be empty.
    """

    engine: Engine
    workers: int

    @property
    def description(self) -> str: ...

    def run(self, module: ClientModule, clients: HeldClients, work: Callable[[], T]) -> T:
        """`work()`, the server's side of the run; of several processes only one does it, and all return the result."""

    def setup(self, module: ClientModule, clients: HeldClients, streams: Streams, sampling: str) -> None:
        """Prepare a run; see `Engine.setup`."""

    def send(self, requests: Sequence[Charged], inbox: Inbox) -> None:
        """Let each client compute what it has paid for, and put what it releases, or its error, into `inbox`."""

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        """See `Engine.outputs`."""

    def personalised(self, model: Tensor, client: int) -> Tensor:
        """See `Engine.personalised`."""


def send_round(
    channel: Channel, plan: RoundPlan, models: Tensor, numbers: Sequence[int], raw_weights: Tensor | None = None
) -> UpdateBuffer:
    """Let the clients of a plan train from `models` `[K, P]`; return what has arrived, or its sum by `raw_weights`.

    `numbers` `[C]` are those of the clients' charges in the round.
    """
    inbox = UpdateBuffer(plan, raw_weights)
    channel.send(charged_requests(plan, models, numbers), inbox)
    return inbox
