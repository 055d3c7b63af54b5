"""Run the tests of other projects against our code: `python -m tests.conformance` (`--page` only writes the page)."""

import datetime
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "experiments/results/conformance.json", ROOT / "experiments/results/conformance.md"
COMMAND = "python -m tests.conformance"
#: first part of a module's name -> the distribution
LIBRARIES = {
    "dp_accounting": "dp-accounting",
    "opacus": "opacus",
    "optuna": "optuna",
    "jax_privacy_auditing_test": "jax_privacy",
    "test_cipher": "cryptography_vectors",
}
PAGE_TEXT = """# Tests of other projects on our code

These tests were written for other libraries. Small adapters in `tests/conformance` put our accountants, clipped sums,
samples, generator, audit bounds, and our configuration of Optuna in the place of the tested classes. The tests
themselves come from the installed packages, and none is copied. This page is written by one command, which runs
everything:

```bash
pip install --no-deps --target /tmp/suites {packages}
TEST_SUITES=/tmp/suites {command}
```

The first line unpacks two packages that are no dependencies: jax_privacy, of which one file and its tests need no jax,
and published test vectors of the cipher. Without `TEST_SUITES`, these two suites are skipped.
Each test of Opacus' gradients is a property that holds for 100 generated layers and batches; for each, our gradients,
norms and clipped sums are compared. `python -m pytest -m "e2e and not slow" tests/conformance` takes 20 of them, and
leaves out Optuna's tests of relative sampling by Gaussian processes.

Our epsilons are upper bounds, rounded up to 1e-6. Where a test compares an epsilon or a noise multiplier, ours may not
be below the expected value, and may be above it by the stated error of the accountant only. Expected values that are
upper bounds themselves (those of Opacus' PRV, and its noise multipliers) may be above ours by their error.

{table}

{date}, Python {python}. {total}

## Left out, and why

{skipped}

## Can these tests fail?

Each of these faults was put into our code, and the tests of one file were run with it:

| fault | file | found |
|---|---|---|
{mutations}

## What it showed

{findings}
"""
FINDINGS = """\
- dp-accounting 0.6.0 states 6.7058e-4 as the RDP of 50 steps (sample rate 0.01, noise 2.5) at order 1.5. This is an
  upper bound. The exact value is 6.5007e-4, which ours equals (numerical integration in many digits agrees). The test
  therefore requires that ours is below theirs at this order, and equal at the others.
- Records without any number (an empty sequence) made the choice of a clipped sum divide by zero. This is mended.
- Opacus' divisor can depend on the number of records (its issue 819). Ours is the public expected batch size. A mutant
  with such a divisor is refuted by the audit ([audit.md](audit.md))."""


class Recorder:
    """Counts outcomes by the file of the other project in which a test was written."""

    def __init__(self) -> None:
        self.suite: dict[str, tuple[str, str]] = {}
        self.outcomes: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.skipped: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.failed: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.seconds: Counter[tuple[str, str]] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            self.suite[item.nodeid] = origin(item)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        suite = self.suite[report.nodeid]
        self.seconds[suite] += report.duration
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[suite][report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.failed:
            self.failed[suite].append(report.nodeid.split("::", 1)[1])
        elif report.when == "call":
            self.outcomes[suite]["passed"] += 1

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "library": library,
                "version": version_of(library),
                "file": file,
                "passed": self.outcomes[library, file]["passed"],
                "failed": sorted(set(self.failed[library, file])),
                "skipped": dict(self.skipped[library, file]),
                "seconds": round(self.seconds[library, file], 1),
            }
            for library, file in sorted(set(self.suite.values()))
        ]


def origin(item: pytest.Item) -> tuple[str, str]:
    """Return the distribution and the file from which a test comes."""
    for kind in item.cls.__mro__:  # type: ignore[attr-defined]
        parts = kind.__module__.split(".")
        for name in (parts[0], parts[-1]):
            if name in LIBRARIES and getattr(kind, item.originalname, None):  # type: ignore[attr-defined]
                return LIBRARIES[name], {
                    "test_cipher": "ciphers/AES",
                    "jax_privacy_auditing_test": "tests/auditing_test.py",
                }.get(name, "/".join(parts[1:]) + ".py")
    raise LookupError(item.nodeid)


def packages() -> str:
    from conformance.adapters import PACKAGES

    return PACKAGES


def version_of(library: str) -> str:
    pinned = dict(one.split("==") for one in packages().split())
    return pinned.get(library) or version(library)


def found(name: str, file: str, tests: str) -> bool:
    """Return whether the tests of a file fail with this fault in our code."""
    words = ["-m", "pytest", "-n0", "-qx", "-m", "", f"tests/conformance/{file}", *(["-k", tests] if tests else [])]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "CONFORMANCE_MUTATION": name},
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout + done.stderr)
    return done.returncode == 1


def page(results: dict[str, Any]) -> str:
    """Return the text of the page."""
    suites = results["suites"]
    table = ["| library | tests | passed | failed | left out | seconds |", "|---|---|---|---|---|---|"]
    reasons = []
    for row in suites:
        left_out = sum(row["skipped"].values())
        table.append(
            f"| {row['library']} {row['version']} | `{row['file']}` | {row['passed']} | {len(row['failed'])} "
            f"| {left_out} | {row['seconds']:g} |"
        )
        reasons += [f"- `{row['file']}`: {count}, because {reason}." for reason, count in row["skipped"].items()]
    passed, failed = sum(row["passed"] for row in suites), sum(len(row["failed"]) for row in suites)
    return PAGE_TEXT.format(
        packages=packages(),
        command=COMMAND,
        table="\n".join(table),
        date=results["date"],
        python=results["python"],
        total=f"In all {passed} tests passed and {failed} failed, in {results['seconds'] / 60:.0f} minutes.",
        skipped="\n".join(reasons),
        mutations="\n".join(
            f"| {one['fault']} | `{one['file']}` | {'yes' if one['found'] else 'NO'} |" for one in results["mutations"]
        ),
        findings=FINDINGS,
    )


def main(words: list[str]) -> None:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    if "--page" not in words:
        from conformance.mutations import MUTATIONS

        os.environ.setdefault("CONFORMANCE_EXAMPLES", "100")
        recorder, begin = Recorder(), time.monotonic()
        folder = Path(__file__).parent
        words = [str(folder), f"--ignore={folder}/test_conformance.py", "-n0", "-q", "-m", "", "-p", "no:cacheprovider"]
        pytest.main(words, [recorder])
        results = {
            "command": COMMAND,
            "date": str(datetime.date.today()),
            "python": sys.version.split()[0],
            "seconds": round(time.monotonic() - begin),
            "suites": recorder.rows(),
            "mutations": [
                {"fault": name, "file": one.file, "found": found(name, one.file, one.tests)}
                for name, one in MUTATIONS.items()
            ],
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
