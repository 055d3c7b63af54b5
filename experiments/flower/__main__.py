"""`python -m experiments.flower speed|failures`: run federations over Flower on this machine."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning.errors import command
from experiments.flower import failures, speed
from experiments.flower.report import failures_table, speed_table
from experiments.pages import fill_page

RESULTS = Path(__file__).parents[1] / "results" / "flower.json"


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m experiments.flower", description=__doc__)
    parser.add_argument("what", choices=("speed", "failures"))
    parser.add_argument("--only", nargs="+", choices=failures.NAMES, default=failures.NAMES, help="cases of failures")
    parser.add_argument("--save", type=Path, default=RESULTS, help="file whose entry is replaced")
    parser.add_argument("--folder", type=Path, help="keep all files in this new folder")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    parser.add_argument("--load", action="store_true", help="measure nothing; take the saved results")
    options = parser.parse_args(argv)
    if not options.load:
        _measure(options)
    saved = json.loads(options.save.read_text())
    tables = {"speed": speed_table, "failures": failures_table}
    for name, table in tables.items():
        if name in saved:
            print(table(saved[name]))
            if options.page:
                fill_page(options.page, f"flower {name}", table(saved[name]))
    return 0


def _measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch) / "flower").absolute()
        folder.mkdir(parents=True)
        found = speed.measure(folder) if options.what == "speed" else failures.try_all(folder, list(options.only))
    saved = json.loads(options.save.read_text()) if options.save.is_file() else {}
    saved[options.what] = found if options.what == "speed" else {**saved.get("failures", {}), **found}
    options.save.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
