"""Curves survive: whatever happens to MLflow, all rounds are in the store in the end."""

import dataclasses
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from fakes import a_report, a_result, a_view
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from test_tracking import end, end_round, start

from dpfl_lightning.commands.sync import main as sync_command
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.curves import of_round
from dpfl_lightning.privacy.ledger.file import Header
from dpfl_lightning.privacy.ledger.ledger import Ledger
from dpfl_lightning.reporting.curves import Curves
from dpfl_lightning.reporting.mlflow import Store, Tracking, sync
from dpfl_lightning.runtime.files import write_json, write_text

pytestmark = pytest.mark.usefixtures("blank_figures")

ROUNDS = 10
OTHERS = [(by, dead) for by in ("resume", "sync") for dead in (1, ROUNDS)]


def begin_ledger(folder):
    """As a run does, with a new random name."""
    Ledger(folder / "ledger.jsonl", Header("rdp", "add_remove", "poisson", (1e-3,), (1.0,))).close()


@pytest.fixture
def folder(tmp_path):
    """The folder of a run with a ledger."""
    run = tmp_path / "run1"
    run.mkdir()
    begin_ledger(run)
    write_text(run / "options.yaml", "rounds: 10\nstrategies: {size_weighted: {}}\n")
    return run


def runs_of(uri: str) -> list:
    client = MlflowClient(uri)
    return client.search_runs([one.experiment_id for one in client.search_experiments()])


def steps(uri: str, name: str = "train_participants") -> list[int]:
    (run,) = runs_of(uri)
    return sorted(point.step for point in MlflowClient(uri).get_metric_history(run.info.run_id, name))


def broken(*args, **options):
    raise ConnectionError("gone")


def untracked(view, rounds):
    """A run without MLflow."""
    Curves().on_fit_start(view)
    for round in range(1, rounds + 1):
        Curves().on_round_end(view, a_report(view, round))


def play(tracking, view, rounds, dead, patch):
    """Rounds, of which the store does not get those from `dead` on."""
    start(tracking, view)
    for round in rounds:
        if round == dead:
            patch.setattr(tracking.store.client, "log_batch", broken)
            patch.setattr(tracking.store.client, "log_artifact", broken)
        tracking._send_at = 0.0
        end_round(tracking, view, a_report(view, round))


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:MLflow at")
@pytest.mark.parametrize(
    "by, dead", [("resume", 5), ("sync", 5), *(pytest.param(*one, marks=pytest.mark.e2e) for one in OTHERS)]
)
def test_rounds_without_a_store_are_sent_later(by, dead, folder, new_store, tmp_path, monkeypatch, capsys):
    """Killed, so that nothing in memory is left: on resume, or by the command, and only once."""
    uri, view = new_store(tmp_path / "store"), a_view(folder)
    with monkeypatch.context() as patch:
        play(Tracking("lost", uri=uri), view, range(1, ROUNDS + 1), dead, patch)
    assert len(steps(uri)) == dead - 1
    if by == "resume":
        second, again = Tracking("lost", uri=uri), dataclasses.replace(view, round=ROUNDS + 1)
        start(second, again)
        end(second, again, a_result(again, rounds=ROUNDS))
        assert runs_of(uri)[0].info.status == "FINISHED"
    else:
        for expected in (ROUNDS - dead + 1, 0):
            assert sync_command([str(folder), "--uri", uri]) == 0
            assert f"sent {expected} round" in capsys.readouterr().out
        assert runs_of(uri)[0].info.status == "KILLED"
    for curve in ("train_participants", "test_accuracy", "train_epsilon_max"):
        assert steps(uri, curve) == list(range(1, ROUNDS + 1))


def test_a_run_that_was_never_tracked_is_sent_whole(folder, new_store, tmp_path, capsys):
    uri, view = new_store(tmp_path / "store"), a_view(folder)
    untracked(view, 3)
    result = a_result(view, rounds=3)
    write_json(folder / "result.json", result.as_dict())
    Curves().on_fit_end(view, result)
    for sent in (3, 0):
        assert sync_command([str(folder), "--uri", uri]) == 0 and f"sent {sent} rounds" in capsys.readouterr().out
    (run,) = runs_of(uri)
    assert run.info.status == "FINISHED" and run.data.tags["guarantee"] == result.guarantee.words()
    assert run.data.tags["ledger_head"] == json.dumps(result.ledger) and run.data.params["num_params"] == "1234"
    assert run.data.metrics["test_accuracy"] == of_round(a_report(view, 3), view.facts).values["test_accuracy"]
    assert MlflowClient(uri).list_artifacts(run.info.run_id, "figures") and len(run.inputs.dataset_inputs) == 2
    assert sync_command([str(folder), "--uri", "http://127.0.0.1:9"]) == 2
    assert "`tracking.uri` must be an MLflow server or store that answers" in capsys.readouterr().err


def test_another_run_in_the_same_place_keeps_its_curves(folder, new_store, tmp_path):
    """A run was tracked and its folder removed; a new run in the same place was not tracked."""
    uri, view = new_store(tmp_path / "store"), a_view(folder)
    start(first := Tracking("lost", uri=uri), view)
    end_round(first, view, a_report(view, 1))
    for file in folder.glob("ledger.*"):
        file.unlink()
    begin_ledger(folder)
    untracked(view, 2)
    assert sync(folder, Store("lost", uri)) == 2
    histories = [MlflowClient(uri).get_metric_history(run.info.run_id, "train_participants") for run in runs_of(uri)]
    assert sorted([point.step for point in history] for history in histories) == [[1], [1, 2]]


def test_a_changed_ledger_and_what_is_no_run_are_not_sent(folder, tmp_path, capsys):
    Curves().on_fit_start(a_view(folder))
    ledger = folder / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace("rdp", "pld"))
    (tmp_path / "seeds" / "seed_0").mkdir(parents=True)
    for run, words in (
        (folder, "A changed ledger proves nothing"),
        (tmp_path / "seeds", "`RUN` must be the folder of"),
    ):
        assert sync_command([str(run), "--uri", f"sqlite:///{tmp_path}/new.db"]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "new.db").exists()


def test_runs_whose_process_is_gone_are_marked(folder, new_store, tmp_path, capsys):
    uri, view = new_store(tmp_path / "store"), a_view(folder)
    start(Tracking("lost", uri=uri), view)  # and its process dies
    other = tmp_path / "run2"
    other.mkdir()
    with (folder / "ledger.jsonl").open() as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)  # it is still alive
        start(Tracking("lost", uri=uri), a_view(other))
        assert {run.info.status for run in runs_of(uri)} == {"RUNNING"}
        assert sync_command([str(folder), "--uri", uri]) == 2
        assert "`RUN` must be a run that has ended" in capsys.readouterr().err
    start(Tracking("lost", uri=uri), a_view(other))
    status = {run.data.tags["output_dir"]: run.info.status for run in runs_of(uri)}
    assert status[str(folder)] == "KILLED" and status[str(other)] == "RUNNING"


OPENS = """
import sys
from dpfl_lightning.reporting.mlflow.store import Store, metrics
store = Store("lost", sys.argv[1])
run = store.begin(sys.argv[2], {}, {"rounds": "30"}, {"rounds": 30})
for round in range(1, 31):
    store.log_metrics(run, metrics({"test_accuracy": 0.5}, round))
store.end(run)
"""


def test_a_data_set_that_another_run_creates_at_the_same_time_is_logged(folder, new_store, tmp_path, monkeypatch):
    uri, view = new_store(tmp_path / "store"), a_view(folder)
    tracking, tries = Tracking("lost", uri=uri), []
    log_inputs = tracking.store.client.log_inputs

    def taken_once(*args):
        tries.append(1)
        if len(tries) == 1:
            raise MlflowException("UNIQUE constraint failed: datasets.experiment_id, datasets.name, datasets.digest")
        log_inputs(*args)

    monkeypatch.setattr(tracking.store.client, "log_inputs", taken_once)
    start(tracking, view)
    (run,) = runs_of(uri)
    assert len(run.inputs.dataset_inputs) == 1 + bool(view.facts.test_set) and len(tries) >= 2


@pytest.mark.e2e
def test_eight_processes_at_once_make_one_store(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    words = [sys.executable, "-c", OPENS, uri]
    each = [subprocess.Popen([*words, str(n)], env=environment, stderr=subprocess.PIPE, text=True) for n in range(8)]
    for process in each:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
    found = runs_of(uri)
    assert len(found) == 8 and {run.info.status for run in found} == {"FINISHED"}
    history = MlflowClient(uri).get_metric_history
    assert all(len(history(run.info.run_id, "test_accuracy")) == 30 for run in found)


@pytest.mark.e2e
def test_a_server_that_accepts_and_never_answers_is_one_error(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        begun = time.monotonic()
        with pytest.raises(UserError, match=r"`tracking.uri` must be an MLflow server or store that answers"):
            Tracking("any", uri=f"http://127.0.0.1:{server.getsockname()[1]}")
        assert time.monotonic() - begun < 20
