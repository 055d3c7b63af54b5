"""The ledger: synced, idempotent, one writer, torn lines, counters."""

from __future__ import annotations

import pytest

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.events import Caveat, GaussianEvent, SelectionEvent
from dpfl_lightning.privacy.ledger import Charge, Ledger, read_ledger

TRAIN = GaussianEvent(0.1, 1.5, 10)


def charge(client=0, round=1, release="a", event=TRAIN, purpose="train"):
    return Charge(client, round, purpose, release, event)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_a_charge_is_on_disk_when_it_returns(path):
    ledger = Ledger(path)
    assert ledger.charge([charge(0), charge(1)]) == [0, 0]
    assert read_ledger(path) == [charge(0), charge(1)]


def test_a_replay_is_free_and_another_release_is_not(path):
    ledger = Ledger(path)
    ledger.charge([charge()])
    assert ledger.charge([charge()]) == [0]
    assert ledger.used(0, "train") == 1
    assert ledger.charge([charge(release="b")]) == [1]
    assert ledger.charge([charge(release="a"), charge(release="c")]) == [0, 2]
    assert ledger.used(0, "train") == 3


def test_it_is_read_back_whole(path):
    events = [TRAIN, SelectionEvent(0.1, 2), Caveat("words"), GaussianEvent(1.0, 0.0)]
    ledger = Ledger(path)
    ledger.charge([charge(round=n, event=event, purpose=str(n)) for n, event in enumerate(events)])
    ledger.close()
    again = Ledger(path)
    assert again.events(0) == events
    assert [again.used(0, str(n)) for n in range(4)] == [1] * 4


def test_two_writers_are_refused(path):
    first = Ledger(path)
    with pytest.raises(UserError, match="being written by another run"):
        Ledger(path)
    first.close()
    Ledger(path).close()


def test_a_torn_last_line_was_never_paid_and_is_cut(path):
    ledger = Ledger(path)
    ledger.charge([charge(0), charge(1)])
    ledger.close()
    path.write_bytes(path.read_bytes()[:-20])
    again = Ledger(path)
    assert again.used(1, "train") == 0
    again.charge([charge(2)])
    assert [one.client for one in read_ledger(path)] == [0, 2]


@pytest.mark.parametrize(
    "line", ["{}", "nonsense", '{"client": 0, "round": 1, "purpose": "a", "release": "b", "event": {"kind": "x"}}']
)
def test_a_foreign_line_is_named(path, line):
    Ledger(path).charge([charge()])
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match="Line 2 of"):
        read_ledger(path)
