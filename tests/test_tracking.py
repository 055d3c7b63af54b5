"""The tracked run: what MLflow gets, what it never gets, resuming, and stores that are away."""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import time
import warnings
from pathlib import Path

import pytest
import torch
from fakes import a_report, a_result, a_view
from matplotlib.figure import Figure
from mlflow.tracking import MlflowClient

from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.results import ClientEmbedding
from dpfl_lightning.federated.server.strategy import register
from dpfl_lightning.reporting.distilled import load_distilled
from dpfl_lightning.reporting.mlflow import Tracking, how_to_open, store_uri
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted
from dpfl_lightning.strategies.distillation.artefact import DistilledSet
from experiments.papers.report import log_report

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One SQLite store for the module: making its tables takes a second."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def experiment(request):
    return request.node.name


@pytest.fixture
def folder(tmp_path):
    """A finished run's folder, with everything that must not leave it."""
    run = tmp_path / "run1"
    run.mkdir()
    for name in (
        "ledger.jsonl",
        "ledger.head",
        "result.json",
        "guarantees.json",
        "guarantee.html",
        "model.pt",
        "options.yaml",
        "checkpoint.pt",
    ):
        (run / name).write_text(name)
    (run / "data_key").write_text(SECRET)
    return run


def only_run(store, experiment):
    client = MlflowClient(store)
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    assert len(runs) == 1
    return client, runs[0]


def steps_of(client, run, metric):
    return [point.step for point in client.get_metric_history(run.info.run_id, metric)]


def files_of(client, run, folder=None):
    return {item.path for item in client.list_artifacts(run.info.run_id, folder)}


def play(tracking, view, rounds, result=None):
    tracking.on_fit_start(view)
    for round in rounds:
        tracking.on_round_end(view, a_report(view, round))
    tracking.on_fit_end(view, a_result(view) if result is None else result)


@pytest.mark.e2e
def test_it_has_no_public_names_but_hooks(store, experiment):
    register([SizeWeighted()], [Tracking(experiment, uri=store)])


def test_a_finished_run(store, experiment, folder):
    options = {
        "rounds": 10,
        "privacy": {"epsilon": [1.0, 2.0]},
        "model": {"name": "logistic"},
    }
    options["tracking"] = {"uri": "http://me:hunter2@host"}
    view = a_view(folder, options=options)
    told = {"weight": [0.7, 0.2, 0.1], "estimated_noise_std": [0.011, 0.02, None]}
    result = a_result(
        view, metrics=told, accuracy_mean=0.501, accuracy_std=0.001 * math.sqrt(2 / 3), accuracy_worst=0.5
    )
    play(Tracking(experiment, uri=store), view, range(1, 11), result)
    client, run = only_run(store, experiment)
    assert run.info.status == "FINISHED" and run.info.run_name == "run1"

    assert run.data.params["privacy.epsilon"] == "[1.0, 2.0]" and run.data.params["model.name"] == "logistic"
    assert run.data.params["num_clients"] == "3" and run.data.params["tracking.uri"] == "http://host"
    tags = run.data.tags
    assert tags["unit"] == "record" and tags["adjacency"] == "add or remove one record" and tags["delta"] == "0.001"
    assert tags["sampling"] == "Poisson sampling" and tags["accountant"].startswith("RDP")
    assert tags["noise"] == "keyed, not cryptographic"
    assert tags["status"] == "all 10 rounds are done" and "differential privacy" in tags["guarantee"]

    for metric in (
        "test_accuracy",
        "test_loss",
        "epsilon_max",
        "epsilon_mean",
        "records_per_second",
        "participants",
    ):
        assert steps_of(client, run, f"overall/{metric}") == list(range(1, 11)), metric
    for client_metric in ("per_client_epsilon/00", "per_client_epsilon/02", "per_client_accuracy/01"):
        assert steps_of(client, run, client_metric) == list(range(1, 11))
    assert run.data.metrics["overall/epsilon_max"] == pytest.approx(3.0)
    fair = {"accuracy_mean": 0.501, "accuracy_std": 0.001 * math.sqrt(2 / 3), "accuracy_worst": 0.5}
    for metric, value in fair.items():
        assert run.data.metrics[f"overall/{metric}"] == pytest.approx(value), "of round 10"
        assert run.data.metrics[metric] == pytest.approx(value)
    assert run.data.metrics["test_accuracy"] == 0.5 and run.data.metrics["wall_seconds"] == 61.0

    runs = {"ledger.jsonl", "ledger.head", "result.json", "guarantees.json", "guarantee.html", "model.pt"}
    top = runs | {"options.yaml", "figures"}
    assert files_of(client, run) == top
    assert json.loads(tags["ledger_head"]) == a_result(view).ledger
    figure_names = {"accuracy_over_rounds", "epsilon_over_rounds", "accuracy_over_budget", "weights", "noise_estimated"}
    assert files_of(client, run, "figures") == {f"figures/{name}.png" for name in figure_names}


def test_the_page_begins_with_what_strategies_planned(store, experiment, folder):
    view = a_view(folder, strategy_notes=("2 of 3 clients a round.", "It sends 3 MB."))
    tracking = Tracking(experiment, uri=store)
    tracking.on_fit_start(view)
    _, run = only_run(store, experiment)
    plan = "**Plan.** 2 of 3 clients a round. It sends 3 MB."
    assert run.data.tags["mlflow.note.content"] == f"**Running.**\n\n{plan}"
    tracking.on_fit_end(view, a_result(view))
    note = only_run(store, experiment)[1].data.tags["mlflow.note.content"]
    assert note.startswith("**Test accuracy 50.00%**\n\n**Guarantee.** ") and note.endswith(f"are done.\n\n{plan}")


def test_a_distilled_set_is_kept_shown_and_found_again(store, experiment, folder):
    own = DistilledSet(torch.randn(6, 1, 4, 4), torch.arange(3).repeat_interleave(2), {"epsilon_max": 8.0})
    own.save(folder)
    play(Tracking(experiment, uri=store), a_view(folder), [])
    client, run = only_run(store, experiment)
    assert "figures/distilled_images.png" in files_of(client, run, "figures")
    again = load_distilled(f"runs:/{run.info.run_id}", uri=store)
    assert torch.equal(again.x, own.x) and again.card == {"epsilon_max": 8.0}
    with pytest.raises(UserError, match=r"tracking\.uri"):
        load_distilled("runs:/0123456789abcdef0123456789abcdef", uri=store)


def test_a_run_without_a_set_says_what_it_has(store, experiment, folder):
    play(Tracking(experiment, uri=store), a_view(folder), [])
    _, run = only_run(store, experiment)
    with pytest.raises(UserError, match=r"must have the artifact distilled\.pt, got \[.*'guarantee"):
        load_distilled(f"runs:/{run.info.run_id}", uri=store)


def test_own_tags_stand_beside_ours_and_never_replace_them(store, experiment, folder):
    tags = {"row": "weiavg", "seed": 0, "guarantee": "forged", "unit": "forged", "output_dir": "forged"}
    play(Tracking(experiment, uri=store, tags=tags), a_view(folder), [1])
    found = only_run(store, experiment)[1].data.tags
    assert (found["row"], found["seed"]) == ("weiavg", "0")
    assert not [name for name, value in found.items() if value == "forged"]


def test_a_report_is_a_finished_run_with_its_figure(store, experiment):
    figure = Figure()
    figure.add_subplot().plot([1, 2])
    log_report(experiment, "table 1", {"scale": "small"}, "| a |", figure, store)
    client, run = only_run(store, experiment)
    assert run.info.status == "FINISHED" and run.info.run_name == "table 1" and run.data.tags["scale"] == "small"
    assert files_of(client, run) == {"table.md", "figure.png"}
    assert (Path(run.info.artifact_uri.removeprefix("file://")) / "table.md").read_text() == "| a |"


def test_keys_and_passwords_never_leave(store, experiment, folder):
    options = {"privacy": {"delta": 0.1}, "tracking": {"uri": "http://me:hunter2@host"}}
    view = a_view(folder, options=options)
    play(Tracking(experiment, uri=store), view, [1])
    _, run = only_run(store, experiment)
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    kept = [path for path in artifacts.rglob("*") if path.is_file()]
    assert len(kept) >= 5 and not {"data_key", "checkpoint.pt"} & {path.name for path in kept}
    database = Path(store.removeprefix("sqlite:///"))
    for path in [*kept, *database.parent.glob("mlflow.db*")]:
        assert SECRET.encode() not in path.read_bytes() and b"hunter2" not in path.read_bytes(), path


def test_one_write_a_round(store, experiment, folder, monkeypatch):
    tracking, view = Tracking(experiment, uri=store), a_view(folder)
    tracking.on_fit_start(view)
    writes = []
    real = tracking.store.client.log_batch
    monkeypatch.setattr(tracking.store.client, "log_batch", lambda *args, **kw: writes.append(kw) or real(*args, **kw))
    for round in (1, 2, 3):
        tracking._send_at = 0.0  # rounds that take long
        tracking.on_round_end(view, a_report(view, round))
    assert [len(write["metrics"]) for write in writes] == [10 + 3 + 3] * 3


def test_what_strategies_tell_goes_into_the_same_write(store, experiment, folder, monkeypatch):
    tracking, view = Tracking(experiment, uri=store), a_view(folder)
    tracking.on_fit_start(view)
    writes = []
    real = tracking.store.client.log_batch
    monkeypatch.setattr(tracking.store.client, "log_batch", lambda *args, **kw: writes.append(kw) or real(*args, **kw))
    told = {"weight": torch.tensor([0.25, math.nan, 0.75]), "effective_clients": 1.6}
    tracking.on_round_end(view, a_report(view, 1, metrics=told))
    assert len(writes) == 1
    _, run = only_run(store, experiment)
    assert run.data.metrics["strategy/effective_clients"] == 1.6
    weights = {name: value for name, value in run.data.metrics.items() if name.startswith("per_client_weight")}
    assert weights == {"per_client_weight/00": 0.25, "per_client_weight/02": 0.75}, "who was absent has no point"


def test_of_many_clients_those_that_were_there_are_summed_up(store, experiment, folder):
    view = a_view(folder, num_clients=101)
    weight = torch.full((101,), math.nan)
    weight[[3, 9]] = torch.tensor([0.25, 0.75])
    tracking = Tracking(experiment, uri=store)
    tracking.on_fit_start(view)
    tracking.on_round_end(view, a_report(view, 1, metrics={"weight": weight}))
    tracking._send_at = 0.0
    tracking.on_round_end(view, a_report(view, 2, metrics={"weight": torch.full((101,), math.nan)}))
    client, run = only_run(store, experiment)
    assert run.data.metrics["per_client_weight/min"] == 0.25 and run.data.metrics["per_client_weight/mean"] == 0.5
    assert steps_of(client, run, "per_client_weight/max") == [1], "nobody was there in round 2"


def test_groups_of_a_simulation_have_curves_and_pictures(store, experiment, folder):
    groups = (0, 1, 1)
    view = a_view(folder)
    view = dataclasses.replace(view, facts=dataclasses.replace(view.facts, truth={"groups": groups}))
    points = ((0.0, 0.0), (1.0, 1.0), (1.1, 1.0))
    client_embedding = ClientEmbedding(
        "Updates of round 1", (0, 1, 2), points, (3, 0, 0), (1.0, 0.6, 1.0), 4, None, False
    )
    plain = a_result(view)
    result = a_result(
        view,
        clients=tuple({**own, "true_group": groups[own["client"]]} for own in plain.clients),
        accuracy_gap=0.002,
        accuracy_of_groups={"majority": 0.5015, "minority": 0.5, "0": 0.5, "1": 0.5015},
        metrics={"clustering_accuracy": 1.0, "weight": [1.0, 1.0, 1.0]},
        client_embedding=client_embedding,
    )
    tracking = Tracking(experiment, uri=store)
    tracking.on_fit_start(view)
    for round in (1, 2):
        tracking.on_round_end(view, a_report(view, round, metrics={"clustering_accuracy": 0.5 * round}))
    tracking.on_fit_end(view, result)
    client, run = only_run(store, experiment)
    for name, value in (("0", 0.1), ("1", 0.1015), ("majority", 0.1015), ("minority", 0.1)):
        assert steps_of(client, run, f"accuracy_of_group/{name}") == [1, 2]
        assert run.data.metrics[f"accuracy_of_group/{name}"] == pytest.approx(value)
    assert run.data.metrics["accuracy_minority"] == 0.5 and run.data.metrics["accuracy_gap"] == 0.002
    assert run.data.metrics["clustering_accuracy"] == run.data.metrics["strategy/clustering_accuracy"] == 1.0
    assert {"figures/accuracy_of_groups.png", "figures/clients.png"} <= files_of(client, run, "figures")


def test_quick_rounds_share_a_write_and_none_is_lost(store, experiment, folder, monkeypatch):
    tracking, view = Tracking(experiment, uri=store), a_view(folder)
    tracking.on_fit_start(view)
    writes = []
    real = tracking.store.client.log_batch
    monkeypatch.setattr(tracking.store.client, "log_batch", lambda *args, **kw: writes.append(kw) or real(*args, **kw))
    for round in range(1, 11):
        tracking.on_round_end(view, a_report(view, round))
    assert len(writes) < 5
    tracking.on_fit_end(view, a_result(view))
    client, run = only_run(store, experiment)
    assert steps_of(client, run, "overall/participants") == list(range(1, 11))


def test_many_clients_are_summed_up(store, experiment, folder):
    view = a_view(folder, num_clients=101)
    play(Tracking(experiment, uri=store), view, [1])
    _, run = only_run(store, experiment)
    names = {name for name in run.data.metrics if name.startswith("per_client_")}
    assert names == {f"per_client_{what}/{how}" for what in ("epsilon", "accuracy") for how in ("min", "mean", "max")}
    assert run.data.metrics["per_client_epsilon/max"] == pytest.approx(10.1)


def test_without_privacy_there_is_no_epsilon(store, experiment, folder):
    view = a_view(folder, noise=0.0)
    tracking = Tracking(experiment, uri=store)
    tracking.on_fit_start(view)
    _, run = only_run(store, experiment)
    assert run.data.tags["guarantee"] == "no privacy" and "delta" not in run.data.tags
    tracking.on_round_end(view, a_report(view, 1))
    tracking.on_fit_end(view, a_result(view))
    client, run = only_run(store, experiment)
    assert not [name for name in run.data.metrics if "epsilon" in name]
    assert files_of(client, run, "figures") == {"figures/accuracy_over_rounds.png"}


def test_rounds_without_evaluation_and_regression(store, experiment, folder):
    view = a_view(folder)
    tracking = Tracking(experiment, uri=store)
    tracking.on_fit_start(view)
    none = {"test_accuracy": None, "client_accuracy": (None, None, None)}
    tracking.on_round_end(view, a_report(view, 1, test_accuracy=None, test_loss=None, client_accuracy=None))
    tracking._send_at = 0.0
    tracking.on_round_end(view, a_report(view, 2, **none))
    client, run = only_run(store, experiment)
    assert steps_of(client, run, "overall/test_loss") == [2] and "overall/test_accuracy" not in run.data.metrics
    assert not [name for name in run.data.metrics if name.startswith("per_client_accuracy")]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "reason, status", [("interrupted; resume with: ...", "KILLED"), ("RuntimeError: boom", "FAILED")]
)
def test_an_unfinished_run_is_resumed_in_the_same_mlflow_run(store, experiment, folder, reason, status):
    view = a_view(folder)
    first = Tracking(experiment, uri=store)
    killed = status == "KILLED"
    play(first, view, (1, 2, 3), a_result(view, finished=False, rounds=2, reason=reason, interrupted=killed))
    client, run = only_run(store, experiment)
    assert run.info.status == status and run.data.tags["status"] == reason
    assert files_of(client, run) == {"ledger.jsonl", "ledger.head"} and "test_accuracy" not in run.data.metrics

    second = Tracking(experiment, uri=store)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    resumed = a_view(folder, first_round=3)  # the checkpoint was older than the last tracked round
    second.on_fit_start(resumed)
    assert only_run(store, experiment)[1].info.status == "RUNNING"
    for round in range(3, 11):
        second.on_round_end(resumed, a_report(resumed, round))
    second.on_fit_end(resumed, a_result(resumed))
    client, run = only_run(store, experiment)
    assert run.info.status == "FINISHED"
    assert steps_of(client, run, "overall/test_accuracy") == list(range(1, 11))


def test_a_run_killed_before_its_id_was_checkpointed_is_found_by_its_folder(store, experiment, folder):
    view = a_view(folder)
    first = Tracking(experiment, uri=store)
    before = first.state_dict()
    first.on_fit_start(view)
    second = Tracking(experiment, uri=store)
    second.load_state_dict(before)
    play(second, view, [1])
    only_run(store, experiment)


def test_a_run_that_this_store_does_not_know_begins_anew(store, experiment, folder):
    tracking = Tracking(experiment, uri=store)
    tracking.load_state_dict({"run_id": "0" * 32})
    play(tracking, a_view(folder, first_round=4), [4, 5])
    client, run = only_run(store, experiment)
    assert steps_of(client, run, "overall/participants") == [4, 5]


def test_a_run_that_was_deleted_meanwhile_begins_anew(store, experiment, folder):
    first = Tracking(experiment, uri=store)
    first.on_fit_start(a_view(folder))
    MlflowClient(store).delete_run(first.state_dict()["run_id"])
    second = Tracking(experiment, uri=store)
    second.load_state_dict(first.state_dict())
    play(second, a_view(folder), [1])
    assert only_run(store, experiment)[1].info.status == "FINISHED"


# ---- stores that are away


def test_a_server_that_is_not_there_is_one_error_before_the_run(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hunter2@127.0.0.1:{port}")
    begun = time.monotonic()
    with pytest.raises(UserError) as error:
        Tracking("any")
    assert time.monotonic() - begun < 5
    message = str(error.value)
    assert f"http://127.0.0.1:{port}" in message and "refused" in message and "\n" not in message
    assert "--tracking null" in message and "hunter2" not in message


@pytest.mark.parametrize("uri", ["sqlite:////dev/null/mlflow.db", "sqlite:////dev", "htp://localhost"])
def test_a_store_that_cannot_be_is_one_quick_error(uri):
    begun = time.monotonic()
    with pytest.raises(UserError, match=f"`tracking.uri` must .* got '{uri}'"):
        Tracking("any", uri=uri)
    assert time.monotonic() - begun < 5


def test_a_file_that_is_no_database_is_one_error(tmp_path):
    (tmp_path / "mlflow.db").write_text("something else entirely " * 100)
    with pytest.raises(UserError, match="not a database"):
        Tracking("any", uri=f"sqlite:///{tmp_path}/mlflow.db")


def test_a_deleted_experiment_is_one_error(store, experiment):
    client = MlflowClient(store)
    client.delete_experiment(client.create_experiment(experiment))
    with pytest.raises(UserError, match=r"`tracking.experiment` .*mlflow experiments restore"):
        Tracking(experiment, uri=store)


def test_a_store_that_fails_does_not_stop_training_and_gets_its_rounds_later(store, experiment, folder, monkeypatch):
    tracking, view = Tracking(experiment, uri=store), a_view(folder)
    tracking.on_fit_start(view)
    tries = []

    def broken(*args, **options):
        tries.append(1)
        raise ConnectionError("gone")

    assert tracking._send_at == 0.0
    with monkeypatch.context() as patch:
        patch.setattr(tracking.store.client, "log_batch", broken)
        with pytest.warns(UserWarning, match="training continues.*gone") as warned:
            for round in (1, 2, 3):
                tracking.on_round_end(view, a_report(view, round))
    assert len(warned) == 1 and len(tries) == 1  # neither a warning nor a wait for every round
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracking.on_round_end(view, a_report(view, 4))
        tracking.on_fit_end(view, a_result(view))  # it is back
    client, run = only_run(store, experiment)
    assert steps_of(client, run, "overall/participants") == [1, 2, 3, 4] and run.info.status == "FINISHED"


def test_what_was_not_tracked_is_said_at_the_end(store, experiment, folder, monkeypatch):
    tracking, view = Tracking(experiment, uri=store), a_view(folder)
    tracking.on_fit_start(view)
    tracking.on_round_end(view, a_report(view, 1))
    monkeypatch.setattr(tracking.store.client, "log_batch", lambda *args, **options: 1 / 0)
    with pytest.warns(UserWarning) as warned:
        tracking.on_round_end(view, a_report(view, 2))
        tracking.on_fit_end(view, a_result(view))
    assert len(warned) == 2 and "tried again" in str(warned[0].message)
    assert "did not get: metrics of rounds 2 to 10, files and figures" in str(warned[1].message)
    assert str(folder) in str(warned[1].message)


def test_files_that_cannot_be_sent_leave_the_status(store, experiment, folder, monkeypatch):
    tracking, view = Tracking(experiment, uri=store), a_view(folder)
    monkeypatch.setattr(tracking.store.client, "log_artifact", lambda *args: 1 / 0)
    with pytest.warns(UserWarning) as warned:
        play(tracking, view, [1])
    assert "did not get: some files and figures" in str(warned[-1].message)
    assert only_run(store, experiment)[1].info.status == "FINISHED"


def test_an_end_without_a_beginning_is_no_error(store, experiment, tmp_path):
    view = a_view(tmp_path)
    Tracking(experiment, uri=store).on_fit_end(view, a_result(view, finished=False, reason="interrupted"))


# ---- small things


def test_where_runs_are_tracked(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert store_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-env")
    assert store_uri() == "http://from-env" and store_uri("http://given") == "http://given"
    assert how_to_open("https://me:pass@host/") == "open https://host"
