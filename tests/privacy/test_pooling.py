"""ReLU with max-pooling, and convolutions in front of them, against torch's operators."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpfl_lightning.kernels import pool_loops, pooling, sparse_conv
from dpfl_lightning.privacy.clipping.convolutions import spread


def numbers(records, channels, height, width, dtype=torch.float32):
    """Few values, so that most windows have ties; some are not finite."""
    torch.manual_seed(records + channels + height)
    y = torch.randint(-2, 3, (records, channels, height, width)).to(dtype)
    y[torch.rand(y.shape) < 0.1] = math.nan
    y[torch.rand(y.shape) < 0.1] = math.inf
    y[torch.rand(y.shape) < 0.1] = -0.0
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("channels_last", [True, False])
def test_pooled_map_and_its_gradient_are_torchs(dtype, channels_last):
    for records, height, width in [(3, 4, 6), (1, 2, 2), (2, 5, 7), (1, 3, 2), (0, 4, 4)]:
        for channels in (1, 6, 16):
            y = numbers(records, channels, height, width, dtype)
            y = y.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
            pooled, winners = pooling.max_relu(y)
            dy = torch.randn_like(pooled)
            gradient = spread(dy, winners, (height, width))
            for order in (lambda y: F.max_pool2d(y.relu(), 2), lambda y: F.max_pool2d(y, 2).relu()):
                y.requires_grad_()
                expected = order(y)
                torch.testing.assert_close(pooled, expected.detach(), rtol=0, atol=0, equal_nan=True)
                assert torch.equal(gradient, torch.autograd.grad(expected, y, dy)[0])
                y.requires_grad_(False)


def test_maps_too_small_for_a_window_raise_torchs_error():
    with pytest.raises(RuntimeError, match="Output size is too small"):
        pooling.max_relu(torch.zeros(2, 8, 1, 5))


@pytest.mark.e2e
@pytest.mark.parametrize("channels", [1, 16])
@pytest.mark.parametrize("outputs", [5, 32])
def test_convolution_in_front_of_winners_equals_the_one_in_front_of_their_gradient(channels, outputs):
    """Odd maps lose their last row and column, and what is not a number stays with its record."""
    kernel = {1: (5, 5), 16: (2, 2)}[channels]
    for size, stride, padding in [((9, 8), (1, 1), (0, 0)), ((8, 11), (1, 2), (2, 1)), ((13, 10), (2, 1), (1, 2))]:
        layer = nn.Conv2d(channels, outputs, kernel, stride=stride, padding=padding)
        x = torch.randn(3, channels, *size).contiguous(memory_format=torch.channels_last)
        y = layer(x).detach()
        winners = torch.randint(0, 5, (3, y.shape[2] // 2, y.shape[3] // 2, outputs), dtype=torch.uint8)
        dy = torch.randn(3, outputs, *winners.shape[1:3])
        dw, db, dx = sparse_conv.sparse_backward(layer, layer.weight, x, dy, need_dx=True, winners=winners)
        wide_dy, weight = spread(dy, winners, y.shape[2:]), layer.weight.detach()
        for i in range(3):
            form = (stride, padding, (1, 1), False, [0, 0], 1, [True, True, False])
            true_dx, true_dw, _ = torch.ops.aten.convolution_backward(wide_dy[i, None], x[i, None], weight, None, *form)
            torch.testing.assert_close(dw[i].permute(0, 3, 1, 2), true_dw, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(db[i], wide_dy[i].sum(dim=(1, 2)), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(dx[i, None], true_dx, rtol=1e-5, atol=1e-4)
        without, _, none = sparse_conv.sparse_backward(layer, layer.weight, x, dy, need_dx=False, winners=winners)
        assert none is None and torch.equal(without, dw)
        winners[1, 1, 1, 0], dy[1, 0, 1, 1] = 1, math.nan
        bad_dw, _, bad_dx = sparse_conv.sparse_backward(layer, layer.weight, x, dy, need_dx=True, winners=winners)
        assert bad_dw[1].isnan().any() and bad_dx[1].isnan().any()
        assert torch.equal(bad_dw[[0, 2]], dw[[0, 2]]) and torch.equal(bad_dx[[0, 2]], dx[[0, 2]])


def test_loops_that_go_wrong_are_refused(monkeypatch):
    monkeypatch.setattr(pool_loops, "max_relu", lambda y, pooled, winners, *sizes: pooled.fill(0.0))
    with pytest.raises(RuntimeError, match="wrong numbers on this processor"):
        pooling._loops.__wrapped__()
