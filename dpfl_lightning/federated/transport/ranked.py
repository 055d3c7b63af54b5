"""Distribution of the clients' work over ranks: which rank trains which clients, and how the results are joined."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.engines import one_batch
from dpfl_lightning.federated.client.engines.engine import Engine
from dpfl_lightning.federated.client.identity import equal_ranks
from dpfl_lightning.federated.client.local_clients import LocalClients
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.federated.messages.update import ClientUpdates, UpdateBuffer
from dpfl_lightning.federated.transport.ranks import Ranks
from dpfl_lightning.models.model import forward_chunk
from dpfl_lightning.privacy.noise import Streams

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


def _share(plan: RoundPlan, models: Tensor, rows: Sequence[int]) -> tuple[RoundPlan, Tensor]:
    """The plan of its clients at `rows`, which are ascending, and the models that they use, to which it refers."""
    clients = {plan.clients[row] for row in rows}
    plan = plan.only(lambda client: client in clients)
    models, model_of = _used(models, plan.model_of)
    plan = dataclasses.replace(plan, model_of=model_of)
    if plan.anchors is not None:
        anchors, anchor_of = _used(plan.anchors, plan.anchor_of)
        plan = dataclasses.replace(plan, anchors=anchors, anchor_of=anchor_of)
    return plan, models


def _used(table: Tensor, rows: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
    """The rows of `table` that occur in `rows`, each once, and for each of `rows` its index among them."""
    used, places = torch.tensor(rows).unique(return_inverse=True)
    return table[used], tuple(places.tolist())


class RankedEngine:
    """An engine that distributes the work over one engine per rank. Rank 0 works, too; the other ranks `serve`.

    **Guarantees** The result has the same bits for any number of ranks: a client's release depends only on its
    streams, all ranks are checked to have equal code, data, engine and device, and sums are exact until they are
    rounded once. (An engine that leaves the threads within an operator to the environment gives equal bits if
    `OMP_NUM_THREADS` is equal.)

    **Privacy** Records stay on their rank. What crosses: the key of a simulation (otherwise each rank draws fresh
    noise), start models, released updates, noised answers, personal parameters, counts of gradients, outputs of
    evaluation.
    """

    def __init__(self, inner: Engine, ranks: Ranks) -> None:
        self.inner, self.ranks = inner, ranks
        self.name, self.description, self.workers = inner.name, inner.description, inner.workers
        self.failed: dict[int, Exception] = {}

    @property
    def counts(self) -> Tensor:
        return self.inner.counts

    # -- rank 0

    def setup(self, module: ClientModule, population: Population, streams: Streams, sampling: str) -> None:
        self._take(module, population)
        self.inner.setup(module, population, streams, sampling)
        self.clipped_sum, self.description = self.inner.clipped_sum, self.inner.description
        identity = equal_ranks(self.inner, population, module)
        message = (streams, sampling, module.net.state_dict(), torch.get_num_threads())
        self.workers = self.inner.workers or 1
        for rank, (workers, theirs) in self._together("_set_up", [None, *[message] * (self.ranks.size - 1)]):
            self.workers += workers or 1
            for name, value in identity.items():
                if theirs[name] != value:
                    raise UserError(
                        f"`ranks` must all have the same {name}, got another one on rank {rank} than on rank 0. Start "
                        "all ranks from the same installation and configuration, on equal machines."
                    )

    def train(
        self, plan: RoundPlan, models: Tensor, charge_numbers: Sequence[int], raw_weights: Tensor | None = None
    ) -> ClientUpdates:
        state = self.inner.state_dict()
        groups = one_batch.groups(plan, self.module)  # splitting a group would change bits
        costs = [records + STEP * steps for records, steps in zip(plan.expected_records, plan.steps, strict=True)]
        groups_of = spread([sum(costs[row] for row in rows) for rows in groups], self.ranks.size)
        parts: list[tuple | None] = []
        added_to: list[list[int]] = []  # rows of the models to which the updates of each rank are added
        for assigned in groups_of:
            rows = sorted(row for group in assigned for row in groups[group])
            weights = None if raw_weights is None else raw_weights[:, rows]
            added_to.append([] if weights is None else weights.any(dim=1).nonzero().flatten().tolist())
            weights = None if weights is None else weights[added_to[-1]]
            clients = {plan.clients[row] for row in rows}
            personal = {client: value for client, value in state["personal"].items() if client in clients}
            numbers = [charge_numbers[row] for row in rows]
            parts.append((*_share(plan, models, rows), numbers, weights, personal) if rows else None)
        received = UpdateBuffer(plan, raw_weights)
        self.failed.clear()
        for rank, (updates, theirs, failed) in self._together("_train", parts):
            received.merge(updates, added_to[rank])
            self.failed |= failed
            state["personal"].update(theirs["personal"])
            state["counts"] += theirs["counts"]
        self.inner.load_state_dict(state)
        return received.updates()

    def ask(self, query: ChargedQuery, round: int, charge_numbers: Sequence[int]) -> Answers:
        records = [float(self.population.num_records[client]) for client in query.clients]
        parts: list[tuple | None] = []
        for rows in spread(records, self.ranks.size):
            clients = tuple(query.clients[row] for row in rows)
            parts.append((query.only(clients), round, [charge_numbers[row] for row in rows]) if rows else None)
        answers: dict[int, object] = {}
        self.failed.clear()
        for _, (theirs, failed) in self._together("_ask", parts):
            answers |= theirs
            self.failed |= failed
        return {client: answers[client] for client in query.clients if client in answers}

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        chunk = forward_chunk(model.device)
        chunks = -(-len(rows) // chunk)
        parts = rows.split(-(-chunks // self.ranks.size) * chunk)
        if len(parts) == 1:
            return self.inner.outputs(model, rows)
        model_copy = model.clone()  # a message with a view would contain the whole memory behind it
        answers = dict(self._together("outputs", [(model_copy, part.clone()) for part in parts]))
        return torch.cat([answers[rank] for rank in range(len(parts))])

    def personalised(self, model: Tensor, client: int) -> Tensor:
        return self.inner.personalised(model, client)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def _together(self, command: str, parts: Sequence[tuple | None]) -> Iterator[tuple[int, Any]]:
        """Call `command(*part)` on every rank that has a part, concurrently; yield each rank's answer as it arrives."""
        others = [rank for rank in self.ranks.others if rank < len(parts) and parts[rank] is not None]
        for rank in others:
            self.ranks.send(rank, (command, parts[rank]))
        if parts[0] is not None:
            yield 0, self._call(command, parts[0])
        for _ in others:
            rank, answer = self.ranks.receive()
            if isinstance(answer, Exception):
                raise answer
            yield rank, answer

    # -- all ranks

    def serve(self, module: ClientModule, population: Population) -> Any:
        """Work for rank 0 until its run has ended successfully, and return the result of the run."""
        self._take(module, population)
        return self.ranks.serve(self._call)

    def _call(self, command: str, part: tuple) -> Any:
        """Call a method of this object, whose name begins with an underscore, or of this rank's engine."""
        return getattr(self if command.startswith("_") else self.inner, command)(*part)

    def _take(self, module: ClientModule, population: Population) -> None:
        self.module, self.population = module, population
        if self.inner.workers is None and module.device.type == "cpu":
            self.inner.workers = self.ranks.cores

    def _set_up(
        self, streams: Streams, sampling: str, net: dict[str, Tensor], threads: int
    ) -> tuple[int | None, dict[str, str]]:
        self.module.net.load_state_dict(net)  # includes parameters that are not trained, which may differ between ranks
        self.inner.setup(self.module, self.population, streams, sampling)
        torch.set_num_threads(threads)  # the number of threads within an operator affects bits
        return self.inner.workers, equal_ranks(self.inner, self.population, self.module)

    def _train(
        self,
        plan: RoundPlan,
        models: Tensor,
        charge_numbers: Sequence[int],
        raw_weights: Tensor | None,
        personal: dict[int, Tensor],
    ) -> tuple[ClientUpdates, dict[str, Any], dict[int, Exception]]:
        """Train a share's clients; return updates, personal parameters and counts of this round, and errors."""
        self.inner.load_state_dict({"personal": personal, "counts": torch.zeros_like(self.inner.counts)})
        updates = self.inner.train(plan, models, charge_numbers, raw_weights)
        return updates, self.inner.state_dict(), self._errors()

    def _ask(self, *part: Any) -> tuple[Answers, dict[int, Exception]]:
        return self.inner.ask(*part), self._errors()

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
        if self.ranks.rank > 0:
            return self.engine.serve(self.module, self.population)
        return self.ranks.lead(work)
