"""Runs of 300 rounds beside a real MLflow server that is away, slow, locked or busy: all rounds are in its store.

`python -m pytest tests/test_mlflow_server.py -m slow` starts the server on this machine; `DPFL_ROUNDS` is the number
of rounds.
"""

import base64
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import warm
from conftest import private, small_loop
from mlflow.tracking import MlflowClient
from ranked_runs import free_port

from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.reporting.curves import read
from dpfl_lightning.reporting.mlflow import Tracking
from dpfl_lightning.sync import main as sync

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:MLflow")]

ROUNDS = int(os.environ.get("DPFL_ROUNDS", 300))
EXPERIMENT = "faults"


class Server:
    """`mlflow server` over an SQLite store; it can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        words = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        words += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        words += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # seven processes less
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words], stdout=log, stderr=log, env=environment, start_new_session=True
            )
        for _ in range(600):
            time.sleep(0.2)
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5)
                return
            except (urllib.error.URLError, OSError):
                assert self.process.poll() is None, (self.folder / "server.log").read_text()
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def runs(self) -> list:
        client = MlflowClient(self.uri)
        return client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])


@pytest.fixture
def server(tmp_path, monkeypatch):
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "server").mkdir()
    server = Server(tmp_path / "server")
    yield server
    server.kill()


@contextmanager
def in_front(server: Server, delay: float = 0.0, login: str = ""):
    """The address of a server that passes everything on, after `delay` seconds and with this login only."""

    class Passing(BaseHTTPRequestHandler):
        def pass_on(self):
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            time.sleep(passing.delay)
            wanted = f"Basic {base64.b64encode(passing.login.encode()).decode()}"
            if passing.login and self.headers.get("Authorization") != wanted:
                self.answer(401, {}, b"no")
                return
            headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host",)}
            request = urllib.request.Request(server.uri + self.path, content or None, headers, method=self.command)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    self.answer(answer.status, answer.headers, answer.read())
            except urllib.error.HTTPError as error:
                self.answer(error.code, error.headers, error.read())

        def answer(self, status, headers, content):
            self.send_response(status)
            for name in ("Content-Type",):
                if name in headers:
                    self.send_header(name, headers[name])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = pass_on

        def log_message(self, *args):
            pass

    passing = ThreadingHTTPServer(("127.0.0.1", 0), Passing)
    passing.delay, passing.login = delay, login
    passing.uri = f"http://127.0.0.1:{passing.server_port}"
    thread = threading.Thread(target=passing.serve_forever)
    thread.start()
    try:
        yield passing
    finally:
        passing.shutdown()
        passing.server_close()
        thread.join()


class At(Callback):
    """Calls a function after a round."""

    def __init__(self, **actions) -> None:
        self._actions = {int(name.removeprefix("round_")): action for name, action in actions.items()}

    def on_round_end(self, view, report):
        if report.round in self._actions:
            self._actions[report.round]()


def trained(folder: Path, uri: str | None, resume: bool = False, **actions):
    """A run of all rounds, tracked at the address."""
    tracking = [] if uri is None else [Tracking(EXPERIMENT, uri=uri)]
    loop = small_loop(parts=[*tracking, At(**actions)], rounds=ROUNDS, privacy=private(), output_dir=folder)
    loop.evaluate_every = 10
    return loop.run(resume)


def all_there(server: Server, *folders: Path) -> None:
    """Every value of every curve of the runs in these folders is in the store, and each run is finished."""
    found = {run.data.tags["output_dir"]: run for run in server.runs()}
    assert found.keys() == {str(folder.resolve()) for folder in folders}
    for run in found.values():
        rounds = read(Path(run.data.tags["output_dir"]) / "metrics.jsonl")
        assert [one.round for one in rounds] == list(range(1, ROUNDS + 1)) and run.info.status == "FINISHED"
        for name in {name for one in rounds for name in one.values}:
            expected = {one.round: value for one in rounds if (value := one.values.get(name)) is not None}
            history = MlflowClient(server.uri).get_metric_history(run.info.run_id, name)
            assert {point.step: point.value for point in history} == expected, name


def test_dead_at_the_start(server, tmp_path):
    """Nothing is charged, and the same run begins when the server answers."""
    with pytest.raises(UserError, match=r"`tracking.uri` must be an MLflow server or store that answers"):
        trained(tmp_path / "first", server.uri)
    assert not (tmp_path / "first").exists()
    server.start()
    tracking = Tracking(EXPERIMENT, uri=server.uri)
    server.kill()  # after the command has looked for it
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="that answers"):
        small_loop(parts=[tracking], rounds=ROUNDS, privacy=private(), output_dir=folder).run()
    assert not read_ledger(folder / "ledger.jsonl")
    server.start()
    assert trained(folder, server.uri, resume=True).finished
    all_there(server, folder)


def test_dead_in_the_middle(server, tmp_path):
    server.start()
    folder, dead = tmp_path / "run", {f"round_{ROUNDS // 3}": server.kill, f"round_{2 * ROUNDS // 3}": server.start}
    assert trained(folder, server.uri, **dead).finished
    all_there(server, folder)


def test_dead_to_the_end(server, tmp_path, capsys):
    server.start()
    folder = tmp_path / "run"
    assert trained(folder, server.uri, **{f"round_{ROUNDS // 3}": server.kill}).finished
    server.start()
    assert sync([str(folder), "--uri", server.uri, "--experiment", EXPERIMENT]) == 0
    all_there(server, folder)


def test_slow(server, tmp_path):
    server.start()
    with in_front(server, delay=1.0) as slow:
        begun = time.monotonic()
        assert trained(tmp_path / "run", slow.uri).finished
        print(f"{time.monotonic() - begun:.0f} s")
    all_there(server, tmp_path / "run")


def test_wrong_credentials(server, tmp_path, monkeypatch, capsys):
    """At the start one line; if the password is changed in the middle, the rest is sent with the new one."""
    server.start()
    folder = tmp_path / "run"
    with in_front(server, login="me:hunter2") as locked:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong-secret")
        with pytest.raises(UserError, match="that answers") as error:
            trained(tmp_path / "first", locked.uri)
        assert "wrong-secret" not in str(error.value) and not (tmp_path / "first").exists()
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
        changed = {f"round_{ROUNDS // 3}": lambda: setattr(locked, "login", "me:another")}
        assert trained(folder, locked.uri, **changed).finished
        words = [str(folder), "--uri", locked.uri, "--experiment", EXPERIMENT]
        assert sync(words) == 2 and "hunter2" not in capsys.readouterr().err
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "another")
        assert sync(words) == 0
    all_there(server, folder)


def test_eight_processes_at_once(server, tmp_path):
    server.start()
    folders = [tmp_path / str(number) for number in range(8)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": paths}
    each = [warm.Process(__file__, server.uri, str(folder), cwd=tmp_path, env=environment) for folder in folders]
    for process in each:
        out, err = process.communicate(timeout=3600)
        assert process.returncode == 0, out + err
    all_there(server, *folders)


if __name__ == "__main__":
    trained(Path(sys.argv[2]), sys.argv[1])
