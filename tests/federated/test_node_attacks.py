"""A hostile server, damaged folders and full disks: what a node must never release, believe or delete."""

import contextlib
import dataclasses
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable

import pytest
import torch
from sites import (
    a_question,
    a_request,
    accepting,
    asked,
    configured,
    hello,
    key_of,
    listening,
    planned,
    reply_in,
    settings_for,
    state_of,
    with_lines,
)

from dpfl_lightning.commands.node import main
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.jobs import LocalTraining
from dpfl_lightning.federated.messages.query import FeatureSums
from dpfl_lightning.federated.messages.requests import Train
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.accounting.planned import Planned
from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.sites import signed, sockets, wire
from dpfl_lightning.sites.exchange import Refused, Released, ToNode
from dpfl_lightning.sites.node.accept import accept, open_study
from dpfl_lightning.sites.node.service import MOST_CONNECTIONS, Listener, Node
from dpfl_lightning.sites.node.state import StateFolder
from dpfl_lightning.sites.receipt import digest_of
from dpfl_lightning.sites.server.connections import SocketConnection
from dpfl_lightning.sites.terms import read_terms
from dpfl_lightning.sites.wire import digest

NOISE = 50.0


@pytest.fixture
def terms(tmp_path):
    return with_lines(planned(tmp_path), Planned("features", GaussianEvent(1.0, NOISE, 1), 4))


@pytest.fixture
def node(tmp_path, terms):
    with accepting(tmp_path, terms) as made:
        yield made


def features(terms, clip_norm, divisor):
    nets = torch.randn(1, 650, generator=torch.Generator().manual_seed(1))
    mechanism = Gaussian(1.0, NOISE, 1.0, divisor)
    object.__setattr__(mechanism, "clip_norm", clip_norm)  # a hostile server checks nothing
    return a_question(digest(terms), 1, FeatureSums(mechanism_of={0: mechanism}, nets=nets, num_classes=10))


@pytest.mark.parametrize("clip_norm", [1e-305, 1e-310])
def test_no_clip_norm_of_a_question_removes_the_noise(node, terms, clip_norm):
    """1290 numbers at noise 50: two answers with separate noise cannot agree in the sign of each."""
    one, other = (asked(node, features(terms, clip_norm, divisor)) for divisor in (1.0, 2.0))
    released = isinstance(one, Released) and isinstance(other, Released)
    assert not (released and one.value.sign().equal(other.value.sign())), "exact signs of private sums"


def of_model(terms, model):
    options = {**terms.plan.options, "model": model}
    return dataclasses.replace(terms, plan=dataclasses.replace(terms.plan, options=options))


@pytest.mark.parametrize("text", ["\x1b[2J\x1b[H", "checked.\n\n(0.01, 1e-9)-differential privacy per record"])
def test_no_text_of_a_plan_forges_what_it_means(tmp_path, terms, capsys, text):
    state = state_of(tmp_path, 0, key=None)
    line = terms.plan.schedule.clients[0].planned[0]
    named = dataclasses.replace(line, purpose=f"features{text}")
    for forged in (
        with_lines(terms, named),
        with_lines(terms, line, caveats=(text,)),
        with_lines(terms, line, strategies={f"1 {text}": ""}),
        dataclasses.replace(terms, run=text),
        of_model(terms, {"name": f"logistic{text}"}),
        of_model(terms, {"name": "logistic", f"width{text}": 1}),
        of_model(terms, {"class_path": f"a.B{text}", "init_args": {f"weights{text}": text, "more": [{text: text}]}}),
        of_model(terms, text),
        of_model(terms, {"class_path": "a.B", "init_args": {"long": ["x"] * 10_000, "weights": text}}),
    ):
        file = tmp_path / "plan.json"
        file.write_text(wire.to_text(forged))
        main(["accept", str(state.path), str(file), "--show"])
        shown = "".join(capsys.readouterr())
        assert text[:12] not in shown, "refuse it, or show it escaped"
        assert len(shown) < 10_000


def test_only_a_socket_is_removed_before_a_node_listens(tmp_path):
    file = tmp_path / "patients.csv"
    file.write_text("age,ill\n")
    with pytest.raises(UserError, match="--socket"):
        Listener(None, file, 1.0).close()
    with listening(Loud(), tmp_path / "s"):
        (tmp_path / "s").unlink()
        file.rename(tmp_path / "s")
    assert (tmp_path / "s").is_file(), "it is no longer the socket of this node"


def test_replies_to_no_message_wait_for_the_slot_too(node, tmp_path):
    with listening(node, tmp_path / "s", slot=0.5), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tmp_path / "s"))
        began = time.monotonic()
        connection.sendall(b"x" * wire.PREFIX.size)
        assert reply_in(sockets.receive(connection, wire.Limits(1 << 20, 1 << 20))) == Refused("malformed")
        assert time.monotonic() - began >= 0.5


@pytest.mark.e2e
def test_the_limit_adds_epsilons_of_one_relation_only(tmp_path):
    state = state_of(tmp_path, 0, key=None)
    accept(state, planned(tmp_path), 5.0)
    with pytest.raises(UserError):
        accept(state, planned(tmp_path, privacy={"adjacency": "replace_one"}), 5.0)


@pytest.mark.e2e
def test_a_full_disk_halts_the_plan_in_memory(tmp_path, monkeypatch):
    """Otherwise each repeated request is charged, and the plan is used up without a release."""
    plan, state = planned(tmp_path), state_of(tmp_path, 0, key=None)
    accept(state, plan, 2.5)
    node = Node(state, open_study)

    def full(*args, **more):
        raise OSError(28, "No space left on device")

    asked(node, a_request(plan, torch.zeros(650), round=0))
    monkeypatch.setattr(node._studies[digest(plan)], "_keep", full)
    monkeypatch.setattr("pathlib.Path.touch", full)
    assert [asked(node, a_request(plan, torch.zeros(650))) for _ in range(2)] == [Refused("halted")] * 2
    node.close()


def test_damaged_files_of_a_node_are_one_sentence(tmp_path, terms):
    text = wire.to_text(terms)
    for old, new in (
        ('"rounds": 2', '"rounds": "two"'),
        ('"rounds": 2', '"rounds": 4611686018427387904'),
        ('"batch_size": 240', '"batch_size": 0'),
        ('"num_records": 480,', '"num_records": -1,'),
    ):
        assert old in text
        (tmp_path / "plan.json").write_text(text.replace(old, new, 1))
        with pytest.raises(UserError, match="PLAN"):
            read_terms(tmp_path / "plan.json")
    state = StateFolder(tmp_path)
    (tmp_path / "node.json").write_text('{"format": 1}')
    with pytest.raises(UserError, match="settings of a node"):
        state.settings()
    state.save(settings_for(0))
    assert state.settings() == settings_for(0) and configured(tmp_path).rounds == 2


class Signing:
    def sign(self, reply, request):
        return signed.sign(reply, request, key_of(0))

    def refusal(self, start):
        return None


class Loud(Signing):
    """A node whose replies fill every buffer of a socket."""

    limits = wire.Limits(1 << 10, 0)
    reply = wire.encode(Released(torch.zeros(1 << 19), ()))

    def handle(self, content):
        return self.reply


def said_hello(path, plan="?"):
    connection = connected(path)
    connection.sendall(wire.encode(hello(plan)))
    return connection


def test_who_does_not_read_delays_nobody(tmp_path):
    with listening(Loud(), tmp_path / "s"), said_hello(tmp_path / "s") as silent:
        assert silent.recv(1)
        with said_hello(tmp_path / "s") as other:
            assert other.recv(1)


def test_a_slow_connection_gets_a_large_reply():
    """The timeout of a socket is for all that one call of `sendall` sends."""

    class Slow:
        got, settimeout = b"", lambda self, seconds: setattr(self, "seconds", seconds)

        def sendall(self, part):
            if len(part) / 1e4 > self.seconds:
                raise TimeoutError
            self.got += part

    connection = Slow()
    sockets.send(connection, Loud.reply)
    assert connection.got == Loud.reply


def test_a_node_outlives_connections_that_it_cannot_accept(tmp_path, monkeypatch):
    accept, failed = socket.socket.accept, []

    def full(self):
        if len(failed) < 20:  # more often than there are seats
            failed.append(1)
            raise OSError(24, "Too many open files")
        return accept(self)

    monkeypatch.setattr("dpfl_lightning.sites.node.service._PAUSE", 0.001)
    monkeypatch.setattr(socket.socket, "accept", full)
    with listening(Loud(), tmp_path / "s"), said_hello(tmp_path / "s") as connection:
        assert connection.recv(1)


def test_idle_connections_are_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("dpfl_lightning.sites.node.service._IDLE", 0.1)
    with listening(Loud(), tmp_path / "s"), connected(tmp_path / "s") as idle:
        assert idle.recv(1) == b""


def connected(path):
    connection = sockets.connected(str(path), 5.0)
    connection.settimeout(5.0)
    return connection


def for_plan(connection, plan):
    connection.sendall(wire.encode(hello(plan)))
    return reply_in(sockets.receive(connection, wire.Limits(1 << 20, 1 << 20), 5.0))


HEADER = wire.encode(hello("unknown"))[wire.PREFIX.size :]

#: what a stranger sends, and no more
UNFINISHED = {
    "nothing": b"",
    "a prefix without its end": wire.PREFIX.pack(b"DPFL", wire.VERSION, 100, 0)[:9],
    "a header without its end": wire.encode(hello("unknown"))[:-1],
    "no model of an unknown plan": wire.PREFIX.pack(b"DPFL", wire.VERSION, len(HEADER), 1 << 20) + HEADER,
}


@pytest.mark.parametrize("count", [MOST_CONNECTIONS, 40])
@pytest.mark.parametrize("sent", UNFINISHED)
def test_strangers_who_send_no_whole_request_keep_nobody_out(sent, count, tmp_path):
    with listening(Patient(), tmp_path / "s"), contextlib.ExitStack() as stack:
        early = stack.enter_context(connected(tmp_path / "s"))
        assert for_plan(early, "known") == Refused("spent")
        for _ in range(count):
            with contextlib.suppress(BrokenPipeError):  # it was dropped already
                stack.enter_context(connected(tmp_path / "s")).sendall(UNFINISHED[sent])
        began = time.monotonic()
        late = stack.enter_context(connected(tmp_path / "s"))
        assert for_plan(late, "known") == Refused("spent")
        assert for_plan(early, "known") == Refused("spent"), "who has named an accepted plan keeps the connection"
        assert time.monotonic() - began < 1.0


@pytest.mark.e2e
def test_strangers_who_send_byte_by_byte_keep_nobody_out(tmp_path):
    with listening(Patient(), tmp_path / "s"), contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connected(tmp_path / "s")) for _ in range(MOST_CONNECTIONS)]
        drips = [threading.Thread(target=dripping, args=(one, wire.encode(hello("x")), 0.01)) for one in slow]
        for one in drips:
            one.start()
        began = time.monotonic()
        assert for_plan(stack.enter_context(connected(tmp_path / "s")), "known") == Refused("spent")
        assert time.monotonic() - began < 1.0
        for one in drips:
            one.join()


def test_refusals_of_strangers_take_no_turn(tmp_path):
    """Else each of them delays the next request by a slot."""
    with listening(Patient(), tmp_path / "s", slot=0.2), contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connected(tmp_path / "s")) for _ in range(MOST_CONNECTIONS - 1)]
        late = stack.enter_context(connected(tmp_path / "s"))
        for one in strangers:
            one.sendall(wire.encode(hello("unknown")))
        began = time.monotonic()
        assert for_plan(late, "known") == Refused("spent")
        assert 0.2 <= time.monotonic() - began < 1.0
        for one in strangers:
            assert reply_in(sockets.receive(one, wire.Limits(1 << 20, 1 << 20), 5.0)) == Refused("unknown_plan")


def test_a_request_that_is_computed_keeps_its_seat(tmp_path):
    go_on, begun = threading.Event(), threading.Semaphore(0)

    class Slow(Patient):
        def refusal(self, start):
            begun.release()
            return super().refusal(start)

        def handle(self, content):
            assert go_on.wait(5.0)
            return super().handle(content)

    with listening(Slow(), tmp_path / "s"), contextlib.ExitStack() as stack:
        busy = [stack.enter_context(said_hello(tmp_path / "s", "known")) for _ in range(MOST_CONNECTIONS - 1)]
        assert all(begun.acquire(timeout=5.0) for _ in busy)
        time.sleep(0.2)  # each is busy, one after the other
        for _ in range(40):
            stack.enter_context(connected(tmp_path / "s"))
        go_on.set()
        for one in busy:
            assert reply_in(sockets.receive(one, wire.Limits(1 << 20, 1 << 20), 5.0)) == Refused("spent")


def test_a_node_that_accepts_no_connection_is_late(tmp_path):
    with socket.socket(socket.AF_UNIX) as full, contextlib.ExitStack() as stack:
        full.bind(str(tmp_path / "s"))
        full.listen(0)
        stack.enter_context(connected(tmp_path / "s"))
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            SocketConnection(str(tmp_path / "s"), 0.2)(b"", wire.Limits(0, 0))
        with pytest.raises(UserError, match="--socket"):
            Listener(None, tmp_path / "s", 1.0)
        assert time.monotonic() - began < 1.0


def dripping(connection, content, seconds):
    """Send one byte after the other with pauses, until the other side has had enough."""
    with contextlib.suppress(OSError):
        for byte in content:
            connection.sendall(bytes([byte]))
            time.sleep(seconds)


def check_dropped(ours: socket.socket, other_side: threading.Thread, work: Callable[[], object]) -> None:
    """Our side gives up within a second, whatever the other one does."""
    other_side.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        work()
    assert time.monotonic() - began < 1.0
    ours.close()
    other_side.join()


@pytest.mark.parametrize("part", ["the prefix", "the header", "the numbers"])
def test_a_message_that_never_ends_is_dropped_however_steady_it_is(part, monkeypatch):
    monkeypatch.setattr(sockets, "_PATIENCE", 0.2)
    message = wire.encode(Released(torch.zeros(1 << 12), ()))
    sent = {"the prefix": 2, "the header": wire.PREFIX.size + 5, "the numbers": len(message) - 4000}[part]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(message[:sent])
        thread = threading.Thread(target=dripping, args=(theirs, message[sent : sent + 40], 0.05))
        check_dropped(ours, thread, lambda: sockets.receive(ours, wire.Limits(1 << 20, 1 << 20)))


def test_a_reply_that_is_read_for_ever_is_dropped(monkeypatch):
    monkeypatch.setattr(sockets, "_PATIENCE", 0.2)
    monkeypatch.setattr(sockets, "_SLOWEST", 1 << 30)
    ours, theirs = socket.socketpair()

    def sip():
        with contextlib.suppress(OSError):
            for _ in range(100):
                time.sleep(0.02)
                if not theirs.recv(1 << 12):
                    return

    with ours, theirs:
        check_dropped(ours, threading.Thread(target=sip), lambda: sockets.send(ours, b"\0" * (1 << 24)))


def test_time_for_a_message_grows_with_its_bytes(monkeypatch):
    """A model that takes longer than the patience arrives, if its bytes do."""
    monkeypatch.setattr(sockets, "_PATIENCE", 0.2)
    monkeypatch.setattr(sockets, "_SLOWEST", 1 << 14)
    message = wire.encode(Released(torch.zeros(1 << 12), ()))
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def steadily():
            for start in range(0, len(message), 1 << 10):
                theirs.sendall(message[start : start + (1 << 10)])
                time.sleep(0.02)

        thread = threading.Thread(target=steadily)
        thread.start()
        assert sockets.receive(ours, wire.Limits(1 << 20, 1 << 20)) == message
        thread.join()


MODELS = 1 << 22  # bytes of the numbers of a request


class Patient(Signing):
    """A node with one accepted plan, which needs large requests."""

    limits = wire.Limits(1 << 18, MODELS)
    asked = ()

    def refusal(self, start):
        return None if wire.text_field(start, "plan") == "known" else Refused("unknown_plan")

    def handle(self, content):
        self.asked = (*self.asked, len(content))
        return self.sign(Refused("spent"), digest_of(content))


def pushed(connections, content):
    """Send as much of the content as the other side takes from each connection, but for its last byte."""
    left = dict.fromkeys(connections, memoryview(content)[:-1])
    idle = 0
    while any(left.values()) and idle < 20:
        before = {**left}
        for one, part in left.items():
            with contextlib.suppress(BlockingIOError):
                left[one] = part[one.send(part) :]
        idle = idle + 1 if before == left else 0
        time.sleep(0.01 if idle else 0)


def a_model_for(plan):
    numbers = torch.zeros(MODELS // 4)
    request = Train(1, "train", Gaussian(1.0, 1.0, 1.0, 1.0), 1, LocalTraining(), 1.0, numbers)
    return wire.encode(ToNode(plan, request))


@pytest.mark.parametrize(("plan", "most"), [("unknown", 0), ("known", 1)])
def test_connections_hold_one_message_of_a_known_plan_together_and_none_of_others(plan, most, tmp_path):
    with listening(Patient(), tmp_path / "s"), contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(4)]
        for one in connections:
            one.connect(str(tmp_path / "s"))
            one.setblocking(False)
        content = a_model_for(plan)
        tracemalloc.start()
        try:
            pushed(connections, content)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < 1.25 * most * MODELS + (MODELS >> 2)
        assert most == 0 or held > 0.9 * MODELS, "the first one is being read"


def test_a_model_for_no_accepted_plan_is_refused_and_the_next_request_answered(tmp_path):
    """Nothing of it is kept, and the stream goes on after it."""
    node = Patient()
    with listening(node, tmp_path / "s"), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5.0)
        connection.connect(str(tmp_path / "s"))
        for plan, code in (("unknown", "unknown_plan"), ("known", "spent")):
            content = a_model_for(plan)
            connection.sendall(content)
            assert reply_in(sockets.receive(connection, wire.Limits(1 << 20, 1 << 20))) == Refused(code)
        assert node.asked == (len(content),)


def test_a_slow_model_delays_no_short_request(tmp_path):
    with listening(Patient(), tmp_path / "s"), socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(tmp_path / "s"))
        slow.setblocking(False)
        pushed([slow], a_model_for("known"))
        with said_hello(tmp_path / "s") as other:
            assert other.recv(1)


@pytest.mark.parametrize("header", [b"{", b"[]", b"3", b'{"message": []}', b'{"message": {"plan": ["x"]}}'])
def test_a_header_that_names_no_plan_is_refused_before_its_numbers(node, tmp_path, header):
    with listening(node, tmp_path / "s"), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5.0)
        connection.connect(str(tmp_path / "s"))
        connection.sendall(wire.PREFIX.pack(b"DPFL", wire.VERSION, len(header), 5000) + header)
        assert reply_in(sockets.receive(connection, wire.Limits(1 << 20, 1 << 20))) == Refused("malformed")


def test_nodes_know_from_a_header_whose_models_they_read(node, terms):
    for plan, refused in ((digest(terms), None), ("0" * 64, "unknown_plan"), ("../" + digest(terms), "unknown_plan")):
        content = a_model_for(plan)
        start = content[: len(content) - MODELS]
        assert node.refusal(start) == (None if refused is None else Refused(refused))
    node.state.withdraw(digest(terms))
    assert node.refusal(start.replace(b"../", b"")) == Refused("withdrawn")
