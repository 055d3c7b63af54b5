"""A distilled set on disk: tensors and card belong together, damage is one sentence, and it can be looked at."""

import dataclasses
import hashlib
import json
import re

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset

from dpfl_lightning.config.mapping import from_mapping, with_values
from dpfl_lightning.config.options import Options
from dpfl_lightning.data import load
from dpfl_lightning.errors import UserError
from dpfl_lightning.papers.distilled_data import DistilledDataModule, load_distilled
from dpfl_lightning.papers.sets.cards import _command, data_of_card
from dpfl_lightning.papers.sets.distilled_set import CARD, TENSORS, DistilledSet


def a_set(shape=(1, 4, 4), seed=0) -> DistilledSet:
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(seed))
    return DistilledSet(x, torch.arange(3).repeat_interleave(2), {"rounds": 5, "epsilon_max": 8.0})


def write_card(folder) -> None:
    """A card that describes the tensors in the folder."""
    card = {"format": 1, "sha256": hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest()}
    digest = hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()
    (folder / CARD).write_text(json.dumps({**card, "card_sha256": digest}))


def test_it_comes_back_as_it_was(tmp_path):
    a_set().save(tmp_path)
    again = DistilledSet.load(tmp_path)
    assert torch.equal(again.x, a_set().x) and torch.equal(again.y, a_set().y)
    assert again.card == {"rounds": 5, "epsilon_max": 8.0}
    assert set(load_file(tmp_path / TENSORS)) == {"x", "y"}


def test_damage_is_one_sentence(tmp_path):
    x = torch.zeros(2, 3)
    for content in (b"", b"no tensors", {"x": x}, {"x": x, "y": torch.zeros(3, dtype=torch.long)}):
        a_set().save(tmp_path)
        if isinstance(content, bytes):
            (tmp_path / TENSORS).write_bytes(content)
        else:
            save_file(content, tmp_path / TENSORS)
        with pytest.raises(UserError, match=r"distilled\.(safetensors|json)` must be"):
            DistilledSet.load(tmp_path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_images_that_are_not_finite_are_neither_written_nor_read(number, tmp_path):
    broken = a_set()
    broken.x[3, 0, 1, 1] = number
    with pytest.raises(
        UserError, match=r"distilled\.safetensors` must hold finite images, got '1 of 6 .*image_learning_rate"
    ):
        broken.save(tmp_path)
    assert not any(tmp_path.iterdir())
    save_file({"x": broken.x, "y": broken.y}, tmp_path / TENSORS)
    write_card(tmp_path)
    with pytest.raises(
        UserError, match=r"distilled\.safetensors` must hold finite images, got '1 of 6 .*image_learning_rate"
    ):
        DistilledSet.load(tmp_path)


def test_another_sets_card_and_a_folder_without_a_set_are_refused(tmp_path):
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        a_set(seed=seed).save(tmp_path / str(seed))
    (tmp_path / "0" / CARD).replace(tmp_path / "1" / CARD)
    with pytest.raises(UserError, match=r"must be the file that distilled\.json describes, got .* another set"):
        DistilledSet.load(tmp_path / "1")
    with pytest.raises(UserError, match=r"folder of a distilled set, got .*which lacks distilled\.json.*feature_means"):
        DistilledSet.load(tmp_path / "0")
    for path, words in ((tmp_path / "none", "which is no folder"), (tmp_path / "1" / TENSORS, "which is a file")):
        with pytest.raises(UserError, match=f"folder of a distilled set, got .*{words}"):
            DistilledSet.load(path)


def test_files_of_other_content_are_named(tmp_path):
    a_set().save(tmp_path)
    (tmp_path / CARD).write_text("{}")
    with pytest.raises(UserError, match=r"distilled\.json` must be the card of a distilled set, got 'another"):
        DistilledSet.load(tmp_path)
    for labels, words in (
        ({"y": torch.zeros(5).long()}, r"y \[n\], got 'torch.float32 \[6, 4\] and torch.int64 \[5\]'"),
        ({}, "a file without 'y'"),
    ):
        save_file({"x": torch.zeros(6, 4), **labels}, tmp_path / TENSORS)
        write_card(tmp_path)
        with pytest.raises(UserError, match=words):
            DistilledSet.load(tmp_path)


def test_it_is_a_dataset_of_images_and_labels(tmp_path):
    a_set().save(tmp_path)
    made = load_distilled(tmp_path, transform=lambda image: -image)
    image, label = made[3]
    assert len(made) == 6 and torch.equal(image, -a_set().x[3]) and label == 1
    x, y = next(iter(DataLoader(made, batch_size=6)))
    assert torch.equal(x, -a_set().x) and torch.equal(y, a_set().y) and torch.equal(made.x, a_set().x)


def digits_set() -> DistilledSet:
    data = load("digits")
    card = {"origin": data.origin, "data": {"name": "digits"}}
    return DistilledSet(data.x[:40].clone(), data.y[:40].clone(), card)


def test_a_data_module_tests_on_the_official_test_set(tmp_path):
    digits_set().save(tmp_path)
    data = DistilledDataModule(str(tmp_path), batch_size=16)
    data.prepare_data()
    assert (
        sorted(y for _, labels in [*data.train_dataloader()] for y in labels.tolist())
        == digits_set().y.sort()[0].tolist()
    )
    assert [len(x) for x, _ in data.train_dataloader()] == [16, 16, 8]
    x, y = zip(*data.test_dataloader(), strict=True)
    assert torch.equal(torch.cat(x), load("digits").test_x) and torch.equal(torch.cat(y), load("digits").test_y)
    own = DistilledDataModule(digits_set(), test=TensorDataset(torch.ones(2, 1, 8, 8), torch.ones(2).long()))
    assert len(own.test_dataloader().dataset) == 2


def test_a_data_module_refuses_what_does_not_fit(tmp_path):
    of_own_data = DistilledSet(*digits_set().records, {"origin": {}, "data": {"class_path": "mine.Records"}})
    with pytest.raises(UserError, match=r"`test` must be given for a set of your own data, got 'mine.Records'.*test="):
        DistilledDataModule(of_own_data).test_dataloader()
    flat = TensorDataset(torch.ones(2, 64), torch.ones(2).long())
    with pytest.raises(UserError, match=r"records of shape \(1, 8, 8\), as the images of the set, got \(64,\)"):
        DistilledDataModule(of_own_data, test=flat).test_dataloader()
    for size in (0, "a", 1.5):
        with pytest.raises(UserError, match=f"`batch_size` must be a whole number >= 1, got {size!r}"):
            DistilledDataModule(of_own_data, batch_size=size)
    none = TensorDataset(torch.ones(0, 1, 8, 8), torch.ones(0).long())
    for made in (of_own_data, digits_set()):
        with pytest.raises(UserError, match="`test` must hold at least one record, got 0"):
            DistilledDataModule(made, test=none).test_dataloader()


def test_a_card_names_no_secret_and_no_path_of_the_machine():
    arguments = {"url": "postgresql://me:one@host/records", "password": "two", "tables": ["a"]}
    data = {"class_path": "mine.Records", "folder": "files of mine", "download": False, "init_args": arguments}
    expected = {"url": "(not published)", "password": "***", "tables": "(not published)"}
    assert data_of_card(data) == {"class_path": "mine.Records", "init_args": expected}
    command = _command({**dataclasses.asdict(Options()), "data": {**dataclasses.asdict(Options().data), **data}})
    assert "mine.Records" in command and not re.search("one@|two|host|files of mine", command)


@pytest.mark.parametrize(
    "values",
    [
        {"strategies": {"feature_means": {}}, "clients.batch_size": None, "privacy.sampling": "poisson"},
        {"strategies": {"distillation": {"sampling": "poisson"}}, "task": "multiclass"},
        {"strategies": {"feature_means": {"nets": 2}}, "privacy": None},
    ],
)
def test_the_command_of_a_card_repeats_the_run(values):
    usual = {"rounds": 1, "data": {"name": "digits"}, "privacy": {"epsilon": 8.0}}
    options = with_values(from_mapping(usual), values, "here")
    text = re.search("```yaml\\n(.*)\\n```", _command(dataclasses.asdict(options)), re.DOTALL)[1]
    assert from_mapping(yaml.safe_load(text)) == options


@pytest.mark.parametrize("change", [{"epsilon_max": 0.001}, {"guarantee": "none"}, {"rounds": None}])
def test_a_changed_card_is_refused(change, tmp_path):
    a_set().save(tmp_path)
    card = json.loads((tmp_path / CARD).read_text())
    (tmp_path / CARD).write_text(json.dumps({**dict(reversed(card.items())), "rounds": 5}))
    assert DistilledSet.load(tmp_path).card == a_set().card, "the order of keys does not matter"
    (tmp_path / CARD).write_text(json.dumps({**card, **change}))
    with pytest.raises(UserError, match=r"distilled\.json` must be as it was written, got 'a changed card'. Copy"):
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


def test_the_error_for_broken_images_names_the_option_of_their_strategy(tmp_path):
    broken = a_set()
    broken.x[0] = float("nan")
    with pytest.raises(UserError, match=r"A smaller strategies\.feature_means\.image_learning_rate keeps"):
        broken.save(tmp_path, "strategies.feature_means")
