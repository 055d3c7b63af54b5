"""Lightning loggers beside MLflow get the lines of metrics.jsonl."""

import csv
from pathlib import Path

import pytest
from fakes import a_report, a_result, a_view
from lightning.pytorch.loggers import CSVLogger

from dpfl_lightning.commands.fit import main as fit
from dpfl_lightning.reporting.curves import Curves
from dpfl_lightning.reporting.loggers import Loggers

CSV = "lightning.pytorch.loggers.CSVLogger"


def play(loggers, view, rounds):
    """A run whose curves are in its folder before its loggers get them."""
    for callback in (curves := Curves(), loggers):
        callback.on_fit_start(view)
    for round in rounds:
        for callback in (curves, loggers):
            callback.on_round_end(view, a_report(view, round))
    loggers.on_fit_end(view, a_result(view))


def test_a_logger_has_the_parameters_and_the_curves_of_all_rounds(tmp_path):
    logger = CSVLogger(tmp_path, name="csv")
    play(Loggers([logger], per_client=True), a_view(tmp_path), (1, 2))
    rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
    assert [(row["step"], row["test_accuracy"]) for row in rows] == [("1", "0.05"), ("2", "0.1")]
    assert float(rows[1]["val_accuracy/02"]) == pytest.approx(0.102)
    assert rows[1]["headline/test_accuracy"] == "0.1", "TensorBoard shows this group before train_..."
    assert "num_params: '1234'" in Path(logger.log_dir, "hparams.yaml").read_text()


def test_a_logger_that_fails_is_left_out(tmp_path, monkeypatch):
    broken, other = CSVLogger(tmp_path, name="broken"), CSVLogger(tmp_path, name="other")
    monkeypatch.setattr(broken, "log_metrics", lambda *args: 1 / 0)
    with pytest.warns(UserWarning, match="CSVLogger failed; training continues without it") as warned:
        play(Loggers([broken, other]), a_view(tmp_path), (1, 2))
    assert len(warned) == 1 and len(Path(other.log_dir, "metrics.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "logger, words",
    [
        (f"{{class_path: {CSV[:-1]}}}", "`tracking.loggers.0.class_path` must be importable"),
        ("{class_path: torch.nn.Linear}", "`tracking.loggers.0.class_path` must be a class that derives from Logger"),
        (
            "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {nam: a}}",
            "`tracking.loggers.0.init_args.nam`",
        ),
        ("{name: csv}", "`tracking.loggers.0` must have a class_path"),
    ],
)
def test_a_wrong_logger_is_refused_before_anything_is_written(logger, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert fit(["--config", "digits", "--tracking.loggers", f"[{logger}]", "--output_dir", "run"]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())
