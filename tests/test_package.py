"""The public names, and what importing them must not cost."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpfl_lightning
from dpfl_lightning.__main__ import COMMANDS, main


def test_every_public_name_is_there():
    for name in dpfl_lightning._HOME:
        assert getattr(dpfl_lightning, name).__name__ == name
        assert name in dir(dpfl_lightning)
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        dpfl_lightning.Nope  # noqa: B018


def test_the_commands_are_listed_with_the_version(capsys):
    files = {path.stem for path in Path(dpfl_lightning.__file__).parent.glob("*.py")}
    assert set(COMMANDS) == files - {"__init__", "__main__", "build", "errors"}
    assert main([]) == 0
    said = capsys.readouterr().out
    assert dpfl_lightning.__version__ in said
    for name in COMMANDS:
        assert re.search(rf"^python -m dpfl_lightning\.{name} +\w.{{20,}}$", said, re.MULTILINE), name
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"dpfl_lightning {dpfl_lightning.__version__}\n"
    assert main(["fti"]) == 2
    assert "got 'fti'. Did you mean `python -m dpfl_lightning.fit`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("dpfl_lightning", {"torch", "lightning", "mlflow", "optuna", "matplotlib"}),
        ("dpfl_lightning.build", {"mlflow", "optuna"}),
    ],
)
def test_importing_is_cheap(imported, absent):
    script = f"import sys, {imported}; print(*({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
