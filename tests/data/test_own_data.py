"""Populations from tables, datamodules and folders of images."""

import warnings

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler, default_collate

from dpfl_lightning.data import Population
from dpfl_lightning.data.modules import datasets_of
from dpfl_lightning.errors import UserError, UserNotice

# ---- tables


def patients(**changes) -> pd.DataFrame:
    """Three hospitals of 30, 20 and 10 patients."""
    rng = np.random.default_rng(0)
    hospitals = np.repeat(["rome", "berlin", "oslo"], [30, 20, 10])
    columns = {
        "hospital": hospitals,
        "age": rng.integers(20, 80, 60),
        "sex": rng.choice(["f", "m"], 60),
        "outcome": rng.choice(["benign", "malignant"], 60),
    }
    return pd.DataFrame(columns | changes)


CHOICES = {
    "client": "hospital",
    "label": "outcome",
    "classes": ["benign", "malignant"],
    "columns": {"sex": {"categories": ["f", "m", "x"]}, "age": {"scale": (50, 20)}},
}


@pytest.mark.e2e
def test_a_table_becomes_clients_with_names(tmp_path):
    table = patients()
    population = Population.from_dataframe(table, held_out=0, test=table.drop(columns="hospital"), **CHOICES)
    assert population.names == ("berlin", "oslo", "rome") and population.num_records == (20, 10, 30)
    rows = table[table.hospital == "oslo"]
    x, y = population.records(1, torch.arange(10))
    assert x.shape == (10, 4) and x.dtype == torch.float32
    assert x[:, 0].tolist() == pytest.approx(((rows.age - 50) / 20).tolist())
    assert x[:, 1:].argmax(1).tolist() == [["f", "m"].index(sex) for sex in rows.sex]
    assert y.tolist() == [["benign", "malignant"].index(name) for name in rows.outcome]
    assert population.num_classes == 2 and len(population.test_records()[1]) == 60
    table.to_csv(tmp_path / "patients.csv", index=False)
    assert population.to("cpu").feature_names == ("age (scaled)", "sex=f", "sex=m", "sex=x")
    stored = Population.from_dataframe(str(tmp_path / "patients.csv"), held_out=0, **CHOICES)
    assert torch.equal(stored.x, population.x[:60])


def test_a_floating_label_is_a_regression_and_features_can_be_chosen():
    table = patients(outcome=np.linspace(0, 1, 60))
    population = Population.from_dataframe(table, client="hospital", label="outcome", features=["age"])
    assert population.num_classes == 1 and population.input_shape == (1,)


def test_several_columns_are_labels():
    table = patients().assign(ill=[0, 1] * 30, back=[1, 1, 0] * 20)
    choices = {"client": "hospital", "label": ["ill", "back"], "features": ["age"]}
    people = Population.from_dataframe(table, **choices, num_classes=2)
    assert people.y.dtype == torch.int64 and people.y.shape == (60, 2)
    assert int(people.y[:, 0].sum()) == 30 and int(people.y[:, 1].sum()) == 40
    people = Population.from_dataframe(table.astype({"ill": float, "back": float}), **choices)
    assert people.y.dtype == torch.float32 and people.num_classes == 1


@pytest.mark.parametrize(
    "changes, choices, message",
    [
        (
            {},
            {"client": "clinic"},
            r"`client` must name a column of the table \(hospital, age, sex, outcome\), got 'cl",
        ),
        ({}, {"features": ["age", "sex", "bmi"]}, "`features` must name columns of the table .*got 'bmi'"),
        ({}, {"columns": {}}, r"`client berlin: sex` must hold numbers, got .*columns: \{sex: \{categories: "),
        (
            {},
            {"columns": {"sex": {"categories": ["f"]}}},
            "`client berlin: sex` must hold the given categories only, .*got 'm'",
        ),
        ({}, {"classes": ["benign", "unsure"]}, "`client berlin: outcome` must hold the given classes .*'malignant'"),
        ({}, {"classes": None}, "`client berlin: outcome` must hold numbers if no classes are given"),
        ({"age": [np.nan, *range(59)]}, {}, "`client rome: age` must have no missing value, got 1. Fill them"),
        ({"outcome": [None, *["benign"] * 59]}, {}, "`client rome: outcome` must have a label in every row"),
        ({"hospital": [None, *["rome"] * 59]}, {}, "`df: hospital` must name a client in every row"),
        (
            {},
            {"columns": {"age": {"scale": (50, 0)}}},
            "`columns: age: scale` must be the public mean and standard deviation",
        ),
        (
            {},
            {"columns": {"bmi": {"scale": (50, 1)}}},
            r"`columns` must be columns of features \(age, sex\) .*, got \['bmi'\]",
        ),
        ({}, {"features": ["age", "outcome"]}, "`features` must be different columns other than cli.*got 'outcome'"),
        ({}, {"features": ["age", "age"]}, "`features` must be different columns other than client, .*got 'age'"),
        ({}, {"features": "age"}, "`features` must be a list of columns, got 'age'"),
        ({}, {"label": ["outcome"]}, "`client berlin: outcome` must be one label for each record if classes are named"),
        ({}, {"label": []}, r"`label` must be the name of a column, or a list of different names, got \[\]"),
        ({}, {"label": "hospital"}, "`label` must be another column than client, got 'hospital'"),
        (
            {},
            {"columns": {"sex": {"categories": ["f", "m", "f"]}}},
            "`columns: sex: categories` must be a list of different values",
        ),
        (
            {},
            {"test": patients().rename(columns={"sex": 7})},
            "`test` must have columns of different names, each a text, got 7. Rename them",
        ),
        ({}, {"test": "nowhere.csv"}, "`test` must be .* the path of a file, got 'nowhere.csv'. There is no such file"),
        ({}, {"label": "Outcome"}, "`label` must name columns .*got 'Outcome'. Did you mean `outcome`?"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_by_column_and_client(changes, choices, message):
    with pytest.raises(UserError, match=message):
        Population.from_dataframe(patients(**changes), **{**CHOICES, **choices})


def test_records_in_another_container_are_refused():
    x, y = torch.randn(9, 2), torch.arange(9) % 2
    with pytest.raises(UserError, match=r"`clients` must be a list or a mapping of the .*got 'generator'. Call list"):
        Population.from_datasets(((x, y) for _ in range(2)), num_classes=2)
    for table in (pd.DataFrame(x.numpy()), pd.DataFrame({"sex": ["f"] * 9})):
        with pytest.raises(UserError, match="`client 0: x` must be a tensor or an array, got 'DataFrame'"):
            Population.from_datasets([(table, y)], num_classes=2)


def test_names_are_different():
    table = patients()
    table["hospital"] = [1, "1"] * 30
    with pytest.raises(UserError, match="`df: hospital` must hold different names as text"):
        Population.from_dataframe(table, **CHOICES)
    pair = torch.randn(9, 2), torch.arange(9) % 2
    with pytest.raises(UserError, match="`names` must be 2 different names"):
        Population.from_datasets({1: pair, "1": pair}, num_classes=2)
    assert Population.from_datasets([pair, pair], num_classes=2).name_of(1) == "1"


# ---- datamodules


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * count).view(count, 2), torch.arange(count) % 2)


class Data(L.LightningDataModule):
    """`loaders` makes what `train_dataloader` returns."""

    clients_of_records = ("rome",) * 6 + ("berlin",) * 4

    def __init__(self, loaders):
        super().__init__()
        self.loaders, self.calls = loaders, []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(stage)
        self.test = numbers(5)

    def train_dataloader(self):
        return self.loaders(
            {name: DataLoader(numbers(n), 32, shuffle=True) for name, n in (("rome", 6), ("berlin", 4))}
        )

    def val_dataloader(self):
        return DataLoader(numbers(3))


class WithTestSet(Data):
    def test_dataloader(self):
        return [DataLoader(self.test)]


def made(datamodule, **options) -> Population:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserNotice)  # nothing of these loaders is lost
        return Population.from_datamodule(datamodule, num_classes=2, held_out=0, **options)


def test_a_datamodule_has_a_loader_for_each_client():
    by_name = made(module := WithTestSet(dict))
    assert by_name.names == ("rome", "berlin") and by_name.num_records == (6, 4) and len(by_name.test) == 5
    assert module.calls == ["prepare_data", "fit", "test"]
    in_a_list = made(Data(lambda loaders: [*loaders.values()]))
    assert in_a_list.names == () and in_a_list.num_records == (6, 4) and len(in_a_list.test) == 3
    assert made(Data(CombinedLoader)).names == ("rome", "berlin")


def test_the_records_of_one_loader_are_divided_by_client():
    one = Data(lambda loaders: DataLoader(numbers(10)))
    for client in ("clients_of_records", Data.clients_of_records, np.array(Data.clients_of_records)):
        population = made(one, client=client)
        assert population.names == ("berlin", "rome") and population.num_records == (4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for client, message in (
            (None, "give the client of each record"),
            (["rome"], "each of the 10 records"),
            ("x", "attr"),
        ):
            with pytest.raises(UserError, match=f"`client` must .*{message}"):
                Population.from_datamodule(one, client=client)


def test_hooks_of_batches_are_refused_because_no_batch_of_a_loader_is_used():
    class Scaling(Data):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] / 9, batch[1]

    with pytest.raises(UserError, match="`on_after_batch_transfer` must be left out: there are no batches of a loader"):
        datasets_of(Scaling.__new__(Scaling), None)


def test_loaders_of_a_datamodule_are_used_as_other_loaders():
    def module(**given):
        return Data(lambda loaders: {"rome": DataLoader(numbers(6), **given)})

    with pytest.warns(UserNotice, match="batch_size 64 of the loaders is ignored") as caught:
        Population.from_datamodule(module(batch_size=64), num_classes=2)
    assert caught[0].filename == __file__
    with pytest.raises(UserError, match="`client rome: sampler` must be left out"):
        made(module(sampler=WeightedRandomSampler([1.0] * 6, 6)))

    def tripled(samples):
        x, y = default_collate(samples)
        return 3 * x, y

    one = Data(lambda loaders: DataLoader(numbers(10), collate_fn=tripled))
    for population in (made(module(collate_fn=tripled)), made(one, client="clients_of_records")):
        n = len(population.y) - 3  # without the test set, whose loader has no such function
        assert population.x[:n].sum() == 3 * numbers(n)[:][0].sum()


# ---- folders of images


def drawn(folder, clients=("berlin", "rome", "test"), classes=("cat", "dog"), sizes=((4, 3),)) -> None:
    for client in clients:
        for shade, name in enumerate(classes):
            place = folder / client / name
            place.mkdir(parents=True)
            for number in range(4):
                image = Image.new("RGB", sizes[number % len(sizes)], (255 * shade, 0, 0))
                image.save(place / f"{number}.png")


def test_folders_of_images_are_clients_and_classes(tmp_path):
    drawn(tmp_path)
    lazy, eager = (Population.from_image_folder(tmp_path, held_out=0, lazy=lazy) for lazy in (True, False))
    assert lazy.names == ("berlin", "rome") and lazy.num_records == (8, 8) and lazy.input_shape == (3, 3, 4)
    assert lazy.y.tolist() == ([0] * 4 + [1] * 4) * 3 and len(lazy.test) == 8
    assert torch.equal(lazy.x[torch.arange(24)], eager.x) and eager.x[4:8, 0].eq(1).all() and eager.x[:, 1:].eq(0).all()
    grey = Population.from_image_folder(tmp_path, size=(5, 6), channels=1, classes=["cat", "dog", "cow"])
    assert grey.input_shape == (1, 5, 6) and grey.num_classes == 3


def test_folders_that_do_not_fit_are_refused(tmp_path):
    drawn(tmp_path / "sizes", sizes=((4, 3), (5, 3)))
    with pytest.raises(UserError, match=r"`client berlin` must yield records of one shape.*Resize"):
        Population.from_image_folder(tmp_path / "sizes")
    drawn(tmp_path / "classes", ("berlin",))
    drawn(tmp_path / "classes", ("rome",), ("cat",))
    with pytest.raises(
        UserError, match=r"rome` must hold the classes of client berlin, .*got \['cat'\]. State the pub"
    ):
        Population.from_image_folder(tmp_path / "classes")
    with pytest.raises(UserError, match=r"berlin` must hold folders of \['cat'\] only, got \['cat', 'dog'\]"):
        Population.from_image_folder(tmp_path / "classes", classes=["cat"])
    (tmp_path / "classes" / "berlin" / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"0.png` must be a complete image"):
        Population.from_image_folder(tmp_path / "classes", classes=["cat", "dog"])


def ramp(dtype, largest):
    return np.linspace(0, largest, 64).reshape(8, 8).astype(dtype)


EIGHT, SIXTEEN = Image.fromarray(ramp(np.uint8, 255)), Image.fromarray(ramp(np.uint16, 65535))


class Pairs(Dataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, row):
        return self.pairs[row]


def written(folder, **images):
    place = folder / "berlin" / "cat"
    place.mkdir(parents=True, exist_ok=True)
    for name, image in images.items():
        image.save(place / name.replace("_", "."))
    return Population.from_image_folder(folder, held_out=0, channels=1, lazy=False)


def test_images_of_16_bits_are_scaled_by_their_largest_number(tmp_path):
    population = written(tmp_path, a_png=EIGHT, b_png=SIXTEEN, c_TIF=SIXTEEN, d_bmp=EIGHT)
    assert population.x.shape == (4, 1, 8, 8)
    assert torch.allclose(population.x, torch.from_numpy(ramp(np.float32, 1.0)).expand(4, 1, 8, 8), atol=1 / 255)
    in_colour = Population.from_image_folder(tmp_path, held_out=0, size=(8, 8), lazy=False)
    assert torch.allclose(in_colour.x, population.x.expand(4, 3, 8, 8), atol=1e-6)
    of_pil = Population.from_datasets({"a": Pairs([(SIXTEEN, 0), (SIXTEEN, 1)])}, held_out=0, num_classes=2)
    assert torch.equal(of_pil.x[0], population.x[1])


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (Image.fromarray(ramp(np.float32, 1.0)), "have 8 or 16 bits a number"),
        (Image.new("RGBA", (8, 8), (0, 0, 0, 10)), "must be opaque"),
    ],
)
def test_images_whose_numbers_are_not_known_are_refused(image, words):
    with pytest.raises(UserError, match=words):
        Population.from_datasets({"a": Pairs([(image, 0), (image, 1)])}, held_out=0, num_classes=2)


def test_no_file_of_a_folder_is_left_out_without_a_word(tmp_path):
    written(tmp_path, a_png=EIGHT)
    place = tmp_path / "berlin" / "cat"
    for name in ("Thumbs.db", ".hidden"):
        (place / name).touch()
    assert len(Population.from_image_folder(tmp_path, held_out=0).x) == 1
    (place / "scan.dcm").touch()
    (place / "nested").mkdir()
    with pytest.raises(UserError, match=r"hold images \(.*\) only, got '?1 \.dcm, 1 nested"):
        Population.from_image_folder(tmp_path, held_out=0)
    (place / "scan.dcm").unlink()
    (place / "nested").rmdir()
    EIGHT.save(tmp_path / "berlin" / "lost.png")
    with pytest.raises(UserError, match=r"in the folder of a class, got .*1, such as lost\.png"):
        Population.from_image_folder(tmp_path, held_out=0)
    (tmp_path / "berlin" / "lost.png").unlink()
    EIGHT.save(place / "b.tif", save_all=True, append_images=[EIGHT])
    with pytest.raises(UserError, match=r"must hold one image, got '?2 frames"):
        Population.from_image_folder(tmp_path, held_out=0)
