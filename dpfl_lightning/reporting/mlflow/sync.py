"""The only way of a run into MLflow: `sync` sends what MLflow does not have of the files in the folder of a run."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfl_lightning.config.reading import read_json
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.reporting import curves, description, run_files
from dpfl_lightning.reporting.figures import figures
from dpfl_lightning.reporting.mlflow.models import send_models
from dpfl_lightning.reporting.mlflow.store import Run, Store, last_steps, metrics
from dpfl_lightning.reporting.run_files import RunFiles
from dpfl_lightning.runtime.text import distinct
from dpfl_lightning.sets.distilled_set import CARD, DATA_CARD, TENSORS, DistilledSet

# Never send the whole folder: checkpoint, counts and the key of the record digests belong to the clients only.
_LEDGER = ("ledger.jsonl", "ledger.head")
_REPORTS = ("guarantees.json", "guarantee.html", "result.json", curves.FILE)
_FILES = (*_LEDGER, *_REPORTS, "model.pt", "model_*.pt", TENSORS, CARD, DATA_CARD)
_TIMES = ("wall_seconds", "client_seconds", "records_per_second")
_SHOWN = ("val_accuracy_min", "train_epsilon_max")  # beside all scores of the test set, in the table of runs


def sync(folder: Path, store: Store, running: bool = False) -> int:
    """Send what the store lacks of a run, and return the number of rounds that it got.

    The store's run of the folder is completed; without one, it is created. It ends as `run.json` says, as killed if
    this says nothing, and not at all while the run is `running`. A complete run is left as it is.

    **Privacy** Sends options, released models, the ledger, and scores on held-out records, which no guarantee covers.
    Never sends a checkpoint or a key.
    """
    run, about = run_files.read_run(folder), read_json(folder / description.FILE)
    tracking = about.get("tracking", {})
    sent = store.run_of(folder) or _begun(folder, store, run, about, tracking)
    run_id, known = sent.info.run_id, last_steps(sent)
    points = [
        point
        for step, values in _curves(run, bool(tracking.get("per_client"))).items()
        for point in metrics(values, step, about["exact_times"])
        if step > known.get(point.key, -1)
    ]
    head = {} if run.result is None else {"ledger_head": json.dumps(run.result.ledger)}
    if sent.info.status == "FINISHED" and not points and (running or sent.data.tags.items() >= head.items()):
        return 0
    if running and sent.info.status != "RUNNING":
        store.resume(run_id)
        store.tag(run_id, {"status": "running"})
    rounds = len({point.step for point in points})
    store.show({"metrics": sorted({p.key for p in points if p.key.startswith("test_") or p.key in _SHOWN})})
    store.log_metrics(run_id, points)
    if not running:
        _end(folder, store, run_id, run, about)
        store.tag(run_id, head)  # the last: MLflow has everything
    return rounds


def _begun(folder: Path, store: Store, run: RunFiles, about: Mapping[str, Any], tracking: Mapping[str, Any]) -> Run:
    tags = {
        **tracking.get("tags", {}),
        **about["tags"],
        "output_dir": str(folder.resolve()),
        "ledger_run": run_files.ledger_run(folder),
        "status": "running",
        "mlflow.note.content": description.markdown(about["notes"]),
    }
    name = tracking.get("run_name") or about["name"]
    run_id = store.begin(name, tags, about["params"], run.options, exact_times=about["exact_times"])
    for context, fields in about["datasets"].items():
        store.log_dataset(run_id, fields, context)
    return store.client.get_run(run_id)


def _end(folder: Path, store: Store, run_id: str, run: RunFiles, about: Mapping[str, Any]) -> None:
    """Send the status, and the files of a run that has finished."""
    ended = about["ended"] or {"status": "KILLED", "reason": "abandoned: its process is gone", "seconds": 1.0}
    result = run.result
    guarantee = {} if result is None else description.claim(result.guarantee)
    note = {"mlflow.note.content": description.markdown(about["notes"], ended["reason"], result)}
    store.tag(run_id, {**guarantee, **note, "status": ended["reason"]})
    store.end(run_id, ended["status"], None if about["exact_times"] and about["ended"] else ended["seconds"])
    for pattern in _LEDGER if result is None else _FILES:
        for path in sorted(folder.glob(pattern)):
            store.client.log_artifact(run_id, str(path))
    if result is not None:
        distilled = DistilledSet.load(folder) if (folder / TENSORS).is_file() else None
        for name, figure in figures(run.rounds, result, distilled).items():
            store.client.log_figure(run_id, figure, f"figures/{name}.png")
        scores = {key: value for key, value in _final(result).items() if key.startswith("test_")}
        of_model = metrics(scores, result.rounds, about["exact_times"])
        tags = {**guarantee, "ledger_head": json.dumps(result.ledger)}
        send_models(store, run_id, folder, tags, of_model, result.rounds)


def _curves(run: RunFiles, per_client: bool) -> dict[int, dict[str, float | None]]:
    """Return round -> curves; in the last one also the results under the names of the curves that end in them."""
    values = {one.round: dict(_values(one, per_client)) for one in run.rounds}
    if result := run.result:
        last = values.setdefault(result.rounds, {})
        last |= {name: value for name, value in _final(result).items() if last.get(name) is None}
    return values


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


def _final(result: RunResult) -> dict[str, float | None]:
    """Return the results of the run under the names of the curves that end in them, and its times."""
    spent = [math.inf if client["epsilon_spent"] is None else client["epsilon_spent"] for client in result.clients]
    over = {"accuracy": [client["accuracy"] for client in result.clients], "epsilon": spent}
    return {
        **curves.on_test(result.test_accuracy, result.test_loss, result.test_metrics),
        **{curve: value for name, column in over.items() for curve, value in curves.quantiles(name, column).items()},
        **curves.of_groups(result.accuracy_of_groups),
        **{f"train_{name}": getattr(result, name) for name in _TIMES},
    }
