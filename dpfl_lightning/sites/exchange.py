"""What a server and the node of a site say to each other. `wire` turns these messages into bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpfl_lightning.federated.messages.clients import RunPlan
from dpfl_lightning.federated.messages.requests import Ask, Evaluate, Train
from dpfl_lightning.privacy.accounting.events import Release
from dpfl_lightning.privacy.accounting.planned import ClientSchedule
from dpfl_lightning.privacy.accounting.units import RECORD, Unit
from dpfl_lightning.privacy.clipping.inputs import PAIR, BatchForm
from dpfl_lightning.privacy.ledger.file import Head
from dpfl_lightning.sites.receipt import Receipt

MOST_HEADER = 1 << 18  # bytes of a request without its tensors; 75 kB are an augmentation of 1000 classes
MOST_MODELS = 64  # that one question may compare
_MOST_OF_A_QUESTION = 1 << 30  # bytes
_MOST_CODE, _MOST_PAID = 1 << 12, 400  # bytes of a reply's text, and of each release that it accounts for
MOST_ANSWER = 1 << 28  # bytes of the answer to a question

#: code of a refusal -> what it means; a refusal says nothing else
REFUSALS = {
    "malformed": "the bytes are no message of this version",
    "unknown_plan": "the site has not accepted a plan with this hash",
    "withdrawn": "the site has left the study",
    "not_planned": "the accepted plan has no such release, or the values do not fit it",
    "unfit_model": "a model is not finite, has a parameter beyond a million, or is of another size or type",
    "spent": "all releases that the plan has for this purpose are paid for",
    "older_ledger": "the ledger of the node lacks releases that the node has signed",
    "halted": "an earlier computation failed, and the operator of the site has to look at it",
}


@dataclass(frozen=True)
class Site:
    """Public facts about a site and its records, which `site.json` holds.

    Args:
        num_records: of training, or its number of units, if another `unit` is protected.
        inputs, labels: no records `[0, ...]`, which have the shape and the type of those of the site.
        features: names and public constants of the inputs from a table; else None.
        form: what a `training_step` gets as a batch.
        public_key: of the Ed25519 key with which its node signs, 64 hexadecimal digits.
        schema: what sites must agree on, see `Population.schema`.
        unit: what its node protects.
    """

    name: str
    num_records: int
    num_classes: int
    inputs: Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
    labels: Tensor
    features: Mapping[str, Any] | None
    public_key: str
    form: BatchForm = PAIR
    schema: Mapping[str, Any] = field(default_factory=dict)
    unit: Unit = RECORD


@dataclass(frozen=True)
class Terms:
    """A whole run as sites accept it, which `plan --export` writes. Its hash is part of every later message.

    Args:
        version: of this package; all sides have the same one.
        run: random name of the run, 32 hexadecimal digits: one configuration can run several times.
        sites: one for each client, with records of one shape and type.
        module: digest of the layers and of the code of the module that clients train.
        plan: every release of every client, with solved noise; its options are those that decide releases.
    """

    version: str
    run: str
    sites: tuple[Site, ...]
    module: str
    plan: RunPlan


def client_names(sites: Sequence[Site]) -> tuple[str, ...]:
    """Return the names of the clients of these sites; none if the sites are numbered."""
    names = tuple(site.name for site in sites)
    return () if names == tuple(map(str, range(len(names)))) else names


@dataclass(frozen=True)
class Hello:
    """Ask a node for the account of its client.

    `nonce` is random, so that the signed reply to another one is no reply to this one.
    """

    nonce: str


@dataclass(frozen=True)
class ToNode:
    """A request to the client of a node in the plan with this hash. The reply to `Evaluate` is the account, too.

    `known` is the last head of the node's ledger that the node has signed: without it the node refuses.
    """

    plan: str
    request: Hello | Train | Ask | Evaluate
    known: Head | None = None


def most_numbers(schedule: ClientSchedule, model: Tensor) -> int:
    """Return how many bytes of tensors a request needs: a model `[P]` and an anchor, or the models of a question."""
    size, events = model.numel() * model.element_size(), [line.event for line in schedule.planned]
    asks = any(event.total == 1 and not event.is_sampled for event in events)
    return max(2 * size, min(MOST_MODELS * size, _MOST_OF_A_QUESTION) if asks else 0)


def most_header(schedule: ClientSchedule) -> int:
    """Return how many bytes of text a reply needs: an account of all planned releases."""
    return _MOST_CODE + _MOST_PAID * sum(line.count for line in schedule.planned)


@dataclass(frozen=True)
class Paid:
    """A release that the client has paid for; `number` counts those of its round from 0."""

    round: int
    number: int
    purpose: str
    event: Release


@dataclass(frozen=True)
class Welcome:
    """The account of the node's client: all that it has paid for.

    `protects` is False if noise follows from a test key that the operator of the site wrote into the node.
    """

    protects: bool
    paid: tuple[Paid, ...]


@dataclass(frozen=True)
class Released:
    """A noisy update `[P]`, class gradients `[G, p]`, or an answer, and what the client has paid for in this round."""

    value: Tensor | int | float
    paid: tuple[Paid, ...]


@dataclass(frozen=True)
class Refused:
    """`code` is a key of `REFUSALS`. Nothing was charged, except for `halted` in the reply to what failed."""

    code: str


@dataclass(frozen=True)
class Signed:
    """The bytes of a reply, uint8, and the receipt that the node has signed for them. It is all that a node sends."""

    receipt: Receipt
    reply: Tensor


Reply = Welcome | Released | Refused
