"""Table 3 and the figures that need formulas alone: Figures 2, 8 and 11."""

from __future__ import annotations

from collections.abc import Mapping

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
from experiments.papers.noise_aware import paper
from experiments.papers.noise_aware.settings import DIST_COLUMNS, METHODS

NOISE = "noise variance of the sum, per parameter, divided by the squared learning rate"
FORMULAS = {"paper": "computed from formulas for 200 rounds"}
_TAKES = ("privacy.accountant",)


def accountant(departures: Mapping[str, str]) -> str:
    """Whose noise multipliers; the paper's unless told otherwise."""
    return departures.get("privacy.accountant", "paper_ma")


# ---- Table 3


def _table3(column: str, departures: Mapping[str, str]) -> Values:
    from experiments.papers.noise_aware.formulas import table3

    return table3(column, accountant(departures))


_CUT_OFF = "the paper cuts off after two decimals here"
_ROWS3 = ("weiavg", "dpfedavg", "min_eps", "oracle")
TABLE3 = Experiment(
    name="noise_aware.table3",
    title="Table 3, noise by formula, 20 clients of 2,400 records",
    shows=NOISE,
    rows={name: Row(METHODS[name][0] if name in METHODS else "oracle", name, "formulas") for name in _ROWS3},
    columns=DIST_COLUMNS,
    cells={"formulas": Computation(_table3, _TAKES)},
    scales=FORMULAS,
    paper=paper.TABLE3,
    comparison=Comparison(
        0.02,
        relative=True,
        special={
            ("dpfedavg", "dist6"): Tolerance(0.06, "one client's epsilon of 0.15 is next to the accountant's floor"),
            ("min_eps", "dist6"): Tolerance(
                None, "all clients have epsilon 0.15, beside the accountant's floor of 0.1462: unprinted digits decide"
            ),
            ("min_eps", "dist8"): Tolerance(0.04, "all clients have epsilon 0.17, near the accountant's floor"),
            ("oracle", "dist3"): Tolerance(0.09, _CUT_OFF),
        },
    ),
    decimals=3,
    notes=(
        "The caption of the paper's table has the weights where its numbers have their squares.",
        "Robust-HDP's row is measured, not computed: noise_aware.table3_measured.",
        "With an accountant of today all numbers are smaller: --privacy.accountant rdp.",
    ),
)


# ---- Figure 2

_SIZES = (16, 32, 64, 128)
_EPSILONS = (0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0)
_RATE = 0.01


def _figure2(column: str, departures: Mapping[str, str]) -> Values:
    from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS
    from experiments.papers.noise_aware.formulas import CLIENTS, NUM_PARAMS, noise_vars

    size, scale = int(column.removeprefix("b")), NUM_PARAMS * _RATE**2

    def at(epsilons: list[float]) -> list[float]:
        return [scale * own for own in noise_vars(epsilons, [size] * len(epsilons), accountant=accountant(departures))]

    own = [epsilon for epsilon, b in zip(EPSILONS["dist8"][CLIENTS], BATCH_SIZES[CLIENTS], strict=True) if b == size]
    surface = {f"eps{epsilon:g}": value for epsilon, value in zip(_EPSILONS, at(list(_EPSILONS)), strict=True)}
    return {**surface, "clients": list(zip(own, at(own), strict=True))}


def _draw_figure2(found: Found) -> list[Panel]:
    of_size = {column: found["eps1", column][0]["values"] for row, column in found if row == "eps1"}
    surface = {
        f"batch {column[1:]}": [(epsilon, values[f"eps{epsilon:g}"]) for epsilon in _EPSILONS]
        for column, values in of_size.items()
    }
    clients = sorted(value for values in of_size.values() for _, value in values["clients"])
    bars = {"clients": [(str(place), value) for place, value in enumerate(clients, start=1)]} if clients else {}
    return [
        Panel("Noise variance of an update", "epsilon", "variance, all parameters", surface, log="y"),
        Panel("20 clients of Dist8, sorted", "client", "variance, all parameters", bars, kind="bars"),
    ]


FIGURE2 = Experiment(
    name="noise_aware.figure2",
    title="Figure 2, noise by batch size and epsilon",
    shows="noise variance of an update of 28,938 parameters at learning rate 0.01",
    rows={f"eps{epsilon:g}": Row(f"epsilon {epsilon:g}", f"eps{epsilon:g}", "formulas") for epsilon in _EPSILONS},
    columns={f"b{size}": Column(f"batch {size}") for size in _SIZES},
    cells={"formulas": Computation(_figure2, _TAKES)},
    scales=FORMULAS,
    decimals=1,
    draw=_draw_figure2,
    notes=("The paper does not say whose 20 clients it shows: with Dist8 six of them stand out, as in its figure.",),
)


# ---- Figure 8

_SAMPLE_RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
_EPSILONS8 = (0.5, 1.0, 2.0, 5.0)


def _figure8(column: str, departures: Mapping[str, str]) -> Values:
    from experiments.papers.noise_aware.formulas import noise_multipliers

    records = 60_000  # any: z depends on the sample rate and on the number of steps
    sizes = (round(float(column.removeprefix("q")) * records),) * len(_EPSILONS8)
    found = noise_multipliers(_EPSILONS8, sizes, records, accountant(departures))
    return {f"eps{epsilon:g}": z for epsilon, z in zip(_EPSILONS8, found, strict=True)}


FIGURE8 = Experiment(
    name="noise_aware.figure8",
    title="Figure 8, noise by sample rate",
    shows="noise multiplier z for sample rate q, 200 epochs at delta 1e-4",
    rows={f"eps{epsilon:g}": Row(f"epsilon {epsilon:g}", f"eps{epsilon:g}", "formulas") for epsilon in _EPSILONS8},
    columns={f"q{rate:g}": Column(f"q {rate:g}") for rate in _SAMPLE_RATES},
    cells={"formulas": Computation(_figure8, _TAKES)},
    scales=FORMULAS,
    draw=draw_noise_by_sample_rate,
    notes=("The paper's values cannot be read off its figure: z grows with q, more slowly than in proportion.",),
)


# ---- Figure 11

_RECORDS = (500, 1000, 1500, 2000, 2500, 3000, 4000, 5000)


def _figure11(column: str, departures: Mapping[str, str]) -> Values:
    from experiments.papers.noise_aware.formulas import noise_multipliers

    records = int(column.removeprefix("n"))
    ((z),) = noise_multipliers((3.0,), (32,), records, accountant(departures))
    return {"h": records * z**2, "inverse": 1e6 / (records * z**2)}


def _draw_figure11(found: Found) -> list[Panel]:
    points = [(int(column[1:]), cells[0]["values"]["inverse"]) for (row, column), cells in found.items() if row == "h"]
    return [Panel("Weight by data size", "records N", "1 / H(N), millionths", {"epsilon 3, batch 32": points})]


FIGURE11 = Experiment(
    name="noise_aware.figure11",
    title="Figure 11, noise by data size, epsilon 3, batch 32",
    shows="H(N) = N z(N)^2, to which an update's noise is proportional, and 1 / H(N) in millionths",
    rows={"h": Row("H(N)", "h", "formulas"), "inverse": Row("1 / H(N)", "inverse", "formulas")},
    columns={f"n{records}": Column(f"{records:,} records") for records in _RECORDS},
    cells={"formulas": Computation(_figure11, _TAKES)},
    scales=FORMULAS,
    decimals=1,
    draw=_draw_figure11,
    notes=("The ripples of the paper's curve come from its z, rounded to two decimals; here z is not rounded.",),
)

COMPUTED = (TABLE3, FIGURE2, FIGURE8, FIGURE11)
