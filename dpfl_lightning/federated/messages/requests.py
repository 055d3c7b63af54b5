"""What a server asks of one client, wherever it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dpfl_lightning.federated.messages.jobs import Job
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Query
from dpfl_lightning.models.optimizers import PLAIN_SGD, LocalOptimizer
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.sampling import RecordSampler


@dataclass(frozen=True)
class Train:
    """Ask for a noisy update from `model` `[P]`, or for class gradients; `job` says which.

    Args:
        purpose: the line of the client's schedule that pays.
        mechanism, steps: clip norm, noise and sampling of each of the steps, as the client has planned them for the
            purpose. A node refuses others, but for a smaller divisor.
        anchor: parameters `[P]` to which each step is pulled with strength `pull`.
        optimizer: of the steps; None is the one that the client's module configures.

    `model`, `anchor`, `pull` and `learning_rate` are free: they change the release, not its privacy.
    """

    round: int
    purpose: str
    mechanism: Mechanism
    steps: int
    job: Job
    learning_rate: float
    model: Tensor
    anchor: Tensor | None = None
    pull: float = 0.0
    optimizer: LocalOptimizer | None = PLAIN_SGD

    def sampler(self, sampling: str = "poisson") -> RecordSampler:
        """The draws of the client, and the event that pays for them. ValueError if none would cover the release."""
        return self.job.sampler(self.mechanism, self.steps, sampling)

    @property
    def expected_records(self) -> float:
        """Expected number of records of one step."""
        return self.job.expected_records(self.mechanism)


@dataclass(frozen=True)
class Ask:
    """Ask for the noisy answer to a question; its mechanism has to be the planned one."""

    round: int
    question: Query


@dataclass(frozen=True)
class Evaluate:
    """Let the client score `model` `[P]`, that of `round`, on its held-out records. The scores stay with it."""

    round: int
    model: Tensor


@dataclass(frozen=True)
class Charged:
    """A request that a client has paid for; `number` is that of its charge in the round, which selects its noise."""

    client: int
    request: Train | Ask
    number: int


def train_requests(plan: RoundPlan, models: Tensor) -> list[Train]:
    """What a round's plan asks of each of its clients, given the server's models `[K, P]`; equal requests are one."""
    starts = models.unbind()
    job = plan.job
    asked = job.asked
    anchors = (None,) * len(starts) if job.anchors is None else job.anchors.unbind()
    anchor_of = plan.model_of if job.anchor_of is None else [job.anchor_of[client] for client in plan.clients]
    made: dict[tuple[object, ...], Train] = {}
    found = []
    for key in zip(plan.mechanism_of, plan.steps, plan.learning_rate_of, plan.model_of, anchor_of, strict=True):
        if (request := made.get(key)) is None:
            mechanism, steps, rate, model, anchor = key
            request = Train(
                plan.round,
                plan.purpose,
                mechanism,
                steps,
                asked,
                rate,
                starts[model],
                anchors[anchor],
                job.pull,
                plan.optimizer,
            )
            made[key] = request
        found.append(request)
    return found


def charged_requests(plan: RoundPlan, models: Tensor, numbers: Sequence[int]) -> list[Charged]:
    """`train_requests` with the numbers of the clients' charges `[C]`."""
    rows = zip(plan.clients, train_requests(plan, models), numbers, strict=True)
    return [Charged(client, request, number) for client, request, number in rows]
