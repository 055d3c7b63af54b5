"""Records whose positions cancel in a gradient: rounding must not make them look shorter than what they add."""

from __future__ import annotations

import pytest
import torch
from reference import summed
from torch import nn

from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.layer_rules import Lookup, Outer
from dpfl_lightning.privacy.clipping.reference import CANCELLING

OFFSETS = [0.0, 10.0, 1e3, 1e5]


class SequenceNet(nn.Module):
    """The norm takes the mean over positions away, so that the gradients of its inputs add up to zero over them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.GroupNorm(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x).mT)).mean(dim=2))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("contrast", [1.0, 1e-3])
@pytest.mark.parametrize("offset", OFFSETS)
def test_a_record_adds_no_more_than_the_clip_norm(offset, contrast, order):
    torch.manual_seed(0)
    net = SequenceNet()
    with torch.no_grad():
        net.first.weight.mul_(0.01)
    params = {name: one.detach() for name, one in net.named_parameters()}
    x, y, each = offset + contrast * torch.randn(20, 8, 64), torch.arange(20) % 10, torch.arange(20)
    added = summed(FastClippedSum(net), params, x, y, 1e-2, each, 20, order=order)
    assert torch.linalg.vector_norm(added.double(), ord=order, dim=1).max() <= 1e-2 * (1 + 1e-5)


def outer(positions, offset):
    left = torch.randn(9, positions, 12)
    return Outer(left - left.mean(dim=1, keepdim=True), offset + torch.randn(9, positions, 30) / 100)


def lookup(positions, offset):
    dy = offset * torch.randn(9, positions, 12)
    return Lookup.merged(torch.randint(2, (9, positions)), dy - dy.mean(dim=1, keepdim=True), rows=2)


def each(grads):
    """The nine gradients in full."""
    totals = torch.zeros(9, 24 if isinstance(grads, Lookup) else 360, dtype=torch.float64)
    grads.add(totals, torch.ones(9, dtype=torch.float64), torch.arange(9))
    return grads.arranged(totals).flatten(1)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("positions", [2, 7, 40])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("make", [outer, lookup])
def test_norms_are_never_below_what_is_summed(make, offset, positions, order):
    torch.manual_seed(0)
    grads = make(positions, offset).measurable(order)
    summed = torch.linalg.vector_norm(each(grads), ord=order, dim=1)
    assert (grads.norms(order) >= summed * (1 - 1e-12)).all()


def test_norms_are_hardly_larger_where_positions_are_unrelated():
    torch.manual_seed(0)
    left, right, ids = torch.randn(9, 40, 12), torch.randn(9, 40, 30), torch.randint(2, (9, 40))
    for grads in (Outer(left, right), Lookup.merged(ids, left, rows=2)):
        assert torch.allclose(grads.norms(), each(grads).norm(dim=1), rtol=2e-4)


def test_the_terms_of_a_sum_exceed_its_norm_by_no_more_than_the_bound_on_rounding_allows():
    grads = outer(40, 1e5)
    terms = torch.linalg.vector_norm(grads.left, dim=2) * torch.linalg.vector_norm(grads.right, dim=2)
    assert (terms.double().sum(dim=1) <= CANCELLING * (1 + 1e-5) * grads.norms()).all()
