"""Trains clients that take one step from the same model as one batch, which saves the fixed cost of a pass."""

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.engines.engine import count_outcomes, may_share
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.module import ClientModule, dp_step
from dpfl_lightning.federated.messages.jobs import ClassGradients
from dpfl_lightning.federated.messages.requests import Charged, Train
from dpfl_lightning.privacy.clipping.inputs import joined
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.privacy.clipping.restored import tensors_restored
from dpfl_lightning.runtime.devices import sent

MOST_CLIENTS = 16  # a batch: with more the fixed cost is small already, and workers need several batches
MOST_BYTES = 64 << 20  # of the sums `[clients * G, P]` in float64


def groups(requests: Sequence[Charged], module: ClientModule) -> list[list[int]]:
    """Places of the requests that form one batch: one step of plain SGD, the same start and clip norm, few records.

    Groups follow from the clients' numbers, the size of the module and the job. The bits of a release therefore depend
    neither on workers and memory nor on other groups.
    """
    found = defaultdict(list)
    for place, charged in enumerate(requests):
        found[_key(charged, module)].append(place)
    return list(found.values())


def _key(charged: Charged, module: ClientModule) -> tuple[object, ...]:
    """What the requests of one batch have in common."""
    request = charged.request
    if not isinstance(request, Train) or not may_share(module, request.mechanism, request.steps, request.optimizer):
        return ("alone", charged.client)
    most = max(1, min(MOST_CLIENTS, MOST_BYTES // (8 * module.num_params * request.job.blocks)))
    mechanism = request.mechanism
    return charged.client // most, id(request.model), mechanism.clip_norm, mechanism.clip_order


def releases(engine: SerialEngine, batch: Sequence[Charged]) -> list[Any]:
    """The release of each client of one of the `groups` that may share a batch, or the error by which it fails.

    If the batch fails, its clients are trained one by one. Raises the error of the batch if no client fails alone.

    **Privacy** The failed batch has released nothing, so that only the second noise and draw of a client are seen.
    """
    try:
        return of_a_batch(engine, batch)
    except UserError:
        raise
    except Exception as error:  # a user's model and records may raise anything
        if len(batch) == 1:
            return [error]
        released = [engine.attempt(charged) for charged in batch]
        if not any(isinstance(one, Exception) for one in released):
            raise
        return released


@torch.no_grad()  # in any thread
def of_a_batch(engine: SerialEngine, batch: Sequence[Charged]) -> list[Tensor]:
    """The releases of clients that may share a batch, also of one alone: its bits are those among others."""
    clients = [engine.clients.client(charged.client) for charged in batch]
    requests = [charged.request for charged in batch if isinstance(charged.request, Train)]
    numbers = [charged.number for charged in batch]
    tasks, starts, drawn = zip(*map(engine.local_task, clients, requests, numbers), strict=True)
    xs, ys = zip(*(batches[0] for batches in drawn), strict=True)
    job = requests[0].job
    x, y, num_rows = joined(xs), torch.cat(ys), job.blocks
    owner = torch.repeat_interleave(torch.arange(len(clients)), torch.tensor([len(labels) for labels in ys]))
    owner = sent(owner, y.device)
    params = engine.module.unflatten(starts[0])
    clip_norm, group, parameters = requests[0].sampler().clip_norm, owner, None
    if isinstance(job, ClassGradients):
        x, group, parameters = job.augmented(x, y, engine.checked.passes.rows), owner * num_rows + y, job.parameters
    request = ClipRequest(clip_norm, tasks[0].mechanism.clip_order, group, len(clients) * num_rows, parameters)
    with tensors_restored(engine.module.net):
        sums, norms = engine.clipped_sum(params, x, y, request)
    parts = zip(tasks, starts, sums.split(num_rows), ys, clients, strict=True)
    if isinstance(job, ClassGradients):
        released = [
            task.class_gradients(job, clipped, start.dtype, labels, client.records.labels)
            for task, start, clipped, labels, client in parts
        ]
    else:
        released = [
            dp_step(task, clipped, start, functools.partial(Tensor.mul_, other=-task.learning_rate))
            for task, start, clipped, _, _ in parts
        ]
    for client, task in zip(clients, tasks, strict=True):
        client.keep(task.kept)
    counts = count_outcomes(norms, clip_norm)
    of_client = counts.new_zeros(len(clients), counts.shape[1]).index_add_(0, owner, counts)
    engine.clients.count_gradients(clients, of_client)
    return released
