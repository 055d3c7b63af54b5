"""A way in which records arrive is a class and a registration."""

import pytest
import torch

from dpfl_lightning import Population
from dpfl_lightning.build import build_population, build_test_set
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.data.arrival import ARRIVALS, OfTables, OfUser, arrival_of, arrives_by
from dpfl_lightning.errors import UserError


class Mine(Population):
    """A population of a user."""


def rows(count: int):
    """Records of two clients."""
    x, y = torch.arange(4 * count, dtype=torch.float32).view(count, 4), torch.arange(count) % 2
    return {"cork": (x, y), "dijon": (x + 1, y)}


def options(class_path: str, **init_args):
    data = {"name": None, "class_path": class_path, "init_args": init_args, "population_args": {"num_classes": 2}}
    return from_mapping({"data": data, "clients": {"count": None}, "privacy": None})


def test_tables_of_a_subclass_are_tables():
    assert type(arrival_of(options(f"{__name__}.Mine.from_dataframe").data)) is OfTables
    assert type(arrival_of(options(f"{__name__}.rows").data)) is OfUser


def test_a_new_way_takes_a_class_and_a_registration(monkeypatch):
    monkeypatch.setattr("dpfl_lightning.data.arrival.ARRIVALS", {**ARRIVALS})

    @arrives_by(rows)
    class WithoutSites(OfUser):
        """The server has the first rows of each client as a test set."""

        def test_set(self, clients, seed):
            return self._made(None, {"count": 2})

    given = options(f"{__name__}.rows", count=10)
    ours, publics = build_population(given), build_test_set(given)
    assert sum(ours.num_records) + sum(ours.num_held_out) == 20
    assert sum(publics.num_records) + sum(publics.num_held_out) == 4


def test_a_path_that_cannot_be_imported_is_one_clear_error():
    with pytest.raises(UserError, match=r"`data.class_path` must be importable"):
        build_test_set(options("no_such_module.rows"))


def test_columns_of_a_test_table_that_are_no_mapping_are_one_clear_error():
    given = options("dpfl_lightning.Population.from_dataframe", label="ill", test="none.csv", columns=["age"])
    with pytest.raises(UserError, match="`columns` must be a mapping"):
        build_test_set(given)
