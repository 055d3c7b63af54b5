"""Threads side by side on the cores of a CPU, which decide how many threads torch has within an operator."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Found = TypeVar("Found")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_pool(count: int, name: str, threads_within: int) -> ThreadPoolExecutor:
    """`count` threads, each with `threads_within` an operator, from its first operator on.

    Without a word a new thread takes what torch was told elsewhere only once an operator asks for it. Until then a
    convolution takes every core, and a kernel's gradient has other last bits: which thread gets which work would decide
    them. All are started here, not later, since the same call also says what threads of others begin with.
    """
    pool = ThreadPoolExecutor(count, name, initializer=torch.set_num_threads, initargs=(threads_within,))
    everybody = threading.Barrier(count)
    list(pool.map(lambda _: everybody.wait(), range(count)))
    return pool


@contextmanager
def one_thread_an_operator() -> Iterator[None]:
    """Small operators gain more from threads side by side than from threads within; and the latter decide bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(work: Callable[[Item], Found], items: Sequence[Item], workers: int | None = None) -> list[Found]:
    """`work` of every item, in their order; `workers` at a time (None: as many as there are cores), each in a thread.

    **Guarantees** No number of workers changes a bit.
    """
    workers = workers or cores()
    with one_thread_an_operator():
        if workers == 1 or len(items) == 1:
            return list(map(work, items))
        return list(_server_threads(workers).map(work, items))


@functools.cache
def _server_threads(count: int) -> ThreadPoolExecutor:
    """They stay: to start them costs more than a small step."""
    return thread_pool(count, "server", threads_within=1)
