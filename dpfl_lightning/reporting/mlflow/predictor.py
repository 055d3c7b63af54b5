"""What MLflow's `pyfunc` calls to predict by a model of a run, which is a file of safetensors."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpfl_lightning.models.saved import load_model


class Predictor:
    def __init__(self, path: Path) -> None:
        self._net = load_model(path)

    def predict(self, inputs: Any, params: dict[str, Any] | None = None) -> Any:
        """Return outputs `[B, ...]` for inputs `[B, *X]`: a table for a table, else an array."""
        is_table = hasattr(inputs, "to_numpy")
        batch = torch.tensor(inputs.to_numpy(dtype=np.float32) if is_table else np.asarray(inputs))
        with torch.no_grad():
            output = self._net(batch).numpy()
        return type(inputs)(output, index=inputs.index) if is_table else output


def _load_pyfunc(path: str) -> Predictor:
    return Predictor(Path(path))
