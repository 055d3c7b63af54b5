"""`dpfl sync RUN...`: send to MLflow what it does not have of runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning.config.command_line import CommandParser
from dpfl_lightning.errors import command, require
from dpfl_lightning.runtime.files import is_locked
from dpfl_lightning.runtime.text import counted


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `sync` with command-line arguments, and return its exit status."""
    description = (
        "Send the curves, files and status of runs that have ended to MLflow, as far as it does not have them."
    )
    examples = ["runs/digits", "runs/digits --uri http://127.0.0.1:5000"]
    parser = CommandParser("sync", description, "RUN... [FLAGS]", examples)
    _flags(parser)
    options = parser.parse_args(argv)
    for run in options.runs:
        rounds = _sync(Path(run), options.experiment, options.uri)
        print(f"{run}: sent {counted(rounds, 'round')} that MLflow did not have, and the files of the run", flush=True)
    return 0


def _sync(run: Path, experiment: str | None, uri: str | None) -> int:
    """Send a run to the store that is named, or else to its own."""
    from dpfl_lightning.federated.server.run import FILE, read_about
    from dpfl_lightning.privacy.ledger.ledger import read_ledger
    from dpfl_lightning.reporting.mlflow import Store, reported, sync

    advice = "For several seeds, name the folder of each, such as RUN/seed_0."
    require((run / FILE).is_file(), "RUN", "be the folder of a run that has begun", str(run), advice)
    ledger, section = run / "ledger.jsonl", read_about(run).get("tracking", {})
    require(not is_locked(ledger), "RUN", "be a run that has ended", str(run), "It sends its curves.")
    if ledger.is_file():
        read_ledger(ledger)  # a changed one must not replace the copy that MLflow keeps
    store = Store(experiment or section.get("experiment") or "dpfl_lightning", uri or section.get("uri"))
    with reported(store.uri):
        return sync(run, store)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, finished or not")
    parser.add_argument("--uri", metavar="URI", help="MLflow server or store (that of the run)")
    parser.add_argument("--experiment", metavar="NAME", help="name of the MLflow experiment (that of the run)")
