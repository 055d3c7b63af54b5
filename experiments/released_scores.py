"""What noise and bins do to released scores, and what they cost. `python -m experiments.released_scores --page`.

Predictions are synthetic: logits of both classes are normal with one variance, as far apart as gives AUROC 0.75.
"""

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpfl_lightning.algorithms.binned_scores import binned_scores, edges_of
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate
from experiments.pages import RESULTS, markdown, written

ROWS, EPSILONS, POSITIVE = (100, 300, 1000, 3000, 10_000), (0.1, 1.0), (0.06, 0.5)
DELTA, BINS, DRAWS = 1e-5, 20, 400
_APART = 0.954  # standard deviations between the classes at AUROC 0.75
_SHARES = (None, 0.1, 0.5, 1.0)  # epsilons of scores beside training
_RATE, _STEPS, _BUDGET = 0.02, 1500, 2.0
_ABOUT = (
    f"Root mean square error of the released AUROC in {DRAWS} draws, true AUROC 0.75, delta {DELTA:g}; then what the "
    f"release costs beside {_STEPS:,} steps at rate {_RATE} with a budget of epsilon {_BUDGET:g} (one record, add or "
    "remove one, Poisson sampling, PLD)."
)


def noise_for(epsilon: float) -> float:
    """Return the standard deviation of the noise of each count that costs this epsilon alone."""
    return solved(epsilon, Planned("scores", GaussianEvent(1.0, None, 1), 1)).noise_multiplier("scores")


def solved(epsilon: float, *lines: Planned) -> ClientSchedule:
    return calibrate([ClientSchedule(epsilon, DELTA, lines)], get_accountant("pld"))[0]


def predictions(rows: int, positive: float, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return probabilities and labels of held-out records, at least one of each class."""
    labels = torch.rand(rows, generator=draw) < positive
    labels[0], labels[1] = True, False
    logits = torch.randn(rows, generator=draw) + _APART * (labels.double() - 0.5) + math.log(positive / (1 - positive))
    return logits.sigmoid(), labels.long()


def auroc(shares: Tensor, labels: Tensor) -> float:
    """Return the share of pairs that are in the right order."""
    ranks = shares.argsort().argsort().double() + 1
    having = int(labels.sum())
    return float((ranks[labels == 1].sum() - having * (having + 1) / 2) / (having * (len(labels) - having)))


def error_of(rows: int, positive: float, noise: float) -> str:
    """Return the root mean square error of the released AUROC, and how often it is undefined."""
    draw, edges = torch.Generator().manual_seed(rows), edges_of(BINS)
    errors = []
    for _ in range(DRAWS):
        shares, labels = predictions(rows, positive, draw)
        places = labels * BINS + (shares[:, None] >= torch.tensor(edges)).sum(dim=1)
        counts = places.bincount(minlength=2 * BINS).double().view(2, -1)
        counts += noise * torch.randn(2, BINS, generator=draw, dtype=torch.float64)
        value = binned_scores(counts, noise, edges, of_two=True)["auroc"].value
        errors += [] if value is None else [value - auroc(shares, labels)]
    undefined = 1 - len(errors) / DRAWS
    if undefined > 0.5:
        return "undefined"
    error = math.sqrt(sum(one * one for one in errors) / len(errors))
    return f"{error:.3f}" + (f" ({undefined:.0%} undefined)" if undefined else "")


def errors() -> str:
    cells = [(epsilon, positive) for epsilon in EPSILONS for positive in POSITIVE]
    head = ["held-out rows", "bins alone", *(f"epsilon {one:g}, {share:.0%} positive" for one, share in cells)]
    noises = {epsilon: noise_for(epsilon) for epsilon in EPSILONS}
    rows = [[f"{n:,}", error_of(n, 0.5, 0.0), *(error_of(n, share, noises[one]) for one, share in cells)] for n in ROWS]
    return markdown(head, rows)


def prices() -> str:
    train = Planned("train", GaussianEvent(_RATE, None, _STEPS), 1)
    rows = []
    for epsilon in _SHARES:
        scores = [] if epsilon is None else [Planned("scores", GaussianEvent(1.0, noise_for(epsilon), 1), 1)]
        plan = solved(_BUDGET, train, *scores)
        spent = get_accountant("pld").epsilon(plan.events(), DELTA)
        alone = "no scores" if epsilon is None else f"{epsilon:g}"
        rows.append([alone, f"{plan.noise_multiplier('train'):.4f}", f"{spent:.4f}"])
    return markdown(["epsilon of the scores alone", "noise multiplier of training", "epsilon of both"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.released_scores", description=__doc__)
    parser.add_argument("--page", action="store_true", help="write experiments/results/released_scores.md")
    flags = parser.parse_args(argv)
    text = f"{errors()}\n\n{prices()}"
    print(text)
    if flags.page:
        page = written("Released scores", "python -m experiments.released_scores --page", _ABOUT, text)
        (RESULTS / "released_scores.md").write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
