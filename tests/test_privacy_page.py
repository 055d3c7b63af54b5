"""The pages of privacy name tests and files that exist, and what no guarantee covers in the guarantee's words."""

import re
from pathlib import Path

from dpfl_lightning.privacy.accounting.guarantee import NOT_COVERED
from dpfl_lightning.reporting.odds import Odds

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PROOF, EPSILON = [(DOCS / f"{name}.md").read_text() for name in ("privacy", "proof", "epsilon")]


def test_every_file_that_the_pages_name_exists():
    links = [f"docs/{name}" for name in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", PAGE + PROOF)]
    names = [*links, *re.findall(r"\b(?:tests|dpfl_lightning|conf|docs)/[\w./]*\w", PAGE + PROOF)]
    assert len(names) > 35
    assert not [name for name in names if not (DOCS.parent / name).exists()]


def test_what_is_not_covered_stands_in_the_page_word_for_word():
    words = " ".join(PAGE.split())
    assert not [gap for gap in NOT_COVERED if f"- {gap}" not in words]
    assert words.count(" - ") >= len(NOT_COVERED)


def test_the_readme_links_the_page():
    assert "(docs/privacy.md)" in (DOCS.parent / "README.md").read_text()


def test_the_picture_of_epsilon_has_the_odds_of_the_guarantee():
    picture = (DOCS / "epsilon.svg").read_text()
    shown = re.findall(r"([\d.]+)(?: means)? ([\d.,]+) and ([\d.]+)[,.]", EPSILON)
    assert len(shown) == 6
    for epsilon, factor, guesses in shown:
        odds = Odds.of(float(epsilon), 1e-5)
        assert (factor, f"{guesses} of 100 cases") == (odds.factor, odds.guesses)
        assert all(f">{number}</text>" in picture for number in (epsilon, factor, guesses))
