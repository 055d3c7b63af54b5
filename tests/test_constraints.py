"""The tested sets of packages hold no version with a fault in security that is known."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FILES = ("constraints.txt", "constraints-flower.txt")
#: package -> first version without the fault. All three trusted root certificates of eMudhra, whose keys leaked
SAFE = {
    "certifi": "2026.10.19",  # GHSA-6q48-6c7w-9gw2
    "flwr": "1.42.0",  # requires the other two
    "uv": "0.13.5",  # GHSA-hq85-5cpj-mr62, and the countermeasure against the leaked keys themselves
}


def pins(text: str) -> dict[str, str]:
    lines = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    return {one.name: str(one.specifier).removeprefix("==") for one in lines}


def unsafe(text: str) -> list[str]:
    found = pins(text)
    return [name for name, first in SAFE.items() if name in found and Version(found[name]) < Version(first)]


@pytest.mark.parametrize("file", FILES)
def test_no_pin_is_below_the_first_safe_version(file):
    assert unsafe((ROOT / file).read_text()) == []
