"""The tracked run: what MLflow gets, what it never gets, resuming, and stores that do not answer."""

import contextlib
import dataclasses
import json
import math
import secrets
import shutil
import socket
import sqlite3
import time
import warnings
from datetime import datetime, timedelta
from pathlib import Path

import pandas
import pytest
import torch
from fakes import FRAME, a_report, a_result, a_view
from mlflow.tracking import MlflowClient
from safetensors.torch import save_file
from torch.utils._pytree import tree_map

from dpfl_lightning.commands.fit import main as fit_command
from dpfl_lightning.commands.sync import main as sync_command
from dpfl_lightning.config.yaml_text import dump
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.evaluation import Score
from dpfl_lightning.federated.server.history import read
from dpfl_lightning.federated.server.results import ClientEmbedding
from dpfl_lightning.models import named
from dpfl_lightning.models.saved import code_of, load_model
from dpfl_lightning.papers.distilled_data import load_distilled
from dpfl_lightning.papers.sets.distilled_set import DistilledSet
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.privacy.accounting.noise_source import FRESH, KEYED
from dpfl_lightning.privacy.clipping.inputs import arguments
from dpfl_lightning.reporting.curves import Curves
from dpfl_lightning.reporting.mlflow import SeedsTracking, StudyTracking, Tracking, how_to_open, store_uri, sync
from dpfl_lightning.reporting.mlflow.store import reported
from dpfl_lightning.runtime.files import write_json, write_safetensors, write_text
from dpfl_lightning.runtime.text import without_secrets

SECRET = "0123456789abcdef0123456789abcdef"
LEDGER = {"ledger.jsonl", "ledger.head"}
SENT = LEDGER | {"result.json", "guarantees.json", "guarantee.html", "metrics.jsonl", "options.yaml"}
PASSWORD = {"tracking": {"uri": "http://me:hunter2@host"}}


@pytest.fixture(scope="module")
def store(tmp_path_factory, empty_store):
    """One SQLite store for the module."""
    return f"sqlite:///{shutil.copy(empty_store, tmp_path_factory.mktemp('store'))}"


@pytest.fixture
def folder(tmp_path):
    """A finished run's folder, with everything that must not leave it."""
    run = tmp_path / "run1"
    run.mkdir()
    for name in ("ledger.jsonl", "guarantees.json", "guarantee.html", "checkpoint.pt"):
        (run / name).write_text(name)
    write_json(run / "ledger.head", {"run": "ab" * 16})
    (run / "data_key").write_text(SECRET)
    return run


@pytest.fixture
def new_tracking(store, request):
    return lambda **more: Tracking(request.node.name, uri=store, **more)


@pytest.fixture
def only_run(store, request):
    """`only_run()`: the one run of this test's experiment."""
    return lambda: OnlyRun(store, request.node.name)


def columns_of(tracking) -> list[str]:
    """The metrics that the experiment's page shows as columns."""
    tags = tracking.store.client.get_experiment(tracking.store.experiment_id).tags
    columns = json.loads(tags["mlflow.sharedViewState.dpfl_lightning"])["selectedColumns"]
    return [column.removeprefix("metrics.").strip("`") for column in columns if column.startswith("metrics.")]


class OnlyRun:
    def __init__(self, store: str, experiment: str) -> None:
        self._client = MlflowClient(store)
        (run,) = self._client.search_runs([self._client.get_experiment_by_name(experiment).experiment_id])
        self.info, self.tags = run.info, run.data.tags
        self.metrics, self.params = run.data.metrics, run.data.params
        self.datasets, self.models = run.inputs.dataset_inputs, run.outputs.model_outputs if run.outputs else []

    def steps(self, metric: str) -> list[int]:
        return [point.step for point in self._client.get_metric_history(self.info.run_id, metric)]

    def files(self, folder: str | None = None) -> set[str]:
        return {item.path for item in self._client.list_artifacts(self.info.run_id, folder)}

    @property
    def artifacts(self) -> Path:
        return Path(self.info.artifact_uri.removeprefix("file://"))


def start(tracking, view):
    """A run begins: its options and its curves are files in its folder before MLflow gets them."""
    write_text(view.run.output_dir / "options.yaml", dump(view.run.options))
    Curves().on_fit_start(view)
    tracking.on_fit_start(view)


def end_round(tracking, view, report):
    Curves().on_round_end(view, report)
    tracking.on_round_end(view, report)


def end(tracking, view, result=None):
    """A run ends: its result is a file in its folder if it has finished."""
    result = a_result(view) if result is None else result
    if result.finished:
        write_json(view.run.output_dir / "result.json", result.as_dict())
    Curves().on_fit_end(view, result)
    tracking.on_fit_end(view, result)


def play(tracking, view, rounds, result=None):
    start(tracking, view)
    for round in rounds:
        end_round(tracking, view, a_report(view, round))
    end(tracking, view, result)


@pytest.mark.e2e
def test_a_finished_run_has_its_options_curves_files_and_figures(new_tracking, only_run, folder):
    options = {"rounds": 10, "privacy": {"epsilon": [1.0, 2.0]}, "model": {"name": "logistic"}, **PASSWORD}
    options |= {"clients": {"count": None, "optimizer": {"name": "sgd"}}, "data": {"name": None, "class_path": None}}
    view = a_view(folder, options=options)
    metrics = {"weight": [0.7, 0.2, 0.1], "estimated_noise_std": [0.011, 0.02, None]}
    fair = {"headline": "accuracy", "headline_mean": 0.501, "headline_worst": 0.5}
    tags = {"row": "weiavg", "seed": 0, "guarantee": "forged", "unit": "forged", "output_dir": "forged"}
    play(new_tracking(tags=tags), view, range(1, 11), a_result(view, metrics=metrics, **fair))
    run = only_run()
    assert run.info.status == "FINISHED" and run.info.run_name == "size_weighted eps 1-3 logistic"
    expected = {
        "epsilon": "1 to 3",
        "model.name": "logistic",
        "clients.count": "3",
        "rounds": "10",
        "num_params": "1234",
    }
    assert run.params == expected, "tracking, every default and what is null are left out"
    assert "hunter2" not in (run.artifacts / "options.yaml").read_text()
    expected = {"unit": "record", "adjacency": "add or remove one record", "delta": "0.001", "row": "weiavg"}
    expected |= {"sampling": "Poisson sampling", "noise": "keyed, not cryptographic", "seed": "0"}
    assert run.tags.items() >= (expected | {"status": "all 10 rounds are done"}).items()
    assert run.tags["accountant"].startswith("RDP") and "differential privacy" in run.tags["guarantee"]
    assert {"command", "mlflow.user", "mlflow.source.git.commit"} <= run.tags.keys()
    assert "forged" not in run.tags.values(), "a user's tags never replace ours"
    assert json.loads(run.tags["ledger_head"]) == a_result(view).ledger
    assert [one.tags[0].value for one in run.datasets] == ["training", "test"]
    assert len({one.dataset.digest for one in run.datasets}) == 2 and run.datasets[0].dataset.name == "population"

    names = ("test_accuracy", "test_loss", "train_epsilon_max", "train_epsilon_median", "val_accuracy_min")
    for metric in (*names, "train_participants", "train_records_per_second"):
        assert run.steps(metric) == list(range(1, 11)), f"{metric}: results do not double the end of a curve"
    assert [name for name in run.metrics if "/" in name] == ["headline/test_accuracy"], "MLflow's first chart"
    assert run.metrics["train_epsilon_max"] == pytest.approx(0.99 * 3), "as the result says"
    assert run.metrics["test_accuracy"] == 0.5 and run.metrics["train_wall_seconds"] == 61.0

    assert run.files() == SENT | {"figures"}
    figures = ("epsilon_over_rounds", "accuracy_over_budget", "weights", "noise_estimated")
    assert run.files("figures") == {f"figures/{name}.png" for name in figures}


@pytest.mark.usefixtures("blank_figures")
def test_the_last_epsilon_is_the_one_that_is_guaranteed(new_tracking, only_run, store, folder):
    """Of a run that ended early, whose guarantee states the whole plan, after MLflow has all that it had spent."""
    view, tracking = a_view(folder, options={"rounds": 10}), new_tracking()
    planned = a_result(view)
    stopped = dataclasses.replace(
        planned, rounds=4, clients=tuple({**one, "epsilon_spent": one["epsilon_budget"]} for one in planned.clients)
    )
    start(tracking, view)
    for round in range(1, 5):
        tracking._send_at = 0.0
        end_round(tracking, view, a_report(view, round))
    assert only_run().metrics["train_epsilon_max"] == pytest.approx(0.4 * 3)
    end(tracking, view, stopped)
    assert only_run().metrics["train_epsilon_max"] == pytest.approx(3.0)
    assert only_run().metrics["train_epsilon_min"] == pytest.approx(1.0)
    assert sync(folder, tracking.store) == 0, "once"


@pytest.mark.usefixtures("blank_figures")
def test_a_distilled_set_is_kept_shown_and_loaded_again(new_tracking, only_run, store, folder):
    play(new_tracking(), a_view(folder), [])
    with pytest.raises(UserError, match=r"must have the artifact distilled\.safetensors, got \[.*'guarantee"):
        load_distilled(f"runs:/{only_run().info.run_id}", uri=store)
    MlflowClient(store).delete_run(only_run().info.run_id)
    saved = DistilledSet(torch.randn(6, 1, 4, 4), torch.arange(3).repeat_interleave(2), {"epsilon_max": 8.0})
    saved.save(folder)
    play(new_tracking(), a_view(folder), [])
    run = only_run()
    assert "figures/distilled_images.png" in run.files("figures")
    loaded = load_distilled(f"runs:/{run.info.run_id}", uri=store)
    assert torch.equal(loaded.x, saved.x) and loaded.card == {"epsilon_max": 8.0}
    with pytest.raises(UserError, match=r"`run 0123456789abcdef0123456789abcdef` must be a run of the MLflow store"):
        load_distilled("runs:/0123456789abcdef0123456789abcdef", uri=store)


def test_reading_a_set_creates_no_store(tmp_path):
    with pytest.raises(UserError, match=r"`run 0{32}` must be in an MLflow store that exists"):
        load_distilled(f"runs:/{'0' * 32}", uri=f"sqlite:///{tmp_path}/none.db")
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("blank_figures")
def test_keys_and_passwords_never_leave(new_tracking, only_run, store, folder):
    play(new_tracking(), a_view(folder, options={"privacy": {"delta": 0.1}, **PASSWORD}), [1])
    files = [path for path in only_run().artifacts.rglob("*") if path.is_file()]
    assert len(files) >= 5 and not {"data_key", "checkpoint.pt"} & {path.name for path in files}
    for path in [*files, *Path(store.removeprefix("sqlite:///")).parent.glob("mlflow.db*")]:
        assert SECRET.encode() not in path.read_bytes() and b"hunter2" not in path.read_bytes(), path


def test_clients_of_small_runs_have_curves_of_their_own(new_tracking, only_run, folder):
    view = a_view(folder, options={"evaluation": {"metrics": ["auroc"]}})
    view = dataclasses.replace(
        view, facts=dataclasses.replace(view.facts, test_set=False, names=("oslo", "bergen", "7"))
    )
    scores = (Score(0.5, 1.5, {"auroc": 0.75}), Score(0.5, math.nan, {"auroc": None}), Score(0.5, 2.5, {"auroc": 0.25}))
    tracking = new_tracking(per_client=True)
    start(tracking, view)
    metrics = {"weight": torch.tensor([0.25, math.nan, 0.75])}
    end_round(tracking, view, a_report(view, 1, metrics=metrics, client_scores=scores))
    found = only_run().metrics
    assert {"val_auroc/oslo": 0.75, "val_auroc/07": 0.25, "train_weight/oslo": 0.25}.items() <= found.items()
    assert not {"val_auroc/bergen", "train_weight/bergen"} & found.keys(), "what is not known has no point"
    assert found["headline/val_auroc_mean"] == 0.5 and not [name for name in found if name.startswith("test_")]


@pytest.mark.usefixtures("blank_figures")
def test_names_of_runs_say_what_differs(new_tracking, store, folder):
    for number, more in enumerate(({}, {"clients": {"learning_rate": 0.3}}, {})):
        write_json(folder / "ledger.head", {"run": str(number) * 32})
        start(tracking := new_tracking(), a_view(folder, options={"model": {"name": "logistic"}, **more}))
    runs = MlflowClient(store).search_runs([tracking.store.experiment_id], order_by=["start_time"])
    first = "size_weighted eps 1-3 logistic"
    assert {run.info.run_name for run in runs} == {first, f"learning_rate 0.3, {first}", f"2: {first}"}


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize(("source", "name"), [(FRESH, "main job"), (KEYED, "main job (simulated)")])
def test_a_chosen_name_does_not_hide_a_simulation_and_units_are_a_column(
    source, name, new_tracking, only_run, store, folder
):
    view = a_view(folder)
    tracking = new_tracking(run_name="main job")
    start(tracking, dataclasses.replace(view, run=dataclasses.replace(view.run, source=source)))
    end_round(tracking, view, a_report(view, 1))
    assert only_run().info.run_name == name
    tags = tracking.store.client.get_experiment(tracking.store.experiment_id).tags
    assert "tags.`unit`" in json.loads(tags["mlflow.sharedViewState.dpfl_lightning"])["selectedColumns"]


def test_metrics_of_many_clients_are_summed_up(new_tracking, only_run, folder):
    view = a_view(folder, num_clients=101)
    weight = torch.full((101,), math.nan)
    absent = weight.clone()
    weight[[3, 9]] = torch.tensor([0.25, 0.75])
    tracking = new_tracking(per_client=True)
    start(tracking, view)
    end_round(tracking, view, a_report(view, 1, metrics={"weight": weight}))
    run = only_run()
    names = {name for name in run.metrics if name.startswith(("train_epsilon", "train_weight", "val_"))}
    kinds = {"train_epsilon": (), "train_weight": (), "val_accuracy": ("std",)}
    assert names == {f"{name}_{k}" for name, more in kinds.items() for k in ("min", "median", "mean", "max", *more)}
    assert run.metrics["train_epsilon_max"] == pytest.approx(10.1)
    assert run.metrics["train_weight_min"] == 0.25 and run.metrics["train_weight_mean"] == 0.5
    tracking._send_at = 0.0
    end_round(tracking, view, a_report(view, 2, metrics={"weight": absent}))
    assert only_run().steps("train_weight_max") == [1], "no client took part in round 2"
    assert not read(folder / "metrics.jsonl")[0].clients


@pytest.mark.usefixtures("blank_figures")
def test_groups_of_a_simulation_have_curves_and_pictures(new_tracking, only_run, store, folder):
    groups = (0, 1, 1)
    view = a_view(folder)
    view = dataclasses.replace(view, facts=dataclasses.replace(view.facts, truth={"groups": groups}))
    points = ((0.0, 0.0), (1.0, 1.0), (1.1, 1.0))
    embedding = ClientEmbedding("Updates of round 1", (0, 1, 2), points, (3, 0, 0), (1.0, 0.6, 1.0), 4, None, False)
    result = a_result(
        view,
        clients=tuple({**row, "true_group": groups[row["client"]]} for row in a_result(view).clients),
        headline="accuracy",
        headline_worst=0.5,
        headline_gap=0.002,
        accuracy_of_groups={"majority": 0.5015, "minority": 0.5, "0": 0.5, "1": 0.5015},
        metrics={"clustering_accuracy": 1.0, "weight": [1.0, 1.0, 1.0]},
        client_embedding=embedding,
    )
    tracking = new_tracking()
    start(tracking, view)
    for round in (1, 2):
        end_round(tracking, view, a_report(view, round, metrics={"clustering_accuracy": 0.5 * round}))
    end(tracking, view, result)
    run = only_run()
    for name, value in (("group_0", 0.1), ("group_1", 0.1015), ("majority", 0.1015), ("minority", 0.1)):
        curve = MlflowClient(store).get_metric_history(run.info.run_id, f"val_accuracy_{name}")
        assert [point.value for point in curve if point.step == 2] == pytest.approx([value])
    assert run.steps("train_clustering_accuracy") == [1, 2]
    assert {"figures/accuracy_of_groups.png", "figures/clients.png"} <= run.files("figures")


@pytest.mark.usefixtures("blank_figures")
def test_a_run_without_privacy_has_a_page_and_no_epsilon(new_tracking, only_run, folder):
    view = a_view(folder, noise=0.0, strategy_notes=("2 of 3 clients a round.", "It sends 3 MB."))
    tracking = new_tracking()
    start(tracking, view)
    assert only_run().info.run_name == "size_weighted no privacy Linear"
    tags = only_run().tags
    assert tags["guarantee"].startswith("No differential privacy") and "delta" not in tags
    plan = "**Plan.** 2 of 3 clients a round. It sends 3 MB."
    assert tags["mlflow.note.content"] == f"**Running.**\n\n{plan}"
    end_round(tracking, view, a_report(view, 1))
    end(tracking, view)
    run = only_run()
    note = run.tags["mlflow.note.content"]
    words = "**Test accuracy 50.00%**\n\n**Epsilon 3 at delta 0.001 per record**, the largest of 3 clients.\n\n"
    assert note.startswith(words) and note.endswith(f"are done.\n\n{plan}")
    assert not [name for name in run.metrics if "epsilon" in name]
    assert not run.files("figures")


def test_rounds_without_evaluation_and_regression_have_no_accuracy(new_tracking, only_run, folder):
    view = a_view(folder)
    start(tracking := new_tracking(), view)
    end_round(tracking, view, a_report(view, 1, test_accuracy=None, test_loss=None, client_accuracy=None))
    tracking._send_at = 0.0
    end_round(tracking, view, a_report(view, 2, test_accuracy=None, client_accuracy=(None, None, None)))
    run = only_run()
    assert run.steps("test_loss") == [2] and "test_accuracy" not in run.metrics
    assert not [name for name in run.metrics if name.startswith("val_accuracy")]
    assert columns_of(tracking) == ["train_epsilon_max", "test_loss"]


def test_without_a_test_set_the_page_of_runs_shows_the_metric_over_clients(new_tracking, only_run, folder):
    view = a_view(folder)
    view = dataclasses.replace(view, facts=dataclasses.replace(view.facts, test_set=False))
    scores = tuple(Score(0.5, 0.25, {"auroc": 0.75}) for _ in range(3))
    start(tracking := new_tracking(), view)
    tracking._send_at = 0.0
    end_round(tracking, view, a_report(view, 1, client_scores=scores))
    shown = columns_of(tracking)
    assert shown.index("val_auroc_mean") < shown.index("val_accuracy_mean") and "headline/val_auroc_mean" not in shown
    assert only_run().metrics["headline/val_auroc_mean"] == 0.75


@pytest.mark.usefixtures("blank_figures")
def test_a_net_that_cannot_be_logged_is_a_warning(new_tracking, only_run, folder):
    (folder / "model.safetensors").write_text("no tensors")
    with pytest.warns(UserWarning, match="MLflow did not get the model .*; its parameters are in"):
        play(new_tracking(), a_view(folder), [1])
    assert only_run().info.status == "FINISHED" and "figures" in only_run().files()


class OfTwoInputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = torch.nn.Embedding(7, 3), torch.nn.Linear(4, 2)

    def forward(self, ids, age):
        return self.out(torch.cat([self.words(ids).mean(1), age[:, None]], 1))


IDS, AGE = torch.tensor([[1, 2], [3, 6]]), torch.tensor([1.0, 2.0])
EMBEDDING = torch.nn.Sequential(torch.nn.Embedding(7, 3), torch.nn.Flatten(), torch.nn.Linear(6, 2))
INPUTS_OF_NETS = ((EMBEDDING, IDS), (OfTwoInputs(), (IDS, AGE)), (OfTwoInputs(), {"ids": IDS, "age": AGE}))


def tracking_of_net(new_tracking, view, net, folder, model=None, **more):
    """Log a net as the model of a finished run without a warning; return the address of its model."""
    (folder / "model_1.safetensors").unlink(missing_ok=True)
    write_json(folder / "ledger.head", {"run": secrets.token_hex(16)})  # another run in the same place
    code = code_of(net, model or {}, view.facts.input_shape, view.facts.num_classes)
    write_safetensors(folder / "model.safetensors", net.state_dict(), code)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(tracking := new_tracking(**more), dataclasses.replace(view, module=ClientModule(net)), [1])
    (latest,) = tracking.store.client.search_runs([tracking.store.experiment_id], max_results=1)
    return f"runs:/{latest.info.run_id}/model"


@pytest.mark.e2e
def test_logged_models_are_loaded_and_used_without_a_pickle(new_tracking, only_run, store, folder, monkeypatch):
    import mlflow

    view, x = a_view(folder), torch.randn(3, 4)
    model, net = {"name": "logistic"}, named({"name": "logistic"}, view.facts.input_shape, view.facts.num_classes)
    view = dataclasses.replace(view, module=ClientModule(net))
    code = code_of(net, model, view.facts.input_shape, view.facts.num_classes)
    for file in ("model.safetensors", "model_1.safetensors"):
        write_safetensors(folder / file, net.state_dict(), code)
    play(new_tracking(), view, range(1, 11))
    run = only_run()
    assert len(run.models) == 2 and "model_1.safetensors" in run.files()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    mlflow.set_tracking_uri(store)
    address = f"runs:/{run.info.run_id}/model"
    logged = MlflowClient(store).get_logged_model(run.models[0].model_id)
    assert logged.params.items() >= {"epsilon": "3", "delta": "0.001", "unit": "record"}.items(), "on the model's page"
    expected = net(x).detach()
    loaded = mlflow.pyfunc.load_model(f"{address}_1")
    assert torch.equal(torch.from_numpy(loaded.predict(x.numpy())), expected)
    assert loaded.input_example.shape == (2, 4) and not loaded.input_example.any(), "made up, no record"
    assert loaded.metadata.signature.inputs.inputs[0].shape == (-1, 4)
    assert loaded.metadata.utc_time_created.endswith(":00:00"), "rounded, as the times of a private run"
    file = mlflow.artifacts.download_artifacts(f"runs:/{run.info.run_id}/model.safetensors")
    assert torch.equal(load_model(file)(x), expected)

    names = ["age (scaled)", "bmi", "sex=f", "sex=m"]
    facts = dataclasses.replace(view.facts, features={"names": names, "encoding": {"age": {"scale": [50.0, 20.0]}}})
    table = pandas.DataFrame(x.double().numpy(), columns=names)[names[::-1]]
    for pickles in (False, True):
        of = dataclasses.replace(view, facts=facts)
        of_table = mlflow.pyfunc.load_model(
            tracking_of_net(new_tracking, of, net, folder, model=model, pickles=pickles)
        )
        assert of_table.metadata.metadata["features"] == facts.features
        assert torch.allclose(torch.tensor(of_table.predict(table).to_numpy()), expected, atol=1e-6)

    of_a_user = mlflow.artifacts.download_artifacts(tracking_of_net(new_tracking, view, torch.nn.Linear(4, 3), folder))
    written = {path.name for path in [*Path(of_a_user).rglob("*"), *folder.rglob("*")] if path.is_file()}
    assert {"MLmodel", "model.safetensors"} <= written and not any(name.endswith((".pth", ".pkl")) for name in written)


@pytest.mark.e2e
def test_a_pickle_is_sent_on_demand_and_is_the_model_itself(new_tracking, store, folder, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    mlflow.set_tracking_uri(store)
    view = a_view(folder)
    for net, batch in INPUTS_OF_NETS:  # whole numbers, and several tensors
        facts = dataclasses.replace(view.facts, empty_x=tree_map(lambda part: part[:0], batch))
        of = dataclasses.replace(view, facts=facts)
        where_is = tracking_of_net(new_tracking, of, net, folder, pickles=True)
        loaded_net = mlflow.pytorch.load_model(where_is)
        positional, by_name = arguments(batch)
        assert type(loaded_net) is type(net)
        assert torch.equal(loaded_net(*positional, **by_name), net(*positional, **by_name))
        if isinstance(batch, torch.Tensor):
            model = mlflow.pyfunc.load_model(where_is)
            assert model.input_example.dtype == batch.numpy().dtype and not model.input_example.any()
            assert torch.equal(torch.from_numpy(model.predict(batch.numpy())), net(batch))


# ---- times

HOUR = 3_600_000


@pytest.mark.usefixtures("blank_figures")
def test_private_runs_begin_at_a_full_hour_and_last_a_power_of_two_seconds(new_tracking, store, folder):
    """Also a run that was stopped. A millisecond tells runs of one hour apart, so that MLflow sorts them."""
    view, tracking, start = a_view(folder, exact_times=False), new_tracking(), int(1000 * time.time())
    play(tracking, view, [1], a_result(view, wall_seconds=64.0))
    (folder / "result.json").unlink()
    write_json(folder / "ledger.head", {"run": "cd" * 16})  # another run in the same place
    play(tracking, view, [1], a_result(view, wall_seconds=2.0, finished=False))
    query = "SELECT start_time, end_time, status FROM runs WHERE experiment_id = ? ORDER BY start_time"
    points = "SELECT timestamp FROM metrics JOIN runs USING (run_uuid) WHERE experiment_id = ?"
    with contextlib.closing(sqlite3.connect(store.removeprefix("sqlite:///"))) as database:
        runs = database.execute(query, [tracking.store.experiment_id]).fetchall()
        metrics = {when for (when,) in database.execute(points, [tracking.store.experiment_id])}
    hour = runs[0][0]
    assert hour % HOUR == 0 and hour <= start < hour + 2 * HOUR and {when % HOUR for when in metrics} == {0}
    assert runs == [(hour, hour + 64_000, "FINISHED"), (hour + 1, hour + 2_001, "FAILED")]


def test_a_search_its_trials_and_the_run_of_all_seeds_have_rounded_times(store, request, tmp_path):
    search, seeds = (kind(request.node.name, store) for kind in (StudyTracking, SeedsTracking))
    options = {"rounds": 2, "seed": 0, "strategies": {"size_weighted": {}}}
    sweep = {"space": {"clients.learning_rate": {"low": 0.1, "high": 1.0}}, "scores": ["accuracy"]}
    parent = search.begin("search", {**options, "sweep": {**sweep, "networks": 1}}, sweep)
    begun = datetime(2026, 1, 1, 10, 30)
    when = (begun, begun + timedelta(seconds=33))
    search.trial(parent, "trial 0", {}, {"accuracy": 0.5}, {1: {"accuracy_so_far": 0.5}}, {}, when, "FINISHED")
    search.stopped(parent)
    seeds_run = seeds.begin("", tmp_path, options, [1.0, 4.0])
    seeds.stopped(seeds_run)
    runs = {run.info.run_name: run for run in search.store.client.search_runs([search.store.experiment_id])}
    for run in runs.values():
        assert run.info.start_time % HOUR < 3, "at a full hour, and in their order"
        assert math.log2((run.info.end_time - run.info.start_time) / 1000).is_integer()
    trial = runs["trial 0"]
    assert trial.info.end_time - trial.info.start_time == 64_000
    points = search.store.client.get_metric_history(trial.info.run_id, "accuracy")
    assert {point.timestamp % HOUR for point in points} == {0}
    assert columns_of(search) == ["accuracy"]


def test_the_run_of_all_seeds_has_the_epsilon_of_all_of_them_together(store, request, tmp_path):
    seeds, folders = SeedsTracking(request.node.name, store), [tmp_path / f"seed_{seed}" for seed in range(2)]
    options = {"rounds": 2, "seed": 0, "strategies": {"size_weighted": {}}}
    for folder in folders:
        view = a_view(folder)
        folder.mkdir()
        play(Curves(), view, (1, 2))
    together = Guarantee(epsilon=22.9, delta=1e-3, **FRAME)
    parent = seeds.begin("", tmp_path, options, [1.0, 4.0])
    seeds.end(parent, folders, "two seeds", together)
    run = seeds.store.client.get_run(parent)
    assert run.data.metrics["train_epsilon_max"] == 22.9 and run.data.tags["epsilon"] == "22.9"
    assert not [name for name in run.data.metrics if name.startswith("train_epsilon") and name != "train_epsilon_max"]


# ---- resuming


@pytest.mark.e2e
@pytest.mark.parametrize(
    "reason, status", [("interrupted; resume with: ...", "KILLED"), ("RuntimeError: boom", "FAILED")]
)
def test_an_unfinished_run_is_resumed_in_the_same_mlflow_run(new_tracking, only_run, folder, reason, status):
    view, first, second = a_view(folder), new_tracking(), new_tracking()
    stopped = a_result(view, finished=False, rounds=2, reason=reason, interrupted=status == "KILLED")
    play(first, view, (1, 2, 3), stopped)
    run = only_run()
    assert run.info.status == status and run.tags["status"] == f"Stopped after round 3 of 10: {reason}"
    assert run.files() == LEDGER and "train_wall_seconds" not in run.metrics and not run.models

    resumed = a_view(folder, first_round=3)  # the checkpoint was older than the last tracked round
    start(second, dataclasses.replace(resumed, round=3))
    assert only_run().info.status == "RUNNING"
    for round in range(3, 11):
        end_round(second, resumed, a_report(resumed, round))
    end(second, resumed)
    assert only_run().info.status == "FINISHED" and only_run().steps("test_accuracy") == list(range(1, 11))


@pytest.mark.usefixtures("blank_figures")
def test_a_run_that_a_signal_ends_while_it_is_created_is_ended(new_tracking, only_run, folder, monkeypatch):
    def interrupted(*args, **more):
        sync(*args, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr("dpfl_lightning.reporting.mlflow.run.sync", interrupted)
    tracking, view = new_tracking(), a_view(folder)
    with pytest.raises(KeyboardInterrupt):
        start(tracking, view)
    assert only_run().info.status == "RUNNING"
    monkeypatch.undo()
    end(tracking, view, a_result(view, finished=False, rounds=0, reason="interrupted", interrupted=True))
    assert only_run().info.status == "KILLED"


@pytest.mark.e2e
def test_a_finished_run_that_is_resumed_stays_as_it_is_in_mlflow(new_tracking, only_run, folder):
    view, first, second = a_view(folder), new_tracking(), new_tracking()
    play(first, view, [9, 10])
    before = only_run()
    play(second, dataclasses.replace(a_view(folder, first_round=11), round=11), [])
    after = only_run()
    assert after.info.end_time == before.info.end_time and after.tags == before.tags
    charged_again = a_result(view, ledger={"run": "ab" * 16, "lines": 34, "chain": "ef" * 16})
    play(second, dataclasses.replace(a_view(folder, first_round=10), round=10), [10], charged_again)
    assert json.loads(only_run().tags["ledger_head"])["lines"] == 34, "a restored backup repeats a round"


@pytest.mark.usefixtures("blank_figures")
def test_a_run_that_was_killed_at_once_is_recognised_by_its_ledger(new_tracking, only_run, folder):
    view = a_view(folder)
    start(new_tracking(), view)
    play(new_tracking(), view, [1])
    only_run()


@pytest.mark.usefixtures("blank_figures")
def test_a_run_that_the_store_does_not_have_begins_anew(new_tracking, only_run, store, folder):
    start(new_tracking(), a_view(folder))
    MlflowClient(store).delete_run(only_run().info.run_id)
    play(new_tracking(), a_view(folder), [1, 2])
    assert only_run().steps("train_participants") == [1, 2] and only_run().info.status == "FINISHED"


# ---- stores that do not answer


def test_a_server_that_does_not_answer_is_one_error_before_the_run(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hunter2@127.0.0.1:{port}")
    start = time.monotonic()
    with pytest.raises(UserError) as error:
        Tracking("any")
    assert time.monotonic() - start < 5
    message = str(error.value)
    assert f"http://127.0.0.1:{port}" in message and "refused" in message and "\n" not in message
    assert "--tracking null" in message and "hunter2" not in message


def test_a_store_that_cannot_exist_is_one_quick_error(tmp_path):
    start = time.monotonic()
    for uri in ("sqlite:////dev/null/mlflow.db", "sqlite:////dev", "htp://localhost"):
        with pytest.raises(UserError, match=f"`tracking.uri` must .* got '{uri}'"):
            Tracking("any", uri=uri)
    assert time.monotonic() - start < 15
    (tmp_path / "mlflow.db").write_text("something else entirely " * 100)
    with pytest.raises(UserError, match="not a database"):
        Tracking("any", uri=f"sqlite:///{tmp_path}/mlflow.db")


def test_a_deleted_experiment_is_one_error(new_tracking, store, request):
    client = MlflowClient(store)
    client.delete_experiment(client.create_experiment(request.node.name))
    with pytest.raises(UserError, match=r"`tracking.experiment` .*mlflow experiments restore"):
        new_tracking()


@pytest.mark.usefixtures("blank_figures")
def test_a_store_that_fails_does_not_stop_training_and_gets_its_rounds_later(
    new_tracking, only_run, folder, monkeypatch
):
    tracking, view = new_tracking(), a_view(folder)
    start(tracking, view)
    tries = []

    def broken(*args, **options):
        tries.append(1)
        raise ConnectionError("gone")

    assert tracking._send_at == 0.0
    with monkeypatch.context() as patch:
        patch.setattr(tracking.store.client, "log_batch", broken)
        with pytest.warns(UserWarning, match="training continues.*gone") as warned:
            for round in (1, 2, 3):
                end_round(tracking, view, a_report(view, round))
    assert len(warned) == 1 and len(tries) == 1  # neither a warning nor a wait for every round
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        end_round(tracking, view, a_report(view, 4))
        end(tracking, view)  # the store answers again
    run = only_run()
    assert run.steps("train_participants") == [1, 2, 3, 4] and run.info.status == "FINISHED"


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize("method", ["log_batch", "log_artifact", "log_figure", "create_logged_model"])
def test_what_was_not_sent_is_sent_by_the_command(new_tracking, only_run, store, folder, method, monkeypatch, capsys):
    tracking, view = new_tracking(), a_view(folder)
    (folder / "ledger.jsonl").unlink()  # not one that the command reads
    save_file(view.module.net.state_dict(), folder / "model.safetensors")
    start(tracking, view)
    with monkeypatch.context() as patch, pytest.warns(UserWarning) as warned:
        patch.setattr(tracking.store.client, method, lambda *args, **options: 1 / 0)
        end_round(tracking, view, a_report(view, 1))
        end(tracking, view)
    assert "does not have the whole run" in str(warned[-1].message) and f"sync {folder} sends" in str(
        warned[-1].message
    )
    assert sync_command([str(folder)]) == 0
    run = only_run()
    assert run.info.status == "FINISHED" and len(run.models) == 1 and run.steps("train_participants") == [1]
    assert {"result.json", "figures"} < run.files()


def test_the_store_is_the_given_one_or_that_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert store_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-env")
    assert store_uri() == "http://from-env" and store_uri("http://given") == "http://given"
    assert how_to_open("https://me:pass@host/") == "open https://host"


@pytest.mark.parametrize(
    "uri",
    ["http://me:hunter2@host", "http://hunter2@host", "postgresql://me:p@hunter2@host/x", "https://host?token=hunter2"],
)
def test_an_address_with_credentials_is_refused_before_it_is_written(uri, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in (["--tracking.uri", uri], ["--config", str(tmp_path / "c.yaml")]):
        (tmp_path / "c.yaml").write_text(f"tracking: {{uri: '{uri}'}}\n")
        assert fit_command([*words, "--privacy.epsilon", "1"]) == 2
        printed = capsys.readouterr()
        assert "`tracking.uri` must have no user name, password or token" in printed.err
        assert "hunter2" not in printed.out + printed.err and "MLFLOW_TRACKING_URI" in printed.err
    assert {path.name for path in tmp_path.iterdir()} == {"c.yaml"}
    assert "hunter2" not in how_to_open(uri) and "hunter2" not in str(without_secrets({"a": [{"b": uri}]}))


def test_ctrl_c_within_mlflow_is_no_failure_of_the_store():
    """MLflow turns whatever interrupts its database into an error of its own."""
    with pytest.raises(KeyboardInterrupt), reported("sqlite:///mlflow.db"):
        try:
            raise KeyboardInterrupt
        except BaseException as interrupt:
            raise OSError("the database failed") from interrupt
