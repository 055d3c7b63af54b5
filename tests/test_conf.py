"""Every file in conf/ runs: a shrunken copy, one round, through the real command."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from dpfl_lightning.commands.evaluate import main as evaluate
from dpfl_lightning.commands.fit import main as fit
from dpfl_lightning.commands.ledger import main as verify

pytestmark = pytest.mark.e2e

CONF = Path(__file__).parents[1] / "conf"
FILES = sorted(CONF.glob("*.yaml"))


@pytest.fixture(scope="session")
def small_fashion(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fashion")
    write_fashion(folder)
    return folder


def write_fashion(folder: Path) -> None:
    """Random images in the format of Fashion-MNIST: 3,200 to train on and 200 to test."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 3200), ("t10k", 200)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes(), 1))


def shrunken(path: Path, small_fashion: Path) -> list[str]:
    """Overrides that make any conf file of ours take a second."""
    argv = ["--config", str(path), "--rounds", "1", "--tracking", "null"]
    if "distillation" in path.name:
        few = {"evaluation_epochs": 2, "net_epochs": 1, "image_steps": 2}
        argv += [word for key, value in few.items() for word in (f"--strategies.distillation.{key}", str(value))]
    if path.stem == "feature_means":
        argv += ["--strategies.feature_means.evaluation_epochs", "2", "--strategies.feature_means.image_steps", "2"]
    if "name: digits" in path.read_text():
        return argv
    argv += ["--data.folder", str(small_fashion), "--data.records_per_client", "140", "--data.public_records", "100"]
    for key in ("held_out_per_client", "test_per_client"):
        argv += [f"--data.{key}", "5"] if key in path.read_text() else []
    if "groups" not in path.read_text():
        argv += ["--clients.count", "20"]
    return argv


@pytest.mark.filterwarnings("ignore:`privacy.delta` should be below")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_conf_runs(path, small_fashion, tmp_path, capsys):
    argv = shrunken(path, small_fashion)
    assert fit([*argv, "--output_dir", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["rounds"] == 1 and 0 <= result["test_accuracy"] <= 1
    assert verify([str(tmp_path / "run")]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert evaluate([str(tmp_path / "run"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["test_accuracy"] == pytest.approx(result["test_accuracy"])
    assert [c["accuracy"] for c in report["clients"]] == pytest.approx([c["accuracy"] for c in result["clients"]])
