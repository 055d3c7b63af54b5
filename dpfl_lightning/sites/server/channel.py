"""The channel to the nodes of sites: requests out, signed replies in, all at the same time."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.clients import LostClients
from dpfl_lightning.federated.messages.jobs import Job
from dpfl_lightning.federated.messages.requests import Ask, Evaluate, Train
from dpfl_lightning.privacy.ledger.file import Head
from dpfl_lightning.sites import signed, wire
from dpfl_lightning.sites.exchange import (
    MOST_ANSWER,
    MOST_HEADER,
    MOST_MODELS,
    REFUSALS,
    Hello,
    Terms,
    ToNode,
    Welcome,
    most_header,
    most_numbers,
)
from dpfl_lightning.sites.server.connections import Connection, OfFunction
from dpfl_lightning.sites.signed import Answer

Request = Hello | Train | Ask | Evaluate


class LateClients(LostClients):
    """A node does not answer in time."""


@dataclass(frozen=True)
class Sites:
    """The plan that all sites have accepted, and a connection to the node of each, in any order."""

    terms: Terms
    connections: Sequence[Connection | Callable[[bytes], bytes | bytearray]]


class SiteChannel:
    """The nodes of a plan's sites. Every reply is signed by the node of the client that was asked.

    Attributes:
        welcomes: what each node said when it was greeted.
        terms, plan: the accepted plan, and its hash.

    Raises UserError if not every client has one node with the plan, and LostClients if a node is gone or its reply is
    forged.
    """

    def __init__(self, sites: Sites, module: ClientModule) -> None:
        self.terms, self._module, self.plan = sites.terms, module, wire.digest(sites.terms)
        self._names = [site.name for site in sites.terms.sites]
        self._keys = [site.public_key for site in sites.terms.sites]
        count, given = len(self._keys), sites.connections
        require(len(given) == count, "--nodes", f"be {count}, one for each client", len(given))
        self._connections = [one if isinstance(one, Connection) else OfFunction(one) for one in given]
        self._connection_of: dict[int, Connection] = {}
        try:
            self.welcomes = self._greeted()
        except BaseException:
            self.close()
            raise

    def _greeted(self) -> list[Answer]:
        """Greet all nodes, note which connection is whose, and return what they said."""
        count = len(self._keys)
        with ThreadPoolExecutor(count, "site") as pool:  # all at the same time
            welcomes = list(pool.map(self._greet, self._connections, range(count)))
        for connection, answer in zip(self._connections, welcomes, strict=True):
            name = self._names[answer.client]
            if not isinstance(answer.reply, Welcome):
                means = REFUSALS.get(getattr(answer.reply, "code", ""), "it sent no welcome")
                raise UserError(f"`--nodes` must have accepted the plan {self.plan[:12]}, got from {name}: {means}.")
            fits = answer.client not in self._connection_of
            where = f", at {connection.where}" if connection.where else ""
            require(fits, "--nodes", "be of different clients of the plan", f"two of client {name}{where}")
            self._connection_of[answer.client] = connection
        return welcomes

    def send(
        self, requests: Mapping[int, Request], known: Mapping[int, Head | None]
    ) -> list[tuple[int, Answer | LostClients]]:
        """Ask the nodes of these clients at the same time; return each client's answer, or the error instead of it.

        `known` has the head of a client's ledger that its node has signed last.
        """
        work = [(client, request, known.get(client)) for client, request in requests.items()]
        with ThreadPoolExecutor(max(1, len(work)), "site") as pool:
            answers = list(pool.map(self._answer, *zip(*work, strict=True))) if work else []
        return list(zip(requests, answers, strict=True))

    def shape_of(self, job: Job) -> tuple[int, ...]:
        """Return the shape of a release."""
        sizes = {name: parameter.numel() for name, parameter in self._module.named_trainable.items()}
        size = job.size(sizes)
        return (size,) if job.trains else (job.blocks, size // job.blocks)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _greet(self, connection: Connection, number: int) -> Answer:
        clients, most = range(len(self._keys)), max(map(most_header, self.terms.plan.schedule.clients))
        whose = connection.where or f"node {number + 1} of {len(self._keys)}"
        return self._exchange(connection, wire.encode(ToNode(self.plan, hello())), whose, clients, wire.Limits(most, 0))

    def _answer(self, client: int, request: Request, known: Head | None) -> Answer | LostClients:
        content = wire.encode(ToNode(self.plan, request, known))
        schedule = self.terms.plan.schedule.clients[client]
        try:
            wire.sizes(content, wire.Limits(MOST_HEADER, most_numbers(schedule, self._module.flat)))
        except wire.WireError:
            must = f"ask nodes about at most {MOST_MODELS} models, of a gigabyte together"
            return LostClients(f"`strategies` must {must}, got {len(content)} bytes.")
        most = wire.Limits(most_header(schedule), self._most_numbers(request))
        try:
            return self._exchange(self._connection_of[client], content, f"client {self._names[client]}", [client], most)
        except LostClients as error:
            return error

    def _most_numbers(self, request: Request) -> int:
        """Return how many bytes of tensors the reply to a request may have."""
        if isinstance(request, Train):
            return math.prod(self.shape_of(request.job)) * request.model.element_size()
        return 0 if isinstance(request, Hello | Evaluate) else MOST_ANSWER

    def _exchange(
        self, connection: Connection, request: bytes, whose: str, clients: Iterable[int], most: wire.Limits
    ) -> Answer:
        """Return the reply to a request, of at most this size, signed by the node of one of these clients."""
        try:
            keys = {client: self._keys[client] for client in clients}
            reply = connection(request, signed.with_receipt(most))
            return signed.answer(reply, request, self.plan, keys, most)
        except TimeoutError:
            raise LateClients(f"`--nodes` must answer within --node_wait, got nothing from {whose}.") from None
        except signed.Forged as forged:
            whose = whose if forged.client is None else f"client {self._names[forged.client]}"
            must = "sign each reply to its request with the key in the plan"
            advice = "Nothing of it was used. Check the connection to the site, and resume."
            raise LostClients(f"`--nodes` must {must}, got from {whose} {forged}. {advice}") from None
        except (OSError, wire.WireError) as error:
            reason = str(error) or type(error).__name__
            raise LostClients(f"`--nodes` must answer, got from {whose}: {reason}. Start its node again.") from None


def hello() -> Hello:
    """Return a question for an account that no earlier reply can answer."""
    return Hello(secrets.token_hex(16))
