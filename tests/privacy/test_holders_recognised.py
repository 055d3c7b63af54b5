"""Who is the same in the account: names in any spelling, and records in whatever form a configuration reads them."""

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from conftest import small_loop, small_net
from dp_accounting import dp_event, pld
from fakes import pay

from dpfl_lightning.commands.account import main
from dpfl_lightning.commands.fit import main as fit
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.data.raw_rows import cell_digest
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.compose import Limit
from dpfl_lightning.privacy.ledger.account import NAMELESS
from dpfl_lightning.privacy.ledger.account_file import RunRecord
from dpfl_lightning.privacy.ledger.evidence import Evidence, matches
from dpfl_lightning.privacy.ledger.operator import OperatedAccount
from experiments import holders

DELTA = 1e-3
COLUMNS = {"age": {"scale": (60, 20)}, "crp": {"scale": (12, 10)}, "sbp": {"scale": (130, 20)}}


def of(*features: str) -> dict[str, object]:
    """The section with these features alone."""
    return {"features": list(features), "columns": {name: COLUMNS[name] for name in features}}


LIMIT = ["limit", "bergen", "3", str(DELTA)]


def patients(count: int = 160, seed: int = 0) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    columns = {
        "age": rng.normal(62, 15, count).round(),
        "crp": rng.lognormal(2.5, 1, count).round(1),
        "sbp": rng.normal(130, 20, count).round(),
        "ill": rng.integers(0, 2, count),
        "los": rng.gamma(2, 2, count).round(1),
    }
    return pandas.DataFrame(columns)


class Runs:
    """Runs on CSV files that are charged to one account."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.account, self.count = folder, OperatedAccount(folder / "account.jsonl"), 0

    def population(self, tables: dict[str, pandas.DataFrame], **options) -> Population:
        self.count += 1
        folder = self.folder / f"data{self.count}"
        folder.mkdir()
        for name, table in tables.items():
            table.to_csv(folder / f"{name}.csv", index=False)
        usual = {"label": "ill", "features": ["age", "crp", "sbp"], "columns": COLUMNS, "num_classes": 2}
        return Population.from_dataframe(folder, **{**usual, **options})

    def run(self, tables, epsilon: float = 1.2, **options):
        population = tables if isinstance(tables, Population) else self.population(tables, **options)
        self.count += 1
        features = population.input_shape[0]
        net = lambda seed: small_net(features, 2, seed)  # noqa: E731
        privacy = PrivacyOptions(epsilon=epsilon, delta=DELTA, account=str(self.account.path))
        clients = ClientOptions(count=population.num_clients, batch_size=10)
        folder = self.folder / f"run{self.count}"
        return small_loop(
            population, ClientModule(net(0)), new_net=net, privacy=privacy, clients=clients, output_dir=folder
        ).run()

    def holders(self) -> list[tuple[str, ...]]:
        return [one.names for one in self.account.holders()]

    def command(self, *words: str) -> int:
        return main([*words, "--file", str(self.account.path)])


@pytest.fixture
def runs(tmp_path) -> Runs:
    return Runs(tmp_path)


@pytest.mark.e2e
@pytest.mark.parametrize("other", ["Bergen", "BERGEN", "\uff42ergen"])
def test_a_name_in_another_spelling_is_the_same_holder(runs, other):
    """Also if every record is another one."""
    runs.run({"bergen": patients()})
    runs.run({other: patients(seed=5)})
    assert runs.holders() == [("bergen",)]
    assert runs.account.holders()[0].together.runs == 2


def test_the_first_spelling_is_shown_and_invisible_characters_are_none(runs):
    runs.account.limit("Straße\u200b ", Limit(8.0, DELTA))
    runs.run({"STRASSE": patients()})
    ((shown,),) = runs.holders()
    assert shown == "Straße\u200b " and runs.command("join", "strasse", "straße") == 0


@pytest.mark.e2e
def test_two_spellings_in_turn_do_not_pass_a_limit(runs):
    assert runs.command(*LIMIT) == 0
    with pytest.raises(UserError, match="keep the limit of bergen, epsilon 3"):
        for number in range(12):
            runs.run({["Bergen", "bergen"][number % 2]: patients()})
    (holder,) = runs.account.holders()
    assert holder.names == ("bergen",) and 0 < holder.together.epsilon <= 3 and holder.together.used <= 1


@pytest.mark.e2e
def test_two_spellings_in_one_run_count_together(runs):
    runs.run({"bergen": patients()})
    alone = runs.account.holders()[0].together.epsilon
    runs.run({"Bergen": patients(seed=1), "bergen": patients(seed=2)})
    ((name,),) = runs.holders()
    together = runs.account.holders()[0].together
    assert name == "bergen" and together.runs == 2 and together.epsilon > 1.5 * alone


def changed(how: str) -> tuple[dict, dict]:
    """Tables and options of a second run, on some records of the first one."""
    table, label = patients(), {"label": "ill"}
    first, more = table.iloc[: int(0.45 * len(table))], patients(seed=9)
    swapped = table.assign(ill=1 - table["ill"])
    shuffled = table.sample(frac=1, random_state=1)[["los", "ill", "sbp", "crp", "age"]]
    return {
        "order of features": (table, {"features": ["sbp", "age", "crp"]}),
        "scale": (table, {"columns": {**COLUMNS, "age": {"scale": (0, 10)}}}),
        "no scale": (table, {"features": ["sbp", "age"], "columns": {}}),
        "one column less": (table, of("age", "crp")),
        "another column": (table, {"features": ["age", "los"], "columns": {"age": COLUMNS["age"]}}),
        "another label": (table.assign(ill=table["ill"]), {"label": "los", "num_classes": 1}),
        "labels swapped": (swapped, label),
        "45 % of the rows": (first, label),
        "an eighth of the rows": (table.iloc[:20], label),
        "pooled": (pandas.concat([table, more]), label),
        "part of it pooled": (pandas.concat([first, more, patients(seed=10)]), label),
        "rows and columns in another order": (shuffled, label),
        "a column left out of the file": (table.drop(columns="los"), label),
        "a column left out of a part of the file": (first.drop(columns="los"), label),
        "a column more in the file": (table.assign(ward=np.arange(len(table)) % 7), label),
        "another column name": (table.rename(columns={"ill": "sick"}), {"label": "sick"}),
    }[how]


CHANGES = [
    *("order of features", "scale", "no scale", "one column less", "another column", "another label"),
    *("labels swapped", "45 % of the rows", "an eighth of the rows", "pooled", "part of it pooled"),
    *("rows and columns in another order", "a column left out of the file", "another column name"),
    *("a column left out of a part of the file", "a column more in the file"),
]


@pytest.mark.e2e
@pytest.mark.parametrize("how", CHANGES)
def test_records_in_another_form_are_the_same_holder(runs, how):
    runs.run({"bergen": patients()})
    table, options = changed(how)
    with pytest.warns(UserNotice, match="haukeland has records of bergen: their accounts are one from now on"):
        if how == "another label":
            runs.account.enter(entry(runs, {"haukeland": table}, **options))
        else:
            runs.run({"haukeland": table}, **options)
    assert runs.holders() == [("bergen", "haukeland")]


@pytest.mark.e2e
def test_other_records_of_the_same_population_are_another_holder(runs):
    runs.run({"bergen": patients(), "oslo": patients(seed=3)})
    runs.run({"lund": patients(seed=4)})
    assert sorted(runs.holders()) == [("bergen",), ("lund",), ("oslo",)]


@pytest.mark.e2e
def test_a_match_says_how_likely_it_is_by_chance(runs):
    runs.run({"bergen": patients()})
    with pytest.warns(UserNotice, match=r"by chance with a probability of at most \d+e-\d+"):
        runs.run({"haukeland": patients()})
    lines = [json.loads(line) for line in runs.account.path.read_text().splitlines()]
    (same,) = [line for line in lines if "same" in line]
    assert same["same"] == ["haukeland", "bergen"] and 0 <= same["chance"] < 1e-9


@pytest.mark.e2e
def test_records_with_few_values_say_nothing(runs):
    """Every hospital has patients who agree in three answers. Only the whole table is recognised, in any order."""
    rng = np.random.default_rng(0)
    columns = ["age", "crp", "sbp", "ill"]
    bergen, oslo = (pandas.DataFrame(rng.integers(0, 2, (400, 4)), columns=columns) for _ in range(2))
    for name, table in {"bergen": bergen, "oslo": oslo, "lund": bergen[:300]}.items():
        runs.run({name: table}, columns={})
    with pytest.warns(UserNotice, match=r"haukeland has records of bergen: .*all 400 records agree"):
        runs.run({"haukeland": bergen.sample(frac=1, random_state=0)}, columns={})
    assert sorted(runs.holders()) == [("bergen", "haukeland"), ("lund",), ("oslo",)]


def with_ids(table: pandas.DataFrame, first: int, step: int = 1) -> pandas.DataFrame:
    return table.assign(patient=[f"P{first + step * number:011d}" for number in range(len(table))])


@pytest.mark.e2e
def test_persons_are_recognised_by_their_ids(runs):
    """Though every other cell has changed. Running numbers, which every hospital begins at 1, say nothing."""
    options = {"person": "patient"}
    of_register = np.random.default_rng(3).choice(10**10, 160, replace=False).astype(str)
    runs.run({"bergen": patients().assign(patient=of_register)}, **options)
    with pytest.warns(UserNotice, match="haukeland has records of bergen"):
        runs.run({"haukeland": patients(seed=8).assign(patient=of_register)}, **options)
    runs.run({"lund": with_ids(patients(seed=11), 1)}, **options)
    runs.run({"oslo": with_ids(patients(seed=12), 1)}, **options)
    assert sorted(runs.holders()) == [("bergen", "haukeland"), ("lund",), ("oslo",)]


@pytest.mark.e2e
def test_a_column_of_clients_is_not_compared(runs):
    """One table of two sites, and the table of one of them."""
    both = pandas.concat([patients().assign(site="a"), patients(seed=3).assign(site="b")])
    path = runs.folder / "both.csv"
    both.to_csv(path, index=False)
    columns = {"label": "ill", "features": ["age", "crp", "sbp"], "columns": COLUMNS, "num_classes": 2}
    runs.run(Population.from_dataframe(path, client="site", **columns))
    with pytest.warns(UserNotice, match="haukeland has records of a"):
        runs.run({"haukeland": patients().sample(frac=1, random_state=0)})
    assert sorted(runs.holders()) == [("a", "haukeland"), ("b",)]


@pytest.mark.e2e
def test_how_a_file_is_written_does_not_count(runs):
    """Semicolons and decimal commas, and a Parquet file or a table in memory."""
    runs.run({"bergen": patients()})
    path = runs.folder / "written.csv"
    patients().to_csv(path, index=False, sep=";", decimal=",")
    columns = {"label": "ill", "features": ["age", "crp", "sbp"], "columns": COLUMNS, "num_classes": 2}
    for name, table in (("haukeland", {"file": path, "read": {"sep": ";", "decimal": ","}}), ("hus", patients())):
        with pytest.warns(UserNotice, match=f"{name} has records of bergen"):
            runs.run(Population.from_dataframe({name: table}, **columns))
    assert runs.holders() == [("bergen", "haukeland", "hus")]


@pytest.mark.e2e
def test_tensors_are_compared_without_labels(runs):
    table = patients()
    x, y = table[["age", "crp", "sbp"]].to_numpy(np.float32) / 50, table["ill"].to_numpy()
    order = np.random.default_rng(0).permutation(len(x))[:100]
    runs.run(Population.from_datasets({"bergen": (x, y)}, num_classes=2))
    with pytest.warns(UserNotice, match="haukeland has records of bergen"):
        runs.run(Population.from_datasets({"haukeland": (x[order], 1 - y[order])}, num_classes=2))
    lazy = Population.from_datasets({"hus": (x[order[::-1]].copy(), y[order])}, num_classes=2, lazy=True)
    with pytest.warns(UserNotice, match="hus has records of bergen"):
        runs.run(lazy)
    assert runs.holders() == [("bergen", "haukeland", "hus")]


@pytest.mark.e2e
def test_an_unknown_name_is_refused_where_there_is_a_limit_until_the_operator_says_who_it_is(runs, capsys):
    assert runs.command("limit", "bergen", "8", str(DELTA)) == 0
    runs.run({"bergen": patients()})
    paid = runs.account.holders()
    with pytest.raises(UserError) as refused:
        runs.run({"lund": patients(seed=4)})
    file = f"--file {runs.account.path}"
    for words in ("`privacy.account` must", "'lund'", f"account new lund {file}`", f"account join lund bergen {file}`"):
        assert words in str(refused.value)
    assert runs.account.holders() == paid and not [*runs.folder.glob(f"run{runs.count}/ledger.jsonl")]
    assert runs.command("new", "Lund") == 0
    runs.run({"lund": patients(seed=4)})
    with pytest.warns(UserNotice, match="haukeland has records of bergen"):
        runs.run({"haukeland": patients()})
    assert sorted(runs.holders()) == [("bergen", "haukeland"), ("lund",)]


@pytest.mark.e2e
def test_a_new_holder_whose_records_are_known_stays_joined(runs, capsys):
    runs.run({"bergen": patients()})
    assert runs.command(*LIMIT) == 0
    with pytest.raises(UserError, match="keep the limit of bergen or haukeland"):
        runs.run({"haukeland": patients()}, epsilon=8.0)
    assert runs.command("new", "haukeland") == 0
    assert "haukeland has records of bergen, so their accounts stay one" in capsys.readouterr().err
    assert runs.holders() == [("bergen", "haukeland")]


def test_what_a_refused_run_says_of_records_is_kept(runs):
    """A name that the operator declares new after a refusal is known by its records from then on."""
    assert runs.command(*LIMIT) == 0
    with pytest.raises(UserError, match="account new lund"):
        runs.run({"lund": patients(seed=4)})
    assert runs.command("new", "lund") == 0
    with pytest.warns(UserNotice, match="malmö has records of lund"):
        runs.run({"malmö": patients(seed=4)})
    assert ("lund", "malmö") in runs.holders()


def test_no_digest_leaves_the_account(runs):
    runs.run({"bergen": patients()})
    population = runs.population({"bergen": patients()})
    (view, *_) = population.evidence(runs.account.key)[0].views
    secrets = [view.packed[place : place + 8] for place in range(0, len(view.packed), 8)]
    raw = [one.tobytes() for one in population.raw.cells.sum(axis=1)]
    for path in runs.folder.glob("run*/**/*"):
        content = path.read_bytes() if path.is_file() else b""
        assert b"evidence" not in content and not any(
            one in content or one.hex().encode() in content for one in secrets
        )
        assert not any(one in content or one.hex().encode() in content for one in raw)
    other = population.evidence(b"another holder's key")[0].views[0]
    assert not set(secrets) & {other.packed[place : place + 8] for place in range(0, len(other.packed), 8)}


@pytest.mark.e2e
def test_evidence_of_the_same_records_is_written_once(runs):
    for _ in range(3):
        runs.run({"bergen": patients()})
    lines = [json.loads(line) for line in runs.account.path.read_text().splitlines()]
    assert sum("evidence" in line and "run" not in line for line in lines) == 1


@pytest.mark.e2e
def test_many_clients_enter_within_seconds(tmp_path):
    """A hundred thousand would take a hundred times as long; their evidence is a few digests each."""
    rng = np.random.default_rng(0)
    pairs = {f"phone {n}": (rng.normal(size=(8, 3)).astype(np.float32), np.arange(8) % 2) for n in range(1000)}
    population, runs = Population.from_datasets(pairs, num_classes=2), Runs(tmp_path)
    began = time.process_time()
    found = population.evidence(runs.account.key)
    names, count = dict(enumerate(population.names)), len(pairs)
    runs.account.enter(
        RunRecord(
            "a" * 32,
            "none",
            "add_remove",
            "poisson",
            "pld",
            names,
            (DELTA,) * count,
            ((),) * count,
            found,
            (None,) * count,
            (None,) * count,
        )
    )
    assert time.process_time() - began < 5 and runs.account.path.stat().st_size < 1000 * 900
    assert len(runs.account.holders()) == 1000


@pytest.mark.e2e
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 50))])
def test_names_subsets_and_forms_in_any_order_never_pass_a_limit(runs, seed):
    """All of these runs are on records of one hospital. What they have charged is composed by dp_accounting."""
    rng, limit, table = np.random.default_rng(seed), 3.0, patients(300, seed)
    runs.account.limit("bergen", Limit(limit, DELTA))
    runs.account.enter(entry(runs, {"bergen": table}))
    names = ["bergen", "Bergen", "BERGEN", "haukeland", "Haukeland", "hus", "ward 3"]
    paid, refused = [], 0
    for number in range(14):
        name = str(rng.choice(names))
        rows = table.sample(frac=rng.uniform(0.1, 1), random_state=number)
        rows = pandas.concat([rows, patients(int(rng.integers(1, 200)), 100 + number)]) if rng.random() < 0.3 else rows
        rows = rows.assign(ill=1 - rows["ill"]) if rng.random() < 0.3 else rows.drop(columns=rng.choice(["los", "sbp"]))
        if rng.random() < 0.3:
            runs.account.new(name)
        event = GaussianEvent(rng.uniform(0.02, 0.3), rng.uniform(0.9, 4), int(rng.integers(5, 40)))
        features = [one for one in ("crp", "age", "sbp") if one in rows]
        columns = {one: {"scale": (rng.uniform(0, 50), 40.0)} for one in features}
        try:
            runs.account.enter(entry(runs, {name: rows}, number, event, features=features, columns=columns))
            pay(runs.account, [(0, event)])
            paid.append(event)
        except UserError as error:
            assert "keep the limit" in str(error) or "know all data holders" in str(error)
            refused += 1
    assert paid and refused and len(runs.account.holders()) == 1
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    for event in paid:
        one = dp_event.PoissonSampledDpEvent(event.sample_rate, dp_event.GaussianDpEvent(event.noise_multiplier))
        accountant.compose(dp_event.SelfComposedDpEvent(one, event.steps))
    assert accountant.get_epsilon(DELTA) <= limit


def entry(runs: Runs, tables, number: int = 99, event=None, **options) -> RunRecord:
    population = runs.population(tables, **options)
    found, planned = population.evidence(runs.account.key), () if event is None else ((event, 1),)
    names = dict(enumerate(population.names))
    return RunRecord(
        f"{number:032d}", "none", "add_remove", "poisson", "pld", names, (DELTA,), (planned,), found, (None,), (None,)
    )


CONFIG = """
rounds: 1
data: {{class_path: dpfl_lightning.Population.from_dataframe, init_args: {{df: {folder}, label: ill, num_classes: 2,
  features: {features}, columns: {{age: {{scale: [60, 20]}}, crp: {{scale: [12, 10]}}, sbp: {{scale: [130, 20]}}}}}}}}
model: {{name: logistic}}
clients: {{batch_size: 16}}
privacy: {{epsilon: 1.8, delta: 1.0e-3}}
engine: {{device: cpu}}
tracking: null
output_dir: {output}
"""


@pytest.mark.e2e
def test_fit_refuses_two_spellings_and_another_order_of_features_at_the_limit(tmp_path, monkeypatch, capsys):
    """As somebody meets it: a file for each run, a configuration, and `dpfl fit`."""
    monkeypatch.setenv("DPFL_ACCOUNT", str(tmp_path / "users.jsonl"))
    assert main(LIMIT) == 0
    ends = []
    for number, name in enumerate(["bergen", "Bergen", "haukeland", "BERGEN"]):
        folder = tmp_path / f"data{number}"
        folder.mkdir()
        patients().to_csv(folder / f"{name}.csv", index=False)
        features = "[age, crp, sbp]" if number % 2 else "[sbp, crp, age]"
        config = CONFIG.format(folder=folder, features=features, output=tmp_path / f"run{number}")
        (tmp_path / "one.yaml").write_text(config)
        ends.append(fit(["--config", str(tmp_path / "one.yaml")]))
    (holder,) = OperatedAccount(tmp_path / "users.jsonl").holders()
    assert holder.names == ("bergen", "haukeland") and holder.together.epsilon <= 3 and holder.together.used <= 1
    assert ends[0] == 0 and ends[-1] == 2 and "keep the limit" in capsys.readouterr().err


def test_the_page_has_the_figures_of_the_measurement():
    """And they are of the kind that one may rely on."""
    pairs = json.loads((holders.RESULTS / "holders.json").read_text())
    found = {kind: sum(one["found"] for one in pairs if one["kind"] == kind) for kind in holders.KINDS}
    assert len(pairs) == len(holders.KINDS) * holders.PAIRS and found["disjoint"] == 0 and found["overlapping"] >= 195
    page = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text()
    kinds = ("disjoint", "overlapping", "overlapping, few values")
    assert [line.split("|")[2].strip() for line in page.splitlines() if " of 200 |" in line] == [
        f"{found[kind]} of {holders.PAIRS}" for kind in kinds
    ]
    assert found["changed in every row"] == 0 and "changed in every row, in more than one column, cannot be" in page


@pytest.mark.e2e
def test_the_measurement_repeats():
    pairs = json.loads((holders.RESULTS / "holders.json").read_text())
    for place, kind in enumerate(holders.KINDS):
        for number in (0, 1):
            again = dataclasses.asdict(holders.compared(holders.KINDS[kind], (holders.SEED, place, number)))
            kept = pairs[place * holders.PAIRS + number]
            assert (again["found"], list(again["rows"]), again["source"]) == (
                kept["found"],
                kept["rows"],
                kept["source"],
            )


@pytest.mark.e2e
def test_nameless_clients_are_as_before(runs):
    runs.run(Population.from_datasets([(np.ones((40, 3), np.float32), np.arange(40) % 2)], num_classes=2))
    assert runs.holders() == [(NAMELESS,)]


def tensors(seed: int = 0, name: str = "") -> Population:
    draw = torch.Generator().manual_seed(seed)
    records = torch.randn(90, 3, generator=draw), torch.arange(90) % 2
    return Population.from_datasets({name: records} if name else [records], num_classes=2)


@pytest.mark.e2e
def test_a_run_without_names_makes_no_name_known(runs):
    """It may be anybody's, also of a holder with a limit; two such clients are not one holder."""
    runs.run(tensors())
    assert runs.command(*LIMIT) == 0
    for name in ("tromso", "alesund"):
        with pytest.raises(UserError, match=f"know all data holders of a run.* got '{name}'"):
            runs.run(tensors(name=name))
    assert all(len(names) == 1 for names in runs.holders())


@pytest.mark.e2e
def test_a_run_without_privacy_is_refused_on_records_with_a_limit(runs, monkeypatch):
    monkeypatch.setenv("DPFL_ACCOUNT", str(runs.account.path))
    runs.run({"bergen": patients()})
    assert runs.command(*LIMIT) == 0
    for name in ("bergen", "cork"):  # by name, or by its records
        population = runs.population({name: patients()})
        loop = small_loop(population, ClientModule(small_net(3, 2)), privacy=None, clients=ClientOptions(count=1))
        with pytest.raises(UserError, match="`privacy` must be set, because there is a limit on bergen"):
            loop.run()
    other = runs.population({"lund": patients(seed=7)})
    loop = small_loop(other, ClientModule(small_net(3, 2)), privacy=None, clients=ClientOptions(count=1))
    with pytest.raises(UserError, match="know all data holders of a run, because there is a limit on bergen"):
        loop.run()
    assert runs.command("new", "lund") == 0
    loop.run()


@pytest.mark.e2e
@pytest.mark.parametrize("option", [{"noise_key": "0" * 32}, {"account": None}])
def test_a_run_that_is_not_charged_is_refused_on_records_with_a_limit(runs, monkeypatch, option):
    monkeypatch.setenv("DPFL_ACCOUNT", str(runs.account.path))
    runs.run({"bergen": patients()})
    assert runs.command(*LIMIT) == 0
    privacy = PrivacyOptions(epsilon=1.0, delta=DELTA, **option)
    population = runs.population({"bergen": patients()})
    loop = small_loop(population, ClientModule(small_net(3, 2)), privacy=privacy, clients=ClientOptions(count=1))
    (name,) = option
    with pytest.raises(UserError, match=f"`privacy.{name}` must be .* there is a limit on bergen.*unlimit"):
        loop.run()
    assert runs.command("unlimit", "bergen") == 0
    loop.run()


IDS = {
    "by year": lambda n: [f"{2018 + i % 7}-{1 + i // 7:05}" for i in range(n)],
    "by ward": lambda n: [f"{1 + i % 5:02}-{1 + i // 5:04}" for i in range(n)],
    "of a trial": lambda n: [f"S{1 + i // 20:02}-{1 + i % 20:03}" for i in range(n)],
    "in steps": lambda n: [str(10_000 + 97 * i) for i in range(n)],
    "with check digits": lambda n: [f"{1 + i}{(97 - i * 37 % 97):02}" for i in range(n)],
}


@pytest.mark.e2e
@pytest.mark.parametrize("count", [40, 100, 300])
@pytest.mark.parametrize("kind", IDS)
def test_ids_that_others_have_too_make_no_one_holder(runs, kind, count):
    for name, seed in (("north", 1), ("south", 2)):
        runs.run({name: patients(count, seed).assign(patient_id=IDS[kind](count))}, person="patient_id")
    assert sorted(runs.holders()) == [("north",), ("south",)]


@pytest.mark.e2e
@pytest.mark.parametrize("numbers", ["rows", "days"])
def test_numbers_of_rows_make_no_one_holder(runs, numbers):
    for name, seed in (("north", 1), ("south", 2)):
        rng, count = np.random.default_rng(seed), 300
        table = pandas.DataFrame({"sex": rng.choice(["F", "M"], count), "ill": rng.integers(0, 2, count)})
        table["age"] = rng.normal(60, 15, count).round()
        table["nr"] = np.arange(count) + 1
        if numbers == "days":
            table["nr"] = pandas.date_range("2022-01-01", periods=count).strftime("%Y-%m-%d")
        runs.run({name: table}, **of("age"))
    assert sorted(runs.holders()) == [("north",), ("south",)]


@pytest.mark.e2e
def test_dates_in_another_form_and_another_format_of_the_file_are_the_same(runs, tmp_path):
    rng = np.random.default_rng(0)
    days = pandas.to_datetime("2022-01-01") + pandas.to_timedelta(rng.integers(0, 900, 160), unit="D")
    later = days + pandas.to_timedelta(rng.integers(1, 20, 160), unit="D")
    table = patients().assign(admitted=days, discharged=later)
    runs.run({"bergen": table.assign(admitted=days.strftime("%Y-%m-%d"), discharged=later.strftime("%Y-%m-%d"))})
    runs.run({"cork": table.assign(admitted=days.strftime("%d.%m.%Y"), discharged=later.strftime("%d.%m.%Y"))})
    table.to_parquet(tmp_path / "turin.parquet")
    given = {"label": "ill", "features": ["age", "crp", "sbp"], "columns": COLUMNS, "num_classes": 2}
    runs.run(Population.from_dataframe({"turin": tmp_path / "turin.parquet"}, **given))
    assert runs.holders() == [("bergen", "cork", "turin")]


@pytest.mark.parametrize("rows", [100, 500])
def test_copies_of_a_table_and_rows_filled_in_alike_hide_nobody(rows):
    """Rows that occur often show little of their holder; those that occur once show as much as before."""
    rng = np.random.default_rng(rows)
    names = np.array([f"{number:06}" for number in rng.integers(0, 10**6, 3 * rows)]).reshape(rows, 3)
    table = pandas.DataFrame(names, columns=["a", "b", "c"])
    most = table.sample(frac=0.9, random_state=0)
    alike = pandas.DataFrame([["0", "0", "0"]] * (rows // 5), columns=["a", "b", "c"])
    others = {
        "three copies": pandas.concat([most] * 3),
        "rows filled in alike": pandas.concat([most, alike]),
        "all of them and rows filled in alike": pandas.concat([table, alike]),
    }
    found = {name: bool(matches([_evidence(table), _evidence(other)], 1)[0]) for name, other in others.items()}
    assert found == dict.fromkeys(others, True)
    strangers = pandas.concat([table.sample(frac=0, random_state=0), alike, alike])
    assert not matches([_evidence(pandas.concat([table, alike])), _evidence(strangers)], 1)[0]


def _evidence(table: pandas.DataFrame) -> Evidence:
    cells = [[cell_digest(column, value) for column, value in row.items()] for _, row in table.iterrows()]
    return Evidence.of(np.array(cells, dtype=np.uint64), None, 1.0, b"k" * 32)
