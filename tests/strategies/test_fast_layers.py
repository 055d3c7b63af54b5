"""Faster layers for the server's work: the numbers and both orders of derivatives of the net as it is."""

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from dpfl_lightning import models
from dpfl_lightning.algorithms.gradient_matching import Matching, class_by_class, fastest_class_gradients
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.kernels import fused_planes, plane_loops
from dpfl_lightning.kernels.fused_planes import FusedPlanes, as_torch, norm_relu_pool
from dpfl_lightning.models.fast_loss import FastLoss
from dpfl_lightning.runtime.threads import side_by_side


def like(shape, labels=torch.long):
    """No records of that shape, and no labels of that type."""
    return torch.empty(0, *shape), torch.empty(0, dtype=labels)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("at_once", ["vmap", "loop"])
@pytest.mark.parametrize("distance", ["layerwise_cosine", "mse"])  # mse reads the norms' parameters, too
def test_matching_moves_images_as_without_fusion(depth, at_once, distance):
    shape, generator = (2, 14, 14), torch.Generator().manual_seed(1)
    module = ClientModule(models.build("convnet", shape, 3, width=4, depth=depth)).double()
    params = module.unflatten(module.flat)
    names = tuple(params)
    images, classes = torch.randn(3, 2, *shape, generator=generator, dtype=torch.float64), torch.arange(3)
    target = {name: torch.randn(3, *params[name].shape, generator=generator, dtype=torch.float64) for name in names}
    fused = FastLoss(module, *like(shape))
    assert "FusedPlanes" in str(fused.module.net) and "FusedPlanes" not in str(module.net)
    gradients = fastest_class_gradients(fused, params, names, shape) if at_once == "vmap" else class_by_class
    found = [
        Matching(loss, names, distance, 0.1, 0.5, by).slope(images, classes, params, target)
        for loss, by in ((fused, gradients), (module.sample_loss, class_by_class))
    ]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def layers(channels):
    return nn.Sequential(nn.GroupNorm(channels, channels), nn.ReLU(), nn.AvgPool2d(2))


class OwnNorm(nn.GroupNorm):
    pass


NORM, POOL = nn.GroupNorm(2, 2), nn.AvgPool2d(2)
OTHER = {
    "groups of channels": nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(), POOL),
    "other activation": nn.Sequential(NORM, nn.Sigmoid(), POOL),
    "other pooling": nn.Sequential(NORM, nn.ReLU(), nn.MaxPool2d(2)),
    "no pooling": nn.Sequential(NORM, nn.ReLU()),
    "no parameters": nn.Sequential(nn.GroupNorm(2, 2, affine=False), nn.ReLU(), POOL, nn.Linear(1, 1)),
    "stride": nn.Sequential(NORM, nn.ReLU(), nn.AvgPool2d(2, stride=1)),
    "padding": nn.Sequential(NORM, nn.ReLU(), nn.AvgPool2d(2, padding=1)),
    "oblong": nn.Sequential(NORM, nn.ReLU(), nn.AvgPool2d((2, 1))),
    "ceiling": nn.Sequential(NORM, nn.ReLU(), nn.AvgPool2d(2, ceil_mode=True)),
    "divisor": nn.Sequential(NORM, nn.ReLU(), nn.AvgPool2d(2, divisor_override=3)),
    "half precision": layers(2).bfloat16(),
    "a subclass": nn.Sequential(OwnNorm(2, 2), nn.ReLU(), POOL),
}


def test_other_layers_are_left_as_they_are():
    for name, net in OTHER.items():
        module = ClientModule(net)
        assert str(FastLoss(module, *like((2, 4, 4))).module) == str(module), name


@pytest.mark.e2e
@pytest.mark.parametrize("norm", ["instance", "group", "none"])
@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_a_net_trained_with_faster_layers_is_the_net_trained_without(norm, pooling):
    """After three steps in float64: what differs is rounding."""
    module = ClientModule(
        models.build("convnet", (1, 12, 12), 3, width=8, depth=2, norm=norm, pooling=pooling)
    ).double()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 1, 12, 12, generator=generator, dtype=torch.float64), torch.arange(9) % 3
    ends = []
    for loss in (FastLoss(module, *like((1, 12, 12))), module.sample_loss):
        theta = module.flat.requires_grad_()
        for _ in range(3):
            (slope,) = torch.autograd.grad(loss(module.unflatten(theta), x, y).mean(), theta)
            theta = (theta - 0.1 * slope).detach().requires_grad_()
        ends.append(theta.detach())
    torch.testing.assert_close(*ends)
    assert float((ends[0] - module.flat).norm()) > 0.01


class Sliced(nn.Module):
    """Reads what its norm gives."""

    def __init__(self):
        super().__init__()
        self.body, self.head = layers(3), nn.Linear(12, 2)

    def forward(self, x):
        return self.head(self.body(x).flatten(1)) * (1 + self.body[:1](x).square().mean(dim=(1, 2, 3))[:, None])


class Iterated(Sliced):
    def forward(self, x):
        seen = 0.0
        for layer in self.body:
            x = layer(x)
            seen = seen + x.tanh().mean(dim=(1, 2, 3))
        return self.head(x.flatten(1)) * (1 + seen[:, None])


def hooked():
    net = nn.Sequential(*layers(3), nn.Flatten(), nn.Linear(12, 2))
    net[1].register_forward_hook(lambda layer, given, found: 2 * found)
    return net


@pytest.mark.parametrize("net", [Sliced, Iterated, hooked])
@pytest.mark.parametrize("training", [True, False])
def test_a_net_that_would_compute_something_else_keeps_its_layers(net, training):
    module, before = ClientModule(net()).train(training), torch.get_rng_state()
    generator = torch.Generator().manual_seed(0)
    x, y, params = torch.randn(5, 3, 4, 4, generator=generator), torch.arange(5) % 2, module.unflatten(module.flat)
    loss = FastLoss(module, *like((3, 4, 4)))
    torch.testing.assert_close(loss(params, x, y), module.sample_loss(params, x, y))
    assert str(loss.module) == str(module) and torch.equal(torch.get_rng_state(), before)


def test_dropout_and_real_labels_do_not_hinder():
    for outputs, labels in ((1, torch.float32), (2, torch.long)):
        net = nn.Sequential(*layers(3), nn.Flatten(), nn.Dropout(), nn.Linear(12, outputs))
        assert "FusedPlanes" in str(FastLoss(ClientModule(net).train(), *like((3, 4, 4), labels)).module)


def test_a_module_with_a_loss_of_its_own_keeps_it():
    net = nn.Sequential(*layers(3), nn.Flatten(), nn.Linear(12, 2))
    module = ClientModule(net, loss=lambda output, y: 2 * nn.functional.cross_entropy(output, y, reduction="none"))
    x, y, params = torch.randn(5, 3, 4, 4), torch.tensor([0, 1, 1, 0, 1]), module.unflatten(module.flat)
    torch.testing.assert_close(FastLoss(module, *like((3, 4, 4)))(params, x, y), module.sample_loss(params, x, y))


def test_several_threads_may_ask_for_the_loss_of_other_parameters_at_a_time():
    module = ClientModule(models.build("convnet", (1, 12, 12), 3, width=4, depth=2))
    loss, x, y = FastLoss(module, *like((1, 12, 12))), torch.randn(5, 1, 12, 12), torch.tensor([0, 1, 2, 0, 1])
    starts = [factor * module.flat for factor in torch.linspace(0.5, 1.5, 40)]
    expected = [loss(module.unflatten(start), x, y) for start in starts]
    found = side_by_side(lambda start: loss(module.unflatten(start), x, y), starts)
    torch.testing.assert_close(found, expected)
    assert torch.equal(module.flat, starts[0] / 0.5)


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


@pytest.mark.e2e
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
