"""`dpfl audit --config FILE`: test with real engines whether a run keeps its epsilon."""

import argparse
import json
from collections.abc import Sequence

from dpfl_lightning.config.load import load
from dpfl_lightning.errors import UserError, command


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
    from dpfl_lightning.build import build_loop
    from dpfl_lightning.federated.server.settings import slow_notice

    loop = build_loop(options)
    clients = _clients(flags.for_clients, loop.population.num_clients)
    report = audit(loop, clients, flags.confidence, flags.releases, slow_notice("audit, checks done"))
    print(json.dumps(report) if flags.json else text(report))
    return 1 if report["refuted"] else 0


def _flags(parser: argparse.ArgumentParser) -> None:
    add, two = parser.add_argument, "default: the two with the smallest and the largest budget"
    add("--for_clients", metavar="all|0,3", help=f"clients to audit ({two})")
    add("--confidence", type=float, default=0.99, help="probability that a sound build passes every check (0.99)")
    many = "largest number of releases with a canary, and of releases without one (20000)"
    add("--releases", type=int, default=20_000, help=many)
    add("--json", action="store_true", help="print one JSON object instead of the text")


def _clients(words: str | None, count: int) -> list[int] | None:
    """Parse `--for_clients`; None selects the default clients."""
    if words is None or words == "all":
        return None if words is None else list(range(count))
    try:
        return list(dict.fromkeys(map(int, words.split(","))))
    except ValueError:
        raise UserError(f"`--for_clients` must be all, or numbers such as 0,3, got {words!r}.") from None


if __name__ == "__main__":
    raise SystemExit(main(None))
