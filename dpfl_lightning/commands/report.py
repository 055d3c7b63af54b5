"""`python -m dpfl_lightning report RUN...`: one HTML file that shows and compares runs, seeds and searches."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning.config.command_line import CommandParser
from dpfl_lightning.errors import UserError, command, require
from dpfl_lightning.runtime.files import write_text


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `report` with command-line arguments, and return its exit status."""
    description = "Write one HTML file, which works offline, about runs, seeds and searches."
    examples = ["runs/digits", "runs/uniform runs/noise_aware --output comparison.html", "runs/digits --text"]
    parser = CommandParser("report", description, "RUN... [--output FILE | --text]", examples)
    _flags(parser)
    options = parser.parse_args(argv)
    folders = [Path(run) for run in options.runs]
    if options.text:
        _print(folders)
        return 0
    output = Path(options.output)
    require(
        output.parent.is_dir() and (output.is_file() or not output.exists()),
        "--output",
        "be a file in a folder that exists",
        str(output),
    )
    write_text(output, report(folders))
    print(f"{output}: open it in a browser")
    return 0


def _flags(parser: argparse.ArgumentParser) -> None:
    runs = "folder of a run (finished or not), of seeds or of a search"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=runs)
    parser.add_argument("--output", metavar="FILE", default="report.html", help="file to write (report.html)")
    text = "write no file, and print how each run ended, as `fit` did"
    parser.add_argument("--text", action="store_true", help=text)


def _print(folders: Sequence[Path]) -> None:
    """Print how each run ended. Raises UserError if a folder holds none."""
    from dpfl_lightning.reporting.run_files import RunGroup, read
    from dpfl_lightning.reporting.terminal import print_ended

    groups: list[RunGroup] = []
    for folder in folders:
        part = read(folder)
        must = "be the folder of a run, or of its seeds, with --text"
        require(isinstance(part, RunGroup), "RUN", must, str(folder), "Leave out --text.")
        assert isinstance(part, RunGroup)  # for mypy
        groups.append(part)
    for group in groups:
        for run in group.runs:
            print(run.folder)
            print_ended(run)
        if len(group.runs) > 1 and group.guarantee is not None:
            print(f"Guarantee of all {len(group.runs)} runs: {group.guarantee.words()}")


def report(folders: Sequence[Path]) -> str:
    """Return the report on what lies in `folders` as HTML text; verifies the ledger of each run.

    Raises UserError if a folder holds no run, or a file cannot be read.
    """
    from dpfl_lightning.reporting.report_page import report_page
    from dpfl_lightning.reporting.run_files import RunGroup, read

    parts = [read(folder) for folder in folders]
    runs = [run.folder for part in parts if isinstance(part, RunGroup) for run in part.runs]
    return report_page(parts, {str(folder): _verified(folder) for folder in runs})


def _verified(folder: Path) -> str:
    """Return "verified" if the ledger in a folder verifies, else why not."""
    from dpfl_lightning.privacy.ledger.verify import ledger_of, read

    try:
        read([ledger_of(folder)])
    except (UserError, OSError) as error:
        return str(error)
    return "verified"
