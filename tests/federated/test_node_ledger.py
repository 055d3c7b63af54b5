"""The ledger of a node: what a crash leaves is resumed, and everything else that disagrees is never served."""

import shutil

import pytest
import torch
from sites import a_request, accepting, asked, charges, hello, planned

from dpfl_lightning.commands.node import main
from dpfl_lightning.privacy.ledger.ledger import Ledger
from dpfl_lightning.sites.exchange import Refused, Released
from dpfl_lightning.sites.node.accept import open_study
from dpfl_lightning.sites.node.service import Listener, Node
from dpfl_lightning.sites.node.state import StateFolder
from dpfl_lightning.sites.wire import digest

ROUNDS = 4


def model(number):
    return torch.full((650,), float(number))


@pytest.fixture(scope="module")
def terms(tmp_path_factory):
    return planned(tmp_path_factory.mktemp("plan"), rounds=ROUNDS)


@pytest.fixture(scope="module")
def used(tmp_path_factory, terms):
    """The folder of a node after three releases of four, and its ledger and head after the first one."""
    place = tmp_path_factory.mktemp("used")
    with accepting(place, terms) as node:
        folder = node.state.plan_folder(digest(terms))
        for number in range(3):
            asked(node, a_request(terms, model(number)))
            if number == 0:
                for name in ("ledger.jsonl", "ledger.head"):
                    shutil.copy(folder / name, place / f"first {name}")
    return place


def without_its_end(folder):
    ledger = folder / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-1])


def cut(folder, lines):
    ledger = folder / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:lines]))


def no_head(folder):
    (folder / "ledger.head").unlink()


def zeros(folder):
    (folder / "ledger.head").write_bytes(b"\0" * 128)


def emptied(folder):
    (folder / "ledger.jsonl").write_bytes(b"")


def only_a_header_without_end(folder):
    cut(folder, 1)
    without_its_end(folder)


def older(folder, *names):
    for name in names:
        shutil.copy(folder.parents[2] / f"first {name}", folder / name)


def lost(folder):
    (folder / "ledger.jsonl").unlink()


def forgotten(folder):
    """All that the plan has written, so that it looks like one that was never served."""
    for name in ("ledger.jsonl", "ledger.head", "data_key", "private.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "releases")


DAMAGE = {
    "the last line without its end": [without_its_end],
    "the last line without its end, no head": [without_its_end, no_head],
    "the last line without its end, a head of zeros": [without_its_end, zeros],
    "a header without its end, no head": [only_a_header_without_end, no_head],
    "a header without its end, a head of zeros": [only_a_header_without_end, zeros],
    "a header without its end": [only_a_header_without_end],
    "a header alone": [lambda folder: cut(folder, 1)],
    "no head": [no_head],
    "a head of zeros": [zeros],
    "an empty head": [lambda folder: (folder / "ledger.head").write_bytes(b"")],
    "an empty ledger": [emptied],
    "an empty ledger, no head": [emptied, no_head],
    "an empty ledger, a head of zeros": [emptied, zeros],
    "no ledger": [lost],
    "no ledger, no head": [lost, no_head],
    "nothing": [forgotten],
    "one line less": [lambda folder: cut(folder, 3)],
    "two lines that the head does not count": [lambda folder: older(folder, "ledger.head")],
    "an older ledger": [lambda folder: older(folder, "ledger.jsonl")],
    "an older ledger with its head": [lambda folder: older(folder, "ledger.jsonl", "ledger.head")],
}


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "error.log"}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_ledger_that_does_not_agree_is_never_served_and_has_a_way_out(
    used, terms, what, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Listener, "serve", lambda self: None)
    place = tmp_path / "used"
    shutil.copytree(used, place)
    state = StateFolder(place / "site0")
    folder = state.plan_folder(digest(terms))
    for damage in DAMAGE[what]:
        damage(folder)
    left = files(folder)
    node = Node(state, open_study)
    try:
        replies = [asked(node, a_request(terms, model(number))) for number in range(3, 3 + ROUNDS)]
    finally:
        node.close()
    assert not [one for one in replies if isinstance(one, Released)], "its releases are more than the ledger says"
    (folder / "error.log").unlink()
    for verb in ("serve", "status", "verify"):
        assert main([verb, str(state.path)]) == 2, verb
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "Restore" in error
        assert f"dpfl node withdraw {state.path} {digest(terms)[:12]}" in error
    assert files(folder) == left, "nothing was lost"
    assert main(["withdraw", str(state.path), digest(terms)[:12]]) == 0
    assert "still reserves 2" in capsys.readouterr().out
    assert main(["status", str(state.path)]) == 0 and "withdrawn" in capsys.readouterr().out


def half(file, *args):
    """Write a part of a line, as a crash does."""
    file._file.write(b'{"client": 0, "ro')


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "before", "lines"),
    [("_write_head", lambda *args: None, 1), ("_append", half, 0), ("_append", lambda *args: None, 0)],
    ids=["between line and head", "within the line", "before the line"],
)
def test_a_crash_within_a_charge_counts_what_is_on_disk(tmp_path, terms, monkeypatch, name, before, lines):
    with accepting(tmp_path, terms) as node:
        asked(node, a_request(terms, model(0)))
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:

            def stop(*args):
                before(*args)
                raise KeyboardInterrupt

            patch.setattr(Ledger, name, stop)
            asked(node, a_request(terms, model(1)))
        node.close()
        again = Node(node.state, open_study)
        paid = asked(again, hello(digest(terms))).paid
        assert len(paid) == 1 + lines
        replies = [asked(again, a_request(terms, model(number))) for number in range(2, 2 + ROUNDS)]
        assert [isinstance(one, Released) for one in replies] == [True] * (ROUNDS - 1 - lines) + [False] * (1 + lines)
        assert replies[-1] == Refused("spent") and len(charges(again.state, terms)) == ROUNDS
        again.close()


STARTS = {
    "before the ledger": (lambda folder: None,),
    "an empty ledger": (lambda folder: (folder / "ledger.jsonl").touch(),),
    "a part of the header": (
        lambda folder: (folder / "ledger.jsonl").write_bytes(b'{"ledger": 2, "ru'),
        lambda folder: (folder / "ledger.head").write_bytes(
            b'{"run": "abababababababababababababababab", "lines": 0, "chain": ""}'.ljust(127) + b"\n"
        ),
    ),
}


@pytest.mark.parametrize("what", STARTS)
def test_a_crash_while_a_plan_is_opened_first_costs_nothing(tmp_path, terms, what):
    with accepting(tmp_path, terms) as node:
        folder = node.state.plan_folder(digest(terms))
        (folder / "data_key").write_text("ab" * 32)
        for damage in STARTS[what]:
            damage(folder)
        assert node.state.released(digest(terms)) == 0
        assert node.problem(digest(terms)) is None
        assert isinstance(asked(node, a_request(terms, model(0))), Released)


def test_a_plan_that_was_opened_and_asked_for_nothing_is_left_for_free(tmp_path, terms):
    with accepting(tmp_path, terms) as node:
        assert node.problem(digest(terms)) is None
        assert node.state.withdraw(digest(terms)).epsilon == 0
