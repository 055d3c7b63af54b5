"""Replies of nodes as signed bytes, and the check of the signature before a reply is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from dpfl_lightning.privacy.ledger.file import Head
from dpfl_lightning.runtime.digests import memory_of
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Refused, Reply, Signed, Welcome
from dpfl_lightning.sites.receipt import Receipt, digest_of

_MOST_RECEIPT = 1 << 12  # bytes


class Answer(NamedTuple):
    """A reply, the client whose node has signed it, and the node's receipt."""

    client: int
    receipt: Receipt
    reply: Reply


class Forged(Exception):
    """A reply that no node of the plan has signed for this request; `client` is the one whose node signed it."""

    def __init__(self, got: str, client: int | None = None) -> None:
        super().__init__(got)
        self.client = client


def sign(reply: Reply, request: str, key: bytes, plan: str = "", ledger: Head | None = None) -> bytes:
    """Return a reply with its receipt, as bytes; see `Receipt` for `request`, `plan` and `ledger`."""
    content = wire.encode(reply)
    receipt = Receipt(plan, request, digest_of(content), ledger).signed(key)
    return wire.encode(Signed(receipt, torch.frombuffer(bytearray(content), dtype=torch.uint8)))


def with_receipt(most: wire.Limits) -> wire.Limits:
    """Return the greatest size of a signed reply, from that of the reply."""
    return wire.Limits(_MOST_RECEIPT, wire.PREFIX.size + most.header + most.numbers)


def answer(
    content: bytes | bytearray, request: bytes, plan: str, public_keys: Mapping[int, str], most: wire.Limits
) -> Answer:
    """Return the reply to a request about a plan, after its signature was checked.

    `public_keys` are those of the clients whose nodes may reply. Raises Forged, or WireError for bytes that are no
    signed reply, or one of more than `most`.
    """
    signed = wire.decode(Signed, content, with_receipt(most))
    receipt, reply = signed.receipt, bytes(memory_of(signed.reply))
    client = next((one for one, key in public_keys.items() if receipt.is_signed_by(key)), None)
    if client is None:
        raise Forged("another signature: the reply was changed on its way, or another node sent it")
    if receipt.reply != digest_of(reply):
        raise Forged("another reply than the signed one: it was changed on its way", client)
    if receipt.request == digest_of(b""):
        raise Forged("only that it cannot read the request: install the same version on both sides", client)
    if receipt.request != digest_of(request):
        raise Forged("a reply to another request: an earlier one was sent again", client)
    found = Answer(client, receipt, wire.decode(Reply, reply, most))  # type: ignore[arg-type]
    accounts = receipt.ledger is not None or not isinstance(found.reply, Refused)
    if accounts and (receipt.plan != plan or receipt.ledger is None):
        raise Forged("no account of its ledger", client)
    if isinstance(found.reply, Welcome) and len(found.reply.paid) != receipt.releases:
        raise Forged(f"an account of {len(found.reply.paid)} releases beside a ledger of {receipt.releases}", client)
    return found
