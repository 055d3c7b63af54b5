"""The public names, and what importing them must not cost."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dpfl_lightning
from dpfl_lightning.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[1]


def test_every_public_name_is_there():
    for name in dpfl_lightning._HOME:
        assert getattr(dpfl_lightning, name).__name__ == name
        assert name in dir(dpfl_lightning)
    stub = Path(dpfl_lightning.__file__).with_suffix(".pyi").read_text()
    homes = re.findall(r"^from dpfl_lightning\.(\S+) import (\w+) as \2$", stub, re.MULTILINE)
    assert {name: home for home, name in homes} == dpfl_lightning._HOME, "type checkers see the same names"
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        dpfl_lightning.Nope  # noqa: B018


def test_the_page_says_what_each_package_is_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        one for name, some in project["optional-dependencies"].items() if name not in ("docs", "test") for one in some
    ]
    needed = {re.match(r"[\w-]+", one)[0].lower() for one in (*project["dependencies"], *extras)} - {"dpfl_lightning"}
    table = (ROOT / "docs/architecture.md").read_text().partition("## Packages")[2].partition("## Imports")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])} == needed


def test_the_commands_are_listed_with_the_version(capsys):
    files = {path.stem for path in (Path(dpfl_lightning.__file__).parent / "commands").glob("*.py")}
    assert set(COMMANDS) == files - {"__init__"}
    with pytest.raises(SystemExit):
        main([])
    text = capsys.readouterr().out
    assert dpfl_lightning.__version__ in text and max(map(len, text.splitlines())) <= 80
    for name in COMMANDS:
        assert re.search(rf"^    {name} +\w.{{20,}}$", text, re.MULTILINE), name
    assert main(["fti"]) == 2
    assert "got 'fti'. Did you mean `fit`?" in capsys.readouterr().err


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("dpfl_lightning", {"torch", "lightning", "mlflow", "optuna", "matplotlib"}),
        ("dpfl_lightning.build", {"mlflow", "optuna"}),
        ("dpfl_lightning.commands.plan", {"torch", "lightning", "mlflow", "opacus"}),
        ("dpfl_lightning.commands.audit", {"torch", "lightning", "mlflow", "opacus"}),
    ],
)
def test_importing_is_cheap(imported, absent):
    script = f"import sys, {imported}; print(*({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


@pytest.mark.e2e
@pytest.mark.parametrize(("own", "off"), [(None, True), ("false", False)])
def test_mlflow_reports_no_usage_unless_the_user_wants_it(own, off):
    """Whichever module imports it first. MLflow is silent in tests and CI, so the process knows of neither."""
    names = ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "PYTEST_CURRENT_TEST", "CI", "GITHUB_ACTIONS", "GITLAB_CI")
    env = {name: value for name, value in os.environ.items() if name not in names}
    script = (
        "import dpfl_lightning.reporting.mlflow.models, mlflow.telemetry as t; print(t.get_telemetry_client() is None)"
    )
    env |= {"PYTHONPATH": str(ROOT)} | ({} if own is None else {"MLFLOW_DISABLE_TELEMETRY": own})
    done = subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(off)]


@pytest.mark.e2e
def test_a_wheel_holds_types_presets_and_the_console_command(tmp_path):
    """Installed from a wheel into an empty folder: `dpfl fit --config digits` finds its preset there."""
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    source = tmp_path / "source"
    kept = shutil.ignore_patterns(".git", ".venv", "runs", "*.db", "results", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, symlinks=True, ignore=kept)
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "installed", source], check=True)
    installed = tmp_path / "installed" / "dpfl_lightning"
    assert (installed / "py.typed").is_file() and (installed / "__init__.pyi").is_file()
    assert not (tmp_path / "installed" / "experiments").exists()
    assert {one.name for one in (installed / "conf").iterdir()} == {one.name for one in (ROOT / "conf").iterdir()}
    script = tmp_path / "installed" / "bin" / "dpfl"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    python = {"env": env, "check": True, "capture_output": True, "text": True}

    def dpfl(*words: str) -> str:
        return subprocess.run([sys.executable, script, *words], cwd=tmp_path, **python).stdout

    assert dpfl("--version") == f"dpfl_lightning {dpfl_lightning.__version__}\n"
    words = [sys.executable, "-m", "dpfl_lightning.fit", "--config", "conf/digits.yaml", "--print_config"]
    by_module = subprocess.run(words, cwd=ROOT, **{**python, "env": None}).stdout
    assert dpfl("fit", "--config", "digits", "--print_config") == by_module
    assert "Wrote config.yaml" in dpfl("init")
    text = dpfl("fit", "--config", "digits", "--config", "config.yaml", "--rounds", "1", "--output_dir", "run")
    assert "dpfl evaluate run: " in text
    words = [*dpfl("evaluate", "run", "--json").splitlines()]
    assert len(words) == 1 and json.loads(words[0])["clients"]


@pytest.mark.e2e
def test_public_names_are_typed():
    code = "from dpfl_lightning import FederatedLoop\nreveal_type(FederatedLoop.run)\nFederatedLoop(rounds='x')"
    words = [sys.executable, "-m", "mypy", "-c", code]
    text = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
    assert 'Revealed type is "def (self: ' in text and "RunResult" in text and 'has incompatible type "str"' in text
