"""The docs say what the files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.papers.cells import RESULTS
from experiments.papers.report import page

ROOT = Path(__file__).parents[2]
PAGES = [path for path in sorted(ROOT.glob("docs/*.md")) if "<!-- papers " in path.read_text()]


def test_there_are_pages():
    assert "noise_aware.md" in [path.name for path in PAGES]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_written_from_the_files(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    written = page(path.relative_to(ROOT), RESULTS)
    paper = path.stem
    again = f"python -m experiments.papers {paper} --show --page docs/{path.name}"
    assert path.read_text() == written, f"write the page anew: {again}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_picture_is_there(path):
    pictures = [line.partition("](")[2].rstrip(")") for line in path.read_text().splitlines() if line.startswith("![")]
    assert all((path.parent / picture).is_file() for picture in pictures)
    drawn = {one.parent.parent.name.partition(".")[0] for one in ROOT.glob("experiments/results/*/*/figure.svg")}
    assert pictures or path.stem not in drawn
