"""The blocks of docs/howto/federation.md run one after the other, with fewer rounds; the files of `deploy/`."""

import argparse
import configparser
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dpfl_lightning.node import _flags

ROOT = Path(__file__).parents[1]


@pytest.mark.e2e
def test_three_sites_on_one_machine(tmp_path):
    page = (ROOT / "docs" / "howto" / "federation.md").read_text()
    script = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    script = script.replace("rounds: 10", "rounds: 2\ntracking: null")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "dpfl"
    program.write_text(f"#!{sys.executable}\nfrom dpfl_lightning.__main__ import main\nraise SystemExit(main())\n")
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    whole = f"set -e\ntrap 'kill $(jobs -p); wait' EXIT\n{script}"
    done = subprocess.run(["bash", "-c", whole], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "epsilon 1 of 3 and delta" in done.stdout and "1 plan verified" in done.stdout, done.stdout + done.stderr
    assert "The chain is intact" in done.stdout and (tmp_path / "runs" / "sites" / "model.pt").is_file()
    assert done.stderr.count("stopped by SIGTERM") == 3 and "error" not in done.stderr


def test_files_to_start_a_node_from_are_valid_and_on_the_page():
    page = (ROOT / "docs" / "howto" / "federation.md").read_text()
    for file in sorted((ROOT / "deploy").iterdir()):
        assert f"{file.name}`" in page, file.name
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # names of systemd have capitals
    unit.read(ROOT / "deploy" / "dpfl-node@.service")
    node = yaml.safe_load((ROOT / "deploy" / "node.compose.yaml").read_text())["services"]["node"]
    assert node["network_mode"] == "none" and unit["Service"]["PrivateNetwork"] == "yes"
    parser = argparse.ArgumentParser(exit_on_error=False)
    _flags(parser)
    for words in (shlex.split(unit["Service"]["ExecStart"])[2:], node["command"]):
        assert parser.parse_args(words).verb == "serve" and parser.parse_args(words).slot == 60
