"""Who may see which record: splits, shares of the test set, public records, and a user's own data."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from dpfl_lightning import ClientModule, FederatedLoop
from dpfl_lightning.data import Dataset, Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.local_clients import facts_of
from dpfl_lightning.federated.messages.facts import Facts


def dataset(records: int = 600, test: int = 120, classes: int = 4) -> Dataset:
    """Every record's input is its own number, so that it can be followed; test records count from 10,000."""
    number, test_number = torch.arange(records), 10_000 + torch.arange(test)
    x, test_x = (rows.float()[:, None].expand(-1, 2).clone() for rows in (number, test_number))
    return Dataset("numbers", x, number % classes, test_x, test_number % classes, classes)


def numbers(x: torch.Tensor) -> list[int]:
    return x[:, 0].int().tolist()


def train_numbers(population: Population, client: int) -> list[int]:
    return numbers(population.records(client, torch.arange(population.num_records[client]))[0])


def held_out_numbers(population: Population, client: int) -> list[int]:
    return numbers(population.held_out(client)[0])


def all_of(population: Population, what) -> list[int]:
    return [number for client in range(population.num_clients) for number in what(population, client)]


@pytest.mark.parametrize("held_out", [0, 7, 0.2])
@pytest.mark.parametrize(
    "partition",
    [("iid", {}), ("stratified", {}), ("dirichlet", {"alpha": 0.5, "min_records": 20}), ("shards", {"max_classes": 2})],
    ids=lambda partition: partition[0],
)
def test_nobody_shares_a_record(partition, held_out):
    population = Population.partitioned(dataset(), num_clients=6, partition=partition, held_out_per_client=held_out)
    train, held = all_of(population, train_numbers), all_of(population, held_out_numbers)
    assert len(set(train)) == len(train) == sum(population.num_records)
    assert len(set(held)) == len(held) > 0 and not set(train) & set(held)
    if held_out:
        assert sorted(train + held) == list(range(600))  # its own records
    else:
        assert train != sorted(train) and min(held) >= 10_000  # a share of the test set
    assert numbers(population.test_records()[0]) == list(range(10_000, 10_120))  # stays whole
    for client in range(6):
        x, y = population.records(client, torch.arange(3))
        assert (x[:, 0].long() % 4).tolist() == y.tolist()
        x, y = population.held_out(client)
        assert (x[:, 0].long() % 4).tolist() == y.tolist()


@settings(max_examples=60, deadline=None)
@given(records=st.integers(1, 60), held_out=st.one_of(st.integers(0, 30), st.floats(0.01, 0.3)))
def test_records_per_client_are_training_records(records, held_out):
    population = Population.partitioned(
        dataset(), num_clients=6, records_per_client=records, held_out_per_client=held_out
    )
    assert population.num_records == (records,) * 6
    if isinstance(held_out, float):  # a share of the client's records
        assert all(abs(len(rows) - held_out * (records + len(rows))) < 1 for rows in population.held_out_of)


def test_without_held_out_records_the_test_share_has_the_clients_classes():
    dirichlet = ("dirichlet", {"alpha": 0.3, "min_records": 20})
    population = Population.partitioned(dataset(), num_clients=6, partition=dirichlet)
    for client in range(6):
        train = population.y[population.train_of[client]].bincount(minlength=4)
        held = population.held_out(client)[1].bincount(minlength=4)
        assert (held - train * 120 / 600).abs().max() < 1


def test_same_seed_same_population_and_other_seed_other():
    def rows(seed: int) -> list[int]:
        population = Population.partitioned(dataset(), num_clients=6, held_out_per_client=0.1, seed=seed)
        return all_of(population, train_numbers) + all_of(population, held_out_numbers)

    assert rows(1) == rows(1) != rows(2)


def test_overlapping_clients_share_records_and_say_so():
    population = Population.partitioned(
        dataset(60), num_clients=40, records_per_client=30, held_out_per_client=10, partition=("overlapping", {})
    )
    assert population.num_records == (30,) * 40 and "several clients" in population.caveats[0]
    for client in range(40):
        assert not set(train_numbers(population, client)) & set(held_out_numbers(population, client))
    assert Population.partitioned(dataset(), num_clients=2).caveats == ()


def test_public_records_belong_to_no_client():
    population = Population.partitioned(dataset(), num_clients=5, public_records=100, held_out_per_client=0.1)
    assert sorted(all_of(population, train_numbers) + all_of(population, held_out_numbers)) == list(range(500))
    x, y = population.public_records()
    assert numbers(x) == list(range(500, 600)) and y.tolist() == [number % 4 for number in range(500, 600)]
    assert len(Population.partitioned(dataset(), num_clients=5).public_records()[0]) == 0


@pytest.mark.parametrize("held_out", [0, 3])
def test_use_public_never_holds_a_private_record(held_out):
    population = Population.partitioned(
        dataset(), num_clients=5, public_records=120, use_public=True, held_out_per_client=held_out
    )
    assert numbers(population.x) == list(range(480, 600))
    assert numbers(population.test_records()[0]) == list(range(580, 600))  # the last sixth
    assert max(all_of(population, train_numbers)) < 580 and sum(population.num_records) == 100 - 5 * held_out
    held = all_of(population, held_out_numbers)
    assert sorted(held) == list(range(580, 600)) if held_out == 0 else max(held) < 580


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_clients": 601}, "`num_clients` must be from 1 to the number of records, 600"),
        ({"num_clients": 6, "records_per_client": 101}, "`data.records_per_client` must be a whole number from 1"),
        ({"num_clients": 6, "records_per_client": 90, "held_out_per_client": 11}, "from 1 to 100.*got 101"),
        ({"num_clients": 6, "held_out_per_client": 100}, "must leave a training record of the 100 of client 0"),
        ({"num_clients": 6, "public_records": 600}, "`data.public_records` must be at least 0 and below the 600"),
        ({"num_clients": 6, "use_public": True}, "must be at least 6 for use_public, got 0. Set it to"),
        (
            {"num_clients": 6, "records_per_client": 5, "partition": ("overlapping", {"records_per_client": 5})},
            "`data.records_per_client` must be given once",
        ),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UserError, match=message):
        Population.partitioned(dataset(), **options)


def test_a_population_holds_each_record_once_and_facts_hold_none():
    assert len(Population.partitioned(dataset(), num_clients=300).x) == 720
    population = Population.partitioned(dataset(), num_clients=6, records_per_client=50)
    facts = facts_of(population, batch_size=(8,) * 6, reported_epsilon=(1.0,) * 6)
    assert facts == Facts((50,) * 6, 4, (2,), (8,) * 6, (1.0,) * 6, None) and facts.num_clients == 6


def test_a_population_of_ones_own_is_checked_before_a_run():
    x, y, rows = torch.randn(30, 2), torch.arange(30) % 3, torch.arange(30).split(10)
    good = {"train_of": [*rows[:2]], "held_out_of": [rows[2][:0]] * 2, "test": rows[2], "num_classes": 3}
    assert Population(x, y, **good).checked().caveats == ()
    twice = torch.cat([rows[1], rows[1][:1]])
    for change, words in (
        ({"train_of": [rows[0], twice]}, "must hold each row of a client once"),
        ({"held_out_of": [rows[0][:1], rows[2][:0]]}, "must hold each row of a client once"),
        ({"test": rows[0]}, "`Population.test` must hold no training record"),
        ({"test": rows[0] + 25}, "`Population` must hold rows from 0 to 29"),
        ({"num_classes": 2}, r"`Population: y` must hold classes from 0 to 1, got \(0, 2\)"),
    ):
        with pytest.raises(UserError, match=words):
            FederatedLoop(Population(x, y, **{**good, **change}), torch.nn.Linear(2, 3), rounds=1, privacy=None)
    shared = Population(x, y, **{**good, "train_of": [rows[0], rows[0]]}).checked()
    assert "a record may live at several clients" in shared.caveats[0]


def test_what_is_printed_of_a_population_holds_no_record():
    x, y = torch.full((30, 2), 0.123), torch.full((30,), 7)
    for labels in (y, y.float()):
        people = Population.from_datasets({"rome": (x, labels)}, num_classes=None if labels is not y else 8, held_out=0)
        assert repr(people).startswith(
            "Population(1 clients with 30 records: rome 30; 0 held out, no test set; inputs (2,)"
        )
        assert "0.12" not in repr(people) and "7" not in repr(people)


class Words(TorchDataset):
    """Not a TensorDataset: yields arrays and plain numbers."""

    def __init__(self, records: int):
        self.records = records

    def __len__(self):
        return self.records

    def __getitem__(self, row):
        return np.full((2, 3), row, dtype=np.float64), row % 3


def pair(records: int, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(records, 2, 3), torch.arange(records) % classes


def test_own_data_in_every_form():
    arrays = tuple(part.numpy() for part in pair(20))
    clients = [pair(10), arrays, Words(30), TensorDataset(*pair(40)), ConcatDataset([Words(5), Words(5)])]
    population = Population.from_datasets(clients, test=Words(7), held_out=0.2, num_classes=3)
    sizes = zip(population.num_records, map(len, population.held_out_of), strict=True)
    assert [sum(parts) for parts in sizes] == [10, 20, 30, 40, 10] and population.num_classes == 3
    test_x, test_y = population.test_records()
    assert test_x.shape == (7, 2, 3) and test_y.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert population.x.dtype == torch.float32 and population.y.dtype == torch.int64
    x, y = population.records(2, torch.arange(population.num_records[2]))
    held_x, held_y = population.held_out(2)
    assert sorted(torch.cat([x, held_x])[:, 0, 0].int().tolist()) == list(range(30))
    assert (torch.cat([x, held_x])[:, 0, 0].long() % 3).tolist() == torch.cat([y, held_y]).tolist()


def test_own_data_keeps_clients_apart():
    clients = [(n + torch.rand(n, 1) / 2, torch.zeros(n, dtype=torch.long)) for n in (5, 9, 13)]
    population = Population.from_datasets(clients, held_out=0.3, num_classes=2)
    for client, n in enumerate((5, 9, 13)):
        assert {*map(int, train_numbers(population, client)), *map(int, held_out_numbers(population, client))} == {n}
        assert not set(population.train_of[client].tolist()) & set(population.held_out_of[client].tolist())
    assert population.test_records() is None and population.to("cpu").test is None


def test_a_record_to_train_on_is_needed_and_real_targets_are_a_regression():
    message = (
        r"`held_out` must leave a training record of the 2 of client 0, got 0\.99\. Hold out less, or change the seed"
    )
    with pytest.raises(UserError, match=message):
        Population.from_datasets([pair(2)], held_out=0.99, num_classes=3)
    population = Population.from_datasets([(torch.randn(10, 4), torch.randn(10).double())], held_out=0)
    assert population.num_classes == 1 and population.y.dtype == torch.float32


class Stream(IterableDataset):
    def __iter__(self):
        yield from ()


class Ragged(Words):
    def __getitem__(self, row):
        return torch.zeros(row + 1), 0


class Pictures(Words):
    def __getitem__(self, row):
        return object(), 0


X, Y = pair(6)


@pytest.mark.parametrize(
    "clients, options, message",
    [
        ([], {}, "`clients` must name at least one client's records, got 0"),
        ([pair(6)], {"held_out": 1.0}, r"`held_out` must be a probability in \[0, 1\), got 1.0"),
        ([X], {}, r"`client 0` must yield or be pairs \(x, y\), tuples that end with y, or dictionaries"),
        ([(X, Y), (X, Y[:-1])], {}, r"`client 1: y` must have the shape \[6, ...\], got \(5,\)"),
        ([(X, Y), (X, Y[:, None])], {}, r"`client 1: y` must have labels of shape \(\), as client 0, got \(1,\)"),
        (
            [(X, -100 * Y[:, None])],
            {"num_classes": 3},
            r"must hold classes from 0 to 2, or -100 where a task ignores a label, got \(-200, 0\)",
        ),
        ([(X[:, 0, 0], Y)], {}, r"`client 0: x` must have the shape \[records, ...\]"),
        ([(X.to(torch.uint8), Y)], {}, r"must be floating, or int64 .* got torch.uint8. Pass x.float\(\) / 255"),
        ([(X / 0, Y)], {}, "`client 0: x` must be finite"),
        ([(X, Y), (X, Y.float())], {}, "`client 1: y` must be torch.int64, as client 0, got torch.float32"),
        ([(X, Y - 1)], {"num_classes": 2}, r"`client 0: y` must hold classes from 0 to 1, got \(-1, 1\)"),
        ([(X, Y.float())], {"num_classes": 3}, r"`num_classes` must be 1 if y is floating, got 3. Pass y.long"),
        ([(X, Y)], {"test": (X[:, :1], Y)}, r"`test: x` must have records of shape \(2, 3\), as client 0"),
        ([Stream()], {}, "`client 0` must be a Dataset with a length and an index, got 'Stream'"),
        ([Ragged(3)], {}, r"`client 0` must yield records of one shape, got '\(1,\) and \(2,\) and \(3,\)'"),
        ([Pictures(3)], {}, r"`client 0` must hold numbers, got object.*Convert images to tensors."),
    ],
)
def test_own_data_that_does_not_fit_is_named(clients, options, message):
    with pytest.raises(UserError, match=message):
        Population.from_datasets(clients, **options)


def test_classes_as_real_numbers_are_a_regression_and_the_way_out_is_said():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3))
    people = Population.from_datasets([(X, Y.float())] * 2)
    with pytest.raises(UserError, match=r"must give outputs that fit .*Real numbers as labels .* pass y.long\(\)\."):
        FederatedLoop(people, ClientModule(net), rounds=1, privacy=None)


def test_a_regression_is_dealt_out_by_its_targets():
    """Ten bins of equal size stand in for classes: with a small alpha a client has few, to train and to test."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2000, 3, generator=draw), torch.randn(2000, generator=draw)
    dataset = Dataset("synthetic", x[:1500], y[:1500], x[1500:], y[1500:], num_classes=1)
    dirichlet = ("dirichlet", {"alpha": 0.1, "min_records": 20})
    iid, uneven = (Population.partitioned(dataset, num_clients=5, partition=own) for own in (("iid", {}), dirichlet))
    spread = [float(torch.stack([own.y[rows].mean() for rows in own.train_of]).std()) for own in (iid, uneven)]
    assert spread[1] > 3 * spread[0]
    assert sum(uneven.num_records) == 1500 and sum(len(rows) for rows in uneven.held_out_of) > 100
