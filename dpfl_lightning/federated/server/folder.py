"""The server's files in the output folder of a run."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dpfl_lightning.config.reading import check_format
from dpfl_lightning.config.yaml_text import dump
from dpfl_lightning.errors import NEW_RUN, UserError, warn_user
from dpfl_lightning.federated.messages.evaluation import ClientModels
from dpfl_lightning.models.model import Model, has_frozen
from dpfl_lightning.runtime.files import (
    PARTIAL,
    SUFFIX,
    save_tensors,
    write_atomically,
    write_json,
    write_safetensors,
    write_text,
)

_FORMAT = 1  # of a checkpoint
_SEAL = 32  # bytes at the end of a checkpoint

#: returns the clients' keyed digest (32 bytes) of a digest
Seal = Callable[[bytes], bytes]


class RunFolder:
    """`options.yaml` and `checkpoint.pt`, after the run also `result.json`, `guarantees.json` and `model.safetensors`.

    `checkpoint.pt` ends with a keyed digest of the clients. `checkpoint.before.pt` is the checkpoint before it, from
    which a run is resumed if `checkpoint.pt` is damaged.

    **Privacy** Checkpoints contain `Clients.state_dict`, which is for the clients only. Their mode is 0600.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.options, self.checkpoint = path, path / "options.yaml", path / "checkpoint.pt"
        self.before = path / "checkpoint.before.pt"

    @classmethod
    def claim(cls, path: Path, options: Mapping[str, Any]) -> RunFolder:
        """Create the folder of a new run. Raises UserError if it is not empty; nothing in it is changed then."""
        folder = cls(path)
        if path.exists() and (not path.is_dir() or any(one.suffix != PARTIAL for one in path.iterdir())):
            begun = folder.options.is_file()
            raise UserError(
                f"`output_dir` must be new or empty, got {str(path)!r}, which holds "
                + (f"another run. Resume it with --resume {path}, or choose" if begun else "other files. Choose")
                + " another --output_dir."
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

    def release(self) -> None:
        """Undo `claim` for a run that was refused before it had a ledger."""
        self.options.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other files, or a mount
            self.path.rmdir()

    def write_options(self, options: Mapping[str, Any]) -> None:
        write_text(self.options, dump(options), private=True)  # arguments of a user's data may hold credentials

    def save_checkpoint(self, snapshot: dict[str, Any], seal: Seal) -> None:
        """Write the checkpoint and its seal, and keep the checkpoint before it."""

        def write(partial: Path) -> None:
            save_tensors({"format": _FORMAT, **snapshot}, partial)
            with partial.open("r+b") as file:
                file.write(seal(hashlib.file_digest(file, "sha256").digest()))

        write_atomically(self.checkpoint, write, private=True, before=self.before)

    def load_checkpoint(self, device: torch.device, seal: Seal) -> dict[str, Any] | None:
        """Load the last complete round, or with a warning the one before it if the file is damaged or missing.

        None before the first checkpoint. Raises UserError if no file is what the clients sealed, or of another format.
        """
        files = [path for path in (self.checkpoint, self.before) if path.is_file()]
        for path in files:
            content = _sealed_content(path, device, seal)
            if content is not None:
                check_format(path, content.pop("format", None), _FORMAT)
                if path == self.before:
                    words = f"{self.checkpoint} is damaged or missing; {path.name} is used, the one before it"
                    warn_user(f"{words}, after round {content['round']}")
                return content
        if files:
            must = "be a checkpoint that this run has sealed"
            raise UserError(f"`{self.checkpoint}` must {must}, got a damaged file. {NEW_RUN}")
        return None

    def save_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_json(self.path / name, content)

    def save_models(self, module: Model, final_models: ClientModels, single: bool, code: Mapping[str, Any]) -> None:
        """Write state dicts of `net`: `model` with that of `module` if it is `single`, `model_<k>` of several.

        If parameters are frozen, which may be large and which the user has, they hold the trained ones only. `code`
        says what makes the model.
        """
        frozen, models = has_frozen(module.net), final_models.models
        every = {"model": module.flat} if single else {}
        every |= {f"model_{row}": model for row, model in enumerate(models)} if len(models) > 1 else {}
        for name, model in every.items():
            tensors = {**({} if frozen else module.net.state_dict()), **module.unflatten(model)}
            write_safetensors(self.path / f"{name}{SUFFIX}", tensors, code)


def _sealed_content(path: Path, device: torch.device, seal: Seal) -> dict[str, Any] | None:
    """Load a checkpoint; None if its seal does not fit, so that nothing of a changed file is ever used."""
    with path.open("rb") as file:
        size, digest = os.fstat(file.fileno()).st_size - _SEAL, hashlib.sha256()
        for start in range(0, size, 1 << 20):
            digest.update(file.read(min(1 << 20, size - start)))
        if not hmac.compare_digest(file.read(), seal(digest.digest())):
            return None
        file.seek(0)
        try:
            return torch.load(file, map_location=device, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError):  # sealed by another version of this program
            return None
