"""`python -m experiments.flower speed|failures`: run federations over Flower on this machine."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfl_lightning.errors import command, require_one_of
from experiments.flower import failures, speed
from experiments.flower.report import failures_table, speed_table
from experiments.pages import RESULTS as FOLDER
from experiments.pages import written

_CASES: Mapping[str, Mapping[str, Callable[[Path], dict[str, Any]]]] = {
    "speed": speed.CASES,
    "failures": failures.CASES,
}
_TABLES = {"speed": speed_table, "failures": failures_table}
RESULTS, PAGE = FOLDER / "flower.json", FOLDER / "flower.md"


def page(saved: Mapping[str, Any]) -> str:
    """All tables of saved results."""
    tables = [table(saved[name]) for name, table in _TABLES.items()]
    return written("Over Flower", "python -m experiments.flower speed --only --page", *tables)


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m experiments.flower", description=__doc__)
    parser.add_argument("what", choices=_CASES)
    parser.add_argument("--only", nargs="*", help="cases, such as supernode or simulation; none shows what is saved")
    parser.add_argument("--save", type=Path, default=RESULTS, help="file whose entries are replaced")
    parser.add_argument("--folder", type=Path, help="keep all files in this folder")
    parser.add_argument("--page", action="store_true", help="write experiments/results/flower.md")
    options = parser.parse_args(argv)
    cases = _CASES[options.what]
    for name in cases if options.only is None else options.only:
        require_one_of(cases, "--only", name)
        with tempfile.TemporaryDirectory() as scratch:
            folder = (options.folder or Path(scratch)).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            found = cases[name](folder)
        saved = json.loads(options.save.read_text()) if options.save.is_file() else {}
        saved.setdefault(options.what, {})[name] = found
        options.save.write_text(json.dumps(saved, indent=1) + "\n")
    saved = json.loads(options.save.read_text())
    print(_TABLES[options.what](saved.get(options.what, {})))
    if options.page:
        PAGE.write_text(page(saved))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
