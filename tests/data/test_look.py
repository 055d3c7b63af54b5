"""`dpfl init --from FILE`: how files are written, and configurations that keep at the site what its rows hold."""

import re

import numpy as np
import pandas
import pytest
import yaml

from dpfl_lightning import Population
from dpfl_lightning.__main__ import main
from dpfl_lightning.config.load import load
from dpfl_lightning.data.frames import Table
from dpfl_lightning.data.look import Column, likely_label, likely_person, look
from dpfl_lightning.errors import UserError

ROWS = 60
TABLE = pandas.DataFrame(
    {
        "patient": [f"P{row:03d}" for row in range(ROWS)],
        "day": pandas.date_range("2022-01-01", periods=ROWS).strftime("%d/%m/%Y"),
        "age": np.linspace(30, 80, ROWS).round(1),
        "größe": np.linspace(1.5, 1.9, ROWS).round(2),
        "sex": ["F", "M"] * (ROWS // 2),
        "crp": [None, 12.5] * (ROWS // 2),
        "died": ["no", "no", "never", "yes"] * (ROWS // 4),
    }
)


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ({}, {}),
        ({"sep": ";", "decimal": ",", "na_rep": "?"}, {"sep": ";", "decimal": ",", "na_values": ["?"]}),
        ({"sep": "\t", "encoding": "utf-16"}, {"sep": "\t", "encoding": "utf-16"}),
        ({"sep": ";", "encoding": "latin-1"}, {"sep": ";", "encoding": "cp1252"}),
        ({"sep": "|", "na_rep": "missing", "encoding": "utf-8-sig"}, {"sep": "|", "na_values": ["missing"]}),
    ],
)
def test_how_a_file_is_written_is_found(written, found, tmp_path):
    TABLE.to_csv(tmp_path / "site.csv", index=False, **written)
    read, columns = look(tmp_path / "site.csv")
    assert read == {**found, "date_format": "%d/%m/%Y"}
    kinds = {one.name: one.kind for one in columns}
    assert list(kinds) == list(TABLE.columns) and likely_label(columns) == "died"
    assert list(kinds.values()) == ["other", "date", "number", "number", "category", "number", "category"]
    assert columns[5].facts == "12.5 to 12.5, mean 12.5, deviation 0, 30 missing"


def test_the_columns_may_leave_the_site_and_what_rows_hold_may_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    TABLE.to_csv("cork.csv", index=False, sep=";", decimal=",", na_rep="?")
    assert main(["init", "mine", "--from", "cork.csv"]) == 0
    said = capsys.readouterr().out
    assert "edit data.yaml" in said and "site.yaml stays here" in said
    shared, own = ((tmp_path / "mine" / f"{name}.yaml").read_text() for name in ("data", "site"))
    given = yaml.safe_load(shared)["data"]["init_args"]
    assert given["label"] == "died" and given["person"] == "patient" and given["drop"] == []
    assert given["classes"] is None and "by its name: confirm it" in shared
    numbers = {name: {"scale": None} for name in ("age", "größe", "crp")}
    days, texts = {"day": {"since": None, "scale": None}}, {"sex": {"categories": None}}
    assert given["columns"] == {**numbers, **days, **texts}
    assert "patient: 60 persons with at most 1 rows each" in own
    assert not re.search(r"never|\bF\b|12\.5|\b30\b", shared), "no value of a row, and no count"
    assert "#   sex: F 30, M 30" in own and "never" in own
    assert (tmp_path / "mine" / "site.yaml").stat().st_mode & 0o077 == 0
    assert yaml.safe_load(own)["data"]["init_args"] == {
        "df": "../cork.csv",
        "read": {"sep": ";", "decimal": ",", "na_values": ["?"], "date_format": "%d/%m/%Y"},
    }
    assert main(["init", "mine", "--from", "cork.csv"]) == 2
    assert "data.yaml, site.yaml, run.yaml already" in capsys.readouterr().err


#: what is filled in, one after the other -> the refusal before
FILLED = {
    "fill": ({"crp": {"fill": 12}}, r"`df: crp` must have no missing value, got 30. Fill them with a public value"),
    "dates": ({"day": {"since": "2022-01-01"}}, "`df: day` must hold numbers, got 'dates'"),
    "categories": ({"sex": {"categories": ["F", "M"]}}, "`df: sex` must hold numbers"),
    "classes": (["no", "never", "yes"], r"Name the classes, a public fact"),
}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["patient_age", "Patient ID", "visit_id"], "Patient ID"),
        (["subject_id", "hadm_id"], "subject_id"),
        (["MRN"], "MRN"),
        (["Patientennummer", "personal"], "Patientennummer"),
        (["person_id", "patient_nr"], None),
        (["case_id", "id"], None),
    ],
)
def test_a_column_of_persons_is_proposed_by_its_name_alone(names, found):
    assert likely_person([Column(name, "number", "") for name in names]) == found


def test_everything_that_is_not_filled_in_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TABLE.to_csv("cork.csv", index=False, sep=";", decimal=",", na_rep="?")
    main(["init", "--from", "cork.csv"])
    options, _ = load([word for name in ("data", "site", "run") for word in ("--config", f"{name}.yaml")])
    named = [f"columns: {name}: scale" for name in ("age", "größe", "crp")]
    named += ["columns: day: since, scale", "columns: sex: categories", "classes, if labels are texts"]
    with pytest.raises(UserError, match=r"`data.init_args` must have no null") as refused:
        Population.from_dataframe(**{**options.data.init_args})
    assert set(named) == {*re.search(r": (columns: .*)\.$", str(refused.value))[1].split("; ")}


@pytest.mark.e2e
def test_what_is_wrong_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TABLE.to_csv("cork.csv", index=False, sep=";", decimal=",", na_rep="?")
    main(["init", "--from", "cork.csv"])
    options, _ = load([word for name in ("data", "site", "run") for word in ("--config", f"{name}.yaml")])
    given = dict(options.data.init_args) | {"columns": {}}
    for name, (value, words) in FILLED.items():
        with pytest.raises(UserError, match=words):
            Population.from_dataframe(**given)
        given |= {"classes": value} if name == "classes" else {"columns": {**given["columns"], **value}}
    people = Population.from_dataframe(**given)
    assert people.num_records == (ROWS,) and people.num_classes == 3


def test_several_files_are_clients_of_a_simulation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TABLE.to_csv("cork.csv", index=False, sep=";")
    TABLE.to_csv("oslo.csv", index=False)
    assert main(["init", "--from", "cork.csv", "oslo.csv"]) == 0
    read = {"date_format": "%d/%m/%Y"}
    tables = yaml.safe_load((tmp_path / "site.yaml").read_text())["data"]["init_args"]["df"]
    assert tables == {
        "cork": {"file": "cork.csv", "read": {"sep": ";", **read}},
        "oslo": {"file": "oslo.csv", "read": read},
    }


def test_what_differs_between_files_is_told_to_their_owner_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    TABLE.to_csv("raw/cork.csv", index=False, sep=";")
    other = TABLE.assign(sex=TABLE.sex.map({"F": "female", "M": "male"}), died=(TABLE.died == "yes").astype(int))
    other.rename(columns={"age": "Alter"}).to_csv("raw/oslo.csv", index=False)
    assert main(["init", "mine", "--from", "raw"]) == 0
    said = capsys.readouterr().out
    assert [line.strip() for line in said.partition("These files differ")[2].splitlines()[1:]] == [
        "age: not in oslo.csv",
        "sex: F, M in cork.csv; female, male in oslo.csv",
        "died: never, no, yes in cork.csv; 0, 1 in oslo.csv",
        "Alter: not in cork.csv",
        "read: sep: ; in cork.csv; default in oslo.csv",
    ]
    assert "female" not in (tmp_path / "mine" / "data.yaml").read_text()


def test_a_value_of_two_lines_stays_in_its_comment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TABLE.assign(sex=["M", "F\nseed: 7"] * (ROWS // 2)).to_csv("cork.csv", index=False)
    assert "skipfooter" not in look(tmp_path / "cork.csv")[0]
    main(["init", "--from", "cork.csv"])
    assert set(yaml.safe_load((tmp_path / "site.yaml").read_text())) == {"data", "privacy"}


def test_a_file_that_is_none_is_refused(tmp_path, capsys):
    assert main(["init", str(tmp_path), "--from", "none.csv"]) == 2
    assert "`--from` must be a CSV or Parquet file, got 'none.csv'" in capsys.readouterr().err


def test_a_first_line_with_values_never_becomes_names(tmp_path):
    (tmp_path / "one.csv").write_text("Meier;1961-03-04;1\nMuster;1970-01-02;0\n")
    with pytest.raises(UserError, match="must have the names of its columns") as error:
        look(tmp_path / "one.csv")
    assert "Meier" not in str(error.value)


def test_two_forms_of_dates_are_named_by_column(tmp_path):
    rows = "".join(f"{day:02}.03.2024,2024-04-{day:02},{day % 2}\n" for day in range(1, 29))
    (tmp_path / "one.csv").write_text("born,seen,ill\n" + rows)
    assert look(tmp_path / "one.csv")[0] == {"date_format": {"born": "%d.%m.%Y"}}


@pytest.mark.parametrize(
    ("cells", "written", "found"),
    [
        (["1,250.5", "2,000.0", "12.0"], {}, {"thousands": ","}),
        (["1,250", "2,000,000", "12"], {}, {"thousands": ","}),
        (["1.250,5", "2.000,0", "12,0"], {"sep": ";"}, {"sep": ";", "decimal": ",", "thousands": "."}),
        (["1.250", "2.000", "0,5"], {"sep": ";"}, {"sep": ";", "decimal": ",", "thousands": "."}),
        (["12,345", "2,000", "51,384"], {}, {"thousands": ","}),
        (["1,250", "2,000", "0,125"], {"sep": ";"}, {"sep": ";", "decimal": ","}),
        (["1250.5", "2000.0", "12.0"], {}, {}),
    ],
)
def test_separators_of_thousands_are_found(cells, written, found, tmp_path):
    path = tmp_path / "one.csv"
    pandas.DataFrame({"leucocytes": cells * 10, "ill": [0, 1] * 15}).to_csv(path, index=False, **written)
    read, (column, _) = look(path)
    assert read == found and column.kind == "number"


def test_points_of_dates_are_no_separators(tmp_path):
    rows = "".join(f"{1 + row % 28:02d}.04.2018;{row + 50}.915,50;{row % 2}\n" for row in range(30))
    (tmp_path / "one.csv").write_text(f"Aufnahme;Kosten;ill\n{rows}")
    read, (day, cost, _) = look(tmp_path / "one.csv")
    assert day.kind == "date" and cost.facts.startswith("50915.5 to 79915.5") and read["date_format"] == "%d.%m.%Y"
    people = Population.from_dataframe(
        str(tmp_path / "one.csv"),
        label="ill",
        read=read,
        num_classes=2,
        columns={"Aufnahme": {"since": "2018-04-01", "scale": [14, 8]}, "Kosten": {"scale": [60_000, 9_000]}},
    )
    assert float(people.x.abs().max()) < 3


@pytest.mark.parametrize(
    "footer",
    [
        "Total,,1500\n",
        ",Total,1\n",
        "32,Grand total:,0\n",
        "# exported on Monday\n",
        "Sum,9,9\n\nSource: our laboratory\n",
    ],
)
def test_a_footer_is_no_record(footer, tmp_path):
    rows = "".join(f"P{row},{30 + row % 20},{row % 2}\n" for row in range(30))
    (tmp_path / "one.csv").write_text(f"patient,age,ill\n{rows}{footer}")
    read, columns = look(tmp_path / "one.csv")
    assert read == {"skipfooter": footer.count("\n")}
    assert columns[1].facts.startswith("30 to 49") and likely_label(columns) == "ill"
    people = Population.from_dataframe(
        str(tmp_path / "one.csv"),
        label="ill",
        drop=["patient"],
        columns={"age": {"scale": [50, 20]}},
        read=read,
        num_classes=2,
    )
    assert people.num_records[0] + people.num_held_out[0] == 30


def facts_of(folder, *columns, sep=";"):
    """What `look` finds in a file with these columns: how it is written, and of each column its kind and facts."""
    names, rows = ("crp", "cost", "hb")[: len(columns)], zip(*columns, strict=True)
    lines = [sep.join((*names, "ill")), *(sep.join((*row, str(n % 2))) for n, row in enumerate(rows))]
    (folder / "one.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    read, found = look(folder / "one.csv")
    return read, {one.name: (one.kind, one.facts) for one in found}


POINTS = [f"{row}.{row % 10}" for row in range(ROWS)]
GROUPS = [f"{row + 1}.234,50" for row in range(ROWS)]
ONE_GROUP = [f"{row % 9 + 1}.{row + 100}" for row in range(ROWS)]


def test_columns_with_two_decimal_marks_are_no_identifiers_and_their_points_stay(tmp_path):
    read, found = facts_of(tmp_path, POINTS, GROUPS)
    assert read == {"sep": ";", "decimal": ",", "thousands": "."}
    kind, facts = found["crp"]
    assert kind == "number" and facts.startswith("numbers with decimal points. A file has one decimal mark")
    assert found["cost"][1].startswith("1234.5 to 60234.5")


def test_a_point_that_may_be_of_a_decimal_or_of_thousands_is_to_be_checked(tmp_path):
    decimals = [f"{row},5" for row in range(ROWS)]
    read, found = facts_of(tmp_path, ONE_GROUP, decimals)
    assert read["thousands"] == "." and "'.' is taken for a separator of thousands: check it" in found["crp"][1]
    read, found = facts_of(tmp_path, ONE_GROUP, decimals, GROUPS)
    assert "check it" in found["crp"][1] and "check it" not in found["hb"][1] + found["cost"][1]
    read, found = facts_of(tmp_path, ONE_GROUP, POINTS)
    assert read == {"sep": ";"} and "'.' is taken for a decimal point: check it" in found["crp"][1]
    assert "check it" not in found["cost"][1]
    quoted = [f'"{one.replace(".", ",")}"' for one in ONE_GROUP]
    read, found = facts_of(tmp_path, quoted, sep=",")
    assert read == {"thousands": ","} and "',' is taken for a separator of thousands: check it" in found["crp"][1]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (["<5", "< 5", ">300"], "'< 0', '<0', '>0'"),
        (["n.b.", "nicht erhoben"], "'n.b.', 'nicht erhoben'"),
        ([f"{row}.5 mg/l" for row in range(ROWS)], "'0 mg/l'"),
        ([f"\N{MINUS SIGN}{row}.5" for row in range(ROWS)], "'\N{MINUS SIGN}0'"),
        ([f"\N{NO-BREAK SPACE}{row}" for row in range(ROWS)], None),
        ([f"{row} 234.5" for row in range(1, ROWS)] + ["<5"], "'0 0', '<0'"),
        ([f"{row}%" for row in range(ROWS)], "'0%'"),
    ],
)
def test_numbers_beside_other_signs_are_no_identifiers(written, shown, tmp_path):
    _, found = facts_of(tmp_path, [*written, *POINTS[len(written) :]], sep="\t")
    kind, facts = found["crp"]
    assert kind == "number" and (shown is None or facts.startswith(f"numbers beside {shown}. ")), facts


def test_a_note_beside_numbers_is_not_shown(tmp_path):
    _, found = facts_of(tmp_path, [*POINTS[:-1], "5 Mrs Miller has HIV"])
    assert "Miller" not in str(found)


@pytest.mark.parametrize("form", ["P{0:03d}", "{0}{1}", "2022/{0}", "{0}-{0}", "1{0}:30", "{1}{0} x {0}"])
def test_identifiers_with_digits_are_no_numbers(form, tmp_path):
    letters = "ABCDEFGHIJKLM"
    _, found = facts_of(tmp_path, [form.format(row, letters[row % 13]) for row in range(ROWS)])
    assert found["crp"][0] == "other"


def test_what_stands_beside_numbers_is_replaced(tmp_path):
    (tmp_path / "one.csv").write_text(
        "crp,ill\n<5,0\nn.b.,1\n" + "".join(f"{row + 5}.5,{row % 2}\n" for row in range(ROWS))
    )
    given = {
        "df": str(tmp_path / "one.csv"),
        "label": "ill",
        "num_classes": 2,
        "held_out": 0,
        "columns": {"crp": {"fill": 10}},
    }
    with pytest.raises(UserError, match=r"numbers beside '<0', 'n.b.'.. Name words .*na_values: \['n.b.'\]\}, other"):
        Population.from_dataframe(**given)
    people = Population.from_dataframe(**given, read={"na_values": ["n.b."]}, replace={"crp": {"<5": 2.5}})
    assert people.x[:3].tolist() == [[2.5, 0], [10, 1], [5.5, 0]]


@pytest.mark.parametrize("above", ["sep=;\n", "# exported in 2023\n", "# a\n\n# draft\n"])
def test_lines_above_the_names_are_skipped(above, tmp_path):
    text = "age;ill\n" + "50,5;0\n60,5;1\n" * 30
    (tmp_path / "one.csv").write_text(above + text)
    read, columns = look(tmp_path / "one.csv")
    assert read == {"sep": ";", "skiprows": above.count("\n"), "decimal": ","}
    assert [one.name for one in columns] == ["age", "ill"] and columns[0].facts.startswith("50.5 to 60.5")


@pytest.mark.parametrize("above", ["Export of ward 7\n", "#nr;ward;unit\n"])
def test_a_title_is_no_reason_to_take_a_row_for_names(above, tmp_path):
    (tmp_path / "one.csv").write_text(above + "Doe;3B;no\nRoe;4A;yes\n" * 30)
    if above.startswith("#"):
        assert [one.name for one in look(tmp_path / "one.csv")[1]] == ["#nr", "ward", "unit"]
    else:
        with pytest.raises(UserError, match="If a title or a comment is above the names, remove it"):
            look(tmp_path / "one.csv")


def test_lines_that_old_computers_end_are_read(tmp_path):
    (tmp_path / "one.csv").write_bytes(b"age,ill\r" + b"50.5,0\r60.5,1\r" * 30)
    read, columns = look(tmp_path / "one.csv")
    assert read == {} and columns[0].facts.startswith("50.5 to 60.5")


def test_dates_of_summer_and_winter_are_days(tmp_path):
    days = [f"2024-0{row % 9 + 1}-05T08:00:00+0{1 + (row % 9 > 2)}:00" for row in range(ROWS)]
    read, found = facts_of(tmp_path, days)
    assert read == {"sep": ";"} and found["crp"] == ("date", "dates written ISO8601")
    table = Table(str(tmp_path / "one.csv"), "df", read, texts=["crp"])
    assert table.days("crp", "2024-01-01")[[0, 6]].tolist() == [4 + 1 / 3, 186 + 1 / 3]


def test_a_guessed_encoding_and_columns_without_values_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "věk;zemřel;nic\n" + "50;ano;\n60;ne;\n" * 30
    (tmp_path / "one.csv").write_text(text, encoding="cp1250")
    assert main(["init", "--from", "one.csv"]) == 0
    assert "one.csv is not UTF-8 and was read as cp1252" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "data.yaml").read_text())["data"]["init_args"]["drop"] == ["nic"]
    assert "nic: no value in any row" in (tmp_path / "site.yaml").read_text()
