"""Signatures of a ledger's head by the clients, so that only a holder of their keys can rewrite the ledger."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from dpfl_lightning.errors import UserError, require, warn_user
from dpfl_lightning.privacy.ledger.file import Head, Verified, check_lag, read_small
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.runtime.strict_json import parsed

PrivateKeys = Mapping[int, Ed25519PrivateKey]
PublicKeys = Mapping[int, Ed25519PublicKey]

_RESTORE = "Restore the unchanged folder of the run, or start a new run."
_HOW_TO = {
    "private": "Make it by `openssl genpkey -algorithm ed25519`.",
    "public": "Make it from the private key by `openssl pkey -pubout`.",
}


@dataclass(frozen=True)
class Signed:
    """Content of `ledger.signatures`: a head, and the signature of each client that signed it."""

    head: Head
    signatures: Mapping[int, bytes]


def private_keys(folder: Path, clients: int) -> PrivateKeys:
    """Return the Ed25519 keys `client-<number>.pem` in a folder, at least one.

    Raises UserError if a file is no such key of one of the run's clients. A key that other users may read is a warning.
    """
    keys = {}
    for client, path in _files(folder, "privacy.signing_keys", clients).items():
        if os.stat(path).st_mode & 0o077:
            warn_user(
                f"{path} may be read by other users of this machine, who could sign for client {client}: chmod 600"
            )
        keys[client] = _loaded(path, "private", Ed25519PrivateKey)
    return keys


def public_keys(folder: Path, clients: int) -> PublicKeys:
    """Return the Ed25519 public keys `client-<number>.pem` in a folder, at least one. Raises UserError for others."""
    files = _files(folder, "--public_keys", clients)
    return {client: _loaded(path, "public", Ed25519PublicKey) for client, path in files.items()}


def public_of(keys: PrivateKeys) -> PublicKeys:
    return {client: key.public_key() for client, key in keys.items()}


def signature_file(path: Path) -> Path:
    """Return the path of a ledger's signatures: `ledger.signatures` beside `ledger.jsonl`."""
    return path.with_suffix(".signatures")


def message(head: Head, client: int) -> bytes:
    """Return what a client signs: the head and the client's number."""
    fields = {"client": client, **head.as_dict()}
    return "".join(["dpfl_lightning ledger head\n", *(f"{key} {value}\n" for key, value in fields.items())]).encode()


def write_signatures(path: Path, head: Head, keys: PrivateKeys) -> None:
    """Sign the head with every key, and replace the file of signatures."""
    signatures = {client: key.sign(message(head, client)).hex() for client, key in keys.items()}
    text = json.dumps({"head": head.as_dict(), "signatures": signatures}, indent=1) + "\n"
    write_text(signature_file(path), text)


def read_signatures(path: Path) -> Signed | None:
    """Return the signatures beside a ledger, None if there is no such file. Raises UserError if it is damaged."""
    content = read_small(signature_file(path))
    if content is None:
        return None
    try:
        fields = parsed(content)
        signatures = {int(client): bytes.fromhex(text) for client, text in fields["signatures"].items()}
        names = [str(client) for client in signatures if client >= 0]
        if not names or names != [*fields["signatures"]] or len(fields) != 2:
            raise ValueError(fields)
        return Signed(Head.of(fields["head"]), signatures)
    except (ValueError, TypeError, KeyError, AttributeError):
        must = f"must hold a head and hexadecimal signatures of clients for `{path.name}`"
        raise UserError(f"`{signature_file(path)}` {must}, got {content[:80]!r}. {_RESTORE}") from None


def signed_head(path: Path, signed: Signed | None) -> dict[str, Head]:
    """Return the signed head by the name of its source, as `verify` takes it."""
    return {} if signed is None else {f"`{signature_file(path).name}`": signed.head}


def check_same_signers(path: Path, signed: Signed | None, keys: PrivateKeys) -> None:
    """Raise UserError unless a resumed ledger is signed by the clients that signed it before."""
    before, now = sorted(signed.signatures) if signed else [], sorted(keys)
    must = f"hold the keys of the clients that sign {path}, which are {_listed(before)}"
    require(before == now, "privacy.signing_keys", must, _listed(now), "Give the same keys, or start a new run.")


def check(path: Path, signed: Signed | None, keys: PublicKeys, verified: Verified) -> None:
    """Raise UserError, which names the clients, unless clients, and each with a key, have signed the ledger's end.

    After a crash, or while a run is writing, the lines of one charge may follow the signed head.
    """
    name = signature_file(path)
    if missing := [client for client in keys if signed is None or client not in signed.signatures]:
        must = "hold a signature of every client with a key"
        raise UserError(f"`{name}` must {must}, got none of client {_listed(missing)}. {_RESTORE}")
    if signed is None:
        return
    if strange := [str(client)[:20] for client in signed.signatures if client >= len(verified.header.delta)]:
        must = f"hold signatures of the {len(verified.header.delta)} clients"
        raise UserError(f"`{name}` must {must}, got one of client {', '.join(strange)}. {_RESTORE}")
    if wrong := [client for client, key in keys.items() if not _is_valid(key, signed, client)]:
        raise UserError(
            f"`{name}` must hold signatures that the keys of their clients made for this head, got another signature "
            f"for client {_listed(wrong)}: the ledger was rewritten, or the key is another client's. {_RESTORE}"
        )
    check_lag(path, f"`{name.name}`", signed.head, verified.end.lines, len(verified.header.delta))


def _is_valid(key: Ed25519PublicKey, signed: Signed, client: int) -> bool:
    try:
        key.verify(signed.signatures[client], message(signed.head, client))
    except InvalidSignature:
        return False
    return True


def _files(folder: Path, option: str, clients: int) -> dict[int, Path]:
    """Return the files of keys by client, in order."""
    advice = "Make keys by `openssl genpkey -algorithm ed25519 -out client-0.pem`."
    must = "be a folder with a key client-<number>.pem for each client"
    require(folder.is_dir(), option, must, str(folder.absolute()), f"Give its path if it was moved. {advice}")
    names = {f"client-{client}.pem": client for client in range(clients)}
    try:
        files = {path.name: path for path in folder.iterdir() if path.name.lower().startswith("client")}
        files |= {path.name: path for path in folder.glob("*.pem")}
    except OSError as error:
        raise UserError(f"`{option}` must {must}, got {error.strerror} of {folder}. Check its rights.") from None
    require(bool(files), option, "hold at least one key client-<number>.pem", f"none in {folder}", advice)
    for name in sorted(files):
        require(name in names, option, f"hold keys named client-0.pem to client-{clients - 1}.pem", name, advice)
    return {client: files[name] for name, client in names.items() if name in files}


def _loaded(path: Path, which: str, kind: type) -> Any:
    load = load_pem_private_key if which == "private" else load_pem_public_key
    arguments = (None,) if which == "private" else ()
    must = f"be an Ed25519 {which} key in PEM without a password"
    try:
        key = load(path.read_bytes(), *arguments)
    except (ValueError, TypeError, UnsupportedAlgorithm, OSError) as error:  # TypeError: a password is needed
        raise UserError(f"`{path}` must {must}, got {str(error)[:80]!r}. {_HOW_TO[which]}") from None
    require(isinstance(key, kind), str(path), must, type(key).__name__, _HOW_TO[which])
    return key


def _listed(clients: list[int]) -> str:
    return ", ".join(map(str, clients)) or "none"
