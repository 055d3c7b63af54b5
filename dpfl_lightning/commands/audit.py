"""`dpfl audit --config FILE`: test with real engines whether a run keeps its epsilon."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpfl_lightning.config.load import load
from dpfl_lightning.errors import command, nearest, require
from dpfl_lightning.runtime.text import shown

if TYPE_CHECKING:
    from dpfl_lightning.data import Population

_MOST_NAMES = 20


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `audit` with command-line arguments, and return its exit status."""
    options, flags = load(
        argv,
        _flags,
        name="audit",
        description="Audit a configuration before training: run the real engine and mechanism of some clients on "
        "artificial records. The exit status is 1 if a claim is refuted.",
        examples=("--config digits", "--config config.yaml --for_clients 0,3 --releases 2000"),
    )
    from dpfl_lightning.auditing.report import text
    from dpfl_lightning.auditing.run import audit
    from dpfl_lightning.federated.server.settings import slow_notice
    from dpfl_lightning.loop import build_loop

    loop = build_loop(options)
    clients = chosen_clients(flags.for_clients, loop.population)
    report = audit(loop, clients, flags.confidence, flags.releases, slow_notice("audit, checks done"))
    print(json.dumps(report) if flags.json else shown(text(report)))
    return 1 if report["refuted"] else 0


def _flags(parser: argparse.ArgumentParser) -> None:
    add, two = parser.add_argument, "default: the two with the smallest and the largest budget"
    names = f"names of the clients to audit, or numbers if they have no names ({two})"
    add("--for_clients", metavar="all|NAME,...", help=names)
    add("--confidence", type=float, default=0.99, help="probability that a sound build passes every check (0.99)")
    many = "largest number of releases with a canary, and of releases without one (20000)"
    add("--releases", type=int, default=20_000, help=many)
    add("--json", action="store_true", help="print one JSON object instead of the text")


def chosen_clients(words: str | None, population: Population) -> list[int] | None:
    """Return the numbers of the clients that `--for_clients` names; None selects the default clients.

    Raises UserError for an unknown name; a client without a name has its number.
    """
    if words is None:
        return None
    names = [population.name_of(client) for client in range(population.num_clients)]
    if words == "all":
        return list(range(len(names)))
    known = ", ".join(names) if len(names) <= _MOST_NAMES else f"{names[0]} to {names[-1]}"
    for name in (chosen := words.split(",")):
        require(name in names, "--for_clients", f"be all, or clients of {known}", words, nearest(name, names))
    return list(dict.fromkeys(map(names.index, chosen)))
