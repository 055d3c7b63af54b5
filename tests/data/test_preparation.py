"""One raw record more changes at most that record's place in what a client trains on."""

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from dpfl_lightning.data import Population
from dpfl_lightning.data.datasets import _normalised
from dpfl_lightning.data.groups import renamed, turned
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.local_clients import facts_of
from dpfl_lightning.privacy.accounting.guarantee import NOT_COVERED


class Records(TorchDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, row):
        return self.x[row].numpy(), self.y[row].item()


#: the forms in which clients give records
SOURCES = {
    "tensors": lambda x, y: (x, y),
    "float64": lambda x, y: (x.double(), y.double() if y.is_floating_point() else y.int()),
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
    "lists": lambda x, y: (x.tolist(), y.tolist()),
    "TensorDataset": lambda x, y: TensorDataset(x, y),
    "Dataset": Records,
}


def raw(count: int, seed: int, classes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, 3, generator=generator)
    return x, torch.randint(4, (count,), generator=generator) if classes else torch.randn(count, generator=generator)


def record_counts(population: Population, client: int, part: str) -> Counter:
    rows = getattr(population, part)[client]
    return Counter(
        (*x.flatten().tolist(), y.item()) for x, y in zip(population.x[rows], population.y[rows], strict=True)
    )


@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=40, deadline=None)
@given(
    held_out=st.sampled_from([0.0, 0.2, 0.5]),
    count=st.integers(20, 50),
    place=st.floats(0, 1),
    classes=st.booleans(),
    seed=st.integers(0, 1000),
    extreme=st.booleans(),
)
def test_a_record_more_changes_only_its_place(source, held_out, count, place, classes, seed, extreme):
    """Wherever it is inserted, and whatever it holds, also the largest values of all."""
    (x, y), other = raw(count, seed, classes), raw(25, seed + 1, classes)
    row = int(place * (count - 1))
    few_x, few_y = (torch.cat([part[:row], part[row + 1 :]]) for part in (x, y))
    if extreme:
        x[row], y[row] = 1e30, 3 if classes else 1e30
    form, options = SOURCES[source], {"held_out": held_out, "seed": seed, "num_classes": 4 if classes else None}
    more = Population.from_datasets([form(x, y), form(*other)], **options)
    less = Population.from_datasets([form(few_x, few_y), form(*other)], **options)
    added = Counter()
    for part in ("train_of", "held_out_of"):
        of_more, of_less = record_counts(more, 0, part), record_counts(less, 0, part)
        assert not of_less - of_more, f"{part}: the record pushed others out"
        added += of_more - of_less
        assert record_counts(more, 1, part) == record_counts(less, 1, part), (
            f"{part}: it moved another client's records"
        )
    assert added == Counter([(*x[row].flatten().tolist(), y[row].item())])
    facts = [facts_of(population) for population in (more, less)]
    assert facts[0].num_classes == facts[1].num_classes and facts[0].input_shape == facts[1].input_shape
    assert abs(facts[0].num_records[0] - facts[1].num_records[0]) <= 1


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100), share=st.floats(0.05, 0.6))
def test_the_share_held_out_is_the_share_that_was_given(seed, share):
    population = Population.from_datasets([raw(2000, seed, True)], held_out=share, seed=seed, num_classes=4)
    deviation = 5 * (2000 * share * (1 - share)) ** 0.5
    assert abs(len(population.held_out_of[0]) - 2000 * share) < deviation
    (rows,) = population.train_of
    assert rows.tolist() == sorted(rows.tolist()), "training records stay in the order of the raw records"


def test_another_seed_holds_out_other_records():
    parts = [
        record_counts(Population.from_datasets([raw(50, 0, True)], seed=seed, num_classes=4), 0, "held_out_of")
        for seed in (0, 1)
    ]
    assert parts[0] != parts[1]


def test_no_label_decides_the_number_of_classes():
    x, y = raw(10, 0, True)
    with pytest.raises(UserError, match=r"`num_classes` must be the number of .* got None\. .*num_classes=3"):
        Population.from_datasets([(x, y)])
    with pytest.raises(UserError, match=r"`client 0: y` must hold classes from 0 to 2, got \(0, 3\)"):
        Population.from_datasets([(x, y)], num_classes=3)


@pytest.mark.parametrize("changed", [float("nan"), 7.5])
def test_a_record_of_another_kind_is_refused_not_followed(changed):
    """One label that is no whole number would turn classes into a regression."""
    x, y = raw(10, 0, True)
    labels = [*y.tolist()[:-1], changed]
    with pytest.raises(UserError):
        Population.from_datasets([(x, labels)], num_classes=4)


def test_public_data_sets_are_scaled_record_by_record():
    """Constants are of the literature: no record changes how another one is scaled, rotated or renamed."""
    images, labels = np.random.default_rng(0).integers(256, size=(9, 1, 4, 4)), np.arange(9)
    origin = {"name": "mnist", "scale": 255, "mean": 0.13, "std": 0.31}
    several = _normalised((images, labels, images[:1], labels[:1]), 10, origin)
    for row in range(9):
        one = images[row : row + 1], labels[row : row + 1]
        alone = _normalised((*one, *one), 10, origin)
        for x, y in ((several.x, several.y), turned(several.x, several.y, 1)):
            other = turned(alone.x, alone.y, 1) if x is not several.x else (alone.x, alone.y)
            assert torch.equal(x[row : row + 1], other[0]) and torch.equal(y[row : row + 1], other[1])
        assert renamed(several.y, 3, 10)[row] == renamed(alone.y, 3, 10)[0]


def test_how_a_simulation_divides_a_public_data_set_is_listed_as_not_covered():
    """Partitions exchange records between clients when one record is added; so the guarantee begins after them."""
    words = " ".join(NOT_COVERED)
    assert "divided among the clients of an experiment" in words and "before the run received them" in words
