"""The files of a run that belong to the clients: their ledger, their notes and the key of the digests of records."""

import secrets
from pathlib import Path

from torch import Tensor

from dpfl_lightning.errors import NEW_RUN, UserError
from dpfl_lightning.federated.client.engines.engine import COUNTED
from dpfl_lightning.privacy.ledger.file import Header, read_header
from dpfl_lightning.runtime.files import write_atomically, write_json

_ABOUT_NOTES = (
    "Exact counts over the run of the gradients of each client's records: all (one a record and step), those that were "
    "clipped, and those that were not finite and so contributed nothing. No noise and no guarantee covers them: they "
    "are for each client alone. Do not share this file."
)


class ClientFolder:
    """`ledger.jsonl`, `ledger.head`, `ledger.signatures` if clients sign, `private.json`, and `data_key` until the end.

    **Privacy** No file lets its reader subtract noise. `private.json` holds exact counts, and `data_key` would let its
    reader try guesses of records: they are for the clients alone, have mode 0600, and are never exported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger_file = path / "ledger.jsonl"
        self.key_file = path / "data_key"

    def header(self) -> Header | None:
        """The header of the run's ledger; None before it was written."""
        return read_header(self.ledger_file) if self.ledger_file.is_file() else None

    def data_key(self, ended: bool) -> bytes:
        """The key of the digests of records: a new one for a new run, none for one that has ended.

        Raises UserError if the file is damaged, or is gone although the run has not ended.
        """
        if self.key_file.is_file():
            try:
                return bytes.fromhex(self.key_file.read_text())
            except ValueError:
                raise UserError(f"`{self.key_file}` must hold hexadecimal digits, got others. {NEW_RUN}") from None
        if ended:
            return b""
        if self.ledger_file.is_file():
            raise UserError(f"`{self.key_file}` must lie beside options.yaml, got no such file. {NEW_RUN}")
        key = secrets.token_bytes(32)
        write_atomically(self.key_file, lambda partial: partial.write_text(key.hex()), private=True)
        return key

    def save_notes(self, counts: Tensor) -> None:
        """Write `private.json` from all clients' counts of gradients `[N, 3]`."""
        columns = ("client", *COUNTED)
        clients = [dict(zip(columns, (client, *row), strict=True)) for client, row in enumerate(counts.tolist())]
        write_json(self.path / "private.json", {"about": _ABOUT_NOTES, "clients": clients}, private=True)
