"""Thread pools on the cores of a CPU, with a defined number of threads within each torch operator."""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_pool(count: int, name: str, threads_within: int) -> ThreadPoolExecutor:
    """Return a pool of `count` threads, each of which uses `threads_within` threads within an operator.

    The number is set in each thread before its first operator, because last bits depend on it. All threads are started
    here, because the same call also sets the number with which other new threads start.
    """
    pool = ThreadPoolExecutor(count, name, initializer=torch.set_num_threads, initargs=(threads_within,))
    barrier = threading.Barrier(count)
    list(pool.map(lambda _: barrier.wait(), range(count)))
    return pool


@contextmanager
def one_thread_an_operator() -> Iterator[None]:
    """Use one thread within an operator, because the number of threads affects bits."""
    before = torch.get_num_threads()
    if before > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before > 1:
            torch.set_num_threads(before)


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], workers: int | None = None) -> list[Result]:
    """Return `work` of every item, computed by `workers` threads (None: one per core).

    **Guarantees** The result has the same bits for any number of workers.
    """
    workers = workers or cores()
    with one_thread_an_operator():
        if workers == 1 or len(items) == 1:
            return list(map(work, items))
        return list(_server_threads(workers).map(work, items))


@functools.cache
def _server_threads(count: int) -> ThreadPoolExecutor:
    """Return a pool that is kept, because starting threads costs more than a small step."""
    return thread_pool(count, "server", threads_within=1)
