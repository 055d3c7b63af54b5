"""Loads a distilled set from a folder or from a run in MLflow."""

from __future__ import annotations

from pathlib import Path

from dpfl_lightning.strategies.distillation.artefact import CARD, TENSORS, DistilledSet

_RUN = "runs:/"


def load_distilled(source: str | Path, uri: str | None = None) -> DistilledSet:
    """Load a set from a folder, or from an MLflow run given as `runs:/<run id>`.

    Args:
        source: folder or run.
        uri: MLflow server or store; None selects it as `fit` does: MLFLOW_TRACKING_URI, else an SQLite file.

    Raises:
        UserError: there is no set, it is damaged, or the store does not answer.
    """
    if not str(source).startswith(_RUN):
        return DistilledSet.load(source)
    from dpfl_lightning.reporting.mlflow import downloaded  # imports MLflow

    with downloaded(str(source).removeprefix(_RUN), (TENSORS, CARD), uri) as folder:
        return DistilledSet.load(folder)
