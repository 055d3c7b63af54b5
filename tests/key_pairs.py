"""Key pairs of clients that sign their ledger."""

from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption as Encrypted
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


def private_pem(key, password: bytes | None = None) -> bytes:
    protection = NoEncryption() if password is None else Encrypted(password)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection)


def public_pem(key) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def make_keys(folder: Path, clients: Iterable[int] = range(4)) -> Path:
    """Write private keys to `folder/private` and their public keys to `folder/public`; return `folder`."""
    for name in ("private", "public"):
        (folder / name).mkdir(parents=True)
    for client in clients:
        key = Ed25519PrivateKey.generate()
        file = folder / "private" / f"client-{client}.pem"
        file.touch(mode=0o600)
        file.write_bytes(private_pem(key))
        (folder / "public" / file.name).write_bytes(public_pem(key))
    return folder
