"""The blocks of the tutorials run one after the other, as a reader would run them, with fewer rounds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]
FEWER = {"rounds: 20": "rounds: 3"}


def followed(
    page: str, folder: Path, changes: dict[str, str] = FEWER, refusals: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run all blocks of a page in one shell, in a folder that has the examples as a checkout does."""
    (folder / "bin").mkdir()
    for name, program in {"dpfl": ["-m", "dpfl_lightning"], "python": []}.items():
        words = " ".join([sys.executable, *program])
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    (folder / "examples").symlink_to(ROOT / "examples")
    text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text()
    script = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    whole = f"set -e\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n{script}"
    done = subprocess.run(["bash", "-c", whole], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("error") == refusals, done.stdout + done.stderr
    return done


def test_five_hospitals_to_the_risk_of_a_patient(tmp_path):
    changes = {"cat > site.yaml": "cp site.yaml found.yaml\ncat > site.yaml", "--seeds 0,1,2": "--seeds 0"}
    out, five = followed("hospitals", tmp_path, FEWER | changes).stdout, tmp_path / "five"
    assert "died_30d: no, yes in aarhus.csv" in out and "0, 1 in essen.csv" in out
    assert "read: {sep: ;, na_values: ['?'], decimal: ','}" in (five / "found.yaml").read_text()
    assert json.loads((five / "runs" / "hospitals" / "result.json").read_text())["test_metrics"]["auroc"] > 0.6
    assert float(re.search(r"^AUROC (0\.\d+)$", out, re.MULTILINE)[1]) == 0.724
    guarantee = re.sub("<[^>]+>", "", (five / "runs" / "hospitals" / "guarantee.html").read_text())
    assert "at most 2.72 times as likely" in guarantee and "NODE" not in guarantee
    assert "The chain is intact" in out and re.search(r"^risk \d+\.\d%$", out, re.MULTILINE)


def test_three_sites(tmp_path):
    done = followed("sites", tmp_path, refusals=2)
    assert "epsilon 1.5 of 2 and delta" in done.stdout
    assert "1 plan verified" in done.stdout and "The chain is intact" in done.stdout
    assert (tmp_path / "server" / "runs" / "three" / "guarantee.html").is_file()
    assert done.stderr.count("stopped by SIGTERM") == 3


def test_a_rule_and_a_query(tmp_path):
    text = (ROOT / "docs" / "tutorials" / "rule_and_query.md").read_text()
    for name, block in re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.DOTALL):
        with open(tmp_path / name, "a") as file:
            file.write(block)
    run = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, "check": True}
    out = subprocess.run([sys.executable, "try_rules.py"], **run, capture_output=True, text=True).stdout
    printed = [line for line in out.splitlines() if re.match(r"\w+: ", line)]
    assert len(printed) == 3 and all(f"`{line}`" in text for line in printed), printed
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "own.yaml").write_text(block)
    program = [sys.executable, "-m", "dpfl_lightning", "fit", "--config", "digits", "--config", "own.yaml"]
    subprocess.run([*program, "--rounds", "2", "--tracking", "null", "--output_dir", "run"], **run)
    assert '"labels"' in (tmp_path / "run" / "ledger.jsonl").read_text()
