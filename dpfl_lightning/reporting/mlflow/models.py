"""Trained models as MLflow models, which can be loaded, used for prediction and served."""

import copy
import logging
import shutil
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric
from mlflow.models import Model as ModelFile
from mlflow.models import ModelSignature, infer_signature
from mlflow.types import ColSpec, Schema
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpfl_lightning.config.reading import read_safetensors
from dpfl_lightning.errors import in_one_line, warn_user
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.models.model import arguments_of
from dpfl_lightning.models.saved import is_by_name, load_model
from dpfl_lightning.privacy.clipping.inputs import Inputs
from dpfl_lightning.reporting.mlflow.store import Store
from dpfl_lightning.runtime.files import SUFFIX

FOLDER = "mlflow"  # in the folder of the run
LOADER = "dpfl_lightning.reporting.mlflow.predictor"
_MOST_MODELS = 10  # more models, such as one for each client, are only files, and their mean is a model
_MOST_FROZEN = 10_000_000  # bytes
for chatter in ("mlflow.pytorch", "mlflow.models.model", "mlflow.types.utils", "mlflow.utils.requirements_utils"):
    logging.getLogger(chatter).setLevel(logging.ERROR)  # advice about pickles and missing requirements


def save_models(view: View, folder: Path, pickles: bool = False) -> None:
    """Write each final model to `folder` as an MLflow model, for `send_models`; a failure is a warning.

    It is the file of safetensors, which `load_model` reads. A model that the package has by name also predicts by
    MLflow's `pyfunc`, from one tensor, or from a table whose columns are named by `Facts.features`, to one tensor.

    With `pickles`, it is a pickle for `mlflow.pytorch.load_model`: loading it runs whatever code is in the file. Then
    one with large frozen parameters is not written.
    """
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    frozen = sum(one.nbytes for one in view.module.net.parameters() if not one.requires_grad)
    if pickles and frozen > _MOST_FROZEN:
        warn_user(f"MLflow gets the trained parameters only: the frozen ones have {frozen / 1e6:,.0f} MB")
        return
    files = sorted(folder.glob(f"model*{SUFFIX}"), key=lambda path: (len(path.name), path.name))
    try:
        for file in files if len(files) <= _MOST_MODELS else [file for file in files if file.stem == "model"]:
            _save(file, view, folder / FOLDER / file.stem, pickles)
    except Exception as error:  # a model may not be picklable
        warn_user(f"MLflow did not get the model ({in_one_line(error)}); its parameters are in {folder}")


def _save(file: Path, view: View, path: Path, pickles: bool) -> None:
    code, hour = read_safetensors(file)[1], datetime.now(UTC).replace(minute=0, second=0, microsecond=0, tzinfo=None)
    model = ModelFile(utc_time_created=hour)  # as the times of private runs
    if pickles:
        import mlflow.pytorch  # takes seconds

        net = load_model(file, copy.deepcopy(view.module.net).cpu())
        libraries = _pinned("mlflow", "torch", "numpy", "cloudpickle")
        given = {**_usage(net, view.facts), "pip_requirements": libraries, "mlflow_model": model}
        # load_model then returns the model itself, for any size of a batch
        mlflow.pytorch.save_model(net, path, serialization_format="pickle", **given)
    elif is_by_name(code) and (usage := _usage(load_model(file), view.facts)):
        import mlflow.pyfunc

        libraries = _pinned("mlflow", "torch", "numpy", "safetensors")
        given = {**usage, "pip_requirements": libraries, "mlflow_model": model}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a table has no example: it would be one of zeros
            mlflow.pyfunc.save_model(path, loader_module=LOADER, data_path=str(file), **given)
    else:
        path.mkdir(parents=True)
        shutil.copyfile(file, path / file.name)
        model.save(str(path / "MLmodel"))


def _pinned(*libraries: str) -> list[str]:
    return [f"{library}=={version(library)}" for library in libraries]


def _usage(net: nn.Module, facts: Facts) -> dict[str, Any]:
    """Return how a model is used, for MLflow; empty if its inputs or outputs are several tensors."""
    example = _example(facts)
    positional, named = arguments_of(net, example)
    with torch.no_grad():
        output = net.eval()(*positional, **named)
    if not (isinstance(example, Tensor) and isinstance(output, Tensor)):
        return {}
    signature = infer_signature(example.numpy(), output.numpy())
    if facts.features is None:
        return {"signature": signature, "input_example": example.numpy()}
    columns = Schema([ColSpec("double", column) for column in facts.features["names"]])
    return {"signature": ModelSignature(columns, signature.outputs), "metadata": {"features": dict(facts.features)}}


def _example(facts: Facts) -> Inputs:
    """Return two records of zeros, of the public shapes and dtypes of the clients' records."""
    if facts.empty_x is None:
        return torch.zeros(2, *facts.input_shape)
    return tree_map(lambda part: torch.zeros(2, *part.shape[1:], dtype=part.dtype), facts.empty_x)


def send_models(
    store: Store, run_id: str, folder: Path, tags: dict[str, str], guarantee: dict[str, str], scores: Sequence[Metric]
) -> None:
    """Log what `save_models` wrote as models `runs:/<run_id>/<name>`; the only model of a run gets its scores.

    The page of a model shows parameters and a description, but no other tags, so parameters state the guarantee.
    """
    paths = sorted((folder / FOLDER).glob("model*"), key=lambda path: (len(path.name), path.name))
    outputs = store.client.get_run(run_id).outputs
    sent = [store.client.get_logged_model(one.model_id) for one in (outputs.model_outputs if outputs else ())]
    known = {(one.name, one.tags.get("ledger_head")) for one in sent if one.status == LoggedModelStatus.READY}
    for path in paths:
        if (path.name, tags["ledger_head"]) not in known:
            model = store.client.create_logged_model(store.experiment_id, path.name, run_id, tags, guarantee)
            store.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, scores[0].step if scores else 0)])
            file = ModelFile.load(path)
            file.artifact_path, file.run_id = model.artifact_location, run_id
            file.model_uuid = file.model_id = model.model_id
            file.save(str(path / "MLmodel"))
            store.client.log_model_artifacts(model.model_id, str(path))
            store.client.finalize_logged_model(model.model_id, "READY")
            of_model = [Metric(one.key, one.value, one.timestamp, one.step, model_id=model.model_id) for one in scores]
            store.log_metrics(run_id, [] if any(folder.glob(f"model_*{SUFFIX}")) else of_model)
