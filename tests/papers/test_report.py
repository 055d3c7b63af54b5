"""Ours beside the paper's: differences, tolerances, who leads, and the pages that are written from files."""

import dataclasses
from pathlib import Path

import pytest
from fake_experiments import CELL, fake, held

from experiments.papers.cells import RESULTS, Cell, finished, write
from experiments.papers.experiment import Comparison, Row, Tolerance
from experiments.papers.registry import PAPERS, experiments
from experiments.papers.report import best_rival, page, report

pytestmark = pytest.mark.usefixtures("known")
ROOT = Path(__file__).parents[2]
PAPER = {"ours": (50.0, 60.0), "theirs": (55.0, None)}
POINTS = Comparison(2.0, better="higher")


def rows_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def row_of(text: str, title: str) -> list[str]:
    (row,) = [row for row in rows_of(text) if row[0] == title]
    return row


@pytest.fixture
def results(tmp_path):
    """ours a: 51 and 53; ours b: 55; theirs a: 52."""
    for seed, column, row, value in ((0, "a", "ours", 51), (1, "a", "ours", 53), (0, "b", "ours", 55)):
        write(tmp_path, Cell("fake.table1", row, column, "small", seed), held(accuracy=value))
    write(tmp_path, Cell("fake.table1", "theirs", "a", "small", 0), held(accuracy=52.0))
    return tmp_path


def shown(results, scale="small", **changed) -> str:
    return report(fake(**{"seeds": {"small": (0, 1)}, **changed}), scale, results)


def test_ours_the_papers_and_the_difference(results):
    text = shown(results, paper=PAPER, comparison=POINTS)
    at = rows_of(text).index(["ours", "52.00 ± 1.00", "55.00"])
    assert rows_of(text)[at + 1 : at + 3] == [["the paper's", "50.00", "60.00"], ["difference", "+2.00", "**-5.00**"]]
    assert row_of(text, "theirs") == ["theirs", "52.00", "-"]
    assert (
        "1 of 3 numbers are within 2 of the paper's. Failed reproductions, worse than the paper's: ours, B; theirs, A."
        in text
    )
    assert "4 of 10 cells are made." in text and "Best in A: ours, in the paper theirs." in text
    assert "Best in B" not in text, "not all are made"
    far = shown(results, paper={"ours": (40.0, 54.0), "theirs": (60.0, None)}, comparison=POINTS)
    better, worse = (f"Failed reproductions, {how} than the paper's" for how in ("better", "worse"))
    failed = f"{better}: ours, A. {worse}: theirs, A."
    assert f"1 of 3 numbers are within 2 of the paper's. {failed}" in far
    assert far.count("| **+12.00**") == 1
    mixed = Comparison(2.0, better={"ours": "higher", "theirs": "lower"})
    assert "Best in" not in shown(results, paper=PAPER, comparison=mixed), "numbers of several kinds"
    write(results, CELL._replace(seed=0), held(accuracy=53.5))
    text = shown(results, paper={"ours": (56.0, None), "theirs": (55.0, None)}, comparison=POINTS)
    assert "Best in A: ours, as in the paper." in text


def test_rows_and_columns_of_which_nothing_is_made_are_named_instead(tmp_path):
    text = report(fake(notes=("A note.",)), "paper", tmp_path)
    assert "|" not in text and "0 of 6 cells are made." in text and "A note." in text and "scale paper: many" in text
    write(tmp_path, Cell("fake.table1", "ours", "a", "small", 0), held(accuracy=51.0))
    text = shown(tmp_path, paper=PAPER, comparison=POINTS)
    table = rows_of(text)
    assert "theirs" not in str(table) and "B" not in table[0] and row_of(text, "ours") == ["ours", "51.00"]
    assert table[3] == ["the paper's", "50.00"]
    assert "cells are made. None yet: theirs; formula; B." in text


def test_what_is_within_the_tolerance():
    wider, one = Tolerance(5.0, "why"), Tolerance(1, "")
    for comparison, ours, within in (
        (Comparison(2.0), 52.0, True),
        (Comparison(2.0), 52.1, False),
        (Comparison(2.0), 47.9, False),
        (Comparison(2.0, better="higher"), 52.1, False),
        (Comparison(0.02, relative=True), 51.0, True),
        (Comparison(0.02, relative=True), 51.1, False),
        (Comparison(2.0, special={("ours", "a"): wider}), 54.9, True),
        (Comparison(2.0, special={("ours", "b"): wider}), 54.9, False),
        (Comparison(2.0, special={("ours", ""): wider}), 54.9, True),
        (Comparison(2.0, special={("ours", ""): wider, ("ours", "a"): one}), 54, False),
    ):
        assert comparison.holds("ours", "a", ours, 50.0) == within, (comparison, ours)


def test_paired_differences_are_over_common_seeds(tmp_path, monkeypatch):
    """In a: theirs 50, 54, 51 for seeds 0, 1, 2 and ours 1 and 3 more for two of them; in b nobody has ours."""
    for row, column, values in (("theirs", "a", [50, 54, 51]), ("ours", "a", [51, 57]), ("theirs", "b", [40])):
        for seed, value in enumerate(values):
            write(tmp_path, Cell("fake.table1", row, column, "small", seed), held(accuracy=float(value)))
    third = {"third": Row("third")}
    table = fake(rows={**fake().rows, **third}, cells={**fake().cells, "third": fake().cells["ours"]}, ours="ours")
    table = dataclasses.replace(table, rivals=("theirs", "third"), seeds={"small": (0, 1, 2)})
    monkeypatch.setitem(experiments(), table.name, table)
    text = report(table, "small", tmp_path)
    assert rows_of(text)[2] == ["ours", "54.00 ± 3.00", "-"], "standard errors"
    to_ours, to_best = text.partition("Differences to ")[2].split("Differences to the best rival")
    assert rows_of(to_ours) == [["", "A"], ["-" * 6, "-" * 16], ["theirs", "-2.00 ± 1.00 (2)"]]
    assert rows_of(to_best)[0::2] == [["", "A", "B"], ["best rival", "theirs", "theirs"]]
    assert row_of(to_best, "ours") == ["ours", "+2.00 ± 1.00 (2)", "-"]
    write(tmp_path, Cell("fake.table1", "third", "a", "small", 1), held(accuracy=55.0))
    cells = finished(tmp_path, table, "small")
    assert best_rival(table, cells, "a") == "third", "55 beside 54 in the seed that both have, though 51.7 is the mean"
    assert best_rival(table, {}, "a") is None and "Differences" not in report(fake(), "small", tmp_path)


def test_a_page_has_the_finished_tables_of_a_paper(tmp_path):
    text = page("fake", tmp_path)
    assert text == "# Tables: fake\n\nWritten by `python -m experiments.papers fake --show --page`.\n"
    write(tmp_path, Cell("fake.table1", "ours", "a", "small", 0), held(accuracy=51.0))
    text = page("fake", tmp_path)
    assert (
        text.count("**fake.table1**") == 1
        and "(scale small: few)" in text
        and row_of(text, "ours") == ["ours", "51.00"]
    )


@pytest.mark.e2e
def test_the_kept_pages_are_written_from_the_cells(monkeypatch):
    monkeypatch.chdir(ROOT)
    kept = {path.stem: path.read_text() for path in RESULTS.glob("*.md") if path.stem in PAPERS}
    assert len(kept) == len(PAPERS) - 1, "all but the example"
    for paper, text in kept.items():
        assert text == page(paper, RESULTS), f"write it anew: python -m experiments.papers {paper} --show --page"


def test_the_accountants_are_those_of_the_guarantees(results):
    by_rdp = {**held(accuracy=60.0), "accountant": "RDP", "guarantee": "accounted by nobody."}
    write(results, Cell("fake.table1", "theirs", "b", "small", 0), by_rdp)
    write(results, Cell("fake.table1", "theirs", "b", "small", 1), {**by_rdp, "accountant": None})
    assert "Epsilons were computed by RDP." in shown(results) and "nobody" not in shown(results)


def test_a_table_in_which_an_upper_bound_is_below_has_no_verdict(results):
    """theirs a has 52 for seed 0, where ours has 51; over three seeds chance does not count."""
    bounded = {"paper": PAPER, "comparison": POINTS, "upper_bounds": {"theirs": ["ours"], "ours": ["theirs"]}}
    text = shown(results, **bounded)
    assert "**Not tuned**, so there is no verdict" in text and "theirs in A (+1.00 (1))" in text
    assert "numbers are within" not in text and "ours in A" not in text
    assert "Not tuned" not in shown(results, **{**bounded, "upper_bounds": {"theirs": ["ours"]}})
    some = fake(**bounded).restricted(["ours"], ["a"])
    assert "Not tuned" not in report(some, "small", results), "the other row is not shown"
    for seed, value in ((1, 52.5), (2, 52.0)):
        write(results, Cell("fake.table1", "theirs", "a", "small", seed), held(accuracy=value))
    write(results, Cell("fake.table1", "ours", "a", "small", 2), held(accuracy=51.0))
    assert "Not tuned" not in shown(results, **bounded, seeds={"small": (0, 1, 2)}), "+0.5 is below two errors"
    write(results, Cell("fake.table1", "ours", "a", "small", 1), held(accuracy=51.4))
    assert "theirs in A (+1.03" in shown(results, **bounded, seeds={"small": (0, 1, 2)})
