"""The command as a person meets it: the files in sweeps/, mistakes, what it leaves, and who pays for private trials."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from mlflow.tracking import MlflowClient
from test_conf import small_fashion  # noqa: F401 (a fixture)

from dpfl_lightning.build import build_population
from dpfl_lightning.config.load import load
from dpfl_lightning.data.datasets import load as load_data
from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.accountant import delta_text, epsilon_text
from dpfl_lightning.runtime.threads import cores
from dpfl_lightning.search.objectives import Cost, objective
from dpfl_lightning.search.options import SweepOptions
from dpfl_lightning.search.report import cost_text, set_text, total_cost
from dpfl_lightning.search.space import check_trials_with
from dpfl_lightning.search.study import Pruned
from dpfl_lightning.strategies.distillation.artefact import DistilledSet
from dpfl_lightning.sweep import Search
from dpfl_lightning.sweep import main as sweep

SWEEPS = Path(__file__).parents[1] / "sweeps"
FILES = sorted(SWEEPS.glob("*.yaml"))
SMALL = {
    "rounds": 2,
    "data": {"name": "digits", "public_records": 90},
    "model": {"name": "logistic"},
    "clients": {"count": 5, "learning_rate": 0.5},
    "privacy": {"epsilon": [2, 4, 8, 8, 16], "delta": 1.0e-3},
    "tracking": None,
    "sweep": {
        "space": {"clients.learning_rate": {"low": 0.1, "high": 1.0, "log": True}},
        "training": {"epochs": 2, "batch_size": 16},
        "sampler": {"name": "random"},
        "trials": 2,
    },
}


def changed(**own) -> dict:
    return {**SMALL, "sweep": {**SMALL["sweep"], **own}}


@pytest.fixture
def write(tmp_path):
    """Writes a search's file; answers the words that run it."""

    def written(raw: dict, *more: str) -> list[str]:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(raw))
        return ["--config", str(path), "--output_dir", str(tmp_path / "out"), *more]

    return written


def shrunken(path: Path, small_fashion: Path) -> list[str]:  # noqa: F811
    """Overrides that make any file in sweeps/ take seconds."""
    argv = ["--config", str(path), "--rounds", "1", "--tracking", "null", "--sweep.trials", "2"]
    if "fmnist" in path.name:
        argv += ["--data.folder", str(small_fashion), "--data.records_per_client", "40", "--data.public_records", "300"]
        argv += ["--clients.batch_size", "10", "--privacy.epsilon", "4"]
    if "training" in path.read_text():
        argv += ["--sweep.training.epochs", "1"]
    return argv


@pytest.mark.e2e
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_in_sweeps_runs(path, small_fashion, tmp_path, capsys):  # noqa: F811
    assert path.read_text().startswith("# ")
    assert sweep([*shrunken(path, small_fashion), "--output_dir", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    first, last = (line for line in said.splitlines() if " of 2) " in line)
    assert first.startswith("trial 0 (1 of 2)") and first.endswith(" left") and "best.yaml" in said
    assert last.startswith("trial 1 (2 of 2)") and " left" not in last
    best, _ = load(["--config", str(tmp_path / "out" / "best.yaml")])
    assert best.data.public_records > 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert len(result["trials"]) == 2 and result["cost"] is None


@pytest.mark.e2e
def test_the_best_is_trained_by_fit_and_nothing_is_made_twice(write, tmp_path, capsys):
    assert sweep(write(SMALL, "--final")) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    best = result["trials"][result["best"][0]]
    assert best["scores"]["accuracy"] == max(one["scores"]["accuracy"] for one in result["trials"])
    rate = best["params"]["clients.learning_rate"]
    final = yaml.safe_load((tmp_path / "out" / "final" / "options.yaml").read_text())
    assert final["clients"]["learning_rate"] == rate and "Final test accuracy" in said
    assert load(["--config", str(tmp_path / "out" / "best.yaml")])[0].clients.learning_rate == rate
    assert sweep(write(SMALL, "--final")) == 0
    again = capsys.readouterr().out
    assert "Resuming a study that has 2 complete" in again and "trial 0 (" not in again
    assert "Final test accuracy" in again and "round 1/2" not in again


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (changed(space={"model.widht": {"choices": [8]}}), ["sweep.space.model.widht", "it has none"]),
        (changed(space={"clients.learning_rate": {"low": -1.0, "high": 1.0}}), ["clients.learning_rate", "above 0"]),
        (changed(distilled="runs/nowhere"), ["distilled", "runs/nowhere", "strategy distillation"]),
        (changed(trails=3), ["sweep.trails", "Did you mean `sweep.trials`"]),
        (changed(trials=0), ["sweep.trials", "be >= 1, got 0. Set in "]),
        (changed(sampler={"seed": 1}), ["`sweep.sampler` must have a `name`"]),
        (changed(trials="many"), ["sweep.trials", "a whole number", "many"]),
        (changed(objective="publick"), ["sweep.objective", "Did you mean `public`"]),
        (changed(training={"epoch": 3}), ["sweep.training.epoch", "Did you mean `epochs`"]),
        (changed(training={"momentum": 1.0}), ["sweep.training.momentum", "[0, 1)"]),
        (changed(scores=["accuracy", "num_params"], pruner={"name": "median"}), ["sweep.pruner.name", "several"]),
        ({**SMALL, "data": {"name": "digits"}}, ["data.public_records", "--sweep.distilled"]),
        ({**changed(objective="public", training={}), "data": {"name": "digits"}}, ["data.public_records"]),
        ({**changed(objective="private", training={}), "privacy": None}, ["privacy.epsilon", "a budget for each"]),
        ({**changed(objective="private", training={}), "data": {"name": "digits"}}, ["data.public_records", "scored"]),
        ({**changed(space={"clients.batch_size": {"choices": [8, 16]}}, training={}),
          "clients": {"count": 5, "learning_rate": [1, 1, 1, 1, 1]}}, ["clients.learning_rate", "one number"]),
        (changed(space={"clients.batch_size": {"choices": [8, 16]}}, training={"batch_size": 16}),
         ["sweep.training.batch_size", "be left out if clients.batch_size is given for trials"]),
        (changed(trials_with={"rounds": 3}), ["sweep.trials_with.rounds", "model, clients, data, engine"]),
        (changed(networks=40), ["sweep.networks", "the number of records of the rarest class"]),
        ({**changed(objective="private", training={}), "privacy": {**SMALL["privacy"], "diagnostics": True}},
         ["privacy.diagnostics", "be false with objective private", "without a bound"]),
        ({**SMALL, "data": {**SMALL["data"], "use_public": True}}, ["data.use_public", "be false with objective set"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_no_trial_is_made(raw, words, write, tmp_path, capsys):
    assert sweep(write(raw)) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    for word in words:
        assert word in said.err
    assert "trial 0" not in said.out and not (tmp_path / "out" / "result.json").exists()


@pytest.mark.e2e
@pytest.mark.parametrize("objective", ["set", "public", "private"])
@pytest.mark.parametrize(
    ("key", "value"), [("name", "mnist"), ("folder", "elsewhere"), ("public_records", 1200), ("use_public", True)]
)
def test_trials_have_the_public_records_of_the_run(objective, key, value, write, tmp_path, capsys):
    """What is public in a trial alone belongs to clients in the run that follows, and nobody would have paid."""
    own = {} if objective != "set" else {"training": SMALL["sweep"]["training"]}
    for more in ({f"data.{key}": value}, {"data": {key: value}}):
        assert sweep(write(changed(objective=objective, **{"training": {}, **own}, trials_with=more))) == 2
        said = capsys.readouterr()
        assert f"`sweep.trials_with.data.{key}` must be that of the run, " in said.err and said.err.count("\n") == 1
        assert repr(value) in said.err and "trial 0" not in said.out
    same = {"data.public_records": 90, "data.partition.name": "overlapping"}
    assert check_trials_with(options_of(SMALL), same) is None


@pytest.mark.e2e
def test_a_study_of_another_space_is_refused(write, capsys):
    assert sweep(write(SMALL, "--sweep.trials", "1")) == 0
    assert sweep(write(changed(space={"clients.learning_rate": {"choices": [0.1, 0.2]}}))) == 2
    assert "`sweep.space` must be the same as in study mine of that storage" in capsys.readouterr().err
    assert sweep(write(SMALL, "--seed", "1")) == 2
    assert "`seed` must be the same" in capsys.readouterr().err


def test_what_fails_only_together_is_a_failed_trial(write, tmp_path, capsys):
    """Norm `group` needs a width that is a multiple of 4, which not every one here is."""
    space = {"model.width": {"choices": [4, 6]}, "model.norm": {"choices": ["group", "none"]}}
    raw = {**changed(space=space, sampler={"name": "grid"}, trials=4), "model": {"name": "convnet", "depth": 1}}
    assert sweep(write(raw)) == 0
    said, result = capsys.readouterr().out, json.loads((tmp_path / "out" / "result.json").read_text())
    assert sorted(one["state"] for one in result["trials"]) == ["complete"] * 3 + ["failed"]
    assert "1 failed: `model.width` must be a multiple of 4" in said and "failed: `model.width`" in said


@pytest.mark.e2e
def test_private_trials_cost_every_client_its_whole_budget_each(write, tmp_path, capsys):
    assert sweep(write(changed(objective="private", training={}, trials=3))) == 0
    said = capsys.readouterr().out
    cost = json.loads((tmp_path / "out" / "result.json").read_text())["cost"]
    assert cost["epsilon"] == pytest.approx([6, 12, 24, 24, 48]) and min(cost["epsilon"]) >= 6
    assert cost["delta"] == pytest.approx([3e-3] * 5)
    assert "PRIVATE: 3 trials" in said and "epsilon 48.0" in said
    spent = [0.0] * 5
    for number in range(3):
        folder = tmp_path / "out" / "trials" / "mine" / str(number)
        assert (folder / "ledger.jsonl").is_file()
        for client in json.loads((folder / "result.json").read_text())["clients"]:
            spent[client["client"]] += client["epsilon_spent"]
            assert client["accuracy"] is None, "no held-out record of a client chooses"
    assert all(own <= stated for own, stated in zip(spent, cost["epsilon"], strict=True))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("more", "caveat"),
    [
        ({"privacy": {**SMALL["privacy"], "sampling": "shuffle"}}, "this epsilon is NOT proven"),
        (
            {"data": {**SMALL["data"], "partition": {"name": "overlapping"}, "records_per_client": 50}},
            "a record may live",
        ),
        ({"strategies": {"ifca": {"num_clusters": 2, "selection": "paper_argmin"}}}, "which model each client chooses"),
    ],
)
def test_what_private_trials_epsilons_do_not_cover_is_said_beside_them(more, caveat, write, tmp_path, capsys):
    assert sweep(write({**changed(objective="private", training={}), **more, "rounds": 1})) == 0
    said = capsys.readouterr().out
    cost = json.loads((tmp_path / "out" / "result.json").read_text())["cost"]
    assert any(caveat in one for one in cost["caveats"]), cost
    assert all(said.count(f"Caveat: {one}") == 1 for one in cost["caveats"])
    for number in range(2):
        run = json.loads((tmp_path / "out" / "trials" / "mine" / str(number) / "result.json").read_text())
        assert caveat in run["guarantee"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("trials_with", "words"),
    [({"privacy.epsilon": 0.5}, ""), ({"privacy.epsilon": 0.5, "data.records_per_client": 100}, "had other clients")],
)
def test_a_run_that_private_trials_chose_is_told_with_them(trials_with, words, write, tmp_path, capsys):
    raw = changed(objective="private", training={}, trials=2, trials_with=trials_with)
    assert sweep(write({**raw, "rounds": 1}, "--final")) == 0
    said, result = capsys.readouterr().out, json.loads((tmp_path / "out" / "result.json").read_text())
    assert "A later run on the same clients adds its epsilon and delta." in said
    final = json.loads((tmp_path / "out" / "final" / "result.json").read_text())
    together = max(a + b["epsilon_spent"] for a, b in zip(result["cost"]["epsilon"], final["clients"], strict=True))
    added = result["final"]["with_the_trials"]
    expected = words or f"at most epsilon {epsilon_text(together)} at delta {delta_text(3e-3)} "
    assert expected in added and added in said and together > 16


def test_deltas_are_rounded_up_and_the_headline_holds_for_every_client():
    cost = {"epsilon": [2.0, 4.0], "delta": [2e-3, 2.4644e-5], "caveats": []}
    words = cost_text(cost, 2)
    assert "at most epsilon 4.0000 at delta 0.002 (client 1 " in words and "2.47e-05" in words


def test_a_folder_with_trials_of_a_study_that_is_gone_is_refused(write, tmp_path, capsys):
    raw = changed(objective="private", training={}, trials=1)
    assert sweep(write({**raw, "rounds": 1})) == 0
    (tmp_path / "out" / "study.db").unlink()
    assert sweep(write({**raw, "rounds": 1})) == 2
    said = capsys.readouterr()
    assert "`output_dir` must be the folder of study mine" in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize("name", ["x?y", "x#y", "x%41"])
def test_a_folder_that_no_address_can_name_is_refused(name, write, tmp_path, capsys):
    assert sweep([*write(SMALL)[:2], "--output_dir", str(tmp_path / name)]) == 2
    assert "`output_dir` must have no ?, # or %" in capsys.readouterr().err and not (tmp_path / name).exists()


def test_a_grid_does_not_go_on_with_what_others_drew(write, capsys):
    space = {"clients.learning_rate": {"choices": [0.1, 0.2, 0.4]}}
    assert sweep(write(changed(space=space, trials=1))) == 0
    assert sweep(write(changed(space=space, sampler={"name": "grid"}))) == 2
    assert "`sweep.sampler.name` must not be grid in a study with 1 trials" in capsys.readouterr().err


@pytest.mark.e2e
def test_another_best_trial_has_its_run_elsewhere(write, tmp_path):
    assert sweep(write(changed(trials=1), "--rounds", "1", "--final")) == 0
    out = tmp_path / "out"
    best = load(["--config", str(out / "best.yaml"), "--output_dir", str(out / "final")])[0]
    assert Search._begun_final(best)[1]["test_accuracy"] is not None
    other = dataclasses.replace(best, clients=dataclasses.replace(best.clients, learning_rate=0.01))
    with pytest.raises(UserError, match=r"contains the run of an earlier best trial\. Move .*final away .*best\.yaml"):
        Search._begun_final(other)


@pytest.mark.e2e
def test_another_study_in_the_same_folder_makes_trials_of_its_own(write, tmp_path, capsys):
    raw = changed(objective="private", training={}, trials=1)
    for name in ("mine", "other"):
        assert sweep(write(raw, "--sweep.name", name)) == 0, capsys.readouterr()
        assert (tmp_path / "out" / "trials" / name / "0" / "result.json").is_file()


def test_workers_share_the_cores_in_trials_only(tmp_path):
    run = options_of({**SMALL, "output_dir": str(tmp_path)})
    own = SweepOptions(**{**SMALL["sweep"], "name": "s", "objective": "private", "training": {}, "trials": 1})
    search = Search(own, run, workers=2)
    search.work()
    assert search.finish() == 0
    in_trials = yaml.safe_load((tmp_path / "trials" / "s" / "0" / "options.yaml").read_text())
    assert in_trials["engine"]["workers"] == max(1, cores() // 2)
    assert load(["--config", str(tmp_path / "best.yaml")])[0].engine.workers is None


def test_a_trial_that_died_counts_with_its_whole_budget():
    costs = [
        {"cost": {"epsilon": [1.0, None], "delta": [0.1, 0.1]}},
        {},
        {"cost": {"epsilon": [1.0, 2.0], "delta": [0.1, 0.1], "caveats": ["b", "a"]}},
        {"cost": {"epsilon": [1.0, 2.0], "delta": [0.1, 0.1], "caveats": ["c", "b"]}},
    ]
    assert total_cost(costs) == {"epsilon": [3.0, None], "delta": [pytest.approx(0.3)] * 2, "caveats": ["b", "a", "c"]}
    assert total_cost([{}]) is None


def options_of(raw: dict):
    from dpfl_lightning.config.load import from_mapping

    return from_mapping({key: value for key, value in raw.items() if key != "sweep"})


def test_neither_clients_records_nor_the_test_set_choose():
    """Every objective scores on public records, and none on what it trained on."""
    run = options_of(SMALL)
    for own in (
        SweepOptions(training={"epochs": 2}),
        SweepOptions(objective="public"),
        SweepOptions(objective="private"),
    ):
        made = objective(own, run)
        parts = [people for people, _ in made._parts] if own.objective == "set" else [made._people(run)]
        data = load_data("digits")
        public = {row.numpy().tobytes() for row in data.x[-90:]}
        for people in parts:
            assert people.test is not None
            assert {row.numpy().tobytes() for row in people.x[people.test]} <= public
            trained = {row.numpy().tobytes() for rows in people.train_of for row in people.x[rows]}
            assert (trained <= public) == (own.objective != "private")
            tested = {row.numpy().tobytes() for row in people.x[people.test]}
            assert not trained & tested


def a_set(folder: Path, each: int = 4, **card) -> Path:
    x = torch.randn(10 * each, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = {"num_classes": 10, "epsilon_max": 8.0, "delta_max": 1e-3, **card}
    folder.mkdir(exist_ok=True)
    DistilledSet(x, torch.arange(10).repeat_interleave(each), whole).save(folder)
    return folder


def test_a_distilled_set_is_searched_and_says_what_it_cost(write, tmp_path, capsys):
    made = {"name": "digits", "public_records": 90}
    raw = changed(distilled=str(a_set(tmp_path / "set", data=made)), networks=2, pruner={"name": "median"})
    assert sweep(write(raw)) == 0
    said = capsys.readouterr().out
    assert "2 fresh nets on a distilled set (40 records) and scores on 90 public records" in said
    assert "The set cost its clients at most epsilon 8.0000 at delta 0.001. Searching on it costs nothing more" in said


def test_a_set_alone_is_scored_on_images_that_were_held_out(tmp_path):
    run = options_of({**SMALL, "data": {"name": "digits"}})
    own = SweepOptions(distilled=str(a_set(tmp_path / "set")), networks=3)
    seen = []
    for people, (x, _) in objective(own, run)._parts:
        held = {row.numpy().tobytes() for row in people.x[people.test]}
        assert not held & {row.numpy().tobytes() for row in x} and len(held) + len(x) == 40
        seen += held
    assert len(seen) == len(set(seen)) == 40
    with pytest.raises(UserError, match="2 records of each class"):
        objective(SweepOptions(distilled=str(a_set(tmp_path / "set", each=1))), run)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"name": "mnist", "public_records": 90}, "be a set of digits, got 'mnist'"),
        ({"name": "digits", "public_records": 0}, "because clients held the other records then"),
        (
            {"name": "digits", "public_records": 300, "use_public": True},
            "at most 50, the public records from which .* not distilled, got 90",
        ),
    ],
)
def test_a_set_of_other_records_is_refused(made, words, tmp_path):
    own = SweepOptions(distilled=str(a_set(tmp_path / "set", data=made)))
    with pytest.raises(UserError, match=words):
        objective(own, options_of(SMALL))


def test_a_set_of_public_records_is_scored_on_those_it_was_not_distilled_from(tmp_path):
    made = {"name": "digits", "public_records": 540, "use_public": True}
    folder = str(a_set(tmp_path / "set", data=made))
    (people, _), *_ = objective(SweepOptions(distilled=folder), options_of(SMALL))._parts
    whole = build_population(options_of({**SMALL, "data": made}))
    distilled = {row.numpy().tobytes() for rows in whole.train_of for row in whole.x[rows]}
    assert not distilled & {row.numpy().tobytes() for row in people.x[people.test]} and len(people.test) == 90
    alone = objective(SweepOptions(distilled=folder), options_of({**SMALL, "data": {"name": "digits"}}))
    assert "held-out records" in alone.words


def test_a_set_without_a_bound_says_so():
    assert "an epsilon without a bound" in set_text({"epsilon_max": None, "delta_max": 1e-3})


def test_what_a_sets_epsilon_does_not_cover_is_said_beside_it():
    promise = "(8, 0.001)-differential privacy per record. Caveat: a record may live at several clients."
    said = set_text({"epsilon_max": 8.0, "delta_max": 1e-3, "guarantee": promise})
    assert "at most epsilon 8.0000" in said and said.endswith(f"The set's guarantee: {promise}")


def test_a_run_that_is_pruned_ends_there_and_was_charged_before(tmp_path):
    run = options_of({**SMALL, "rounds": 3})
    costs: list[Cost] = []
    with pytest.raises(Pruned, match="after 1 of 3 rounds"):
        objective(SweepOptions(objective="private"), run)(
            run, tmp_path / "run", lambda step, accuracy: True, costs.append
        )
    assert len(costs) == 1 and all(math.isfinite(one) for one in costs[0].epsilon)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rounds"] == 1


@pytest.mark.e2e
def test_each_trial_is_a_run_nested_in_the_searchs(write, new_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = new_store(tmp_path)
    assert sweep(write({**SMALL, "tracking": {"experiment": "e", "uri": uri}}, "--final")) == 0
    client = MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    (parent,) = [one for one in runs if "mlflow.parentRunId" not in one.data.tags]
    nested = [one for one in runs if one.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(runs) == 4 and len(nested) == 3
    trials = [one for one in nested if "trial" in one.data.tags]
    assert {one.data.tags["state"] for one in trials} == {"complete"} and len(trials) == 2
    assert all("clients.learning_rate" in one.data.params and "accuracy" in one.data.metrics for one in trials)
    assert parent.data.metrics["accuracy"] == max(one.data.metrics["accuracy"] for one in trials)
    assert {"best.yaml", "result.json", "trials.txt"} <= {one.path for one in client.list_artifacts(parent.info.run_id)}


@pytest.mark.slow  # three imports of torch
def test_two_workers_share_the_trials(write, tmp_path):
    words = shlex.join(write(SMALL, "--sweep.trials", "4", "--workers", "2"))
    own = {**os.environ, "PYTHONPATH": str(SWEEPS.parent), "OMP_NUM_THREADS": "1"}
    command = f"{sys.executable} -m dpfl_lightning.sweep {words}"
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, env=own, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert 4 <= len(result["trials"]) <= 5 and all(one["state"] == "complete" for one in result["trials"])
    assert done.stdout.count("Study mine") == 1 and done.stdout.count("Where to look next") == 1
