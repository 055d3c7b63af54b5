"""`docs/privacy.md` names tests and files that exist, and lists what no guarantee covers in the guarantee's words."""

import re
from pathlib import Path

from dpfl_lightning.privacy.accounting.guarantee import NOT_COVERED

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/privacy.md").read_text()


def test_every_file_that_the_page_names_exists():
    links = [f"docs/{name}" for name in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", PAGE)]
    names = [*links, *re.findall(r"\b(?:tests|dpfl_lightning|conf|docs)/[\w./]*\w", PAGE)]
    assert len(names) > 25
    assert not [name for name in names if not (ROOT / name).exists()]


def test_what_is_not_covered_stands_in_the_page_word_for_word():
    words = " ".join(PAGE.split())
    assert not [gap for gap in NOT_COVERED if f"- {gap}" not in words]
    assert words.count(" - ") >= len(NOT_COVERED)


def test_the_readme_links_the_page():
    assert "(docs/privacy.md)" in (ROOT / "README.md").read_text()
