"""Writes to an MLflow server or file with limits on the time it may take."""

import itertools
import json
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mlflow
import mlflow.store.db.utils
from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag
from mlflow.entities import Metric as Metric
from mlflow.entities import Run as Run
from mlflow.tracking import MlflowClient

from dpfl_lightning.errors import UserError, in_one_line, require, warn_user
from dpfl_lightning.reporting.run_files import ledger_run
from dpfl_lightning.runtime.files import locked_folder
from dpfl_lightning.runtime.text import rounded_up_duration, without_credentials, without_secrets

for chatter in ("alembic", "mlflow.store.db.utils"):
    logging.getLogger(chatter).setLevel(logging.WARNING)
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # hide retries; failures are reported once

_MOST_METRICS = 1000  # in one request
_LONGEST_TAG = 8000  # characters
_MOST_CHANGES = 3  # in the name of a run
_VIEW = "dpfl_lightning"  # of an experiment's page, whose own default shows neither metrics nor parameters
_VIEW_TAG = f"mlflow.sharedViewState.{_VIEW}"
_COLUMNS = {"attributes": ("Created", "Duration"), "params": ("strategies", "epsilon", "rounds", "seed")}
_HOUR = 3_600_000  # in milliseconds, as all times of MLflow


class Store:
    """One experiment, created if missing, of an MLflow server or of an SQLite file (see `store_uri`).

    Methods, and those of `client`, raise the exceptions of MLflow. `reported` turns them into a UserError, `tried` into
    a warning. Raises UserError if the store does not answer within seconds, or the experiment was deleted.
    """

    def __init__(self, experiment: str, uri: str | None = None) -> None:
        self.uri, self._warned = store_uri(uri), False
        with reported(self.uri, seconds=10), _alone(self.uri):
            if not self.uri.startswith(("http:", "https:")):
                mlflow.store.db.utils.MAX_RETRY_COUNT = 1  # ten attempts to reach a database would take 100 s
            self.client = MlflowClient(self.uri)
            self.experiment_id = _experiment(self.client, self.uri, experiment)
            self._columns = set[str]()  # those that the experiment's page shows
            self.show(_COLUMNS)
        self.how_to_open = how_to_open(self.uri, self.experiment_id)

    def new_name(self, name: str, params: Mapping[str, str]) -> str:
        """Return a name that no run has: after what differs from the first run of this name, or after a number.

        For example `learning_rate 0.3, noise_aware eps 2`, and then `2: learning_rate 0.3, noise_aware eps 2`: the
        table of runs shows the beginning of a name only.
        """
        same, oldest = f"attributes.run_name LIKE '%{name}'", ["start_time ASC"]
        runs = self.client.search_runs([self.experiment_id], same, order_by=oldest)
        taken = [run.info.run_name for run in runs]
        if name not in taken:
            return name
        first = runs[taken.index(name)].data.params
        changed = [f"{key.rpartition('.')[2]} {text}" for key, text in params.items() if first.get(key) != text]
        name = ", ".join([*changed[:_MOST_CHANGES], name])
        numbered = (f"{number}: {name}" for number in itertools.count(2))
        return name if name not in taken else next(one for one in numbered if one not in taken)

    def begin(
        self,
        name: str,
        tags: Mapping[str, Any],
        params: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        file: str = "options.yaml",
        begun: float | None = None,
        exact_times: bool = False,
    ) -> str:
        """Create a run and return its id.

        `options` are stored without secrets as a `file`. The run begins at `begun` (Unix time in seconds; None is now),
        which is rounded down to an hour unless times are exact.
        """
        texts = {key: str(value)[:_LONGEST_TAG] for key, value in tags.items()}
        start = int(1000 * (time.time() if begun is None else begun))
        start = start if exact_times else self._first_free(start - start % _HOUR)
        run = self.client.create_run(self.experiment_id, start_time=start, run_name=name, tags=texts)
        run_id = run.info.run_id
        self.params(run_id, params or {})
        if options:
            self.client.log_dict(run_id, without_secrets(options), file)
        return run_id

    def _first_free(self, hour: int) -> int:
        """Return the first millisecond of an hour at which no run begins, so that MLflow sorts runs as they began."""
        same = f"attributes.start_time >= {hour} and attributes.start_time < {hour + 1000}"
        runs = self.client.search_runs([self.experiment_id], same, max_results=1, order_by=["start_time DESC"])
        return runs[0].info.start_time + 1 if runs else hour

    def end(self, run_id: str, status: str = "FINISHED", seconds: float | None = None) -> None:
        """End a run `seconds` after its start, rounded up to a power of two; None ends it now (exact times)."""
        ended = None
        if seconds is not None:
            info = self.client.get_run(run_id).info
            ended = max(info.end_time or 0, info.start_time + int(1000 * rounded_up_duration(seconds)))
        self.client.set_terminated(run_id, status, ended)

    def show(self, columns: Mapping[str, Iterable[str]]) -> None:
        """Add columns (attributes, metrics, params) to the table of runs that `how_to_open` names."""
        wanted = [f"{kind}.`{name}`" for kind, names in columns.items() for name in names]
        if self._columns.issuperset(wanted):
            return
        view = self.client.get_experiment(self.experiment_id).tags.get(_VIEW_TAG)
        shown_columns = [] if view is None else json.loads(view)["selectedColumns"]
        merged = list(dict.fromkeys([*shown_columns, *wanted]))
        if merged != shown_columns:
            self.client.set_experiment_tag(self.experiment_id, _VIEW_TAG, json.dumps({"selectedColumns": merged}))
        self._columns = set(merged)

    def log_dataset(self, run_id: str, fields: Mapping[str, str], context: str) -> None:
        """Log a data set as an input of a run; `fields` are those of `mlflow.entities.Dataset`."""
        tags = [InputTag("mlflow.data.context", context)]
        inputs = [DatasetInput(Dataset(**fields), tags)]
        try:
            self.client.log_inputs(run_id, inputs)
        except mlflow.MlflowException:  # another run was creating the same data set: now it is known
            self.client.log_inputs(run_id, inputs)

    def resume(self, run_id: str) -> bool:
        """Set the status of a run to running; return False if it does not exist or was deleted."""
        try:
            active = self.client.get_run(run_id).info.lifecycle_stage == "active"
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        if active:
            self.client.update_run(run_id, status="RUNNING")
        return active

    def run_of(self, folder: Path) -> Run | None:
        """Return the latest run of a folder: that of its ledger, or of its place if it has no ledger.

        Another run that once was in the same place is not meant.
        """
        name = ledger_run(folder)
        return self.latest("ledger_run", name) if name else self.latest("output_dir", str(folder.resolve()))

    def latest(self, tag: str, value: str) -> Run | None:
        mark = '"' if "'" in value else "'"
        same = f"tags.{tag} = {mark}{value}{mark}"
        runs = self.client.search_runs([self.experiment_id], same, max_results=1, order_by=["start_time DESC"])
        return runs[0] if runs else None

    def log_metrics(self, run_id: str, pending: list[Metric]) -> None:
        """Send metrics, and remove those that have arrived from `pending`."""
        while pending:
            batch = pending[:_MOST_METRICS]
            self.client.log_batch(run_id, metrics=batch)
            del pending[: len(batch)]

    def params(self, run_id: str, params: Mapping[str, str]) -> None:
        self.client.log_batch(run_id, params=[Param(name, text) for name, text in params.items()])

    def running(self) -> list[Run]:
        """Return the runs that have not ended, as far as the store knows."""
        return list(self.client.search_runs([self.experiment_id], "attributes.status = 'RUNNING'"))

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        self.client.log_batch(run_id, tags=[RunTag(key, text[:_LONGEST_TAG]) for key, text in tags.items()])

    def tried(self, action: Callable[[], object], unharmed: str) -> bool:
        """Return whether `action` reached the store. The first failure warns, with the words what is `unharmed`."""
        try:
            with _patience():
                action()
            return True
        except Exception as error:  # a server, a disk or a proxy may raise anything
            cause = _cause(error)
            if not self._warned:
                self._warned = True
                warn_user(f"MLflow at {without_credentials(self.uri)} failed; {unharmed}: {_why(cause, self.uri)}")
            return False


def last_points(run: Run) -> dict[str, tuple[int, float]]:
    """Return metric -> the last step that the store has of it, and its value; of equal steps MLflow has the largest."""
    return {metric.key: (metric.step, metric.value) for metric in run.data.to_proto().metrics}


def metrics(values: Mapping[str, float | None], step: int, exact_times: bool = False) -> list[Metric]:
    """Return the finite values as MLflow metrics; MLflow charts no others. Their time is that of the last full hour,
    unless times are exact.
    """
    now = int(time.time() * 1000)
    now -= 0 if exact_times else now % _HOUR
    return [Metric(k, float(v), now, step) for k, v in values.items() if v is not None and math.isfinite(v)]


@contextmanager
def downloaded(run_id: str, names: Sequence[str], uri: str | None = None) -> Iterator[Path]:
    """Provide a temporary folder with the artifacts `names` of a run; UserError if there are none.

    An SQLite store that does not exist is not created.
    """
    uri, run = store_uri(uri), f"run {run_id}"
    shown, advice = without_credentials(uri), "Is it the run of another store? Pass its address as uri."
    file = _file_of(uri)
    require(file is None or file.is_file(), run, "be in an MLflow store that exists", shown, advice)
    with tempfile.TemporaryDirectory() as folder:
        with reported(uri):
            client = MlflowClient(uri)
            try:
                stored = sorted(artifact.path for artifact in client.list_artifacts(run_id))
            except mlflow.MlflowException as error:
                require(
                    error.error_code != "RESOURCE_DOES_NOT_EXIST", run, "be a run of the MLflow store", shown, advice
                )
                raise
            for name in names:
                must = f"have the artifact {name}"
                require(name in stored, run, must, stored or "none", "Was it finished?")
                client.download_artifacts(run_id, name, folder)
        yield Path(folder)


def store_uri(uri: str | None = None) -> str:
    """Return `uri`, else MLFLOW_TRACKING_URI, else `mlflow.db` (SQLite) in the working directory."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


def how_to_open(uri: str | None = None, experiment_id: str | None = None) -> str:
    """Describe in one line how to open the runs of a store in a browser."""
    uri = without_credentials(store_uri(uri))
    # MLflow's default page is the one for language models, which does not show these runs.
    page = (
        ""
        if experiment_id is None
        else f"/#/experiments/{experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={_VIEW}"
    )
    if uri.startswith(("http:", "https:")):
        return f"open {uri.rstrip('/')}{page}"
    return f"MLFLOW_DISABLE_TELEMETRY=true mlflow ui --backend-store-uri {uri}, then open http://127.0.0.1:5000{page}"


def _experiment(client: MlflowClient, uri: str, name: str) -> str:
    """Return the id of the experiment; created if missing. The artifacts of an SQLite store lie beside its file."""
    known = client.get_experiment_by_name(name)
    if known is not None and known.lifecycle_stage != "active":
        raise UserError(
            f"`tracking.experiment` must not be a deleted experiment, got {name!r} at {without_credentials(uri)}. "
            f"Restore it (mlflow experiments restore -x {known.experiment_id}) or choose another name."
        )
    if known is not None:
        return known.experiment_id
    place = _folder_of(uri)
    folder = place / "mlruns" / quote(name, safe=" ") if place else None
    tags = {"mlflow.experimentKind": "custom_model_development"}  # makes the page show training runs first
    try:
        return client.create_experiment(name, artifact_location=folder and folder.as_uri(), tags=tags)
    except mlflow.MlflowException as error:
        created = client.get_experiment_by_name(name)  # by another process, since it was looked up
        if error.error_code != "RESOURCE_ALREADY_EXISTS" or created is None:
            raise
        return created.experiment_id


def _file_of(uri: str) -> Path | None:
    """Return the file of an SQLite store; None for a server or another database."""
    database = re.fullmatch(r"sqlite:///(.+?)(\?.*)?", uri)
    return Path(database[1]).resolve() if database else None


def _folder_of(uri: str) -> Path | None:
    """Return the folder of an SQLite store; None for a server or another database."""
    file = _file_of(uri)
    return file.parent if file else None


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Let one process after the other open an SQLite store, whose tables the first one creates."""
    folder = _folder_of(uri)
    if folder is None or not folder.is_dir():
        yield
        return
    with locked_folder(folder):
        yield


@contextmanager
def _patience(seconds: int = 30) -> Iterator[None]:
    """Limit how long MLflow waits for a server; its default is many minutes. Values that the user has set are kept."""
    limits = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(seconds),
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }
    limits = {name: value for name, value in limits.items() if name not in os.environ}
    os.environ.update(limits)
    try:
        yield
    finally:
        for name in limits:
            os.environ.pop(name, None)


@contextmanager
def reported(uri: str, seconds: int = 30) -> Iterator[None]:
    """Turn failures of the store inside the block into a UserError."""
    try:
        with _patience(seconds):
            yield
    except UserError:
        raise
    except Exception as error:  # MLflow, its database and its HTTP layer raise different types
        cause = _cause(error)
        raise UserError(
            f"`tracking.uri` must be an MLflow server or store that answers, got {without_credentials(uri)!r} "
            f"({_why(cause, uri)}). Start the server, set MLFLOW_TRACKING_URI to another one, unset it for "
            "an SQLite file in this directory, or train with --tracking null."
        ) from error


def _cause(error: BaseException) -> BaseException:
    """Return the innermost reason of an error. Raises it if it is Ctrl-C, which MLflow makes an error of its own."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, KeyboardInterrupt):
        raise error from None
    return error


def _why(error: BaseException, uri: str) -> str:
    """Return an error in one line and without a password."""
    return without_credentials(in_one_line(error).replace(uri, without_credentials(uri)))
