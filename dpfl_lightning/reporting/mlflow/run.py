"""Tracks a training run in MLflow: options, metrics, ledger, models and figures."""

import copy
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import dpfl_lightning
from dpfl_lightning.errors import warn_user
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.reporting import curves
from dpfl_lightning.reporting.figures import figures
from dpfl_lightning.reporting.mlflow import describe
from dpfl_lightning.reporting.mlflow.store import Metric, Store, ledger_run, metrics, reported
from dpfl_lightning.runtime.launcher import invocation
from dpfl_lightning.runtime.text import at_most, distinct, span, without_credentials
from dpfl_lightning.sets.distilled_set import CARD, DATA_CARD, TENSORS, DistilledSet

# Never send the whole folder: checkpoint, counts and the key of the record digests belong to the clients only.
LEDGER = ("ledger.jsonl", "ledger.head")
_REPORTS = ("guarantees.json", "guarantee.html", "result.json", curves.FILE)
FILES = (*LEDGER, *_REPORTS, "model.pt", "model_*.pt", TENSORS, CARD, DATA_CARD)
_TIMES = ("wall_seconds", "client_seconds", "records_per_second")
_SHOWN = ("val_accuracy_min", "train_epsilon_max")  # beside all scores of the test set, in the table of runs
_SLOW = 5.0  # seconds after which a failed write counts as a time-out
_MOST_TIMEOUTS = 2  # after which the rest is sent at the end of the run
_MOST_MODELS = 10  # more models, such as one for each client, are only files


class Tracking(Callback):
    """Tracks a run, also a resumed one, as one run of a `Store`, named by strategies and budgets by default.

    A store that fails later never stops training: its rounds are sent when it answers again. Additional `tags` cannot
    replace the tags that describe the guarantee. `per_client` sends the curves of every client, by its name.

    **Privacy** Sends options, released models, the ledger, and accuracies on held-out records, which no
    guarantee covers. Never sends a checkpoint or the key of the record digests.
    """

    def __init__(
        self,
        experiment: str,
        run_name: str | None = None,
        uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        per_client: bool = False,
    ) -> None:
        self.store = Store(experiment, uri)
        self.how_to_open = self.store.how_to_open
        self._run_name, self._tags, self._per_client = run_name, dict(tags or {}), per_client
        self._run_id, self._resumed, self._started = "", False, False
        self._complete = False  # whether MLflow has the whole run already
        self._known = set[tuple[str, int]]()  # points that MLflow already has, by name and step
        self._pending: list[Metric] = []
        self._send_at, self._timeouts = 0.0, 0

    def on_fit_start(self, view: View) -> None:
        self._started = True
        with reported(self.store.uri):
            self.store.end_abandoned()
            resumed = self._resumed or view.run.first_round > 1  # the rounds before may not have been tracked
            earlier = self._earlier_run(view) if resumed else None
            self._run_id = earlier or self._begun_run(view)
            if resumed:
                points = curve_points(self._rounds(view), self._per_client, view.run.exact_times)
                self._known = self.store.steps(self._run_id, {one.key for one in points})
                self._pending = [one for one in points if (one.key, one.step) not in self._known]
            if earlier is not None:
                self._complete = self.store.status(earlier) == "FINISHED" and not self._pending
                if not self._complete:
                    self.store.resume(earlier)
                    self.store.tag(earlier, {"status": "running"})

    def on_round_end(self, view: View, report: RoundReport) -> None:
        self._complete = False
        points = curve_points([curves.of_round(report, view.facts)], self._per_client, view.run.exact_times)
        # a restored backup repeats rounds that MLflow already has
        self._pending += [one for one in points if (one.key, one.step) not in self._known]
        if time.monotonic() >= self._send_at:
            self._guarded(self._send_pending)

    def on_fit_end(self, view: View, result: RunResult) -> None:
        if self._started and not self._run_id:  # a signal came while the store was creating the run
            self._guarded(lambda: setattr(self, "_run_id", self._earlier_run(view) or ""))
        if not self._run_id or self._complete:
            return  # the run ended before it started, or nothing was left to resume
        scores: list[Metric] = []
        if result.finished:
            final = metrics(_final_values(result), result.rounds, view.run.exact_times)
            scores = [metric for metric in final if metric.key.startswith("test_")]
            last = [one for one in self._rounds(view) if one.round == result.rounds]
            known = {name for one in last for name, value in one.values.items() if value is not None}
            self._pending += [metric for metric in final if metric.key not in known]
        missing = []
        if not self._guarded(self._send_pending):
            rounds = [metric.step for metric in self._pending]
            missing = [f"metrics of rounds {min(rounds)} to {max(rounds)}", "files and figures"]
        else:
            if not self._guarded(lambda: self._send_files(view, result)):
                missing.append("some files and figures")
            if result.finished:
                self._send_models(view, result, scores)
            if not self._guarded(lambda: self._send_status(view, result)):
                missing.append("the run's status")
        if missing:
            words = f"MLflow at {without_credentials(self.store.uri)} did not get: {', '.join(missing)}."
            how = f"{invocation('sync')} {result.output_dir} sends them"
            warn_user(f"{words} The result is complete in {result.output_dir}, and {how}.")

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
            "ledger_run": ledger_run(folder),
            "status": "running",
            **describe.program(),
            "mlflow.note.content": describe.description(view.run.strategy_notes),
        }
        run, private = view.run, _private(view)
        options = run.options or _options_of(view)
        name = self._run_name or describe.run_name(run.strategies, run.budgets, private, options)
        epsilon = describe.epsilon_span(run.budgets, private)
        more = {"epsilon": epsilon, "clients.count": view.facts.num_clients, "num_params": run.num_params}
        params = describe.params(options, more)
        run_id = self.store.begin(name, tags, params, run.options, exact_times=run.exact_times)
        for context in ("training", "test"):
            self.store.log_dataset(run_id, describe.dataset(view.facts, run, context), context)
        return run_id

    def _earlier_run(self, view: View) -> str | None:
        """Find the MLflow run with the same id, or that of the same folder if the run was killed at once."""
        if self._run_id and self.store.status(self._run_id):
            return self._run_id
        return self.store.run_of(view.run.output_dir)

    def _send_pending(self) -> None:
        scores = {one.key for one in self._pending if one.key.startswith("test_") or one.key in _SHOWN}
        self.store.show({"metrics": sorted(scores)})
        self.store.log_metrics(self._run_id, self._pending)

    def _send_files(self, view: View, result: RunResult) -> None:
        folder = view.run.output_dir
        for pattern in FILES if result.finished else LEDGER:
            for path in sorted(folder.glob(pattern)):
                self.store.client.log_artifact(self._run_id, str(path))
        if not result.finished:
            return
        distilled = DistilledSet.load(folder) if (folder / TENSORS).is_file() else None
        for name, figure in figures(self._rounds(view), result, distilled).items():
            self.store.client.log_figure(self._run_id, figure, f"figures/{name}.png")

    def _send_models(self, view: View, result: RunResult, scores: Sequence[Metric]) -> None:
        """Log each final model, with an input of zeros as its example."""
        files = sorted(view.run.output_dir.glob("model*.pt"), key=lambda path: (len(path.name), path.name))
        try:
            for file in files if len(files) <= _MOST_MODELS else ():
                net = copy.deepcopy(view.module.net).cpu()
                net.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
                from dpfl_lightning.reporting.mlflow.models import log_model  # takes seconds

                example, of_one = describe.example(view.facts), scores if len(files) == 1 else ()
                named = view.facts.features
                log_model(self.store, self._run_id, file.stem, net, example, of_one, result.rounds, named)
        except Exception as error:  # a net may not be picklable, or a server may fail
            why = (str(error).splitlines() or [""])[0][:200].rstrip(".")
            words = f"MLflow did not get the model ({type(error).__name__}: {why})"
            warn_user(f"{words}; its parameters are in {view.run.output_dir}.")

    @staticmethod
    def _rounds(view: View) -> list[curves.Round]:
        """Return all rounds of the run, also those before a resume."""
        return curves.read(view.run.output_dir / curves.FILE)

    def _send_status(self, view: View, result: RunResult) -> None:
        tags = {
            "status": result.reason,
            "guarantee": result.guarantee.words(),
            "ledger_head": json.dumps(result.ledger),
            "mlflow.note.content": describe.description(view.run.strategy_notes, result),
        }
        self.store.tag(self._run_id, tags)
        status = "FINISHED" if result.finished else "KILLED" if result.interrupted else "FAILED"
        self.store.end(self._run_id, status, None if view.run.exact_times else result.wall_seconds)

    def _guarded(self, action: Callable[[], None]) -> bool:
        """Return whether `action` reached MLflow. The next write waits ten times as long as this one took."""
        begun = time.monotonic()
        arrived = self.store.tried(action, "training continues, and tracking is tried again")
        took = time.monotonic() - begun
        self._send_at = begun + took + max(10 * took, 0.0 if arrived else 30.0)
        self._timeouts += not arrived and took > _SLOW
        if self._timeouts >= _MOST_TIMEOUTS:
            self._send_at = math.inf  # only the end of the run is worth another wait
        return arrived


def curve_points(rounds: Sequence[curves.Round], per_client: bool = False, exact_times: bool = False) -> list[Metric]:
    """Return the curves of some rounds as MLflow metrics."""
    return [point for one in rounds for point in metrics(_values(one, per_client), one.round, exact_times)]


def _options_of(view: View) -> dict[str, Any]:
    """Return the most important options of a run that was built in Python."""
    optimizer = None if view.optimizer is None else type(view.optimizer).__name__.lower()
    model = {"class_path": type(view.module.net).__qualname__}
    seed_and_rounds = {"rounds": view.run.rounds, "seed": view.seed}
    return {**seed_and_rounds, "model": model, "clients": {"optimizer": {"name": optimizer}}}


def _private(view: View) -> bool:
    """Return whether any planned release has noise."""
    return any(one.noise_multiplier for schedule in view.schedule.clients for one in schedule.noised)


def _frame(view: View) -> dict[str, str]:
    """Return the assumptions behind every epsilon of the run, as tags."""
    frame = {"engine": view.run.engine, "device": view.run.device, "dpfl_lightning": dpfl_lightning.__version__}
    frame["task"] = view.run.task
    if not _private(view):
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
        "delta": span((schedule.delta for schedule in view.schedule.clients), at_most),
    }


def _values(one: curves.Round, per_client: bool) -> curves.Values:
    """Return the curves of a round, with `per_client` also those of each client, by its name."""
    if not per_client:
        return one.values
    return {
        **one.values,
        **{
            f"{curves.over_clients(curve)}_of_{chart}": value
            for curve, column in one.clients.items()
            for chart, value in zip(_charts(list(column)), column.values(), strict=True)
        },
    }


def _charts(clients: Sequence[str]) -> list[str]:
    """Return different ends of curves' names; clients whose names become the same are numbered.

    >>> _charts(["a+b", "a*b", "c"])
    ['a_b (1)', 'a_b (2)', 'c']
    """
    return distinct(list(map(_chart, clients)))


def _chart(client: str) -> str:
    """Return a client's name as the end of a curve's name: MLflow sorts curves by name, and a slash is a group.

    >>> _chart("7"), _chart("north/east")
    ('07', 'north_east')
    """
    return client.zfill(2) if client.isdigit() else re.sub(r"[^\w. -]", "_", client).strip(". ") or "_"


def _final_values(result: RunResult) -> dict[str, float | None]:
    """Return the results of the run under the names of the curves that end in them, and its times."""
    spent = [math.inf if client["epsilon_spent"] is None else client["epsilon_spent"] for client in result.clients]
    over = {"accuracy": [client["accuracy"] for client in result.clients], "epsilon": spent}
    return {
        **curves.on_test(result.test_accuracy, result.test_loss, result.test_metrics),
        **{curve: value for name, column in over.items() for curve, value in curves.quantiles(name, column).items()},
        **curves.of_groups(result.accuracy_of_groups),
        **{f"train_{name}": getattr(result, name) for name in _TIMES},
    }
