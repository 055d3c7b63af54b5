"""The output folder of one run: who owns it, what lies in it, and writes that a crash cannot tear."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dpfl_lightning.client import ClientModule
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.state import Delivered
from dpfl_lightning.privacy.ledger import Ledger
from dpfl_lightning.privacy.ledger_file import Head, Header
from dpfl_lightning.privacy.noise import new_noise_key
from dpfl_lightning.yaml_text import dump

_GIVEN, _DESTROYED = "given", "destroyed"
_WAY_OUT = "What was spent stands in the ledger beside it; start a new run in another --output_dir."


class RunFolder:
    """`options.yaml`, `noise_key`, `ledger.jsonl`, `ledger.head`, `checkpoint.pt`; then `result.json`,
    `guarantees.json`, `guarantee.html`, `model.pt`.

    Attributes:
        noise_key: of this run; None in secure mode. Where it was destroyed, a new one that nothing was drawn from.
        noise_key_was_given: whether it came from a configuration that others may have read.

    **Privacy** `noise_key` lets its reader subtract the noise: it has file mode 0600, is never logged or exported, and
    is destroyed when the run is finished. `checkpoint.pt` and `private.json` hold exact counts, which are for each
    client alone: mode 0600, and never exported, too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.options = path / "options.yaml"
        self.ledger_file = path / "ledger.jsonl"
        self.checkpoint = path / "checkpoint.pt"
        self.key_file = path / "noise_key"
        self.noise_key: int | None = None
        self.noise_key_was_given = False

    @classmethod
    def claim(
        cls, path: str | Path, options: Mapping[str, Any], given_key: str | None = None, secure: bool = False
    ) -> RunFolder:
        """A new folder with the run's options and, unless `secure`, a fresh noise key (or a given one, for tests).

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
        if not secure:
            folder.noise_key = new_noise_key() if given_key is None else int(given_key, 16)
            folder.noise_key_was_given = given_key is not None
            folder._write_key(f"{folder.noise_key:032x}", os.O_CREAT | os.O_EXCL)
        folder.options.write_text(dump(options))
        return folder

    @classmethod
    def reopen(cls, path: str | Path, secure: bool = False) -> RunFolder:
        """The folder of a run that was begun.

        Raises:
            UserError: it is not one, has no checkpoint yet, or began with another `secure`.
        """
        folder = cls(Path(path))
        if not folder.checkpoint.is_file():
            raise UserError(
                f"`resume` must be the folder of a run with a checkpoint, got {str(path)!r}. "
                "Runs are listed under runs/; start a new one with --config."
            )
        must = f"stay what the run in {path} began with (with it there is no `noise_key`, without it there is one)"
        require(secure != folder.key_file.is_file(), "privacy.secure", must, secure)
        if not secure:
            key, *given = folder.key_file.read_text().split()
            folder.noise_key = new_noise_key() if key == _DESTROYED else int(key, 16)
            folder.noise_key_was_given = given == [_GIVEN]
        return folder

    def destroy_noise_key(self) -> None:
        """Write over it, in place: a finished run draws nothing more. (What the disk itself keeps is out of reach.)"""
        if self.noise_key is not None:
            self._write_key(_DESTROYED.ljust(32))

    def _write_key(self, key: str, flags: int = 0) -> None:
        with os.fdopen(os.open(self.key_file, os.O_WRONLY | flags, 0o600), "w") as file:
            file.write(f"{key} {_GIVEN}\n" if self.noise_key_was_given else f"{key}\n")
            file.flush()
            os.fsync(file.fileno())

    def open_ledger(self, header: Header, saved: Mapping[str, Any] | None) -> Ledger:
        """The run's ledger: a new one, or, given a checkpoint, the one that was written until then.

        Raises:
            UserError: it is not.
        """
        return Ledger(self.ledger_file, header, None if saved is None else Head(**saved["ledger"]))

    def save_checkpoint(self, snapshot: dict[str, Any]) -> None:
        write_atomically(self.checkpoint, lambda partial: torch.save(snapshot, partial), private=True)

    def load_checkpoint(self, device: torch.device) -> dict[str, Any]:
        """The last complete round.

        Raises:
            UserError: the file is damaged; later, where something is asked of it that it does not hold.
        """
        try:
            return _Checkpoint(self.checkpoint, torch.load(self.checkpoint, map_location=device, weights_only=True))
        except (RuntimeError, EOFError, pickle.UnpicklingError):
            raise UserError(
                f"`{self.checkpoint}` must be a checkpoint of this program, got a damaged file. {_WAY_OUT}"
            ) from None

    def save_json(self, name: str, content: object, private: bool = False) -> Path:
        return self.save_text(name, json.dumps(content, indent=2) + "\n", private)

    def save_text(self, name: str, text: str, private: bool = False) -> Path:
        return write_atomically(self.path / name, lambda partial: partial.write_text(text, encoding="utf-8"), private)

    def save_models(self, module: ClientModule, delivered: Delivered) -> None:
        """`model.pt`, or `model_<k>.pt` for each of several: state dicts of the net, for `net.load_state_dict`."""
        for row, model in enumerate(delivered.models):
            state = {name: value.cpu() for name, value in module.net.state_dict().items()}
            state.update({name: value.cpu().clone() for name, value in module.unflatten(model).items()})
            name = "model.pt" if len(delivered.models) == 1 else f"model_{row}.pt"
            write_atomically(self.path / name, lambda partial, state=state: torch.save(state, partial))


class _Checkpoint(dict[str, Any]):
    def __init__(self, path: Path, held: Mapping[str, Any]) -> None:
        super().__init__(held)
        self._path = path

    def __missing__(self, name: str) -> Any:
        raise UserError(f"`{self._path}` must hold {name!r}, got one from another version of this program. {_WAY_OUT}")


def write_atomically(path: Path, write: Any, private: bool = False) -> Path:
    """`write(partial_path)`, sync, rename: the file is the old one or the new one, whatever happens.

    Args:
        private: only the owner may read it (mode 0600), from its first byte on.
    """
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600 if private else 0o666)
    write(partial)
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path
