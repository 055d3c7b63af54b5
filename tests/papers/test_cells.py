"""Cells as lines of a file: what is read again, what a recorder writes, and what a damaged one says."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from fake_experiments import CELL, fake, held

from dpfl_lightning.errors import UserError
from experiments.papers.cells import (
    Cell,
    _ordered,
    contents,
    declaration,
    file_of,
    finished,
    missing_cells,
    read,
    required_cells,
    write,
)
from experiments.papers.recorder import Recorder, accuracies


def test_each_cell_is_required_once_with_the_declared_seeds_and_computed_ones_without():
    cells = required_cells(fake().restricted(None, None, [0, 3]), "small")
    assert len(cells) == len(set(cells)) == 2 * (2 * 2 + 1)
    assert {cell.seed for cell in cells if cell.row == "formulas"} == {None}
    assert {cell.seed for cell in cells if cell.row == "ours"} == {0, 3}
    experiment = fake(seeds={"paper": (0, 1, 2)})
    for scale, seeds in (("paper", {0, 1, 2}), ("small", {0})):
        assert {cell.seed for cell in required_cells(experiment, scale) if cell.row == "ours"} == seeds
    columns = dict(experiment.columns)
    columns["a"] = dataclasses.replace(columns["a"], seeds={"small": (4, 5)})
    experiment = fake(columns=columns)
    for table, pairs in (
        (experiment, {("a", 4), ("a", 5), ("b", 0)}),
        (experiment.restricted(None, None, [7]), {("a", 7), ("b", 7)}),
    ):
        assert {(cell.column, cell.seed) for cell in required_cells(table, "small") if cell.row == "ours"} == pairs


def test_what_is_written_is_found_with_every_seed(tmp_path, known):
    for seed in (10, 2):
        write(tmp_path, CELL._replace(seed=seed), held(accuracy=float(seed)))
    write(tmp_path, Cell("fake.table1", "formulas", "a", "small"), held(noise=2.0))
    found = finished(tmp_path, fake(seeds={"small": (2, 10)}), "small")
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


def test_any_override_is_one_folder_of_runs(tmp_path):
    for text in ("{name: uniform, low: 1/3}", "../../x", "a" * 300):
        cell = CELL._replace(overrides=(("privacy.epsilon", text),))
        write(tmp_path, cell, held())
        assert len(cell.place.parts) == 3 and read(tmp_path, cell)["overrides"] == {"privacy.epsilon": text}


def test_a_cell_that_is_made_again_replaces_its_line(tmp_path):
    for accuracy in (1.0, 2.0):
        for seed in (0, 1):
            write(tmp_path, CELL._replace(seed=seed), held(accuracy=accuracy))
    assert len(file_of(tmp_path, CELL.experiment).read_text().splitlines()) == 2
    assert read(tmp_path, CELL)["values"] == {"accuracy": 2.0}


def test_processes_that_write_at_once_lose_no_line(tmp_path):
    code = "import sys; from pathlib import Path; from experiments.papers.cells import Cell, write\n"
    code += "for seed in map(int, sys.argv[2:]): "
    code += "write(Path(sys.argv[1]), Cell('fake.table1', 'ours', 'a', 'small', seed), {'values': {}, 'seconds': 1.0})"
    parts = [map(str, range(first, 60, 3)) for first in range(3)]
    writers = [subprocess.Popen([sys.executable, "-c", code, tmp_path, *part]) for part in parts]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert sorted(one["seed"] for one in contents(tmp_path, CELL.experiment).values()) == list(range(60))
    assert list(tmp_path.iterdir()) == [file_of(tmp_path, CELL.experiment)]


def test_a_cell_that_was_made_with_other_options_or_has_another_seed_is_not_shown(tmp_path, known):
    write(tmp_path, CELL, {**held(accuracy=1.0), "declared": declaration(CELL)})
    write(tmp_path, CELL._replace(seed=9), held(accuracy=5.0))
    assert [one["seed"] for one in finished(tmp_path, fake(), "small")["ours", "a"]] == [0]
    assert [one["seed"] for one in finished(tmp_path, fake().restricted(None, None, [9]), "small")["ours", "a"]] == [9]
    order = {name: declaration(CELL) | {"options": {"strategies": {one: {} for one in name}}} for name in ("ab", "ba")}
    assert _ordered(order["ab"]) != _ordered(order["ba"]), "strategies have an order"
    write(tmp_path, CELL, {**held(accuracy=1.0), "declared": {**declaration(CELL), "options": {"rounds": 77}}})
    assert finished(tmp_path, fake(), "small") == {} and missing_cells([CELL], tmp_path) == [CELL]


def test_a_damaged_line_says_what_to_do(tmp_path, known):
    path = write(tmp_path, CELL, held())
    line = path.read_text()
    for content in ("\n", "[]\n", "{}\n", '{"values": {}}\n', '{"values": 3, "seconds": 1}\n', line[:-9]):
        path.write_text(line + content)
        with pytest.raises(UserError, match=r"jsonl:2` must be a finished cell.*Delete it to make the cell again"):
            finished(tmp_path, fake(), "small")


# ---- what a recorder reads off a run


def test_accuracies_and_how_equal_they_are():
    clients = [{"accuracy": one} for one in (0.9, 0.5, 0.6, 0.7, 0.8, 1.0, None)]
    expected = {"accuracy": 75.0, "test_accuracy": 25.0, "accuracy_gap": 50.0, "accuracy_worst": 50.0}
    assert accuracies(clients, 0.25) == pytest.approx(expected)
    assert accuracies([{"accuracy": None}], None) == {}


def test_a_run_is_read(make_loop):
    recorder = Recorder()
    result = make_loop(parts=[recorder], rounds=3, evaluate_every=2).run()
    found = recorder.record
    assert found["values"]["accuracy"] == pytest.approx(100 * np.mean([one["accuracy"] for one in result.clients]))
    assert found["values"]["test_accuracy"] == pytest.approx(100 * result.test_accuracy)
    assert found["clients"]["epsilon_budget"] == [4.0, 6.0, 8.0, 10.0] and recorder.device == "cpu"
