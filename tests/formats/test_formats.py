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
from conftest import blobs, private, small_loop, small_net

from dpfl_lightning import DistilledSet
from dpfl_lightning.config.reading import read_safetensors
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.folder import ClientFolder
from dpfl_lightning.federated.messages.evaluation import Score
from dpfl_lightning.federated.server import folder, history
from dpfl_lightning.federated.server.folder import RunFolder
from dpfl_lightning.federated.server.results import read_guarantees
from dpfl_lightning.federated.server.run import Run, read_result
from dpfl_lightning.models.tasks import Measure
from dpfl_lightning.privacy.compose import Limit
from dpfl_lightning.privacy.ledger import file as ledger
from dpfl_lightning.privacy.ledger.file import read_head
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.ledger.operator import OperatedAccount
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Released
from dpfl_lightning.sites.node.scores import KeptScores, read_scores
from dpfl_lightning.sites.node.state import Reservation, StateFolder
from dpfl_lightning.sites.node.study import Kept
from dpfl_lightning.sites.receipt import Receipt, public_key, read_receipts, write_receipts
from dpfl_lightning.sites.terms import read_site, read_terms

HERE = Path(__file__).parent


def checkpoint(path: Path) -> dict | None:
    return RunFolder(path.parent).load_checkpoint(torch.device("cpu"), ClientFolder(path.parent).seal)


def with_number(path: Path, number: int) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": number}))


def rounds_with(path: Path, number: int) -> None:
    path.write_text("".join(json.dumps({**json.loads(one), "format": number}) + "\n" for one in path.open()))


def ledger_with(path: Path, number: int) -> None:
    first = path.read_bytes().splitlines()[0].replace(b'"ledger": 3', b'"ledger": %d' % number)
    path.write_bytes(ledger.sealed(first[: 1 - ledger._TAIL], ledger.NO_CHAIN))


def account_with(path: Path, number: int) -> None:
    first = path.read_bytes().splitlines()[0].replace(b'"account": 3', b'"account": %d' % number)
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


def message(kind: type) -> Callable[[Path], object]:
    return lambda path: wire.decode(kind, path.read_bytes())


#: file -> how it is read, its number, how it gets another number
FORMATS: dict[str, tuple[Callable, int, Callable[[Path, int], None]]] = {
    "run/ledger.jsonl": (read_ledger, 3, ledger_with),
    "run/checkpoint.pt": (checkpoint, 1, checkpoint_with),
    "account/account.jsonl": (lambda path: OperatedAccount(path).holders(), 3, account_with),
    "run/metrics.jsonl": (history.read, 1, rounds_with),
    "run/run.json": (lambda path: Run.read(path.parent), 1, with_number),
    "run/result.json": (lambda path: read_result(path.parent), 1, with_number),
    "set/distilled.json": (lambda path: DistilledSet.load(path.parent), 1, with_number),
    "sites/site.json": (read_site, 4, text_with),
    "sites/plan.json": (read_terms, 4, text_with),
    "sites/released.bin": (message(Released), 4, bytes_with),
    "sites/kept.bin": (message(Kept), 4, bytes_with),
    "run/guarantees.json": (lambda path: read_guarantees(path.parent), 1, with_number),
    "run/receipts.json": (lambda path: read_receipts(path.parent), 1, with_number),
    "node/node.json": (lambda path: StateFolder(path.parent).settings(), 1, with_number),
    "node/plans/0/reserved.json": (lambda path: StateFolder(path.parents[2]).plans(), 1, with_number),
    "node/plans/0/scores.json": (lambda path: read_scores(path.parent), 4, text_with),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_sample_is_read_and_another_number_is_refused(name, tmp_path):
    read, number, renumber = FORMATS[name]
    top = Path(name).parts[0]
    shutil.copytree(HERE / top, tmp_path / top)
    path = tmp_path / name
    assert read(path)
    renumber(path, number + 1)
    refused = wire.WireError if path.suffix == ".bin" else UserError
    with pytest.raises(refused, match=f"format {number}, got {number + 1}|of format 5, not of 4"):
        read(path)


def test_the_sample_of_a_model_is_read():
    """It has the names and shapes of its parameters, and no number."""
    small_net().load_state_dict(read_safetensors(HERE / "run" / "model.safetensors")[0])


def forget_folder(path: Path) -> None:
    """Replace the folder of the samples in a chained file, whose lines follow each other again."""
    lines, chain = [], ledger.NO_CHAIN
    for line in path.read_bytes().splitlines(keepends=True):
        lines.append(ledger.sealed(line[: -ledger._TAIL].replace(str(HERE).encode(), b"/samples"), chain))
        chain = ledger.chain_of(lines[-1])
    path.write_bytes(b"".join(lines))


def write_samples() -> None:
    """A run of two rounds, its account, a distilled set, the files of three sites and of a node, and messages."""
    import sites

    os.chdir(HERE)  # samples name no other folder
    for name in ("account", "run", "set", "sites", "node"):
        shutil.rmtree(name, ignore_errors=True)
    small_loop(blobs(), rounds=2, privacy=private(), output_dir=Path("run")).run()
    kept = {Path(name).name for name in FORMATS} | {"ledger.head", "checkpoint.key", "model.safetensors"}
    for path in (HERE / "run").rglob("*"):
        if path.is_file() and path.name not in kept:
            path.unlink()
    head = read_head(Path("run/ledger.jsonl"))
    write_receipts(Path("run"), {0: Receipt("", "", "", head).signed(sites.key_of(0))}, [public_key(sites.key_of(0))])
    account = OperatedAccount(Path("account/account.jsonl"))
    account.accept()
    account.add(Path("run/ledger.jsonl"))
    account.limit("clients without names", Limit(8.0, 1e-5))
    forget_folder(account.path)
    DistilledSet(torch.zeros(2, 1, 2, 2), torch.arange(2), {"rounds": 5}).save(HERE / "set")
    (HERE / "sites").mkdir()
    terms = sites.planned(HERE)
    (HERE / "sites" / "plan.json").write_text(wire.to_text(terms))
    (HERE / "sites" / "site.json").write_text(wire.to_text(terms.sites[0]))
    (HERE / "sites" / "released.bin").write_bytes(wire.encode(Released(torch.arange(3.0), ())))
    (HERE / "sites" / "kept.bin").write_bytes(wire.encode(Kept(torch.arange(3.0), {"personal": torch.ones(1)})))
    node = StateFolder(HERE / "node")
    node.plan_folder("0").mkdir(parents=True)
    node.save(sites.settings_for(0))
    node._write("0", Reservation(2.0, 1e-3, client=0, most_numbers=5200))
    scores = KeptScores(2, 9, Score(0.5, 0.7, {"auroc": 0.6}), {"accuracy": 0.5}, {"auroc": Measure()})
    (node.plan_folder("0") / "scores.json").write_text(wire.to_text(scores))


if __name__ == "__main__":
    sys.exit(write_samples())
