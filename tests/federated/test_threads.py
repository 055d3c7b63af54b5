"""Threads of a pool compute as the main thread does: the last bits of a result do not tell who worked on it."""

import pytest
import torch
from conftest import blobs

from dpfl_lightning.federated.client.engines import one_batch
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.runtime.threads import cores

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
