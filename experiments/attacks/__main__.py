"""`python -m experiments.attacks search`: what a server that chooses the weights learns from the last bits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning.errors import command
from experiments.attacks import search


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m experiments.attacks", description=__doc__)
    parser.add_argument("what", choices=("search",))
    parser.add_argument("--models", type=int, default=10_000, help="hostile models of the search")
    parser.add_argument("--nets", nargs="*", default=(), choices=search.NETS, help="nets of the search (all)")
    parser.add_argument("--sums", nargs="*", default=(), choices=search.SUMS, help="sums of the search (all)")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    options = parser.parse_args(argv)
    found = search.search(options.models, options.nets, options.sums)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(search.table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
