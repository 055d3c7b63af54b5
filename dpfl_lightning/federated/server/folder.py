"""The output folder of one run: who owns it, what lies in it, and writes that a crash cannot tear."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dpfl_lightning.config.yaml_text import dump
from dpfl_lightning.errors import NEW_RUN, UserError
from dpfl_lightning.federated.messages.evaluation import ClientModels
from dpfl_lightning.models.model import Model
from dpfl_lightning.runtime.files import write_atomically


class RunFolder:
    """The server's files: `options.yaml`, `checkpoint.pt`; then `result.json`, `guarantees.json`, `model.pt`.

    **Privacy** `checkpoint.pt` holds what `Clients.state_dict` returns: it is for the clients alone and has mode 0600.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.options = path / "options.yaml"
        self.checkpoint = path / "checkpoint.pt"

    @classmethod
    def claim(cls, path: str | Path, options: Mapping[str, Any]) -> RunFolder:
        """A new folder with the run's options.

        Raises:
            UserError: the folder holds something already; nothing in it is touched.
        """
        folder = cls(Path(path))
        if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
            raise UserError(
                f"`output_dir` must be new or empty, got {str(path)!r}, which holds another run or other files. "
                f"Go on with it by --resume {path}, or choose another --output_dir."
            )
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"`output_dir` must be writable, got {str(path)!r}: {error.strerror}.") from None
        folder.write_options(options)
        return folder

    @classmethod
    def reopen(cls, path: str | Path) -> RunFolder:
        """The folder of a run that was begun.

        Raises:
            UserError: it is not one.
        """
        folder = cls(Path(path))
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
        """The last complete round; None before the first checkpoint.

        Raises:
            UserError: the file is damaged; later, where something is asked of it that it does not hold.
        """
        if not self.checkpoint.is_file():
            return None
        try:
            return _Checkpoint(self.checkpoint, torch.load(self.checkpoint, map_location=device, weights_only=True))
        except (RuntimeError, EOFError, pickle.UnpicklingError):
            raise UserError(
                f"`{self.checkpoint}` must be a checkpoint of this program, got a damaged file. {NEW_RUN}"
            ) from None

    def save_json(self, name: str, content: object) -> None:
        text = json.dumps(content, indent=2) + "\n"
        write_atomically(self.path / name, lambda partial: partial.write_text(text))

    def save_models(self, module: Model, final_models: ClientModels) -> None:
        """`model.pt`, or `model_<k>.pt` for each of several: state dicts of the net, for `net.load_state_dict`."""
        for row, model in enumerate(final_models.models):
            state = {name: value.cpu() for name, value in module.net.state_dict().items()}
            state.update({name: value.cpu().clone() for name, value in module.unflatten(model).items()})
            name = "model.pt" if len(final_models.models) == 1 else f"model_{row}.pt"
            write_atomically(self.path / name, lambda partial, state=state: torch.save(state, partial))


class _Checkpoint(dict[str, Any]):
    def __init__(self, path: Path, held: Mapping[str, Any]) -> None:
        super().__init__(held)
        self._path = path

    def __missing__(self, name: str) -> Any:
        raise UserError(f"`{self._path}` must hold {name!r}, got one from another version of this program. {NEW_RUN}")
