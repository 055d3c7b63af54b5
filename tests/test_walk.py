"""The walk of one private gradient on the page of the architecture is what runs."""

import re
import subprocess
import sys

import pytest
from rooms import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
WALK, OF_EPSILON = (
    PAGE.split(f"## The walk of one {what}")[1].split("\n## ")[0] for what in ("private gradient", "epsilon")
)


def files_of(walk: str) -> list[str]:
    """The files of a table, in its order."""
    rows = [line for line in walk.splitlines() if line.startswith("| `")]
    return re.findall(r"`([\w/]+\.py)`", " ".join(row.split(" | ")[0] for row in rows))


@pytest.mark.e2e
def test_the_walk_on_the_page_is_what_runs():
    ran = {}
    for engine in ("serial", "fast"):
        command = [sys.executable, "tests/walk.py", engine]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        *ran[engine], _ = done.stdout.splitlines()
    files = files_of(WALK)
    assert len(files) <= 25 and set(files) <= set(ran["serial"])
    assert f"{len(ran['serial'])} with `serial`, {len(ran['fast'])} with `fast`" in WALK


@pytest.mark.e2e
def test_the_walk_of_an_epsilon_is_what_runs():
    command = [sys.executable, "tests/walk.py", "epsilon"]
    *ran, _ = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = files_of(OF_EPSILON)
    assert len(files) <= 15 and set(files) <= set(ran)
