"""The figures drawn from trained cells: Figures 3, 4 and 5."""

from __future__ import annotations

import dataclasses
from statistics import fmean, pstdev

from dpfl_lightning.config.published import EPSILONS
from experiments.papers.experiment import Column, Comparison, Experiment, Found, Panel, Row, Training
from experiments.papers.noise_aware import paper
from experiments.papers.noise_aware.accuracy import CLIENT_COLUMNS, MEAN, TABLE16, TABLE17
from experiments.papers.noise_aware.settings import (
    DIST_COLUMNS,
    ROWS,
    ROWS_WITHOUT_MINIMUM,
    SCALES,
    words,
)

_THREE = {"paper": (0, 1, 2)}


def _mean(cells, value: str = "accuracy") -> float:
    return fmean(cell["values"][value] for cell in cells)


# ---- Figure 3: Tables 12 to 15

_SETS = {12: "MNIST", 13: "Fashion-MNIST", 14: "CIFAR-10", 15: "CIFAR-10, ResNet-34, epsilons x 10"}
_FIVE = {name: row for name, row in ROWS.items() if name != "ours"}


def _draw_figure3(found: Found) -> list[Panel]:
    panels = []
    for number, title in _SETS.items():
        series = {
            line.title: [
                (title_of.title, _mean(found[row, column]))
                for column, title_of in DIST_COLUMNS.items()
                if (row := f"{name}_{number}", column) in found
            ]
            for name, line in ROWS.items()
        }
        made = {name: points for name, points in series.items() if points}
        panels.append(Panel(title, "budgets", "accuracy, %", made, kind="bars"))
    return panels


FIGURE3 = Experiment(
    name="noise_aware.figure3",
    title="Figure 3, the methods of Tables 12 to 15",
    shows=MEAN,
    rows={
        f"{name}_{number}": Row(f"{row.title}, {_SETS[number]}", cell=name, experiment=f"noise_aware.table{number}")
        for number in _SETS
        for name, row in ROWS.items()
    },
    columns=DIST_COLUMNS,
    cells={},
    scales=SCALES,
    shown=False,
    draw=_draw_figure3,
)


# ---- Figure 4: Table 12's runs of Dist6


def _draw_figure4(found: Found) -> list[Panel]:
    series = {}
    for name, row in ROWS.items():
        curves = [cell["curve"] for cell in found.get((name, "dist6"), ())]
        rounds = [at for at in (curves[0] if curves else ()) if all(at in curve for curve in curves)]
        spread = [[curve[at] for curve in curves] for at in rounds]
        if rounds:
            series[row.title] = [(int(at), fmean(own), pstdev(own)) for at, own in zip(rounds, spread, strict=True)]
    return [Panel("MNIST, Dist6", "round", "mean accuracy of clients, %", series)]


FIGURE4 = Experiment(
    name="noise_aware.figure4",
    title="Figure 4, accuracy over rounds, MNIST, Dist6",
    shows=MEAN,
    rows=ROWS,
    columns={"dist6": Column("Dist6", experiment="noise_aware.table12")},
    cells={},
    scales=SCALES,
    seeds=_THREE,
    draw=_draw_figure4,
    notes=(
        "The band is the standard deviation over seeds. In the paper minimum epsilon diverged in one of three runs.",
    ),
)


# ---- Figure 5: Tables 16 and 17, and a client that claims a larger budget

CLAIMS = (0.95, 2, 5, 10, 20, 50, 100)
LIAR = 0  # one of three clients of Dist5 with epsilon 0.95 and batch 32, "client 12" when sorted


def claim(column: str) -> list[str]:
    """What the clients of Dist5 claim, where one of them says what `column` says."""
    claims = [*EPSILONS["dist5"][20]]
    claims[LIAR] = float(column.removeprefix("claim"))
    return ["--clients.reported_epsilon", f"[{', '.join(f'{one:g}' for one in claims)}]"]


def _falsified_words(row: str, column: str, scale: str) -> list[str]:
    return [*words("mnist", row, "dist5", scale), *claim(column)]


def _draw_figure5(found: Found) -> list[Panel]:
    def lines(places: dict[str, float]) -> dict[str, list[tuple]]:
        series = {
            row.title: [(x, _mean(found[name, column])) for column, x in places.items() if (name, column) in found]
            for name, row in ROWS_WITHOUT_MINIMUM.items()
        }
        return {name: points for name, points in series.items() if points}

    levels = {column: float(column[4:]) for column in TABLE16.columns}
    counts = {column: float(column[1:]) for column in TABLE17.columns}
    claims = {f"claim{claim:g}": float(claim) for claim in CLAIMS}
    y = "accuracy, %"
    return [
        Panel("Levels of privacy", "Dist", y, lines(levels)),
        Panel("Numbers of clients, Dist6", "clients", y, lines(counts)),
        Panel("One of 20 clients claims more, Dist5", "claimed epsilon", y, lines(claims), log="x"),
        Panel("WeiAvg under that claim, by formula", "claimed epsilon", "noise of the sum", _by_formula(), log="x"),
    ]


def _by_formula() -> dict[str, list[tuple]]:
    from experiments.papers.noise_aware.formulas import falsified_noise

    noises = falsified_noise([float(claim) for claim in CLAIMS], LIAR)
    return {"WeiAvg": [(claim, noise) for claim, (noise, _) in zip(CLAIMS, noises, strict=True)]}


_COUNT_COLUMNS = {
    name: dataclasses.replace(column, experiment=column.experiment or TABLE17.name)
    for name, column in CLIENT_COLUMNS.items()
}
_CLAIM_COLUMNS = {f"claim{claim:g}": Column(f"claims {claim:g}") for claim in CLAIMS}
FIGURE5 = Experiment(
    name="noise_aware.figure5",
    title="Figure 5, MNIST: Tables 16 and 17, and a client of budget 0.95 that claims more (Dist5)",
    shows=MEAN,
    rows=ROWS_WITHOUT_MINIMUM,
    columns={**TABLE16.columns, **_COUNT_COLUMNS, **_CLAIM_COLUMNS},
    cells=dict.fromkeys(ROWS_WITHOUT_MINIMUM, Training(_falsified_words)),
    scales=SCALES,
    paper={name: (*paper.TABLE16[name], *paper.TABLE17[name], *[None] * len(CLAIMS)) for name in paper.TABLE16},
    comparison=Comparison(2.0, better="higher"),
    minutes={"small": 8, "paper": 26},
    draw=_draw_figure5,
    notes=(
        "A claim changes what the server believes, not the client's noise. The paper's numbers for claims cannot be "
        "read off its figure: WeiAvg and PFA fall, the others do not move.",
    ),
)

TRAINED = (FIGURE3, FIGURE4, FIGURE5)
