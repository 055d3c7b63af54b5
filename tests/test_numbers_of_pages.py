"""Numbers on the pages of the documentation are those of `docs/sources.yaml`, and stand in their sources."""

import random
import re
from collections import Counter

import pytest

from experiments.numbers import ROOT, SKIPPED, listed, numbers, pages, stands_in

#: pages whose numbers have no list of sources yet
NOT_YET: set[str] = {
    "README.md",
    "docs/architecture.md",
    "docs/audit.md",
    "docs/extending.md",
    "docs/faq.md",
    "docs/howto/model.md",
    "docs/howto/operate.md",
    "docs/howto/tracking.md",
    "docs/ledger.md",
    "docs/limits.md",
    "docs/privacy.md",
    "docs/proof.md",
    "docs/results.md",
    "docs/tutorials/hospitals.md",
}

LISTED = listed()
TEXTS = {page: (ROOT / page).read_text() for page in LISTED}


def path_of(source: str):
    """Return the path that a source names, if it is one."""
    return ROOT / source if re.fullmatch(r"[\w./-]+\.(md|py|ya?ml|json|jsonl|toml)", source) else None


def of_list(page: str) -> Counter[str]:
    return Counter(number for of_source in LISTED[page].values() for number in of_source)


def found(text: str) -> Counter[str]:
    return Counter(number for number, _ in numbers(text))


def test_every_page_is_listed_or_named_as_missing():
    with_numbers = {page for page in pages() if numbers((ROOT / page).read_text())}
    assert with_numbers == LISTED.keys() | NOT_YET and not LISTED.keys() & NOT_YET


@pytest.mark.parametrize("page", LISTED)
def test_the_numbers_of_a_page_are_those_of_its_sources(page):
    sources, there = of_list(page), found(TEXTS[page])
    without, gone = dict(there - sources), dict(sources - there)
    assert there == sources, f"without a source in docs/sources.yaml: {without}; no longer on {page}: {gone}"


@pytest.mark.parametrize("page", LISTED)
def test_a_number_stands_in_the_file_that_is_its_source(page):
    for source, of_source in LISTED[page].items():
        if path := path_of(source):
            text = path.read_text()
            assert not [number for number in of_source if not stands_in(number, text)], source


def test_sources_are_paths_commands_or_references():
    for source in {source for of_page in LISTED.values() for source in of_page}:
        assert path_of(source) or re.match(r"(paper|arithmetic|cells|command|words): .{5}", source), source
        if source.startswith("cells: "):
            assert (ROOT / "experiments" / "results" / source.split()[1].rstrip(",")).exists(), source


#: what the draw leaves out, by patterns of its own: code, targets of links, names such as Dist1, and years
NOT_DRAWN = re.compile(r"(```+)[a-z]*\n.*?\1|(`+).+?\2|\]\(\S*\)|https?:\S+|[A-Za-z_]-?\d\w*|\b20\d\d\b", re.DOTALL)


def test_changed_numbers_are_noticed():
    """In each of 20 draws one digit of ten numbers of the listed pages is changed; nine are noticed."""
    places = [
        (page, number.start())
        for page, text in TEXTS.items()
        for number in re.finditer(r"\d+", NOT_DRAWN.sub(blank, text))
    ]
    for seed in range(20):
        rng = random.Random(seed)
        noticed = 0
        for page, place in rng.sample(places, 10):
            text = TEXTS[page]
            digit = rng.choice([one for one in "123456789" if one != text[place]])
            noticed += found(text[:place] + digit + text[place + 1 :]) != of_list(page)
        assert noticed >= 9, seed


def blank(match: re.Match) -> str:
    return " " * len(match.group())


def test_what_is_no_number_of_a_page_is_left_out():
    text = (
        "# 3. Head\n1. `n=3`, [a](b2.md) of 2024-01-02 and torch 2.3.1:\n```bash\nrun 5\n```\n9.5 % of 2,400 at 1e-5."
    )
    assert [number for number, _ in numbers(text)] == ["9.5", "2,400", "1e-5"]
    assert SKIPPED.search(text)
    assert stands_in("55.3", "| 55.29 |") and stands_in("55", "0.553") and not stands_in("55.3", "55.4, 5.53")
