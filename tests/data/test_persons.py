"""Persons with several records: their records stay together, and their ids stay with the client."""

import re
import warnings
from decimal import Decimal

import lightning as L
import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from dpfl_lightning import Population
from dpfl_lightning.data import load
from dpfl_lightning.data.ids import ids_of
from dpfl_lightning.errors import UserError, UserNotice

PATIENTS, EACH = 150, 6


def visits(seed: int = 0) -> pandas.DataFrame:
    """Patients of two hospitals with six nearly identical rows each, and one random label for all of them."""
    rng = np.random.default_rng(seed)
    person = np.repeat(np.arange(PATIENTS), EACH)
    measured = rng.normal(size=(PATIENTS, 4))[person] + rng.normal(0, 0.01, (PATIENTS * EACH, 4))
    table = pandas.DataFrame(measured, columns=["age", "crp", "sbp", "los"])
    table["hospital"] = np.where(person < PATIENTS // 2, "berlin", "rome")
    table["patient_id"] = [f"P{one}" for one in person]
    return table.assign(died=rng.integers(0, 2, PATIENTS)[person])


CHOICES = {"client": "hospital", "label": "died", "num_classes": 2}


def nearest_neighbour_accuracy(population: Population) -> float:
    """The accuracy on held-out records of a model that remembers every training record."""
    right = []
    for client, rows in enumerate(population.train_of):
        (x, y), (held_x, held_y) = population.records(client, torch.arange(len(rows))), population.held_out(client)
        right.append(y[torch.cdist(held_x, x).argmin(1)] == held_y)
    return float(torch.cat(right).float().mean())


def test_a_model_that_remembers_is_scored_on_persons_whom_it_has_never_seen():
    table, choices = visits(), CHOICES | {"held_out": 0.5}
    rows = Population.from_dataframe(table.drop(columns="patient_id"), **choices)
    assert nearest_neighbour_accuracy(rows) > 0.97, "held-out rows of known persons"
    accuracy = nearest_neighbour_accuracy(Population.from_dataframe(table, person="patient_id", **choices))
    assert 0.35 < accuracy < 0.65, "labels are random"


def ids(population: Population, rows: torch.Tensor) -> set[int]:
    return set(population.unit_ids[rows].tolist())


def check_kept_together(population: Population, num_persons: tuple[int, ...]) -> None:
    """Each person is of one client, and either trains or is held out."""
    population.checked()
    of = [ids(population, torch.cat(pair)) for pair in zip(population.train_of, population.held_out_of, strict=True)]
    assert tuple(map(len, of)) == num_persons
    for train, held_out in zip(population.train_of, population.held_out_of, strict=True):
        assert not ids(population, train) & ids(population, held_out) and len(held_out)
    assert population.num_ids == tuple(len(ids(population, rows)) for rows in population.train_of)


def test_a_column_of_persons_is_no_input_and_no_id_is_kept():
    table = visits().assign(patient_id=np.tile(np.repeat(np.arange(PATIENTS // 2), EACH), 2))  # one number, two people
    population = Population.from_dataframe(table, person="patient_id", **CHOICES)
    check_kept_together(population, (PATIENTS // 2, PATIENTS // 2))
    assert population.feature_names == ("age", "crp", "los", "sbp") and population.schema["person"] == "patient_id"
    assert population.unit_ids.dtype == torch.long and (population.unit_ids >= 0).all()
    as_text = table.assign(patient_id=" " + table.patient_id.astype(str)).sample(frac=1, random_state=0)
    again = Population.from_dataframe(as_text, person="patient_id", **CHOICES)
    for one, other in zip(population.train_of, again.train_of, strict=True):
        assert ids(population, one) == ids(again, other), "an id decides alone, whatever else the rows hold"


X, Y = torch.randn(12, 3), torch.arange(12) % 2
IDS = [f"p{row // 3}" for row in range(12)]


class WithIds(TensorDataset):
    patient = IDS


class OneLoader(L.LightningDataModule):
    site = ("rome", "oslo") * 6
    patient = IDS

    def train_dataloader(self):
        return DataLoader(TensorDataset(X, Y))


class LoaderEach(L.LightningDataModule):
    def train_dataloader(self):
        return {name: DataLoader(WithIds(X, Y)) for name in ("rome", "oslo")}


def folder_of_images(path):
    for place in ("rome/a", "rome/b", "oslo/a", "oslo/b"):
        (path / place).mkdir(parents=True)
        for name in IDS[:6]:
            for number in range(2):
                Image.fromarray(np.full((4, 4), number, np.uint8)).save(path / place / f"{name}_{number}.png")
    return Population.from_image_folder(path, person="_", held_out=0.5, seed=1)


def of_pairs(persons, **options):
    return Population.from_datasets(
        {"rome": (X, Y), "oslo": (X, Y)}, num_classes=2, held_out=0.5, persons=persons, **options
    )


GIVEN = {
    "lists by name": lambda _: of_pairs({"rome": IDS, "oslo": np.array(IDS)}),
    "tensors in a list": lambda _: of_pairs([torch.arange(12) // 3, pandas.Series(np.arange(12) // 3)]),
    "an attribute, lazily": lambda _: Population.from_datasets(
        [WithIds(X, Y)] * 2, persons="patient", num_classes=2, held_out=0.5, lazy=True
    ),
    "one loader": lambda _: Population.from_datamodule(
        OneLoader(), client="site", person="patient", num_classes=2, held_out=0.5
    ),
    "a loader each": lambda _: Population.from_datamodule(LoaderEach(), person="patient", num_classes=2, held_out=0.5),
}


@pytest.mark.parametrize("form", GIVEN)
def test_persons_are_given_as_the_data_are(form, tmp_path):
    check_kept_together(GIVEN[form](tmp_path), (4, 4))


def test_persons_are_in_the_names_of_images(tmp_path):
    check_kept_together(folder_of_images(tmp_path), (2, 2))
    with pytest.raises(
        UserError, match="`person` must follow the id of a person in the name of each image, got '8 without"
    ):
        Population.from_image_folder(tmp_path, person="-")


REFUSED = {
    "a gap": ({"df": visits().assign(patient_id=["P1", None] * (PATIENTS * EACH // 2))}, "patient_id` must name a per"),
    "no text": (
        {"df": visits().assign(patient_id=["P1", " "] * (PATIENTS * EACH // 2))},
        "patient_id` must name a per",
    ),
    "no such column": ({"person": "patient"}, "`person` must name a column of the table.*patient_id"),
    "a list": ({"person": ["patient_id"]}, "`person` must be the name of one column"),
    "the label": ({"person": "died"}, "`person` must be another column than label and client"),
    "an input": ({"features": ["age", "patient_id"]}, "`features` must be different columns other than .*person"),
    "known to the model": ({"test": visits()}, f"`test` must have other persons.*got '{PATIENTS} of both"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_column_that_does_not_fit_is_named(case):
    changed, words = REFUSED[case]
    with pytest.raises(UserError, match=words):
        Population.from_dataframe(**{"df": visits(), "person": "patient_id", "held_out": 0} | CHOICES | changed)


LISTS = {
    "too few": (
        {"rome": IDS, "oslo": IDS[:4]},
        r"`client oslo: persons` must name a person for each of the 12 records",
    ),
    "a client without": ({"rome": IDS}, "`persons` must name the clients of the data"),
    "no attribute": ("patient", "`client rome: persons` must be an attribute"),
    "nan": ({"rome": IDS, "oslo": [float("nan")] * 12}, "`client oslo: persons` must name a person for each"),
}


@pytest.mark.parametrize("case", LISTS)
def test_lists_that_do_not_fit_are_named(case):
    persons, words = LISTS[case]
    with pytest.raises(UserError, match=words):
        of_pairs(persons)


@pytest.mark.e2e
def test_a_test_table_without_persons_is_said_to_be_unchecked():
    test = visits(1).drop(columns="patient_id")
    with pytest.warns(UserNotice, match="test set does not name persons.*not checked"):
        Population.from_dataframe(visits(), person="patient_id", test=test, **CHOICES)
    other = visits(1).assign(patient_id="Q" + visits().patient_id)
    population = Population.from_dataframe(visits(), person="patient_id", test=other, **CHOICES)
    assert (population.unit_ids[population.test] == -1).all(), "no client's persons"


@pytest.mark.parametrize("partition", [("iid", {}), ("dirichlet", {"alpha": 0.5})])
@pytest.mark.parametrize("held_out", [0, 12, 0.25])
def test_records_of_a_public_data_set_are_grouped_into_persons(partition, held_out):
    options = {"num_clients": 3, "partition": partition, "held_out_per_client": held_out, "seed": 1}
    digits = load("digits")
    population = Population.partitioned(digits, records_per_person=4, **options)
    population.checked()
    for train, held in zip(population.train_of, population.held_out_of, strict=True):
        counts = population.unit_ids[train].unique(return_counts=True)[1]
        assert counts.max() == 4 and (counts < 4).sum() <= 1
        assert not held_out or not ids(population, train) & ids(population, held)
    turned = Population.partitioned(digits, records_per_person=4, groups=("rotation", {"count": 3}), **options)
    for one, other in zip(population.train_of, turned.train_of, strict=True):
        assert torch.equal(population.unit_ids[one], turned.unit_ids[other])
    with pytest.raises(UserError, match=r"`data.records_per_person` must be null"):
        Population.partitioned(
            digits, num_clients=2, partition=("overlapping", {"records_per_client": 9}), records_per_person=4
        )


def test_a_person_on_both_sides_of_a_split_is_refused():
    rows = [torch.tensor([0, 1])], [torch.tensor([2])]
    for persons, words in ((torch.tensor([1, 1, 1]), "on one side"), (torch.tensor([1, 2]), "one code for each")):
        with pytest.raises(UserError, match=f"`Population.unit_ids` must .*{words}"):
            Population(torch.zeros(3, 1), torch.zeros(3).long(), *rows, None, 2, unit_ids=persons).checked()


def test_ids_in_files_are_read_as_they_are_written(tmp_path):
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    train.write_text("pid,when,x,y\n007,2018,1,0\n7,2018,2,1\n8.0,2019,3,0\nA1,2020,4,1\n")
    test.write_text("pid,when,x,y\n007,2018,1,0\n8.0,2018,2,1\n")
    options = {
        "label": "y",
        "num_classes": 2,
        "held_out": 0,
        "person": "pid",
        "columns": {"when": {"since": "2000-01-01"}},
    }
    options["read"] = {"date_format": "%Y"}
    assert Population.from_dataframe(train, **options).num_ids == (4,)
    with pytest.raises(UserError, match=r"`test` must have other persons than the training records, got '2 of both'"):
        Population.from_dataframe(train, test=test, **options)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([7, "007"], "have ids of one kind, got 'numbers and texts'. Read them as text"),
        ([7, "?"], "got '1 without one'"),
        (["A", "Unknown"], "got '1 without one'"),
        ([2.0**53, 1.0], "have exact ids, got 'floating numbers above 2^53'"),
        (torch.tensor([2.0**24, 2.0**24 + 1]), "have exact ids, got 'floating numbers above 2^24'"),
        (np.array([2.0**24, 1], dtype=np.float32), "have exact ids, got 'floating numbers above 2^24'"),
        ({7, 8}, "name a person for each of the 2 records, got 'set'"),
    ],
)
def test_ids_that_may_be_those_of_others_are_refused(ids, words):
    with pytest.raises(UserError, match=re.escape(words)):
        Population.from_datasets([(torch.zeros(2, 1), torch.zeros(2).long())], persons=[ids], num_classes=2)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (["A1", "A1\0"], "have ids that differ visibly, got '1 that are written in several ways"),
        (["A1", "A\u200b1"], "have ids that differ visibly"),
        (["A 1", "A\u00a01"], "have ids that differ visibly"),
        (["17", "\uff11\uff17"], "have ids that differ visibly"),
        (["a17", "A17"], "have ids that differ visibly"),
        (["1.23457E+12", "1.23458E+12"], "have exact ids, got '2 with an exponent"),
        (["1,23457E+12", "7"], "have exact ids, got '1 with an exponent"),
        (["1000", "1000.0"], "have ids that differ visibly"),
        (["P-7", "P\u20137"], "have ids that differ visibly"),
        (["P7", "P7\ufe0f"], "have ids that differ visibly"),
        (["'007", "007"], "have ids that differ visibly"),
        (["UNK", "P1"], "got '1 without one'"),
        (["n.d.", "P1"], "got '1 without one'"),
        (["-1", "17"], "got '1 without one'"),
        (["unbekannt", "P1"], "got '1 without one'"),
        (["Inconnu", "P1"], "got '1 without one'"),
        (["keine Angabe", "P1"], "got '1 without one'"),
        (pandas.Series([2.0**24, 1], dtype="Float32"), "got 'floating numbers above 2^24'"),
        ([np.float32(2**24), np.float32(1)], "got 'floating numbers above 2^24'"),
    ],
)
def test_ids_that_merge_or_split_persons_are_refused(ids, words):
    with pytest.raises(UserError, match=re.escape(words)):
        ids_of(ids, 2, "person")


def test_ids_of_a_pyarrow_column_of_float32_are_refused():
    pyarrow = pytest.importorskip("pyarrow")
    for ids in (pyarrow.array([2.0**24, 1], pyarrow.float32()), pandas.Series([2.0**24, 1], dtype="float[pyarrow]")):
        with pytest.raises(UserError, match=re.escape("got 'floating numbers above 2^24'")):
            ids_of(ids, 2, "person")


def test_ids_that_were_rounded_earlier_are_said():
    true = 123_456_789 + 137 * np.arange(40)
    assert len(set(ids_of(true, 40, "person"))) == 40
    rounded = true.astype(np.float32).astype(np.float64)
    for column in (rounded, rounded.astype(np.int64), [*rounded, 123_456_789.0]):
        with pytest.warns(UserNotice, match="ids look as if float32 had rounded them"):
            ids_of(column, len(column), "person")
    with pytest.warns(UserNotice, match="zeros after 15 digits"):
        ids_of(["1234567890123450000", "1234567890123460000"], 2, "person")


def test_ids_of_one_number_are_one_person():
    assert set(ids_of([Decimal("7"), Decimal("7.0"), 7, 7.0, np.float32(7)], 5, "person")) == {"7"}
    assert ids_of([" P7", "P7 ", "P7"], 3, "person") == ["P7"] * 3
    assert ids_of(["\uff11\uff17", "P\u200b2"], 2, "person") == ["17", "P2"]  # equal at sites that write them otherwise
    assert ids_of([0, 1, 2], 3, "person") == ["0", "1", "2"]


def test_one_id_with_far_more_rows_than_all_others_is_said():
    several = [f"P{number // 5}" for number in range(100)]
    with pytest.warns(UserNotice, match="20 rows have one id, and no other id has more than 5"):
        ids_of([*several, *["P999"] * 20], 120, "person")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids_of([*several, *["P999"] * 12], 112, "person")
