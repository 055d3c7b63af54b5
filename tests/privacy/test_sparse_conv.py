"""The backward pass for gradients that are mostly zeros against torch's, record by record."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpfl_lightning.kernels import sparse_conv
from dpfl_lightning.privacy.clipping import layer_rules
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest

pytestmark = pytest.mark.usefixtures("code_was_read")  # of rules, and of trials of code

KERNELS = [(2, 2, 16), (4, 1, 40), (5, 5, 1)]  # few: each is compiled, in a second


def true_gradients(layer: nn.Conv2d, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, one record after the other."""
    form = (layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups, [True, True, False])
    weight = layer.weight.detach().double()
    both = [
        torch.ops.aten.convolution_backward(dy[i : i + 1].double(), x[i : i + 1].double(), weight, None, *form)
        for i in range(len(x))
    ]
    return torch.stack([dw for _, dw, _ in both]), torch.cat([dx for dx, _, _ in both])


def case(kernel, records, outputs, size, stride, padding, density, seed=0, channels_last=True):
    torch.manual_seed(seed)
    rows, columns, channels = kernel
    layer = nn.Conv2d(channels, outputs, (rows, columns), stride=stride, padding=padding)
    x = torch.randn(records, channels, *size)
    dy = torch.randn_like(layer(x)).detach()
    dy[torch.rand(dy.shape) >= density] = 0.0
    form = torch.channels_last if channels_last else torch.contiguous_format
    return layer, x.contiguous(memory_format=form), dy.contiguous(memory_format=form)


@pytest.mark.e2e
@given(
    kernel=st.sampled_from(KERNELS),
    records=st.integers(1, 4),
    outputs=st.sampled_from([16, 32, 48]),
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    density=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    channels_last=st.booleans(),
    need_dx=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_both_gradients_are_torchs(
    kernel, records, outputs, size, stride, padding, density, channels_last, need_dx, seed
):
    layer, x, dy = case(kernel, records, outputs, size, stride, padding, density, seed, channels_last)
    dw, db, dx = sparse_conv.sparse_backward(layer, layer.weight, x, dy, need_dx)
    true_dw, true_dx = true_gradients(layer, x, dy)
    torch.testing.assert_close(dw.permute(0, 1, 4, 2, 3).double(), true_dw, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(db, dy.sum(dim=(2, 3)), rtol=1e-5, atol=1e-5)
    assert (dx is None) == (not need_dx)
    if dx is not None:
        torch.testing.assert_close(dx.double(), true_dx, rtol=1e-5, atol=1e-4)


@pytest.mark.e2e
def test_what_is_not_a_number_stays_with_its_record():
    """Clipping drops such a record; it must neither be missed nor reach another one."""
    layer, x, dy = case((2, 2, 16), 3, 16, (5, 5), (1, 1), (1, 1), 0.3)
    clean, _, _ = sparse_conv.sparse_backward(layer, layer.weight, x, dy, need_dx=False)
    dy[1, 4, 2, 2] = float("nan")
    dw, _, dx = sparse_conv.sparse_backward(layer, layer.weight, x, dy, need_dx=True)
    assert bool(dw[1].isnan().any()) and bool(dx[1].isnan().any())
    assert torch.equal(dw[[0, 2]], clean[[0, 2]]) and bool(dx[[0, 2]].isfinite().all())


@pytest.mark.e2e
@pytest.mark.parametrize("first", [0.0, 100.0, 1e30, float("nan"), float("inf")])
def test_no_record_chooses_the_algorithm_or_moves_the_sum_of_the_others(first, monkeypatch):
    """Random records decide when the sum is built. Else a record would show in the time, and in others' last bits."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8 * 8, 10))
    nn.init.constant_(net[0].bias, -1.0)  # hardly any activation of a usual record, half of them of a large one
    x, y, group = torch.randn(40, 1, 12, 12), torch.randint(10, (40,)), (torch.arange(40) == 0).long()
    clipped_sum, reason = clipped_sum_for(net, None, x[:0], y[:0])
    assert reason.startswith("fast")
    chosen, really = [], sparse_conv.sparse_backward
    monkeypatch.setattr(sparse_conv, "sparse_backward", lambda *args: chosen.append(args[0]) or really(*args))
    params, passes = {name: p.detach() for name, p in net.named_parameters()}, []
    for first_record in (x[:1], torch.full_like(x[:1], first)):
        chosen.clear()
        sums, _ = clipped_sum(params, torch.cat([first_record, x[1:]]), y, ClipRequest(1.0, 2, group, 2))
        passes.append((sums[0], list(chosen)))
    (usual, layers), (changed, other_layers) = passes
    assert layers and layers == other_layers
    assert torch.equal(usual, changed) and bool(usual.any())


def test_other_cases_take_the_dense_way():
    layer, images, gradient = case((5, 5, 16), 2, 16, (8, 8), (1, 1), (2, 2), 0.2)
    assert sparse_conv.suits(layer, images) and not sparse_conv.suits(layer, images[:0])
    for why, other, x, dy in [
        ("float64", copy.deepcopy(layer).double(), images.double(), gradient.double()),
        ("groups", nn.Conv2d(16, 16, 5, padding=2, groups=2), images, gradient),
        ("dilation", nn.Conv2d(16, 16, 5, padding=4, dilation=2), images, gradient),
        ("outputs", nn.Conv2d(16, 12, 5, padding=2), images, gradient[:, :12]),
        ("small windows", nn.Conv2d(3, 16, 1), images[:, :3], gradient),
    ]:
        assert not sparse_conv.suits(other, x), why
        by_name, dx = layer_rules.conv2d_backward(
            other, dict(other.named_parameters()), other.weight.detach(), x, dy, True, True, None, len(x)
        )
        true_dw, true_dx = true_gradients(other, x, dy)
        grads = by_name["weight"]
        totals = torch.zeros(len(x), other.weight.numel(), dtype=torch.float64)
        grads.add(totals, torch.ones(len(x), dtype=torch.float64), torch.arange(len(x)))
        torch.testing.assert_close(
            layer_rules.arranged(totals, grads.shape, grads.order).flatten(1), true_dw.flatten(1), rtol=1e-5, atol=1e-3
        )
        torch.testing.assert_close(dx.double(), true_dx, rtol=1e-5, atol=1e-4)


def test_loops_that_go_wrong_are_refused(monkeypatch):
    from dpfl_lightning.kernels import windows

    monkeypatch.setattr(
        windows, "convolution_backward", lambda rows, run: lambda x, dy, w, dw, dx, *sizes: dw.fill(0.0)
    )
    with pytest.raises(RuntimeError, match="wrong numbers on this processor"):
        sparse_conv._loops.__wrapped__(2, 2, 16)
