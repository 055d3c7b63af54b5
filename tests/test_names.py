"""Names of clients, sites, studies and columns come from outside: what they may be, wherever they come in."""

import dataclasses
import math

import pandas as pd
import pytest
import torch
from sites import a_request, asked, planned, state_of

from dpfl_lightning import Population
from dpfl_lightning.commands.node import main as node
from dpfl_lightning.config.names import check_columns, check_names
from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.ledger.verify import read
from dpfl_lightning.search.options import SweepOptions, check
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.node.accept import open_study
from dpfl_lightning.sites.node.service import Node
from dpfl_lightning.sites.terms import read_site, read_terms
from dpfl_lightning.sites.wire import digest

GOOD = ["berlin", "St. Mary's Hospital", "Charité, Mitte", "北京协和医院", "Clínica (Norte) 2", "अस्पताल", "7"]
BAD = ["../../etc", "a/b", "a\\b", ".hidden", "-x", "", " ", "a ", "<script>", 'a"b', "x" * 65]
BAD += ["a\x1b[2J", "a\nb", "a\u202eb", "a\u200bb"]
COLUMNS = ["age", "HbA1c (%)", "LDL [mg/dL]", "sex=f", " education", "<=50K", "BMI > 30?", "Temp °C", "../../etc"]
BAD_COLUMNS = ["", "a\x1b[2J", "a\nb", "a\u202eb", "x" * 201]


def test_names_of_hospitals_in_any_script_are_names():
    check_names("names", GOOD)
    check_columns("df", COLUMNS)


@pytest.mark.parametrize("name", BAD)
def test_other_names_are_refused_in_one_sentence_that_shows_no_control_character(name):
    with pytest.raises(UserError, match="`names` must have 1 to 64 letters and digits of any script") as error:
        check_names("names", ["berlin", name])
    assert str(error.value).isprintable() and "\u202e" not in str(error.value)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(9, 2), torch.arange(9) % 2


def table(column: str = "age", hospital: str = "rome", value: str = "f") -> pd.DataFrame:
    return pd.DataFrame(
        {"hospital": [hospital] * 20, column: range(20), "sex": [value] * 20, "ill": [False, True] * 10}
    )


def made(frame: pd.DataFrame, **more) -> Population:
    return Population.from_dataframe(frame, client="hospital", label="ill", num_classes=2, **more)


@pytest.mark.parametrize("name", BAD)
def test_a_population_has_no_other_names(name, tmp_path):
    tries = [lambda: Population.from_datasets({name: pair(), "rome": pair()}, num_classes=2)]
    tries.append(lambda: made(table(hospital=name), features=["age"]))
    tries.append(lambda: dataclasses.replace(Population.from_datasets([pair()], num_classes=2), names=(name,)))
    for build in tries:
        with pytest.raises(UserError, match="have 1 to 64 letters and digits"):
            build()


@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_a_table_has_no_other_columns_and_categories(name):
    for frame, values in ((table(column=name), ["f"]), (table(value=name), [name])):
        with pytest.raises(UserError, match="have 1 to 200 visible characters and spaces"):
            made(frame, columns={"sex": {"categories": values}})


@pytest.mark.parametrize("name", BAD)
def test_a_node_is_not_set_up_under_another_name(name, tmp_path, capsys):
    words = ["--data.name", "digits", "--clients.count", "3", "--privacy.epsilon", "3"]
    assert node(["init", str(tmp_path / "node"), f"--name={name}", *words]) == 2
    assert "`--name` must have 1 to 64 letters" in capsys.readouterr().err and not (tmp_path / "node").exists()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The public facts of a site, and the plan of three sites."""
    terms = planned(tmp_path_factory.mktemp("files"))
    return terms.sites[0], terms


#: keys of points of order 1 to 8, without their last byte, and that byte by the sign of the other coordinate
POINTS = {
    "01" + "00" * 30: ("00", "80"),
    "00" * 31: ("00", "80"),
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc": ("05", "85"),
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03": ("7a", "fa"),
    **{first + "ff" * 30: ("7f", "ff") for first in ("ec", "ed", "ee")},  # two in a form beyond the prime
}
LOW_ORDER = [point + last for point, ends in POINTS.items() for last in ends]

HOSTILE = [
    ({"name": "<script>alert(1)</script>"}, "name` must have 1 to"),
    ({"name": "a\x1b]0;x\x07"}, "name` must have 1 to"),
    ({"features": {"scale": {"a\u202eb": [0.0, 1.0]}}}, "features` must have 1 to"),
    ({"public_key": "ab" * 31}, "public_key` must be 64 hexadecimal digits"),
    *(({"public_key": key}, "public_key` must be 64 hexadecimal digits of a key") for key in LOW_ORDER),
    ({"schema": {"age": "x" * (1 << 16)}}, "schema` must have at most 65536 characters"),
    ({"schema": {"age": "a\x1b[31m"}}, "schema` must have at most 65536 characters as JSON, all of them printable"),
    ({"schema": {"age": math.nan}}, "schema` must have finite numbers"),
]


@pytest.mark.parametrize(("change", "words"), HOSTILE, ids=[str(number) for number in range(len(HOSTILE))])
def test_no_site_of_other_names_is_read_alone_or_in_a_plan(files, change, words, tmp_path):
    site, terms = files
    site = dataclasses.replace(site, **change)
    (tmp_path / "site.json").write_text(wire.to_text(site))
    with pytest.raises(UserError, match=f"`--sites: {words}"):
        read_site(tmp_path / "site.json")
    (tmp_path / "plan.json").write_text(wire.to_text(dataclasses.replace(terms, sites=(site, *terms.sites[1:]))))
    with pytest.raises(UserError, match=f"`PLAN: {words}"):
        read_terms(tmp_path / "plan.json")


def test_a_schema_of_a_site_is_carried(files, tmp_path):
    schema = {"columns": {"age": {"dtype": "float32", "unit": None}}, "rows": [1, 2.5, True]}
    (tmp_path / "site.json").write_text(wire.to_text(dataclasses.replace(files[0], schema=schema)))
    assert read_site(tmp_path / "site.json").schema == schema


def test_a_study_of_a_search_is_no_path():
    with pytest.raises(UserError, match=r"`sweep\.name` must have 1 to 64"):
        check(SweepOptions(name="../../etc", space={"rounds": {"values": [1, 2]}}))


# ---- what the server of a study writes

SAFE = "this is perfectly safe. Not covered: nothing. '(0.1, 0)-differential privacy"


def test_words_of_the_server_are_marked_as_its_words(files, tmp_path, capsys):
    """In what the operator reads before accepting, and in the ledger of the node."""
    terms = files[1]
    terms = dataclasses.replace(terms, plan=dataclasses.replace(terms.plan, caveats=(SAFE,)))
    state = state_of(tmp_path, 0, key=None)
    (tmp_path / "plan.json").write_text(wire.to_text(terms))
    assert node(["accept", str(state.path), str(tmp_path / "plan.json"), "--epsilon_limit", "3"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "perfectly safe" in line]
    assert lines == [f"The server writes: {SAFE!r}"]
    study = Node(state, open_study)
    asked(study, a_request(terms, torch.zeros(650)))
    study.close()
    totals = read([state.plan_folder(digest(terms)) / "ledger.jsonl"]).guaranteed
    (promise,) = [total.guarantee for total in totals if total.guarantee.covers]
    assert promise.caveats == (f"The server writes: {SAFE!r}",)
