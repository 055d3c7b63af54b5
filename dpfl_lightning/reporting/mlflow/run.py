"""Tracks a training run in MLflow: options, metrics, ledger, model and figures."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import dpfl_lightning
from dpfl_lightning.errors import warn_user
from dpfl_lightning.federated.messages.evaluation import Diagnostics
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.summary import MATCHES, accuracy_of_groups, accuracy_over_clients, true_groups
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.reporting.figures import figures, of_strategies, per_client
from dpfl_lightning.reporting.mlflow.store import Metric, Store, metrics, reported, shown
from dpfl_lightning.runtime.text import span
from dpfl_lightning.strategies.distillation.artefact import CARD, TENSORS, DistilledSet

# Never send the whole folder: checkpoint, counts and the key of the record digests belong to the clients only.
_LEDGER = ("ledger.jsonl", "ledger.head", "ledger.signatures")
_SCORES = ("test_accuracy", "test_loss", "accuracy_mean", "accuracy_std", "accuracy_worst", "accuracy_gap")
_RESULTS = (*_SCORES, "rounds", "wall_seconds", "training_seconds", "client_seconds", "records_per_second")
_FILES = (*_LEDGER, "guarantees.json", "guarantee.html", "result.json", "model.pt", "model_*.pt", TENSORS, CARD)


class Tracking(Callback):
    """Tracks a run, also a resumed one, as one run of a `Store`, named after the output folder by default.

    A store that fails later never stops training: its rounds are sent when it answers again. Additional `tags` cannot
    replace the tags that describe the guarantee.

    **Privacy** Sends options, released models, the ledger, and accuracies on held-out records, which no
    guarantee covers. Never sends a checkpoint or the key of the record digests.
    """

    def __init__(
        self,
        experiment: str,
        run_name: str | None = None,
        uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        self.store = Store(experiment, uri)
        self.how_to_open = self.store.how_to_open
        self._run_name, self._tags = run_name, dict(tags or {})
        self._run_id, self._resumed = "", False
        self._last_step = 0  # the last round that MLflow already has
        self._pending: list[Metric] = []
        self._send_at = 0.0

    def on_fit_start(self, view: View) -> None:
        with reported(self.store.uri):
            earlier = self._earlier_run(view) if self._resumed else None
            self._run_id = earlier or self._begun_run(view)
            if earlier is not None:
                self.store.tag(earlier, {"status": "running"})
                self._last_step = max(self.store.history(earlier, "overall/participants"), default=0)

    def on_round_end(self, view: View, report: RoundReport) -> None:
        if report.round <= self._last_step:
            return  # a restored backup repeats rounds that MLflow already has
        self._pending += metrics(_round_values(report, true_groups(view.facts)), report.round, view.run.exact_times)
        if time.monotonic() >= self._send_at:
            self._guarded(self._send_pending)

    def on_fit_end(self, view: View, result: RunResult) -> None:
        if not self._run_id:
            return  # the run ended before it started
        if result.finished:
            self._pending += metrics(_final_values(result), result.rounds, view.run.exact_times)
        missing = []
        if not self._guarded(self._send_pending):
            rounds = [metric.step for metric in self._pending]
            missing = [f"metrics of rounds {min(rounds)} to {max(rounds)}", "files and figures"]
        else:
            if not self._guarded(lambda: self._send_files(view, result)):
                missing.append("some files and figures")
            if not self._guarded(lambda: self._send_status(view, result)):
                missing.append("the run's status")
        if missing:
            words = f"MLflow at {shown(self.store.uri)} did not get: {', '.join(missing)}."
            warn_user(f"{words} The result is complete in {result.output_dir}.")

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id or None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._run_id, self._resumed = state["run_id"] or "", True

    def _begun_run(self, view: View) -> str:
        folder = view.run.output_dir.resolve()
        tags = {
            **self._tags,
            **_frame(view),
            "output_dir": str(folder),
            "status": "running",
            "mlflow.source.name": "dpfl_lightning",
            "mlflow.note.content": _description(view.run.strategy_notes),
        }
        sizes = {"num_clients": view.facts.num_clients, "num_params": view.run.num_params}
        return self.store.begin(self._run_name or folder.name, tags, view.run.options, sizes=sizes)

    def _earlier_run(self, view: View) -> str | None:
        """Resume the MLflow run with the same id, or with the same output folder if the run was killed at once."""
        if self._run_id and self.store.resume(self._run_id):
            return self._run_id
        latest = self.store.latest("output_dir", str(view.run.output_dir.resolve()))
        return latest if latest and self.store.resume(latest) else None

    def _send_pending(self) -> None:
        self.store.log_metrics(self._run_id, self._pending)

    def _send_files(self, view: View, result: RunResult) -> None:
        folder = view.run.output_dir
        for pattern in _FILES if result.finished else _LEDGER:
            for path in sorted(folder.glob(pattern)):
                self.store.client.log_artifact(self._run_id, str(path))
        if not result.finished:
            return
        distilled = DistilledSet.load(folder) if (folder / TENSORS).is_file() else None
        history = partial(self.store.history, self._run_id)  # also has the rounds before a resume
        for name, figure in figures(history, result, distilled).items():
            self.store.client.log_figure(self._run_id, figure, f"figures/{name}.png")

    def _send_status(self, view: View, result: RunResult) -> None:
        tags = {
            "status": result.reason,
            "guarantee": result.guarantee,
            "ledger_head": json.dumps(result.ledger),
            "mlflow.note.content": _description(view.run.strategy_notes, result),
        }
        self.store.tag(self._run_id, tags)
        unfinished = "KILLED" if result.interrupted else "FAILED"
        self.store.client.set_terminated(self._run_id, "FINISHED" if result.finished else unfinished)

    def _guarded(self, action: Callable[[], None]) -> bool:
        """Return whether `action` reached MLflow. The next write waits ten times as long as this one took."""
        begun = time.monotonic()
        arrived = self.store.tried(action, "training continues, and tracking is tried again")
        took = time.monotonic() - begun
        self._send_at = begun + took + max(10 * took, 0.0 if arrived else 30.0)
        return arrived


def _frame(view: View) -> dict[str, str]:
    """Return the assumptions behind every epsilon of the run, as tags."""
    frame = {"engine": view.run.engine, "device": view.run.device, "dpfl_lightning": dpfl_lightning.__version__}
    frame["task"] = view.run.task
    events = [line.event for schedule in view.schedule.clients for line in schedule.planned]
    if not any(event.noise_multiplier for event in events if isinstance(event, NoisedEvent)):
        return {**frame, "guarantee": "no privacy"}
    guarantee = view.expected_guarantee()
    if guarantee.unprotected or guarantee.simulated:
        frame["guarantee"] = guarantee.words()
    return {
        **frame,
        "unit": guarantee.unit,
        "adjacency": guarantee.adjacency,
        "sampling": guarantee.sampling,
        "noise": view.run.noise,
        "accountant": guarantee.accountant,
        "delta": span(schedule.delta for schedule in view.schedule.clients),
    }


def _round_values(report: RoundReport, groups: Sequence[int] | None) -> dict[str, float | None]:
    """Return the curves of a round. MLflow groups and sorts them by name: `overall` precedes `per_client_...`."""
    accuracies = report.client_accuracy or ()
    measured = any(accuracy is not None for accuracy in accuracies)
    overall = {
        "test_accuracy": report.test_accuracy,
        "test_loss": report.test_loss,
        **{f"test_{name}": value for name, value in report.test_metrics.items()},
        **accuracy_over_clients(accuracies),
        "epsilon_max": max(report.epsilon_spent),
        "epsilon_mean": fmean(report.epsilon_spent),
        "records_per_second": None if report.seconds is None else report.records / max(report.seconds, 1e-9),
        "participants": len(report.clients),
    }
    return {
        **{f"overall/{name}": value for name, value in overall.items()},
        **per_client("per_client_epsilon", report.epsilon_spent),
        **(per_client("per_client_accuracy", accuracies) if measured else {}),
        **{f"accuracy_of_group/{name}": value for name, value in accuracy_of_groups(accuracies, groups).items()},
        **_diagnosed(report.diagnostics),
        **of_strategies(report.metrics),
    }


def _diagnosed(diagnostics: Diagnostics | None) -> dict[str, float | None]:
    if diagnostics is None or all(fraction is None for fraction in diagnostics.clip_fraction):
        return {}
    not_finite = per_client("per_client_gradients_not_finite", diagnostics.not_finite)
    return {**per_client("per_client_clip_fraction", diagnostics.clip_fraction), **not_finite}


def _final_values(result: RunResult) -> dict[str, float | None]:
    """Return the results of the run under plain names, by which the table of runs can be sorted and searched."""
    spent = [client["epsilon_spent"] for client in result.clients]
    return {
        **{name: getattr(result, name) for name in _RESULTS},
        **{f"test_{name}": value for name, value in result.test_metrics.items()},
        **{f"accuracy_{name}": result.accuracy_of_groups.get(name) for name in ("majority", "minority")},
        **{name: value for name, value in result.metrics.items() if name in MATCHES and not isinstance(value, list)},
        "epsilon_max": None if None in spent else max(spent),
    }


def _description(strategy_notes: Sequence[str], result: RunResult | None = None) -> str:
    """Return Markdown for the top of the run's page: the plan, and after the run its results."""
    plan = [f"**Plan.** {' '.join(strategy_notes)}"] if strategy_notes else []
    if result is None:
        return "\n\n".join(["**Running.**", *plan])
    accuracy = [] if result.test_accuracy is None else [f"**Test accuracy {result.test_accuracy:.2%}**"]
    guarantee = f"**Guarantee.** {result.guarantee} Details: see the artifact `guarantee.html`."
    return "\n\n".join([*accuracy, guarantee, f"**Ended:** {result.reason}.", *plan])
