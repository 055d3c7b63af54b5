"""A distilled set by where it lies: a folder, or a run in MLflow."""

from __future__ import annotations

from pathlib import Path

from dpfl_lightning.strategies.distillation.artefact import CARD, TENSORS, DistilledSet

_RUN = "runs:/"


def load_distilled(source: str | Path, uri: str | None = None) -> DistilledSet:
    """The set of a folder, or of an MLflow run as `runs:/<run id>`.

    Args:
        source: where it lies.
        uri: MLflow server or store; None is as for `fit`: MLFLOW_TRACKING_URI, else an SQLite file.

    Raises:
        UserError: there is none, it is damaged, or the store does not answer.
    """
    if not str(source).startswith(_RUN):
        return DistilledSet.load(source)
    from dpfl_lightning.reporting.mlflow import downloaded  # imports MLflow

    with downloaded(str(source).removeprefix(_RUN), (TENSORS, CARD), uri) as folder:
        return DistilledSet.load(folder)
