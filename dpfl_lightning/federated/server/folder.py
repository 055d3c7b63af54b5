"""The output folder of one run: who owns it, what lies in it, and writes that a crash cannot tear."""

from __future__ import annotations

import json
import os
import pickle
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dpfl_lightning.config.yaml_text import dump
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.plan import Delivered
from dpfl_lightning.privacy.ledger.file import Head, Header, read_header
from dpfl_lightning.privacy.ledger.ledger import Ledger, sync_folder

_WAY_OUT = "What was spent stands in the ledger beside it; start a new run in another --output_dir."


class RunFolder:
    """`options.yaml`, `data_key`, `ledger.jsonl`, `ledger.head`, `checkpoint.pt`; then `result.json`,
    `guarantees.json`, `guarantee.html`, `model.pt`.

    Attributes:
        data_key: keys the digests of private records in the ledger's header.

    **Privacy** No file lets its reader subtract noise. `checkpoint.pt` and `private.json` hold exact counts, and
    `data_key` would let its reader try guesses of records: they are for the clients alone, have mode 0600, and are
    never exported. `data_key` is removed when the run is finished.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.options = path / "options.yaml"
        self.ledger_file = path / "ledger.jsonl"
        self.checkpoint = path / "checkpoint.pt"
        self.key_file = path / "data_key"
        self.data_key = b""

    @classmethod
    def claim(cls, path: str | Path, options: Mapping[str, Any]) -> RunFolder:
        """A new folder with the run's options and a fresh data key.

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
        folder.data_key = secrets.token_bytes(32)
        write_atomically(folder.key_file, lambda partial: partial.write_text(folder.data_key.hex()), private=True)
        folder.write_options(options)
        return folder

    @classmethod
    def reopen(cls, path: str | Path) -> RunFolder:
        """The folder of a run that was begun.

        Raises:
            UserError: it is not one, or lacks a file that it needs.
        """
        folder = cls(Path(path))
        if not folder.options.is_file():
            raise UserError(
                f"`resume` must be the folder of a run, got {str(path)!r}, which has no options.yaml. "
                "Runs are listed under runs/; start a new one with --config."
            )
        try:
            folder.data_key = bytes.fromhex(folder.key_file.read_text())
        except FileNotFoundError:
            pass  # of a run that has ended; of another one the caller finds out
        except ValueError:
            raise UserError(f"`{folder.key_file}` must hold hexadecimal digits, got others. {_WAY_OUT}") from None
        return folder

    def begun(self) -> Header | None:
        """The header of the run's ledger; None before it was written."""
        return read_header(self.ledger_file) if self.ledger_file.is_file() else None

    def lacks_key(self) -> UserError:
        """The error of a run that has not ended, and whose data key is gone."""
        return UserError(f"`{self.key_file}` must lie beside options.yaml, got no such file. {_WAY_OUT}")

    def write_options(self, options: Mapping[str, Any]) -> None:
        write_atomically(self.options, lambda partial: partial.write_text(dump(options)))

    def finish(self) -> None:
        """Remove the data key: nothing is released any more, and nobody needs to compare records."""
        self.key_file.unlink(missing_ok=True)

    def open_ledger(self, header: Header, saved: Mapping[str, Any] | None) -> Ledger:
        """The run's ledger: a new one, or, given a checkpoint, the one that was written until then.

        Raises:
            UserError: it is not.
        """
        return Ledger(self.ledger_file, header, None if saved is None else Head(**saved["ledger"]))

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
    sync_folder(path.parent)
    return path
