"""The tracked run in MLflow (the only mlflow import): options, one write a round, ledger, model, figures."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read on import; no usage reports from a privacy tool

import mlflow
import mlflow.store.db.utils
from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

import dpfl_lightning
from dpfl_lightning.errors import UserError, UserNotice, require
from dpfl_lightning.federated.callback import ServerCallback
from dpfl_lightning.federated.distilled import CARD, TENSORS, DistilledSet
from dpfl_lightning.federated.gradient_counts import Diagnostics
from dpfl_lightning.federated.group_metrics import MATCHES, accuracy_of_groups, true_groups
from dpfl_lightning.federated.report import accuracy_over_clients
from dpfl_lightning.federated.state import RoundReport, RunResult, View
from dpfl_lightning.figures import figures, of_strategies, per_client
from dpfl_lightning.privacy.events import NoisedEvent

for chatter in ("alembic", "mlflow.store.db.utils"):
    logging.getLogger(chatter).setLevel(logging.WARNING)
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # a retry is no news: what fails is said once

_MOST_METRICS, _MOST_PARAMS = 1000, 100  # of one MLflow request
_LONGEST_PARAM, _LONGEST_TAG = 6000, 8000
# Never the whole folder: `noise_key` lets its reader subtract the noise, and checkpoint and counts are no releases.
_LEDGER = ("ledger.jsonl", "ledger.head")
_FILES = (*_LEDGER, "guarantees.json", "guarantee.html", "result.json", "model.pt", "model_*.pt", TENSORS, CARD)


class Tracking(ServerCallback):
    """Keeps a run in MLflow: an SQLite file in the working directory, or any server.

    Made before the run, it refuses a store that does not answer within seconds. A store that goes away later
    never stops training: its rounds are kept, and sent when it is back; what is missing at the end is said.
    Rounds that are quicker than ten writes share one. A resumed run goes on in the same MLflow run.

    Args:
        experiment: name of the MLflow experiment; made if missing.
        run_name: name of the run; None is the name of the output folder.
        uri: see `store_uri`.
        tags: of the run, beside those that say what its epsilons mean, which they cannot replace.

    **Privacy** Sends options, released models, the ledger, and accuracies on held-out records, which no
    guarantee covers. Never the noise key, never a checkpoint.

    Raises:
        UserError: the store cannot be reached or written, or the experiment was deleted.
    """

    def __init__(
        self,
        experiment: str,
        run_name: str | None = None,
        uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        self.uri = store_uri(uri)
        self._run_name, self._own_tags = run_name, dict(tags or {})
        with _patience(seconds=10), _reported(self.uri):
            if not self.uri.startswith(("http:", "https:")):
                mlflow.store.db.utils.MAX_RETRY_COUNT = 1  # a database that is away: its ten tries take 100 s
            self._client = MlflowClient(self.uri)
            self._experiment_id = _experiment(self._client, self.uri, experiment)
        self.how_to_open = how_to_open(self.uri, self._experiment_id)
        self._run_id: str | None = None
        self._resumed = False
        self._last_step = 0  # the last round MLflow already has
        self._pending: list[Metric] = []
        self._send_at = 0.0
        self._warned = False

    # -- hooks

    def on_run_start(self, view: View) -> None:
        with _patience(), _reported(self.uri):
            self._run_id = self._earlier_run(view) if self._resumed else None
            if self._run_id is None:
                self._begin_run(view)
            else:
                self._client.update_run(self._run_id, status="RUNNING")
                self._client.set_tag(self._run_id, "status", "running")
                self._last_step = max(self._history("overall/participants"), default=0)

    def on_round_end(self, view: View, report: RoundReport) -> None:
        if report.round <= self._last_step:
            return  # tracked before the run was killed, replayed now
        self._pending += _metrics(_round_values(report, true_groups(view.facts)), report.round)
        if time.monotonic() >= self._send_at:
            self._guarded(self._send_pending)

    def on_run_end(self, view: View, result: RunResult) -> None:
        if self._run_id is None:
            return  # it ended before it began
        if result.finished:
            self._pending += _metrics(_final_values(result), result.rounds)
        missing = []
        if not self._guarded(self._send_pending):
            rounds = [metric.step for metric in self._pending]
            missing = [f"metrics of rounds {min(rounds)} to {max(rounds)}", "files and figures"]
        else:
            if not self._guarded(lambda: self._send_files(view, result)):
                missing.append("some files and figures")
            if not self._guarded(lambda: self._send_status(result)):
                missing.append("the run's status")
        if missing:
            warnings.warn(
                f"MLflow at {shown(self.uri)} did not get: {', '.join(missing)}. The result is complete in "
                f"{result.output_dir}.",
                UserNotice,
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._run_id, self._resumed = state["run_id"], True

    # -- what is sent

    def _begin_run(self, view: View) -> None:
        folder = view.run.output_dir.resolve()
        tags = {
            **self._own_tags,
            **_frame(view),
            "output_dir": str(folder),
            "status": "running",
            "mlflow.source.name": "dpfl_lightning",
        }
        run = self._client.create_run(
            self._experiment_id,
            run_name=self._run_name or folder.name,
            tags={name: str(value)[:_LONGEST_TAG] for name, value in tags.items()},
        )
        self._run_id = run.info.run_id
        options = loggable(view.run.options)
        sizes = {"num_clients": view.facts.num_clients, "num_params": view.run.num_params}
        params = [Param(name, value) for name, value in {**flattened(options), **flattened(sizes)}.items()]
        for begin in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[begin : begin + _MOST_PARAMS])
        if options:
            self._client.log_dict(self._run_id, options, "options.yaml")

    def _earlier_run(self, view: View) -> str | None:
        """The MLflow run of a resumed run: by its id, else (it was killed at once) by its output folder."""
        folder = str(view.run.output_dir.resolve())
        if self._run_id is not None:
            try:
                run = self._client.get_run(self._run_id)
                return self._run_id if run.info.lifecycle_stage == "active" else None
            except mlflow.MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # another store now: a new run there
                    raise
        mark = '"' if "'" in folder else "'"
        same = f"tags.output_dir = {mark}{folder}{mark}"
        found = self._client.search_runs([self._experiment_id], same, max_results=1, order_by=["start_time DESC"])
        return found[0].info.run_id if found else None

    def _send_pending(self) -> None:
        while self._pending:
            batch = self._pending[:_MOST_METRICS]
            self._client.log_batch(self._known_run, metrics=batch, synchronous=True)
            del self._pending[: len(batch)]

    def _send_files(self, view: View, result: RunResult) -> None:
        folder = view.run.output_dir
        for pattern in _FILES if result.finished else _LEDGER:
            for path in sorted(folder.glob(pattern)):
                self._client.log_artifact(self._known_run, str(path))
        if not result.finished:
            return
        distilled = DistilledSet.load(folder) if (folder / TENSORS).is_file() else None
        for name, figure in figures(self._history, result, distilled).items():
            self._client.log_figure(self._known_run, figure, f"figures/{name}.png")

    def _send_status(self, result: RunResult) -> None:
        tags = {
            "status": result.reason,
            "guarantee": result.guarantee,
            "ledger_head": json.dumps(result.ledger),
            "mlflow.note.content": _description(result),
        }
        self._client.log_batch(self._known_run, tags=[RunTag(k, v[:_LONGEST_TAG]) for k, v in tags.items()])
        interrupted = "KILLED" if result.reason.startswith("interrupted") else "FAILED"
        self._client.set_terminated(self._known_run, "FINISHED" if result.finished else interrupted)

    def _history(self, metric: str) -> dict[int, float]:
        """Round -> value, from MLflow, which also has the rounds before a resume."""
        points = self._client.get_metric_history(self._known_run, metric)
        return {point.step: point.value for point in sorted(points, key=lambda point: point.step)}

    @property
    def _known_run(self) -> str:
        assert self._run_id is not None  # for mypy: set when the run starts
        return self._run_id

    def _guarded(self, action: Callable[[], None]) -> bool:
        """Whether `action` reached MLflow; the next write waits for ten times as long as it took."""
        begun = time.monotonic()
        try:
            with _patience():
                action()
            failed = None
        except Exception as error:  # whatever a server, a disk or a proxy does to a watcher: training goes on
            failed = error
        took = time.monotonic() - begun
        self._send_at = begun + took + max(10 * took, 30.0 if failed else 0.0)
        if failed is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"MLflow at {shown(self.uri)} failed; training goes on, and tracking is tried again: "
                f"{_why(failed, self.uri)}",
                UserNotice,
                stacklevel=2,
            )
        return failed is None


def log_report(
    experiment: str, name: str, tags: Mapping[str, str], text: str, figure: Any = None, uri: str | None = None
) -> None:
    """A table, and a matplotlib figure if there is one, as a finished run of their own.

    Raises:
        UserError: the store cannot be reached or written.
    """
    uri = store_uri(uri)
    with _patience(), _reported(uri):
        client = MlflowClient(uri)
        run = client.create_run(_experiment(client, uri, experiment), run_name=name, tags=dict(tags))
        client.log_text(run.info.run_id, text, "table.md")
        if figure is not None:
            client.log_figure(run.info.run_id, figure, "figure.png")
        client.set_terminated(run.info.run_id, "FINISHED")


class StudyTracking:
    """A search as one run, and each of its trials as a run nested in it.

    A store that goes away later never stops a trial; that something is missing is said once.

    Args:
        experiment: name of the MLflow experiment; made if missing.
        uri: see `store_uri`.
        tags: of the search's run.

    Raises:
        UserError: the store cannot be reached or written, or the experiment was deleted.
    """

    def __init__(self, experiment: str, uri: str | None = None, tags: Mapping[str, Any] | None = None) -> None:
        self.uri, self._tags, self._warned = store_uri(uri), dict(tags or {}), False
        with _patience(seconds=10), _reported(self.uri):
            self._client = MlflowClient(self.uri)
            self._experiment_id = _experiment(self._client, self.uri, experiment)
        self.how_to_open = how_to_open(self.uri, self._experiment_id)

    def begin(self, name: str, options: Mapping[str, Any], run_id: str | None = None) -> str:
        """Begin the search's run, or go on with it; returns its id."""
        with _patience(), _reported(self.uri):
            if run_id is not None and self._has(run_id):
                self._client.update_run(run_id, status="RUNNING")
                return run_id
            tags = {**self._tags, "mlflow.source.name": "dpfl_lightning.sweep"}
            tags = {key: str(value)[:_LONGEST_TAG] for key, value in tags.items()}
            run = self._client.create_run(self._experiment_id, run_name=name, tags=tags)
            params = [Param(key, value) for key, value in flattened(loggable(options)).items()]
            for first in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(run.info.run_id, params=params[first : first + _MOST_PARAMS])
            self._client.log_dict(run.info.run_id, loggable(options), "sweep.yaml")
            return run.info.run_id

    def trial(
        self,
        parent: str,
        name: str,
        params: Mapping[str, Any],
        values: Mapping[str, float],
        steps: Mapping[int, float],
        tags: Mapping[str, str],
        when: tuple[datetime | None, datetime | None],
        status: str,
    ) -> None:
        """A trial that has ended: what it drew, its scores, its accuracy after each step, when, and how it ended."""
        begun, ended = (None if one is None else int(one.timestamp() * 1000) for one in when)

        def log() -> None:
            own = {**tags, "mlflow.parentRunId": parent, "mlflow.source.name": "dpfl_lightning.sweep"}
            own = {key: value[:_LONGEST_TAG] for key, value in own.items()}
            run = self._client.create_run(self._experiment_id, run_name=name, start_time=begun, tags=own).info.run_id
            metrics = _metrics(values, 0)
            for step, accuracy in steps.items():
                metrics += _metrics({"accuracy_so_far": accuracy}, step)
            logged = [Param(key, value) for key, value in flattened(loggable(params)).items()]
            self._client.log_batch(run, metrics=metrics[:_MOST_METRICS], params=logged)
            self._client.set_terminated(run, status, ended)

        self._guarded(log)

    def end(self, run_id: str, values: Mapping[str, float], text: str, files: Sequence[Path]) -> None:
        """What the search came to: its best scores, a table, files."""

        def log() -> None:
            self._client.log_batch(run_id, metrics=_metrics(values, 0))
            self._client.log_text(run_id, text, "trials.txt")
            for path in files:
                self._client.log_artifact(run_id, str(path))
            self._client.set_terminated(run_id, "FINISHED")

        self._guarded(log)

    def _has(self, run_id: str) -> bool:
        try:
            return self._client.get_run(run_id).info.lifecycle_stage == "active"
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            with _patience():
                action()
        except Exception as error:  # whatever a server, a disk or a proxy does: trials go on
            if not self._warned:
                self._warned = True
                words = f"MLflow at {shown(self.uri)} failed; trials go on: {_why(error, self.uri)}"
                warnings.warn(words, UserNotice, stacklevel=2)


@contextmanager
def downloaded(run_id: str, names: Sequence[str], uri: str | None = None) -> Iterator[Path]:
    """A folder with those artifacts of a run, while it is used.

    Raises:
        UserError: the store cannot be reached, or has no such run or artifact.
    """
    uri = store_uri(uri)
    with tempfile.TemporaryDirectory() as folder:
        with _patience(), _reported(uri):
            client = MlflowClient(uri)
            has = {one.path for one in client.list_artifacts(run_id)}
            for name in names:
                must = f"have the artifact {name}"
                require(name in has, f"run {run_id}", must, sorted(has) or "none", "Was it finished?")
                client.download_artifacts(run_id, name, folder)
        yield Path(folder)


# ---- where


def store_uri(uri: str | None = None) -> str:
    """Where runs are tracked: `uri`, else MLFLOW_TRACKING_URI, else `mlflow.db` (SQLite) in this directory.

    >>> store_uri("http://localhost:5000")
    'http://localhost:5000'
    """
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


def how_to_open(uri: str | None = None, experiment_id: str | None = None) -> str:
    """One line for a person: how to see the runs of a store in a browser.

    >>> how_to_open("sqlite:///mlflow.db", "1")  # doctest: +NORMALIZE_WHITESPACE
    'mlflow ui --backend-store-uri sqlite:///mlflow.db, then open
     http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning'
    """
    uri = shown(store_uri(uri))
    # MLflow's own start page is that of its other half, for language models, where no run is to be seen.
    page = "" if experiment_id is None else f"/#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    if uri.startswith(("http:", "https:")):
        return f"open {uri.rstrip('/')}{page}"
    return f"mlflow ui --backend-store-uri {uri}, then open http://127.0.0.1:5000{page}"


def shown(uri: str) -> str:
    """The URI without a user's name and password.

    >>> shown("postgresql://me:secret@db.example.org/runs")
    'postgresql://db.example.org/runs'
    """
    return re.sub(r"(?<=://)[^/@]*@", "", uri)


def _experiment(client: MlflowClient, uri: str, name: str) -> str:
    """Its id, made if missing; the artifacts of an SQLite store lie beside the file."""
    known = client.get_experiment_by_name(name)
    if known is not None and known.lifecycle_stage != "active":
        raise UserError(
            f"`tracking.experiment` must not be a deleted experiment, got {name!r} at {shown(uri)}. "
            f"Restore it (mlflow experiments restore -x {known.experiment_id}) or choose another name."
        )
    if known is not None:
        return known.experiment_id
    database = re.fullmatch(r"sqlite:///(.+?)(\?.*)?", uri)
    beside = None if database is None else Path(database[1]).resolve().parent / "mlruns" / quote(name, safe=" ")
    kind = {"mlflow.experimentKind": "custom_model_development"}  # so that the page shows training runs first
    return client.create_experiment(name, artifact_location=None if beside is None else beside.as_uri(), tags=kind)


@contextmanager
def _patience(seconds: int = 30) -> Iterator[None]:
    """How long MLflow waits for a server inside: its default is many minutes. What the user has set stays."""
    ours = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(seconds),
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }
    ours = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def _reported(uri: str) -> Iterator[None]:
    """A store that fails inside is a mistake the user can mend."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # MLflow, its database and its HTTP layer each have their own
        raise UserError(
            f"`tracking.uri` must be an MLflow server or store that answers, got {shown(uri)!r} "
            f"({_why(error, uri)}). Start the server, set MLFLOW_TRACKING_URI to another one, unset it for "
            "an SQLite file in this directory, or train with --tracking null."
        ) from error


def _why(error: BaseException, uri: str) -> str:
    """The innermost reason, in one line, without a password."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    lines = str(error).replace(uri, shown(uri)).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


# ---- what


def loggable(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, at any depth, without a `noise_key` and without the password of a URI.

    >>> loggable({"rounds": 3, "privacy": {"noise_key": "00"}, "tracking": {"uri": "http://me:secret@host"}})
    {'rounds': 3, 'privacy': {}, 'tracking': {'uri': 'http://host'}}
    """
    kept = {name: value for name, value in options.items() if name != "noise_key"}
    return {
        name: loggable(value) if isinstance(value, Mapping) else shown(value) if isinstance(value, str) else value
        for name, value in kept.items()
    }


def flattened(options: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted name -> text, cut to what MLflow takes; lists are one value.

    >>> flattened({"seed": 0, "model": {"name": "cnn"}, "strategies": {"uniform": {}}, "budgets": [1.5, 2]})
    {'seed': '0', 'model.name': 'cnn', 'strategies.uniform': '{}', 'budgets': '[1.5, 2]'}
    """
    flat: dict[str, str] = {}
    for name, value in options.items():
        key = prefix + re.sub(r"[^\w\-. :/]", "_", str(name))
        if isinstance(value, Mapping) and value:
            flat.update(flattened(value, f"{key}."))
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat[key] = text if len(text) <= _LONGEST_PARAM else text[: _LONGEST_PARAM - 3] + "..."
    return flat


def _frame(view: View) -> dict[str, str]:
    """What every epsilon of the run means, as tags."""
    frame = {
        "engine": view.run.engine,
        "device": view.run.device,
        "dpfl_lightning": dpfl_lightning.__version__,
    }
    events = [line.event for schedule in view.schedule.clients for line in schedule.planned]
    if not any(event.noise_multiplier for event in events if isinstance(event, NoisedEvent)):
        return {**frame, "guarantee": "no privacy"}
    one = view.guarantees()[0]
    deltas = sorted({schedule.delta for schedule in view.schedule.clients})
    return {
        **frame,
        "unit": one.unit,
        "adjacency": one.adjacency,
        "sampling": one.sampling,
        "noise": view.run.noise,
        **({"guarantee": one.words()} if one.unprotected else {}),
        "accountant": one.accountant,
        "delta": f"{deltas[0]:g}" if len(deltas) == 1 else f"{deltas[0]:g} to {deltas[-1]:g}",
    }


def _round_values(report: RoundReport, groups: Sequence[int] | None) -> dict[str, float | None]:
    """The curves. MLflow charts them in groups, ordered by name: `overall` before `per_client_...`."""
    accuracies = report.client_accuracy or ()
    measured = any(accuracy is not None for accuracy in accuracies)
    overall = {
        "test_accuracy": report.test_accuracy,
        "test_loss": report.test_loss,
        **accuracy_over_clients(accuracies),
        "epsilon_max": max(report.epsilon_spent),
        "epsilon_mean": fmean(report.epsilon_spent),
        "records_per_second": report.records / max(report.seconds, 1e-9),
        "participants": len(report.clients),
    }
    return {
        **{f"overall/{name}": value for name, value in overall.items()},
        **per_client("per_client_epsilon", report.epsilon_spent),
        **(per_client("per_client_accuracy", accuracies) if measured else {}),
        **{f"accuracy_of_group/{name}": value for name, value in accuracy_of_groups(accuracies, groups).items()},
        **_diagnosed(report.diagnostics),
        **of_strategies(report.told),
    }


def _diagnosed(shown: Diagnostics | None) -> dict[str, float | None]:
    if shown is None or all(fraction is None for fraction in shown.clip_fraction):
        return {}
    not_finite = per_client("per_client_gradients_not_finite", shown.not_finite)
    return {**per_client("per_client_clip_fraction", shown.clip_fraction), **not_finite}


def _final_values(result: RunResult) -> dict[str, float | None]:
    """What the run came to, under plain names: for the table of runs, to sort and search by."""
    spent = [client["epsilon_spent"] for client in result.clients]
    return {
        "test_accuracy": result.test_accuracy,
        "test_loss": result.test_loss,
        "accuracy_mean": result.accuracy_mean,
        "accuracy_std": result.accuracy_std,
        "accuracy_worst": result.accuracy_worst,
        "accuracy_gap": result.accuracy_gap,
        **{f"accuracy_{name}": result.accuracy_of_groups.get(name) for name in ("majority", "minority")},
        **{name: value for name, value in result.told.items() if name in MATCHES and not isinstance(value, list)},
        "epsilon_max": None if None in spent else max(spent),
        "rounds": result.rounds,
        "wall_seconds": result.wall_seconds,
        "training_seconds": result.training_seconds,
        "records_per_second": result.records_per_second,
    }


def _metrics(values: Mapping[str, float | None], step: int) -> list[Metric]:
    """What has a finite value: MLflow charts neither infinity nor "not measured"."""
    now = int(time.time() * 1000)
    return [Metric(k, float(v), now, step) for k, v in values.items() if v is not None and math.isfinite(v)]


def _description(result: RunResult) -> str:
    """Markdown for the top of the run's page."""
    accuracy = [] if result.test_accuracy is None else [f"**Test accuracy {result.test_accuracy:.2%}**"]
    return "\n\n".join(
        [
            *accuracy,
            f"**Guarantee.** {result.guarantee} More: `guarantee.html` among the artifacts.",
            f"**Ended:** {result.reason}.",
        ]
    )
