"""Differentiable augmentations: one for all images of a class, a function of the record alone."""

import numpy as np
import pytest
import torch

from dpfl_lightning.models.augmentation import OPERATIONS, ClassAugmentation

NAMES = sorted(OPERATIONS)


def images(count=6, channels=3, size=10, dtype=torch.float64):
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0), dtype=dtype)


def same_for_all(name, classes=2, seed=3):
    numbers = tuple(map(tuple, np.random.default_rng(seed).random((classes, 3)).tolist()))
    return ClassAugmentation((name,) * classes, numbers)


@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_the_shape_changes_most_images_and_is_differentiable(name):
    x = images(count=64)
    changed = OPERATIONS[name](x, torch.rand(64, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    assert changed.shape == x.shape and changed.dtype == x.dtype
    moved = (changed - x).flatten(1).norm(dim=1) > 1e-6
    assert int(moved.sum()) > (20 if name == "flip" else 55)
    x, augment = images(count=2, channels=2, size=5).requires_grad_(), same_for_all(name)
    torch.autograd.gradcheck(lambda one: augment(one, torch.tensor([0, 1])), (x,))


@pytest.mark.parametrize("name", NAMES)
def test_a_record_becomes_one_other_record_whatever_else_there_is(name):
    x, y, own = images(), torch.tensor([0, 1, 1, 0, 1, 0]), same_for_all(name)
    together = own(x, y)
    for row in range(len(x)):
        torch.testing.assert_close(own(x[row : row + 1], y[row : row + 1])[0], together[row])
    assert own(x[:0], y[:0]).shape == (0, *x.shape[1:])


def test_all_images_of_a_class_get_the_same():
    x, y = images()[:1].expand(6, -1, -1, -1), torch.tensor([0, 1, 2, 0, 1, 2])
    own = ClassAugmentation(("rotate", "color", "crop"), ((0.1, 0.2, 0.3),) * 3)
    changed = own(x, y)
    assert torch.equal(changed[:3], changed[3:])
    assert not torch.equal(changed[0], changed[1]) and not torch.equal(changed[1], changed[2])


def test_every_operation_and_the_whole_range_of_its_numbers_are_drawn():
    own = ClassAugmentation.draw(np.random.default_rng(0), 600, ["crop", "flip"])
    assert 250 < own.operations.count("flip") < 350  # 12 standard deviations from the mean at the ends
    numbers = np.array(own.numbers)
    assert numbers.shape == (600, 3) and numbers.min() < 0.02 and numbers.max() > 0.98
    assert own == ClassAugmentation.draw(np.random.default_rng(0), 600, ["crop", "flip"]), "ranks and replays agree"


def test_crop_moves_by_whole_pixels_within_an_eighth_and_fills_with_zeros():
    x = torch.arange(1.0, 65.0).view(1, 1, 8, 8)
    moved = ClassAugmentation(("crop",), ((0.0, 0.999, 0.0),))(x, torch.tensor([0]))[0, 0]
    assert torch.equal(moved[1:, :-1], x[0, 0, :-1, 1:]), "one pixel down and one to the left: 8 / 8"
    assert not moved[0].any() and not moved[:, -1].any()
