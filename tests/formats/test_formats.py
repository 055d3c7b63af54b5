"""Files that are kept, in their formats: a sample of each is read, and with another number refused in one sentence.

`python tests/formats/test_formats.py` writes the samples beside this file. When the number of a format rises, write its
sample anew, and raise the number here.
"""

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import blobs, private, small_loop

from dpfl_lightning import DistilledSet
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.folder import ClientFolder
from dpfl_lightning.federated.server import folder, history
from dpfl_lightning.federated.server.folder import RunFolder
from dpfl_lightning.privacy.ledger import file as ledger
from dpfl_lightning.privacy.ledger.account import PrivacyAccount
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.reporting import description
from dpfl_lightning.reporting.run_files import read_result
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Released
from dpfl_lightning.sites.terms import read_site, read_terms

HERE = Path(__file__).parent


def checkpoint(path: Path) -> dict | None:
    return RunFolder(path.parent).load_checkpoint(torch.device("cpu"), ClientFolder(path.parent).seal)


def with_number(path: Path, number: int) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": number}))


def rounds_with(path: Path, number: int) -> None:
    path.write_text("".join(json.dumps({**json.loads(one), "format": number}) + "\n" for one in path.open()))


def ledger_with(path: Path, number: int) -> None:
    first = path.read_bytes().splitlines()[0].replace(b'"ledger": 2', b'"ledger": %d' % number)
    path.write_bytes(ledger.sealed(first[: 1 - ledger._TAIL], ledger.NO_CHAIN))


def account_with(path: Path, number: int) -> None:
    first = path.read_bytes().splitlines()[0].replace(b'"account": 1', b'"account": %d' % number)
    path.write_bytes(ledger.sealed(first[: 1 - ledger._TAIL], ledger.NO_CHAIN))


def text_with(path: Path, number: int) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "dpfl": number}))


def bytes_with(path: Path, number: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4] + struct.pack("<I", number) + content[8:])


def checkpoint_with(path: Path, number: int) -> None:
    content = checkpoint(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "_FORMAT", number)
        RunFolder(path.parent).save_checkpoint(content, ClientFolder(path.parent).seal)


def released(path: Path) -> Released:
    return wire.decode(Released, path.read_bytes())


#: file -> how it is read, its number, how it gets another number
FORMATS: dict[str, tuple[Callable, int, Callable[[Path, int], None]]] = {
    "run/ledger.jsonl": (read_ledger, 2, ledger_with),
    "run/checkpoint.pt": (checkpoint, 1, checkpoint_with),
    "account/account.jsonl": (lambda path: PrivacyAccount(path).holders(), 1, account_with),
    "run/metrics.jsonl": (history.read, 1, rounds_with),
    "run/run.json": (lambda path: description.read(path.parent), 1, with_number),
    "run/result.json": (lambda path: read_result(path.parent), 1, with_number),
    "set/distilled.json": (lambda path: DistilledSet.load(path.parent), 1, with_number),
    "sites/site.json": (read_site, 2, text_with),
    "sites/plan.json": (read_terms, 2, text_with),
    "sites/released.bin": (released, 2, bytes_with),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_sample_is_read_and_another_number_is_refused(name, tmp_path):
    read, number, renumber = FORMATS[name]
    shutil.copytree((HERE / name).parent, tmp_path, dirs_exist_ok=True)
    path = tmp_path / Path(name).name
    assert read(path)
    renumber(path, number + 1)
    with pytest.raises((UserError, wire.WireError), match=f"format {number}, got {number + 1}|of format 3, not of 2"):
        read(path)


def write_samples() -> None:
    """A run of two rounds, its account, a distilled set, the files of a federation of three sites, and a message."""
    import sites

    os.chdir(HERE)  # samples name no other folder
    for name in ("account", "run", "set", "sites"):
        shutil.rmtree(name, ignore_errors=True)
    small_loop(blobs(), rounds=2, privacy=private(), output_dir=Path("run")).run()
    kept = {Path(name).name for name in FORMATS} | {"ledger.head", "checkpoint.key"}
    for path in (HERE / "run").rglob("*"):
        if path.is_file() and path.name not in kept:
            path.unlink()
    account = PrivacyAccount(Path("account/account.jsonl"))
    account.accept()
    account.add(Path("run/ledger.jsonl"))
    account.limit("clients without names", 8.0, 1e-5)
    DistilledSet(torch.zeros(2, 1, 2, 2), torch.arange(2), {"rounds": 5}).save(HERE / "set")
    (HERE / "sites").mkdir()
    terms = sites.planned(HERE)
    (HERE / "sites" / "plan.json").write_text(wire.to_text(terms))
    (HERE / "sites" / "site.json").write_text(wire.to_text(terms.sites[0]))
    (HERE / "sites" / "released.bin").write_bytes(wire.encode(Released(torch.arange(3.0), ())))


if __name__ == "__main__":
    sys.exit(write_samples())
