"""Tables as hospitals write them: separators, commas, dates, gaps, other words, other orders of columns."""

import re
import warnings

import numpy as np
import pandas
import pytest
import torch

from dpfl_lightning import Population
from dpfl_lightning.data.frames import Table, is_identifier
from dpfl_lightning.errors import UserError, UserNotice

ROWS = 40
TABLE = pandas.DataFrame(
    {
        "id": [f"P{row:03d}" for row in range(ROWS)],
        "day": pandas.date_range("2022-01-01", periods=ROWS).strftime("%Y-%m-%d"),
        "age": np.linspace(30, 80, ROWS).round(1),
        "sex": ["F", "M"] * (ROWS // 2),
        "crp": [None, 12.5] * (ROWS // 2),
        "died": ["no", "no", "no", "yes"] * (ROWS // 4),
    }
)
CHOICES = {
    "label": "died",
    "classes": ["no", "yes"],
    "drop": ["id"],
    "columns": {
        "age": {"scale": [50, 20]},
        "crp": {"scale": [10, 10], "fill": 10},
        "day": {"scale": [20, 20], "since": "2022-01-01"},
        "sex": {"categories": ["F", "M"]},
    },
    "held_out": 0,
}


@pytest.fixture
def files(tmp_path):
    """The same records as three sites write them."""
    TABLE.to_csv(tmp_path / "plain.csv", index=False)
    other = TABLE.assign(sex=TABLE.sex.map({"F": "female", "M": "male"}))[list(reversed(TABLE.columns))]
    other.to_csv(tmp_path / "commas.csv", index=False, sep=";", decimal=",", na_rep="?", encoding="utf-16")
    day = pandas.to_datetime(TABLE.day).dt.strftime("%d/%m/%Y")
    TABLE.assign(died=(TABLE.died == "yes").astype(int), day=day).to_parquet(tmp_path / "numbers.parquet")
    return {
        "plain": str(tmp_path / "plain.csv"),
        "commas": {
            "file": str(tmp_path / "commas.csv"),
            "read": {"sep": ";", "decimal": ",", "na_values": ["?"], "encoding": "utf-16"},
            "replace": {"sex": {"female": "F", "male": "M"}},
        },
        "numbers": {
            "file": str(tmp_path / "numbers.parquet"),
            "read": {"date_format": "%d/%m/%Y"},
            "replace": {"died": {"1": "yes", 0: "no"}},
        },
    }


def test_the_same_records_are_read_however_they_are_written(files):
    people = Population.from_dataframe(files, **CHOICES)
    assert people.names == ("plain", "commas", "numbers")
    assert people.feature_names == ("age (scaled)", "crp (scaled)", "crp missing", "day (scaled)", "sex=F", "sex=M")
    x, y = people.records(0, people.train_of[0].new_tensor(range(ROWS)))
    for client in (1, 2):
        for ours, theirs in zip((x, y), people.records(client, people.train_of[0][:ROWS]), strict=True):
            assert (ours == theirs).all()
    assert x[:2, 1:4].tolist() == [[0, 1, -1], [0.25, 0, pytest.approx(-0.95)]] and y.sum() == ROWS // 4
    assert people.schema == {
        "classes": ["no", "yes"],
        "columns": ["age", "crp", "day", "sex"],
        "label": ["died"],
        "person": None,
    }
    assert people.features["encoding"]["crp"] == {"scale": [10, 10], "fill": "10"}
    assert people.features["encoding"]["day"] == {"scale": [20, 20], "since": "2022-01-01"}


def test_a_folder_has_a_table_for_each_client(files, tmp_path):
    for name in ("berlin", "oslo"):
        (tmp_path / "sites").mkdir(exist_ok=True)
        TABLE.to_csv(tmp_path / "sites" / f"{name}.csv", index=False)
    assert Population.from_dataframe(tmp_path / "sites", **CHOICES).names == ("berlin", "oslo")


def column(name, **changed):
    """The section with another entry of a column."""
    return {"columns": {**CHOICES["columns"], name: {**CHOICES["columns"].get(name, {}), **changed}}}


REFUSED = {
    "another separator": ({"df": {"a": "commas"}}, "encoding: latin-1|read: {sep"),
    "dates of another form": (
        {"df": {"a": "numbers"}},
        r"`client a: day` must hold dates written ISO8601.*date_format",
    ),
    "another word": ({"replace": {}, "df": {"a": TABLE.assign(sex="female")}}, r"replace: {sex: {female: ...}}"),
    "marks of gaps": ({"df": {"a": TABLE.assign(crp=["?", "1"] * 20)}}, r"read: {na_values: \['\?'\]}"),
    "commas": ({"df": {"a": TABLE.assign(crp=["1,5", "2,0"] * 20)}}, "decimal: ','"),
    "an unscaled identifier": (
        {"df": {"a": TABLE.assign(number=np.arange(ROWS) * 10**7)}},
        "`client a: number` must hold measurements if it has no scale.*identifier",
    ),
    "an unscaled column": (
        {"df": {"a": TABLE.assign(dose=[1e6, 2e6] * 20)}},
        r"columns: {dose: {scale: \[mean, std\]}}",
    ),
    "a scaled column": (
        {"df": {"a": TABLE.assign(age=[1e6, *[50.0] * (ROWS - 1)])}},
        r"`client a: age` must have numbers.*Check the unit .* its scale, columns: {age: {scale: \[50, 20\]}}",
    ),
    "unscaled days": (
        {"columns": {**CHOICES["columns"], "day": {"since": "1900-01-01"}}},
        r"day` .*{day: {scale: \[mean, std\]}}",
    ),
    "other columns": (
        {"df": {"a": TABLE, "b": TABLE.assign(sodium=1.0).drop(columns="age")}},
        r"`client b` must have the columns of client a, got .*no columns \['age'\] and also \['sodium'\]",
    ),
    "no day": (column("day", since="soon"), "`columns: day: since` must be a day"),
    "a scale that is not typed": (column("age", scale=None), "must have no null .*: columns: age: scale"),
    "thousands": ({"df": {"a": TABLE.assign(crp=["1,250.5", "20"] * 20)}}, "of thousands'.*{thousands: ','}"),
    "a footer": (
        {"df": {"a": TABLE.assign(crp=[*[1.5] * (ROWS - 1), "secret"])}},
        r"got 'text in the last row alone'.*skipfooter: 1",
    ),
    "fill of dates": (column("day", fill=5), "`columns: day: fill` must be a day YYYY-MM-DD, got 5"),
    "fill of texts": (column("crp", fill="none"), "`columns: crp: fill` must be a number, true or false"),
    "labels": ({"classes": ["no"]}, r"`client a: died` must hold the given classes only, \['no'\], got 'yes'"),
    "fill of no category": (column("sex", fill="D"), "`columns: sex: fill` must be one of the categories"),
    "a part of a column that there is not": (column("age", mean=3), "`columns: age` must have some of scale, .*'mean'"),
    "a column that there is not": ({"columns": {"smoke": {"scale": [0, 1]}}}, r"`columns` must .*got \['smoke'\]"),
    "no mapping": ({"columns": {"age": [50, 20]}}, "`columns: age` must be a mapping"),
    "a scaled label": ({"columns": {"died": {"scale": [0, 1]}}}, "`columns: died` must have a unit alone"),
    "an argument that there is not": ({"scales": {}}, "`options` must be arguments of from_dataframe; .*got 'scales'"),
    "an unknown option": ({"read": {"seperator": ";"}}, "`read` must have keys of sep"),
    "client of several tables": ({"client": "id", "df": {"a": TABLE}}, "`client` must be left out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_named_with_the_way_out(case, files):
    changed, words = REFUSED[case]
    tables = changed.get("df", {"a": TABLE})
    tables = {name: _file(files, one) if isinstance(one, str) else one for name, one in tables.items()}
    with pytest.raises(UserError, match=words):
        Population.from_dataframe(**{**CHOICES, **changed, "df": tables})


def _file(files, name):
    return files[name]["file"]


def test_gaps_of_dates_and_truth_values_are_filled():
    gap = np.arange(ROWS) == 3
    table = TABLE.assign(day=TABLE.day.mask(gap), smokes=pandas.Series([True, False] * 20, dtype=object).mask(gap))
    columns = {**CHOICES["columns"], **column("day", fill="2022-01-11")["columns"], "smokes": {"fill": True}}
    people = Population.from_dataframe(table, **{**CHOICES, "columns": columns})
    row = dict(zip(people.feature_names, people.x[3].tolist(), strict=True))
    assert row["day (scaled)"] == -0.5 and row["day missing"] == row["smokes missing"] == row["smokes"] == 1
    assert people.x[:2, people.feature_names.index("smokes")].tolist() == [1, 0]


def test_columns_and_labels_that_teach_nothing_are_warned_of():
    table = TABLE.assign(crp=np.nan, sex="F", died="no")
    with pytest.warns(UserNotice) as warned:
        Population.from_dataframe({"a": table}, **CHOICES)
    words = [str(one.message) for one in warned]
    assert any("client a: crp is missing in every row" in one for one in words)
    assert any("client a: sex is the same in every row" in one for one in words)
    assert any("client a: all training records have the same label" in one for one in words)


def test_large_inputs_are_warned_of():
    with pytest.warns(UserNotice, match="above 1,000: divide them by a public constant"):
        Population.from_datasets([(torch.full((20, 2), 1e4), torch.arange(20) % 2)], num_classes=2)


def read_file(folder, text, **options):
    (folder / "one.csv").write_text(text)
    return Table(str(folder / "one.csv"), "df", options).frame


def test_separators_at_the_end_of_rows_and_numbers_of_rows_shift_no_column(tmp_path):
    expected = {"age": [50, 60], "ill": [0, 1]}
    for text in ("age,ill\n50,0,\n60,1,\n", "age,ill,\n50,0,\n60,1,\n", ",age,ill\n0,50,0\n1,60,1\n"):
        assert read_file(tmp_path, text).to_dict("list") == expected
    for text in ("age,ill\n7,50,0\n8,60,1\n", "age,ill\n7,7,50,0\n8,7,60,1\n"):
        with pytest.raises(UserError, match="`df` must have a name for each value of a row, got 'more values"):
            read_file(tmp_path, text)
    with pytest.raises(UserError, match="`df` must have rows"):
        read_file(tmp_path, "age,ill\n")


def test_numbers_are_replaced_exactly():
    frame = pandas.DataFrame({"mass": [123456.4, 123456.0, -1234567.0]})
    replaced = Table(frame, "df", replace={"mass": {"123456": 1, "-1234567": 2}}).frame
    assert replaced.mass.tolist() == [123456.4, 1, 2]


def test_each_column_of_dates_may_have_a_form_and_a_zone(tmp_path):
    text = "born,seen\n05.03.2024,2024-03-06T00:00:00+01:00\n"
    table = Table(str(tmp_path / "one.csv"), "df", {"date_format": {"born": "%d.%m.%Y"}})
    read_file(tmp_path, text)
    assert [table.days(name, "2024-03-01").item() for name in ("born", "seen")] == [4.0, 5.0]
    with pytest.raises(UserError, match="`read: date_format` must say how dates are written, got 'mixed'"):
        Table(str(tmp_path / "one.csv"), "df", {"date_format": "mixed"})


def test_whole_numbers_that_are_measured_are_no_identifiers():
    grams = pandas.Series(range(1500, 4500, 25), name="birthweight")
    running = pandas.Series(range(1, 120), name="x")
    assert not is_identifier(grams) and is_identifier(running) and is_identifier(grams.rename("patient_id"))
    assert is_identifier(10_000_000 + 37 * grams) and not is_identifier(grams % 7)


def test_a_class_of_the_name_none_is_named(tmp_path):
    text = "age,ill\n" + "50,None\n60,yes\n" * 20
    (tmp_path / "one.csv").write_text(text)
    given = {"label": "ill", "classes": ["None", "yes"], "held_out": 0.0}
    with pytest.raises(UserError, match="If NA or None is a class, write read"):
        Population.from_dataframe(str(tmp_path / "one.csv"), **given)
    read = {"keep_default_na": False, "na_values": [""]}
    assert Population.from_dataframe(str(tmp_path / "one.csv"), read=read, **given).y.tolist() == [0, 1] * 20


def test_commas_in_a_file_that_they_separate_are_said_to_group_thousands(tmp_path):
    (tmp_path / "one.csv").write_text('cost,ill\n"12,345",0\n"2,000",1\n')
    with pytest.raises(UserError, match=r"numbers with separators of thousands'. Write read: \{thousands: ','\}"):
        Population.from_dataframe(tmp_path / "one.csv", label="ill", num_classes=2)


@pytest.mark.parametrize("one", ["42.9", "1017.0", "0.500", "1.23"])
def test_a_decimal_point_is_no_separator_of_thousands(one, tmp_path):
    """Points of a file are separators of thousands in one column and decimal points in another."""
    (tmp_path / "one.csv").write_text(f"crp;cost;ill\n{one};1.234,50;0\n7;2.000,00;1\n")
    read = {"sep": ";", "decimal": ",", "thousands": "."}
    given = {"df": str(tmp_path / "one.csv"), "label": "ill", "num_classes": 2, "held_out": 0}
    with pytest.raises(UserError, match=r"got 'numbers with decimal points'\. A file has one"):
        Population.from_dataframe(**given, read=read, columns={"cost": {"scale": [1000, 500]}})
    read_without = Population.from_dataframe(**given, read=read, columns={"cost": {"scale": [1000, 500]}}, drop=["crp"])
    assert read_without.x[:, 0].tolist() == pytest.approx([0.469, 2])
    other_way = Population.from_dataframe(
        **given, read={"sep": ";"}, drop=["cost"], columns={"crp": {"scale": [float(one), 1]}}
    )
    assert other_way.x[0].item() == 0


@pytest.mark.parametrize("mark", [" ", "'"])
def test_spaces_and_apostrophes_group_thousands(mark, tmp_path):
    (tmp_path / "one.csv").write_text(f"cost;ill\n1{mark}234,5;0\n2{mark}000,0;1\n7,5;1\n")
    given = {
        "df": str(tmp_path / "one.csv"),
        "label": "ill",
        "num_classes": 2,
        "held_out": 0,
        "columns": {"cost": {"scale": [0, 1000]}},
    }
    with pytest.raises(UserError, match=f"separators of thousands and decimal commas'. Write read: .*{mark}"):
        Population.from_dataframe(**given, read={"sep": ";"})
    people = Population.from_dataframe(**given, read={"sep": ";", "thousands": mark, "decimal": ","})
    assert people.x[:, 0].tolist() == pytest.approx([1.2345, 2, 0.0075])


@pytest.mark.e2e
@pytest.mark.parametrize(("mean", "spread", "scale"), [(2.5, 1, [20, 25]), (2.6, 2, [14, 20]), (2.6, 2.5, [300, 2000])])
@pytest.mark.parametrize("rows", [40, 5000])
def test_heavy_tails_are_no_other_unit(mean, spread, scale, rows):
    """CRP by its mean and deviation; troponin by its median and quartiles, or by mean and deviation."""
    for seed in range(20):
        values = np.random.default_rng(seed).lognormal(mean, spread, rows).round(1)
        table = pandas.DataFrame({"marker": values, "ill": np.arange(rows) % 2})
        Population.from_dataframe(table, label="ill", num_classes=2, columns={"marker": {"scale": scale}})


@pytest.mark.parametrize("mark", [-1, 999])
def test_values_that_may_mark_missing_ones_are_warned_of(mark, tmp_path):
    rng = np.random.default_rng(0)
    age = rng.normal(60, 15, 400).round()
    table = pandas.DataFrame({"age": age, "crp": rng.lognormal(2.5, 1, 400).round(1), "ill": np.arange(400) % 2})
    given = {"label": "ill", "num_classes": 2, "columns": {"age": {"scale": [60, 15]}, "crp": {"scale": [20, 25]}}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Population.from_dataframe(table, **given)
    table.assign(age=np.where(np.arange(400) % 50 == 0, mark, age)).to_csv(tmp_path / "one.csv", index=False)
    way_out = f"na_values: {{age: [{mark}]}}"
    with pytest.warns(UserNotice, match=f"df: age is {mark} in 8 rows, .*read: {{{re.escape(way_out)}}}"):
        Population.from_dataframe(tmp_path / "one.csv", **given)
    columns = {**given["columns"], "age": {"scale": [60, 15], "fill": 60}}
    filled = Population.from_dataframe(
        tmp_path / "one.csv", **given | {"columns": columns}, read={"na_values": {"age": [mark]}}
    )
    assert filled.x[:, 1].sum() == 8


@pytest.mark.parametrize("name", ["pid", "case"])
@pytest.mark.parametrize("each", [2, 4])
def test_ids_with_several_rows_are_no_categories(name, each):
    table = pandas.DataFrame({name: [f"P{row // each}" for row in range(300)], "ill": np.arange(300) % 2})
    with pytest.raises(UserError, match=f"`df: {name}` must hold numbers.* leave the column out") as refused:
        Population.from_dataframe(table, label="ill", num_classes=2, person="none")
    assert "categories" not in str(refused.value) and ("person: pid" in str(refused.value)) == (name == "pid")
    assert is_identifier(pandas.Series(np.arange(300) // each, name="pid"))


def test_labels_of_a_regression_in_another_unit_are_refused():
    rng = np.random.default_rng(0)
    tables = {name: pandas.DataFrame({"age": rng.normal(0, 1, 50), "y": rng.lognormal(1, 1, 50)}) for name in "ab"}
    Population.from_dataframe(tables, test=tables["a"].assign(y=-30 * tables["a"].y), label="y")
    for other in (1000, 0.001):
        scaled = {name: table.assign(y=table.y * other) for name, table in tables.items()}
        with pytest.raises(UserError, match="`client b: y` must be of the scale of client a"):
            Population.from_dataframe({"a": tables["a"], "b": scaled["b"]}, label="y")
        with pytest.raises(UserError, match="`test: y` must be of the scale of client a"):
            Population.from_dataframe(tables, test=scaled["a"], label="y")
    few = [(torch.zeros(3, 1), torch.tensor([1e-6, 0, 0])), (torch.zeros(3, 1), torch.ones(3))]
    Population.from_datasets(few, held_out=0)


def test_tables_that_are_given_twice_are_warned_of():
    rng = np.random.default_rng(0)
    drawn = pandas.DataFrame({"age": rng.integers(40, 80, 180), "sex": rng.integers(0, 2, 180), "ill": [0, 1] * 90})
    ours, theirs, test = (drawn[start : start + 60] for start in (0, 60, 120))
    given = {"label": "ill", "num_classes": 2, "columns": {"age": {"scale": [55, 10]}}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Population.from_dataframe({"a": ours, "b": theirs}, test=test, **given)
    with pytest.warns(UserNotice, match=r"client a: \d+ of 120 rows are copies of another row"):
        Population.from_dataframe({"a": pandas.concat([ours, ours]), "b": theirs}, **given)
    with pytest.warns(UserNotice, match="client b has the inputs of client a"):
        Population.from_dataframe({"a": ours, "b": ours.sample(frac=1, random_state=0)}, **given)
    with pytest.warns(UserNotice, match="test has the inputs of client b"):
        Population.from_dataframe({"a": ours, "b": theirs}, test=theirs.copy(), **given)


def test_a_last_row_of_means_is_warned_of():
    rng = np.random.default_rng(0)
    table = pandas.DataFrame(
        {"age": rng.integers(40, 70, 60) * 1.0, "crp": rng.lognormal(2, 1, 60).round(1), "ill": ["no", "yes"] * 30}
    )
    given = {
        "label": "ill",
        "classes": ["no", "yes"],
        "columns": {"age": {"scale": [55, 10]}, "crp": {"scale": [10, 10]}},
    }
    for found in (table[["age", "crp"]].mean().round(1), table[["age", "crp"]].sum().round(1)):
        last = pandas.DataFrame([{**found, "ill": "no"}])
        with pytest.warns(UserNotice, match="df: the last row holds the means or sums of the columns .*skipfooter: 1"):
            Population.from_dataframe(pandas.concat([table, last], ignore_index=True), **given)


@pytest.mark.parametrize("above", ["sep=;\n", "# exported\n", "Export of ward 7\n"])
def test_lines_above_the_names_are_skipped_by_a_word(above, tmp_path):
    (tmp_path / "one.csv").write_text(above + "age;ill\n50;0\n60;1\n")
    given = {"df": str(tmp_path / "one.csv"), "label": "ill", "num_classes": 2, "held_out": 0}
    with pytest.raises(UserError, match=r"read: \{skiprows: 1\}"):
        Population.from_dataframe(**given, read={"sep": ";"})
    assert Population.from_dataframe(**given, read={"sep": ";", "skiprows": 1}).x.tolist() == [[50], [60]]


WAYS_OUT = {
    "decimal commas in a file with another separator": ("age;ill\n50,5;0\n", {}, {}, r"read: \{sep: ';'\}"),
    "a separator of another file": ("age,ill\n50,0\n", {"sep": ";"}, {}, r"Write read: \{sep: ','\}"),
    "labels of another word": (
        "age,ill\n50,Yes\n",
        {},
        {"classes": ["no", "yes"]},
        r"replace: \{ill: \{'Yes': \.\.\.\}\}",
    ),
    "a blank": (
        "age,sex,ill\n5,M ,0\n",
        {},
        {"columns": {"sex": {"categories": ["M"]}}},
        r"replace: \{sex: \{'M ': \.\.\.\}\}",
    ),
    "days of Excel": (
        "day,ill\n45292,0\n45293,1\n",
        {},
        {"columns": {"day": {"since": "2024-01-01"}}},
        "days since 1899-12-30",
    ),
}


@pytest.mark.parametrize("case", WAYS_OUT)
def test_a_refusal_names_a_way_out(case, tmp_path):
    text, read, given, words = WAYS_OUT[case]
    (tmp_path / "one.csv").write_text(text)
    with pytest.raises(UserError, match=words):
        Population.from_dataframe(str(tmp_path / "one.csv"), label="ill", num_classes=2, read=read, **given)


def test_dates_in_whole_numbers_and_texts_for_classes_in_numbers(tmp_path):
    frame = pandas.DataFrame({"day": [20240101, 20240103], "age": [1, 2], "ill": [0, 1]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        days = Table(frame, "df").days("day", "2024-01-01")
    assert days.tolist() == [0, 2]
    with pytest.raises(UserError, match="got '0'") as refused:
        Population.from_dataframe(frame.astype({"ill": str}), label="ill", classes=[0, 1], drop=["day"])
    assert "YAML" not in str(refused.value)
