"""What importing a node and the core loads, with upper bounds: a site installs and audits this, and nothing else."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from rooms import PACKAGE, ROOT
from test_layers import ASIDE

#: what is imported -> most modules and lines of this package, with little room for the next feature
BOUNDS = {
    "dpfl_lightning": (1, 50),
    "dpfl_lightning.privacy.clipping.checked": (43, 8_000),
    "dpfl_lightning.sites.node.service, dpfl_lightning.sites.node.accept": (166, 29_000),
    "dpfl_lightning.loop": (177, 30_600),
}
#: of extras, or slow: what nobody needs who only imports
NEVER = {"mlflow", "optuna", "sklearn", "sqlalchemy", "pooch", "numba", "opacus", "dp_accounting", "pandas"}
_SCRIPT = """
import json, sys
import {names}
files = {{name: module.__file__ for name, module in sys.modules.items() if getattr(module, "__file__", None)}}
print(json.dumps(files))
"""


def loaded(names: str) -> dict[str, str]:
    """Module name -> file, of all that a process has imported that imports these modules alone."""
    text = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(names=names)], capture_output=True, text=True, check=True
    )
    return json.loads(text.stdout)


@pytest.mark.e2e
@pytest.mark.parametrize("names", BOUNDS)
def test_imports_load_little(names):
    files = loaded(names)
    ours = {name: Path(file) for name, file in files.items() if name.partition(".")[0] == PACKAGE.name}
    lines = sum(len(file.read_text().splitlines()) for file in ours.values())
    modules, most = BOUNDS[names]
    assert len(ours) <= modules and lines <= most, f"{len(ours)} modules, {lines} lines"
    assert not NEVER & {name.partition(".")[0] for name in files}
    assert not [
        name for name in ours if name.removeprefix(f"{PACKAGE.name}.").startswith(tuple(f"{one}." for one in ASIDE))
    ]


#: brought by extras alone
OF_EXTRAS = ("mlflow", "matplotlib", "optuna", "sqlalchemy", "pooch", "shtab", "flwr", "psycopg")


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory):
    """Run a command in an environment that has no extra: links to all other installed packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/*/site-packages")
    for one in Path(sysconfig.get_path("purelib")).iterdir():
        if not one.name.lower().startswith((*OF_EXTRAS, "__editable__", "dpfl")) and one.suffix != ".pth":
            (packages / one.name).symlink_to(one)

    def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
        command = [python, "-m", "dpfl_lightning", *words]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.mark.e2e
@pytest.mark.parametrize("config", ["digits", "distillation"])
def test_a_run_needs_no_extra(config, without_extras, tmp_path):
    words = ["--rounds", "1", "--tracking", "null", "--output_dir", "run"]
    done = without_extras(tmp_path, "fit", "--config", config, *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "run.json").is_file()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fit", "--config", "digits"], "mlflow is not installed. Run pip install 'dpfl_lightning[tracking]'"),
        (["sweep", "--config", str(ROOT / "sweeps" / "nas_digits.yaml")], "is not installed. Run pip install"),
        (["completion", "bash"], "shtab is not installed. Run pip install 'dpfl_lightning[all]'"),
    ],
)
def test_a_missing_extra_is_one_sentence_with_the_command(words, sentence, without_extras, tmp_path):
    done = without_extras(tmp_path, *words)
    text = " ".join(done.stderr.split())
    assert done.returncode == 2 and text.startswith("error: ") and sentence in text, done.stderr
    assert "Traceback" not in done.stderr
