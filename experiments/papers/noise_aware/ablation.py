"""What the paper leaves out: its estimator beside others, as the common signal grows out of the quietest noise."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from experiments.papers.experiment import Column, Computation, Experiment, Found, Panel, Row, Values
from experiments.papers.noise_aware.formula_figures import accountant

if TYPE_CHECKING:
    from torch import Tensor

RATIOS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SEEDS = (0, 1, 2)
DIST = "dist1"
#: how the signal grows with a client's local steps, and how that is called
_SIGNALS = {"equal": "equal signals", "steps": "signal as the number of steps"}
#: row -> what the table calls it, and the options of its estimator
_ESTIMATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "rpca": ("robust PCA", {"name": "rpca", "rows": None}),
    "rpca5000": ("robust PCA, 5,000 parameters", {"name": "rpca", "rows": 5000}),
    "hetero_pca": ("hetero_pca", {"name": "hetero_pca"}),
    "raw_norm": ("raw_norm", {"name": "raw_norm"}),
    "mean_residual": ("mean_residual", {"name": "mean_residual"}),
}
_COLUMNS = {f"{signal}_{ratio:g}": Column(f"{signal}, {ratio:g}") for signal in _SIGNALS for ratio in RATIOS}


def updates(signal: str, ratio: float, seed: int, accountant: str = "rdp") -> tuple[Tensor, list[float]]:
    """Made-up updates of the 20 clients of Dist1 (learning rate 1), and the true noise variance of each.

    Args:
        signal: `equal`: as long for every client; `steps`: in proportion to its local steps.
        ratio: length of the quietest client's signal / length of its noise.
        seed: of directions and noise.
        accountant: whose noise multipliers.

    Returns:
        `[20, 28938]` float32: one direction for all, a direction of its own a tenth as long, and noise; and
        `[20]` variances summed over coordinates.
    """
    import torch

    from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS
    from experiments.papers.noise_aware.formulas import CLIENTS, NUM_PARAMS, RECORDS, noise_vars

    sizes = BATCH_SIZES[CLIENTS]
    variances = [NUM_PARAMS * one for one in noise_vars(EPSILONS[DIST][CLIENTS], sizes, accountant=accountant)]
    steps = [RECORDS / size if signal == "steps" else 1.0 for size in sizes]
    quietest = min(range(CLIENTS), key=variances.__getitem__)
    length = torch.tensor(steps) * ratio * variances[quietest] ** 0.5 / steps[quietest]

    def directions(count: int) -> Tensor:
        drawn = torch.randn(count, NUM_PARAMS, generator=generator)
        return drawn / drawn.norm(dim=1, keepdim=True)

    generator = torch.Generator().manual_seed(seed)
    signals = length[:, None] * (directions(1) + 0.1 * directions(CLIENTS))
    noise = torch.randn(CLIENTS, NUM_PARAMS, generator=generator)
    return signals + noise * (torch.tensor(variances)[:, None] / NUM_PARAMS) ** 0.5, variances


def _excess(column: str, departures: Mapping[str, str]) -> Values:
    from dpfl_lightning.algorithms.noise_estimators import EstimatorOptions, estimate
    from dpfl_lightning.algorithms.noise_weights import weights
    from experiments.papers.noise_aware.formulas import of_sum, oracle_weights

    signal, _, ratio = column.partition("_")
    found: dict[str, list[float]] = {name: [] for name in (*_ESTIMATORS, "uniform")}
    for seed in SEEDS:
        deltas, truth = updates(signal, float(ratio), seed, accountant({"privacy.accountant": "rdp", **departures}))
        least = of_sum(oracle_weights(truth), truth)
        found["uniform"].append(of_sum([1.0] * len(truth), truth) / least)
        for name, (_, options) in _ESTIMATORS.items():
            given = weights(estimate(deltas, EstimatorOptions(**options)).noise_var).tolist()
            found[name].append(of_sum(given, truth) / least)
    return {name: fmean(one) for name, one in found.items()}


def _draw(found: Found) -> list[Panel]:
    panels = []
    for signal, title in _SIGNALS.items():
        series = {
            row.title: [
                (ratio, cells[0]["values"][row.value])
                for ratio in RATIOS
                if (cells := found.get((name, f"{signal}_{ratio:g}")))
            ]
            for name, row in ABLATION.rows.items()
        }
        x = "signal of the quietest client / its noise"
        panels.append(Panel(title[0].upper() + title[1:], x, "noise of the sum / least possible", series, log="xy"))
    return panels


_TITLES = {**{name: title for name, (title, _) in _ESTIMATORS.items()}, "uniform": "uniform weights"}
ABLATION = Experiment(
    name="noise_aware.ablation",
    title="Estimators of noise where the common signal grows, made-up updates of 20 clients, Dist1",
    shows="noise of the sum under weights from the estimates, divided by the least possible; mean of three",
    rows={name: Row(title, name, "all") for name, title in _TITLES.items()},
    columns=_COLUMNS,
    cells={"all": Computation(_excess, ("privacy.accountant",))},
    scales={"paper": "28,938 parameters; beside the common direction each client has one of its own, a tenth as long"},
    draw=_draw,
    notes=(
        "Columns: how long the quietest client's signal is, in lengths of its noise; either equally long for all "
        "clients, or in proportion to their numbers of steps.",
        "In the paper's settings (noise_aware.table3_measured) the squared length of an update is as good an estimate "
        "as robust PCA. Where the signal is not small, an estimator that takes it for noise gives the quiet clients "
        "too little weight, and what a client has of its own no estimator can tell from noise.",
        "hetero_pca, one Gram matrix and no parameter-wise work, is nowhere behind robust PCA here.",
    ),
)
