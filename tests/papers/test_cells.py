"""Cells as files: where they lie, what is found again, and what a damaged one says."""

from __future__ import annotations

import json

import pytest
from fake_experiments import CELL, fake, held

from dpfl_lightning.errors import UserError
from experiments.papers.cells import Cell, finished, missing_cells, path_of, read, required_cells, write
from experiments.papers.experiment import Reference, Row
from experiments.papers.registry import experiments


def test_each_cell_is_wanted_once_and_computed_ones_without_seed():
    cells = required_cells(fake(), "small", [0, 3])
    assert len(cells) == len(set(cells)) == 2 * (2 * 2 + 1)
    assert {cell.seed for cell in cells if cell.row == "formulas"} == {None}
    assert {cell.seed for cell in cells if cell.row == "ours"} == {0, 3}


def test_seeds_are_those_declared_for_the_scale():
    experiment = fake(seeds={"paper": (0, 1, 2)})
    assert {cell.seed for cell in required_cells(experiment, "paper", None) if cell.row == "ours"} == {0, 1, 2}
    assert {cell.seed for cell in required_cells(experiment, "small", None) if cell.row == "ours"} == {0}


def test_what_is_written_is_found_with_every_seed(tmp_path, known):
    for seed in (10, 2):
        write(tmp_path, CELL._replace(seed=seed), held(accuracy=float(seed)))
    write(tmp_path, Cell("fake.table1", "formulas", "a", "small"), held(noise=2.0))
    found = finished(tmp_path, fake(), "small")
    assert [one["values"]["accuracy"] for one in found["ours", "a"]] == [2.0, 10.0]
    assert found["formula", "a"][0]["seed"] is None and ("theirs", "a") not in found
    assert finished(tmp_path, fake(), "paper") == {}


def test_a_departure_is_another_cell(tmp_path, known):
    other = CELL._replace(overrides=(("clients.learning_rate", "0.02"),))
    write(tmp_path, other, held(accuracy=1.0))
    assert finished(tmp_path, fake(), "small") == {} and missing_cells([CELL, other], tmp_path) == [CELL]
    assert finished(tmp_path, fake(), "small", other.overrides)["ours", "a"][0]["overrides"] == {
        "clients.learning_rate": "0.02"
    }


@pytest.mark.parametrize("text", ["{name: uniform, low: 1/3}", "../../x", "a" * 300])
def test_any_departure_is_one_folder_below_the_results(text, tmp_path):
    cell = CELL._replace(overrides=(("privacy.epsilon", text),))
    path = write(tmp_path, cell, held())
    assert path.parent.parent == tmp_path / "fake.table1" and read(path)["overrides"] == {"privacy.epsilon": text}


def test_another_table_shows_the_same_cells(tmp_path, known):
    assert required_cells(known, "small", None) == [Cell("fake.table1", "ours", "b", "small", 0)]
    write(tmp_path, CELL._replace(column="b"), held(accuracy_best=3.0))
    assert finished(tmp_path, known, "small")["best", "x"][0]["values"] == {"accuracy_best": 3.0}


def test_a_cell_is_read_together_with_the_one_beside_it(tmp_path, known, monkeypatch):
    """Of the same seed and overrides, and only when both are made."""

    def values(own, other):
        return {"behind": other["values"]["accuracy"] - own["values"]["accuracy"]}

    beside = Reference("fake.table1", "ours", "a", values)
    table = fake(name="fake.table2", rows={"ours": Row("ours", "behind", reference=beside)})
    monkeypatch.setitem(experiments(), "fake.table2", table)
    reference, overrides = CELL._replace(overrides=(("rounds", "9"),)), (("rounds", "9"),)
    cells = required_cells(table, "small", [0, 1], overrides)
    assert len(cells) == 6 and {reference, reference._replace(seed=1)} < set(cells)
    for seed in (0, 1):
        write(tmp_path, cells[0]._replace(seed=seed), held(accuracy=50.0))
    write(tmp_path, reference._replace(seed=1), held(accuracy=57.0))
    first, second = finished(tmp_path, table, "small", overrides)["ours", "a"]
    assert first["values"] == {"accuracy": 50.0} and second["values"] == {"accuracy": 50.0, "behind": 7.0}


def test_a_file_is_json_that_others_read(tmp_path):
    path = write(tmp_path, CELL, {**held(accuracy=1 / 3, epsilon=float("inf")), "curve": {"1": 2.0}})
    assert json.loads(path.read_text())["values"] == {"accuracy": 0.333333333, "epsilon": None}
    assert path == path_of(tmp_path, CELL) and not list(path.parent.glob("*.partial"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"values": {}}', '{"values": 3, "seconds": 1}'])
def test_a_damaged_file_says_what_to_do(content, tmp_path, known):
    path = write(tmp_path, CELL, held())
    path.write_text(content)
    with pytest.raises(UserError, match=r"must be a finished cell.*Delete it to make the cell again"):
        finished(tmp_path, fake(), "small")
