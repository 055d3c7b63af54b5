"""Instance norm, ReLU and pooling as one operation: torch's numbers and both orders of its derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from dpfl_lightning.kernels import fused_planes, plane_loops
from dpfl_lightning.kernels.fused_planes import FusedPlanes, as_torch, norm_relu_pool

EPS = 1e-5
SHAPES = [(6, 5, 4), (2, 3, 8, 8), (4, 2, 2), (1, 7, 7), (2, 2, 3, 3, 2)]


def some_planes(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in (shape, shape[:-2], shape[:-2])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_both_orders_of_derivatives_are_those_of_finite_differences(shape):
    def operation(*tensors):
        return norm_relu_pool(*tensors, EPS)

    planes = some_planes(shape)
    assert torch.autograd.gradcheck(operation, planes)
    assert torch.autograd.gradgradcheck(operation, planes)
    torch.testing.assert_close(operation(*planes), as_torch(*planes, EPS))


def test_a_finite_difference_finds_a_wrong_second_derivative(monkeypatch):
    right = plane_loops.second_order

    def wrong(*arguments):
        right(*arguments)
        arguments[9][:] *= 1.01  # the slope of y

    monkeypatch.setattr(plane_loops, "second_order", wrong)
    with pytest.raises(Exception, match="mismatch"):
        torch.autograd.gradgradcheck(lambda *own: norm_relu_pool(*own, EPS), some_planes((2, 4, 4)))


def test_loops_that_do_not_reproduce_torchs_numbers_are_not_used(monkeypatch):
    right = plane_loops.forward

    def wrong(*arguments):
        right(*arguments)
        arguments[5][:] += 0.1

    monkeypatch.setattr(plane_loops, "forward", wrong)
    fused_planes._held_to_torch.cache_clear()
    with pytest.raises(RuntimeError, match="wrong norms of planes on this processor"):
        FusedPlanes(nn.GroupNorm(2, 2))
    fused_planes._held_to_torch.cache_clear()


def test_a_plane_of_one_value_and_a_scale_of_zero_are_as_in_torch():
    y, scale, shift = some_planes((3, 4, 4))
    with torch.no_grad():
        y[0], scale[1] = 2.0, 0.0
    own = [
        torch.autograd.grad(operation(y, scale, shift, EPS).square().sum(), (y, scale, shift))
        for operation in (norm_relu_pool, as_torch)
    ]
    for ours, theirs in zip(*own, strict=True):
        torch.testing.assert_close(ours, theirs)
    no_planes = [one.detach()[:0].requires_grad_() for one in (y, scale, shift)]
    assert norm_relu_pool(*no_planes, EPS).shape == (0, 2, 2)


def test_vmap_is_one_more_dimension_of_planes():
    y, scale, shift = (one.detach() for one in some_planes((5, 3, 6, 4)))

    def slope(own, factor):
        return grad(lambda a: norm_relu_pool(a, factor.expand(a.shape[:-2]), shift[0], EPS).sin().sum())(own)

    expected = torch.stack([slope(own, scale[0]) for own in y])
    torch.testing.assert_close(vmap(slope, in_dims=(0, None))(y, scale[0]), expected)
    moved = vmap(slope, in_dims=(2, None), out_dims=2)(y.movedim(0, 2), scale[0])
    torch.testing.assert_close(moved.movedim(2, 0), expected)


def test_a_third_derivative_is_refused():
    y, scale, shift = some_planes((2, 4, 4))
    (first,) = torch.autograd.grad(norm_relu_pool(y, scale, shift, EPS).square().sum(), y, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), y, create_graph=True)
    with pytest.raises(NotImplementedError, match="no third derivative"):
        torch.autograd.grad(second.sum(), y)
