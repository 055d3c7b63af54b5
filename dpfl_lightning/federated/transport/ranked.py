"""The clients' work spread over ranks: which rank trains which clients, what it is sent, and how results are joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.engines import one_batch as one_step
from dpfl_lightning.federated.client.engines.engine import Engine
from dpfl_lightning.federated.client.identity import equal_ranks
from dpfl_lightning.federated.client.local_clients import LocalClients
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.federated.messages.update import ClientUpdates, UpdateBuffer
from dpfl_lightning.federated.transport.ranks import Failed, Ranks
from dpfl_lightning.models.model import FORWARD_CHUNK
from dpfl_lightning.privacy.noise import Streams

T = TypeVar("T")


def spread(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which pieces of work each rank does: the longest first, each to the rank that has least to do so far.

    Args:
        costs: of each piece, >= 0, in any unit.
        ranks: >= 1.

    Returns:
        For each rank the numbers of its pieces, ascending.

    **Guarantees** Every piece once; no rank has more than 4/3 of the least possible largest load (Graham 1969).

    >>> spread([1.0, 5.0, 3.0, 3.0], 2)
    [[0, 1], [2, 3]]
    """
    pieces: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for piece in sorted(range(len(costs)), key=lambda one: -costs[one]):
        rank = loads.index(min(loads))
        pieces[rank].append(piece)
        loads[rank] += costs[piece]
    return [sorted(own) for own in pieces]


@dataclass(frozen=True)
class Share:
    """One rank's part of a round, with those rows of models, anchors and `raw_weights` that it uses.

    Args:
        plan: of its clients; `model_of` and `anchor_of` count the rows that are here.
        models: `[k, P]`, k <= K.
        attempts: `[c]`, c <= C clients.
        say: `[j, c]`, j <= K: for the models to which its updates are added; None if updates are kept.
        added_to: `[j]`, their rows among all models.
        personal: its clients' personal parameters.
    """

    plan: RoundPlan
    models: Tensor
    charge_numbers: tuple[int, ...]
    raw_weights: Tensor | None
    added_to: tuple[int, ...]
    personal: dict[int, Tensor]

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        plan: RoundPlan,
        models: Tensor,
        charge_numbers: Sequence[int],
        raw_weights: Tensor | None,
        personal: dict[int, Tensor],
    ) -> Share:
        """The part of the plan's clients at `rows`, ascending."""
        clients = {plan.clients[row] for row in rows}
        own = plan.only(lambda client: client in clients)
        models, model_of = _used(models, own.model_of)
        own = dataclasses.replace(own, model_of=model_of)
        if own.anchors is not None:
            anchors, anchor_of = _used(own.anchors, own.anchor_of)
            own = dataclasses.replace(own, anchors=anchors, anchor_of=anchor_of)
        added_to: tuple[int, ...] = ()
        if raw_weights is not None:
            raw_weights = raw_weights[:, list(rows)]
            added_to = tuple(raw_weights.any(dim=1).nonzero().flatten().tolist())
            raw_weights = raw_weights[list(added_to)]
        personal = {client: value for client, value in personal.items() if client in clients}
        return cls(own, models, tuple(charge_numbers[row] for row in rows), raw_weights, added_to, personal)


def _used(table: Tensor, rows: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
    """The rows of `table` that `rows` names, each once, and the place of each of `rows` among them."""
    used, places = torch.tensor(rows).unique(return_inverse=True)
    return table[used], tuple(places.tolist())


class RankedEngine:
    """One engine a rank, as one engine: rank 0 sends each its share of a round, works too, and puts the answers
    together. The other ranks `serve`.

    Clients go where the seconds of their last rounds add up least; to an engine with which company matters, where their
    expected records do, so that a simulation has the same company again. Personal parameters are at home at rank 0.

    Args:
        inner: this rank's own engine. Without a number of workers it takes this rank's share of the cores.

    **Guarantees** The same bits for any number of ranks: a client's release depends on its own streams only, all ranks
    were found to have equal code, data, engine and device, and sums are exact until they are rounded once. (An engine
    that leaves the threads within an operator to the environment is equal where `OMP_NUM_THREADS` is; where company
    matters, equal up to rounding.)

    **Privacy** Records stay where they are. What crosses: the key of a simulation (otherwise each rank draws fresh
    noise), start models, released updates, noised answers, personal parameters, counts of gradients, outputs of
    evaluation.
    """

    def __init__(self, inner: Engine, ranks: Ranks) -> None:
        self.inner, self.ranks = inner, ranks
        self.name, self.description, self.workers = inner.name, inner.description, inner.workers
        self.batch_coupled = inner.batch_coupled
        self.seconds: dict[int, float] = {}
        self._seconds_per_record: dict[int, float] = {}

    # -- what rank 0 does

    def setup(self, module: ClientModule, population: Population, streams: Streams, sampling: str) -> None:
        self._take(module, population)
        self.inner.setup(module, population, streams, sampling)
        self.clipped_sum, self.description = self.inner.clipped_sum, self.inner.description
        own = equal_ranks(self.inner, population, module)
        told = (streams, sampling, module.net.state_dict(), torch.get_num_threads())
        workers = [self.inner.workers]
        for rank, (their_workers, theirs) in self._together("_set_up", [None, *[told] * (self.ranks.size - 1)]):
            workers.append(their_workers)
            for name, value in own.items():
                if theirs[name] != value:
                    raise UserError(
                        f"`ranks` must all have the same {name}, got another one on rank {rank} than on rank 0. Start "
                        "them from one installation and one configuration, on equal machines."
                    )
        self.workers = sum(one or 1 for one in workers)

    def train(
        self, plan: RoundPlan, models: Tensor, charge_numbers: Sequence[int], raw_weights: Tensor | None = None
    ) -> ClientUpdates:
        everything = self.inner.state_dict()
        personal, counts = everything["personal"], everything["counts"]
        groups, costs = one_step.groups(plan, self.module), self._costs(plan)  # whole groups, or bits would change
        groups_of = spread([sum(costs[row] for row in rows) for rows in groups], self.ranks.size)
        rows_of = [sorted(row for group in own for row in groups[group]) for own in groups_of]
        shares = [
            Share.of(rows, plan, models, charge_numbers, raw_weights, personal) if rows else None for rows in rows_of
        ]
        parts = [None if share is None else (share,) for share in shares]
        received = UpdateBuffer(plan, raw_weights)
        self.seconds = {}
        for rank, (updates, own, seconds) in self._together("_train", parts):
            share = shares[rank]
            assert share is not None  # for mypy: it answered
            received.merge(updates, share.added_to)
            personal.update(own["personal"])
            counts += own["counts"]
            self.seconds.update(seconds)
        self.inner.load_state_dict(everything)
        self._remember(plan)
        return received.updates()

    def ask(self, query: ChargedQuery, round: int, charge_numbers: Sequence[int]) -> Answers:
        records = [float(self.population.num_records[client]) for client in query.clients]
        parts: list[tuple | None] = []
        for rows in spread(records, self.ranks.size):
            clients = tuple(query.clients[row] for row in rows)
            parts.append((query.only(clients), round, [charge_numbers[row] for row in rows]) if rows else None)
        answers: dict[int, object] = {}
        for _, theirs in self._together("_ask", parts):
            answers |= theirs
        return {client: answers[client] for client in query.clients}

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        chunks = -(-len(rows) // FORWARD_CHUNK)
        parts = rows.split(-(-chunks // self.ranks.size) * FORWARD_CHUNK)
        if len(parts) == 1:
            return self.inner.outputs(model, rows)
        own = model.clone()  # a message holds all the memory that a view looks at
        answers = dict(self._together("_outputs", [(own, part.clone()) for part in parts]))
        return torch.cat([answers[rank] for rank in range(len(parts))])

    def personalised(self, model: Tensor, client: int) -> Tensor:
        return self.inner.personalised(model, client)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def _together(self, command: str, parts: Sequence[tuple | None]) -> Iterator[tuple[int, Any]]:
        """`command(*part)` on every rank that has a part, at the same time; each rank's answer as it comes."""
        others = [rank for rank in self.ranks.others if rank < len(parts) and parts[rank] is not None]
        for rank in others:
            self.ranks.send(rank, (command, parts[rank]))
        if parts[0] is not None:
            yield 0, getattr(self, command)(*parts[0])
        for _ in others:
            rank, answer = self.ranks.receive()
            if isinstance(answer, Failed):
                raise answer.error
            yield rank, answer

    def _costs(self, plan: RoundPlan) -> list[float]:
        """Seconds each client of the plan will take, by its last round; expected records before anything is known."""
        if self.batch_coupled:
            return list(plan.expected_records)
        known = [self._seconds_per_record[one] for one in plan.clients if one in self._seconds_per_record]
        usual = fmean(known) if known else 1.0
        pairs = zip(plan.clients, plan.expected_records, strict=True)
        return [self._seconds_per_record.get(client, usual) * records for client, records in pairs]

    def _remember(self, plan: RoundPlan) -> None:
        for client, records in zip(plan.clients, plan.expected_records, strict=True):
            if client in self.seconds:
                self._seconds_per_record[client] = self.seconds[client] / records

    # -- what every rank does

    def serve(self, module: ClientModule, population: Population) -> Any:
        """Work for rank 0 until its run has ended well; returns its result."""
        self._take(module, population)
        return self.ranks.serve(lambda message: getattr(self, message[0])(*message[1]))

    def _take(self, module: ClientModule, population: Population) -> None:
        self.module, self.population = module, population
        if self.inner.workers is None and module.device.type == "cpu":
            self.inner.workers = self.ranks.cores

    def _set_up(
        self, streams: Streams, sampling: str, net: dict[str, Tensor], threads: int
    ) -> tuple[int | None, dict[str, str]]:
        """Another rank than 0; returns its workers and what it is."""
        self.module.net.load_state_dict(net)  # also what is not trained, and has no reason to be equal
        self.inner.setup(self.module, self.population, streams, sampling)
        torch.set_num_threads(threads)  # those within an operator decide bits
        return self.inner.workers, equal_ranks(self.inner, self.population, self.module)

    def _train(self, share: Share) -> tuple[ClientUpdates, dict[str, Any], dict[int, float]]:
        """What arrives from the share's clients, their personal parameters and this round's counts, their seconds."""
        nothing = torch.zeros_like(self.inner.state_dict()["counts"])
        self.inner.load_state_dict({"personal": share.personal, "counts": nothing})
        self.inner.seconds.clear()
        updates = self.inner.train(share.plan, share.models, share.charge_numbers, share.raw_weights)
        return updates, self.inner.state_dict(), dict(self.inner.seconds)

    def _ask(self, query: ChargedQuery, round: int, charge_numbers: Sequence[int]) -> Answers:
        return self.inner.ask(query, round, charge_numbers)

    def _outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        return self.inner.outputs(model, rows)


class RankedClients(LocalClients):
    """`LocalClients` whose work is spread over ranks. The server's side and the ledger are rank 0's.

    Args:
        engine: this rank's own engine.
        ranks: all processes of the run.
    """

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
