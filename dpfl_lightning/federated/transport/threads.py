"""The clients of this process: copies of one engine compute for several of them at the same time."""

import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.engines.engine import Engine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.inbox import Inbox
from dpfl_lightning.federated.messages.requests import Charged, Train
from dpfl_lightning.models.model import forward_chunk
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.runtime.threads import cores, thread_pool

T = TypeVar("T")


class Threads:
    """The `Channel` to clients in this process: `engine.workers` threads, each with a copy of the engine.

    **Guarantees** Their number does not change a bit: a client's release depends on its random streams only, and the
    number of threads within an operator on cores and clients only.
    """

    description = ""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, module: ClientModule, clients: HeldClients, work: Callable[[], T]) -> T:
        return work()

    def setup(self, module: ClientModule, clients: HeldClients, streams: Streams, sampling: str) -> None:
        self.engine.setup(module, clients, streams, sampling)
        at_once = self.engine.workers or (cores() if module.device.type == "cpu" else 1)
        self.workers = max(1, min(at_once, len(clients.numbers)))
        self._engines: queue.SimpleQueue[Engine] = queue.SimpleQueue()
        self._engines.put(self.engine)
        for _ in range(self.workers - 1):
            self._engines.put(self.engine.copy())
        self._pool: ThreadPoolExecutor | None = None  # later: rank 0 says how many threads are within an operator

    def send(self, requests: Sequence[Charged], inbox: Inbox) -> None:
        batches = sorted(self.engine.batches(requests), key=lambda places: -_steps(requests[places[0]]))

        def work(engine: Engine, number: int) -> list[Any]:
            return engine.compute([requests[place] for place in batches[number]])

        for number, replies in self._side_by_side(work, range(len(batches))):
            for place, reply in zip(batches[number], replies, strict=True):
                inbox.receive(requests[place].client, reply)

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        chunk = forward_chunk(model.device)
        parts = rows.split(-(-len(rows) // self.workers // chunk) * chunk or len(rows))
        done = self._side_by_side(lambda engine, part: engine.outputs(model, parts[part]), range(len(parts)))
        return torch.cat([output for _, output in sorted(done, key=itemgetter(0))])

    def personalised(self, model: Tensor, client: int) -> Tensor:
        return self.engine.personalised(model, client)

    def _side_by_side(self, work: Callable[[Engine, int], T], numbers: Sequence[int]) -> Iterator[tuple[int, T]]:
        """Yield `work(engine, number)` for all numbers as they finish; few are started ahead, so few results wait."""
        if self.workers == 1:
            for number in numbers:
                yield number, work(self.engine, number)
            return

        def with_engine(number: int) -> T:
            engine = self._engines.get()
            try:
                return work(engine, number)
            finally:
                self._engines.put(engine)

        if self._pool is None:
            self._pool = thread_pool(self.workers, "client", torch.get_num_threads())
        pool = self._pool
        running: dict[Future[T], int] = {}
        waiting = iter(numbers)
        try:
            while True:
                for number in itertools.islice(waiting, 2 * self.workers - len(running)):
                    running[pool.submit(with_engine, number)] = number
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for task in done:
                    yield running.pop(task), task.result()
        finally:
            for task in running:
                task.cancel()
            wait(running)  # their passes swap the parameters of the module


def _steps(charged: Charged) -> int:
    return charged.request.steps if isinstance(charged.request, Train) else 1
