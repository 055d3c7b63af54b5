"""Scores in words and tables: the headline beside its baseline, and what it does not show."""

import pytest
from fakes import a_result, a_view

from dpfl_lightning.federated.server.scores import client_columns, in_words, remarks, rows_of, score_cells, seed_rows

RARE = {"test_accuracy": 0.94, "test_metrics": {"auroc": 0.7}, "baseline": {"accuracy": 0.94, "auroc": 0.5}}
ONE_CLASS = {"auroc": "have one class"}


@pytest.fixture
def a(tmp_path):
    """`a(name=value, ...)`: the content of a result with these changes."""
    return lambda **changes: vars(a_result(a_view(tmp_path), **changes))


ONLY_HERE = "Scores of clients on held-out records are shown by simulations only: real sites keep theirs."


def test_the_requested_metric_comes_first_beside_its_baseline(a):
    assert in_words(a(**RARE)) == "Test auroc 0.7 (class shares 0.5), accuracy 94.00% (class shares 94.00%)"
    assert list(score_cells([a(**RARE)])) == ["test auroc", "baseline of test auroc", "test accuracy"]
    without = {"test_accuracy": None, "test_metrics": {"mae": 2.0}, "baseline": {"mae": 1.5, "accuracy": None}}
    assert (
        in_words(a(**without, test_set=False))
        == "Mean over clients on held-out records: mae 2 (predicting the mean 1.5)"
    )
    assert in_words(a(test_accuracy=None, test_loss=1.5)) == "Test loss 1.5"
    assert in_words(a(test_accuracy=None, test_loss=float("nan"))) == ""


def test_what_is_no_better_than_the_baseline_is_said(a):
    assert remarks([a(**RARE)]) == [ONLY_HERE], "who asks for auroc is not told about the accuracy"
    rare = {**RARE, "test_metrics": {"ece": 0.1}}
    assert remarks([a(**rare)]) == ["No better than the baseline: accuracy 94.00% (class shares 94.00%).", ONLY_HERE]
    chance = {**RARE, "test_metrics": {"auroc": 0.49}}
    assert remarks([a(**chance)]) == ["No better than the baseline: auroc 0.49 (class shares 0.5).", ONLY_HERE]
    errors = {"test_accuracy": None, "test_metrics": {"mae": 2.0, "r2": 0.1}, "baseline": {"mae": 1.5, "r2": 0.0}}
    assert remarks([a(**errors)]) == [
        "No better than the baseline: mae 2 (predicting the mean 1.5).",
        ONLY_HERE,
    ]
    better = a(**{**errors, "test_metrics": {"mae": 0.9, "r2": 0.1}})
    assert remarks([better]) == remarks([better, a(**errors)]) == [ONLY_HERE], "the means over seeds are compared"
    released = [{**one, "accuracy": None, "loss": None} for one in a()["clients"]]
    assert remarks([{**better, "clients": released}]) == [], "of sites"


def test_an_undefined_score_says_why(a):
    clients = [{**one, "name": f"h{i}", "undefined": ONE_CLASS} for i, one in enumerate(a()["clients"] * 3)]
    undefined = a(**{**RARE, "test_metrics": {"auroc": None}, "test_accuracy": 0.95}, undefined=ONE_CLASS)
    assert in_words(undefined).startswith("Test auroc undefined (class shares 0.5), accuracy")
    assert remarks([{**undefined, "clients": clients[:2]}]) == [
        ONLY_HERE,
        "auroc: the test records have one class.",
        "auroc: the held-out records of h0 and h1 have one class.",
    ]
    assert "of h0, h1, h2, h3, h4 and 4 more clients have one class." in remarks([{**undefined, "clients": clients}])[2]


def test_seeds_and_their_clients_are_means_with_the_epsilon_of_all_runs(a):
    results = [a(test_accuracy=0.5), a(test_accuracy=0.7)]
    assert [list(row.values()) for row in seed_rows([4, 7], results, "5.5 at delta 0.001")] == [
        ["4", "50.00%", "3 at delta 0.001 per record"],
        ["7", "70.00%", "3 at delta 0.001 per record"],
        ["all", "60.00% \N{PLUS-MINUS SIGN} 14.14%", "5.5 at delta 0.001"],
    ]
    rows = rows_of(client_columns(results))
    assert rows[2] == {
        **{"client": "2", "records": "102", "batch size": "10", "noise multiplier": "1.25", "epsilon spent": "2.97"},
        **{"budget": "3", "delta": "0.001", "accuracy": "50.20%"},
    }


def test_a_metric_does_not_replace_a_column_of_the_guarantee(a):
    scores = {name: 0.25 for name in ("client", "records", "delta", "epsilon_spent", "f1")}
    clients = [{**one, "metrics": scores} for one in a()["clients"]]
    (row, *_) = rows_of(client_columns([a(clients=clients)]))
    assert list(row.values()) == ["0", "100", "10", "1.25", "0.99", "1", "0.001", *5 * ["0.25"], "50.00%"]
    assert row["client (1)"] == "0" and row["delta (1)"] == "0.001"
