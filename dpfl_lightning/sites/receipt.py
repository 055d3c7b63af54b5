"""What a node signs with each reply: which request it answers, and how far the node's ledger goes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dpfl_lightning.config.reading import check_format, expecting, read_bytes
from dpfl_lightning.privacy.ledger.file import CHANGED, Head
from dpfl_lightning.runtime.files import write_json
from dpfl_lightning.runtime.strict_json import parsed

_PRIME = 2**255 - 19
_LOW_ORDER = (0, 1, 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826)  # coordinates, up to their sign
FILE, FORMAT = "receipts.json", 1  # beside the ledger of a run over nodes


@dataclass(frozen=True)
class Receipt:
    """Signed by a node with each reply (Ed25519).

    Args:
        plan: hash that the request names; empty if the node has not read it.
        request, reply: SHA-256 of the bytes of both. A request names plan and round.
        ledger: head of the node's ledger of this plan after the reply; None if the node has not opened it.
        signature: 128 hexadecimal digits.
    """

    plan: str
    request: str
    reply: str
    ledger: Head | None
    signature: str = ""

    def __post_init__(self) -> None:
        if self.ledger is not None and self.ledger.lines < 1:
            raise ValueError("a ledger without its header")

    @property
    def releases(self) -> int:
        """The number of releases in the node's ledger."""
        return 0 if self.ledger is None else self.ledger.lines - 1

    def follows(self, before: Receipt) -> bool:
        """Whether the ledger is the one of before with more releases, or unchanged."""
        if self.ledger is None or before.ledger is None or self.ledger.run != before.ledger.run:
            return False
        return self.ledger == before.ledger or self.ledger.lines > before.ledger.lines

    def signed(self, key: bytes) -> Receipt:
        signature = Ed25519PrivateKey.from_private_bytes(key).sign(self._content())
        return dataclasses.replace(self, signature=signature.hex())

    def is_signed_by(self, public_key: str) -> bool:
        try:
            verifier = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
            verifier.verify(bytes.fromhex(self.signature), self._content())
        except (ValueError, InvalidSignature):
            return False
        return True

    def _content(self) -> bytes:
        return json.dumps(dataclasses.asdict(self) | {"signature": "dpfl_lightning receipt"}).encode()


def new_key() -> bytes:
    """Return a new private key, 32 bytes."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_key(key: bytes) -> str:
    """Return the public key of a private one, 64 hexadecimal digits."""
    return Ed25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw().hex()


def is_public_key(text: str) -> bool:
    """Return whether this is a public key, 64 hexadecimal digits, under which nobody can sign without its private key.

    A point of low order would verify forged signatures.
    """
    if not re.fullmatch("[0-9a-f]{64}", text):
        return False
    height = int.from_bytes(bytes.fromhex(text), "little") % 2**255  # the last bit is the sign of the other coordinate
    return height < _PRIME and min(height, _PRIME - height) not in _LOW_ORDER


def digest_of(content: bytes | bytearray) -> str:
    return hashlib.sha256(content).hexdigest()


def write_receipts(folder: Path, receipts: Mapping[int, Receipt], public_keys: Sequence[str]) -> None:
    """Write the last receipt of each client's node to a run's folder, with the key that the plan has for it."""
    rows = [
        {"client": client, "public_key": public_keys[client], **dataclasses.asdict(receipt)}
        for client, receipt in sorted(receipts.items())
    ]
    write_json(folder / FILE, {"format": FORMAT, "clients": rows})


def read_receipts(folder: Path, public_keys: Sequence[str] | None = None) -> dict[int, Receipt]:
    """Return the last receipt of each client's node in a run's folder; none if the run is not one over nodes.

    Raises UserError if one is not signed by the key beside it, a client has two, or the keys are not those given.
    """
    file = folder / FILE
    if not file.is_file():
        return {}
    with expecting(file, "hold receipts that nodes have signed", CHANGED):
        content = parsed(read_bytes(file))
        check_format(file, content.get("format"), FORMAT)
        rows = content["clients"]
        keys = {row["client"]: row["public_key"] for row in rows}
        known = keys if public_keys is None else dict(enumerate(public_keys))
        if len(keys) < len(rows) or not keys.items() <= known.items():
            raise ValueError("other clients")
        return dict(map(_receipt_in, rows))


def _receipt_in(row: dict[str, Any]) -> tuple[int, Receipt]:
    client, key = int(row.pop("client")), row.pop("public_key")
    receipt = Receipt(**{**row, "ledger": Head(**row["ledger"])})
    if not receipt.is_signed_by(key):
        raise ValueError("another signature")
    return client, receipt
