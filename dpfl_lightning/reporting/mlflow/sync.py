"""Sends to MLflow what it does not have of a run, from the files in the folder of the run."""

import json
from pathlib import Path

from dpfl_lightning.errors import require
from dpfl_lightning.reporting import run_files
from dpfl_lightning.reporting.mlflow import describe
from dpfl_lightning.reporting.mlflow.run import FILES, LEDGER, curve_points
from dpfl_lightning.reporting.mlflow.store import Store, ledger_run, reported
from dpfl_lightning.runtime.files import is_locked
from dpfl_lightning.runtime.text import counted


def sync(folder: Path, experiment: str | None = None, uri: str | None = None) -> str:
    """Send the missing curves, the files and the status of a run, and return in words what was sent.

    The run of the folder is completed; without one, it is created. `experiment` and `uri` are by default those of the
    run's options. Raises UserError if the run is still going on, or if the store does not answer.
    """
    advice = "For several seeds, name the folder of each, such as RUN/seed_0."
    require((folder / "options.yaml").is_file(), "RUN", "be the folder of a run", str(folder), advice)
    run = run_files.read_run(folder)
    require(
        not is_locked(folder / "ledger.jsonl"), "RUN", "be a run that has ended", str(folder), "It sends its curves."
    )
    tracking = run.options.get("tracking")
    section = tracking if isinstance(tracking, dict) else {}
    store = Store(experiment or section.get("experiment") or "dpfl_lightning", uri or section.get("uri"))
    with reported(store.uri):
        run_id = store.run_of(folder)
        if run_id is None:
            tags = {"output_dir": str(folder.resolve()), "ledger_run": ledger_run(folder), **describe.program()}
            params = describe.params(run.options, {}) if run.options else {}
            run_id = store.begin(section.get("run_name") or folder.resolve().name, tags, params, run.options)
        points = curve_points(run.rounds, bool(section.get("per_client")))
        known = store.steps(run_id, {point.key for point in points})
        missing = [point for point in points if (point.key, point.step) not in known]
        sent = len({point.step for point in missing})
        store.log_metrics(run_id, missing)
        for pattern in FILES if run.result is not None else LEDGER:
            for path in sorted(folder.glob(pattern)):
                store.client.log_artifact(run_id, str(path))
        if run.result is not None:
            tags = {"status": str(run.result["reason"]), "guarantee": run.guarantee.words() if run.guarantee else ""}
            store.tag(run_id, {**tags, "ledger_head": json.dumps(run.result.get("ledger"))})
        if run.result is None or store.status(run_id) != "FINISHED":
            seconds = 1.0 if run.result is None else float(run.result.get("wall_seconds") or 1.0)
            store.end(run_id, "KILLED" if run.result is None else "FINISHED", seconds)
    return f"{folder}: sent {counted(sent, 'round')} that MLflow did not have, and the files of the run"
