"""The blocks of docs/deployment.md run one after the other, with fewer rounds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.e2e
def test_three_sites_on_one_machine(tmp_path):
    page = (ROOT / "docs" / "deployment.md").read_text()
    script = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    assert script.count("--config digits") == 2
    script = script.replace("--config digits", "--config digits --rounds 2 --tracking null")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "dpfl"
    program.write_text(f"#!{sys.executable}\nfrom dpfl_lightning.__main__ import main\nraise SystemExit(main())\n")
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    whole = f"set -e\ntrap 'kill $(jobs -p); wait' EXIT\n{script}"
    done = subprocess.run(["bash", "-c", whole], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "epsilon 2 of 3 and delta" in done.stdout and "1 plan verified" in done.stdout, done.stdout + done.stderr
    assert "The chain is intact" in done.stdout and (tmp_path / "runs" / "sites" / "model.pt").is_file()
    assert done.stderr.count("stopped by SIGTERM") == 3 and "error" not in done.stderr
