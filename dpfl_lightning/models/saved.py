"""A trained model as safetensors: tensors and the code that can load them. Nothing in such a file is executed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dpfl_lightning
from dpfl_lightning.config.public import published
from dpfl_lightning.config.reading import expecting, read_safetensors
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.models import OF_LOSS, named
from dpfl_lightning.models.model import has_frozen, load_trained

_BY_NAME = "dpfl_lightning.models.named"


def code_of(net: nn.Module, model: Mapping[str, Any], input_shape: Any, num_classes: int) -> dict[str, Any]:
    """Return what makes a model: a class path, its public arguments, and versions.

    `model` is the section of the options, empty if the model was built in Python.
    """
    given: Any = model.get("init_args")
    if "name" in model:
        of_model = {key: value for key, value in model.items() if key not in OF_LOSS}
        path, given = _BY_NAME, {"model": of_model, "input_shape": input_shape, "num_classes": num_classes}
    else:
        path = model.get("class_path") or f"{type(net).__module__}.{type(net).__qualname__}"
    return {
        "class_path": path,
        "init_args": published(given),
        "frozen": has_frozen(net),
        "dpfl_lightning": dpfl_lightning.__version__,
        "torch": torch.__version__,
    }


def is_by_name(code: Mapping[str, Any]) -> bool:
    """Return whether `load_model` makes the model itself."""
    return code.get("class_path") == _BY_NAME and not code.get("frozen")


def load_model(path: str | Path, net: nn.Module | None = None) -> nn.Module:
    """Load a trained model, in evaluation mode, from `model.safetensors` of a run.

    A model that this package has by name is made here. Any other is a class of yours, which the file names and never
    imports: make it, and pass it as `net`, whose parameters are replaced.

    Raises UserError if the file is damaged, or the model has other parameters.
    """
    path = Path(path)
    tensors, code = read_safetensors(path)
    if net is None:
        made_by = f"{code.get('class_path')} with the arguments {code.get('init_args')}"
        advice = f"Its model was made by {made_by} and version {code.get('dpfl_lightning')}: make it, and pass it."
        require(is_by_name(code), "net", "be given for this file", None, advice)
        with expecting(path, "name the model as a run does"):
            net = named(**code["init_args"])
    try:
        load_trained(net, tensors)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(f"`net` must have the parameters of {path}, got others: {reason}.") from None
    return net.eval()
