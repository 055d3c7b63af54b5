"""A server's own work on several cores of a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from dpfl_lightning.federated.fast import cores

Item = TypeVar("Item")
Found = TypeVar("Found")


@contextmanager
def one_thread_an_operator() -> Iterator[None]:
    """Small operators gain more from threads side by side than from threads within; and the latter decide bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(work: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """`work` of every item, in their order; as many at a time as there are cores, in threads of their own.

    **Guarantees** No number of cores changes a bit.
    """
    with one_thread_an_operator():
        return list(_threads(cores()).map(work, items))


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    """They stay, each with one thread in an operator: to start them costs more than a small step."""
    return ThreadPoolExecutor(count, thread_name_prefix="server")
