"""The clients of a run on several ranks: which rank computes for which clients, and how the results are joined."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpfl_lightning.data import Population
from dpfl_lightning.errors import require
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.engines.engine import Engine
from dpfl_lightning.federated.client.identity import equal_ranks
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.inbox import Inbox
from dpfl_lightning.federated.messages.requests import Charged, Train
from dpfl_lightning.federated.transport.ranks import LostRank, Ranks
from dpfl_lightning.federated.transport.threads import Threads
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


@dataclass(frozen=True)
class Share:
    """What a rank computes of a round: requests, an empty inbox for their replies, and what stays with the clients."""

    requests: list[Charged]
    inbox: Inbox
    kept: dict[int, dict[str, Tensor]]


class RankChannel:
    """The `Channel` to clients on all ranks, each of which has one engine. Rank 0 works, too; the others `serve`.

    **Guarantees** The result has the same bits for any number of ranks: a client's release depends only on its
    streams, all ranks are checked to have equal code, data, engine and device, and sums are exact until they are
    rounded once. (An engine that leaves the threads within an operator to the environment gives equal bits if
    `OMP_NUM_THREADS` is equal.)

    **Privacy** Records stay on their rank. What crosses: the key of noise that repeats (otherwise each rank draws fresh
    noise), which rows of each unit are used, start models, released updates, noisy answers, what stays with clients,
    counts of gradients, outputs of evaluation.
    """

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self.engine, self.ranks = engine, ranks
        self.description, self._here = f"{ranks.size} ranks", Threads(engine)

    def run(self, module: ClientModule, clients: HeldClients, work: Callable[[], T]) -> T:
        try:
            if self.ranks.rank == 0:
                return self.ranks.broadcast((None, work()))[1]
            self.take(module, clients.population)
            with between_rounds() as check_signals:
                try:
                    return self._serve()
                except LostRank:
                    check_signals()  # rank 0 ended because of a signal, which this rank has received, too
                    raise
        except BaseException:
            self.ranks.leave()
            raise

    # -- rank 0

    def setup(self, module: ClientModule, clients: HeldClients, streams: Streams, sampling: str) -> None:
        self.take(module, clients.population)
        self._clients = clients
        blocks = clients.population.blocks_of, clients.population.held_out_blocks_of
        work = (streams, sampling, module.net.state_dict(), torch.get_num_threads(), blocks)
        (workers, identity), *others = self._on_all("_set_up", [()] * self.ranks.size, *work)
        self.workers = workers + sum(theirs for theirs, _ in others)
        for rank, (_, theirs) in enumerate(others, start=1):
            for name, value in identity.items():
                advice = "Start all ranks from the same installation and configuration, on equal machines."
                require(theirs[name] == value, "ranks", f"all have the same {name}", f"another on rank {rank}", advice)

    def send(self, requests: Sequence[Charged], inbox: Inbox) -> None:
        state = self._clients.state_dict()
        batches = self.engine.batches(requests)  # splitting a batch would change bits
        costs = [sum(map(self._cost, (requests[place] for place in places))) for places in batches]
        shares = [
            self._share([requests[place] for batch in assigned for place in batches[batch]], inbox, state["kept"])
            for assigned in spread(costs, self.ranks.size)
        ]
        for part, theirs in self._on_all("_send", shares):
            inbox.merge(part)
            state["kept"].update(theirs["kept"])
            state["counts"] += theirs["counts"]
        self._clients.load_state_dict(state)

    def _share(self, requests: list[Charged], inbox: Inbox, kept: dict[int, dict[str, Tensor]]) -> Share | None:
        if not requests:
            return None
        clients = [charged.client for charged in requests]
        return Share(requests, inbox.part(clients), {one: kept[one] for one in clients if one in kept})

    def _cost(self, charged: Charged) -> float:
        if isinstance(request := charged.request, Train):
            return (request.expected_records + STEP) * request.steps
        return float(self._clients.population.num_records[charged.client])

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        chunk = forward_chunk(model.device)
        chunks = -(-len(rows) // chunk)
        size = -(-chunks // self.ranks.size) * chunk
        if len(rows) <= size:
            return self._here.outputs(model, rows)
        shares = [rows[rank * size :][:size] for rank in range(self.ranks.size)]
        parts = self._on_all("_outputs", [one if len(one) else None for one in shares], model.clone())
        return torch.cat(parts)  # of a clone: a view brings the whole memory behind it

    def personalised(self, model: Tensor, client: int) -> Tensor:
        return self._here.personalised(model, client)

    def _on_all(self, method: str, shares: Sequence[Any], *arguments: Any) -> list[Any]:
        """Call a method with its share of the work on every rank that has one, and return what they answer."""
        self.ranks.broadcast((method, (shares, *arguments)))
        answers = self.ranks.gather(self._answer(method, shares, *arguments))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [answer for answer in answers if answer is not None]

    # -- all ranks

    def _serve(self) -> Any:
        """Work for rank 0 until its run has ended successfully, and return the result of the run."""
        while True:
            method, content = self.ranks.broadcast((None, ()))
            if method is None:
                return content
            self.ranks.gather(self._answer(method, *content))

    def take(self, module: ClientModule, population: Population) -> None:
        self._module, self._clients = module, HeldClients(population)
        if self.engine.workers is None and module.device.type == "cpu":
            self.engine.workers = self.ranks.cores

    def _answer(self, method: str, shares: Sequence[Any], *arguments: Any) -> Any:
        """The result of a method, or its exception: the other ranks wait for this rank in any case."""
        share = shares[self.ranks.rank]
        try:
            return None if share is None else getattr(self, method)(share, *arguments)
        except Exception as error:
            return error if self.ranks.rank == 0 else self.ranks.portable(error)

    def _set_up(
        self,
        _: Any,
        streams: Streams,
        sampling: str,
        net: dict[str, Tensor],
        threads: int,
        blocks: tuple[list[Tensor] | None, list[Tensor] | None],
    ) -> tuple[int, dict[str, str]]:
        self._module.net.load_state_dict(net)  # with parameters that are not trained, which may differ between ranks
        if self.ranks.rank > 0 and blocks[0] is not None:  # chosen by the key of rank 0
            train, held_out = ([rows.to(self._module.device) for rows in one or ()] for one in blocks)
            population = self._clients.population
            self._clients = HeldClients(dataclasses.replace(population, blocks_of=train, held_out_blocks_of=held_out))
        self._here.setup(self._module, self._clients, streams, sampling)
        torch.set_num_threads(threads)  # the number of threads within an operator affects bits
        return self._here.workers, equal_ranks(self.engine, self._module)

    def _send(self, share: Share) -> tuple[Inbox, dict[str, Any]]:
        """Compute this rank's share; return the inbox, what stays with the clients, and counts of this round."""
        counts = torch.zeros_like(self._clients.counts)
        self._clients.load_state_dict({"kept": share.kept, "counts": counts})
        self._here.send(share.requests, share.inbox)
        if self.ranks.rank > 0:
            share.inbox.failed = {one: self.ranks.portable(error) for one, error in share.inbox.failed.items()}
        return share.inbox, self._clients.state_dict()

    def _outputs(self, rows: Tensor, model: Tensor) -> Tensor:
        return self._here.outputs(model, rows)
