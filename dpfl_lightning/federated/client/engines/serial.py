"""How a round's local work is executed. Engines change speed, never meaning: `SerialEngine` is the reference."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.data import DataLoader

from dpfl_lightning.data import Population
from dpfl_lightning.federated.client import answers
from dpfl_lightning.federated.client.gradient_counts import COUNTED, fates
from dpfl_lightning.federated.client.module import FORWARD_CHUNK, ClientModule, LocalTask
from dpfl_lightning.federated.messages.plan import ClassGradients, ClientUpdates, RoundPlan, ServerState
from dpfl_lightning.federated.messages.query import Answers, Query
from dpfl_lightning.federated.server.aggregate import Received
from dpfl_lightning.privacy.clipping.reference import ClippedSum, VmapClippedSum, evaluating
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.privacy.sampling import draw_steps, rows_of_each_class

Batch = tuple[Tensor, Tensor]


class Engine(Protocol):
    """Runs clients. Everything it returns is noised and was charged by the caller beforehand."""

    name: str
    description: str
    workers: int | None  # clients at the same time, known after setup
    clipped_sum: ClippedSum  # after setup
    seconds: dict[int, float]  # client -> seconds of its last release here, for who spreads the work
    company_matters: bool  # whether who else is in a plan decides bits of a release (groups of `one_step` aside)

    def setup(self, module: ClientModule, population: Population, streams: Streams, sampling: str) -> None:
        """Once a run, before the first round: module and population are on their device."""
        ...

    def train(
        self, plan: RoundPlan, state: ServerState, attempts: Sequence[int], say: Tensor | None = None
    ) -> ClientUpdates:
        """The releases of the plan's clients; `attempts` `[C]` picks each one's noise stream.

        With `say` `[K, C]` they are streamed into the sum `say @ deltas`, and none is kept.
        """
        ...

    def ask(self, query: Query, round: int, attempts: Sequence[int]) -> Answers:
        """The noised answers of the query's clients."""
        ...

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        """The net's outputs `[n, ...]` with parameters `model` `[P]` for `rows` `[n]` of the population's storage."""
        ...

    def personalised(self, model: Tensor, client: int) -> Tensor:
        """`model` `[P]` with the client's own personal parameters in place."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What stays with the clients: `personal` parameters, client -> `[p]`; `counts` of gradients, `[N, 3]`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SerialEngine:
    """One client after the other through `ClientModule.training_step`; per-record gradients by `vmap(grad)`.

    Slow and obviously right: every other engine is held to it.
    """

    name = "serial"
    description = "per-record gradients by vmap(grad), torch optimiser"
    workers: int | None = 1
    company_matters = False

    def setup(self, module: ClientModule, population: Population, streams: Streams, sampling: str) -> None:
        self.module, self.population, self.streams, self.sampling = module, population, streams, sampling
        self.clipped_sum = self.choose_clipped_sum()
        self._mask = module.personal_mask.to(module.device)
        self._personal: dict[int, Tensor] = {}
        self.seconds: dict[int, float] = {}
        self.counts = torch.zeros(population.num_clients, len(COUNTED), dtype=torch.long, device=module.device)

    def choose_clipped_sum(self) -> ClippedSum:
        return VmapClippedSum(self.module.sample_loss)

    def train(
        self, plan: RoundPlan, state: ServerState, attempts: Sequence[int], say: Tensor | None = None
    ) -> ClientUpdates:
        received = Received(plan, say)
        for row, release in self.releases(plan, state, attempts):
            received.take(row, release)
        return received.updates()

    def releases(self, plan: RoundPlan, state: ServerState, attempts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """What each client of the plan sends, with its row in the plan, in any order."""
        for row, attempt in enumerate(attempts):
            yield row, self.release(plan, row, state, attempt)

    def ask(self, query: Query, round: int, attempts: Sequence[int]) -> Answers:
        pairs = zip(query.clients, attempts, strict=True)
        return {client: self.answer(query, client, round, attempt) for client, attempt in pairs}

    @torch.no_grad()  # in any thread
    def answer(self, query: Query, client: int, round: int, attempt: int) -> object:
        """One client's noised answer."""
        x, y = self.population.records(client, torch.arange(self.population.num_records[client]))
        generator = self.streams.generator(f"query {query.purpose}", round, client, attempt)
        return answers.answer(query, client, self.module, self.clipped_sum.enter(x), y, generator)

    @torch.inference_mode()
    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        params = self.module.unflatten(model)
        parts = []
        with evaluating(self.module.net):
            for chunk in rows.split(FORWARD_CHUNK):
                x = self.clipped_sum.enter(self.population.x[chunk])
                parts.append(functional_call(self.module.net, params, (x,)))
        return torch.cat(parts)

    def local_training(self, task: LocalTask, start: Tensor, batches: DrawnBatches) -> Tensor:
        """The client's parameters `[P]` after its steps from `start` `[P]`."""
        self.module.begin(task, start)
        for index, batch in enumerate(batches):
            self.module.training_step(batch, index)
        return self.module.flat

    def personalised(self, model: Tensor, client: int) -> Tensor:
        if client not in self._personal:
            return model
        own = model.clone()
        own[self._mask] = self._personal[client]
        return own

    def state_dict(self) -> dict[str, Any]:
        return {"personal": dict(self._personal), "counts": self.counts.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._personal.clear()  # in place: it may be shared
        self._personal.update({client: value.to(self._mask.device) for client, value in state["personal"].items()})
        self.counts.copy_(state["counts"])

    @torch.no_grad()  # per-record gradients turn it on where they need it
    def release(self, plan: RoundPlan, row: int, state: ServerState, attempt: int) -> Tensor:
        """One client's noised change `[P]`, or its class gradients `[num_classes, p]`."""
        begun, client = time.perf_counter(), plan.clients[row]
        task, start, batches = self.local_task(plan, row, state, attempt)
        if isinstance(plan.job, ClassGradients):
            released = self._class_gradients(client, plan.job, task, start, batches[0])
        else:
            released = self.change(client, start, self.local_training(task, start, batches))
        if task.norms:
            self.counts[client] += fates(torch.cat(task.norms), plan.clip_norm(row)).sum(dim=0)
        self.seconds[client] = time.perf_counter() - begun
        return released

    def local_task(
        self, plan: RoundPlan, row: int, state: ServerState, attempt: int
    ) -> tuple[LocalTask, Tensor, DrawnBatches]:
        """What one client does in the round, its start `[P]` and its batches: every draw of records happens here."""
        client = plan.clients[row]
        start = self.personalised(state.models[plan.model_of[row]], client)
        mechanism = plan.mechanism_of[row]
        stream = self.streams.generator("sampling", plan.round, client, attempt)
        if isinstance(plan.job, ClassGradients) and plan.job.most_records is not None:
            draws = [rows_of_each_class(self.held_labels(client).cpu().numpy(), plan.job.most_records, stream)]
        else:
            num_records = self.population.num_records[client]
            draws = list(draw_steps(self.sampling, num_records, mechanism.sample_rate, plan.steps[row], stream))
        norms: list[Tensor] = []
        task = LocalTask(
            clipped_sum=partial(self.clipped_sum, norms=norms, order=mechanism.clip_order),
            norms=norms,
            mechanism=mechanism,
            noise=self.streams.generator("noise", plan.round, client, attempt),
            learning_rate=plan.learning_rate_of[row],
            anchor=None if plan.anchors is None else plan.anchors[plan.anchor_of[row]],
            pull=plan.pull,
        )
        return task, start, DrawnBatches(self.population, client, draws)

    def change(self, client: int, start: Tensor, end: Tensor) -> Tensor:
        """`end - start` `[P]`, zero at the personal parameters, whose end stays here."""
        delta = end - start
        if self.module.personal:
            self._personal[client] = end[self._mask].clone()
            delta[self._mask] = 0.0
        return delta

    def held_labels(self, client: int) -> Tensor:
        """Of all the client's training records, `[n]`."""
        return self.population.y[self.population.train_of[client]]

    def _class_gradients(
        self, client: int, job: ClassGradients, task: LocalTask, start: Tensor, batch: Batch
    ) -> Tensor:
        """`[num_classes, p]`: noised, divided sums of one draw, a block for each class (also for absent ones)."""
        x, y = batch
        params, clip_norm = self.module.unflatten(start), job.clip_norm(task.mechanism)
        sums = task.clipped_sum(
            params, job.seen(x, y), y, clip_norm, group=y, num_groups=job.num_classes, only=job.parameters
        )
        return job.released(sums, task, start.dtype, y, self.held_labels(client))


class DrawnBatches:
    """The batches of one client's round, drawn beforehand; an empty draw is an empty batch."""

    def __init__(self, population: Population, client: int, draws: Sequence[Any]) -> None:
        self.population, self.client, self.draws = population, client, draws

    def __len__(self) -> int:
        return len(self.draws)

    def __getitem__(self, index: int) -> Batch:
        return self.population.records(self.client, torch.from_numpy(self.draws[index]))

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))


class TrainerEngine(SerialEngine):
    """Every client's round is `lightning.Trainer(...).fit(module, batches)`: the same parameters, at a Trainer's price.

    For who wants Trainer features around the local step; the loop stays the owner of privacy.
    """

    name = "trainer"
    description = "a lightning.Trainer a client and round"

    def local_training(self, task: LocalTask, start: Tensor, batches: DrawnBatches) -> Tensor:
        self.module.begin(task, start)
        device = self.module.device
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # four lines a client and round otherwise
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*num_workers.*|.*does not have many workers.*|.*LeafSpec.*")
            trainer = L.Trainer(
                accelerator=device.type,
                devices=1 if device.index is None else [device.index],
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            try:
                trainer.fit(self.module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
            except SystemExit as error:  # what a Trainer makes of Ctrl-C
                raise error.__context__ or error from None
        self.module.to(device)
        return self.module.flat
