"""Searches on a user's own table: by a metric, with several seeds, and what the choice costs."""

import json

import numpy as np
import pandas as pd
import pytest
import yaml

from dpfl_lightning.config.load import load
from dpfl_lightning.privacy.ledger.verify import read
from dpfl_lightning.sweep import main as sweep

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


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with records of three hospitals, 20 public ones, and 30 for tests."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"hospital": rng.choice(["berlin", "lyon", "oslo"], 350), "age": rng.integers(20, 90, 350)})
    frame["crp"] = rng.normal(0, 1, 350)
    frame["ill"] = np.where(frame["age"] + rng.normal(0, 10, 350) > 55, "yes", "no")
    frame["days"] = (0.1 * frame["age"] + rng.normal(0, 1, 350)).round(2)
    for name, rows in {"patients": slice(0, 300), "public": slice(300, 320), "test": slice(320, 350)}.items():
        frame[rows].to_csv(tmp_path / f"{name}.csv", index=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(label: str = "ill", *more: str, **changed) -> list[str]:
    """Write the configuration of a search, and return the arguments of the command."""
    special, model, score = OF_LABEL[label]
    table = {"df": "patients.csv", "client": "hospital", "label": label}
    table |= {"features": ["age", "crp"], "scale": {"age": [55, 20]}, **special}
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
    epsilons = [account.epsilon for account in read(ledgers).accounts]
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
        ("ill", {"scores": ["mae"]}, [], ["`sweep.scores` must be scores of task binary", "auroc", "got 'mae'"]),
        ("days", {"scores": ["accuracy"]}, [], ["`sweep.scores` must be scores of task regression", "got 'accuracy'"]),
        ("ill", {"scores": ["aurok"]}, [], ["`sweep.scores`", "Did you mean `auroc`"]),
        ("ill", {"objective": "public"}, [], ["`sweep.trials_with` must name public data", "--sweep.objective priv"]),
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
