"""The reference engine: clients one after the other."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.config.options import EngineOptions
from dpfl_lightning.data.records import Records
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.client import answers
from dpfl_lightning.federated.client.client import Client, HeldClients
from dpfl_lightning.federated.client.dummy_data import dummy_units
from dpfl_lightning.federated.client.engines.engine import Batch, count_outcomes, may_share
from dpfl_lightning.federated.client.evaluation import outputs_of
from dpfl_lightning.federated.client.module import ClientModule, LocalTask
from dpfl_lightning.federated.messages.jobs import ClassGradients
from dpfl_lightning.federated.messages.query import ChargedQuery
from dpfl_lightning.federated.messages.requests import Charged, Train
from dpfl_lightning.privacy.clipping.checked import CheckedSum, vmap_or_loop
from dpfl_lightning.privacy.clipping.reference import ClippedSum, ClipRequest, LoopClippedSum
from dpfl_lightning.privacy.clipping.restored import tensors_restored
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.runtime.devices import sent, use_exact_products

PERSONAL = "personal"  # name of the personal parameters in `Client.kept`


class SerialEngine:
    """Trains clients one after the other by `ClientModule.training_step`. Tests hold other engines to its results."""

    name = "serial"
    description = "per-record gradients by vmap(grad), torch optimiser"
    workers: int | None = 1

    @classmethod
    def of(cls, options: EngineOptions) -> SerialEngine:
        """Return the engine of these options. Raises UserError for options of another engine."""
        cls.require_no_trainer(options)
        return cls()

    @classmethod
    def require_no_trainer(cls, options: EngineOptions) -> None:
        """Raise UserError for arguments of a Trainer, which this engine does not use."""
        must = f"be empty for engine {cls.name}"
        require(not options.trainer, "engine.trainer", must, options.trainer, "Set engine.name to trainer.")

    def setup(self, module: ClientModule, clients: HeldClients, streams: Streams, sampling: str) -> None:
        self.module, self.clients, self.streams, self.sampling = module, clients, streams, sampling
        if module.device.type == "cuda":
            use_exact_products()
        with tensors_restored(module.net):
            self.checked = self.choose_clipped_sum()
        self.clipped_sum: ClippedSum = self.checked
        self._mask = module.personal_mask.to(module.device)

    def choose_clipped_sum(self) -> CheckedSum:
        example = dummy_units(self.clients.population, 4, self.module.device)
        clipped_sum = vmap_or_loop(self.module.net, self.module.sample_loss, *example)
        if isinstance(clipped_sum.choose(), LoopClippedSum):
            self.description = self.description.replace("by vmap(grad)", "one record at a time")
        return clipped_sum

    def copy(self) -> SerialEngine:
        one = copy.copy(self)
        one.module = copy.deepcopy(self.module)  # a forward pass swaps parameters and adds hooks
        one.clipped_sum = self.clipped_sum.copy_for(one.module.net, one.module.sample_loss)
        return one

    def batches(self, requests: Sequence[Charged]) -> list[list[int]]:
        return [[place] for place in range(len(requests))]

    def compute(self, batch: Sequence[Charged]) -> list[Any]:
        return [self.attempt(charged) for charged in batch]

    def attempt(self, charged: Charged) -> Any:
        """What one client releases or answers, or the error by which it fails."""
        client, request = self.clients.client(charged.client), charged.request
        try:
            if isinstance(request, Train):
                return self.release(client, request, charged.number)
            assert isinstance(request.question, ChargedQuery), "a question is copied before it is charged"
            return self.answer(client, request.question, request.round, charged.number)
        except UserError:  # what the user has to correct, or what the privacy core refuses
            raise
        except Exception as error:  # a user's model and records may raise anything
            return error

    @torch.no_grad()  # in any thread
    def answer(self, client: Client, query: ChargedQuery, round: int, charge_number: int) -> object:
        """The noisy answer of one client."""
        records, number = client.records, client.number
        x, y = records.held_out() if query.question.of_held_out else records.batch(torch.arange(len(records)))
        generator = self.streams.generator(f"query {query.purpose}", round, number, charge_number)
        with tensors_restored(self.module.net):
            x = self.clipped_sum.enter(x)
            return answers.answer(query, number, self.module, x, y, generator, self.checked.passes)

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        return outputs_of(self.module, model, self.clients.population, rows, self.clipped_sum.enter)

    def local_training(self, client: Client, task: LocalTask, start: Tensor, batches: DrawnBatches) -> Tensor:
        """The client's parameters `[P]` after its local steps from `start` `[P]`."""
        self.module.begin(task, start)
        for index, batch in enumerate(batches):
            self.module.training_step(batch, index)
        return self.module.flat

    def personalised(self, model: Tensor, client: int) -> Tensor:
        if (personal := self.clients.client(client).kept.get(PERSONAL)) is None:
            return model
        personalised = model.clone()
        personalised[self._mask] = personal
        return personalised

    @torch.no_grad()  # per-record gradients turn it on where they need it
    def release(self, client: Client, request: Train, charge_number: int) -> Tensor:
        """One client's noised change `[P]`, or its class gradients `[num_classes, p]`, also of absent classes."""
        job = request.job
        task, start, batches = self.local_task(client, request, charge_number)
        if isinstance(job, ClassGradients):
            x, y = batches[0]
            clip_norm, order = request.sampler().clip_norm, task.mechanism.clip_order
            of_classes = ClipRequest(clip_norm, order, y, job.num_classes, job.parameters)
            with tensors_restored(self.module.net):
                sums = task.sum_of(
                    self.module.unflatten(start), job.augmented(x, y, self.checked.passes.rows), y, of_classes
                )
            released = task.class_gradients(job, sums, start.dtype, y, client.records.labels)
        else:
            with tensors_restored(self.module.net):
                end = self.local_training(client, task, start, batches)
            released = self.change(task, start, end)
        if task.norms:
            outcomes = count_outcomes(torch.cat(task.norms), request.sampler().clip_norm)
            self.clients.count_gradients([client], outcomes.sum(dim=0, keepdim=True))
        client.keep(task.kept)
        return released

    def local_task(self, client: Client, request: Train, charge_number: int) -> tuple[LocalTask, Tensor, DrawnBatches]:
        """A client's task in the round, its start `[P]` and its batches. All records are drawn here."""
        mechanism, records, shared = request.mechanism, client.records, self.may_share(request)
        start = self.personalised(request.model, client.number)
        stream = self.streams.generator("sampling", request.round, client.number, charge_number)
        sampler = request.sampler(self.sampling)
        draws = list(sampler.draws(len(records), stream, lambda: records.labels.cpu().numpy()))
        task = LocalTask(
            clipped_sum=self.clipped_sum,
            mechanism=mechanism,
            noise=self.streams.generator("noise", request.round, client.number, charge_number),
            learning_rate=request.learning_rate,
            anchor=request.anchor,
            pull=request.pull,
            optimizer=request.optimizer,
            round=request.round,
            steps=request.steps,
            expected=None if shared else request.expected_records,
            kept=client.kept,
        )
        return task, start, DrawnBatches(records, draws)

    def may_share(self, request: Train) -> bool:
        """Whether the client may share a batch with others."""
        return may_share(self.module, request.mechanism, request.steps, request.optimizer)

    def change(self, task: LocalTask, start: Tensor, end: Tensor) -> Tensor:
        """`end - start` `[P]`, with zeros for personal parameters, whose new values `[p]` stay with the client."""
        delta = end - start
        if self.module.personal:
            task.kept[PERSONAL] = end[self._mask].clone()
            delta[self._mask] = 0.0
        return delta


class DrawnBatches:
    """The batches of a client in one round, whose records were drawn before. A batch may be empty."""

    def __init__(self, records: Records, draws: Sequence[Any]) -> None:
        self.records, self.draws = records, draws

    def __len__(self) -> int:
        return len(self.draws)

    @cached_property
    def _drawn(self) -> tuple[Tensor, ...]:
        """Numbers of the client's records, for each batch; all go to the device together."""
        drawn = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *self.draws]))
        return sent(drawn, self.records.device).split([len(draw) for draw in self.draws])

    def __getitem__(self, index: int) -> Batch:
        return self.records.batch(self._drawn[index])

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))
