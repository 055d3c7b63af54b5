"""Logs trained nets as MLflow models, which can be loaded, used for prediction and served."""

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from mlflow.entities import LoggedModelOutput, Metric
from mlflow.models import Model as ModelFile
from mlflow.models import ModelSignature, infer_signature
from mlflow.types import ColSpec, Schema
from torch import Tensor, nn

from dpfl_lightning.privacy.clipping.inputs import Inputs, arguments
from dpfl_lightning.reporting.mlflow.store import Store

_LIBRARIES = ("mlflow", "torch", "numpy", "cloudpickle")
_CHATTER = ("mlflow.pytorch", "mlflow.models.model", "mlflow.types.utils", "mlflow.utils.requirements_utils")


def log_model(
    store: Store,
    run_id: str,
    name: str,
    net: nn.Module,
    example: Inputs,
    scores: Sequence[Metric],
    step: int,
    features: Mapping[str, Any] | None = None,
) -> None:
    """Log a net as the model `runs:/<run_id>/<name>`, and its scores, which the run has already.

    `example` is an input of the net that is made up: no record of a client may be in it. Loading needs the class of
    the net: dpfl_lightning, or the user's module, must be installed. MLflow's `pyfunc` predicts from one tensor, or
    from a table whose columns are named by `features` (of `Facts`), to one tensor; other nets are logged without a
    signature, for `mlflow.pytorch.load_model`.
    """
    import mlflow.pytorch  # takes seconds

    positional, named = arguments(example)
    with torch.no_grad():
        output = net.eval()(*positional, **named)
    usage: dict[str, Any] = {}
    if isinstance(example, Tensor) and isinstance(output, Tensor):
        signature = infer_signature(example.numpy(), output.numpy())
        usage = {"signature": signature, "input_example": example.numpy()}
        if features is not None:
            columns = Schema([ColSpec("double", column) for column in features["names"]])
            usage = {"signature": ModelSignature(columns, signature.outputs), "metadata": {"features": dict(features)}}
    model = store.client.create_logged_model(store.experiment_id, name, run_id)
    store.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0, tzinfo=None)  # as the times of private runs
    file = ModelFile(model.artifact_location, run_id, hour, model_uuid=model.model_id, model_id=model.model_id)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "model"
        mlflow.pytorch.save_model(
            net,
            path,
            mlflow_model=file,
            **usage,
            pip_requirements=[f"{library}=={version(library)}" for library in _LIBRARIES],
            serialization_format="pickle",  # load_model then returns the net itself, for any size of a batch
        )
        store.client.log_model_artifacts(model.model_id, str(path))
    store.client.finalize_logged_model(model.model_id, "READY")
    of_model = [Metric(one.key, one.value, one.timestamp, one.step, model_id=model.model_id) for one in scores]
    store.log_metrics(run_id, of_model)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence MLflow's advice about pickles and missing requirements."""
    loggers = [logging.getLogger(name) for name in _CHATTER]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
