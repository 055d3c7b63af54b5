"""Searches on a user's own table: by a metric, with several seeds, and what the choice costs."""

import json

import numpy as np
import pandas as pd
import pytest
import yaml

from dpfl_lightning.commands.sweep import main as sweep
from dpfl_lightning.config.load import load
from dpfl_lightning.privacy.ledger.verify import read
from dpfl_lightning.runtime.text import at_most
from dpfl_lightning.search.objectives import FederatedObjective

pytestmark = pytest.mark.e2e

RAW = {
    "rounds": 2,
    "clients": {"batch_size": 32},
    "privacy": {"epsilon": [2, 4, 8], "delta": 1.0e-4},
    "tracking": None,
    "sweep": {
        "objective": "private",
        "seeds": 3,
        "space": {"clients.learning_rate": {"low": 0.1, "high": 1.0}},
        "trials": 2,
    },
}
OF_LABEL = {
    "ill": ({"classes": ["no", "yes"]}, "logistic", "auroc"),
    "days": ({}, "linear", "mae"),
}


def PUBLIC_WITH(name: str, value) -> dict:
    """A public search whose trials have another argument of the run's data."""
    return {"objective": "public", "trials_with": {f"data.init_args.{name}": value}}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with records of three hospitals, 20 public ones, and 30 for tests."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"hospital": rng.choice(["berlin", "lyon", "oslo"], 350), "age": rng.integers(20, 90, 350)})
    frame["crp"] = rng.normal(0, 1, 350)
    frame["ill"] = np.where(frame["age"] + rng.normal(0, 10, 350) > 55, "yes", "no")
    frame["days"] = (0.1 * frame["age"] + rng.normal(0, 1, 350)).round(2)
    of_file = {"patients": slice(0, 300), "public": slice(300, 320), "test": slice(320, 350)}
    for name, rows in {**of_file, "copy": of_file["patients"]}.items():
        frame[rows].to_csv(tmp_path / f"{name}.csv", index=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(label: str = "ill", *more: str, **changed) -> list[str]:
    """Write the configuration of a search, and return the arguments of the command."""
    special, model, score = OF_LABEL[label]
    table = {"df": "patients.csv", "client": "hospital", "label": label}
    table |= {"features": ["age", "crp"], "columns": {"age": {"scale": [55, 20]}}, **special}
    data = {"class_path": "dpfl_lightning.Population.from_dataframe", "init_args": table}
    sweeping = {**RAW["sweep"], "scores": [score], **changed}
    raw = {**RAW, "data": data, "model": {"name": model}, "sweep": sweeping}
    with open("search.yaml", "w") as file:
        yaml.safe_dump(raw, file)
    return ["--config", "search.yaml", "--output_dir", "out", *more]


def result_of(place) -> dict:
    return json.loads((place / "out" / "result.json").read_text())


@pytest.mark.e2e
@pytest.mark.parametrize(("label", "score", "best"), [("ill", "auroc", max), ("days", "mae", min)])
def test_a_search_by_a_metric_with_three_seeds_a_trial(label, score, best, place, capsys):
    assert sweep(words(label, "--final")) == 0
    text, result = capsys.readouterr().out, result_of(place)
    assert f"Judged by {score} ({'highest' if best is max else 'lowest'});" in text
    values = [trial["scores"][score] for trial in result["trials"]]
    assert result["trials"][result["best"][0]]["scores"][score] == best(values)
    assert all(trial["spread"][score] > 0 for trial in result["trials"]) and f"{score}_std" in text
    ledgers = sorted(place.glob("out/trials/search/*/seed_*/ledger.jsonl"))
    assert len(ledgers) == 6 and result["cost"]["runs"] == 6
    runs = [json.loads((path.parent / "result.json").read_text())["test_metrics"][score] for path in ledgers[:3]]
    assert values[0] == pytest.approx(np.mean(runs))
    assert result["trials"][0]["spread"][score] == pytest.approx(np.std(runs, ddof=1))
    epsilons = [account.epsilon for account in read(ledgers).paid]
    assert result["cost"]["epsilon"] == epsilons and max(epsilons) > 8
    assert f"Final {score} " in text and result["final"]["test_metrics"][score] is not None
    assert score in load(["--config", "out/best.yaml"])[0].evaluation.metrics


def test_the_choice_by_records_that_no_guarantee_covers_is_named(place, capsys):
    assert sweep(words("ill", "--rounds", "1", trials=1, seeds=1)) == 0
    (guarantee,) = result_of(place)["guarantee"]
    text, words_of_choice = capsys.readouterr().out, "held-out records choose: no guarantee covers this"
    assert words_of_choice in guarantee and guarantee.startswith("PRIVATE: all trials (1 run) together cost")
    assert f"search: 1 complete. {guarantee[:40]}" in text and text.count(words_of_choice) == 2


@pytest.mark.e2e
def test_a_test_set_scores_trials_if_there_is_one(place, capsys):
    assert sweep(words("ill", "--rounds", "1", "--data.init_args.test", "test.csv", trials=1, seeds=1)) == 0
    assert "scored on 30 test records." in capsys.readouterr().out


def test_a_stopped_search_says_what_its_trials_cost(place, capsys, monkeypatch):
    usual, more = FederatedObjective.__call__, ["--rounds", "1", "--sweep.sampler", "{name: random}"]

    def stopped(self, options, folder, *hooks):
        outcome = usual(self, options, folder, *hooks)
        if folder.name == "1":
            raise KeyboardInterrupt
        return outcome

    monkeypatch.setattr(FederatedObjective, "__call__", stopped)
    assert sweep(words("ill", *more, seeds=1, trials=3)) == 130
    out, err = capsys.readouterr()
    ledgers = sorted(place.rglob("ledger.jsonl"))
    cost = result_of(place)["cost"]
    assert cost["epsilon"] == [account.epsilon for account in read(ledgers).paid] and cost["runs"] == 2
    (line,) = [line for line in out.splitlines() if line.startswith("search: 1 complete, 1 repeated. PRIVATE: ")]
    assert f"at most epsilon {at_most(max(cost['epsilon']))} at delta" in line
    assert "The same command resumes the search" in err


def test_the_final_score_is_optimistic_where_the_same_records_chose(place, capsys):
    assert sweep(words("ill", "--rounds", "1", "--final", trials=1, seeds=1)) == 0
    words_of_score = "the score is optimistic"
    assert words_of_score in result_of(place)["final"]["caution"]
    head = (place / "out" / "best.yaml").read_text().partition("\ndata:")[0]
    assert words_of_score in head.replace("\n# ", " ")
    final = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Final auroc "))
    assert words_of_score in final
    public = {"data.init_args.df": "public.csv", "clients.batch_size": None}
    more = ["--rounds", "1", "--final", "--output_dir", "free"]
    assert sweep(words("ill", *more, objective="public", scores=["accuracy"], trials_with=public, trials=1)) == 0
    assert words_of_score not in capsys.readouterr().out
    assert json.loads((place / "free" / "result.json").read_text())["final"]["caution"] is None


def _added(frame):
    return pd.concat([frame, frame[:40].assign(hospital="dublin")])


@pytest.mark.parametrize(
    ("change", "client"),
    [
        (_added, "dublin"),
        (lambda frame: frame[frame["hospital"] != "lyon"], "lyon"),
        (lambda frame: frame.replace({"hospital": {"lyon": "nice"}}), "lyon"),
        (lambda frame: frame[frame.index != frame.index[frame["hospital"] == "berlin"][0]], "berlin"),
    ],
    ids=["added", "removed", "renamed", "one record less"],
)
def test_a_resumed_search_has_the_clients_with_which_it_began(change, client, place, capsys):
    """Otherwise their releases would be composed with those of others."""
    more = "--rounds", "1", "--privacy.epsilon", "2"
    assert sweep(words("ill", *more, trials=1, seeds=1)) == 0
    change(pd.read_csv("patients.csv")).to_csv("patients.csv", index=False)
    before = sorted(place.rglob("ledger.jsonl"))
    assert sweep(words("ill", *more, trials=2, seeds=1)) == 2
    error = capsys.readouterr().err
    assert f"`training records of client {client}` must be the same as in study search" in error
    assert sorted(place.rglob("ledger.jsonl")) == before


def test_a_public_table_is_searched_at_no_cost(place, capsys):
    in_trials = {"data.init_args.df": "public.csv", "clients.batch_size": None}
    assert sweep(words("days", "--rounds", "1", objective="public", trials_with=in_trials, trials=1, seeds=1)) == 0
    assert "public records, and is scored on" in capsys.readouterr().out
    assert result_of(place)["cost"] is None
    best = load(["--config", "out/best.yaml"])[0]
    assert best.data.init_args["df"] == "patients.csv" and best.privacy.epsilon == (2, 4, 8)


@pytest.mark.parametrize(
    ("label", "changed", "more", "expected"),
    [
        # other arguments of the same table, a copy of it, and the run's test set
        ("ill", PUBLIC_WITH("held_out", 0.3), [], ["must replace each file", "patients.csv"]),
        (
            "ill",
            PUBLIC_WITH("df", {"file": "patients.csv", "read": {"sep": ","}}),
            [],
            ["must replace each", "patients"],
        ),
        ("ill", PUBLIC_WITH("df", {"one": "patients.csv", "two": "public.csv"}), [], ["must replace each", "patients"]),
        ("ill", PUBLIC_WITH("df", "copy.csv"), [], ["`sweep.trials_with` must name data", "300 records"]),
        ("ill", PUBLIC_WITH("df", "public.csv"), ["--data.init_args.test", "test.csv"], ["must replace", "test.csv"]),
        ("ill", {"scores": ["auroc", "auroc"]}, [], ["`sweep.scores` must be different scores, got '[auroc, auroc]'"]),
        ("ill", {"scores": ["mae"]}, [], ["`sweep.scores` must be scores of task binary", "auroc", "got 'mae'"]),
        ("days", {"scores": ["accuracy"]}, [], ["`sweep.scores` must be scores of task regression", "got 'accuracy'"]),
        ("ill", {"scores": ["aurok"]}, [], ["`sweep.scores` must be one of accuracy, loss", "Did you mean `auroc`"]),
        (
            "ill",
            {"objective": "public"},
            [],
            ["`sweep.trials_with` must name public data", "--sweep.objective private"],
        ),
        ("ill", {"trials_with": {"data.init_args.df": "public.csv"}}, [], ["`sweep.trials_with.data.init_args`"]),
        ("ill", {"objective": "set"}, [], ["`sweep.seeds` must be left out with objective set", "sweep.networks"]),
        ("ill", {}, ["--data.init_args.held_out", "0"], ["`data` must have records that score trials"]),
        ("ill", {}, ["--model.name", "linear"], ["`num_classes` must be 1 for linear"]),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_charged(label, changed, more, expected, place, capsys):
    assert sweep(words(label, *more, **changed)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and all(part in error for part in expected), error
    assert not (place / "out").exists()
