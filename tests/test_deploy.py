"""The files of `deploy/`, and the pages that name them."""

import argparse
import configparser
import re
import shlex
from pathlib import Path

import yaml

from dpfl_lightning.commands.node import _flags

ROOT = Path(__file__).parents[1]


def test_files_to_start_a_node_from_are_valid_and_on_a_page():
    pages = "".join((ROOT / "docs" / "howto" / f"{name}.md").read_text() for name in ("federation", "operate"))
    for file in sorted((ROOT / "deploy").iterdir()):
        assert f"deploy/{file.name}`" in pages, file.name
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # names of systemd have capitals
    unit.read(ROOT / "deploy" / "dpfl-node@.service")
    node = yaml.safe_load((ROOT / "deploy" / "node.compose.yaml").read_text())["services"]["node"]
    assert node["network_mode"] == "none" and unit["Service"]["PrivateNetwork"] == "yes"
    parser = argparse.ArgumentParser(exit_on_error=False)
    _flags(parser)
    for words in (shlex.split(unit["Service"]["ExecStart"])[2:], node["command"]):
        assert parser.parse_args(words).verb == "serve" and parser.parse_args(words).slot == 60


def test_whatever_starts_mlflow_turns_its_usage_reports_off():
    off = "MLFLOW_DISABLE_TELEMETRY"
    pages = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "dpfl_lightning").rglob("*.py")),
    ]
    starts = [
        line for page in pages for line in page.read_text().splitlines() if re.search(r"\bmlflow (ui|se|mo)", line)
    ]
    assert len(starts) == 4 and [line for line in starts if f"{off}=true mlflow" not in line] == []
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert services["mlflow"]["entrypoint"] == ["mlflow"] and services["mlflow"]["environment"][off] == "true"
    assert re.search(rf"^ENV (.*\\\n)*    {off}=true", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
