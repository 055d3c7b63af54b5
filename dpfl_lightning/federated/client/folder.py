"""The files of a run that belong to the clients: their ledger, their notes and their keys."""

import hashlib
import hmac
import secrets
import traceback
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path

from dpfl_lightning.config.reading import read_key
from dpfl_lightning.errors import NEW_RUN, UserError
from dpfl_lightning.federated.client.client import COUNTED, HeldClients
from dpfl_lightning.privacy.ledger.file import Header, read_header
from dpfl_lightning.runtime.files import write_json, write_text

_ABOUT_NOTES = (
    "Exact counts over the run of the gradients of each client's records: all (one a record and step), those that were "
    "clipped, and those that were not finite and so contributed nothing. No noise and no guarantee covers them: they "
    "are for each client alone. Do not share this file."
)


class ClientFolder:
    """`ledger.jsonl`, `ledger.head`, `private.json`, `checkpoint.key`, `data_key`
    until the end, and `errors.log` if clients failed.

    **Privacy** No file lets its reader subtract noise. `private.json` holds exact counts, `errors.log` may hold
    records, `data_key` would let its reader try guesses of records, and `checkpoint.key` change a checkpoint unnoticed:
    they are for the clients alone, have mode 0600, and are never exported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger_file, self.errors_file = path / "ledger.jsonl", path / "errors.log"
        self.key_file, self._seal_key_file = path / "data_key", path / "checkpoint.key"

    def header(self) -> Header | None:
        """The header of the run's ledger; None before it was written."""
        return read_header(self.ledger_file) if self.ledger_file.is_file() else None

    def data_key(self, ended: bool) -> bytes:
        """The key of the digests of records: a new one for a new run, none for one that has ended.

        Raises UserError if the file is damaged, or is gone although the run has not ended, or if the ledger is gone.
        """
        if self._seal_key_file.is_file() and not self.ledger_file.is_file():  # which was there before a checkpoint
            advice = "Without it, what was spent is unknown: restore it, or start a new run in another --output_dir."
            raise UserError(f"`{self.ledger_file}` must lie beside checkpoint.key, got no such file. {advice}")
        if self.key_file.is_file():
            return read_key(self.key_file, NEW_RUN)
        if ended:
            return b""
        if self.ledger_file.is_file():
            raise UserError(f"`{self.key_file}` must lie beside options.yaml, got no such file. {NEW_RUN}")
        return _new_key(self.key_file)

    def seal(self, digest: bytes) -> bytes:
        """The keyed digest, 32 bytes, of the digest of a checkpoint; a run without a checkpoint gets a key.

        Raises UserError if the key is damaged, or is gone although there is a checkpoint.
        """
        if self._seal_key_file.is_file():
            key = read_key(self._seal_key_file, NEW_RUN)
        elif any(self.path.glob("checkpoint*.pt")):
            raise UserError(f"`{self._seal_key_file}` must lie beside checkpoint.pt, got no such file. {NEW_RUN}")
        else:
            key = _new_key(self._seal_key_file)
        return hmac.digest(key, digest, "sha256")

    def forget_data_key(self) -> None:
        """Remove the key of the digests of records, which nobody needs to compare any more."""
        self.key_file.unlink(missing_ok=True)

    def save_notes(self, held: HeldClients) -> None:
        """Write `private.json` from the clients' counts of gradients."""
        columns, counted = ("client", *COUNTED), zip(held.numbers, held.counts.tolist(), strict=True)
        clients = [dict(zip(columns, (client, *row), strict=True)) for client, row in counted]
        write_json(self.path / "private.json", {"about": _ABOUT_NOTES, "clients": clients}, private=True)

    def keep_errors(self, round: int, failed: Mapping[int, Exception]) -> None:
        """Append the errors of the clients of a round to `errors.log`."""
        self.errors_file.touch(mode=0o600)
        with self.errors_file.open("a", encoding="utf-8") as file:
            for client, error in sorted(failed.items(), key=itemgetter(0)):
                file.write(f"round {round}, client {client}:\n{''.join(traceback.format_exception(error))}\n")


def run_of(data_key: bytes) -> str:
    """The name of the run with this key. A start that was broken off before the ledger has the same one again.

    An account hears of a run before its ledger begins, and would count a second name as another run.
    """
    return hashlib.blake2b(b"name of the run", key=data_key, digest_size=16).hexdigest()


def _new_key(file: Path) -> bytes:
    key = secrets.token_bytes(32)
    write_text(file, key.hex(), private=True)
    return key
