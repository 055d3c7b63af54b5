"""The table of private searches: its candidates, its shares, and its summary."""

import dataclasses
import json
from pathlib import Path

import pytest

from dpfl_lightning.search.space import changes_releases
from experiments.papers.cells import Cell, path_of, read, required_cells
from experiments.papers.distillation import private_search
from experiments.papers.distillation.private_search import CANDIDATES, SHARE_OF_SET, TRIALS
from experiments.papers.registry import experiments
from experiments.papers.run import RunnerOptions, make, options_of

pytestmark = pytest.mark.usefixtures("in_the_repository")
TABLE = experiments()["distillation.private_search"]


def test_candidates_change_no_release_and_the_default_is_one_of_them():
    assert not any(changes_releases(values, ()) for values in CANDIDATES)
    assert {"model.width": 32, "model.norm": "instance", "model.pooling": "avg"} in CANDIDATES
    assert len(CANDIDATES) == len({tuple(values.values()) for values in CANDIDATES}) == 8 > TRIALS and SHARE_OF_SET < 1


def test_both_budgets_have_every_row_with_three_seeds():
    cells = required_cells(TABLE, "small")
    assert len(cells) == 4 * 2 * 3 and {cell.seed for cell in cells} == {0, 1, 2}


@pytest.mark.usefixtures("tuned")
def test_the_default_row_is_dp_fedavg_of_the_private_tables_with_the_options_of_all_rows():
    for column, source in (
        ("eps2", ("distillation.one_shot", "dpfedavg", "eps2_ipc10")),
        ("eps8", ("distillation.one_shot", "dpfedavg", "eps8_ipc10")),
    ):
        assert TABLE.source("default", column) == source
        runner = RunnerOptions(None, Path("results"), Path("runs"))
        runs = [options_of(Cell(*one, "small", 0), runner) for one in (source, (TABLE.name, "public", column))]
        first, second = (dataclasses.asdict(dataclasses.replace(run, tracking=None)) for run in runs)
        assert first == second and first["privacy"]["accountant"] == "pld"


@pytest.mark.e2e
@pytest.mark.usefixtures("tuned")
def test_the_set_is_one_release_of_half_of_epsilon(work, monkeypatch):
    monkeypatch.setitem(private_search._ON_PUBLIC, "epochs", 10)  # of so few records
    overrides = {"data.name": "digits", "data.public_records": "200", "model.width": "4", "model.depth": "2"}
    overrides |= {"privacy.delta": "0.001", "clients.batch_size": "16", "data.partition": "{name: iid}", "rounds": "1"}
    cell = Cell(TABLE.name, "set", "eps8", "small", 0, tuple(sorted(overrides.items())))
    assert make([cell], work) == []
    card, result = (
        json.loads(next(work.runs.rglob(f"set/{name}.json")).read_text()) for name in ("distilled", "result")
    )
    assert card["strategy"] == ["feature_means"] and result["rounds"] == 1
    assert all(client["epsilon_spent"] == pytest.approx(4, abs=1e-5) for client in result["clients"])
    content = read(path_of(work.results, cell))
    assert 7.9 < content["epsilon_max"] <= 8 and -1 <= content["values"]["spearman"] <= 1


@pytest.mark.usefixtures("tuned")
def test_public_records_score_candidates_once_for_all_budgets_of_a_seed(monkeypatch):
    made = []
    monkeypatch.setattr(private_search, "_scores", lambda sweep, options, found: made.append(options.seed) or [0.5])
    monkeypatch.setattr(private_search, "_public_scores", {})
    runner = RunnerOptions(None, Path("results"), Path("runs"))
    for seed, column in ((0, "eps2"), (0, "eps8"), (1, "eps2"), (0, "eps2")):
        private_search._on_public(options_of(Cell(TABLE.name, "public", column, "small", seed), runner))
    assert made == [0, 1]


def test_the_summary_has_the_correlations_of_each_budget():
    found = {
        ("set", "eps2"): [{"values": {"spearman": one}} for one in (0.2, 0.6)],
        ("default", "eps2"): [{"values": {}}],
    }
    lines = TABLE.summary(TABLE, found).splitlines()
    assert [word.strip() for word in lines[2].split("|")[1:-1]] == ["epsilon 2", "0.40", "0.20 to 0.60", "2"]
    assert len(lines) == 3 and TABLE.summary(TABLE, {}) == ""
