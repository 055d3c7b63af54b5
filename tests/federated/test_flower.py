"""Messages to nodes over Flower: each reply to its message, fixed codes, losses. `fake_flower` stands for Flower."""

import contextlib
import socket
import threading

import fake_flower
import pytest
from rooms import imported

from dpfl_lightning import flower
from dpfl_lightning.errors import UserError
from dpfl_lightning.sites.server import flower as transport


@pytest.fixture(autouse=True)
def _flwr(monkeypatch):
    monkeypatch.setattr(transport, "POLL", 0.01)
    fake_flower.install(monkeypatch)


@contextlib.contextmanager
def answering(path, answer):
    """A Unix socket whose requests `answer` turns into replies; None closes the connection without one."""

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                with connection.makefile("rb") as stream:
                    request = stream.read()
                if (reply := answer(request)) is not None:
                    with contextlib.suppress(BrokenPipeError):  # nobody waits any more
                        connection.sendall(reply)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield str(path)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def grid_of(*paths):
    return fake_flower.FakeGrid(
        {7 + place: str(path) for place, path in enumerate(paths)}, fake_flower.app("client_app").app.handlers
    )


def test_two_sites_compute_at_the_same_time_and_each_reply_goes_to_its_message(tmp_path):
    both, results = threading.Barrier(2, timeout=10), {}

    def slow(request):
        both.wait()  # nobody comes past here before both have the request
        return request[::-1] * 3

    with answering(tmp_path / "a", slow) as first, answering(tmp_path / "b", slow) as second:
        channels = transport.connected(grid_of(first, second), 2, 10.0)
        calls = [(channels[0], b"abc"), (channels[1], b"x" * 300_000 + b"y")]
        threads = [
            threading.Thread(target=lambda one, text: results.setdefault(text, one(text)), args=call) for call in calls
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {text: text[::-1] * 3 for _, text in calls}


def test_a_node_that_does_not_answer_is_a_fixed_code_without_the_text_of_an_error(tmp_path):
    with answering(tmp_path / "closing", lambda request: None) as closing:
        grid = grid_of(tmp_path / "absent", closing)
        for channel in transport.connected(grid, 2, 10.0):
            with pytest.raises(ConnectionError, match=r"^error 100 of Flower from SuperNode"):
                channel(b"hello")
    forward, (message, *_) = grid.handlers["query.forward"], grid.sent
    reply = forward(message, fake_flower.SimpleNamespace(node_config={}))  # no socket is configured
    assert (reply.error.code, reply.error.reason) == (100, None) and reply.content is None


def test_a_lost_supernode_and_a_late_reply_are_losses_within_the_time(tmp_path):
    late = threading.Event()

    def waits(request):
        late.wait(10)
        return b"late" + request

    with answering(tmp_path / "a", waits) as path:
        grid = grid_of(path)
        (channel,) = transport.connected(grid, 1, 0.1)
        with pytest.raises(TimeoutError, match=r"SuperNode 7 within 0\.1 s"):
            channel(b"1")
        assert grid.sent[0].metadata.ttl == 0.1, "Flower forgets the message then"
        late.set()
        again = transport.GridConnection(grid, 7, 10.0, threading.Lock())
        assert again(b"2") == b"late2", "and never the reply to the first message"
    del grid.sockets[7]
    with pytest.raises(ConnectionError, match="knows no SuperNode 7"):
        channel(b"3")
    grid.sockets[7], grid.handlers = "", {"query.forward": lambda *_: fake_flower.Message({}, reply_to=grid.sent[-1])}
    with pytest.raises(ConnectionError, match="another app"):
        channel(b"4")


def test_the_server_waits_for_one_supernode_of_each_site(tmp_path, capsys):
    grid = grid_of(tmp_path / "a")
    with pytest.raises(UserError, match=r"`SuperNodes` must be connected within --node_wait, 2 of them.*got 1"):
        transport.connected(grid, 2, 0.05)
    assert "1 are connected" in capsys.readouterr().out
    timer = threading.Timer(0.05, grid.sockets.setdefault, (8, "b"))
    timer.start()
    assert [one.supernode for one in transport.connected(grid, 2, 10.0)] == [7, 8]


def test_a_command_that_fails_fails_in_flower_too(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    context = fake_flower.SimpleNamespace(run_config={"folder": str(tmp_path), "fit": "--config digits"})
    with pytest.raises(RuntimeError, match="status 2"):
        fake_flower.app("server_app").app.handlers["main"](grid_of(), context)
    assert "`--plan` must be given" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="status 2"):
        flower.fit(grid_of(), str(tmp_path), "--config digits --plan plan.json --nodes a b")
    assert "`--nodes` must be left out" in capsys.readouterr().err


def test_the_client_app_imports_the_standard_library_and_flower_only():
    modules = {name.rpartition(".")[0] or name for name in imported(fake_flower.APP / "client_app.py")}
    assert modules == {"socket", "flwr.app", "flwr.clientapp"}
