"""`python -m experiments.speed`: how fast this machine trains, beside the same work of others (see `baselines.py`)."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl_lightning.errors import UserError, command, nearest, require, require_one_of
from experiments.speed.cases import CASES
from experiments.speed.report import PAGE, page, report
from experiments.speed.scaling import scaling_times

if TYPE_CHECKING:
    import torch

#: what is measured unless --cases says otherwise; `layers` has a page of its own
_USUAL = (*CASES, "startup", "scaling")
_NAMES = (*_USUAL, "layers")


@command
def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["gpu"]:
        from experiments.speed.gpu import check

        return check(words[1:], _device)
    if words[:1] == ["supported"]:
        from experiments.speed import supported

        return supported.main(words[1:])
    options = _parse(words)
    results = _saved(options.load) if options.load else bench(options)
    print(report(results))
    if options.save:
        Path(options.save).write_text(json.dumps(results, indent=1) + "\n")
    if options.page:
        PAGE.write_text(page(results))
    if options.json:
        print(json.dumps(results))
    return 0


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen cases, which takes minutes; progress is printed on stderr."""
    from dpfl_lightning.federated.client.engines.fast import FastEngine
    from experiments.speed.layers import layer_times
    from experiments.speed.measure import machine, measure, startup

    device = _device(options.device)
    before = machine(device)
    if (before["load_before"] or 0) > 0.5:
        _say(f"the machine is busy (load {before['load_before']}): rivals of several threads suffer more than ours")
    results: dict[str, Any] = {}
    for name in options.cases:
        if name == "startup":
            results[name] = startup(options.repeats)
        elif name == "scaling":
            results[name] = scaling_times(_say)
        elif name == "layers":
            results[name] = layer_times(options.repeats, device, _say)
        else:
            case = CASES[name].scaled(options.scale)
            peers_python = options.peers_python if options.peers and name == "common" else None
            results[name] = measure(
                name, case, options.repeats, device, FastEngine(options.workers), _say, peers_python
            )
    return {**results, "machine": before, "date": datetime.date.today().isoformat()}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _device(name: str) -> torch.device:
    import torch

    found = torch.cuda.is_available()
    require(name != "cuda" or found, "--device", "be a device of this machine", name, "torch finds no CUDA here.")
    return torch.device("cuda" if name != "cpu" and found else "cpu")


def _saved(path: str) -> dict[str, Any]:
    try:
        results = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"`--load` must be a file that --save wrote, got {path!r}: {error}.") from None
    machine = results.get("machine") if isinstance(results, dict) else None
    ours = isinstance(machine, dict) and "load_before" in machine
    require(ours, "--load", "be a file that --save wrote", path, "It has no load of a `machine` before the run.")
    return results


# ---- options


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.speed",
        description="Rounds of this package beside the same training without privacy and beside Opacus' loop, "
        "interleaved in one run on random data; start-up; time over ranks and clients; if asked for, a clipped sum "
        "over each kind of layer beside Opacus. Takes minutes; tells its progress on stderr. `gpu` as the first word "
        "checks a GPU instead; `supported` writes the page of what is supported.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cases", default=",".join(_USUAL), metavar="NAME,...", help=f"of {', '.join(_NAMES)} (all but layers)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds of each contestant (5; not of scaling)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="this share of the clients of rounds, for a quick look (1)"
    )
    parser.add_argument("--workers", type=int, help="clients our engine trains at the same time (its own choice)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto (cpu)")
    parser.add_argument("--peers", action="store_true", help="Flower and pfl-research on the common round, too")
    parser.add_argument("--peers_python", metavar="PATH", help="Python that has them installed (this one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--save", metavar="FILE", help="write that object to a file")
    parser.add_argument("--load", metavar="FILE", help="show what --save wrote instead of measuring")
    parser.add_argument("--page", action="store_true", help="write experiments/results/bench.md")
    try:
        options, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}. See --help.") from None
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        raise UserError(f"`{unknown[0]}` must be a known option. {nearest(unknown[0], known) or 'See --help.'}")
    options.cases = options.cases.split(",")
    options.peers_python = options.peers_python or sys.executable
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    """Check everything that can be refused before minutes have passed."""
    for name in options.cases:
        require_one_of(_NAMES, "--cases", name)
    require(options.repeats >= 1, "--repeats", "be at least 1", options.repeats)
    require(0 < options.scale <= 1, "--scale", "be in (0, 1]", options.scale)
    require(options.workers is None or options.workers >= 1, "--workers", "be at least 1", options.workers)
    require_one_of(("cpu", "cuda", "auto"), "--device", options.device)
    if options.peers:
        from experiments.speed.peers import check_python

        require("common" in options.cases, "--cases", "hold common with --peers", ",".join(options.cases))
        require(options.device == "cpu", "--device", "be cpu with --peers", options.device, "They are set up for it.")
        check_python(options.peers_python)
    if options.save:
        require(Path(options.save).parent.is_dir(), "--save", "lie in a folder that exists", options.save)


if __name__ == "__main__":
    raise SystemExit(main(None))
