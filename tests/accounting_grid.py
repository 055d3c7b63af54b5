"""Our epsilons beside a second library's, and beside published numbers: `experiments/results/accounting.md`.

python tests/accounting_grid.py            # minutes; writes experiments/results/accounting.json and the page
python tests/accounting_grid.py --page     # the page alone, from the JSON
"""

import json
import math
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from opacus_prv import interval

from dpfl_lightning.privacy.accounting.accountant import Pld, get_accountant
from dpfl_lightning.privacy.accounting.events import Event, GaussianEvent, SelectionEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = (ROOT / "experiments" / "results" / f"accounting.{kind}" for kind in ("json", "md"))
COMMAND = "python tests/accounting_grid.py"
MOST = 0.01  # deviation from the tight epsilon, as a number and as a fraction, whichever is less

# kind, delta, relation, releases with free noise (None) or not, target epsilons
TRAIN, LONG, FEW = (
    GaussianEvent(64 / 2400, None, 1140),
    GaussianEvent(0.001, None, 10_000),
    GaussianEvent(0.2, None, 60),
)
FULL, FIRST = GaussianEvent(1.0, None, 50), GaussianEvent(1.0, 5.0)
EPSILONS = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
SETTINGS = [
    *(("sampled", 1e-5, "add_remove", (event,), epsilon) for event in (TRAIN, LONG) for epsilon in EPSILONS),
    *(("sampled, few steps", 1e-5, "add_remove", (FEW,), epsilon) for epsilon in EPSILONS[::2]),
    *(("full batches", 1e-5, "add_remove", (FULL,), epsilon) for epsilon in EPSILONS[::2]),
    *(("mixed: a full first round", 1e-5, "add_remove", (FIRST, TRAIN), epsilon) for epsilon in EPSILONS[3:]),
    *(("mixed: full and sampled", 1e-5, "add_remove", (FULL, FEW), epsilon) for epsilon in EPSILONS[::2]),
    *(("two phases", 1e-5, "add_remove", (FEW, TRAIN), epsilon) for epsilon in EPSILONS[1::2]),
    *(
        ("30 selections", 1e-4, "add_remove", (TRAIN, SelectionEvent(0.03 * epsilon, 30)), epsilon)
        for epsilon in EPSILONS[:7]
    ),
    *(("replace_one", 1e-5, "replace_one", (TRAIN,), epsilon) for epsilon in EPSILONS),
    *(("replace_one, mixed", 1e-5, "replace_one", (FULL, FEW), epsilon) for epsilon in EPSILONS[1::2]),
    *(("small delta", delta, "add_remove", (FEW,), epsilon) for delta in (1e-8, 1e-10) for epsilon in (0.2, 2.0, 10.0)),
]

# source, accountant, rate, noise, steps, delta, published epsilon
PUBLISHED = [
    ("Opacus, RDP", "rdp", 0.04, 1.5, 2250, 1e-5, 7.32911117143),
    ("Opacus, PRV", "pld", 0.04, 1.5, 2249, 1e-5, 6.777395712150674),
    ("TensorFlow Privacy, RDP", "rdp", 150 / 60000, 1.3, 6000, 1e-5, 0.7242234026),
    ("TensorFlow Privacy, RDP", "rdp", 100 / 1e5, 1.0, 30000, 1e-7, 1.4154988495),
    ("TensorFlow Privacy, RDP", "rdp", 1.0, 0.7, 2, 1e-5, 10.8602036),
    ("TensorFlow Privacy, PLD", "pld", 1.0, 0.7, 2, 1e-5, 10.1224946),
    ("TensorFlow Privacy, RDP", "rdp", 0.01, 0.7, 120, 1e-5, 3.2392676),
    ("TensorFlow Privacy, PLD", "pld", 0.01, 0.7, 120, 1e-5, 2.4612381),
    ("Microsoft PRV, upper", "pld", 0.001, 0.8, 100, 1e-6, 0.2704034),
    ("Microsoft PRV, upper", "pld", 0.001, 0.8, 20000, 1e-6, 1.2960093),
    ("dp-accounting, RDP", "rdp", 1.0, 4.530877117, 1, 1e-6, 1.0),
    ("dp-accounting, PLD", "pld", 1.0, math.sqrt(3), 3, 0.126936, 1.0),
    ("dp-accounting, PLD", "pld", 0.2, 0.5, 3, 0.15594, 1.0),
    ("pfl-research, analytic Gaussian", "pld", 1.0, math.sqrt(2), 1, 4.0834087e-4, 2.25),
    ("analytic Gaussian", "pld", 1.0, 1.0, 1, 1e-5, 4.377178),
    ("analytic Gaussian", "pld", 1.0, 1.0, 10, 1e-5, 17.856587),
]
# source, accountant, rate, steps, delta, target epsilon, published noise multiplier
PUBLISHED_NOISE = [
    ("Opacus, RDP", "rdp", 0.04, 2250, 1e-5, 8.0, 1.416015625),
    ("Opacus, PRV", "pld", 0.04, 2250, 1e-5, 8.0, 1.34765625),
    ("Opacus, RDP", "rdp", 0.04, 2000, 1e-5, 8.0, 1.3562),
    ("Opacus, PRV", "pld", 0.04, 2000, 1e-5, 8.0, 1.2915),
    ("dp-accounting, PLD", "pld", 0.01, 1, 1e-5, 1.0, 0.67379294682),
    ("dp-accounting, PLD (sensitivity 6)", "pld", 0.001, 25, 1e-5, 1.0, 3.20956502598 / 6),
    ("analytic Gaussian", "pld", 1.0, 1, 1e-5, 1.0, 3.730632),
]


def cell(kind: str, delta: float, adjacency: str, events: tuple[Event, ...], epsilon: float) -> dict:
    """One setting: noise for an epsilon, what RDP needs, our epsilon and the second library's interval."""
    lines = tuple(Planned(str(number), event, 1) for number, event in enumerate(events))
    run, free = ClientSchedule(epsilon, delta, lines), next(line.purpose for line in lines if line.unsolved)
    by_pld, by_rdp = (calibrate([run], get_accountant(name, adjacency))[0] for name in ("pld", "rdp"))
    ours = get_accountant("pld", adjacency).epsilon(by_pld.events(), delta)
    lower, tight, upper = map(float, interval(by_pld.events(), delta, adjacency, min(1e-3 * epsilon, 2e-3)))
    return {
        "kind": kind,
        "target": epsilon,
        "delta": delta,
        "adjacency": adjacency,
        "noise_multiplier": by_pld.noise_multiplier(free),
        "noise_multiplier_rdp": by_rdp.noise_multiplier(free),
        "ours": ours,
        "rdp": get_accountant("rdp", adjacency).epsilon(by_pld.events(), delta),
        "tight": tight,
        "tight_lower": lower,
        "tight_upper": upper,
    }


def times() -> dict[str, float]:
    """Seconds of one core for solving the noise of the main job and of 1,000 different clients, without a cache."""
    generator = np.random.default_rng(0)
    epsilons, sizes = generator.uniform(0.1, 10, 1000), generator.integers(200, 5000, 1000)

    def client(epsilon: float, size: int, batch: int) -> ClientSchedule:
        event = GaussianEvent(batch / size, None, math.ceil(size / batch))
        return ClientSchedule(float(epsilon), 1e-5, (Planned("train", event, 30),))

    runs = {
        "20 clients of 2,400 records": [client(epsilon, 2400, 64) for epsilon in epsilons[:20]],
        "1,000 clients of 1,000 sizes": [client(*pair, 64) for pair in zip(epsilons, sizes, strict=True)],
    }
    seconds = {}
    for name, schedules in runs.items():
        begun = time.process_time()
        calibrate(schedules, Pld())
        seconds[name] = time.process_time() - begun
    return seconds


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


PAGE_TEXT = """# Accounting, checked

Written by `{command}` from `experiments/results/accounting.json` ({libraries}).

## Against a second library

The noise of {settings} settings was solved for a target epsilon with the accountant `pld`. *Tight* is the epsilon of
the same noise by Opacus' PRV accountant, which is known to within *error*, followed by the worst adaptive choices if
there are selections. Ours may not be below tight - error, nor above it by more than {most:g} or {most:.0%}: {below} are
below, {above} are above. *RDP* is the epsilon of the same noise by the accountant `rdp`, and *less noise* how much less
noise `pld` needs for the target than `rdp`.

| setting | delta | target | noise multiplier | ours | tight | error | deviation | RDP | less noise |
|---|---|---|---|---|---|---|---|---|---|
{deviations}

Processor time for solving the noise without a cache: {times}.

## Against published numbers

| source | accountant | setting | published | ours |
|---|---|---|---|---|
{published}

Ours are rounded up. Opacus' search for a noise multiplier stops up to 0.01 below the target.
"""


def deviation(one: dict) -> float:
    """How far our epsilon is above the tight one, in units of what is allowed."""
    return (one["ours"] - one["tight"]) / (MOST * min(1.0, one["tight"]))


def page(results: dict) -> str:
    """The text of the page."""
    cells = results["cells"]
    above = [
        f"| {one['kind']} | {one['delta']:g} | {one['target']:g} | {one['noise_multiplier']:.4g} | {one['ours']:.5f} "
        f"| {one['tight']:.5f} | {one['tight'] - one['tight_lower']:.5f} | {one['ours'] / one['tight'] - 1:+.2%} "
        f"| {one['rdp']:.3f} | {1 - one['noise_multiplier'] / one['noise_multiplier_rdp']:.1%} |"
        for one in cells
    ]
    beside = [
        f"| {row['source']} | {row['accountant']} | {row['setting']} | {row['published']:.7g} | {row['ours']:.7g} |"
        for row in results["published"]
    ]
    return PAGE_TEXT.format(
        command=COMMAND,
        libraries=results["libraries"],
        settings=len(cells),
        most=MOST,
        below=sum(one["ours"] < one["tight_lower"] for one in cells) or "none",
        above=sum(deviation(one) > 1 for one in cells) or "none",
        deviations="\n".join(above),
        times="; ".join(f"{name} {seconds:.0f} s" for name, seconds in results["times"].items()),
        published="\n".join(beside),
    )


def main(words: list[str]) -> None:
    if "--page" not in words:
        cells = []
        for number, setting in enumerate(SETTINGS, 1):
            print(f"{number} of {len(SETTINGS)}", file=sys.stderr, end="\r")
            cells.append(cell(*setting))
        libraries = ", ".join(f"{name} {version(name)}" for name in ("opacus", "dp-accounting", "scipy"))
        results = {
            "command": COMMAND,
            "libraries": libraries,
            "cells": cells,
            "times": times(),
            "published": published(),
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
