"""Distribution of the clients' work over ranks: which rank trains which clients, and how the results are joined."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import require
from dpfl_lightning.federated.client.client import Client, HeldClients
from dpfl_lightning.federated.client.engines import one_batch
from dpfl_lightning.federated.client.engines.engine import Engine
from dpfl_lightning.federated.client.identity import equal_ranks
from dpfl_lightning.federated.client.local_clients import LocalClients
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.federated.messages.requests import Ask, Train
from dpfl_lightning.federated.messages.update import ClientUpdates, UpdateBuffer
from dpfl_lightning.federated.transport.ranks import LostRank, Ranks
from dpfl_lightning.models.model import forward_chunk
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.runtime.stopping import between_rounds

STEP = 16  # a step takes as long, beside its gradients, as the gradients of so many records
T = TypeVar("T")


def spread(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign pieces of work to ranks: the longest piece first, each to the rank with the least work so far.

    Returns the indices of each rank's pieces, ascending. Every piece is assigned once. No rank has more than 4/3 of the
    least possible largest load (Graham 1969).

    >>> spread([1.0, 5.0, 3.0, 3.0], 2)
    [[0, 1], [2, 3]]
    """
    pieces: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for piece in sorted(range(len(costs)), key=lambda one: -costs[one]):
        rank = loads.index(min(loads))
        pieces[rank].append(piece)
        loads[rank] += costs[piece]
    return [sorted(assigned) for assigned in pieces]


class RankedEngine:
    """An engine that distributes the work over one engine per rank. Rank 0 works, too; the other ranks `serve`.

    **Guarantees** The result has the same bits for any number of ranks: a client's release depends only on its
    streams, all ranks are checked to have equal code, data, engine and device, and sums are exact until they are
    rounded once. (An engine that leaves the threads within an operator to the environment gives equal bits if
    `OMP_NUM_THREADS` is equal.)

    **Privacy** Records stay on their rank. What crosses: the key of a simulation (otherwise each rank draws fresh
    noise), which rows of persons are used, start models, released updates, noisy answers, personal parameters, counts
    of gradients, outputs of evaluation.
    """

    def __init__(self, inner: Engine, ranks: Ranks) -> None:
        self.inner, self.ranks = inner, ranks
        self.name, self.description, self.workers = inner.name, inner.description, inner.workers
        self.failed: dict[int, Exception] = {}

    @property
    def clients(self) -> HeldClients:
        return self.inner.clients

    # -- rank 0

    def setup(
        self,
        module: ClientModule,
        population: Population,
        streams: Streams,
        sampling: str,
        clients: HeldClients | None = None,
    ) -> None:
        self.take(module, population)
        self._held = clients
        units = population.units, population.held_out_units
        work = (streams, sampling, module.net.state_dict(), torch.get_num_threads(), units)
        everyone = [(rank,) for rank in range(self.ranks.size)]
        (workers, identity), *others = self._on_all("_set_up", everyone, *work)
        self.clipped_sum, self.description = self.inner.clipped_sum, self.inner.description
        self.workers = (workers or 1) + sum(theirs or 1 for theirs, _ in others)
        for rank, (_, theirs) in enumerate(others, start=1):
            for name, value in identity.items():
                advice = "Start all ranks from the same installation and configuration, on equal machines."
                require(theirs[name] == value, "ranks", f"all have the same {name}", f"another on rank {rank}", advice)

    def train(
        self, plan: RoundPlan, models: Tensor, charge_numbers: Sequence[int], raw_weights: Tensor | None = None
    ) -> ClientUpdates:
        state = self.clients.state_dict()
        groups = one_batch.groups(plan, self.module)  # splitting a group would change bits
        costs = [records + STEP * steps for records, steps in zip(plan.expected_records, plan.steps, strict=True)]
        shares = [
            sorted(row for group in assigned for row in groups[group])
            for assigned in spread([sum(costs[row] for row in rows) for rows in groups], self.ranks.size)
        ]
        received = UpdateBuffer(plan, raw_weights)
        self.failed.clear()
        work = (plan, models, charge_numbers, raw_weights, state["personal"])
        for updates, added_to, theirs, failed in self._on_all("_train", shares, *work):
            received.merge(updates, added_to)
            self.failed |= failed
            state["personal"].update(theirs["personal"])
            state["counts"] += theirs["counts"]
        self.clients.load_state_dict(state)
        return received.updates()

    def ask(self, query: ChargedQuery, round: int, charge_numbers: Sequence[int]) -> Answers:
        shares = spread([float(self.population.num_records[client]) for client in query.clients], self.ranks.size)
        answers: dict[int, object] = {}
        self.failed.clear()
        for theirs, failed in self._on_all("_ask", shares, query, round, charge_numbers):
            answers |= theirs
            self.failed |= failed
        return {client: answers[client] for client in query.clients if client in answers}

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        chunk = forward_chunk(model.device)
        chunks = -(-len(rows) // chunk)
        size = -(-chunks // self.ranks.size) * chunk
        if len(rows) <= size:
            return self.inner.outputs(model, rows)
        shares = [rows[rank * size :][:size] for rank in range(self.ranks.size)]
        return torch.cat(self._on_all("_outputs", shares, model.clone()))  # a view brings the whole memory behind it

    def personalised(self, model: Tensor, client: int) -> Tensor:
        return self.inner.personalised(model, client)

    def carry_out(self, client: Client, request: Train | Ask, charge_number: int) -> Any:
        return self.inner.carry_out(client, request, charge_number)

    def _on_all(self, method: str, shares: Sequence[Any], *arguments: Any) -> list[Any]:
        """Call a method with its share of the work on every rank that has one, and return what they answer."""
        self.ranks.broadcast((method, (shares, *arguments)))
        answers = self.ranks.gather(self._answer(method, shares, *arguments))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [answer for answer in answers if answer is not None]

    # -- all ranks

    def serve(self) -> Any:
        """Work for rank 0 until its run has ended successfully, and return the result of the run."""
        while True:
            method, content = self.ranks.broadcast((None, ()))
            if method is None:
                return content
            self.ranks.gather(self._answer(method, *content))

    def take(self, module: ClientModule, population: Population) -> None:
        self.module, self.population, self._held = module, population, None
        if self.inner.workers is None and module.device.type == "cpu":
            self.inner.workers = self.ranks.cores

    def _answer(self, method: str, shares: Sequence[Any], *arguments: Any) -> Any:
        """The result of a method, or its exception: the other ranks wait for this rank in any case."""
        share = shares[self.ranks.rank]
        try:
            return getattr(self, method)(share, *arguments) if len(share) else None
        except Exception as error:
            return error if self.ranks.rank == 0 else self.ranks.portable(error)

    def _set_up(
        self,
        _: Any,
        streams: Streams,
        sampling: str,
        net: dict[str, Tensor],
        threads: int,
        units: tuple[list[Tensor] | None, list[Tensor] | None],
    ) -> tuple[int | None, dict[str, str]]:
        self.module.net.load_state_dict(net)  # includes parameters that are not trained, which may differ between ranks
        if units[0] is not None:  # chosen by the key of rank 0
            train, held_out = ([rows.to(self.module.device) for rows in one or ()] for one in units)
            self.population = dataclasses.replace(self.population, units=train, held_out_units=held_out)
        self.inner.setup(self.module, self.population, streams, sampling, self._held)
        torch.set_num_threads(threads)  # the number of threads within an operator affects bits
        return self.inner.workers, equal_ranks(self.inner, self.module)

    def _train(
        self,
        rows: Sequence[int],
        plan: RoundPlan,
        models: Tensor,
        charge_numbers: Sequence[int],
        raw_weights: Tensor | None,
        personal: dict[int, Tensor],
    ) -> tuple[ClientUpdates, list[int] | None, dict[str, Any], dict[int, Exception]]:
        """Train this rank's share; return updates and the models to which they are added, personal parameters and
        counts of this round, and errors.
        """
        clients = {plan.clients[row] for row in rows}
        weights = added_to = None
        if raw_weights is not None:
            added_to = raw_weights[:, rows].any(dim=1).nonzero().flatten().tolist()
            weights = raw_weights[added_to][:, rows]
        ours = {client: value for client, value in personal.items() if client in clients}
        held = self.clients
        held.load_state_dict({"personal": ours, "counts": torch.zeros_like(held.counts)})
        numbers = [charge_numbers[row] for row in rows]
        updates = self.inner.train(plan.only(clients.__contains__), models, numbers, weights)
        return updates, added_to, held.state_dict(), self._errors()

    def _ask(
        self, rows: Sequence[int], query: ChargedQuery, round: int, charge_numbers: Sequence[int]
    ) -> tuple[Answers, dict[int, Exception]]:
        part = query.only(tuple(query.clients[row] for row in rows))
        return self.inner.ask(part, round, [charge_numbers[row] for row in rows]), self._errors()

    def _outputs(self, rows: Tensor, model: Tensor) -> Tensor:
        return self.inner.outputs(model, rows)

    def _errors(self) -> dict[int, Exception]:
        failed, here = dict(self.inner.failed), self.ranks.rank == 0
        self.inner.failed.clear()  # tracebacks hold tensors
        return {client: error if here else self.ranks.portable(error) for client, error in failed.items()}


class RankedClients(LocalClients):
    """`LocalClients` whose work is distributed over ranks. The server's side and the ledger are on rank 0."""

    engine: RankedEngine

    def __init__(
        self, population: Population, module: ClientModule, engine: Engine, privacy: PrivacyOptions | None, ranks: Ranks
    ) -> None:
        super().__init__(population, module, RankedEngine(engine, ranks), privacy)
        self.ranks = ranks

    @property
    def description(self) -> str:
        return f"{super().description}, {self.ranks.size} ranks"

    def run(self, work: Callable[[], T]) -> T:
        """Rank 0 does the work; the other ranks train their shares for it, and return its result, too."""
        try:
            if self.ranks.rank == 0:
                return self.ranks.broadcast((None, work()))[1]
            self.engine.take(self.module, self.population)
            with between_rounds() as check_signals:
                try:
                    return self.engine.serve()
                except LostRank:
                    check_signals()  # rank 0 ended because of a signal, which this rank has received, too
                    raise
        except BaseException:
            self.ranks.leave()
            raise
