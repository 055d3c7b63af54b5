"""Every example runs as it stands, learns, saves its figure, and is short; journeys count their lines."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from experiments.journeys.__main__ import CONTESTANTS, JOURNEYS, PAGE, script, user_lines

ROOT = Path(__file__).parents[1]
HELPERS = {"example_data", "example_pretrained", "figure"}
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem not in HELPERS)
FOLDER, REQUIREMENTS = "TEST_SUITES", "tests/zoo/requirements.txt"  # of packages that some examples need
#: accuracies or Dice scores on the test set that docs state, and how far noise moves them
SCORES = {
    "tabular": (0.98, 0.05),
    "lightning_module": (0.82, 0.08),
    "text_embedding": (0.68, 0.08),
    "text_lora": (0.77, 0.05),
    "vision_transformer": (0.73, 0.07),
    "segmentation": (0.90, 0.05),
    "series": (0.93, 0.05),
    "entity_embeddings": (0.86, 0.05),
    "distilled_set": (0.89, 0.06),
    "own_strategy": (0.59, 0.02),  # its noise has a key
}


def test_examples_are_short_and_listed():
    table = (ROOT / "examples" / "README.md").read_text()
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) < 60, path.name
        assert f"[{path.name}]({path.name})" in table and f"({path.stem}.png)" in table, path.name
        assert (ROOT / "examples" / f"{path.stem}.png").is_file(), path.name
    assert {path.stem for path in EXAMPLES} == set(SCORES)


def test_lines_of_user_code(tmp_path):
    (path := tmp_path / "script.py").write_text(
        '"""Doc.\n\nMore."""\n\n# why\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """Doc."""\n    return x\n'
    )
    assert user_lines(path) == 5
    page = PAGE.read_text()
    for journey, title in JOURNEYS.items():
        for name in CONTESTANTS:
            assert f"| {title} | {name} | {user_lines(script(journey, name))} |" in page, (journey, name)


def packages(path, site):
    """Make the packages of an example's docstring importable from a folder; skip the test if one is missing.

    PyPI's torchvision does not fit every torch, and no example needs it: it is left out.
    """
    stated = re.search(r"`pip install ([^`]+)`", path.read_text())
    folder = os.environ.get(FOLDER)
    for item in Path(folder).iterdir() if folder and stated else ():
        if not item.name.startswith("torchvision"):
            (site / item.name).symlink_to(item.absolute())
    for name in stated[1].split() if stated else ():
        if not (site / name).exists() and find_spec(name) is None:
            command = f"pip install --no-deps --target FOLDER -r {REQUIREMENTS}"
            pytest.skip(f"{name} is not installed: {command}, and set {FOLDER}=FOLDER")


@pytest.mark.e2e
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, tmp_path):
    (site := tmp_path / "site").mkdir()
    packages(path, site)
    command = [sys.executable, str(path), "figure.png"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{site}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    expected, tolerance = SCORES[path.stem]
    score = float(re.findall(r"final (?:accuracy|dice) (\d\.\d+)", done.stdout)[-1])
    assert score == pytest.approx(expected, abs=tolerance)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    spent = re.findall(r"epsilon (\d+\.\d+) of (\d+\.\d+)", done.stdout)
    assert spent and all(0.9 * float(budget) <= float(epsilon) <= float(budget) for epsilon, budget in spent)
