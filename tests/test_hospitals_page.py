"""The blocks of docs/tutorials/hospitals.md run one after the other, with fewer rounds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.e2e
def test_three_hospitals_with_csv_files(tmp_path):
    page = (ROOT / "docs" / "tutorials" / "hospitals.md").read_text()
    script = "\n".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL))
    script = script.replace("rounds: 20", "rounds: 3\ntracking: null").replace(
        "init essen --from essen.csv", "init essen --from essen.csv && cp cork/site.yaml found.yaml"
    )
    script = script.replace("python examples/", f"{sys.executable} {ROOT}/examples/")
    script = script.replace('--privacy.delta 1e-5"', '--privacy.delta 1e-5 --rounds 3"')
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "dpfl"
    program.write_text(f"#!{sys.executable}\nfrom dpfl_lightning.__main__ import main\nraise SystemExit(main())\n")
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    whole = f"set -e\ntrap 'kill $(jobs -p); wait' EXIT\n{script}"
    done = subprocess.run(["bash", "-c", whole], cwd=tmp_path, env=environment, capture_output=True, text=True)
    result = tmp_path / "runs" / "hospitals" / "result.json"
    assert result.is_file() and "error" not in done.stderr, done.stdout + done.stderr
    assert json.loads(result.read_text())["test_metrics"]["auroc"] > 0.6
    for run in ("five", "sites"):
        scores = [json.loads((tmp_path / "runs" / run / f"{name}.json").read_text()) for name in ("cork", "dijon")]
        assert all(one["test_metrics"]["auroc"] > 0.6 for one in scores), run
    reference = re.search(r"AUROC (0\.\d+)$", done.stdout.strip())
    assert reference and float(reference[1]) > 0.71
    assert "died_30d: no, yes in aarhus.csv" in done.stdout and "0, 1 in essen.csv" in done.stdout
    assert "read: {sep: ;, na_values: ['?'], decimal: ','}" in (tmp_path / "found.yaml").read_text()
