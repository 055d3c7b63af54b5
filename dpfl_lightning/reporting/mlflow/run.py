"""Tracks a training run in MLflow while it goes on."""

import math
import time
from collections.abc import Mapping
from typing import Any

from dpfl_lightning.errors import warn_user
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.run import change_about
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.reporting.mlflow.models import save_models
from dpfl_lightning.reporting.mlflow.store import Store, reported
from dpfl_lightning.reporting.mlflow.sync import end_abandoned, sync
from dpfl_lightning.runtime.launcher import invocation
from dpfl_lightning.runtime.text import without_credentials

_SLOW = 5.0  # seconds after which a failed write counts as a time-out
_MOST_TIMEOUTS = 2  # after which the rest is sent at the end of the run


class Tracking(Callback):
    """Sends a run, also a resumed one, to one run of a `Store` by `sync`, named by strategies and budgets by default.

    A store that fails later never stops training: its rounds are sent when it answers again. Additional `tags` cannot
    replace the tags that describe the guarantee. `per_client` sends the curves of every client, by its name; for
    `pickles` see `save_models`.

    **Privacy** See `sync`.
    """

    def __init__(
        self,
        experiment: str,
        run_name: str | None = None,
        uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        per_client: bool = False,
        pickles: bool = False,
    ) -> None:
        self.store = Store(experiment, uri)
        self.how_to_open = self.store.how_to_open
        self._section = {
            "experiment": experiment,
            "uri": uri and without_credentials(uri),
            "run_name": run_name,
            "tags": dict(tags or {}),
            "per_client": per_client,
        }
        self._begun, self._pickles = False, pickles
        self._send_at, self._timeouts = 0.0, 0

    def on_fit_start(self, view: View) -> None:
        change_about(view.run.output_dir, tracking=self._section)
        with reported(self.store.uri):
            end_abandoned(self.store)
            self._begun = True  # a signal that comes while the run is created ends it, too
            sync(view.run.output_dir, self.store, running=True)

    def on_round_end(self, view: View, report: RoundReport) -> None:
        if time.monotonic() >= self._send_at:
            self._sent(view, running=True)

    def on_fit_end(self, view: View, result: RunResult) -> None:
        if not self._begun:
            return
        if result.finished:
            save_models(view, view.run.output_dir, self._pickles)
        if not self._sent(view, running=False):
            words = f"MLflow at {without_credentials(self.store.uri)} does not have the whole run."
            how = f"{invocation('sync')} {result.output_dir} sends what is missing"
            warn_user(f"{words} The result is complete in {result.output_dir}, and {how}.")

    def _sent(self, view: View, running: bool) -> bool:
        """Return whether MLflow has all now. The next call waits ten times as long as this one took."""
        begun = time.monotonic()
        arrived = self.store.tried(
            lambda: sync(view.run.output_dir, self.store, running),
            "training continues, and tracking is tried again",
        )
        took = time.monotonic() - begun
        self._send_at = begun + took + max(10 * took, 0.0 if arrived else 30.0)
        self._timeouts += not arrived and took > _SLOW
        if self._timeouts >= _MOST_TIMEOUTS:
            self._send_at = math.inf  # only the end of the run is worth another wait
        return arrived
