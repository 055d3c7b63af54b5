"""Tracking of a search and its trials in MLflow."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from dpfl_lightning.reporting.mlflow.store import Store, metrics

_PROGRAM = {"mlflow.source.name": "dpfl_lightning.sweep"}


class StudyTracking:
    """Tracks a search as one run of a `Store`, and each of its trials as a run nested in it.

    A store that fails later never stops a trial; one warning states that tracking failed.
    """

    def __init__(self, experiment: str, uri: str | None = None, tags: Mapping[str, Any] | None = None) -> None:
        self.store, self._tags = Store(experiment, uri), dict(tags or {})
        self.how_to_open = self.store.how_to_open

    def begin(self, name: str, options: Mapping[str, Any], run_id: str | None = None) -> str:
        """Start or resume the run of the search, and return its id."""
        with self.store.reported():
            if run_id is not None and self.store.resume(run_id):
                return run_id
            return self.store.begin(name, {**self._tags, **_PROGRAM}, options, "sweep.yaml")

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
        """Log a finished trial: drawn values, scores, accuracy after each step, start and end time, and status."""
        begun, ended = (None if time is None else int(time.timestamp() * 1000) for time in when)

        def log() -> None:
            trial_tags = {**tags, "mlflow.parentRunId": parent, **_PROGRAM}
            run = self.store.begin(name, trial_tags, params, file="", begun=begun)
            curve = [metric for step, one in steps.items() for metric in metrics({"accuracy_so_far": one}, step)]
            self.store.log_metrics(run, [*metrics(values, 0), *curve])
            self.store.client.set_terminated(run, status, ended)

        self._tried(log)

    def end(self, run_id: str, values: Mapping[str, float], text: str, files: Sequence[Path]) -> None:
        """Log the results of the search (best scores, a table and files), and end its run."""

        def log() -> None:
            self.store.log_metrics(run_id, metrics(values, 0))
            self.store.client.log_text(run_id, text, "trials.txt")
            for path in files:
                self.store.client.log_artifact(run_id, str(path))
            self.store.client.set_terminated(run_id)

        self._tried(log)

    def stopped(self, run_id: str) -> None:
        """Mark the search as stopped; `begin` resumes it."""
        self._tried(lambda: self.store.client.set_terminated(run_id, "KILLED"))

    def _tried(self, action: Callable[[], None]) -> None:
        self.store.tried(action, "trials continue")
