"""The command: the files in sweeps/, mistakes, its results, and who pays for private trials and distilled sets."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from mlflow.tracking import MlflowClient
from test_conf import small_fashion  # noqa: F401 (a fixture)

from dpfl_lightning.build import build_population
from dpfl_lightning.commands.fit import main as fit
from dpfl_lightning.commands.sweep import main as sweep
from dpfl_lightning.config.load import load
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.config.yaml_text import inline
from dpfl_lightning.data.datasets import load as load_data
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.session import RunSession
from dpfl_lightning.papers.distilled_data import load_distilled
from dpfl_lightning.papers.sets.distilled_set import DistilledSet
from dpfl_lightning.privacy.ledger.verify import Composed, read
from dpfl_lightning.runtime.text import at_most
from dpfl_lightning.search.costs import Cost
from dpfl_lightning.search.final import final_so_far, with_the_set
from dpfl_lightning.search.objectives import objective
from dpfl_lightning.search.options import SweepOptions
from dpfl_lightning.search.space import check_trials_with
from dpfl_lightning.search.study import Pruned

SWEEPS = Path(__file__).parents[1] / "sweeps"
BUDGETS = [2, 4, 8, 8, 16]
SMALL = {
    "rounds": 2,
    "data": {"name": "digits", "public_records": 90},
    "model": {"name": "logistic"},
    "clients": {"count": 5, "learning_rate": 0.5},
    "privacy": {"epsilon": BUDGETS, "delta": 1.0e-3},
    "tracking": None,
    "sweep": {
        "space": {"clients.learning_rate": {"low": 0.1, "high": 1.0, "log": True}},
        "training": {"epochs": 2, "batch_size": 16},
        "sampler": {"name": "random"},
        "trials": 2,
    },
}


PRIVATE = {"objective": "private", "training": {}}


def changed(**sweep_options) -> dict:
    return {**SMALL, "sweep": {**SMALL["sweep"], **sweep_options}}


@pytest.fixture
def write(tmp_path):
    """`write(options, *more)`: the file of a search, and the words that run it."""

    def written(raw: dict, *more: str) -> list[str]:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(raw))
        return ["--config", str(path), "--output_dir", str(tmp_path / "out"), *more]

    return written


@pytest.fixture
def search(write, tmp_path, capsys):
    """`search(options, *more)`: runs it, and returns what it prints and `result.json`."""

    def run(raw: dict, *more: str) -> tuple[str, dict]:
        assert sweep(write(raw, *more)) == 0, capsys.readouterr().err
        return capsys.readouterr().out, json.loads((tmp_path / "out" / "result.json").read_text())

    return run


@pytest.fixture
def refused(capsys):
    """`refused(words)`: the error of a search that makes no trial."""

    def run(words: list[str]) -> str:
        assert sweep(words) == 2
        output = capsys.readouterr()
        assert output.err.startswith("error: ") and output.err.count("\n") == 1, output.err
        assert "trial 0" not in output.out
        return output.err

    return run


def shrunken(path: Path, small_fashion: Path) -> list[str]:  # noqa: F811
    """Overrides that make any file in sweeps/ take seconds."""
    argv = ["--config", str(path), "--rounds", "1", "--tracking", "null", "--sweep.trials", "2"]
    if "fmnist" in path.name:
        argv += ["--data.folder", str(small_fashion), "--data.records_per_client", "40"]
        argv += ["--clients.batch_size", "10", "--privacy.epsilon", "4"]
        argv += ["--data.public_records", "300"] * ("public_records" in path.read_text())
    if "training" in path.read_text():
        argv += ["--sweep.training.epochs", "1"]
    if "set_share" in path.read_text():
        argv += ["--sweep.set_with", "{strategies.distillation: {net_epochs: 0, evaluation_epochs: 1}}"]
    return argv


@pytest.mark.e2e
@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_in_sweeps_runs(path, small_fashion, tmp_path, capsys):  # noqa: F811
    assert path.read_text().startswith("# ")
    assert sweep([*shrunken(path, small_fashion), "--output_dir", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    first, last = (line for line in text.splitlines() if " of 2) " in line)
    assert first.startswith("trial 0 (1 of 2)") and first.endswith(" left") and "best.yaml" in text
    assert last.startswith("trial 1 (2 of 2)") and " left" not in last
    public = load(["--config", str(tmp_path / "out" / "best.yaml")])[0].data.public_records > 0
    assert public != ("set_share" in path.read_text()), "a set of its own needs no public records"
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert len(result["trials"]) == 2 and result["cost"] is None


@pytest.mark.e2e
def test_the_best_is_trained_by_fit_and_nothing_is_trained_again(search, tmp_path):
    text, result = search(SMALL, "--final")
    best = result["trials"][result["best"][0]]
    assert best["scores"]["accuracy"] == max(trial["scores"]["accuracy"] for trial in result["trials"])
    rate = best["params"]["clients.learning_rate"]
    final = yaml.safe_load((tmp_path / "out" / "final" / "options.yaml").read_text())
    assert final["clients"]["learning_rate"] == rate and "Final accuracy " in text
    assert load(["--config", str(tmp_path / "out" / "best.yaml")])[0].clients.learning_rate == rate
    again, _ = search(SMALL, "--final")
    assert "Resuming a study that has 2 complete" in again and "trial 0 (" not in again
    assert "Final accuracy " in again and "round 1/2" not in again


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (changed(space={"model.widht": {"choices": [8]}}), ["sweep.space.model.widht", "it has none"]),
        (changed(space={"clients.learning_rate": {"low": -1.0, "high": 1.0}}), ["clients.learning_rate", "> 0"]),
        (changed(distilled="runs/nowhere"), ["distilled", "runs/nowhere", "strategy distillation"]),
        (changed(trails=3), ["sweep.trails", "Did you mean `sweep.trials`"]),
        ({**SMALL, "data": {"name": "digits"}}, ["data.public_records", "--sweep.distilled"]),
        ({**changed(objective="public", training={}), "data": {"name": "digits"}}, ["data.public_records"]),
        ({**changed(objective="private", training={}), "privacy": None}, ["privacy.epsilon", "a budget for each"]),
        ({**changed(objective="private", training={}), "data": {"name": "digits"}}, ["data.public_records", "scored"]),
        ({**changed(space={"clients.batch_size": {"choices": [8, 16]}}, training={}),
          "clients": {"count": 5, "learning_rate": [1, 1, 1, 1, 1]}}, ["clients.learning_rate", "one number"]),
        (changed(space={"clients.batch_size": {"choices": [8, 16]}}, training={"batch_size": 16}),
         ["sweep.training.batch_size", "be left out if clients.batch_size is given for trials"]),
        (changed(trials_with={"rounds": 3}), ["sweep.trials_with.rounds", "model, clients, data, engine"]),
        ({**changed(objective="private", training={}), "privacy": {**SMALL["privacy"], "diagnostics": True}},
         ["privacy.diagnostics", "be false with objective private", "without a bound"]),
        ({**SMALL, "data": {**SMALL["data"], "use_public": True}}, ["data.use_public", "be false with objective set"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_no_trial_is_made(raw, words, write, refused, tmp_path):
    error = refused(write(raw))
    assert not [word for word in words if word not in error], error
    assert not (tmp_path / "out" / "result.json").exists()


@pytest.mark.e2e
@pytest.mark.parametrize("objective", ["set", "public", "private"])
def test_trials_have_the_public_records_of_the_run(objective, write, refused):
    """Records that are public in a trial alone belong to clients in the run that follows, unpaid by anybody."""
    training = SMALL["sweep"]["training"] if objective == "set" else {}
    for key, value in (("name", "mnist"), ("folder", "elsewhere"), ("public_records", 1200), ("use_public", True)):
        for more in ({f"data.{key}": value}, {"data": {key: value}}):
            error = refused(write(changed(objective=objective, training=training, trials_with=more)))
            assert f"`sweep.trials_with.data.{key}` must be that of the run, " in error and inline(value) in error
    same = {"data.public_records": 90, "data.partition.name": "overlapping"}
    assert check_trials_with(options_of(SMALL), same, objective) is None


@pytest.mark.e2e
def test_a_study_of_another_space_sampler_or_seed_is_refused(search, write, refused):
    """A grid would end too early after trials that another sampler drew."""
    search(SMALL, "--sweep.trials", "1")
    assert "`sweep.sampler` must be the same as in study mine" in refused(write(changed(sampler={"name": "tpe"})))
    error = refused(write(changed(space={"clients.learning_rate": {"choices": [0.1, 0.2]}})))
    assert "`sweep.space` must be the same as in study mine of that storage" in error
    assert "`seed` must be the same" in refused(write(SMALL, "--seed", "1"))


@pytest.mark.e2e
def test_private_trials_are_composed_from_what_each_of_them_releases(search, tmp_path):
    text, result = search(changed(**PRIVATE, trials=3))
    cost, folder = result["cost"], tmp_path / "out" / "trials" / "mine"
    composed = read([folder / str(number) / "ledger.jsonl" for number in range(3)], one_population=True)
    assert cost["epsilon"] == [account.epsilon for account in composed.paid]
    assert cost["delta"] == [1e-3] * 5 and cost["runs"] == 3 and cost["composed"]
    assert all(budget < epsilon < 3 * budget for budget, epsilon in zip(BUDGETS, cost["epsilon"], strict=True))
    assert composed.weakest.words() == cost["guarantee"]
    report = text[text.index("\nmine: 3 complete. ") :].splitlines()[1]
    first = "mine: 3 complete. PRIVATE: all trials (3 runs) together cost a record of a client at most epsilon "
    assert report.startswith(f"{first}{at_most(max(cost['epsilon']))} at delta 0.001 (client ")
    for number in range(3):
        for client in json.loads((folder / str(number) / "result.json").read_text())["clients"]:
            assert client["accuracy"] is None, "no held-out record of a client chooses"


@pytest.mark.e2e
def test_trials_whose_releases_follow_from_results_are_added(search):
    space = {"clients.batch_size": {"choices": [16, 32]}}
    text, result = search(changed(**PRIVATE, space=space, sampler={"name": "tpe"}), "--rounds", "1")
    assert result["cost"]["epsilon"] == pytest.approx([4, 8, 16, 16, 32]) and not result["cost"]["composed"]
    assert result["cost"]["delta"] == [2e-3] * 5 and "addition of the budgets of 2 runs" in text
    assert "Sampler random, grid, qmc avoids this." in text


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
def test_what_the_epsilons_of_private_trials_do_not_cover_is_named(more, caveat, search, tmp_path):
    text, result = search({**changed(**PRIVATE), **more, "rounds": 1})
    assert result["cost"]["guarantee"].count(caveat) == 1 and caveat in text
    for number in range(2):
        run = json.loads((tmp_path / "out" / "trials" / "mine" / str(number) / "result.json").read_text())
        assert caveat in str(run["guarantee"])


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("trials_with", "words"),
    [({"privacy.epsilon": 0.5}, ""), ({"privacy.epsilon": 0.5, "data.records_per_client": 100}, "had other clients")],
)
def test_the_final_run_and_private_trials_are_composed(trials_with, words, search, tmp_path):
    text, result = search({**changed(**PRIVATE, trials_with=trials_with), "rounds": 1}, "--final")
    out = tmp_path / "out"
    trials = [out / "trials" / "mine" / str(number) / "ledger.jsonl" for number in range(2)]
    expected = words or f"for the weakest client: {read([*trials, out / 'final' / 'ledger.jsonl']).weakest.words()}"
    added = result["final"]["with_the_trials"]
    assert expected in added and added in text and added in result["guarantee"]


@pytest.mark.e2e
def test_a_folder_with_trials_of_a_deleted_study_is_refused(search, write, refused, tmp_path):
    raw = {**changed(**PRIVATE, trials=1), "rounds": 1}
    search(raw)
    (tmp_path / "out" / "study.db").unlink()
    assert "`output_dir` must be the folder of study mine" in refused(write(raw))


def test_a_folder_whose_name_cannot_stand_in_a_url_is_refused(write, refused, tmp_path):
    for name in ("x?y", "x#y", "x%41"):
        error = refused([*write(SMALL)[:2], "--output_dir", str(tmp_path / name)])
        assert "`output_dir` must have no ?, # or %" in error and not (tmp_path / name).exists()


@pytest.mark.e2e
def test_another_best_trial_has_its_run_elsewhere(write, tmp_path):
    assert sweep(write(changed(trials=1), "--rounds", "1", "--final")) == 0
    out = tmp_path / "out"
    best = load(["--config", str(out / "best.yaml"), "--output_dir", str(out / "final")])[0]
    assert final_so_far(best)[1].test_accuracy is not None
    other = dataclasses.replace(best, clients=dataclasses.replace(best.clients, learning_rate=0.01))
    with pytest.raises(UserError, match=r"contains the run of an earlier best trial\. Move .*final away .*best\.yaml"):
        final_so_far(other)


@pytest.mark.e2e
def test_a_second_study_in_a_folder_is_refused_and_changes_nothing(search, write, refused, tmp_path):
    search(changed(trials=1), "--rounds", "1")
    before = {path: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}
    text = refused(write(changed(trials=1), "--rounds", "1", "--sweep.name", "other"))
    assert "`output_dir` must be the folder of one study" in text and "which has study mine" in text
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}


def options_of(raw: dict):
    return from_mapping({key: value for key, value in raw.items() if key != "sweep"})


def pixels(population, rows) -> set[bytes]:
    return {row.numpy().tobytes() for row in population.x[rows]}


def test_neither_clients_records_nor_the_test_set_choose():
    """Every objective scores on public records, and none on records that it trained on."""
    run = options_of(SMALL)
    public = {row.numpy().tobytes() for row in load_data("digits").x[-90:]}
    for kind, options in (("set", {"training": {"epochs": 2}}), ("public", {}), ("private", {})):
        scorer = objective(SweepOptions(objective=kind, **options), run)
        populations = [people for people, _ in scorer._parts] if kind == "set" else [scorer.population]
        for people in populations:
            tested, trained = pixels(people, people.test), pixels(people, torch.cat(list(people.train_of)))
            assert tested and tested <= public and not trained & tested
            assert (trained <= public) == (kind != "private")


def a_set(folder: Path, each: int = 4, **card) -> Path:
    x = torch.randn(10 * each, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = {"num_classes": 10, "epsilon_max": 8.0, "delta_max": 1e-3, **card}
    folder.mkdir(exist_ok=True)
    DistilledSet(x, torch.arange(10).repeat_interleave(each), whole).save(folder)
    return folder


@pytest.mark.e2e
def test_a_distilled_set_is_searched_and_its_cost_is_named(search, tmp_path):
    source = str(a_set(tmp_path / "set", data={"name": "digits", "public_records": 90}))
    text, _ = search(changed(distilled=source, networks=2, pruner={"name": "median"}))
    assert "2 new models on a distilled set (40 records) and scores on 90 public records" in text
    assert "The set cost its clients at most epsilon 8 at delta 0.001. Searching on it costs nothing more" in text


def test_a_set_without_public_records_is_scored_on_images_that_were_held_out(tmp_path):
    run = options_of({**SMALL, "data": {"name": "digits"}})
    scored = []
    scorer = objective(SweepOptions(networks=3), run, DistilledSet.load(a_set(tmp_path / "set")))
    assert "held-out records" in scorer.words
    for people, (x, _) in scorer._parts:
        tested = pixels(people, people.test)
        assert not tested & {row.numpy().tobytes() for row in x} and len(tested) + len(x) == 40
        scored += tested
    assert len(scored) == len(set(scored)) == 40
    with pytest.raises(UserError, match="2 records of each class"):
        objective(SweepOptions(), run, DistilledSet.load(a_set(tmp_path / "set", each=1)))


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
    distilled = DistilledSet.load(a_set(tmp_path / "set", data=made))
    with pytest.raises(UserError, match=words):
        objective(SweepOptions(), options_of(SMALL), distilled)


def test_a_set_of_public_records_is_scored_on_those_it_was_not_distilled_from(tmp_path):
    made = {"name": "digits", "public_records": 540, "use_public": True}
    made_set = DistilledSet.load(a_set(tmp_path / "set", data=made))
    (people, _), *_ = objective(SweepOptions(), options_of(SMALL), made_set)._parts
    whole = build_population(options_of({**SMALL, "data": made}))
    distilled = pixels(whole, torch.cat(list(whole.train_of)))
    assert not distilled & pixels(people, people.test) and len(people.test) == 90


def test_a_pruned_run_ends_at_once_and_was_charged_before(tmp_path):
    run = options_of({**SMALL, "rounds": 3})
    costs: list[list[Cost]] = []
    train = objective(SweepOptions(objective="private", seeds=2), run)
    with pytest.raises(Pruned, match="after 1 of 6 rounds"):
        train(run, tmp_path / "run", lambda step, accuracy: True, costs.append)
    assert [len(both) for both in costs] == [2] and all(math.isfinite(line.budget) for line in costs[0][1]), (
        "both seeds count"
    )
    assert json.loads((tmp_path / "run" / "seed_0" / "result.json").read_text())["rounds"] == 1
    assert not (tmp_path / "run" / "seed_1").exists()


@pytest.mark.e2e
def test_each_trial_is_a_run_nested_in_that_of_the_search(search, new_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = new_store(tmp_path)
    search({**SMALL, "tracking": {"experiment": "e", "uri": uri}}, "--final")
    client = MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    nested = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    trials = [run for run in nested if "trial" in run.data.tags]
    assert len(runs) == 4 and len(nested) == 3 and len(trials) == 2
    assert {run.data.tags["state"] for run in trials} == {"complete"}
    assert all("clients.learning_rate" in run.data.params and "accuracy" in run.data.metrics for run in trials)
    assert parent.data.metrics["accuracy"] == max(run.data.metrics["accuracy"] for run in trials)
    artifacts = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert {"best.yaml", "result.json", "trials.txt"} <= artifacts


# ---- what a set and the run that follows its search cost together

RUN = {key: value for key, value in SMALL.items() if key != "sweep"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of a distillation, and of a run of the same clients."""
    made = []
    for strategies in ({"distillation": {"net_epochs": 1, "evaluation_epochs": 1}}, {"size_weighted": {}}):
        folder = tmp_path_factory.mktemp("run")
        (folder / "mine.yaml").write_text(yaml.safe_dump({**RUN, "strategies": strategies}))
        assert fit(["--config", str(folder / "mine.yaml"), "--output_dir", str(folder / "out")]) == 0
        made.append(folder / "out")
    return made


@pytest.mark.e2e
def test_the_set_and_the_run_are_composed_from_both_ledgers(folders):
    words = with_the_set(str(folders[0]), load_distilled(folders[0]).card, final(folders[1]))
    both = read([folder / "ledger.jsonl" for folder in folders], one_population=True)
    assert words == f"Together with the set, composed from both ledgers: {both.weakest.words()}"
    alone = [json.loads((folder / "result.json").read_text())["clients"] for folder in folders]
    for client, account in enumerate(both.paid):
        spent = [clients[client]["epsilon_spent"] for clients in alone]
        assert max(spent) < account.epsilon < math.fsum(spent)
        assert set(both.releases(account)) == {"class_gradients", "train"}


def final(folder, **changed):
    return dataclasses.replace(from_mapping(RUN), output_dir=str(folder), **changed)


@pytest.mark.e2e
def test_runs_that_cannot_be_composed_are_named_with_the_reason(folders, tmp_path):
    source, run = str(folders[0]), final(folders[1])
    card = load_distilled(folders[0]).card
    words = with_the_set(source, card, final(folders[1], seed=1))
    assert "distributed differently" in words
    assert words.endswith("Add the epsilon and delta of the set to those of the run.")
    copy = shutil.copytree(source, tmp_path / "copy")
    (copy / "ledger.jsonl").unlink()
    assert "must be a ledger" in with_the_set(str(copy), card, run)
    for name in ("ledger.jsonl", "ledger.head", "result.json", "guarantees.json"):
        shutil.copy(folders[1] / name, copy)
    assert "name each run once" in with_the_set(str(copy), card, run)
    other = {**card, "ledger": {**card["ledger"], "run": "another"}}
    assert "belongs to another run" in with_the_set(source, other, run)
    public = {**card, "data": {**card["data"], "use_public": True}}
    assert with_the_set(None, {}, run) is with_the_set(source, public, run) is None


# ---- one budget for the set and the final run


def of_both(folder: Path) -> Composed:
    """The ledgers of the set and of the final run, composed."""
    return read([folder / name / "ledger.jsonl" for name in ("set", "final")], one_population=True)


SHARED = {
    **changed(
        set_share=0.3,
        set_with={
            "rounds": 3,
            "strategies": {"distillation": {"images_per_class": 4, "evaluation_epochs": 1, "reinit_every": 1}},
        },
    ),
    "seed": 3,
}


def without(raw: dict, *keys: str) -> dict:
    return {**raw, "sweep": {key: value for key, value in raw["sweep"].items() if key not in keys}}


def shared(**sweep_options) -> dict:
    return {**SHARED, "sweep": {**SHARED["sweep"], **sweep_options}}


@pytest.mark.e2e
def test_set_and_final_run_composed_from_both_ledgers_use_one_budget(search, new_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = new_store(tmp_path)
    text, result = search({**SHARED, "tracking": {"experiment": "e", "uri": uri}}, "--final")
    out = tmp_path / "out"
    both = of_both(out)
    of_set, of_final = (json.loads((out / name / "result.json").read_text())["clients"] for name in ("set", "final"))
    for client, (account, budget) in enumerate(zip(both.paid, BUDGETS, strict=True)):
        spent = of_set[client]["epsilon_spent"], of_final[client]["epsilon_spent"]
        assert spent[0] == pytest.approx(0.3 * budget, rel=1e-4)
        assert 0.999 * budget < account.epsilon <= budget, "all of it, and no more"
        assert math.fsum(spent) > 1.05 * budget, "more than the sum would allow"
    total = result["final"]["with_the_set"]
    assert total == f"Together with the set, composed from both ledgers: {both.weakest.words()}" and total in text
    promised = [words for words in result["guarantee"] if words.startswith("One budget: ")]
    assert len(promised) == 1 and both.weakest.words() in promised[0] and total in result["guarantee"]
    runs = MlflowClient(uri).search_runs([MlflowClient(uri).get_experiment_by_name("e").experiment_id])
    noted = {run.info.run_name: run.data.tags["mlflow.note.content"] for run in runs if "trial" not in run.data.tags}
    assert all(both.weakest.words() in noted[name] for name in ("mine", "mine: set", "final"))
    left = load(["--config", str(out / "best.yaml")])[0].privacy.epsilon
    assert list(left) == [client["epsilon_budget"] for client in of_final]


@pytest.mark.e2e
def test_a_shared_budget_is_charged_once_whenever_it_was_stopped(write, tmp_path, monkeypatch):
    """Ctrl-C in the set, in a trial and in the final run; then the same command goes on."""
    out, rounds = tmp_path / "out", RunSession.evaluate

    def stop_in(folder: str):
        def evaluate(self, state):
            if self.output_dir == out / folder and state.round == 1:
                raise KeyboardInterrupt
            return rounds(self, state)

        monkeypatch.setattr(RunSession, "evaluate", evaluate)

    words = write(shared(trials=1), "--final")
    for folder in ("set", "final"):
        stop_in(folder)
        assert sweep(words) == 130
        assert (out / folder / "ledger.jsonl").is_file() and not (out / folder / "result.json").exists()
    monkeypatch.setattr(RunSession, "evaluate", rounds)
    assert sweep(words) == 0
    both = of_both(out)
    assert [dict(both.releases(account)) for account in both.paid] == [{"class_gradients": 3, "train": 2}] * 5
    assert all(account.epsilon <= budget for account, budget in zip(both.paid, BUDGETS, strict=True))
    before = [(out / folder / "ledger.jsonl").read_bytes() for folder in ("set", "final")]
    assert sweep(words) == 0
    assert [(out / folder / "ledger.jsonl").read_bytes() for folder in ("set", "final")] == before


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (shared(set_share=1.0), ["sweep.set_share", "(0, 0.999]", "1.0"]),
        (shared(distilled="runs/digits"), ["sweep.distilled", "be null with sweep.set_share"]),
        (shared(storage="sqlite:///other.db"), ["sweep.storage", "another set", "/set"]),
        (without(SHARED, "set_share"), ["sweep.set_with", "without sweep.set_share"]),
        (shared(objective="public", training={}, set_with={}), ["sweep.set_share", "only for objective set"]),
        (without(shared(space={"clients.batch_size": {"choices": [8, 16]}}, training={}), "training"),
         ["sweep.space.clients.batch_size", "known before the set is made"]),
        (shared(set_with={"privacy.epsilon": 3}), ["sweep.set_with.privacy.epsilon", "those of the run"]),
        (shared(set_with={"clients": {"count": 3}}), ["sweep.set_with.clients.count` must be left out", "got 3"]),
        (shared(set_with={"strategies": {"uniform": {}}}), ["sweep.set_with.strategies", "one of distillation and fe"]),
        (shared(set_with={"rounds": 3, "strategies": {"feature_means": {}}}),
         ["sweep.set_with` must give", "rounds` must be 1"]),
        ({**SHARED, "privacy": None}, ["privacy.epsilon", "a budget for each client"]),
        ({**SHARED, "privacy": {"epsilon": 2, "noise_multiplier": 1.0}}, ["privacy.noise_multiplier", "be null"]),
        ({**SHARED, "rounds": 3, "strategies": {"two_stage_selection": {"warmup_rounds": 2}},
          "clients": {"count": 5, "batch_size": None}},
         ["strategies", "plan all releases before a run"]),
        ({**SHARED, "privacy": {**SMALL["privacy"], "diagnostics": True}},
         ["sweep.set_share", "releases something without noise", "clip fractions"]),
    ],
)  # fmt: skip
def test_a_shared_budget_that_cannot_be_kept_is_refused_before_anything_is_charged(
    raw, words, write, refused, tmp_path
):
    error = refused(write({**raw, "data": {"name": "digits"}} if "networks" in words[0] else raw))
    assert not [word for word in words if word not in error], error
    assert not (tmp_path / "out").exists()
