"""The default engine: exact per-record gradients by layer rules, and optimisers on one flat vector."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.config.options import EngineOptions
from dpfl_lightning.errors import require
from dpfl_lightning.federated.client.client import Client, HeldClients
from dpfl_lightning.federated.client.dummy_data import dummy_units
from dpfl_lightning.federated.client.engines import one_batch
from dpfl_lightning.federated.client.engines.serial import DrawnBatches, SerialEngine
from dpfl_lightning.federated.client.engines.unclipped import quicker_without_clipping
from dpfl_lightning.federated.client.module import ClientModule, LocalTask, StepOptimizer, dp_step
from dpfl_lightning.federated.messages.requests import Charged, Train
from dpfl_lightning.privacy.clipping.checked import CheckedSum, clipped_sum_for
from dpfl_lightning.privacy.clipping.float64_sums import summing_dtype
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.privacy.clipping.restored import tensors_restored
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.runtime.memory import keep_freed_memory
from dpfl_lightning.runtime.threads import cores

#: what a user reads behind the reason of a slower way
_FASTER = {
    "vmap": "; without this cause exact rules are faster",
    "loop": "; one record at a time is slowest, and without this cause exact rules or vmap are faster",
}


class FastEngine(SerialEngine):
    """Trains on one flat vector of parameters, `workers` clients at the same time (None: one a core, one on a GPU).

    Layer rules are used if they reproduce the loop of autograd for this model on random data, else `vmap(grad)` or the
    loop; `description` says which. On a CPU the process keeps freed memory for the next step (at most 512 MiB).

    **Guarantees** The number of workers does not change a bit: a client's release depends on its random streams only,
    and the number of threads within an operator on cores and clients only.
    """

    name = "fast"
    description = ""

    def __init__(self, workers: int | None = None) -> None:
        require(workers is None or workers >= 1, "engine.workers", "be >= 1", workers)
        self.workers = workers

    @classmethod
    def of(cls, options: EngineOptions) -> FastEngine:
        cls.require_no_trainer(options)
        return cls(options.workers)

    def setup(self, module: ClientModule, clients: HeldClients, streams: Streams, sampling: str) -> None:
        on_cpu = module.device.type == "cpu"
        if on_cpu:  # as if every core had a worker: the bits then do not depend on how many there are
            torch.set_num_threads(max(1, cores() // clients.count))
            keep_freed_memory()
        super().setup(module, clients, streams, sampling)
        self.clipped_sum = quicker_without_clipping(self.checked, module)
        self._sums: Tensor | None = None  # kept for the next step, because new memory takes longer than the sum
        self._step: Tensor | None = None
        if on_cpu and not module.large:  # compiles loops: not in several threads at once, nor in some client's time
            example = dummy_units(clients.population, 8, module.device)
            with tensors_restored(module.net):
                self.clipped_sum(module.unflatten(module.flat), *example, ClipRequest(1.0))

    def choose_clipped_sum(self) -> CheckedSum:
        x, y = dummy_units(self.clients.population, 4, self.module.device)
        clipped_sum, reason = clipped_sum_for(self.module.net, self.module.sample_loss, x, y)
        how, _, words = reason.partition(": ")
        advice = _FASTER.get(how, "")
        self.description = (words if how == "fast" else reason) + advice
        return clipped_sum

    def batches(self, requests: Sequence[Charged]) -> list[list[int]]:
        return one_batch.groups(requests, self.module)

    def compute(self, batch: Sequence[Charged]) -> list[Any]:
        request = batch[0].request
        if isinstance(request, Train) and self.may_share(request):
            return one_batch.releases(self, batch)
        return super().compute(batch)

    def local_training(self, client: Client, task: LocalTask, start: Tensor, batches: DrawnBatches) -> Tensor:
        theta = start.clone()
        params = self.module.unflatten(theta)  # views: they follow theta
        plain = self.module.plain_sgd(task.optimizer)
        descend: Callable[[Tensor], object] = functools.partial(theta.add_, alpha=-task.learning_rate)
        move = descend if plain else StepOptimizer(self.module, task, theta).step_by
        if self._sums is None:
            self._sums = torch.empty_like(theta[None], dtype=summing_dtype(theta))
            self._step = torch.empty_like(theta[None])
        request = ClipRequest(task.mechanism.clip_norm, task.mechanism.clip_order, into=self._sums)
        for x, y in batches:
            dp_step(task, task.sum_of(params, x, y, request), theta, move, self._step)
        return theta
