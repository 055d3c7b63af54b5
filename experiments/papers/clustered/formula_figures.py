"""What needs formulas alone: noise by batch sizes, and the prices of a full batch and of choices among models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.papers.clustered.settings import COLUMNS
from experiments.papers.drawings import draw_noise_by_sample_rate
from experiments.papers.experiment import (
    Column,
    Comparison,
    Computation,
    Experiment,
    Found,
    Panel,
    Row,
    Tolerance,
    Values,
)

TAKES = ("privacy.accountant",)
_SETTING = {"paper": "computed for 6,600 records, batch 32, 200 rounds, delta 1e-4"}
_ACCOUNTANT = "The accountant is today's RDP: --privacy.accountant prv asks for less."


def accountant(departures: Mapping[str, str]) -> str:
    """The user's, else rdp."""
    return departures.get("privacy.accountant", "rdp")


# ---- a full batch in round 1, and private choices


def _of_budget(name: str) -> Callable[[str, Mapping[str, str]], Values]:
    def compute(column: str, departures: Mapping[str, str]) -> Values:
        from experiments.papers.clustered import formulas

        return getattr(formulas, name)(formulas.EPSILONS[column], accountant(departures))

    return compute


FULL_BATCH_COST = Experiment(
    name="clustered.full_batch_cost",
    title="What a first round of all records costs the others",
    shows="noise multipliers of the rounds after the first one; epsilons of that one round",
    rows={
        "without": Row("z without such a round", "without", "formulas"),
        "same": Row("z, the same in all rounds (the papers')", "same", "formulas"),
        "increase": Row("more by, %", "increase", "formulas"),
        "own3": Row("z beside 3 in the first round", "own3", "formulas"),
        "own5": Row("z beside 5 in the first round (our default)", "own5", "formulas"),
        "alone": Row("epsilon of the first round alone at the same z", "alone", "formulas"),
        "alone5": Row("epsilon of the first round alone at 5", "alone5", "formulas"),
    },
    columns=COLUMNS,
    cells={"formulas": Computation(_of_budget("full_batch_cost"), TAKES)},
    scales=_SETTING,
    decimals=3,
    notes=(
        "The papers say that z changes very little. Noise of its own for the first round leaves nearly all of the "
        "budget to the others; how much it may be, so that groups are still found, is clustered.separation.",
        _ACCOUNTANT,
    ),
)

SELECTION_COST = Experiment(
    name="clustered.selection_cost",
    title="What it costs to choose models by loss with privacy",
    shows="noise multipliers of training beside a full-batch round of the same noise; epsilons of choices alone",
    rows={
        "free": Row("z, choices not paid for (the papers')", "free", "formulas"),
        "joint": Row("z, 20 choices composed with training (ours)", "joint", "formulas"),
        "joint_increase": Row("more by, %", "joint_increase", "formulas"),
        "subtracted": Row("z, epsilon of 20 choices subtracted", "subtracted", "formulas"),
        "subtracted_increase": Row("more by, %", "subtracted_increase", "formulas"),
        "every_round": Row("z, 100 choices composed with training", "every_round", "formulas"),
        "alone": Row("epsilon of 20 choices alone", "alone", "formulas"),
        "alone_every_round": Row("epsilon of 100 choices alone", "alone_every_round", "formulas"),
    },
    columns=COLUMNS,
    cells={"formulas": Computation(_of_budget("selection_cost"), TAKES)},
    scales=_SETTING,
    paper={"joint_increase": (0.0,) * 5},
    decimals=3,
    notes=(
        "One choice has range 0.03 epsilon. The revised paper says that a choice without noise costs nothing: removing "
        "a record hardly ever changes it. That is no bound for the worst case, so nothing covers it; with noise it "
        "costs what is shown.",
        "Later published code has 20 choices and subtracts their epsilon.",
        "The accountant is today's RDP, where choices compose best.",
    ),
)


# ---- z by sample rate

_SAMPLE_RATES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_EPSILONS5 = (2.0, 5.0, 10.0)


def _figure5(column: str, departures: Mapping[str, str]) -> Values:
    from experiments.papers.clustered.formulas import noise_multiplier

    records = 60_000  # any: z depends on the sample rate and on the number of steps
    batch = round(float(column.removeprefix("q")) * records)
    return {
        f"eps{epsilon:g}": noise_multiplier(epsilon, None, batch, records=records, accountant=accountant(departures))
        for epsilon in _EPSILONS5
    }


FIGURE5 = Experiment(
    name="clustered.figure5",
    title="Figure 5, noise by sample rate, one training of 200 epochs",
    shows="noise multiplier z for sample rate q, at delta 1e-4",
    rows={f"eps{epsilon:g}": Row(f"epsilon {epsilon:g}", f"eps{epsilon:g}", "formulas") for epsilon in _EPSILONS5},
    columns={f"q{rate:g}": Column(f"q {rate:g}") for rate in _SAMPLE_RATES},
    cells={"formulas": Computation(_figure5, TAKES)},
    scales={"paper": "computed for 200 epochs"},
    draw=draw_noise_by_sample_rate,
    notes=("The paper's values cannot be read off its figure: z grows more slowly than q.", _ACCOUNTANT),
)


# ---- z and variances by the batch sizes of the first round and of the others: the revision's Figures 8 and 3

_FIRST = (32, 128, 660, 2048, 6600)
_LATER = (16, 32, 64, 128, 256, 512, 1024, 2048, 6600)
_BATCH_COLUMNS = {f"b{size}": Column(f"first batch {size:,}") for size in _FIRST}
_SURFACE = {"paper": "computed for epsilon 5, 6,600 records, 200 rounds, delta 1e-4"}


def _z_of(column: str, departures: Mapping[str, str]) -> dict[int, float]:
    """Later batch -> noise multiplier."""
    from experiments.papers.clustered.formulas import noise_multiplier

    first = int(column.removeprefix("b"))
    return {later: noise_multiplier(5.0, first, later, accountant=accountant(departures)) for later in _LATER}


def _figure8(column: str, departures: Mapping[str, str]) -> Values:
    return {f"b{later}": z for later, z in _z_of(column, departures).items()}


def _figure3(column: str, departures: Mapping[str, str]) -> Values:
    import math

    from experiments.papers.clustered.formulas import noise_multiplier, update_variance

    first, of_later = int(column.removeprefix("b")), _z_of(column, departures)
    values = {f"first_b{later}": math.log10(update_variance(first, z)) for later, z in of_later.items()}
    values |= {f"later_b{later}": math.log10(update_variance(later, z)) for later, z in of_later.items()}
    if first % 10 == 0:
        smaller = noise_multiplier(5.0, first // 10, accountant=accountant(departures))
        values["tenfold"] = update_variance(first // 10, smaller) / update_variance(first, of_later[32])
    return values


def _lines(found: Found, prefix: str, of_first: bool) -> dict[str, list[tuple]]:
    """Values by the first batch, a line for each later one, or the other way round."""
    series: dict[str, list[tuple]] = {}
    for (row, column), cells in found.items():
        if row.startswith(prefix):
            first, later = int(column[1:]), int(row.removeprefix(prefix))
            name, x = (f"later batch {later}", first) if of_first else (f"first batch {first}", later)
            series.setdefault(name, []).append((x, cells[0]["values"][row]))
    return series


def _draw_figure3(found: Found) -> list[Panel]:
    y = "log10 of noise variance, all parameters"
    return [
        Panel("An update of the first round", "batch of the first round", y, _lines(found, "first_b", True), log="x"),
        Panel("An update of a later round", "batch of later rounds", y, _lines(found, "later_b", False), log="x"),
    ]


def _draw_figure8(found: Found) -> list[Panel]:
    y = "noise multiplier z"
    return [
        Panel("z by the batch of the first round", "batch of the first round", y, _lines(found, "b", True), log="xy"),
        Panel("z by the batch of later rounds", "batch of later rounds", y, _lines(found, "b", False), log="xy"),
    ]


FIGURE3 = Experiment(
    name="clustered.revised_figure3",
    title="Figure 3 of the revised paper, noise variance of updates by batch sizes, ResNet-18 of 11,181,642 parameters",
    shows="log10 of the noise variance of an update, all parameters together, at learning rate 5e-4 and clip norm 3",
    rows={
        **{
            f"first_b{later}": Row(f"first round, later batch {later}", f"first_b{later}", "formulas")
            for later in _LATER
        },
        **{
            f"later_b{later}": Row(f"later round, later batch {later}", f"later_b{later}", "formulas")
            for later in _LATER
        },
        "tenfold": Row("variance with a tenth of the first batch / variance, not its log", "tenfold", "formulas"),
    },
    columns=_BATCH_COLUMNS,
    cells={"formulas": Computation(_figure3, TAKES)},
    scales=_SURFACE,
    paper={"tenfold": (None, None, None, None, 1000.0)},
    comparison=Comparison(
        0.05,
        relative=True,
        special={("tenfold", "b6600"): Tolerance(0.3, "the paper says about 1000, and z grows with the batch, too")},
    ),
    draw=_draw_figure3,
    notes=(
        "A large first batch and small later ones: the later batch raises z, so noise of the first round with it, and "
        "the first batch hardly raises that of later rounds. The paper's surfaces cannot be read off its figure.",
        _ACCOUNTANT,
    ),
)

FIGURE8 = Experiment(
    name="clustered.revised_figure8",
    title="Figure 8 of the revised paper, noise multiplier by batch sizes",
    shows="noise multiplier z, the same in all rounds",
    rows={f"b{later}": Row(f"later batch {later}", f"b{later}", "formulas") for later in _LATER},
    columns=_BATCH_COLUMNS,
    cells={"formulas": Computation(_figure8, TAKES)},
    scales=_SURFACE,
    decimals=3,
    draw=_draw_figure8,
    notes=("The paper's appendix with this figure is not public.", _ACCOUNTANT),
)

COMPUTED = (FULL_BATCH_COST, SELECTION_COST, FIGURE5, FIGURE3, FIGURE8)
