"""ruff and mypy, as a contributor would run them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("tool", ["ruff check .", "ruff format --check .", "mypy dpfl_lightning experiments"])
def test_tool_is_content(tool):
    done = subprocess.run([sys.executable, "-m", *tool.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
