"""Signed replies of nodes: forged and replayed ones and older ledgers are refused by name, and nothing is lost."""

import contextlib
import dataclasses
import json
import random
import shutil
import socket
import threading
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sites import asked, charges, configured, hello, key_of, nodes_of, over, planned, reply_in, with_copy

from dpfl_lightning.commands.ledger import main as ledger
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.messages.clients import LostClients
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.ledger.file import Head, read_header
from dpfl_lightning.privacy.ledger.ledger import Ledger, read_ledger
from dpfl_lightning.sites import signed, wire
from dpfl_lightning.sites.exchange import Paid, Refused, Released, Signed, ToNode, Welcome
from dpfl_lightning.sites.node.accept import open_study
from dpfl_lightning.sites.node.service import Node
from dpfl_lightning.sites.receipt import Receipt, digest_of, public_key
from dpfl_lightning.sites.server.channel import Sites
from dpfl_lightning.sites.server.connections import SocketConnection
from dpfl_lightning.sites.server.deploy import loop_over
from dpfl_lightning.sites.wire import digest

pytestmark = pytest.mark.e2e

MOST = wire.Limits(1 << 16, 1 << 16)
TWO = {"clients": {"count": 2, "learning_rate": 0.5, "batch_size": 240}, "privacy": {"epsilon": [2, 4]}}


@pytest.fixture
def terms(tmp_path):
    return planned(tmp_path, **TWO)


def options(folder):
    return configured(folder / "run", **TWO)


def again(content, key=None, **changed):
    """The reply in other bytes, whose receipt is changed and, if there is a key, signed with it."""
    message = wire.decode(Signed, content)
    receipt = dataclasses.replace(message.receipt, **changed)
    return wire.encode(dataclasses.replace(message, receipt=receipt if key is None else receipt.signed(key)))


def one_bit(content):
    return bytes([*content[:-1], content[-1] ^ 1])


#: what comes instead of a reply, of it and of the replies before -> words of the error, beside the name of the site
ATTACKS = {
    "another key": (lambda new, old: again(new, key=key_of(0)), "another signature"),
    "a changed number": (lambda new, old: one_bit(new), "another reply than the signed one"),
    "an earlier reply": (lambda new, old: old[-1], "a reply to another request: an earlier one was sent again"),
}


@pytest.mark.parametrize("what", ATTACKS)
def test_forged_and_replayed_replies_end_the_run_by_name_and_nothing_is_lost(tmp_path, terms, what):
    attack, words = ATTACKS[what]
    nodes, sent = nodes_of(tmp_path, terms), []

    def channel(content):
        sent.append(nodes[1].handle(content))
        return sent[-1] if len(sent) < 3 else attack(sent[-1], sent[:-1])  # in round 2

    with pytest.raises(UserError, match=rf"got from client 1:? .*{words}.*The run was saved"):
        loop_over(options(tmp_path), Sites(terms, (nodes[0].handle, channel))).run()
    assert [len(charges(node.state, terms)) for node in nodes] == [2, 2], "the charge of each node stands"
    mirror = tmp_path / "run" / "ledger.jsonl"
    assert sorted((one.client, one.round) for one in read_ledger(mirror)) == [(0, 1), (0, 2), (1, 1)]
    assert over(nodes, terms, options(tmp_path)).run(resume=True).finished, "with an honest reply"
    assert len(read_ledger(mirror)) == 4 and [len(charges(node.state, terms)) for node in nodes] == [2, 2]
    for node in nodes:
        node.close()


def other_key(nodes, sent):
    return again(sent[-1], key=key_of(5))


def earlier_hello(nodes, sent):
    return sent[0]


@pytest.mark.parametrize(
    ("attack", "words"),
    [(other_key, "node 2 of 2 another signature"), (earlier_hello, "client 1 a reply to another request")],
)
def test_the_first_contact_is_signed_for_this_server(tmp_path, terms, attack, words):
    nodes, sent = nodes_of(tmp_path, terms), []

    def channel(content):
        sent.append(nodes[1].handle(content))
        return attack(nodes, sent)

    sent.append(nodes[1].handle(wire.encode(hello(digest(terms), "of another day"))))
    with pytest.raises(LostClients, match=words):
        loop_over(options(tmp_path), Sites(terms, (nodes[0].handle, channel)))
    assert not (tmp_path / "run").exists()
    for node in nodes:
        node.close()


@pytest.mark.parametrize("elsewhere", [0, 1, 2])
def test_an_older_ledger_is_refused_by_name_before_it_spends_and_the_newest_copy_goes_on(tmp_path, elsewhere):
    """The copy is from before round 2, and is restored before round 3, after it has answered another server."""
    terms = planned(tmp_path, rounds=4, **TWO)
    nodes, given = nodes_of(tmp_path, terms, key=None), configured(tmp_path / "run", rounds=4, **TWO)
    folder, calls = nodes[1].state.path, []

    def channel(content):
        calls.append(1)
        if len(calls) == 3:  # hello, round 1
            shutil.copytree(folder, tmp_path / "copy")
        if len(calls) == 4:
            shutil.copytree(folder, tmp_path / "newest")
            nodes[1] = with_copy(nodes[1], tmp_path / "copy")
            for round in range(2, 2 + elsewhere):
                asked_for = dataclasses.replace(wire.decode(ToNode, content).request, round=round)
                other = ToNode(digest(terms), asked_for)
                assert isinstance(asked(nodes[1], other), Released)
        return nodes[1].handle(content)

    got = "1 of 2" if elsewhere == 0 else "others than the 2 of before"
    with pytest.raises(UserError, match=f"client 1 {got}: .* is an older copy"):
        loop_over(given, Sites(terms, (nodes[0].handle, channel))).run()
    assert [len(charges(node.state, terms)) for node in nodes] == [3, 1 + elsewhere]
    with pytest.raises(LostClients, match=f"client 1 {got}: .* is an older copy"):
        over(nodes, terms, given).run(resume=True)
    assert [len(charges(node.state, terms)) for node in nodes] == [3, 1 + elsewhere]
    nodes[1] = with_copy(nodes[1], tmp_path / "newest")
    assert over(nodes, terms, given).run(resume=True).finished
    for node in nodes:
        node.close()


def signed_again(content, reply=None, **head):
    """What a node signs in the place of its reply: other values in it, or of the head of its ledger."""
    receipt = wire.decode(Signed, content).receipt
    ledger = receipt.ledger.as_dict() | head
    message = wire.decode(Signed, signed.sign(reply or reply_in(content), receipt.request, key_of(1), receipt.plan))
    object.__setattr__(receipt, "reply", message.receipt.reply)
    for name, value in ledger.items():  # as a node of another program does
        object.__setattr__(receipt.ledger, name, value)
    signature = Ed25519PrivateKey.from_private_bytes(key_of(1)).sign(receipt._content()).hex()
    object.__setattr__(receipt, "signature", signature)
    return wire.encode(Signed(receipt, message.reply))


def with_paid(content, *changed):
    reply = reply_in(content)
    return signed_again(
        content, dataclasses.replace(reply, paid=tuple(dataclasses.replace(reply.paid[0], **one) for one in changed))
    )


#: what a node signs instead of its reply of round 1 -> words of the error
FALSE = {
    "a head of no run": (lambda reply: signed_again(reply, run="no digits"), "client 1: .*do not fit"),
    "a head of a long chain": (lambda reply: signed_again(reply, chain="ab" * 2000), "client 1"),
    "a head that a terminal obeys": (lambda reply: signed_again(reply, chain="\x1b[31m"), "client 1: .*do not fit"),
    "a head before the first": (lambda reply: signed_again(reply, lines=-5), "client 1: .*do not fit"),
    "a head without a header": (lambda reply: signed_again(reply, lines=0, chain=""), "client 1: .*do not fit"),
    "a round before the first": (lambda reply: with_paid(reply, {"round": -7}), "client 1 a release of round -7"),
    "rounds to come": (
        lambda reply: with_paid(reply, *({"round": round} for round in range(1, 6))),
        "client 1 a release of round 2",
    ),
    "a number that is none": (lambda reply: with_paid(reply, {"number": -1}), "releases of client 1, in order"),
    "numbers that are left out": (lambda reply: with_paid(reply, {}, {"number": 2}), "releases of client 1, in order"),
    "an account instead of a release": (
        lambda reply: signed_again(reply, Welcome(False, reply_in(reply).paid)),
        "an account from client 1",
    ),
}


@pytest.mark.parametrize("what", FALSE)
def test_what_no_plan_has_is_refused_by_name_before_it_is_written(tmp_path, terms, what):
    false, words = FALSE[what]
    nodes, calls = nodes_of(tmp_path, terms), []

    def channel(content):
        calls.append(1)
        reply = nodes[1].handle(content)
        return false(reply) if len(calls) == 2 else reply

    with pytest.raises(UserError, match=words):
        loop_over(options(tmp_path), Sites(terms, (nodes[0].handle, channel))).run()
    mirror = tmp_path / "run" / "ledger.jsonl"
    assert [one.client for one in read_ledger(mirror)] == [0], "all or none of it"
    assert over(nodes, terms, options(tmp_path)).run(resume=True).finished, "with an honest reply"
    assert len(read_ledger(mirror)) == 4 and ledger([str(tmp_path / "run")]) == 0
    for node in nodes:
        node.close()


def silent(reply):
    """A reply that tells nothing of what the node has paid for."""
    return signed_again(reply, dataclasses.replace(reply_in(reply), paid=()))


@pytest.mark.parametrize("instead", [silent, lambda reply: signed_again(reply, Refused("spent"))])
def test_all_releases_that_a_node_has_signed_are_on_record(tmp_path, terms, instead):
    nodes, calls = nodes_of(tmp_path, terms), []

    def channel(content):
        calls.append(1)
        reply = nodes[1].handle(content)
        return instead(reply) if len(calls) == 2 else reply

    assert loop_over(options(tmp_path), Sites(terms, (nodes[0].handle, channel))).run().finished
    assert len(read_ledger(tmp_path / "run" / "ledger.jsonl")) == 4 and ledger([str(tmp_path / "run")]) == 0
    for node in nodes:
        node.close()


def test_a_node_that_never_tells_all_that_it_has_signed_ends_the_run_by_name(tmp_path, terms):
    nodes, calls = nodes_of(tmp_path, terms), []

    def channel(content):
        calls.append(1)
        reply = nodes[1].handle(content)
        return reply if len(calls) == 1 else signed_again(reply, Refused("spent"))

    with pytest.raises(UserError, match="tell all 1 releases that they have signed, got fewer from client 1"):
        loop_over(options(tmp_path), Sites(terms, (nodes[0].handle, channel))).run()
    for node in nodes:
        node.close()


def test_a_release_of_a_node_that_halts_counts_as_paid(tmp_path, terms, monkeypatch):
    nodes, calls = nodes_of(tmp_path, terms), []

    def channel(content):
        calls.append(1)
        if len(calls) == 3:  # in round 2
            monkeypatch.setattr(nodes[1]._studies[digest(terms)], "_keep", None)
        return nodes[1].handle(content)

    with pytest.warns(UserNotice, match="client 1 does not answer: its release of round 2 counts as paid"):
        assert loop_over(options(tmp_path), Sites(terms, (nodes[0].handle, channel))).run().finished
    assert len(read_ledger(tmp_path / "run" / "ledger.jsonl")) == 4
    for node in nodes:
        node.close()


def test_a_run_keeps_the_heads_that_nodes_have_signed(tmp_path, terms, capsys):
    nodes, run = nodes_of(tmp_path, terms), tmp_path / "run"
    over(nodes, terms, options(tmp_path)).run()
    assert ledger([str(run)]) == 0
    assert "receipts.json beside it holds the heads of ledgers that 2 nodes signed" in capsys.readouterr().out
    file, mirror = run / "receipts.json", run / "ledger.jsonl"
    written = json.loads(file.read_text())
    rows = written["clients"]
    assert [row["public_key"] for row in rows] == [public_key(key_of(client)) for client in range(2)]
    for node, row in zip(nodes, rows, strict=True):
        assert row["ledger"] == json.loads((node.state.plan_folder(digest(terms)) / "ledger.head").read_text())
        node.close()

    def problem(**changed):
        file.write_text(json.dumps({**written, "clients": [rows[0], {**rows[1], **changed}]}))
        assert ledger([str(run)]) == 2
        return capsys.readouterr().err

    for changed in (
        {"public_key": rows[0]["public_key"]},
        {"ledger": rows[0]["ledger"]},
        {"client": "one"},
        {"client": 0},
        {"run": 1},
    ):
        assert "must hold receipts that nodes have signed" in problem(**changed)
    charged = read_ledger(mirror)
    for one in (mirror, run / "ledger.head"):
        one.rename(tmp_path / one.name)
    shorter = Ledger(mirror, read_header(tmp_path / "ledger.jsonl"))
    shorter.charge(charged[:-1])  # a whole ledger with its head
    shorter.close()
    must = "have the 2 releases that the node of client 1 has signed, got 1"
    assert must in problem()
    for one in (mirror, run / "ledger.head"):
        (tmp_path / one.name).replace(one)
    file.unlink()
    with pytest.raises(UserError, match=r"receipts\.json` must lie beside ledger\.jsonl"):
        over([Node(node.state, open_study) for node in nodes], terms, options(tmp_path)).run(resume=True)


def other_signer(row):
    fields = {name: value for name, value in row.items() if name not in ("client", "public_key")}
    receipt = Receipt(**fields | {"ledger": Head(**row["ledger"])}).signed(key_of(7))
    return {"client": row["client"], "public_key": public_key(key_of(7)), **dataclasses.asdict(receipt)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[:1], "what the node of client 1 has signed"),
        (lambda rows: [*rows, rows[0]], "must hold receipts"),
        (lambda rows: [rows[0], {**rows[1], "client": 99}], "must hold receipts"),
        (lambda rows: [*rows, {**rows[1], "client": -1}], "must hold receipts"),
        (lambda rows: [rows[0], other_signer(rows[1])], "must hold receipts"),
    ],
)
def test_a_run_is_resumed_with_the_receipts_of_its_nodes_only(finished, change, words):
    nodes, terms, folder = finished
    file = folder / "run" / "receipts.json"
    content = file.read_text()
    written = json.loads(content)
    file.write_text(json.dumps({**written, "clients": change(written["clients"])}))
    with pytest.raises(UserError, match=rf"receipts\.json` must .*{words}|receipts\.json` {words}"):
        over(nodes, terms, options(folder)).run(resume=True)
    file.write_text(content)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    terms = planned(folder, **TWO)
    nodes = nodes_of(folder, terms)
    over(nodes, terms, options(folder)).run()
    yield nodes, terms, folder
    for node in nodes:
        node.close()


def drips(connection):
    """A reply of an allowed size that never ends."""
    connection.sendall(wire.PREFIX.pack(b"DPFL", wire.VERSION, 100, 1000))
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b" ")
            time.sleep(0.05)


def floods(connection):
    """A reply of four gigabytes."""
    connection.sendall(wire.PREFIX.pack(b"DPFL", wire.VERSION, 100, 1 << 32) + bytes(1000))


@pytest.mark.parametrize(("false", "words"), [(drips, "within --node_wait, got nothing from"), (floods, "too long")])
def test_a_reply_is_no_longer_and_takes_no_longer_than_the_plan_allows(finished, tmp_path, false, words):
    nodes, terms, _ = finished
    began, path = time.monotonic(), str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                false(connection)
                connection.recv(1 << 16)

        threading.Thread(target=serve, daemon=True).start()
        channel = SocketConnection(path, 0.5)
        with pytest.raises(LostClients, match=f"{path}.*{words}|{words}.*{path}"):
            loop_over(options(tmp_path), Sites(terms, (nodes[0].handle, channel)))
        channel.close()
    assert time.monotonic() - began < 5


def test_a_node_that_cannot_read_a_request_is_told_from_one_that_repeats_a_reply(terms):
    reply = signed.sign(Refused("malformed"), digest_of(b""), key_of(0))
    with pytest.raises(signed.Forged, match="install the same version on both sides"):
        signed.answer(reply, b"of another version", digest(terms), {0: public_key(key_of(0))}, MOST)


def unsigned(answer):
    return dataclasses.replace(answer.receipt, signature="")


def test_no_changed_byte_of_a_reply_is_believed():
    request, key = b"request", {3: public_key(key_of(3))}
    reply = signed.sign(Refused("spent"), digest_of(request), key_of(3), "plan")
    honest, draw = signed.answer(reply, request, "plan", key, MOST), random.Random(1)
    assert honest.client == 3 and honest.reply == Refused("spent")
    for _ in range(500):
        place = draw.randrange(len(reply))
        changed = bytes([*reply[:place], draw.randrange(256), *reply[place + 1 :]])
        try:
            found = signed.answer(changed, request, "plan", key, MOST)
        except (signed.Forged, wire.WireError):
            continue
        assert found.reply == honest.reply and unsigned(found) == unsigned(honest), "another form of the same"


PAID = (Paid(1, 0, "train", GaussianEvent(1.0, 1.0, 1)),)


@pytest.mark.parametrize(
    ("given", "after", "words"),
    [
        ({}, {"signature": ""}, "another signature"),
        ({}, {"signature": "no digits"}, "another signature"),
        ({}, {"ledger": None}, "another signature"),
        ({"ledger": None}, {}, "no account of its ledger"),
        ({"plan": "another"}, {}, "no account of its ledger"),
        ({"paid": PAID}, {}, "1 releases beside a ledger of 0"),
    ],
)
def test_an_account_is_signed_and_that_of_the_ledger_of_the_plan(given, after, words):
    usual = {"plan": "plan", "ledger": Head("ab" * 16, 1, "cd" * 16)}
    account = Welcome(False, given.get("paid", ()))
    reply = signed.sign(
        account, digest_of(b"sent"), key_of(0), **{name: given.get(name, usual[name]) for name in usual}
    )
    keys = {0: public_key(key_of(0))}
    assert given or signed.answer(reply, b"sent", "plan", keys, MOST).reply == account
    with pytest.raises(signed.Forged, match=words):
        signed.answer(again(reply, **after), b"sent", "plan", keys, MOST)
    with pytest.raises(wire.WireError):
        signed.answer(wire.encode(account), b"sent", "plan", keys, MOST)
