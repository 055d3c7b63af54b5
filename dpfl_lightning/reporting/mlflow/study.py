"""Tracking of a search and its trials, and of a run that is repeated for several seeds, in MLflow."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from dpfl_lightning.federated.server import history
from dpfl_lightning.federated.server.run import Run
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.privacy.accounting.noise_source import source_of
from dpfl_lightning.reporting import curves, description
from dpfl_lightning.reporting.mlflow.store import Metric, Store, metrics, reported
from dpfl_lightning.runtime.text import flattened, without_credentials


class _Parent:
    """A run of a `Store` in which other runs are nested. A failing store stops none of them."""

    _unharmed = "training continues"

    def __init__(self, experiment: str, uri: str | None = None, tags: Mapping[str, Any] | None = None) -> None:
        self.store, self._tags, self._begun = Store(experiment, uri), dict(tags or {}), time.monotonic()
        self.how_to_open = self.store.how_to_open

    def stopped(self, run_id: str) -> None:
        """Mark the run as stopped; `begin` resumes it."""
        self._tried(lambda: self._end(run_id, "KILLED"))

    def _end(self, run_id: str, status: str = "FINISHED") -> None:
        self.store.end(run_id, status, time.monotonic() - self._begun)

    def _tried(self, action: Callable[[], None]) -> None:
        self.store.tried(action, self._unharmed)


class StudyTracking(_Parent):
    """Tracks a search as one run of a `Store`, and each trial as a run nested in it.

    MLflow gets rounded times, as from a private run.
    """

    def begin(self, name: str, options: Mapping[str, Any], sweep: Mapping[str, Any], run_id: str | None = None) -> str:
        """Start or resume the run of the search, and return its id.

        `options` are those of a trial and the whole section `sweep`, for a file; `sweep` are the ones worth showing.
        """
        with reported(self.store.uri):
            self.store.show({"metrics": sweep["scores"], "params": sweep["space"]})
            if run_id is not None and self.store.resume(run_id):
                return run_id
            params = description.params({**options, "sweep": sweep}, {})
            return self.store.begin(name, {**self._tags, **description.program()}, params, options, "sweep.yaml")

    def trial(
        self,
        parent: str,
        name: str,
        params: Mapping[str, Any],
        values: Mapping[str, float],
        steps: Mapping[int, Mapping[str, float]],
        tags: Mapping[str, str],
        when: tuple[datetime | None, datetime | None],
        status: str,
    ) -> None:
        """Log a finished trial: drawn values, scores, values after each step, start and end time, and status."""
        begun, ended = (None if time is None else time.timestamp() for time in when)
        seconds = 0.0 if begun is None or ended is None else ended - begun

        def log() -> None:
            trial_tags = {**tags, "mlflow.parentRunId": parent, "mlflow.source.name": "dpfl_lightning"}
            run = self.store.begin(name, trial_tags, flattened(params), begun=begun)
            curve = [metric for step, one in steps.items() for metric in metrics(one, step)]
            self.store.log_metrics(run, [*metrics(values, 0), *curve])
            self.store.end(run, status, seconds)

        self._tried(log)

    def end(
        self, run_id: str, found: Mapping[str, Any], values: Mapping[str, float], text: str, files: Sequence[Path]
    ) -> None:
        """Log the results of the search (values and scores of the best trial, a table and files), and end its run."""

        def log() -> None:
            best = {f"best.{key}": text for key, text in flattened(found).items()}
            self.store.tag(run_id, {**best, "mlflow.note.content": f"```\n{text}\n```"})
            self.store.log_metrics(run_id, metrics(values, 0))
            self.store.client.log_text(run_id, text, "trials.txt")
            for path in files:
                public = without_credentials(path.read_text(encoding="utf-8"))
                self.store.client.log_text(run_id, public, path.name)
            self._end(run_id)

        self._tried(log)


class SeedsTracking(_Parent):
    """Tracks the runs of several seeds as one run of a `Store`, in which they are nested."""

    _unharmed = "finished runs are kept"

    def begin(self, name: str, folder: Path, options: Mapping[str, Any], budgets: Sequence[float]) -> str:
        """Start the parent run, or resume that of the same folder, and return its id."""
        place = str(folder.resolve())
        tags = {**self._tags, **description.program(), "output_dir": place, "status": "running"}
        run = {**options, "seed": None}
        params = description.params(run, {"epsilon": description.epsilon_span(budgets)})
        with reported(self.store.uri):
            earlier = self.store.latest("output_dir", place)
            if earlier is not None and self.store.resume(earlier.info.run_id):
                return earlier.info.run_id
            source = source_of(options.get("privacy"))
            usual = description.run_name(options["strategies"], budgets, options, source)
            chosen = source.named(name) if name else self.store.new_name(usual, params)
            return self.store.begin(chosen, tags, params, options)

    def end(self, run_id: str, folders: Sequence[Path], text: str, guarantee: Guarantee) -> None:
        """Log mean and standard deviation over the seeds in each round, `text` as the description, and the guarantee
        of all runs together."""

        def log() -> None:
            first_run, pending = Run.read(folders[0]), list[Metric]()
            runs = [history.read(folder / history.FILE) for folder in folders]
            names = dict.fromkeys(name for one in runs[0] for name in one.values)
            for first in list(first_run.score_curves.values())[:1]:
                for step, (mean, _) in curves.over_seeds(runs, first).items():
                    pending.extend(metrics({f"{curves.HEADLINE}/{first}": mean}, step))
            for name in names:
                if name.startswith(("test_", "val_")):
                    for step, (mean, std) in curves.over_seeds(runs, name).items():
                        spread = {f"{name}_std_over_seeds": std} if name.startswith("test_") else {}
                        pending.extend(metrics({name: mean, **spread}, step))
            last = max((one.round for rounds in runs for one in rounds), default=0)
            pending.extend(metrics({"train_epsilon_max": finite_or_none(guarantee.epsilon)}, last))  # of all seeds
            self.store.log_metrics(run_id, pending)
            about = first_run.about  # known to the runs of the seeds only
            self.store.params(run_id, {name: about["params"][name] for name in ("num_params", "clients.count")})
            own = {**first_run.info.assumptions, "task": first_run.info.task}
            said = {**own, **description.claim(guarantee), "mlflow.note.content": text}
            self.store.tag(run_id, {**said, "status": "finished"})
            self._end(run_id)

        self._tried(log)
