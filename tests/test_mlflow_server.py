"""Runs of 300 rounds beside a real MLflow server that is away, slow, locked or busy: all rounds are in its store.

`python -m pytest tests/test_mlflow_server.py -m slow` starts the server on this machine; `DPFL_ROUNDS` is the number
of rounds.
"""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from conftest import private, small_loop
from mlflow.tracking import MlflowClient
from ranked_runs import free_port

from dpfl_lightning.commands.sync import main as sync
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.history import read
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.reporting.mlflow import Tracking

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
    options = {"rounds": ROUNDS, "privacy": private(), "output_dir": folder, "evaluate_every": 10}
    return small_loop(parts=[*tracking, At(**actions)], **options).run(resume)


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


def test_dead_to_the_end(server, tmp_path, capsys):
    server.start()
    folder = tmp_path / "run"
    assert trained(folder, server.uri, **{f"round_{ROUNDS // 3}": server.kill}).finished
    server.start()
    assert sync([str(folder), "--uri", server.uri, "--experiment", EXPERIMENT]) == 0
    all_there(server, folder)


if __name__ == "__main__":
    trained(Path(sys.argv[2]), sys.argv[1])
