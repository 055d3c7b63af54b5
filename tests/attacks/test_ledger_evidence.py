"""A run folder as evidence: each manipulation of it is status 2, with a sentence that names its cause."""

import json

import pytest
from conftest import FIXED_KEY, small_loop

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.plan import main
from dpfl_lightning.privacy.ledger import file as ledger_file


@pytest.fixture
def folder(tmp_path):
    privacy = PrivacyOptions(epsilon=8.0, delta=1e-3, noise_key=FIXED_KEY)
    small_loop(privacy=privacy, rounds=2, output_dir=tmp_path / "run").run()
    return tmp_path / "run"


def test_lines_cut_together_with_the_head_are_refused(folder):
    ledger = folder / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:5]))
    (folder / "ledger.head").unlink()
    assert main(["--ledger", str(folder)]) == 2


def test_a_rewritten_ledger_and_head_are_refused(folder):
    ledger = folder / "ledger.jsonl"
    header, chain, charges = ledger_file.read_header(ledger), "", []
    ledger_file.verify(ledger, charges.append)
    lines = [ledger_file.header_line(header)]
    lines += ledger_file.charge_lines(charges[:4], ledger_file.chain_of(lines[0]))
    ledger.write_bytes(b"".join(lines))
    chain = ledger_file.chain_of(lines[-1])
    (folder / "ledger.head").write_text(json.dumps({"run": header.run, "lines": 5, "chain": chain}))
    assert main(["--ledger", str(folder)]) == 2
