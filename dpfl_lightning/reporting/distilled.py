"""Loads a distilled set from a folder or from a run in MLflow."""

from pathlib import Path

from dpfl_lightning.strategies.distillation.artefact import CARD, TENSORS, DistilledSet


def load_distilled(source: str | Path, uri: str | None = None) -> DistilledSet:
    """Load a set from a folder, or from an MLflow run `runs:/<run id>` in the store `uri` (see `store_uri`).

    Raises UserError if there is no set, it is damaged, or the store does not answer.
    """
    if not str(source).startswith("runs:/"):
        return DistilledSet.load(source)
    from dpfl_lightning.reporting.mlflow import downloaded  # imports MLflow

    with downloaded(str(source).removeprefix("runs:/"), (TENSORS, CARD), uri) as folder:
        return DistilledSet.load(folder)
