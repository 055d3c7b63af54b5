"""`PYTHONPATH=. python tests/audit_mutants.py`: audit the build, and with each mutant by the checks that must find it.

Minutes. `--save FILE` keeps the findings, `--load FILE` takes them from there, `--page` writes the page of results.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mutants
import torch
from pytest import MonkeyPatch

from dpfl_lightning.auditing.report import claim_words, row
from dpfl_lightning.auditing.run import audit
from dpfl_lightning.config.load import load
from dpfl_lightning.loop import build_loop
from experiments.pages import RESULTS, markdown, written

ROOT = Path(__file__).parents[1]
PAGE = RESULTS / "audit.md"
COMMAND = "PYTHONPATH=. python tests/audit_mutants.py --load experiments/results/audit.json --page"
SOUND = "as it is"
CASES = {
    "digits": ["--config", "conf/digits.yaml"],
    "Fashion-MNIST": [
        *("--config", "conf/fmnist.yaml", "--rounds", "3", "--model.name", "cnn_tiny"),
        *("--clients.count", "4", "--clients.batch_size", "64", "--privacy.epsilon", "[1,2,3,4]"),
    ],
    "persons": ["--config", "conf/persons.yaml"],
}
FOUND = dict.fromkeys(CASES, mutants.MUTANTS | mutants.OF_RULES) | {"persons": mutants.OF_PERSONS}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for flag in ("--save", "--load"):
        parser.add_argument(flag, type=Path)
    parser.add_argument("--page", action="store_true")
    flags = parser.parse_args(argv)
    results = json.loads(flags.load.read_text()) if flags.load else audit_all(CASES)
    if flags.save:
        flags.save.write_text(json.dumps(results, indent=1) + "\n")
    if flags.page:
        PAGE.write_text(page(results))
    else:
        print(report(results))


def audit_all(cases: dict[str, list[str]], **limits: Any) -> dict[str, Any]:
    """Every case by every build; `limits` are further arguments of `audit`."""
    results: dict[str, Any] = {}
    for case, argv in cases.items():
        for name in (SOUND, *FOUND[case]):
            print(f"{case}: {name}", file=sys.stderr, flush=True)
            options, _ = load([*argv[:1], str(ROOT / argv[1]), *argv[2:]])
            mutate, expected = FOUND[case].get(name, (lambda patch: None, None))
            with MonkeyPatch.context() as patch:
                mutate(patch)
                results.setdefault(case, {})[name] = audit(build_loop(options), only=expected, **limits)
    return {"cases": results, "options": cases, "date": datetime.date.today().isoformat(), "torch": torch.__version__}


def page(results: dict[str, Any]) -> str:
    """The report as a file."""
    return written("Audit", COMMAND, report(results))


def report(results: dict[str, Any]) -> str:
    """For each case its claims beside the bounds, and what caught each mutant."""
    parts = [one for case, builds in results["cases"].items() for one in _case(case, results["options"][case], builds)]
    return "\n\n".join([*parts, f"{results['date']}, torch {results['torch']}."])


def _case(case: str, argv: list[str], builds: dict[str, Any]) -> list[str]:
    sound = builds[SOUND]
    head = ("client", "check", "what", "measured", "claimed", "confidence", "verdict")
    rows = [(str(one["client"]), *row(finding)) for one in sound["clients"] for finding in one["findings"]]
    first = sound["clients"][0]["client"]
    caught = [
        (name, finding["check"], finding["what"], finding["measured"], finding["claimed"])
        for name, build in builds.items()
        for finding in build["clients"][0]["findings"]
        if finding["refuted"]
    ]
    verdict = f"refuted: {'; '.join(sound['refuted'])}" if sound["refuted"] else "nothing is refuted"
    return [
        f"### {case}: `python -m dpfl_lightning audit {' '.join(argv)}`",
        "\n".join(f"- {claim_words(one)}" for one in sound["clients"]),
        f"The build as it is, at {100 * sound['confidence']:g} % for all checks together: {verdict}.",
        markdown(head, rows),
        f"The mutants, and what refutes them (client {first}; the JSON file has the others):",
        markdown(("mutant", "check", "what", "measured", "claimed"), caught),
    ]


if __name__ == "__main__":
    main()
