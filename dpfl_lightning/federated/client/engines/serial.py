"""The reference engine: clients one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client import answers
from dpfl_lightning.federated.client.dummy_data import dummy_units
from dpfl_lightning.federated.client.engines.engine import COUNTED, Batch, count_outcomes, may_share
from dpfl_lightning.federated.client.module import ClientModule, LocalTask
from dpfl_lightning.federated.messages.plan import ClassGradients, RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.federated.messages.update import ClientUpdates, UpdateBuffer
from dpfl_lightning.models.model import forward_chunk
from dpfl_lightning.privacy.clipping.checked import CheckedSum, vmap_or_loop
from dpfl_lightning.privacy.clipping.inputs import take
from dpfl_lightning.privacy.clipping.reference import ClippedSum, ClipRequest, LoopClippedSum, scoring
from dpfl_lightning.privacy.clipping.state import tensors_restored
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.runtime.devices import sent, use_exact_products

T = TypeVar("T")


class SerialEngine:
    """Trains clients one after the other by `ClientModule.training_step`. Tests hold other engines to its results."""

    name = "serial"
    description = "per-record gradients by vmap(grad), torch optimiser"
    workers: int | None = 1

    def setup(self, module: ClientModule, population: Population, streams: Streams, sampling: str) -> None:
        self.module, self.population, self.streams, self.sampling = module, population, streams, sampling
        if module.device.type == "cuda":
            use_exact_products()
        with tensors_restored(module.net):
            self.checked = self.choose_clipped_sum()
        self.clipped_sum: ClippedSum = self.checked
        self._mask = module.personal_mask.to(module.device)
        self._personal: dict[int, Tensor] = {}
        self.failed: dict[int, Exception] = {}
        self.counts = torch.zeros(population.num_clients, len(COUNTED), dtype=torch.long, device=module.device)

    def choose_clipped_sum(self) -> CheckedSum:
        example = dummy_units(self.population, 4, self.module.device)
        clipped_sum = vmap_or_loop(self.module.net, self.module.sample_loss, *example)
        if isinstance(clipped_sum.choose(), LoopClippedSum):
            self.description = self.description.replace("by vmap(grad)", "one record at a time")
        return clipped_sum

    def train(
        self, plan: RoundPlan, models: Tensor, charge_numbers: Sequence[int], raw_weights: Tensor | None = None
    ) -> ClientUpdates:
        self.failed.clear()
        received = UpdateBuffer(plan, raw_weights)
        for row, release in self.releases(plan, models, charge_numbers):
            if release is None:
                received.lose(row)
            else:
                received.take(row, release)
        return received.updates()

    def releases(
        self, plan: RoundPlan, models: Tensor, charge_numbers: Sequence[int]
    ) -> Iterator[tuple[int, Tensor | None]]:
        """Yield the release of each client with its row in the plan, in any order; None if the client fails."""
        rows = range(len(charge_numbers))
        yield from zip(rows, self.one_by_one(plan, rows, models, charge_numbers), strict=True)

    def one_by_one(
        self, plan: RoundPlan, rows: Sequence[int], models: Tensor, charge_numbers: Sequence[int]
    ) -> Iterator[Tensor | None]:
        """Yield the releases of these rows of the plan; None if the client fails."""
        for row in rows:
            yield self.attempt(plan.clients[row], self.release, plan, row, models, charge_numbers[row])

    def attempt(self, client: int, work: Callable[..., T], *args: Any) -> T | None:
        """`work(*args)`; None if it raises an error, and the client is then among `failed`."""
        try:
            return work(*args)
        except UserError:  # what the user has to correct, or what the privacy core refuses
            raise
        except Exception as error:  # a user's model and records may raise anything
            self.failed[client] = error
            return None

    def ask(self, query: ChargedQuery, round: int, charge_numbers: Sequence[int]) -> Answers:
        self.failed.clear()
        pairs = zip(query.clients, charge_numbers, strict=True)
        answers = {client: self.attempt(client, self.answer, query, client, round, number) for client, number in pairs}
        return {client: answer for client, answer in answers.items() if client not in self.failed}

    @torch.no_grad()  # in any thread
    def answer(self, query: ChargedQuery, client: int, round: int, charge_number: int) -> object:
        population = self.population
        if query.question.of_held_out:
            x, y = population.held_out(client)
        else:
            x, y = population.records(client, torch.arange(population.num_records[client]))
        generator = self.streams.generator(f"query {query.purpose}", round, client, charge_number)
        with tensors_restored(self.module.net):
            x = self.clipped_sum.enter(x)
            return answers.answer(query, client, self.module, x, y, generator, self.checked.passes)

    @torch.no_grad()
    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        params, parts = self.module.unflatten(model), []
        with scoring(self.module.net, self.module.sample_loss):
            for chunk in rows.split(forward_chunk(model.device)):
                x = self.clipped_sum.enter(take(self.population.x, chunk))
                parts.append(self.module.output(params, x))
        return torch.cat(parts)

    def local_training(self, task: LocalTask, start: Tensor, batches: DrawnBatches) -> Tensor:
        """The client's parameters `[P]` after its local steps from `start` `[P]`."""
        self.module.begin(task, start)
        for index, batch in enumerate(batches):
            self.module.training_step(batch, index)
        return self.module.flat

    def personalised(self, model: Tensor, client: int) -> Tensor:
        if client not in self._personal:
            return model
        personalised = model.clone()
        personalised[self._mask] = self._personal[client]
        return personalised

    def state_dict(self) -> dict[str, Any]:
        return {"personal": dict(self._personal), "counts": self.counts.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._personal.clear()  # in place: copies of this engine share it
        self._personal.update({client: value.to(self._mask.device) for client, value in state["personal"].items()})
        self.counts.copy_(state["counts"])

    @torch.no_grad()  # per-record gradients turn it on where they need it
    def release(self, plan: RoundPlan, row: int, models: Tensor, charge_number: int) -> Tensor:
        """One client's noised change `[P]`, or its class gradients `[num_classes, p]`, also of absent classes."""
        client, job = plan.clients[row], plan.job
        task, start, batches = self.local_task(plan, row, models, charge_number)
        if isinstance(job, ClassGradients):
            x, y = batches[0]
            clip_norm, order = plan.sampler(row).clip_norm, task.mechanism.clip_order
            request = ClipRequest(clip_norm, order, y, job.num_classes, job.parameters)
            with tensors_restored(self.module.net):
                sums = task.sum_of(
                    self.module.unflatten(start), job.augmented(x, y, self.checked.passes.rows), y, request
                )
            released = task.class_gradients(job, sums, start.dtype, y, self.labels(client))
        else:
            with tensors_restored(self.module.net):
                end = self.local_training(task, start, batches)
            released = self.change(client, start, end)
        if task.norms:
            self.counts[client] += count_outcomes(torch.cat(task.norms), plan.sampler(row).clip_norm).sum(dim=0)
        return released

    def local_task(
        self, plan: RoundPlan, row: int, models: Tensor, charge_number: int
    ) -> tuple[LocalTask, Tensor, DrawnBatches]:
        """A client's task in the round, its start `[P]` and its batches. All records are drawn here."""
        client, mechanism = plan.clients[row], plan.mechanism_of[row]
        start = self.personalised(models[plan.model_of[row]], client)
        stream = self.streams.generator("sampling", plan.round, client, charge_number)
        sampler, num_records = plan.sampler(row, self.sampling), self.population.num_records[client]
        draws = list(sampler.draws(num_records, stream, lambda: self.labels(client).cpu().numpy()))
        task = LocalTask(
            clipped_sum=self.clipped_sum,
            mechanism=mechanism,
            noise=self.streams.generator("noise", plan.round, client, charge_number),
            learning_rate=plan.learning_rate_of[row],
            anchor=None if plan.anchors is None else plan.anchors[plan.anchor_of[row]],
            pull=plan.pull,
            optimizer=plan.optimizer,
            round=plan.round,
            steps=plan.steps[row],
            expected=None if may_share(plan, row, self.module) else plan.job.expected_records(mechanism),
        )
        return task, start, DrawnBatches(self.population, client, draws)

    def change(self, client: int, start: Tensor, end: Tensor) -> Tensor:
        """`end - start` `[P]`, with zeros for personal parameters, whose new values are kept here."""
        delta = end - start
        if self.module.personal:
            self._personal[client] = end[self._mask].clone()
            delta[self._mask] = 0.0
        return delta

    def labels(self, client: int) -> Tensor:
        return self.population.y[self.population.train_of[client]]


class DrawnBatches:
    """The batches of a client in one round, whose records were drawn before. A batch may be empty."""

    def __init__(self, population: Population, client: int, draws: Sequence[Any]) -> None:
        self.population, self.client, self.draws = population, client, draws

    def __len__(self) -> int:
        return len(self.draws)

    @cached_property
    def _drawn(self) -> tuple[Tensor, ...]:
        """Numbers of the client's records, for each batch; all go to the device together."""
        drawn = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *self.draws]))
        return sent(drawn, self.population.y.device).split([len(draw) for draw in self.draws])

    def __getitem__(self, index: int) -> Batch:
        return self.population.records(self.client, self._drawn[index])

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))
