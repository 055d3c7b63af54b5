"""Threads of a pool compute as the main thread does: the last bits of a result do not tell who worked on it."""

import threading

import pytest
import torch
from conftest import blobs

from dpfl_lightning.federated.client.engines import one_batch
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.runtime.threads import cores, one_thread_an_operator, side_by_side, thread_pool

several_cores = pytest.mark.skipif(
    min(cores(), torch.get_num_threads()) < 2, reason="every thread has one within, on one core or by OMP_NUM_THREADS"
)


def kernel_gradient() -> torch.Tensor:
    """Its last bits depend on how many threads there are within the operator."""
    generator = torch.Generator().manual_seed(0)
    x, kernel, dy = (torch.randn(shape, generator=generator) for shape in ((12, 4, 8, 8), (4, 4, 3, 3), (12, 4, 8, 8)))
    one = [1, 1]
    return torch.ops.aten.convolution_backward(
        dy, x, kernel, None, one, one, one, False, [0, 0], 1, [False, True, False]
    )[1]


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@several_cores
def test_threads_of_a_pool_have_as_many_within_as_they_are_told():
    def threads_within() -> int:
        return torch.get_num_threads()

    assert not torch.equal(in_a_thread(kernel_gradient), kernel_gradient()), (
        "torch sets new threads: drop `thread_pool`"
    )
    for count in (1, 2, 1):
        with thread_pool(2, "some", threads_within=count) as pool:
            assert [pool.submit(threads_within).result() for _ in range(3)] == [count] * 3
            assert len(pool._threads) == 2
    with thread_pool(1, "some", threads_within=1) as pool:
        assert torch.equal(pool.submit(kernel_gradient).result(), kernel_gradient())
    with one_thread_an_operator():
        expected = kernel_gradient()
    assert all(torch.equal(found, expected) for found in side_by_side(lambda _: kernel_gradient(), range(2 * cores())))


@several_cores
@pytest.mark.parametrize("workers", [1, 2])
def test_clients_are_trained_with_the_main_threads_bits(workers, make_loop, monkeypatch):
    seen, releases = [], one_batch.releases

    def telling(*args):
        seen.append(kernel_gradient())
        return releases(*args)

    monkeypatch.setattr(one_batch, "releases", telling)
    make_loop(population=blobs(num_clients=2 * cores()), privacy=None, engine=FastEngine(workers), rounds=2).run()
    assert len(seen) >= 2 and all(torch.equal(found, kernel_gradient()) for found in seen)
