"""Our epsilons beside a second library's over a grid, and beside published numbers: `docs/accounting.md`.

python tests/accounting_grid.py            # minutes; writes experiments/results/accounting.json and the page
python tests/accounting_grid.py --page     # the page alone, from the JSON
"""

import itertools
import json
import math
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import median

from oracle import lower_bound, upper_bound

from dpfl_lightning.privacy.accounting.accountant import ADJACENCIES, get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "experiments" / "results" / "accounting.json", ROOT / "docs" / "accounting.md"
COMMAND = "python tests/accounting_grid.py"
GRID = tuple(
    itertools.product((0.001, 0.01, 0.05, 0.2, 1.0), (0.7, 1.0, 2.0, 8.0), (1, 30, 1000, 10_000), (1e-5, 1e-8))
)
LARGEST_EPSILON = 60.0  # beyond it nobody cares, and the second library needs minutes

# source, accountant, rate, noise, steps, delta, published epsilon
PUBLISHED = [
    ("Opacus, RDP", "rdp", 0.04, 1.5, 2250, 1e-5, 7.32911117143),
    ("Opacus, PRV", "prv", 0.04, 1.5, 2249, 1e-5, 6.777395712150674),
    ("TensorFlow Privacy, RDP", "rdp", 150 / 60000, 1.3, 6000, 1e-5, 0.7242234026),
    ("TensorFlow Privacy, RDP", "rdp", 100 / 1e5, 1.0, 30000, 1e-7, 1.4154988495),
    ("TensorFlow Privacy, RDP", "rdp", 1.0, 0.7, 2, 1e-5, 10.8602036),
    ("TensorFlow Privacy, PLD", "gdp", 1.0, 0.7, 2, 1e-5, 10.1224946),
    ("TensorFlow Privacy, RDP", "rdp", 0.01, 0.7, 120, 1e-5, 3.2392676),
    ("TensorFlow Privacy, PLD", "prv", 0.01, 0.7, 120, 1e-5, 2.4612381),
    ("Microsoft PRV, upper", "prv", 0.001, 0.8, 100, 1e-6, 0.2704034),
    ("Microsoft PRV, upper", "prv", 0.001, 0.8, 20000, 1e-6, 1.2960093),
    ("dp-accounting, RDP", "rdp", 1.0, 4.530877117, 1, 1e-6, 1.0),
    ("dp-accounting, PLD", "gdp", 1.0, math.sqrt(3), 3, 0.126936, 1.0),
    ("dp-accounting, PLD", "prv", 0.2, 0.5, 3, 0.15594, 1.0),
    ("pfl-research, analytic Gaussian", "gdp", 1.0, math.sqrt(2), 1, 4.0834087e-4, 2.25),
    ("analytic Gaussian", "gdp", 1.0, 1.0, 1, 1e-5, 4.377178),
    ("analytic Gaussian", "gdp", 1.0, 1.0, 10, 1e-5, 17.856587),
]
# source, accountant, rate, steps, delta, target epsilon, published noise multiplier
PUBLISHED_NOISE = [
    ("Opacus, RDP", "rdp", 0.04, 2250, 1e-5, 8.0, 1.416015625),
    ("Opacus, PRV", "prv", 0.04, 2250, 1e-5, 8.0, 1.34765625),
    ("Opacus, RDP", "rdp", 0.04, 2000, 1e-5, 8.0, 1.3562),
    ("Opacus, PRV", "prv", 0.04, 2000, 1e-5, 8.0, 1.2915),
    ("dp-accounting, PLD", "prv", 0.01, 1, 1e-5, 1.0, 0.67379294682),
    ("dp-accounting, PLD (sensitivity 6)", "prv", 0.001, 25, 1e-5, 1.0, 3.20956502598 / 6),
    ("analytic Gaussian", "gdp", 1.0, 1, 1e-5, 1.0, 3.730632),
]


def cell(rate: float, noise: float, steps: int, delta: float, adjacency: str) -> dict | None:
    """One setting: the tight epsilon from both sides, and ours; None where it is of no interest."""
    events = [GaussianEvent(rate, noise, steps)]
    rdp = get_accountant("rdp", adjacency).epsilon(events, delta)
    if rdp > LARGEST_EPSILON:
        return None
    names = ("rdp", "prv", "gdp") if rate == 1 else ("rdp", "prv")
    ours = {name: get_accountant(name, adjacency).bound(events, delta) for name in names}
    return {
        "sample_rate": rate,
        "noise_multiplier": noise,
        "steps": steps,
        "delta": delta,
        "adjacency": adjacency,
        "tight_lower": lower_bound(events, delta, adjacency),
        "tight_upper": upper_bound(events, delta, adjacency),
        "ours": {name: value for name, (value, _) in ours.items()},
        "how": {name: how for name, (_, how) in ours.items()},
    }


def published() -> list[dict]:
    rows = []

    def add(source: str, name: str, setting: str, value: float, ours: float) -> None:
        rows.append({"source": source, "accountant": name, "setting": setting, "published": value, "ours": ours})

    for source, name, rate, noise, steps, delta, value in PUBLISHED:
        ours = get_accountant(name).epsilon([GaussianEvent(rate, noise, steps)], delta)
        add(source, name, f"q {rate:.4g}, z {noise:.4g}, {steps} steps, delta {delta:.4g}", value, ours)
    for source, name, rate, steps, delta, epsilon, value in PUBLISHED_NOISE:
        run = ClientSchedule(epsilon, delta, (Planned("train", GaussianEvent(rate, None, steps), 1),))
        ours = calibrate([run], get_accountant(name))[0].noise_multiplier("train")
        add(source, name, f"z for epsilon {epsilon:g}: q {rate:.4g}, {steps} steps, delta {delta:.4g}", value, ours)
    return rows


def deviations(cells: list[dict]) -> list[dict]:
    """Of each accountant and relation: cells, how far above the tight value at most, how many below it."""
    rows = []
    for adjacency, name in itertools.product(ADJACENCIES, ("rdp", "prv", "gdp")):
        some = [one for one in cells if one["adjacency"] == adjacency and name in one["ours"]]
        by_rdp = [one for one in some if name == "prv" and not one["how"]["prv"].startswith("PRV")]
        far = [one for one in some if one["tight_upper"] >= 0.1 and one not in by_rdp]
        ratios = [one["ours"][name] / one["tight_upper"] - 1 for one in far]
        rows.append(
            {
                "adjacency": adjacency,
                "accountant": name,
                "cells": len(some),
                "below": sum(one["ours"][name] < one["tight_lower"] for one in some),
                "median": median(ratios),
                "relative": max(ratios),
                "absolute": max(one["ours"][name] - one["tight_upper"] for one in far),
                "by_rdp": len(by_rdp),
            }
        )
    return rows


PAGE_TEXT = """# Accounting, checked

Written by `{command}` from `experiments/results/accounting.json` ({libraries}).

## Against a second library

A grid of sample rates, noise multipliers, steps and deltas under both relations: {settings}.
*Tight* is the second library's value, from the numerical privacy loss, which it bounds from either side.
An epsilon below the lower bound would not be true; how far ours are above the upper one is shown where that
is at least 0.1.

| relation | accountant | settings | below | median above | most above | most, absolute | RDP stands in |
|---|---|---|---|---|---|---|---|
{deviations}

`prv` includes its error of 0.01 in epsilon; where its grid would not fit, its numerics fail, or RDP is
smaller, RDP stands in, and the guarantee says so. `gdp` is for full batches. RDP is far from tight for a few
releases of small sampled batches, and within some per cent for the many releases of training.

## Against published numbers

| source | accountant | setting | published | ours |
|---|---|---|---|---|
{published}

Ours are rounded up, and `prv` is an upper bound within 0.01 of the tight (PLD) value. Opacus' own search for
a noise multiplier stops up to 0.01 below the target; ours is within 0.1 % of the smallest that fits.
"""


def page(results: dict) -> str:
    """`docs/accounting.md`."""
    above = [
        f"| {ADJACENCIES[row['adjacency']]} | {row['accountant']} | {row['cells']} | {row['below']} "
        f"| {row['median']:.1%} | {row['relative']:.1%} | {row['absolute']:.4f} | {row['by_rdp'] or ''} |"
        for row in deviations(results["cells"])
    ]
    beside = [
        f"| {row['source']} | {row['accountant']} | {row['setting']} | {row['published']:.7g} | {row['ours']:.7g} |"
        for row in results["published"]
    ]
    return PAGE_TEXT.format(
        command=COMMAND,
        libraries=results["libraries"],
        settings=f"{len(results['cells'])} settings with an epsilon up to {LARGEST_EPSILON:g}",
        deviations="\n".join(above),
        published="\n".join(beside),
    )


def main(words: list[str]) -> None:
    if "--page" not in words:
        cells = []
        for number, (setting, adjacency) in enumerate(itertools.product(GRID, ADJACENCIES), 1):
            print(f"{number} of {len(GRID) * len(ADJACENCIES)}", file=sys.stderr, end="\r")
            cells.append(cell(*setting, adjacency))
        libraries = ", ".join(f"{name} {version(name)}" for name in ("opacus", "dp-accounting", "scipy"))
        results = {
            "command": COMMAND,
            "libraries": libraries,
            "cells": [one for one in cells if one],
            "published": published(),
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
