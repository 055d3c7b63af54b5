"""Sums of gradients that nothing clips: the clipped sum's own numbers, sooner; and all else left to it."""

import math

import pytest
import torch
from reference import summed
from torch import nn

from dpfl_lightning import models
from dpfl_lightning.federated.client.engines.unclipped import FEWEST, UnclippedSum
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.models.thread_safe_loss import ThreadSafeLoss
from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.reference import VmapClippedSum

RECORDS = 6 * FEWEST


class Watched(FastClippedSum):
    """Counts how often it is asked."""

    asked = 0

    def __call__(self, *args, **kwargs):
        self.asked += 1
        return super().__call__(*args, **kwargs)


def a_module(**convnet) -> ClientModule:
    return ClientModule(models.build("convnet", (1, 12, 12), 3, width=4, depth=2, **convnet)).double()


def both(module: ClientModule, size: int = 7) -> tuple[UnclippedSum, Watched]:
    inner = Watched(module.net, module.sample_loss, size)
    return UnclippedSum(inner, ThreadSafeLoss(module)), inner


def batch(records: int = RECORDS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(records, 1, 12, 12, generator=generator, dtype=torch.float64)
    return x, torch.arange(records) % 3


@pytest.mark.parametrize("net", [{}, {"pooling": "max"}, {"norm": "none"}], ids=str)
def test_the_sums_are_the_references(net):
    module = a_module(**net)
    (x, y), params = batch(), module.unflatten(module.flat)
    some = [name for name in module.named_trainable if name == "4.weight" or "0." in name]
    for groups in ((None, 1), (2 - y, 4)):  # a fourth group is empty
        for only in (None, some):
            ours, inner = both(module)
            found = summed(ours, params, x, y, math.inf, *groups, only=only)
            expected = summed(VmapClippedSum(module.sample_loss), params, x, y, math.inf, *groups, only=only)
            torch.testing.assert_close(found, expected)
            assert inner.asked == 0 and (groups[0] is None or not found[3].any())


def test_parameters_that_no_loss_reads_have_zeros():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, x):
            return self.used(x)

    module = ClientModule(Half())
    x, y = torch.randn(FEWEST, 2), torch.arange(FEWEST) % 3
    ours, inner = both(module)
    found = module.unflatten(summed(ours, module.named_trainable, x, y, math.inf)[0])
    assert inner.asked == 0 and found["used.weight"].any() and not found["idle.weight"].any()


def test_all_else_is_left_to_the_clipped_sum():
    module = a_module()
    for clip_norm, records, num_groups in ((1.0, RECORDS, 1), (math.inf, 3 * FEWEST - 1, 3), (math.inf, RECORDS, 1)):
        ours, inner = both(module)
        x, y = batch(records)
        if clip_norm == math.inf and num_groups == 1:
            x[5] = math.nan  # a broken record
        norms, expected_norms = [], []
        arguments = (module.named_trainable, x, y, clip_norm, y % num_groups, num_groups)
        found = summed(ours, *arguments, norms=norms)
        assert inner.asked == 1
        expected = summed(FastClippedSum(module.net, module.sample_loss, 7), *arguments, norms=expected_norms)
        assert torch.equal(found, expected) and found.isfinite().all()
        torch.testing.assert_close(norms, expected_norms, equal_nan=True)


def test_sizes_of_passes_change_rounding_only_and_a_copy_gives_the_same_bits():
    module = a_module()
    own = (module.named_trainable, *batch(), math.inf)
    first, second = (both(module, size)[0] for size in (5, 32))
    torch.testing.assert_close(summed(first, *own), summed(second, *own))
    other = a_module()
    other.load_state_dict(module.state_dict())
    assert torch.equal(summed(first.copy_for(other.net, other.sample_loss), *own), summed(first, *own))


def test_threads_change_no_bit():
    module, (x, y), before = a_module(), batch(), torch.get_num_threads()
    for groups in ((None, 1), (y, 3)):
        ours, found = both(module)[0], []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(summed(ours, module.named_trainable, x, y, math.inf, *groups))
        torch.set_num_threads(before)
        assert ours._pool is not None and torch.equal(*found)
