"""The public names, and what importing them must not cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dpfl_lightning


def test_every_public_name_is_there():
    for name in dpfl_lightning._HOME:
        assert getattr(dpfl_lightning, name).__name__ == name
        assert name in dir(dpfl_lightning)
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        dpfl_lightning.Nope  # noqa: B018


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("dpfl_lightning", {"torch", "lightning", "mlflow", "optuna", "matplotlib"}),
        ("dpfl_lightning.federated.loop", {"mlflow", "optuna"}),
    ],
)
def test_importing_is_cheap(imported, absent):
    script = f"import sys, {imported}; print(*({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
