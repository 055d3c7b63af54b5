"""A client: one data holder of a run, and those whose records are in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfl_lightning.data import Population
from dpfl_lightning.data.records import Records
from dpfl_lightning.federated.messages.query import ChargedQuery
from dpfl_lightning.federated.messages.requests import Ask, Charged, Train
from dpfl_lightning.runtime.devices import sent

#: what is counted: gradients of single records (one a record and step), and of these
COUNTED = ("gradients", "clipped", "not_finite")


class Trainer(Protocol):
    """Computes for clients what was charged; see `Engine`."""

    def compute(self, batch: Sequence[Charged]) -> list[Any]: ...


class Log(Protocol):
    """Charges the clients of this process, and keeps what they draw secret."""

    def charge(self, client: int, request: Train | Ask) -> int | None:
        """Charge what a client is asked for; return the number of its charge in the round, None if it cannot pay."""

    def secret_draws(self, purpose: str, round: int) -> AbstractContextManager[None]: ...


class HeldClients:
    """The clients whose records are in this process, made when they are asked for by their numbers.

    Args:
        population: their records.
        numbers: of its clients in the plan of the run, by which random streams and the log know them; None: all.
        count: how many clients the plan has; None: those of the population.

    Attributes:
        counts: what `COUNTED` names, of each client's gradients so far, `[n, 3]`; exact and private.
        kept: number -> what stays with the client between its releases, by name; see `Client.kept`.
    """

    def __init__(self, population: Population, numbers: Sequence[int] | None = None, count: int | None = None) -> None:
        self.population = population
        self.numbers: Sequence[int] = range(population.num_clients) if numbers is None else numbers
        self.count = population.num_clients if count is None else count
        self.places = {number: place for place, number in enumerate(self.numbers)}
        self.trainer: Trainer  # given before the first request
        self.log: Log
        self.counts = torch.zeros(len(self.numbers), len(COUNTED), dtype=torch.long, device=population.y.device)
        self.kept: dict[int, dict[str, Tensor]] = {}

    def client(self, number: int) -> Client:
        return Client(number, Records(self.population, self.places[number]), self)

    def count_gradients(self, clients: Sequence[Client], outcomes: Tensor) -> None:
        """Add the numbers of gradients that `COUNTED` names, `[len(clients), 3]`. Private."""
        places = torch.tensor([self.places[client.number] for client in clients])
        self.counts.index_add_(0, sent(places, self.counts.device), outcomes)

    def chosen(self, key: bytes) -> HeldClients:
        """Return these clients with the rows of each unit that releases use; see `Population.chosen`."""
        return HeldClients(self.population.chosen(key), self.numbers, self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": dict(self.kept), "counts": self.counts.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept.clear()  # in place: copies of an engine share it
        for number, kept in state["kept"].items():
            self.client(number).keep(kept)
        self.counts.copy_(state["counts"])


class Client:
    """One data holder: its `number` in the plan, its `records`, and what stays with it between rounds.

    **Privacy** All that leaves it is what `handle` returns.
    """

    __slots__ = ("_held", "number", "records")

    def __init__(self, number: int, records: Records, held: HeldClients) -> None:
        self.number, self.records, self._held = number, records, held

    def handle(self, request: Train | Ask) -> Any:
        """Charge, compute, noise and return one release; None if the plan has none left for this purpose.

        Returns a noisy update `[P]`, class gradients `[G, p]`, or an answer. Raises the error of a computation that was
        charged and failed. One thread at a time may call it.

        **Privacy** One event of the plan. Its charge is on disk before anything is computed; then draws of the model
        are as secret as noise.
        """
        trainer, log = self._held.trainer, self._held.log
        if isinstance(request, Ask):
            question = request.question
            charged = question if isinstance(question, ChargedQuery) else ChargedQuery.of(question)
            request = replace(request, question=charged)
        number = log.charge(self.number, request)
        if number is None:
            return None
        purpose = request.question.purpose if isinstance(request, Ask) else "training"
        with log.secret_draws(purpose, request.round):
            (released,) = trainer.compute([Charged(self.number, request, number)])
        if isinstance(released, Exception):
            raise released
        return released

    @property
    def kept(self) -> dict[str, Tensor]:
        """A copy of what stays with it between its releases, by name: personal parameters, what a mechanism keeps.

        It is in the checkpoint, goes to the rank that computes for the client, and is never sent to the server.
        """
        return dict(self._held.kept.get(self.number, {}))

    def keep(self, kept: Mapping[str, Tensor]) -> None:
        """Keep this instead, once a release is made; what a failed or repeated computation has changed is lost."""
        if kept:
            self._held.kept[self.number] = {name: one.to(self._held.counts.device) for name, one in kept.items()}
