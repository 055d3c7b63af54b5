"""The table of private searches: its candidates, its shares, and its summary."""

import json

import pytest

from dpfl_lightning.search.space import changes_releases
from experiments.papers.cells import Cell, kept
from experiments.papers.distillation import private_search
from experiments.papers.distillation.private_search import CANDIDATES, SHARE_OF_SET, TRIALS
from experiments.papers.registry import experiments
from experiments.papers.run import make

pytestmark = pytest.mark.usefixtures("in_the_repository")
TABLE = experiments()["distillation.private_search"]


def test_candidates_change_no_release_and_the_default_is_one_of_them():
    assert not any(changes_releases(values, ()) for values in CANDIDATES)
    assert {"model.width": 32, "model.norm": "instance", "model.pooling": "avg"} in CANDIDATES
    assert len(CANDIDATES) == len({tuple(values.values()) for values in CANDIDATES}) == 8 > TRIALS and SHARE_OF_SET < 1


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
    content = kept(work.results, cell)
    assert 7.9 < content["epsilon_max"] <= 8 and -1 <= content["values"]["spearman"] <= 1
