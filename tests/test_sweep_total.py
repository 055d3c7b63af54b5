"""What a set and the run that follows its search cost together."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest
import yaml
from test_sweep import SMALL

from dpfl_lightning.config.load import from_mapping
from dpfl_lightning.fit import main as fit
from dpfl_lightning.privacy.ledger.verify import read
from dpfl_lightning.reporting.distilled import load_distilled
from dpfl_lightning.sweep import main as sweep
from dpfl_lightning.sweep import with_the_set

RUN = {key: value for key, value in SMALL.items() if key != "sweep"}
DISTILLING = {**RUN, "strategies": {"distillation": {"net_epochs": 1, "evaluation_epochs": 1}}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A set, and a run of the same clients."""
    made = []
    for name, raw in (("set", DISTILLING), ("run", RUN)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "mine.yaml").write_text(yaml.safe_dump(raw))
        assert fit(["--config", str(folder / "mine.yaml"), "--output_dir", str(folder / "out")]) == 0
        made.append(folder / "out")
    return made


def final(folder, **changed):
    return dataclasses.replace(from_mapping(RUN), output_dir=str(folder), **changed)


@pytest.mark.e2e
def test_the_set_and_the_run_are_composed_from_both_ledgers(folders):
    source, folder = folders
    words = with_the_set(str(source), load_distilled(source).card, final(folder))
    both = read([one / "ledger.jsonl" for one in folders])
    assert words == f"Together with the set, composed from both ledgers: {both.weakest.words()}"
    alone = [json.loads((one / "result.json").read_text())["clients"] for one in folders]
    for client, own in enumerate(both.accounts):
        spent = [clients[client]["epsilon_spent"] for clients in alone]
        assert max(spent) < own.epsilon < math.fsum(spent)
        assert set(own.releases) == {"class_gradients", "train"}


def test_where_they_cannot_be_composed_it_is_said_why(folders, tmp_path):
    source, folder = folders
    card = load_distilled(source).card
    said = with_the_set(str(source), card, final(folder, seed=1))
    assert "distributed differently" in said and said.endswith(
        "Add the epsilon and delta of the set to those of the run."
    )
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / "ledger.jsonl").unlink()
    assert "must be a ledger" in with_the_set(str(copy), card, final(folder))
    for name in ("ledger.jsonl", "ledger.head"):
        shutil.copy(folder / name, copy)
    assert "name each run once" in with_the_set(str(copy), card, final(folder))
    other = {**card, "ledger": {**card["ledger"], "run": "another"}}
    assert "belongs to another run" in with_the_set(str(source), other, final(folder))


def test_public_records_cost_nobody_anything(folders):
    source, folder = folders
    card = load_distilled(source).card
    assert with_the_set(None, {}, final(folder)) is None
    assert with_the_set(str(source), {**card, "data": {**card["data"], "use_public": True}}, final(folder)) is None


@pytest.mark.e2e
def test_the_command_says_it_after_the_final_run(folders, tmp_path, capsys):
    raw = {**SMALL, "sweep": {**SMALL["sweep"], "distilled": str(folders[0]), "trials": 1}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw))
    out = tmp_path / "out"
    assert sweep(["--config", str(tmp_path / "mine.yaml"), "--output_dir", str(out), "--final"]) == 0
    said, told = capsys.readouterr().out, json.loads((out / "result.json").read_text())["final"]
    assert (
        told["with_the_set"].startswith("Together with the set, composed from both ledgers: (")
        and told["with_the_set"] in said
    )
    assert told["test_accuracy"] == json.loads((out / "final" / "result.json").read_text())["test_accuracy"]
