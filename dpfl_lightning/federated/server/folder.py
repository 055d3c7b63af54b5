"""The server's files in the output folder of a run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dpfl_lightning.config.yaml_text import dump
from dpfl_lightning.errors import NEW_RUN, UserError
from dpfl_lightning.federated.messages.evaluation import ClientModels
from dpfl_lightning.models.model import Model
from dpfl_lightning.runtime.files import write_atomically, write_json

HISTORY = "metrics.jsonl"  # the curves of the run: one line for each round


class RunFolder:
    """`options.yaml` and `checkpoint.pt`, after the run also `result.json`, `guarantees.json` and `model.pt`.

    **Privacy** `checkpoint.pt` contains `Clients.state_dict`, which is for the clients only. Its mode is 0600.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.options, self.checkpoint = path, path / "options.yaml", path / "checkpoint.pt"

    @classmethod
    def claim(cls, path: Path, options: Mapping[str, Any]) -> RunFolder:
        """Create the folder of a new run. Raises UserError if it is not empty; nothing in it is changed then."""
        folder = cls(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(
                f"`output_dir` must be new or empty, got {str(path)!r}, which holds another run or other files. "
                f"Resume it with --resume {path}, or choose another --output_dir."
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"`output_dir` must be writable, got {str(path)!r}: {error.strerror}.") from None
        folder.write_options(options)
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Open the folder of a run that was begun."""
        folder = cls(path)
        if not folder.options.is_file():
            raise UserError(
                f"`resume` must be the folder of a run, got {str(path)!r}, which has no options.yaml. "
                "Runs are listed under runs/; start a new one with --config."
            )
        return folder

    def write_options(self, options: Mapping[str, Any]) -> None:
        write_atomically(self.options, lambda partial: partial.write_text(dump(options)))

    def save_checkpoint(self, snapshot: dict[str, Any]) -> None:
        write_atomically(self.checkpoint, lambda partial: torch.save(snapshot, partial), private=True)

    def load_checkpoint(self, device: torch.device) -> dict[str, Any] | None:
        """Load the last complete round; None before the first checkpoint. UserError if the file is damaged."""
        if not self.checkpoint.is_file():
            return None
        try:
            return _Checkpoint(self.checkpoint, torch.load(self.checkpoint, map_location=device, weights_only=True))
        except (RuntimeError, EOFError, pickle.UnpicklingError):
            raise UserError(
                f"`{self.checkpoint}` must be a checkpoint of this program, got a damaged file. {NEW_RUN}"
            ) from None

    def save_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_json(self.path / name, content)

    def save_models(self, module: Model, final_models: ClientModels) -> None:
        """Write the state dict of the net with the model: `model.pt`, or `model_<k>.pt` for each of several."""
        for row, model in enumerate(final_models.models):
            tensors = {**module.net.state_dict(), **module.unflatten(model)}
            state = {name: value.cpu().clone() for name, value in tensors.items()}
            name = "model.pt" if len(final_models.models) == 1 else f"model_{row}.pt"
            write_atomically(self.path / name, lambda partial, state=state: torch.save(state, partial))


class _Checkpoint(dict[str, Any]):
    """Raises UserError for a missing key, which another version would have written."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self._path = path

    def __missing__(self, name: str) -> Any:
        raise UserError(f"`{self._path}` must hold {name!r}, got one from another version of this program. {NEW_RUN}")
