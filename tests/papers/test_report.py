"""Ours beside the paper's: differences, tolerances, who leads, and the page that is written from files."""

from __future__ import annotations

import pytest
from fake_experiments import CELL, fake, held

from dpfl_lightning.errors import UserError
from experiments.papers.cells import Cell, write
from experiments.papers.experiment import Column, Comparison, Row, Tolerance
from experiments.papers.registry import experiments
from experiments.papers.report import as_dict, listing, numbers, page, report

PAPER = {"ours": (50.0, 60.0), "theirs": (55.0, None)}
POINTS = Comparison(2.0, better="higher")


def row_of(text: str, title: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {title} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture
def results(tmp_path):
    """ours a: 51 and 53; ours b: 55; theirs a: 52."""
    for seed, column, row, value in ((0, "a", "ours", 51), (1, "a", "ours", 53), (0, "b", "ours", 55)):
        write(tmp_path, Cell("fake.table1", row, column, "small", seed), held(accuracy=value))
    write(tmp_path, Cell("fake.table1", "theirs", "a", "small", 0), held(accuracy=52.0))
    return tmp_path


def test_ours_the_papers_and_the_difference(results):
    text = report(fake(paper=PAPER, comparison=POINTS), "small", results)
    lines = text.splitlines()
    assert row_of(text, "ours") == ["ours", "52.00 ± 1.41", "55.00"]
    at = next(i for i, line in enumerate(lines) if line.startswith("| ours "))
    assert [cell.strip() for cell in lines[at + 1].split("|")[1:-1]] == ["the paper's", "50.00", "60.00"]
    assert [cell.strip() for cell in lines[at + 2].split("|")[1:-1]] == ["difference", "+2.00", "**-5.00**"]
    assert row_of(text, "theirs") == ["theirs", "52.00", "-"]
    assert "1 of 3 numbers are within 2 of the paper's. Outside: ours, B; theirs, A." in text
    assert "3 of 6 cells are made." in text


def test_rows_and_columns_of_which_nothing_is_made_are_named_instead(tmp_path):
    write(tmp_path, Cell("fake.table1", "ours", "a", "small", 0), held(accuracy=51.0))
    text = report(fake(paper=PAPER, comparison=POINTS), "small", tmp_path)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert "theirs" not in "".join(table) and "B" not in table[0] and row_of(text, "ours") == ["ours", "51.00"]
    assert [cell.strip() for cell in table[3].split("|")[1:-1]] == ["the paper's", "50.00"]
    assert "cells are made. None yet: theirs; formula; B." in text


def test_the_leader_is_told_where_all_are_made(results):
    told = report(fake(paper=PAPER, comparison=POINTS), "small", results)
    assert "Best in A: ours, in the paper theirs." in told and "Best in B" not in told
    turned = fake(paper={"ours": (56.0, None), "theirs": (55.0, None)}, comparison=POINTS)
    write(results, CELL._replace(seed=0), held(accuracy=53.5))
    assert "Best in A: ours, as in the paper." in report(turned, "small", results)


@pytest.mark.parametrize(
    ("comparison", "ours", "paper", "within"),
    [
        (Comparison(2.0), 52.0, 50.0, True),
        (Comparison(2.0), 52.1, 50.0, False),
        (Comparison(2.0), 47.9, 50.0, False),
        (Comparison(2.0, better="higher"), 90.0, 50.0, True),
        (Comparison(2.0, better="higher"), 47.9, 50.0, False),
        (Comparison(2.0, better="lower"), 10.0, 50.0, True),
        (Comparison(2.0, better="lower"), 52.1, 50.0, False),
        (Comparison(0.02, relative=True), 51.0, 50.0, True),
        (Comparison(0.02, relative=True), 51.1, 50.0, False),
        (Comparison(2.0, special={("ours", "a"): Tolerance(5.0, "why")}), 54.9, 50.0, True),
        (Comparison(2.0, special={("ours", "b"): Tolerance(5.0, "why")}), 54.9, 50.0, False),
        (Comparison(2.0, special={("ours", ""): Tolerance(5.0, "why")}), 54.9, 50.0, True),
        (Comparison(2.0, special={("ours", ""): Tolerance(5.0, "w"), ("ours", "a"): Tolerance(1, "")}), 54, 50, False),
        (Comparison(2.0, better={"ours": "lower", "theirs": "higher"}), 10.0, 50.0, True),
        (Comparison(2.0, better={"theirs": "lower"}), 10.0, 50.0, False),
    ],
)
def test_what_is_within_the_tolerance(comparison, ours, paper, within):
    assert comparison.holds("ours", "a", ours, paper) == within


def test_a_special_tolerance_says_why(results):
    special = {("ours", "b"): Tolerance(None, "the paper says so"), ("theirs", "b"): Tolerance(9.0, "never told")}
    text = report(fake(paper=PAPER, comparison=Comparison(0.1, True, special=special)), "small", results)
    assert "2 of 2 numbers are within 10% of the paper's, unless said otherwise." in text
    assert "ours, B: not compared, because the paper says so." in text and "never told" not in text
    assert "-8.3%" in text  # told all the same


def test_a_special_tolerance_of_whole_rows_is_said_once(results):
    special = {(row, ""): Tolerance(None, "it is another loss") for row in ("ours", "theirs", "formula")}
    text = report(fake(paper=PAPER, comparison=Comparison(0.1, special=special)), "small", results)
    assert "ours; theirs: not compared, because it is another loss." in text and text.count("another loss") == 1


def test_nobody_is_best_among_numbers_of_several_kinds(results):
    mixed = Comparison(2.0, better={"ours": "higher", "theirs": "lower"})
    text = report(fake(paper=PAPER, comparison=mixed), "small", results)
    assert "Best in" not in text


def test_what_is_far_better_is_not_called_near(results):
    paper = {"ours": (40.0, 54.0), "theirs": (60.0, None)}
    text = report(fake(paper=paper, comparison=Comparison(2.0, better="higher")), "small", results)
    assert "1 of 3 numbers are within 2 of the paper's. Better by more: ours, A. Outside: theirs, A." in text


def test_a_table_without_the_papers_numbers_compares_nothing(results):
    text = report(fake(), "small", results)
    assert "the paper's" not in text and "within" not in text and row_of(text, "theirs")[1] == "52.00"


def test_a_table_without_cells_is_no_table(tmp_path):
    text = report(fake(notes=("A note.",)), "paper", tmp_path)
    assert "|" not in text and "0 of 6 cells are made." in text and "A note." in text and "scale paper: many" in text


def test_for_programs(results):
    told = as_dict(fake(paper=PAPER, comparison=POINTS), "small", results)
    (one,) = [one for one in told["numbers"] if (one["row"], one["column"]) == ("ours", "a")]
    assert one | {"std": 0} == {
        "row": "ours",
        "column": "a",
        "ours": 52.0,
        "std": 0,
        "seeds": 2,
        "paper": 50.0,
        "difference": 2.0,
        "within": True,
    }
    assert told["missing"] == 3 and len(numbers(fake(), {})) == 6


def test_a_row_reads_its_own_value(results):
    write(results, CELL, held(accuracy=51.0, worst=7.0))
    experiment = fake(rows={"worst": Row("worst client", "worst", "ours")}, columns={"a": Column("A")})
    assert row_of(report(experiment, "small", results), "worst client")[1] == "7.00"  # only seed 0 has it


def test_the_list_counts_cells_and_minutes(results, known):
    line = row_of(listing([fake(minutes={"small": 30.0, "paper": 60.0})], results), "fake.table1")
    assert line[1] == "small 3 of 6, paper 0 of 6"
    assert line[2] == "small 0, paper unknown"  # as the finished ones; the registered fake declares no guess


def test_a_page_is_written_from_files(results, known, tmp_path, monkeypatch):
    file = tmp_path / "page.md"
    monkeypatch.setitem(experiments(), "fake.table1", fake(paper=PAPER, comparison=POINTS))
    file.write_text("# Head\n\n<!-- papers fake.table1 small -->\nold\n<!-- /papers -->\n\nTail\n")
    written = page(file, results)
    assert written.startswith("# Head\n\n<!-- papers fake.table1 small -->\n**fake.table1** A fake")
    assert written.endswith("<!-- /papers -->\n\nTail\n") and "old" not in written
    file.write_text(written)
    assert page(file, results) == written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no marks", "marks such as"),
        ("<!-- papers nothing small -->\n<!-- /papers -->", "NAME"),
        ("<!-- papers example.digits big -->\n<!-- /papers -->", "--scale"),
    ],
)
def test_a_page_with_a_mistake_is_refused(text, words, tmp_path):
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(UserError, match=words):
        page(tmp_path / "page.md", tmp_path)
