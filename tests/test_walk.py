"""The walk of one private gradient on the page of the architecture is what runs."""

import re
import subprocess
import sys

import pytest
from rooms import ROOT

WALK = (ROOT / "docs" / "architecture.md").read_text().split("## The walk of one private gradient")[1].split("\n## ")[0]


@pytest.mark.e2e
def test_the_walk_on_the_page_is_what_runs():
    ran = {}
    for engine in ("serial", "fast"):
        command = [sys.executable, "tests/walk.py", engine]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        *ran[engine], _ = done.stdout.splitlines()
    rows = [line for line in WALK.splitlines() if line.startswith("| `")]
    files = re.findall(r"`([\w/]+\.py)`", " ".join(row.split(" | ")[0] for row in rows))
    assert len(files) <= 25 and set(files) <= set(ran["serial"])
    assert f"{len(ran['serial'])} with `serial`, {len(ran['fast'])} with `fast`" in WALK
