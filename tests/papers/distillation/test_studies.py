"""Cells of the distillation paper, made on handwritten digits through the command."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from dpfl_lightning.papers.sets.distilled_set import DistilledSet
from experiments.papers.__main__ import main
from experiments.papers.cells import Cell, contents, kept
from experiments.papers.distillation import studies
from experiments.papers.registry import experiments
from experiments.papers.run import CellContext, RunnerOptions, make

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[3]
DIGITS = {
    "data.name": "digits",
    "data.records_per_client": "110",
    "data.public_records": "200",
    "model.width": "4",
    "model.depth": "2",
    "rounds": "2",
}
QUICK = {**DIGITS, "strategies.distillation.net_epochs": "2", "strategies.distillation.evaluation_epochs": "1"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Fewer passes over each set."""
    monkeypatch.chdir(ROOT)
    fewer = {"_PASSES": 2, "_NET_EPOCHS": 4, "NETWORKS": 2}
    training = studies.Training(epochs=4, momentum=0.9, decayed=True)
    for name, value in {"ON_A_SET": training, "ON_EVERYTHING": training, **fewer}.items():
        monkeypatch.setattr(studies, name, value)


@pytest.fixture
def calls(monkeypatch):
    """`calls(name)`: the arguments of every call of this function of `studies`."""

    def watch(name):
        function, found = getattr(studies, name), []
        monkeypatch.setattr(studies, name, lambda *args: found.append(args) or function(*args))
        return found

    return watch


def cell(name: str, row: str, column: str, overrides: dict[str, str]) -> Cell:
    return Cell(f"distillation.{name}", row, column, "small", 0, tuple(sorted(overrides.items())))


def made(work: RunnerOptions, *asked) -> dict:
    one = cell(*asked)
    assert make([one], work) == []
    return kept(work.results, one)


def population_and_net(work, one):
    context = CellContext(one, work)
    population = studies.population_of(context)
    return population, studies.new_net(context.options, population)


def test_a_set_is_scored_by_fresh_nets_on_the_test_set(work):
    content = made(work, "baselines", "ten_steps", "alpha1", QUICK)
    values, one = content["values"], cell("baselines", "ten_steps", "alpha1", QUICK)
    assert 0 < values["test_accuracy"] < 100 and values["test_accuracy_std"] >= 0 and "accuracy" not in values
    assert content["rounds"] == 2 and content["epsilon_max"] is None
    assert content["guarantee"].startswith("No differential privacy")
    assert values["delivered_accuracy"] > 0
    assert "experiments.papers distillation.baselines --rows ten_steps --columns alpha1" in content["command"]
    population, build = population_and_net(work, one)
    records = DistilledSet.load(work.runs / one.place).records
    assert records[0].shape == (100, 1, 8, 8)
    again = studies.train_and_score(build, population, records, studies.ON_A_SET, 2, 0)
    assert values["test_accuracy"] == pytest.approx(100 * again.mean)


def test_baselines_need_no_run_and_random_records_are_as_many_as_the_images(work, calls):
    scored = calls("train_and_score")
    for row in ("random", "whole", "public"):
        values = made(work, "baselines", row, "alpha1", DIGITS)["values"]
        assert 0 <= values["test_accuracy"] <= 100 and not list(work.runs.glob("**/ledger.jsonl")), row
    counts = [records[1].bincount().tolist() for _, _, records, *_ in scored]
    assert counts[0] == [10] * 10 and sum(counts[1]) == 1100 and sum(counts[2]) == 200


@pytest.mark.filterwarnings("ignore:`privacy.delta` should be below")
def test_with_privacy_the_budget_holds(work):
    for row in ("tuned", "dpfedavg"):
        overrides = QUICK if row == "tuned" else {**DIGITS, "clients.batch_size": "16"}
        content = made(work, "one_shot", row, "eps8_ipc10", overrides)
        assert content["epsilon_max"] == pytest.approx(8, abs=0.01) and content["epsilon_max"] <= 8 + 1e-6
        assert "differential privacy" in content["guarantee"] and content["values"]["gigabytes"] > 0


def test_a_search_uses_one_set_and_ranks_by_public_records(work, capsys, monkeypatch):
    """Every scorer's cell by itself; the set is made once, by the first that needs it, and kept."""
    experiment = experiments()["distillation.search_set"]
    training = experiment.cells["distdd"]
    few = {f"strategies.distillation.{key}": 1 for key in ("image_steps", "net_epochs", "evaluation_epochs")}
    quick = dataclasses.replace(training, options=lambda *place: training.options(*place) | few)
    quick_set = dataclasses.replace(experiment, cells={"distdd": quick})
    monkeypatch.setitem(experiments(), experiment.name, quick_set)
    flags = ["--results", str(work.results), "--runs", str(work.runs), *work.free]
    argv = [
        "distillation.nas",
        "--rows",
        "net03,net16,net19",
        "--columns",
        "federated,distilled",
    ]
    overrides = {key: text for key, text in DIGITS.items() if not key.startswith("model")} | {"rounds": "1"}
    words = [f"--{key}={text}" for key, text in overrides.items()]
    assert main([*argv, *flags, *words]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\| trained on the distilled set +\| 3 ", text) and "Kendall" in text
    assert len(list(work.runs.glob("distillation.search_set/*/set_distdd_seed0*/distilled.safetensors"))) == 1
    distilled = kept(work.results, cell("nas", "net03", "distilled", overrides))["values"]
    federated = kept(work.results, cell("nas", "net03", "federated", overrides))["values"]
    assert distilled["set_gigabytes"] > 0 and distilled["parameters"] == federated["parameters"] > 0
    assert "delivered_accuracy" in federated
    assert federated["test_accuracy"] == pytest.approx(federated["delivered_accuracy"])
    assert len(contents(work.results, "distillation.nas")) == 6


def test_a_hold_out_is_of_public_records_alone(work):
    """A net that knows the public records by heart is right there, and only there."""
    few = {**DIGITS, "data.public_records": "20"}
    population, build = population_and_net(work, cell("hpo", "rate00", "random", few))
    module, training = studies.ClientModule(build(0)), studies.Training(epochs=300, learning_rate=0.1, momentum=0.9)
    learnt = studies.trained_on(module, module.flat, population.public_records(), training, 0)
    found = studies.scored(build, population, learnt)
    assert found["holdout_accuracy"] == 100 and found["test_accuracy"] < 90
    rows = torch.cat([*population.train_of, population.test])
    assert not torch.isin(population.public, rows).any()
