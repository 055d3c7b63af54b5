"""Every example runs as it stands, learns, saves its figure, and is short; journeys count their lines."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.journeys.__main__ import CONTESTANTS, JOURNEYS, script, user_lines

ROOT = Path(__file__).parents[1]
HELPERS = {"example_data", "example_transformer", "figure"}
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem not in HELPERS)
#: test accuracies that docs state, and how far noise moves them
ACCURACIES = {
    "tabular": (0.98, 0.05),
    "lightning_module": (0.82, 0.08),
    "text_embedding": (0.77, 0.08),
    "text_lora": (0.78, 0.05),
    "distilled_set": (0.89, 0.06),
    "own_strategy": (0.59, 0.02),  # its noise has a key
}


def test_examples_are_short_and_listed():
    table = (ROOT / "examples" / "README.md").read_text()
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) < 60, path.name
        assert f"[{path.name}]({path.name})" in table and f"({path.stem}.png)" in table, path.name
        assert (ROOT / "examples" / f"{path.stem}.png").is_file(), path.name
    assert {path.stem for path in EXAMPLES} == set(ACCURACIES)


def test_lines_of_user_code(tmp_path):
    (path := tmp_path / "script.py").write_text(
        '"""Doc.\n\nMore."""\n\n# why\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """Doc."""\n    return x\n'
    )
    assert user_lines(path) == 5
    page = (ROOT / "docs" / "journeys.md").read_text()
    for journey, title in JOURNEYS.items():
        for name in CONTESTANTS:
            assert f"| {title} | {name} | {user_lines(script(journey, name))} |" in page, (journey, name)


@pytest.mark.e2e
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, tmp_path):
    command = [sys.executable, str(path), "figure.png"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    expected, tolerance = ACCURACIES[path.stem]
    accuracy = float(re.findall(r"final accuracy (\d\.\d+)", done.stdout)[-1])
    assert accuracy == pytest.approx(expected, abs=tolerance)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    spent = re.findall(r"epsilon (\d+\.\d+) of (\d+\.\d+)", done.stdout)
    assert spent and all(0.9 * float(budget) <= float(epsilon) <= float(budget) for epsilon, budget in spent)
