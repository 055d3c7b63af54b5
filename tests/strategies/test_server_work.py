"""Distances of gradients against slow forms, images that move towards a target, and nets trained on a set."""

import pytest
import reference
import torch
from conftest import small_net
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dpfl_lightning import models
from dpfl_lightning.algorithms.server_training import (
    Training,
    trained_on,
)
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.papers.distillation.gradient_matching import (
    Matching,
    SyntheticSet,
    all_classes_at_once,
    class_by_class,
    distances,
    fastest_class_gradients,
    matched_names,
    noise_aware_rows,
)

MATCHINGS = ("layerwise_cosine", "mse")
SHAPES = {"conv": (6, 2, 3, 3), "bias": (6,), "layer": (4, 5, 5), "linear": (3, 20), "norm": (6,)}


def gradients(seed=0, classes=2, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(classes, *shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()
    }


# --- the distances


def test_parameters_of_one_dimension_do_not_count_in_the_layerwise_distance():
    ours, theirs = gradients(0), gradients(1)
    moved = theirs | {"bias": theirs["bias"] + 5, "norm": -theirs["norm"]}
    assert torch.equal(distances(ours, theirs, "layerwise_cosine"), distances(ours, moved, "layerwise_cosine"))
    assert not torch.allclose(distances(ours, theirs, "mse"), distances(ours, moved, "mse"))
    assert matched_names(SHAPES, "layerwise_cosine") == ("conv", "layer", "linear")
    assert matched_names(SHAPES, "mse") == tuple(SHAPES)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_all_rows_at_once_equal_the_loop_over_output_nodes(seed, one, other):
    ours, theirs = gradients(seed, 3, one, torch.float64), gradients(seed + 1, 3, other, torch.float64)
    expected = [
        reference.layerwise_cosine([a[c] for a in ours.values()], [b[c] for b in theirs.values()]) for c in range(3)
    ]
    torch.testing.assert_close(distances(ours, theirs, "layerwise_cosine"), torch.stack(expected), rtol=1e-9, atol=1e-9)


def test_the_squared_distance_is_what_it_says():
    ours, theirs = gradients(0, 1, dtype=torch.float64), gradients(1, 1, dtype=torch.float64)
    a, b = (torch.cat([one.flatten() for one in of.values()]) for of in (ours, theirs))
    torch.testing.assert_close(distances(ours, theirs, "mse")[0], (a - b) @ (a - b))


def test_a_row_of_zeros_has_a_finite_slope():
    ours = {"w": torch.zeros(1, 2, 3, requires_grad=True)}
    theirs = {"w": torch.ones(1, 2, 3)}
    for matching in MATCHINGS:
        (slope,) = torch.autograd.grad(distances(ours, theirs, matching).sum(), ours["w"])
        assert slope.isfinite().all()


# --- noise


def test_rows_of_noise_weigh_next_to_nothing_and_all_rows_together_as_many_as_they_are():
    generator = torch.Generator().manual_seed(0)
    signal = torch.zeros(1, 3, 400)
    signal[0, 0] = 3.0
    signal[0, 2] = 300.0
    target = {"w": signal + torch.randn(1, 3, 400, generator=generator), "bias": torch.ones(1, 3)}
    weights = noise_aware_rows(target, noise_std=1.0)
    assert set(weights) == {"w"}
    torch.testing.assert_close(weights["w"][0], 3 * torch.tensor([0.9, 0.0, 1.0]) / 1.9, rtol=0, atol=0.2)
    assert float(weights["w"].sum()) == pytest.approx(3.0)
    assert torch.equal(noise_aware_rows(target, 0.0)["w"], torch.ones(1, 3))
    assert torch.equal(noise_aware_rows({"w": torch.zeros(1, 2, 3)}, 1.0)["w"], torch.zeros(1, 2))


def test_weighed_rows_are_counted_so_much():
    ours, theirs = ({name: of[name] for name in ("conv", "linear")} for of in (gradients(0), gradients(1)))
    half = {"conv": torch.full((2, 6), 0.5), "linear": torch.full((2, 3), 0.5)}
    whole = distances(ours, theirs, "layerwise_cosine")
    torch.testing.assert_close(distances(ours, theirs, "layerwise_cosine", half), whole / 2)


# --- images that move


def smooth_module(norm="group"):
    torch.manual_seed(0)
    net = models.build("convnet", (1, 5, 5), 2, width=4, depth=2, activation="sigmoid", norm=norm)
    return ClientModule(net.double())


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [class_by_class, all_classes_at_once])
@pytest.mark.parametrize("matching", MATCHINGS)
def test_the_slope_is_that_of_the_distance(matching, gradients):
    module = smooth_module()
    params, classes = module.named_trainable, torch.arange(2)
    names = matched_names({name: tuple(p.shape) for name, p in params.items()}, matching)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 2, 1, 5, 5, generator=generator, dtype=torch.float64)
    target = class_by_class(module.sample_loss, params, names, images.roll(1, dims=0) + 0.3, classes)

    def apart(own):
        return distances(gradients(module.sample_loss, params, names, own, classes), target, matching)

    assert torch.autograd.gradcheck(apart, (images.clone().requires_grad_(),))
    way = Matching(module.sample_loss, names, matching, 0.1, 0.5, gradients)
    slope, now = way.slope(images, classes, params, target)
    own = images.clone().requires_grad_()
    torch.testing.assert_close(slope, torch.autograd.grad(apart(own).sum(), own)[0])
    torch.testing.assert_close(now, apart(images))


@pytest.mark.parametrize("norm", ["instance", "group", "layer", "none"])
@pytest.mark.parametrize("pooling", ["avg", "max", "none"])
def test_all_classes_at_once_move_as_in_a_loop_over_classes(norm, pooling):
    torch.manual_seed(0)
    net = models.build("convnet", (1, 8, 8), 3, width=4, depth=2, norm=norm, pooling=pooling)
    module = ClientModule(net)
    params, generator = module.named_trainable, torch.Generator().manual_seed(1)
    names = matched_names({name: tuple(p.shape) for name, p in params.items()}, "layerwise_cosine")
    images, real = (torch.randn(3, n, 1, 8, 8, generator=generator) for n in (2, 7))
    expected = []
    for label in range(3):
        theirs = reference.class_gradient(net, params, real[label], label)
        own = images[label].clone().requires_grad_()
        ours = reference.class_gradient(net, params, own, label, create_graph=True)
        expected.append(torch.autograd.grad(reference.layerwise_cosine(ours, theirs), own)[0])
    target = class_by_class(module.sample_loss, params, names, real, torch.arange(3))
    gradients = fastest_class_gradients(module.sample_loss, params, names, (1, 8, 8))
    assert gradients is (class_by_class if norm == "layer" else all_classes_at_once)
    way = Matching(module.sample_loss, names, "layerwise_cosine", 0.1, 0.5, gradients)
    slope, _ = way.slope(images, torch.arange(3), params, target)
    torch.testing.assert_close(slope, torch.stack(expected), rtol=1e-3, atol=1e-5)


def test_a_net_that_is_wrong_or_fails_under_vmap_is_taken_class_by_class():
    module = smooth_module(norm="layer")
    params = module.named_trainable
    assert fastest_class_gradients(module.sample_loss, params, list(params), (1, 5, 5)) is class_by_class

    def stubborn(params, x, y):
        return module.sample_loss(params, x, y) * float(x.sum() > -1e9)  # no tensor under vmap has a number

    assert fastest_class_gradients(stubborn, params, ["0.weight"], (1, 5, 5)) is class_by_class


def some_target(module, names, classes=3):
    generator = torch.Generator().manual_seed(5)
    params = module.named_trainable
    return {name: torch.randn(classes, *params[name].shape, generator=generator) for name in names}


@pytest.mark.parametrize("steps", [1, 3])
def test_one_joint_step_is_a_step_of_each_class_with_torchs_sgd(steps, monkeypatch):
    """Two rounds of `steps`; in the second one class is absent: it and its momentum stay, bit for bit."""
    torch.manual_seed(0)
    module = ClientModule(models.build("convnet", (1, 8, 8), 3, width=4, depth=2))
    params = module.named_trainable
    names = matched_names({name: tuple(p.shape) for name, p in params.items()}, "layerwise_cosine")
    target = some_target(module, names)
    start = SyntheticSet.of_noise(3, 2, (1, 8, 8), torch.Generator().manual_seed(0))
    # a step of 0.1 for two images a class and 11 rows
    matching = Matching(module.sample_loss, names, "layerwise_cosine", 5.5, 0.5, all_classes_at_once)

    leaves = [images.clone().requires_grad_() for images in start.images]
    optimizers = [torch.optim.SGD([leaf], lr=0.1, momentum=0.5) for leaf in leaves]
    now = start
    for absent in (None, 1):
        present = torch.tensor([label != absent for label in range(3)])
        before = now
        for _ in range(steps):
            now, apart = matching.step(now, params, target, present)
            assert apart.isnan().tolist() == (~present).tolist()
            for label in present.nonzero().flatten().tolist():
                ours = reference.class_gradient(module.net, params, leaves[label], label, create_graph=True)
                ours = [g for g, p in zip(ours, params.values(), strict=True) if p.dim() >= 2]
                loss = reference.layerwise_cosine(ours, [target[name][label] for name in names])
                optimizers[label].zero_grad()
                loss.backward()
                optimizers[label].step()
        if absent is not None:
            assert torch.equal(now.images[absent], before.images[absent])
            assert torch.equal(now.velocity[absent], before.velocity[absent])
            assert bool(now.velocity[absent].any())
    expected = torch.stack([leaf.detach() for leaf in leaves])
    torch.testing.assert_close(now.images, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(now.images, start.images, atol=1e-2)


def some_records(shape=(6,), count=40):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *shape, generator=generator), torch.randint(3, (count,), generator=generator)


def test_training_is_sgd_with_momentum_decay_and_a_smaller_rate_in_the_second_half():
    module, (x, y) = ClientModule(small_net()), some_records()
    how = Training(epochs=5, learning_rate=0.3, momentum=0.9, weight_decay=0.01, decayed=True, batch_size=16)
    start = module.flat
    ours = trained_on(module, start, (x, y), how, seed=11)
    assert torch.equal(module.flat, start), "the module's own parameters stay"

    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.3, momentum=0.9, weight_decay=0.01)
    torch.manual_seed(11)
    for epoch in range(5):
        optimizer.param_groups[0]["lr"] = 0.3 if epoch < 3 else 0.03
        for rows in torch.randperm(40).split(16):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    torch.testing.assert_close(ours, torch.nn.utils.parameters_to_vector(net.parameters()))


def test_the_seed_decides_order_augmentation_and_dropout():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, 3))
    module, records = ClientModule(net), some_records((1, 8, 8))
    how = Training(epochs=2, batch_size=8, augmentations=("crop", "rotate"))
    one, again, other = (trained_on(module, module.flat, records, how, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    plain = trained_on(module, module.flat, records, Training(epochs=2, batch_size=8), 1)
    assert not torch.equal(one, plain)


def moved(way, images, params, target):
    """How far two steps move the images `[G, n, *X]`."""
    synthetic, present = SyntheticSet(images, torch.zeros_like(images)), torch.ones(len(images), dtype=torch.bool)
    for _ in range(2):
        synthetic, _ = way.step(synthetic, params, target, present)
    return synthetic.images - images


@pytest.mark.parametrize("matching", MATCHINGS)
def test_a_step_does_not_shrink_with_the_number_of_images(matching):
    """A class gradient is a mean over images: five copies of an image must move as far as one."""
    module = smooth_module()
    params = module.named_trainable
    names = matched_names({name: tuple(p.shape) for name, p in params.items()}, matching)
    target = {name: part.double() for name, part in some_target(module, names, 2).items()}
    image = torch.randn(2, 1, 1, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    way = Matching(module.sample_loss, names, matching, 0.1, 0.5)
    one, five = (moved(way, image.repeat(1, n, 1, 1, 1), params, target) for n in (1, 5))
    torch.testing.assert_close(five, one.expand_as(five))
    assert float(one.abs().max()) > 0


def test_a_step_does_not_grow_with_the_rows_of_the_net():
    """Every row twice, as in a net of twice the width: the sum of cosines doubles, and the images move as far."""
    generator = torch.Generator().manual_seed(1)
    weight, image, aim = (torch.randn(*shape, generator=generator).double() for shape in ((4, 6), (2, 1, 6), (2, 4, 6)))
    weight, target = 0.1 * weight, {"a": aim}  # every row has a gradient far above the guard of the cosine

    def loss(params, x, y):
        logits = x @ torch.stack(list(params.values())).mean(dim=0).T
        return torch.nn.functional.cross_entropy(logits, y, reduction="none")

    once, twice = {"a": weight}, {"a": weight, "b": weight}
    one = moved(Matching(loss, ("a",), "layerwise_cosine", 1.0, 0.5), image, once, target)
    both = moved(Matching(loss, ("a", "b"), "layerwise_cosine", 1.0, 0.5), image, twice, {"a": aim, "b": aim})
    torch.testing.assert_close(both, one, rtol=1e-4, atol=1e-6)
    assert float(one.abs().max()) > 0.01
