"""A unit that a stranger adds: one class, and one entry in the registry."""

import json
from typing import ClassVar

import numpy as np
import pytest
from conftest import FIXED_KEY
from pages import words_of

from dpfl_lightning import Population
from dpfl_lightning.commands.account import main as account_command
from dpfl_lightning.commands.ledger import main as ledger_command
from dpfl_lightning.commands.plan import main as plan_command
from dpfl_lightning.config import options, registry
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.units import UNITS, Group, Person, Record
from dpfl_lightning.privacy.clipping.inputs import Block
from dpfl_lightning.privacy.compose import Limit
from dpfl_lightning.privacy.ledger.operator import OperatedAccount
from dpfl_lightning.privacy.ledger.verify import ledger_of, read

WORDS = "privacy per household (add or remove one household of one client), Poisson sampling of households"


class Household(Group):
    """All rows of a household."""

    name: ClassVar[str] = "household"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The names of a key are read from the source of its registry, which a test does not edit."""
    keys_in, caches = registry._keys_in, (registry.names_of, options.hints_of)
    written = lambda module, name: [*UNITS] if module == "privacy.accounting.units" else keys_in(module, name)  # noqa: E731
    monkeypatch.setitem(UNITS, Household.name, Household)
    monkeypatch.setattr(registry, "_keys_in", written)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def account(tmp_path, monkeypatch) -> OperatedAccount:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return OperatedAccount(tmp_path / "account.jsonl")


def households() -> Population:
    """Two clients with 30 households each, of one, two or three rows."""
    rng, sizes = np.random.default_rng(0), [1, 2, 3] * 10
    clients = {
        name: (rng.normal(size=(60, 6)).astype(np.float32), rng.integers(0, 3, 60)) for name in ("bergen", "oslo")
    }
    ids = {name: np.repeat([f"{name} {number}" for number in range(30)], sizes).tolist() for name in clients}
    return Population.from_datasets(clients, held_out=0.2, num_classes=3, persons=ids)


def run_of(make_loop, privacy, **more):
    clients = ClientOptions(count=2, batch_size=8, learning_rate=0.3)
    return make_loop(population=households(), privacy=PrivacyOptions(delta=1e-3, **privacy), clients=clients, **more)


@pytest.mark.e2e
def test_a_run_draws_clips_counts_and_says_households(make_loop, capsys):
    loop = run_of(make_loop, {"epsilon": 5.0, "unit": "household", "rows_per_person": 2, "noise_key": FIXED_KEY})
    assert loop.config.facts.num_records == loop.population.num_ids and str(loop.config.facts.unit) == "household"
    result, folder = loop.run(), loop.config.output_dir
    x, y = loop.clients.population.held_out(0)
    assert isinstance(x, Block) and x.weights.shape == y.shape == (loop.population.num_held_out[0] and len(y), 2)
    assert f"{WORDS}, at most 2 rows of each" in result.guarantee.words() and 4.9 < result.guarantee.epsilon <= 5
    assert "a household at two clients is two households" in str(result.guarantee)
    assert "numbers of training records or households" in str(result.guarantee)
    assert json.loads((folder / "ledger.jsonl").open().readline())["adjacency"] == "add_remove_of_households"
    verified = read([ledger_of(folder)]).weakest
    assert verified.epsilon == result.guarantee.epsilon and f"{WORDS}, at most 2 rows of each" in verified.words()
    assert ledger_command([str(folder)]) == 0 and WORDS in capsys.readouterr().out
    page = words_of((folder / "guarantee.html").read_text())
    assert "A household is all rows of one client with one id" in page and "its number of households" in page
    assert "person" not in page


@pytest.mark.e2e
def test_a_limit_counts_households_and_what_is_stated_of_them(make_loop, account, tmp_path):
    """Rows that a run of records states are those of a person, and say nothing of households."""
    same = {"epsilon": 2.0, "account": str(account.path)}
    run_of(make_loop, {**same, "unit": "household", "rows_per_person": 2}, output_dir=tmp_path / "first").run()
    limit = Limit(500.0, 1e-3, unit=Household())
    account.limit("bergen", limit)
    (bergen,) = [one for one in account.holders() if one.is_called("bergen")]
    assert bergen.together.limit_adjacency == bergen.together.adjacency == Household().relation("add_remove")
    records = run_of(make_loop, {**same, "rows_per_person": 3}, output_dir=tmp_path / "second")
    refused = (
        "records of households of whom nobody says how many rows they have'. Set privacy.unit to household, or give"
    )
    with pytest.raises(UserError, match=refused):
        records.run()
    persons = run_of(make_loop, {**same, "unit": "person", "rows_per_person": 3}, output_dir=tmp_path / "third")
    with pytest.raises(UserError, match="persons of households of whom nobody says how many persons they have"):
        persons.run()
    account.limit("bergen", Limit(500.0, 1e-3, unit=Household(3)))
    run_of(make_loop, {**same, "rows_per_person": 3}, output_dir=tmp_path / "fourth").run()


def test_another_unit_never_counts_as_this_one():
    assert [Household(2).most_of(one) for one in (Household(3), Record(), Record(3), Person(3))] == [1, 2, 2, None]
    assert [Person().most_of(one) for one in (Person(3), Record(), Record(3), Household(3))] == [1, None, 3, None]
    assert [Record().most_of(one) for one in (Record(), Person(), Household())] == [1, 1, 1]


def test_commands_name_it(account, capsys):
    words = ["--unit", "household", "--rows_per_person", "4", "--file", str(account.path)]
    assert account_command(["limit", "lund", "8", "1e-5", *words]) == 0
    assert "8, add or remove one household of one client" in capsys.readouterr().out
    unit = ["--privacy.unit", "household", "--privacy.rows_per_person", "4", "--data.records_per_person", "4"]
    assert plan_command(["--config", "digits", "--clients.batch_size", "8", *unit]) == 0
    assert "households" in (shown := capsys.readouterr().out) and WORDS in shown
