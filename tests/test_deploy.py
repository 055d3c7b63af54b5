"""The files of `deploy/`, and the pages that name them."""

import argparse
import configparser
import shlex
from pathlib import Path

import yaml

from dpfl_lightning.node import _flags

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
