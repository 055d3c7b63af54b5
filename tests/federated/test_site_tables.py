"""A site whose table or section `data` differs from the others': its records match, or it is refused by a sentence."""

import dataclasses
import re

import numpy as np
import pandas
import pytest
import torch
from conftest import FIXED_KEY
from sites import over

from dpfl_lightning import Population
from dpfl_lightning.commands.evaluate import evaluate_run
from dpfl_lightning.config.load import load
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.errors import UserError
from dpfl_lightning.loop import build_loop
from dpfl_lightning.sites.exchange import Site
from dpfl_lightning.sites.node import accept
from dpfl_lightning.sites.node.records import settings_of, site_population
from dpfl_lightning.sites.node.service import Node
from dpfl_lightning.sites.server.deploy import export, planning_loop, terms_of, with_columns

pytestmark = pytest.mark.e2e

ROWS = 60
TABLE = pandas.DataFrame(
    {
        "age": np.linspace(30, 80, ROWS).round(1),
        "creatinine": np.linspace(0.5, 2, ROWS).round(2),
        "crp": [None, 12.5] * (ROWS // 2),
        "day": pandas.date_range("2022-01-01", periods=ROWS).strftime("%Y-%m-%d"),
        "sex": ["F", "M"] * (ROWS // 2),
        "died": ["no", "no", "no", "yes"] * (ROWS // 4),
    }
)
GIVEN = {
    "label": "died",
    "classes": ["no", "yes"],
    "columns": {
        "age": {"scale": [50, 20]},
        "creatinine": {"scale": [1, 0.5], "unit": "mg/dl"},
        "crp": {"scale": [10, 10], "fill": 10},
        "day": {"scale": [30, 30], "since": "2022-01-01"},
        "sex": {"categories": ["F", "M"]},
    },
    "held_out": 0,
}
FEATURES = ["age", "creatinine", "crp", "day", "sex"]
YES = (TABLE.died == "yes").astype(int)
SLASHES = pandas.to_datetime(TABLE.day).dt.strftime("%d/%m/%Y")

#: what differs at a site whose records are the same: its table, how that is written, its section data
MATCHED = {
    "order of columns": (TABLE[TABLE.columns[::-1]], {}, {}),
    "separator": (TABLE, {"sep": ";"}, {"read": {"sep": ";"}}),
    "decimal comma": (TABLE, {"sep": "\t", "decimal": ","}, {"read": {"sep": "\t", "decimal": ","}}),
    "encoding": (TABLE, {"encoding": "utf-16"}, {"read": {"encoding": "utf-16"}}),
    "mark of order of bytes": (TABLE, {"encoding": "utf-8-sig"}, {}),
    "mark of a gap": (TABLE, {"na_rep": "?"}, {"read": {"na_values": ["?"]}}),
    "spaces in the header": (TABLE.rename(columns={"age": " age "}), {}, {}),
    "form of dates": (TABLE.assign(day=SLASHES), {}, {"read": {"date_format": "%d/%m/%Y"}}),
    "labels as numbers": (TABLE.assign(died=YES), {}, {"replace": {"died": {0: "no", 1: "yes"}}}),
    "labels as true": (TABLE.assign(died=YES == 1), {}, {"replace": {"died": {False: "no", True: "yes"}}}),
    "words of categories": (TABLE.replace("F", "female"), {}, {"replace": {"sex": {"female": "F"}}}),
    "renamed column": (TABLE.rename(columns={"age": "Alter"}), {}, {"rename": {"Alter": "age"}}),
    "another column": (TABLE.assign(ward="B2"), {}, {"drop": ["ward"]}),
    "features by name": (TABLE.assign(ward="B2"), {}, {"features": FEATURES}),
}


def column(name, **changed):
    return {"columns": {**GIVEN["columns"], name: {**GIVEN["columns"].get(name, {}), **changed}}}


def without(name, *parts):
    """The section without parts of a column, or without its entry."""
    left = {part: value for part, value in GIVEN["columns"][name].items() if part not in parts} if parts else {}
    return {"columns": {**GIVEN["columns"], name: left} if left else without_entry(name)}


def without_entry(name):
    return {one: value for one, value in GIVEN["columns"].items() if one != name}


#: what differs at a site that is refused there, or by the server: table, section data, and words of the refusal
AT_THE_SITE = {
    "missing column": (TABLE.drop(columns="crp"), {}, r"`columns` must be columns of .*got \['crp'\]"),
    "renamed column": (TABLE.rename(columns={"age": "Alter"}), {}, r"`columns` .*Alter.*got \['age'\]"),
    "another number": (TABLE.assign(ward=8e6), {}, r"`df: ward` must have numbers of the scale of the other"),
    "another text": (
        TABLE.assign(ward="B2"),
        {},
        r"`df: ward` must hold numbers, got '.*'.*Name its public categories",
    ),
    "twice": (TABLE.assign(Age=1.0).rename(columns={"Age": "age"}), {}, "columns of different names.*got 'age'"),
    "another unit": (TABLE.assign(creatinine=TABLE.creatinine * 88), {}, r"`df: creatinine` .*\{creatinine: \{scale"),
    "months for years": (
        TABLE.assign(age=TABLE.age * 12),
        {},
        r"`df: age` must be within 20 deviations .*\{age: \{scale: \[50, 20\]\}\}, got '\d+ of 60 values that are not'",
    ),
    "a mark of a gap": (
        TABLE.assign(age=TABLE.age.mask(TABLE.index % 10 == 0, 999)),
        {},
        r"`df: age` .*got '6 of 60 .*read: \{na_values: \{age: \[999\]",
    ),
    "infinity": (TABLE.assign(age=TABLE.age.mask(TABLE.index == 3, np.inf)), {}, "`df: age` must be finite"),
    "decimal comma": (TABLE.assign(age=TABLE.age.map("{:.1f}".format).str.replace(".", ",")), {}, "decimal: ','"),
    "form of dates": (TABLE.assign(day=SLASHES), {}, r"`df: day` must hold dates written ISO8601.*date_format"),
    "labels as numbers": (TABLE.assign(died=YES), {}, r"hold the given classes only, \['no', 'yes'\], got 0"),
    "another class": (TABLE.replace("yes", "YES"), {}, r"hold the given classes only, \['no', 'yes'\], got 'YES'"),
    "another category": (TABLE.replace("F", "W"), {}, r"`df: sex` .*\['F', 'M'\], got 'W'.*replace: \{sex"),
    "gap": (TABLE.assign(age=TABLE.age.where(TABLE.age > 40)), {}, "`df: age` must have no missing value, got 12"),
    "no label": (TABLE.assign(died=TABLE.died.where(TABLE.age > 40)), {}, "`df: died` must have a label in every row"),
}
AT_THE_SERVER = {
    "order of classes": ({"classes": ["yes", "no"]}, r"classes \['yes', 'no'\] instead of \['no', 'yes'\]"),
    "more classes": ({"classes": ["no", "yes", "unknown"]}, r"classes .*unknown\] instead of \['no', 'yes'\]"),
    "label": (
        {
            "label": "sex",
            "classes": ["F", "M"],
            "columns": {**without_entry("sex"), "died": {"categories": ["no", "yes"]}},
        },
        "more columns died.*sex",
    ),
    "order of features": ({"features": FEATURES[::-1]}, "order sex, day, crp.* instead of age, creatinine"),
    "mean": (
        column("age", scale=[60, 20]),
        re.escape("encoding {age: {scale: [60.0, 20.0]}} instead of {age: {scale: [50.0, 20.0]}}"),
    ),
    "deviation": (
        column("age", scale=[50, 10]),
        re.escape("encoding {age: {scale: [50.0, 10.0]}} instead of {age: {scale: [50.0, 20.0]}}"),
    ),
    "unscaled": (without("age"), re.escape("encoding {age: null} instead of {age: {scale: [50.0, 20.0]}}")),
    "order of categories": (
        column("sex", categories=["M", "F"]),
        re.escape("{sex: {categories: [M, F]}} instead of {sex: {categories: [F, M]}}"),
    ),
    "more categories": (
        column("sex", categories=["F", "M", "D"]),
        re.escape("{sex: {categories: [F, M, D]}} instead of {sex: {categories: [F, M]}}"),
    ),
    "fill": (column("crp", fill=12), re.escape("encoding {crp: {fill: '12'}} instead of {crp: {fill: '10'}}")),
    "more filled": (column("age", fill=50), re.escape("encoding {age: {fill: '50'}} instead of {age: {fill: null}}")),
    "first day": (
        column("day", since="2021-01-01"),
        re.escape("encoding {day: {since: '2021-01-01'}} instead of {day: {since: '2022-01-01'}}"),
    ),
    "unit": (
        column("creatinine", unit="umol/l"),
        re.escape("encoding {creatinine: {unit: umol/l}} instead of {creatinine: {unit: mg/dl}}"),
    ),
    "no unit": (
        without("creatinine", "unit"),
        re.escape("encoding {creatinine: {unit: null}} instead of {creatinine: {unit: mg/dl}}"),
    ),
    "fewer features": ({"features": FEATURES[:4], "columns": without_entry("sex")}, "bergen: no columns sex"),
}


def site_with(folder, name, table, written, given, **protects):
    """Set up the node of a site as `dpfl node init` does; return its folder and its facts."""
    folder.mkdir(exist_ok=True)
    table.to_csv(folder / f"{name}.csv", index=False, **written)
    arguments = {"df": str(folder / f"{name}.csv"), **GIVEN, **given}
    data = {"class_path": "dpfl_lightning.Population.from_dataframe", "init_args": arguments}
    settings = settings_of(from_mapping({"data": data, "privacy": {"epsilon": 4, "delta": 1e-3, **protects}}), name)
    return accept.new_node(folder / name, settings)


@pytest.fixture(scope="module")
def aarhus(tmp_path_factory):
    return site_with(tmp_path_factory.mktemp("aarhus"), "aarhus", TABLE, {}, {})


def server(folder, **given):
    """The options of a server."""
    data = {"class_path": "dpfl_lightning.Population.from_dataframe", "init_args": {**GIVEN, **given}}
    privacy = {"epsilon": 2, "delta": 1e-3, "accountant": "rdp"}
    more = {"model": {"name": "logistic"}, "clients": {"count": 2, "batch_size": 20}, "rounds": 1, "tracking": None}
    return from_mapping({"data": data, "privacy": privacy, "output_dir": str(folder / "run"), **more})


def planned(folder, sites: list[Site], **given):
    """Plan a run over the sites, and write it for them."""
    return export(planning_loop(server(folder, **given), sites), sites, str(folder / "plan.json"))


@pytest.mark.parametrize("case", MATCHED)
def test_what_is_written_otherwise_makes_the_same_records(case, aarhus, tmp_path):
    (_, first), (state, site) = aarhus, site_with(tmp_path, "bergen", *MATCHED[case])
    assert (site.schema, site.features) == (first.schema, first.features)
    ours, theirs = (site_population(one.settings())[0] for one in (state, aarhus[0]))
    assert (ours.x == theirs.x).all() and (ours.y == theirs.y).all()
    terms = planned(tmp_path, [first, site])
    accept.accept(state, terms)
    assert state.reserved()[0] == pytest.approx(2, abs=1e-3)


def test_each_site_decides_whether_records_are_held_out(aarhus, tmp_path):
    (none, first), (state, site) = aarhus, site_with(tmp_path, "bergen", TABLE, {}, {"held_out": 0.2})
    terms = planned(tmp_path, [first, site])
    accept.accept(state, terms)
    assert none.site().num_records == ROWS > site.num_records


@pytest.mark.parametrize("case", AT_THE_SITE)
def test_a_table_that_does_not_fit_is_refused_at_the_site(case, tmp_path):
    table, given, words = AT_THE_SITE[case]
    with pytest.raises(UserError, match=words):
        site_with(tmp_path, "bergen", table, {}, given)
    assert not (tmp_path / "bergen").exists(), "there is no node whose budget could be spent"


@pytest.mark.parametrize("case", AT_THE_SERVER)
def test_other_public_facts_are_refused_before_there_is_a_plan(case, aarhus, tmp_path):
    given, words = AT_THE_SERVER[case]
    (one, first), (state, site) = aarhus, site_with(tmp_path, "bergen", TABLE, {}, given)
    with pytest.raises(UserError, match=f"`--sites` must be of sites with records like those of aarhus.*{words}"):
        planned(tmp_path, [first, site])
    assert not (tmp_path / "plan.json").exists()
    assert one.reserved() == state.reserved() == (0, 0)


def test_facts_that_changed_after_the_plan_are_refused_by_the_node(aarhus, tmp_path):
    state, site = site_with(tmp_path, "bergen", TABLE, {}, {})
    terms = planned(tmp_path, [aarhus[1], site])
    other, _ = site_with(tmp_path / "later", "bergen", TABLE, {}, {"classes": ["yes", "no"]})
    with pytest.raises(
        UserError, match=r"have the public facts of this site, got .classes \[.no., .yes.\] instead of \[.yes"
    ):
        accept.accept(other, terms)
    assert other.reserved() == (0, 0) and state.reserved() == (0, 0)


def test_a_run_over_tables_of_persons_has_the_bits_of_the_simulation(tmp_path):
    """Also of a site whose table calls the person something else, and of a person who is at both."""
    tables = {
        name: TABLE.assign(patient=np.arange(ROWS) // 3 + shift) for name, shift in (("aarhus", 0), ("bergen", 5))
    }
    given, protects = {"person": "patient"}, {"unit": "person", "rows_per_person": 2}
    other = tables["bergen"].rename(columns={"patient": "CPR"})
    made = [
        site_with(tmp_path, "aarhus", tables["aarhus"], {}, given, **protects, noise_key=FIXED_KEY),
        site_with(
            tmp_path, "bergen", other, {}, given | {"rename": {"CPR": "patient"}}, **protects, noise_key=FIXED_KEY
        ),
    ]
    assert [site.num_records for _, site in made] == [ROWS // 3, ROWS // 3]
    options = server(tmp_path, **given)
    several_steps = dataclasses.replace(options.clients, batch_size=8)  # of one, both may be in one pass
    privacy = dataclasses.replace(options.privacy, **protects)
    options = dataclasses.replace(options, privacy=privacy, clients=several_steps)
    options = with_columns(options, [site for _, site in made])
    terms = terms_of(planning_loop(options, [site for _, site in made]), [site for _, site in made])
    for state, _ in made:
        accept.accept(state, terms)
    nodes = [Node(state, accept.open_study) for state, _ in made]
    loop = over(nodes, terms, options)
    loop.run()
    privacy = dataclasses.replace(options.privacy, noise_key=FIXED_KEY)
    people = Population.from_dataframe(tables, **GIVEN, **given)
    simulated = build_loop(dataclasses.replace(options, privacy=privacy, output_dir=str(tmp_path / "same")), (), people)
    simulated.run()
    assert torch.equal(loop.state.models, simulated.state.models)
    for node in nodes:
        node.close()


def test_a_run_over_tables_is_scored_again_with_the_columns_of_the_sites(tmp_path):
    order, table = {"features": ["sex", "day", "crp", "creatinine", "age"]}, TABLE.assign(patient=range(ROWS))
    made = [site_with(tmp_path, name, table, {}, order | {"person": "patient"}) for name in ("aarhus", "bergen")]
    table.assign(ward="B2").to_csv(tmp_path / "test.csv", index=False)
    given = {"test": str(tmp_path / "test.csv"), "person": "patient"}
    with pytest.raises(UserError, match=r"`test set` must .*got 'person ward instead of patient'"):
        planned(tmp_path, [site for _, site in made], **given | {"person": "ward"})
    terms = planned(tmp_path, [site for _, site in made], **given)
    for state, _ in made:
        accept.accept(state, terms)
    nodes = [Node(state, accept.open_study) for state, _ in made]
    result = over(nodes, terms, server(tmp_path, **given)).run()
    options, _ = load(["--config", str(tmp_path / "run" / "options.yaml")])
    again = evaluate_run(options, tmp_path / "run")
    assert again["test_loss"] == pytest.approx(result.test_loss)
    assert [one["name"] for one in again["clients"]] == ["aarhus", "bergen"]
    for node in nodes:
        node.close()


def population_with(folder, aarhus, table, **given):
    """The population of a server whose test table is this one, with the site of Aarhus."""
    table.to_csv(folder / "test.csv", index=False, sep=";")
    test = {"file": str(folder / "test.csv"), "read": {"sep": ";"}}
    arguments = {**GIVEN, "held_out": 0.2, **given, "test": test}
    data = {"class_path": "dpfl_lightning.Population.from_dataframe", "init_args": arguments}
    model = {"model": {"name": "logistic"}, "clients": {"count": 1}}
    options = from_mapping({"data": data, "privacy": {"epsilon": 2}, **model})
    return planning_loop(options, [aarhus[1]]).population


@pytest.mark.parametrize("given", [{}, {"features": FEATURES[::-1]}], ids=["by name", "features in another order"])
def test_the_servers_test_table_has_the_columns_of_the_sites(given, aarhus, tmp_path):
    people = population_with(tmp_path, aarhus, TABLE[TABLE.columns[::-1]].assign(ward="B2"), **given)
    site = site_population(aarhus[0].settings())[0]
    x, y = people.test_records()
    assert (x == site.x).all() and (y == site.y).all() and people.feature_names == site.feature_names


@pytest.mark.parametrize(
    ("table", "given", "words"),
    [
        (TABLE.drop(columns="crp"), {}, r"`features` must name columns of the table .*got 'crp'"),
        (
            TABLE,
            {"features": FEATURES[:4], "columns": without_entry("sex")},
            "`test set` .*like those of the sites, got 'no columns sex",
        ),
        (TABLE, {"classes": ["yes", "no"]}, r"`test set` must .*classes \[.yes., .no.\] instead of \[.no., .yes.\]"),
        (TABLE, column("age", scale=[60, 20]), r"`test set` .*\[60.0, 20.0\]\}\} instead of \{age: \{scale: \[50.0"),
        (TABLE, column("creatinine", unit="umol/l"), r"`test set` .*unit: umol/l\}\} instead of"),
        (TABLE.replace("F", "W"), {}, r"`test: sex` must hold the given categories only, .*got 'W'"),
        (TABLE.assign(age=TABLE.age.where(TABLE.age > 40)), {}, "`test: age` must have no missing value"),
        (TABLE.assign(age=TABLE.age * 12), {}, "`test: age` must be within 20 deviations"),
    ],
    ids=["missing column", "fewer features", "order of classes", "scale", "unit", "another category", "gap", "months"],
)
def test_a_test_table_that_does_not_fit_is_refused_by_name(table, given, words, aarhus, tmp_path):
    with pytest.raises(UserError, match=words):
        population_with(tmp_path, aarhus, table, **given)
