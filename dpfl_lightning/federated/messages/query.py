"""Queries to clients, other than training. Each declares the mechanism with which the clients bound and noise it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from dpfl_lightning.federated.messages.jobs import Work
from dpfl_lightning.privacy.accounting.events import NoisedEvent, NonPrivateEvent, Release
from dpfl_lightning.privacy.mechanism import MECHANISMS, ExponentialMechanism, Mechanism

Answers = Mapping[int, Any]  # client -> what `Query.read` made of its answer


@dataclass(frozen=True)
class NoMechanism:
    """An answer without a privacy guarantee: the client's epsilon becomes infinite.

    The guarantee says in `words` what is shown and why it is not protected.
    """

    words: str

    def event(self, count: int) -> NonPrivateEvent:
        return NonPrivateEvent(self.words)


AnswerMechanism = Mechanism | ExponentialMechanism | NoMechanism
_KNOWN = (*MECHANISMS, ExponentialMechanism, NoMechanism)


@dataclass(frozen=True, kw_only=True)
class Query(Work):
    """A question to some clients. `rows_of` and `plain_answer_of` of `federated.client.answers` register the answers.

    Args:
        purpose: the line of every asked client's schedule that pays; its event must be the mechanism's for one answer.
        mechanism_of: asked client -> mechanism of its answer. A `Mechanism` releases the noisy sum of the
            records' rows, divided by `expected_batch_size`; each row is clipped to `clip_norm` in the mechanism's norm,
            and the sample rate must be 1. `ExponentialMechanism` releases the index of the column with the largest
            noisy sum; scores are clamped to [0, 1]. A row or score that is not finite counts as zero.

    Attributes:
        replaces_update: whether a simulated network loses answers as it loses updates.
        of_held_out: whether it counts held-out records, with noise. A record is held out or trained on; the cost is
            charged as if it were both, because a record that is replaced may change sides.

    **Privacy** One `event(1)` of each asked client's mechanism, charged before the question is asked.
    """

    replaces_update: ClassVar[bool] = False
    of_held_out: ClassVar[bool] = False
    purpose: str
    mechanism_of: Mapping[int, AnswerMechanism]

    @property
    def clients(self) -> tuple[int, ...]:
        return tuple(self.mechanism_of)

    def only(self, clients: Collection[int]) -> Self:
        return dataclasses.replace(self, mechanism_of={client: self.mechanism_of[client] for client in clients})

    def read(self, client: int, released: Any) -> Any:
        """Convert the noisy sum `[k]` (float64, CPU), chosen index or plain answer at the server; post-processing."""
        return released


@final
@dataclass(frozen=True, kw_only=True)
class ChargedQuery(Query):
    """A query whose purpose and mechanisms were copied before it is charged; clients compute what `question` asks."""

    question: Query

    @classmethod
    def of(cls, question: Query) -> ChargedQuery:
        if not isinstance(question, Query):
            raise TypeError(f"a question to clients must be a `Query`, got {type(question).__name__}")
        mechanisms = {int(client): question.mechanism_of[client] for client in question.clients}
        return cls(purpose=str(question.purpose), mechanism_of=mechanisms, question=question)

    def read(self, client: int, released: Any) -> Any:
        return self.question.read(client, released)


def event_of(query: Query, client: int) -> Release:
    """The event of the client's answer; of counts of held-out records it is another one.

    Raises TypeError for a mechanism that is none of the framework's (a subclass could state another event), and
    ValueError for one that samples records.
    """
    mechanism = query.mechanism_of[client]
    if type(mechanism) not in _KNOWN:
        known = ", ".join(kind.__name__ for kind in _KNOWN)
        raise TypeError(
            f"{type(query).__name__} must name a mechanism of the framework for client {client} ({known}), "
            f"got {mechanism!r}"
        )
    if isinstance(mechanism, Mechanism) and mechanism.sample_rate != 1:
        raise ValueError(f"{type(query).__name__} asks all records, but its mechanism samples: {mechanism}")
    event, question = mechanism.event(1), query.question if isinstance(query, ChargedQuery) else query
    return event.of_held_out() if question.of_held_out and isinstance(event, NoisedEvent) else event


@dataclass(frozen=True, kw_only=True)
class SelectModel(Query):
    """Which of the models `[M, P]` fits a client best: the score of a record is `1 - min(loss, bound) / bound`.

    A `loss_bound` of log(classes) to 2 log(classes) is sensible. A loss that is not a number counts as the bound.

    **Privacy** One selection of the client's `ExponentialMechanism`.
    """

    any_unit: ClassVar[bool] = True
    models: Tensor
    loss_bound: float
    purpose: str = "select"


@dataclass(frozen=True, kw_only=True)
class LowestLoss(Query):
    """Which of the models `[M, P]` has the lowest mean loss on a client's records; of equal losses the first wins.

    **Privacy** None: the answer is a plain function of private records, and epsilon becomes infinite (`NoMechanism`).
    """

    any_unit: ClassVar[bool] = True
    models: Tensor
    purpose: str = "select"

    def read(self, client: int, released: Tensor) -> int:
        return int(released)


@dataclass(frozen=True, kw_only=True)
class LossOfOwnStep(Query):
    """The mean loss of a client's records after its own clipped step from its row of `models` `[M, P]`, without noise.

    `row_of`, `learning_rate_of` and `clip_norm_of` are by client; gradients are clipped in the norm of `clip_order`.

    **Privacy** None (`NoMechanism`): the step depends on all records, and the loss has no bound.
    """

    any_unit: ClassVar[bool] = True
    models: Tensor
    row_of: Mapping[int, int]
    learning_rate_of: Mapping[int, float]
    clip_norm_of: Mapping[int, float]
    clip_order: int
    purpose: str = "loss_of_own_step"

    def read(self, client: int, released: Tensor) -> float:
        return float(released)


@dataclass(frozen=True, kw_only=True)
class MeanLoss(Query):
    """The mean loss of each client's records, clipped and noised.

    `(sum_j (min(loss_j, bound) - bound / 2) + noise) / records + bound / 2`: adding or removing a record moves the sum
    by at most half of the bound, replacing one by at most all of it. So the mechanisms' clip norm is half of
    `loss_bound`. `row_of` is client -> row of the model in `models` `[M, P]` at which it is asked.

    **Privacy** One step of the client's mechanism.
    """

    any_unit: ClassVar[bool] = True
    models: Tensor
    row_of: Mapping[int, int]
    loss_bound: float
    purpose: str = "loss"

    def read(self, client: int, released: Tensor) -> float:
        return float(released) + self.loss_bound / 2


@dataclass(frozen=True, kw_only=True)
class FeatureSums(Query):
    """The sums over each class of `models.features.feature_row` of records, for random `nets` `[M, P]`.

    The answer is `[num_classes * k]` for rows of k numbers. A row has norm at most 1, as the mechanisms' clip norm. Its
    first number is constant, so that a class's count of records is released, too.

    **Privacy** One step of the client's mechanism: a record has one label, and is in one of the sums.
    """

    does: ClassVar[str] = "clients release sums of features once"
    replaces_update: ClassVar[bool] = True
    nets: Tensor
    num_classes: int
    purpose: str = "features"

    def read(self, client: int, released: Tensor) -> Tensor:
        return released.view(self.num_classes, -1)


@dataclass(frozen=True, kw_only=True)
class ScoreCounts(Query):
    """How many held-out records of each kind a model gives each probability, `[2, bins]` as one vector.

    Of two classes the kinds are the labels 0 and 1, and the probability is that of class 1; of several classes they are
    wrong and right predictions, and the probability is that of the predicted class. `edges` `[bins - 1]` are
    public and rising; a record counts in the bin with as many edges at or below its probability. `row_of` as in
    `MeanLoss`. Only of a task of one class for each record. `algorithms.binned_scores` turns the counts into scores.

    **Privacy** One step of the client's mechanism, of clip norm 1: a record adds 1 to one of the counts. The rows of
    another unit that is protected add 1 together.
    """

    any_unit: ClassVar[bool] = True
    of_held_out: ClassVar[bool] = True
    models: Tensor
    row_of: Mapping[int, int]
    edges: tuple[float, ...]
    purpose: str = "scores"

    @property
    def length(self) -> int:
        return 2 * (len(self.edges) + 1)

    def read(self, client: int, released: Tensor) -> Tensor:
        return released.view(2, -1)


def answer_fits(question: Query, client: int, value: object) -> bool:
    """Whether a value that a client states as its noisy answer is one that the question can have."""
    if isinstance(question.mechanism_of[client], ExponentialMechanism):
        candidates = len(question.models) if isinstance(question, SelectModel) else math.inf
        return type(value) is int and 0 <= value < candidates
    if not isinstance(value, Tensor) or value.dtype != torch.float64 or value.ndim != 1 or not len(value):
        return False
    rows = question.num_classes if isinstance(question, FeatureSums) else 1
    if isinstance(question, ScoreCounts):
        fits = len(value) == question.length
    else:
        fits = len(value) == 1 if isinstance(question, MeanLoss) else len(value) % rows == 0
    return fits and bool(value.isfinite().all())
