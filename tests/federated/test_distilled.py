"""A distilled set on disk: tensors and card belong together, damage is one sentence, and it can be looked at."""

import hashlib
import json

import pytest
import torch

from dpfl_lightning.errors import UserError
from dpfl_lightning.strategies.distillation.artefact import CARD, TENSORS, DistilledSet


def a_set(shape=(1, 4, 4), seed=0) -> DistilledSet:
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(seed))
    return DistilledSet(x, torch.arange(3).repeat_interleave(2), {"rounds": 5, "epsilon_max": 8.0})


def test_it_comes_back_as_it_was(tmp_path):
    a_set().save(tmp_path)
    again = DistilledSet.load(tmp_path)
    assert torch.equal(again.x, a_set().x) and torch.equal(again.y, a_set().y)
    assert again.card == {"rounds": 5, "epsilon_max": 8.0}
    assert set(torch.load(tmp_path / TENSORS, weights_only=True)) == {"x", "y"}


def test_damage_is_one_sentence(tmp_path):
    x = torch.zeros(2, 3)
    for content in (b"", b"no tensors", {"x": x}, {"x": x, "y": torch.zeros(3, dtype=torch.long)}, []):
        a_set().save(tmp_path)
        if isinstance(content, bytes):
            (tmp_path / TENSORS).write_bytes(content)
        else:
            torch.save(content, tmp_path / TENSORS)
        with pytest.raises(UserError, match=r"distilled\.(pt|json)` must be"):
            DistilledSet.load(tmp_path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_images_that_are_not_finite_are_neither_written_nor_read(number, tmp_path):
    broken = a_set()
    broken.x[3, 0, 1, 1] = number
    with pytest.raises(UserError, match=r"distilled\.pt` must hold finite images, got '1 of 6 .*image_learning_rate"):
        broken.save(tmp_path)
    assert not any(tmp_path.iterdir())
    torch.save({"x": broken.x, "y": broken.y}, tmp_path / TENSORS)
    digest = hashlib.sha256((tmp_path / TENSORS).read_bytes()).hexdigest()
    (tmp_path / CARD).write_text(json.dumps({"sha256": digest}))
    with pytest.raises(UserError, match=r"distilled\.pt` must hold finite images, got '1 of 6 .*image_learning_rate"):
        DistilledSet.load(tmp_path)


def test_another_sets_card_and_a_folder_without_a_set_are_refused(tmp_path):
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        a_set(seed=seed).save(tmp_path / str(seed))
    (tmp_path / "0" / CARD).replace(tmp_path / "1" / CARD)
    with pytest.raises(UserError, match=r"must be the card of distilled\.pt in this folder, got 'that of another set'"):
        DistilledSet.load(tmp_path / "1")
    with pytest.raises(UserError, match=r"`distilled` must be a folder with a distilled set.*strategy distillation"):
        DistilledSet.load(tmp_path)


def test_the_picture_has_a_row_for_each_class():
    uneven = DistilledSet(
        torch.stack([torch.full((3, 4, 4), float(i)) for i in range(5)]), torch.tensor([0, 0, 0, 2, 2])
    )
    grid = uneven.grid()
    assert grid.shape == (2 * 5, 3 * 5, 3) and float(grid.min()) == 0 and float(grid.max()) == 1
    assert torch.equal(grid[0, ::5, 0].diff().sign(), torch.tensor([1.0, 1.0])), "class by class, in order"
    assert float(grid[9].min()) == 1 and float(grid[5:, 14].min()) == 1, "a frame, and nothing where there is no image"
    assert DistilledSet(*uneven.records).grid(most=1).shape == (10, 5, 3)


def test_what_is_no_image_has_no_picture():
    for shape in ((7,), (4, 4), (2, 4, 4)):
        assert a_set(shape).grid() is None
    same = DistilledSet(torch.ones(2, 1, 3, 3), torch.tensor([0, 1]))
    assert same.grid().isfinite().all()
