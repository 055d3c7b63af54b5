"""What needs no training: three clients, calibrations, noise of a round, fitted constants, and the made-up problem."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.papers.experiment import Column, Computation, Experiment, Found, Panel, Row, Values

# ---- three clients

_EXPONENTS = {"gaussian": 1, "laplace": 2}
_RATIOS = (0, 2, 60)
_KINDS = ("least noise", "some noise", "most noise, most like the others")


def _three_clients(column: str, departures: Mapping[str, str]) -> Values:
    from experiments.papers.selection.formulas import three_clients

    mechanism, _, ratio = column.partition("_r")
    return three_clients(float(ratio), _EXPONENTS[mechanism])


FIGURE1 = Experiment(
    name="selection.figure1",
    title="Figure 1 in numbers, three clients that share twelve participations",
    shows="participations; noise factors 1, 2 and 4, unlikeness 0.5, 0.1 and 0",
    rows={
        **{f"real{n}": Row(f"client {n + 1} ({kind}), real", f"real{n}", "formulas") for n, kind in enumerate(_KINDS)},
        **{f"whole{n}": Row(f"client {n + 1}, whole", f"whole{n}", "formulas") for n in range(3)},
        "price": Row("price of one participation more", "price", "formulas"),
        "cost": Row("cost of the whole ones", "cost", "formulas"),
    },
    columns={
        f"{mechanism}_r{ratio}": Column(f"{mechanism}, bias term {ratio}")
        for mechanism in _EXPONENTS
        for ratio in _RATIOS
    },
    cells={"formulas": Computation(_three_clients)},
    scales={"paper": "computed"},
    notes=("Without the bias term the quiet client comes first; with a large one the client that is most alike.",),
)


# ---- how budgets are split

_PARTICIPATIONS = (2, 5, 10, 20, 40, 80, 160)


def _calibrations(column: str, departures: Mapping[str, str]) -> Values:
    from experiments.papers.selection.formulas import calibrations

    return calibrations(int(column.removeprefix("t")))


CALIBRATION = Experiment(
    name="selection.calibration",
    title="Noise of one participation by how a budget is split among them",
    shows="standard deviation over the sensitivity, at epsilon 1.5 and delta 5e-5 for all participations together",
    rows={
        "exact": Row("exact composition (what runs take)", "exact", "formulas"),
        "lemma1": Row("the paper's Lemma 1, its constant taken as the root of 2", "lemma1", "formulas"),
        "linear": Row("the paper's Algorithm 2 to the letter: epsilon and delta in equal parts", "linear", "formulas"),
    },
    columns={f"t{count}": Column(f"{count} times") for count in _PARTICIPATIONS},
    cells={"formulas": Computation(_calibrations)},
    scales={"paper": "computed for full batches"},
    notes=(
        "All three keep the budget. Equal parts take noise whose variance grows as the square of the participations, "
        "while the quotas of Algorithm 1 are those of a variance that grows in proportion.",
        "Lemma 1's constant is not in the paper. The root of 2 is enough up to epsilon 7.5 at delta 1e-4.",
    ),
)


# ---- noise of a round

_BUDGETS = {"0.1": (0.1, 3.0), "0.5": (0.5, 4.0), "1": (1.0, 6.0)}


def _noise(column: str, departures: Mapping[str, str]) -> Values:
    from experiments.papers.selection.formulas import noise_of_a_round

    mechanism, _, low = column.partition("_")
    return noise_of_a_round(*_BUDGETS[low], mechanism)


NOISE = Experiment(
    name="selection.noise",
    title="Noise in a round's mean update, of other ways to use budgets over that of quotas of least noise",
    shows="variance as a multiple of that of Proposition 1 (so 1 is as quiet, less is quieter); 100 clients of equally "
    "many records, 20 in a round, 200 rounds",
    rows={
        "uniform": Row("equal quotas, equal weights (DPSGD, DMLDP)", "uniform", "formulas"),
        "weiavg": Row("equal quotas, weights by epsilon (WeiAvg)", "weiavg", "formulas"),
        "inverse": Row("equal quotas, weights by inverse noise", "inverse", "formulas"),
    },
    columns={
        f"{mechanism}_{low}": Column(f"{mechanism}, epsilon {ends[0]:g} to {ends[1]:g}")
        for mechanism in _EXPONENTS
        for low, ends in _BUDGETS.items()
    },
    cells={"formulas": Computation(_noise)},
    scales={"paper": "computed, mean of 200 draws of budgets"},
    notes=(
        "Most of what selection gains in noise, weights gain, too: equal quotas with weights by inverse noise are as "
        "quiet with Gaussian noise, and quieter with Laplace noise. What is left to selection is unequal numbers of "
        "records.",
    ),
)


# ---- constants


def _constants(column: str, departures: Mapping[str, str]) -> Values:
    from experiments.papers.selection.formulas import fitted_constants

    return fitted_constants(column)


IDENTIFIABILITY = Experiment(
    name="selection.identifiability",
    title="The constants of Table III, fitted to one and the same first stage from four starts",
    shows="constants whose predicted loss is the reported one",
    rows={
        "gamma": Row("gamma", "gamma", "fit"),
        "smoothness": Row("L", "smoothness", "fit"),
        "convexity": Row("mu", "convexity", "fit"),
        "offset": Row("8 L / mu, which gamma must be", "offset", "fit"),
        "decides": Row("L + 3/8 mu (gamma + 190), which decides the quotas", "decides", "fit"),
        "residual": Row("what is left of the equation", "residual", "fit"),
    },
    columns={
        "usual": Column("from 1, 8, 1, 1, 0.1"),
        "far": Column("from 5, 20, 0.1, 4, 1"),
        "flat": Column("from 0.1, 1, 3, 0.5, 0.3"),
        "steep": Column("from 2, 100, 1, 9, 2"),
    },
    cells={"fit": Computation(_constants)},
    scales={"paper": "made-up losses of 100 clients in 10 rounds"},
    notes=(
        "One equation has five unknowns: every start ends in another exact solution, so the constants say where the "
        "search began. That is why our default (the anchor) needs none of them, and two_stage_selection takes a "
        "number.",
    ),
)


# ---- the made-up problem

_METHODS = {
    "fedsgd": "FedSGD, no privacy",
    "uniform": "uniform (DPSGD, DMLDP)",
    "weiavg": "WeiAvg",
    "inverse": "uniform, weights by inverse noise",
    "least_noise": "biased selection, least noise (Proposition 1, capped)",
    "anchored": "biased selection, our default (anchored)",
}
#: column -> mechanism, Dirichlet alpha, smallest and largest epsilon
_SETTINGS = {
    f"{mechanism}_a{alpha:g}_{low:g}": (mechanism, alpha, low, 30 * low)
    for mechanism, alpha, lows in (
        ("gaussian", 0.5, (0.1, 0.3, 1.0, 10.0)),
        ("gaussian", 3.0, (0.1, 0.3, 1.0, 10.0)),
        ("laplace", 0.5, (0.5, 5.0)),
    )
    for low in lows
}


def _title(column: str) -> str:
    mechanism, alpha, low, high = _SETTINGS[column]
    return f"{mechanism}, alpha {alpha:g}, epsilon {low:g} to {high:g}"


def _methods(column: str, departures: Mapping[str, str]) -> Values:
    from experiments.papers.selection.simulation import Setting, methods_at

    return methods_at(Setting(*_SETTINGS[column]))


def _draw_verification(found: Found) -> list[Panel]:
    panels = []
    for mechanism, alpha in (("gaussian", 0.5), ("gaussian", 3.0), ("laplace", 0.5)):
        places = {name: own[3] for name, own in _SETTINGS.items() if own[:2] == (mechanism, alpha)}
        series = {
            title.partition(",")[0] if method == "fedsgd" else title: [
                (high, found[method, column][0]["values"][method])
                for column, high in places.items()
                if (method, column) in found
            ]
            for method, title in _METHODS.items()
        }
        made = {title: points for title, points in series.items() if points}
        y = "test accuracy, %"
        panels.append(Panel(f"{mechanism} noise, alpha {alpha:g}", "largest epsilon", y, made, log="x"))
    return panels


VERIFICATION = Experiment(
    name="selection.verification",
    title="A made-up problem: ten classes, 30 clients dealt by a Dirichlet distribution, 6 in a round, 100 rounds",
    shows="test accuracy after the last round, %, mean of six draws (spread: their standard deviation)",
    rows={
        row: Row(title, row, "all")
        for method, title in _METHODS.items()
        for row, title in ((method, title), (f"{method}_std", "its spread"))
    },
    columns={column: Column(_title(column)) for column in _SETTINGS},
    cells={"all": Computation(_methods)},
    scales={"paper": "simulated: a linear softmax model, full batches, exact calibration"},
    decimals=1,
    draw=_draw_verification,
    notes=(
        "Where noise is large, biased selection is far above equal quotas and above WeiAvg. Most of that is weighting "
        "by noise, which inverse-noise weights do, too. Where noise is small, least noise falls below equal quotas, "
        "for it leaves clients out; the anchor mends that.",
        "All methods share records, budgets and clip norm; a difference of a few points between two of them is within "
        "what six draws show.",
    ),
)


def _bias_term(column: str, departures: Mapping[str, str]) -> Values:
    from experiments.papers.selection.simulation import Setting, ratios_at

    return ratios_at(Setting(*_SETTINGS[column]))


_OF_BIAS = {
    "uniform": "uniform",
    **{f"ratio{r}": f"least noise and the bias term times {r}" for r in (0, 3, 30, 300)},
    "anchored": "anchored",
}
BIAS_TERM = Experiment(
    name="selection.bias_term",
    title="The paper's bias term with true values of unlikeness, on the same problem",
    shows="test accuracy after the last round, %, mean of six draws (spread: their standard deviation)",
    rows={
        row: Row(title, row, "all")
        for name, words in _OF_BIAS.items()
        for row, title in ((name, words), (f"{name}_std", "its spread"))
    },
    columns={column: Column(_title(column)) for column in ("gaussian_a0.5_0.1", "gaussian_a0.5_1", "gaussian_a0.5_10")},
    cells={"all": Computation(_bias_term)},
    scales={"paper": "simulated; what no server can know is given to it"},
    decimals=1,
    notes=(
        "Unlikeness is how much worse the best common model serves a client than its own best one. Even its true value "
        "brings nothing over least noise, and much of it costs points: it does not lead to equal quotas where noise is "
        "small.",
    ),
)

COMPUTED = (VERIFICATION, BIAS_TERM, NOISE, CALIBRATION, IDENTIFIABILITY, FIGURE1)
