"""Mistakes that users make often: the message says what is wrong, and the way out in words that can be typed."""

import warnings

import numpy as np
import pandas
import pytest
import torch

from dpfl_lightning import ClientModule, Population
from dpfl_lightning.__main__ import main
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.server.strategy import Strategy

DIGITS = "fit --config digits --tracking null"
COMMANDS = {
    "train --config digits": "got 'train'. Did you mean `fit`?",
    f"{DIGITS} --privacy.epsilon 1,2,4": "Write [1,2,4], in square brackets.",
    f"{DIGITS} --privacy.epsilon two": "must be a number > 0 (also one for each client) or null, got 'two'. Set on",
    f"{DIGITS} --privacy.delta 1": "Choose a delta below 1 / records of a client, such as 1e-5.",
    f"{DIGITS} --evaluation.metrics [auc]": "Did you mean `auroc`?",
    f"{DIGITS} --strategies.fedavg {{}}": "Did you mean `size_weighted`?",
    f"{DIGITS} --engine.device cuda": "Write --engine.device cpu, or auto",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_says_the_way_out(words, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert COMMANDS[words] in capsys.readouterr().err and not [*tmp_path.iterdir()]


ROWS = 50
TABLE = pandas.DataFrame(
    {
        "hospital": ["rome", "oslo"] * (ROWS // 2),
        "age": np.arange(ROWS) % 7,
        "ill": 1 - np.arange(ROWS) % 3 // 2,
        "admitted": pandas.date_range("2020-01-01", periods=ROWS).astype(str),
        "patient_id": [f"P{number:05d}" for number in range(ROWS)],
        "dose": ["1,5"] * ROWS,
    }
)
TABLES = {
    "a date": (
        {"features": ["age", "admitted"]},
        "admitted` must hold numbers, got 'dates'. Write a public first day, as in columns: {admitted: {since: 20",
    ),
    "an id": (
        {"features": ["age", "patient_id"]},
        "patient_id` must hold numbers, got 'ids of persons'. Write person: patient_id",
    ),
    "a missing file": (
        {"features": ["age"], "test": "nowhere.csv"},
        "`test` must be a DataFrame or the path of a file",
    ),
    "a test table without a column": (
        {"features": ["age"], "test": TABLE.drop(columns="age")},
        "`test` must have the columns of label and features, got 'no age'. Write rename",
    ),
    "yes and no": (
        {"features": ["age"], "classes": [False, True]},
        "got 'yes'. YAML reads yes and no without quotation marks as true and false",
    ),
}


@pytest.mark.parametrize("mistake", TABLES)
def test_a_table_says_what_the_column_is(mistake):
    options, words = TABLES[mistake]
    table = TABLE.assign(ill=TABLE.ill.map({0: "no", 1: "yes"})) if "classes" in options else TABLE
    with pytest.raises(UserError) as error:
        Population.from_dataframe(table, client="hospital", label="ill", **{"num_classes": 2, **options})
    assert words in str(error.value)


def test_a_table_whose_rows_come_twice():
    twice = pandas.concat([TABLE, TABLE])
    with pytest.warns(UserNotice, match="client oslo: 25 of 50 rows are copies of another row"):
        options = {"client": "hospital", "label": "ill", "features": ["age"], "num_classes": 2, "person": "none"}
        Population.from_dataframe(twice, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Population.from_dataframe(TABLE, **options)
        Population.from_dataframe(twice[["hospital", "age", "ill"]], **options)  # equal rows may be other people's


def test_a_model_without_values():
    with torch.device("meta"):
        net = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"hold values, got 'a tensor on the device meta'. Make the model outside"):
        ClientModule(net)


class Halved(Strategy):
    def weigh(self, updates, view):
        return torch.full((len(updates.clients),), 0.5)


class Meant(Halved):
    role = "correction"


def test_weights_of_a_strategy_without_a_role_are_said_to_multiply(make_loop):
    with pytest.warns(UserNotice, match='weights of [a-z_.]*Halved multiply those of size_weighted.*role = "base"'):
        make_loop(parts=[Halved()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_loop(parts=[Meant()])
