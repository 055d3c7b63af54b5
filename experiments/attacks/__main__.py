"""`python -m experiments.attacks mechanism|node|opacus|branch|search`: what a server that chooses the weights learns.

Kernels round a record's gradient otherwise in other company, and hostile weights magnify that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dpfl_lightning.errors import command
from experiments.attacks import branch, mechanism, node, search
from experiments.pages import markdown

_GUESSES: Mapping[str, Callable[[int], list[dict[str, Any]]]] = {
    "mechanism": mechanism.package,
    "node": node.node,
    "opacus": mechanism.opacus,
    "branch": branch.branch,
}


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m experiments.attacks", description=__doc__)
    parser.add_argument("what", choices=(*_GUESSES, "search"))
    parser.add_argument("--trials", type=int, default=2000, help="releases from which the server guesses")
    parser.add_argument("--models", type=int, default=10_000, help="hostile models of the search")
    parser.add_argument("--nets", nargs="*", default=(), choices=search.NETS, help="nets of the search (all)")
    parser.add_argument("--sums", nargs="*", default=(), choices=search.SUMS, help="sums of the search (all)")
    parser.add_argument("--json", type=Path, help="write the figures into this file; a search goes on with it")
    options = parser.parse_args(argv)
    if options.what == "search":
        print(search.table(search.search(options.models, options.nets, options.sums, file=options.json)))
        return 0
    rows = _GUESSES[options.what](options.trials)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "torch": torch.__version__}, indent=1) + "\n")
    print(_table(rows))
    return 0


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("records, and one more", "moved, clip norms", "right", "accuracy (99 %)", "claim allows")
    return markdown(head, [_line(row) for row in rows])


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "refused" in row:
        return row["records"], "refused", "", "", ""
    moved = f"{row['moved']:.2f}"
    if "right" not in row:
        return row["records"], moved, "", "", ""
    accuracy = f"{row['accuracy']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
    return row["records"], moved, f"{row['right']} of {row['trials']}", accuracy, f"{row['claimed']:.3f}"


if __name__ == "__main__":
    raise SystemExit(main())
