"""Numbers on the pages of the documentation that have no source in `docs/sources.yaml`, with files that may be one.

`python -m experiments.numbers [PAGE ...]` prints them. Code, links, dates, versions and generated pages are left out.
"""

import re
import sys
from collections import Counter
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "docs" / "sources.yaml"

#: what is no number of a page
SKIPPED = re.compile(
    r"<!--.*?-->"  # comments
    r"|^ *(```+|~~~+).*?^ *\1"  # fenced code
    r"|(`+).+?\2"  # inline code
    r"|(?<=\])\([^)\s]*\)|https?://\S+|<[^>\n]*>"  # targets of links, addresses, HTML
    r"|^#+ \d+\.(?= )|^ *\d+\.(?= )"  # numbering of headings and lists
    r"|\b(19|20)\d\d(-\d\d-\d\d)?\b"  # dates
    r"|\bv?\d+\.\d+\.\d+\S*|\b(Python|PyTorch|CUDA|Lightning|Opacus|Flower|numpy|version) \d+(\.\d+)*",  # versions
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"(?<![\w.^])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w.]*[^\W⁰¹²³⁴-⁹])")
FILES = ("experiments/results/*.md", "experiments/**/*.py", "conf/*.yaml", "dpfl_lightning/**/*.py", "tests/**/*.py")


def pages() -> list[str]:
    """Return README and the pages that are not written by a command."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found if "<!-- Written by `" not in path.read_text()[:400]]


def numbers(text: str) -> list[tuple[str, str]]:
    """Return the numbers of a page as they are written, each with its line.

    >>> [number for number, _ in numbers("Since 2024, `n=3` and 55.3 ± 0.2 % of 2,400.")]
    ['55.3', '0.2', '2,400']
    """
    kept = SKIPPED.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    lines, bare = text.split("\n"), kept.split("\n")
    return [(one.group(), line) for line, words in zip(lines, bare, strict=True) for one in NUMBER.finditer(words)]


def listed() -> dict[str, dict[str, list[str]]]:
    """Return page -> source -> numbers."""
    known = yaml.safe_load(SOURCES.read_text())
    return {page: {source: str(of).split() for source, of in of_page.items()} for page, of_page in known.items()}


def stands_in(number: str, text: str) -> bool:
    """Whether a number, or one that rounds to it, also a hundredth of it, stands in a text."""
    value, error = value_of(number), 1e-9 * value_of(number)
    if "e" not in number:
        error += 0.5 * 10.0 ** -len(number.partition(".")[2])
    found = {value_of(match) for match in re.findall(r"\d[\d,_]*(?:\.\d+)?(?:e-?\d+)?", text)}
    return any(abs(one - value) <= error or abs(100 * one - value) <= error for one in found)


def value_of(number: str) -> float:
    """Return the value of a number as it is written."""
    return float(number.replace(",", "").replace("_", ""))


def without_source(page: str, text: str | None = None) -> Counter[str]:
    """Return the numbers of a page that are not in the list, as often as they are missing there."""
    found = Counter(number for number, _ in numbers(text or (ROOT / page).read_text()))
    return found - Counter(number for of in listed().get(page, {}).values() for number in of)


def main(names: list[str]) -> None:
    """Print numbers without a source, their lines, and at most four files in which each stands."""
    texts = {path: path.read_text() for pattern in FILES for path in sorted(ROOT.glob(pattern))}
    for page in names or pages():
        missing = without_source(page)
        for number, line in numbers((ROOT / page).read_text()):
            if missing[number]:
                found = [str(path.relative_to(ROOT)) for path, text in texts.items() if stands_in(number, text)]
                print(f"{page}: {number}: {line.strip()}\n    {', '.join(found[:4]) or 'in no file'}")


if __name__ == "__main__":
    main(sys.argv[1:])
