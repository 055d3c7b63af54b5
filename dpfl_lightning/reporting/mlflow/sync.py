"""The only way of a run into MLflow: `sync` sends what MLflow does not have of the files in the folder of a run."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpfl_lightning.federated.server import run as runs
from dpfl_lightning.federated.server.history import FILE as HISTORY
from dpfl_lightning.federated.server.results import GUARANTEES, RESULT
from dpfl_lightning.models.tasks import Measure
from dpfl_lightning.reporting import curves, description
from dpfl_lightning.reporting.figures import figures, missing_letters_allowed
from dpfl_lightning.reporting.mlflow.models import send_models
from dpfl_lightning.reporting.mlflow.store import Metric, Run, Store, last_points, metrics
from dpfl_lightning.reporting.products import products_in
from dpfl_lightning.reporting.run_files import ledger_run
from dpfl_lightning.runtime.files import SUFFIX

# Never send the whole folder: checkpoint, counts and the key of the record digests belong to the clients only.
_LEDGER = ("ledger.jsonl", "ledger.head")
_REPORTS = (GUARANTEES, "guarantee.html", RESULT, HISTORY)
_FILES = (*_LEDGER, *_REPORTS, f"model{SUFFIX}", f"model_*{SUFFIX}")

#: how MLflow calls the states of a run
_STATUS = {
    runs.State.RUNNING: "RUNNING",
    runs.State.INTERRUPTED: "KILLED",
    runs.State.GONE: "KILLED",
    runs.State.FAILED: "FAILED",
    runs.State.FINISHED: "FINISHED",
}


def sync(folder: Path, store: Store, running: bool = False) -> int:
    """Send what the store lacks of a run, and return the number of rounds that it got.

    The store's run of the folder is completed; without one, it is created. It ends as `run.json` says, as killed if
    this says nothing, and not at all while the run is `running`. A complete run is left as it is.

    **Privacy** Sends options, released models, the ledger, and scores on held-out records, which no guarantee covers.
    Never sends a checkpoint or a key.
    """
    run = runs.Run.read(folder)
    run = replace(run, state=runs.State.RUNNING) if running else run
    tracking = run.about.get("tracking", {})
    sent = store.run_of(folder) or _begun(store, run, tracking)
    run_id, last = sent.info.run_id, last_points(sent)
    points = [
        point
        for step, values in _curves(run, bool(tracking.get("per_client"))).items()
        for point in metrics(values, step, run.info.exact_times)
        if _is_new(point, *last.get(point.key, (-1, 0.0)))
    ]
    head = {} if run.result is None else {"ledger_head": json.dumps(run.result.ledger)}
    if sent.info.status == "FINISHED" and not points and (running or sent.data.tags.items() >= head.items()):
        return 0
    if running and sent.info.status != "RUNNING":
        store.resume(run_id)
        store.tag(run_id, {"status": "running"})
    rounds = len({point.step for point in points})
    known = {point.key for point in points}
    units = ["unit"] if "unit" in run.about["tags"] else []
    store.show({"metrics": [name for name in _columns(run) if name in known], "tags": units})
    store.log_metrics(run_id, points)
    if not running:
        _end(store, run_id, run)
        store.tag(run_id, head)  # the last: MLflow has everything
    return rounds


def _is_new(point: Metric, step: int, value: float) -> bool:
    """Whether the store lacks a point: of a later round, or the guarantee, if it is above what the last round spent."""
    stated = point.key.startswith("train_epsilon") and point.step == step and point.value > value
    return point.step > step or stated


def _columns(run: runs.Run) -> list[str]:
    """Return the curves that are columns of the table of runs, and metrics of a model, if they are known."""
    measure = run.info.measures.get(run.headline, Measure())
    worst = [] if measure.target is not None else [f"val_{run.headline}_{'min' if measure.higher_is_better else 'max'}"]
    return [*run.score_curves.values(), *worst, "train_epsilon_max"]


def _begun(store: Store, run: runs.Run, tracking: Mapping[str, Any]) -> Run:
    about = run.about
    tags = {
        **tracking.get("tags", {}),
        **about["tags"],
        "output_dir": str(run.folder.resolve()),
        "ledger_run": ledger_run(run.folder),
        "status": "running",
        "mlflow.note.content": description.markdown(run),
    }
    chosen = tracking.get("run_name")
    name = run.info.source.named(chosen) if chosen else store.new_name(about["name"], about["params"])
    run_id = store.begin(name, tags, about["params"], run.info.options, exact_times=run.info.exact_times)
    for context, fields in about["datasets"].items():
        store.log_dataset(run_id, fields, context)
    return store.client.get_run(run_id)


def _end(store: Store, run_id: str, run: runs.Run) -> None:
    """Send the status, and the files of a run that has finished."""
    folder, ended, result = run.folder, run.about["ended"], run.result
    guarantee = {} if result is None else description.claim(result.guarantee)
    note = {"mlflow.note.content": description.markdown(run)}
    store.tag(run_id, {**guarantee, **note, "status": run.ending})
    seconds = ended["seconds"] if ended else 1.0
    store.end(run_id, _STATUS[run.state], None if run.info.exact_times and ended else seconds)
    products = [] if result is None else products_in(folder)
    for pattern in _LEDGER if result is None else (*_FILES, *(file for one in products for file in one.files)):
        for path in sorted(folder.glob(pattern)):
            store.client.log_artifact(run_id, str(path))
    if result is not None:
        drawn = {name: figure for one in products for name, figure in one.figures(folder).items()}
        for name, figure in figures(run.rounds, result, drawn).items():
            with missing_letters_allowed():
                store.client.log_figure(run_id, figure, f"figures/{name}.png")
        scores = {key: one.values.get(key) for one in run.rounds[-1:] for key in _columns(run)}
        of_model = metrics(scores, result.rounds, run.info.exact_times)
        tags = {**note, "ledger_head": json.dumps(result.ledger)}
        send_models(store, run_id, folder, tags, guarantee, of_model)


def end_abandoned(store: Store) -> None:
    """End the runs of a store whose folder is on this machine, and whose process is gone."""
    for sent in store.running():
        folder, known = Path(sent.data.tags.get("output_dir", "")), sent.data.tags.get("ledger_run")
        if known and known == ledger_run(folder) and (folder / runs.FILE).is_file():
            run = runs.Run.read(folder)
            if run.state is not runs.State.RUNNING and run.result is None:
                note = {"mlflow.note.content": description.markdown(run), "status": run.ending}
                store.tag(sent.info.run_id, note)
                store.end(sent.info.run_id, _STATUS[run.state], 1.0)


def _curves(run: runs.Run, per_client: bool) -> dict[int, dict[str, float | None]]:
    """Return round -> curves, and the one that stands for the run under a name by which MLflow shows it first."""
    begins = "" if per_client else curves.RELEASED
    values = {one.round: curves.with_clients(one, begins) for one in run.rounds}
    return {step: curves.with_headline(one, run.score_curves) for step, one in values.items()}
