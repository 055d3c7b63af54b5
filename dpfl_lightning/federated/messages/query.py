"""Queries to clients, other than training. A query declares a mechanism, with which the clients bound and noise it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from torch import Tensor

from dpfl_lightning.privacy.accounting.events import Event, NonPrivateEvent
from dpfl_lightning.privacy.mechanism import ExponentialMechanism, Gaussian, Laplace, Mechanism

Answers = Mapping[int, Any]  # client -> what `Query.read` made of its answer


@dataclass(frozen=True)
class NoMechanism:
    """An answer without a privacy guarantee: the client's epsilon becomes infinite.

    Args:
        words: what is shown and why it is not protected, for the guarantee.
        noise: added to the answer nevertheless, to reproduce methods that do so; None adds nothing.
    """

    words: str
    noise: Mechanism | None = None

    def event(self, count: int) -> NonPrivateEvent:
        """The event of any number of answers."""
        return NonPrivateEvent(self.words)


AnswerMechanism = Mechanism | ExponentialMechanism | NoMechanism
_KNOWN = (Gaussian, Laplace, ExponentialMechanism, NoMechanism)


@dataclass(frozen=True, kw_only=True)
class Query:
    """A question to some clients: its plain fields are all that they receive of it.

    What a client computes is registered for the type of the query, on the client's side: `rows_of` and
    `plain_answer_of` of `dpfl_lightning.federated.client.answers`. `read` runs at the server. The event that is charged
    follows from the mechanism alone.

    Args:
        purpose: the line of every asked client's schedule that pays; its event must be the mechanism's for one answer.
        mechanism_of: asked client -> mechanism of its answer. `Gaussian` and `Laplace` release the noised sum of the
            records' rows, divided by `expected_batch_size`; each row is clipped to `clip_norm` in the mechanism's norm,
            and the sample rate must be 1. `ExponentialMechanism` releases the index of the column with the largest
            noised sum; scores are clamped to [0, 1]. A row or score that is not finite counts as zero.

    **Privacy** One `event(1)` of each asked client's mechanism, charged before the question is asked.
    """

    purpose: str
    mechanism_of: Mapping[int, AnswerMechanism]

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients that are asked."""
        return tuple(self.mechanism_of)

    def only(self, clients: Collection[int]) -> Self:
        """The same query to some of its clients."""
        return dataclasses.replace(self, mechanism_of={client: self.mechanism_of[client] for client in clients})

    def read(self, client: int, released: Any) -> Any:
        """Convert a released answer at the server. This is post-processing.

        Args:
            released: the noised sum `[k]` (float64, on the CPU), the chosen index, or the plain answer.
        """
        return released


@final
@dataclass(frozen=True, kw_only=True)
class ChargedQuery(Query):
    """A query whose purpose and mechanisms were copied before it is charged.

    Args:
        question: its type says what clients compute, and its fields are parameters of that computation.
    """

    question: Query

    @classmethod
    def of(cls, question: Query) -> ChargedQuery:
        """The query with a copy of its purpose and its mechanisms.

        Raises:
            TypeError: it is no `Query`.
        """
        if not isinstance(question, Query):
            raise TypeError(f"a question to clients must be a `Query`, got {type(question).__name__}")
        mechanisms = {int(client): question.mechanism_of[client] for client in question.clients}
        return cls(purpose=str(question.purpose), mechanism_of=mechanisms, question=question)

    def read(self, client: int, released: Any) -> Any:
        return self.question.read(client, released)


def event_of(query: Query, client: int) -> Event:
    """The event of the client's answer.

    Raises:
        TypeError: the mechanism is none of the framework's; subclasses, which could state another event, are refused.
        ValueError: its sums are of sampled records, but a query asks all records.
    """
    if not isinstance(query, Query):
        raise TypeError(f"a question to clients must be a `Query`, got {type(query).__name__}")
    mechanism = query.mechanism_of[client]
    if type(mechanism) not in _KNOWN:
        known = ", ".join(kind.__name__ for kind in _KNOWN)
        raise TypeError(
            f"{type(query).__name__} must name a mechanism of the framework for client {client} ({known}), "
            f"got {mechanism!r}"
        )
    if isinstance(mechanism, Mechanism) and mechanism.sample_rate != 1:
        raise ValueError(f"{type(query).__name__} asks all records, but its mechanism samples: {mechanism}")
    return mechanism.event(1)


@dataclass(frozen=True, kw_only=True)
class SelectModel(Query):
    """Which of M models fits a client best, by clipped losses: the score of a record is `1 - min(loss, bound) / bound`.

    Args:
        models: `[M, P]`.
        loss_bound: losses are clipped to [0, loss_bound]; log(classes) to 2 log(classes) is sensible. A loss that is
            not a number counts as the bound.

    **Privacy** One selection of the client's `ExponentialMechanism`.
    """

    models: Tensor
    loss_bound: float
    purpose: str = "select"


@dataclass(frozen=True, kw_only=True)
class LowestLoss(Query):
    """Which of M models has the lowest mean loss on a client's records: neither clipped nor noised.

    Args:
        models: `[M, P]`; of equal losses the first wins.

    **Privacy** None: the answer is a plain function of private records, and epsilon becomes infinite (`NoMechanism`).
    """

    models: Tensor
    purpose: str = "select"

    def read(self, client: int, released: Tensor) -> int:
        return int(released)


@dataclass(frozen=True, kw_only=True)
class MeanLoss(Query):
    """The mean loss of each client's records, clipped and noised.

    `(sum_j (min(loss_j, bound) - bound / 2) + noise) / records + bound / 2`: around the middle one record more, less or
    other moves the sum by half of the bound, half of it, or all of it.

    Args:
        models: `[M, P]`.
        row_of: client -> row of the model at which it is asked.
        loss_bound: losses are clipped to [0, loss_bound]; the mechanisms' clip norm is half of it.

    **Privacy** One step of the client's mechanism.
    """

    models: Tensor
    row_of: Mapping[int, int]
    loss_bound: float
    purpose: str = "loss"

    def read(self, client: int, released: Tensor) -> float:
        return float(released) + self.loss_bound / 2


@dataclass(frozen=True, kw_only=True)
class LossesAroundStep(Query):
    """Each client's mean loss at a model, and after its own clipped full-batch step from there, before noise.

    What the selection paper's clients report: neither loss is clipped, and the step without noise depends on all
    records, so that no bound of what one record changes is known.

    Args:
        model: `[P]`.
        step_of: client -> clip norm, its order and learning rate of the step.

    **Privacy** None that is known: epsilon becomes infinite (`NoMechanism`), although noise is added.
    """

    model: Tensor
    step_of: Mapping[int, tuple[float, int, float]]
    purpose: str = "loss"

    def read(self, client: int, released: Tensor) -> tuple[float, float]:
        before, after = released.tolist()
        return before, after
