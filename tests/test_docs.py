"""`python -m mkdocs build --strict` builds the site; its reference holds every public name, strategy and option."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpfl_lightning
from dpfl_lightning.__main__ import COMMANDS
from dpfl_lightning.config.options import all_keys
from dpfl_lightning.strategies import STRATEGIES

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs", reason="pip install '.[docs]' brings MkDocs")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "PYTHONPATH": "", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


def page(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text()


def test_the_reference_is_complete(site):
    python, options = page(site, "reference/python"), page(site, "reference/options")
    assert not [name for name in dpfl_lightning._HOME if not re.search(rf'id="dpfl_lightning[\w.]*\.{name}"', python)]
    assert {"run", "client_model"} <= set(re.findall(r'id="[\w.]*FederatedLoop\.(\w+)"', python))
    assert not [key for key in all_keys() if f"<code>{key}</code>" not in options]
    strategies = page(site, "reference/strategies")
    assert not [kind for file, kind in STRATEGIES.values() if f"dpfl_lightning.{file}.{kind}" not in strategies]
    assert not [name for name in COMMANDS if f"dpfl {name}" not in page(site, "reference/commands")]


def test_a_page_loads_nothing_from_other_hosts(site):
    for file in site.rglob("index.html"):
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]* src="(https?:[^"]+)"|<link[^>]* href="(https?:[^"]+)"', file.read_text()
        )
        assert not loaded, file
