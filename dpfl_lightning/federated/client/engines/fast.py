"""The default engine: exact per-record gradients by layer rules, and optimisers on one flat vector."""

import copy
import functools
import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpfl_lightning.data import Population
from dpfl_lightning.errors import require
from dpfl_lightning.federated.client.client import Client, HeldClients
from dpfl_lightning.federated.client.dummy_data import dummy_units
from dpfl_lightning.federated.client.engines import one_batch
from dpfl_lightning.federated.client.engines.serial import DrawnBatches, SerialEngine
from dpfl_lightning.federated.client.engines.unclipped import quicker_without_clipping
from dpfl_lightning.federated.client.module import ClientModule, LocalTask, StepOptimizer, dp_step
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.federated.messages.requests import Ask, Train
from dpfl_lightning.models.model import forward_chunk
from dpfl_lightning.privacy.clipping.checked import CheckedSum, clipped_sum_for
from dpfl_lightning.privacy.clipping.float64_sums import summing_dtype
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.privacy.clipping.state import tensors_restored
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.runtime.memory import keep_freed_memory
from dpfl_lightning.runtime.threads import cores, thread_pool

T = TypeVar("T")

#: what a user reads behind the reason of a slower way
_FASTER = {
    "vmap": "; without this cause exact rules are faster",
    "loop": "; one record at a time is slowest, and without this cause exact rules or vmap are faster",
}


class FastEngine(SerialEngine):
    """Trains `workers` clients at the same time (None: one a core, one on a GPU), on one flat vector of parameters.

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

    def setup(
        self,
        module: ClientModule,
        population: Population,
        streams: Streams,
        sampling: str,
        clients: HeldClients | None = None,
    ) -> None:
        on_cpu, clients = module.device.type == "cpu", clients or HeldClients(population)
        self.workers = min(self.workers or (cores() if on_cpu else 1), len(clients.numbers))
        if on_cpu:  # as if every core had a worker: the bits then do not depend on how many there are
            torch.set_num_threads(max(1, cores() // clients.count))
            keep_freed_memory()
        super().setup(module, population, streams, sampling, clients)
        self.clipped_sum = quicker_without_clipping(self.checked, module)
        self._sums: Tensor | None = None  # kept for the next step, because new memory takes longer than the sum
        self._step: Tensor | None = None
        if on_cpu and not module.large:  # compiles loops: not in several threads at once, nor in some client's time
            example = dummy_units(population, 8, module.device)
            with tensors_restored(module.net):
                self.clipped_sum(module.unflatten(module.flat), *example, ClipRequest(1.0))
        self._seats: queue.SimpleQueue[SerialEngine] = queue.SimpleQueue()
        self._seats.put(self)
        for _ in range(self.workers - 1):
            seat = copy.copy(self)
            seat.module = copy.deepcopy(module)  # a forward pass swaps parameters and adds hooks
            seat.clipped_sum = self.clipped_sum.copy_for(seat.module.net, seat.module.sample_loss)
            self._seats.put(seat)
        self._pool: ThreadPoolExecutor | None = None  # later: rank 0 says how many threads are within an operator

    def choose_clipped_sum(self) -> CheckedSum:
        x, y = dummy_units(self.population, 4, self.module.device)
        clipped_sum, reason = clipped_sum_for(self.module.net, self.module.sample_loss, x, y)
        how, _, words = reason.partition(": ")
        advice = _FASTER.get(how, "")
        self.description = (words if how == "fast" else reason) + advice
        return clipped_sum

    def releases(
        self, plan: RoundPlan, models: Tensor, charge_numbers: Sequence[int]
    ) -> Iterator[tuple[int, Tensor | None]]:
        groups = sorted(one_batch.groups(plan, self.module), key=lambda rows: -plan.steps[rows[0]])
        done = self._side_by_side(
            lambda seat, number: one_batch.releases(seat, plan, groups[number], models, charge_numbers),
            range(len(groups)),
        )
        for number, released in done:
            yield from zip(groups[number], released, strict=True)

    def ask(self, query: ChargedQuery, round: int, charge_numbers: Sequence[int]) -> Answers:
        self.failed.clear()

        def work(seat: SerialEngine, row: int) -> object:
            client = seat.clients.client(query.clients[row])
            return seat.attempt(client.number, seat.answer, client, query, round, charge_numbers[row])

        done = self._side_by_side(work, range(len(charge_numbers)))
        answers = {query.clients[row]: answer for row, answer in sorted(done, key=itemgetter(0))}
        return {client: answer for client, answer in answers.items() if client not in self.failed}

    def carry_out(self, client: Client, request: Train | Ask, charge_number: int) -> Any:
        def work(seat: SerialEngine, _: int) -> Any:
            if isinstance(request, Train) and seat.may_share(request):
                return one_batch.of_a_batch(seat, [client], [request], [charge_number])[0]
            return SerialEngine.carry_out(seat, client, request, charge_number)

        ((_, released),) = self._side_by_side(work, range(1))
        return released

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        chunk = forward_chunk(model.device)
        parts = rows.split(-(-len(rows) // (self.workers or 1) // chunk) * chunk or len(rows))
        done = self._side_by_side(lambda seat, part: SerialEngine.outputs(seat, model, parts[part]), range(len(parts)))
        return torch.cat([output for _, output in sorted(done, key=itemgetter(0))])

    def _side_by_side(self, work: Callable[[SerialEngine, int], T], numbers: Sequence[int]) -> Iterator[tuple[int, T]]:
        """Yield `work(seat, number)` for all numbers as they finish; few are started ahead, so few results wait."""

        def seated(number: int) -> T:
            seat = self._seats.get()
            try:
                return work(seat, number)
            finally:
                self._seats.put(seat)

        if self._pool is None:
            self._pool = thread_pool(self.workers or 1, "client", torch.get_num_threads())
        pool = self._pool
        running: dict[Future[T], int] = {}
        waiting = iter(numbers)
        try:
            while True:
                for number in itertools.islice(waiting, 2 * (self.workers or 1) - len(running)):
                    running[pool.submit(seated, number)] = number
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for task in done:
                    yield running.pop(task), task.result()
        finally:
            for task in running:
                task.cancel()
            wait(running)  # their passes swap the parameters of the module

    def local_training(self, task: LocalTask, start: Tensor, batches: DrawnBatches) -> Tensor:
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
