"""`dpfl sync RUN...`: send to MLflow what it does not have of runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning.config.command_line import CommandParser
from dpfl_lightning.errors import command


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
    from dpfl_lightning.privacy.ledger.ledger import read_ledger
    from dpfl_lightning.reporting.mlflow import sync

    for run in options.runs:
        if (ledger := Path(run, "ledger.jsonl")).is_file():
            read_ledger(ledger)  # a changed one must not replace the copy that MLflow keeps
        print(sync(Path(run), options.experiment, options.uri), flush=True)
    return 0


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, finished or not")
    parser.add_argument("--uri", metavar="URI", help="MLflow server or store (that of the run)")
    parser.add_argument("--experiment", metavar="NAME", help="name of the MLflow experiment (that of the run)")


if __name__ == "__main__":
    raise SystemExit(main())
