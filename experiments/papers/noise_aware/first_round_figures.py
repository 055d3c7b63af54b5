"""What one round of training shows: Table 3 measured, and Figures 6, 7, 9, 10, 12 and 13."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from experiments.papers.experiment import (
    Column,
    Comparison,
    Computation,
    Experiment,
    Found,
    Panel,
    Row,
    Tolerance,
    Training,
    Values,
)
from experiments.papers.noise_aware import paper
from experiments.papers.noise_aware.accuracy import eight_labels
from experiments.papers.noise_aware.formula_figures import NOISE, accountant
from experiments.papers.noise_aware.settings import CONF, DATA, DIST_COLUMNS, PARTS, learning_rate

if TYPE_CHECKING:
    from experiments.papers.recorder import Recorder

EXCESS = "noise of the sum under Robust-HDP's weights of the first round, divided by the least possible"
ONE_ROUND = {"paper": "one round of training with the noise of 200"}
_PAPERS = ["--privacy.accountant", "paper_ma", "--evaluation.every", "200"]
_ESTIMATORS = ("rpca", "hetero_pca", "raw_norm", "mean_residual")
_NOTE = (
    "Noise is the paper's accountant's. A client's true variance is that of its own mechanism and of as many steps as "
    "it takes; estimates are known up to a common factor."
)


def _words(data: str) -> Callable[[str, str, str], list[str]]:
    """DPFedAvg's first round: the updates do not depend on how they are weighted."""

    def words(row: str, column: str, scale: str) -> list[str]:
        rate = learning_rate(data, "robust_hdp", column, "paper")
        budget = ["--privacy.epsilon.name", column, "--clients.learning_rate", rate]
        return [*CONF, *DATA[data], *PARTS[data], *budget, *_PAPERS]

    return words


def _watched(*names: str, rows: Sequence[int] = (), singular_values: bool = False) -> Callable[[str, str], Recorder]:
    """What looks at the round: estimators by name, and robust PCA of the first so many parameters."""

    def recorder(row: str, column: str) -> Recorder:
        from experiments.papers.noise_aware.first_round import EstimatorOptions, FirstRound, blocks

        estimators = {name: EstimatorOptions(name) for name in names}
        return FirstRound(estimators | {f"rpca_{count}": blocks(count) for count in rows}, singular_values)

    return recorder


# ---- Table 3, measured

TABLE3_MEASURED = Experiment(
    name="noise_aware.table3_measured",
    title="Table 3, Robust-HDP's row measured, and other estimators, Fashion-MNIST",
    shows=NOISE,
    rows={
        "rpca": Row("Robust-HDP (robust PCA)", "rpca_noise", "one_round"),
        "hetero_pca": Row("hetero_pca", "hetero_pca_noise", "one_round"),
        "raw_norm": Row("raw_norm", "raw_norm_noise", "one_round"),
        "mean_residual": Row("mean_residual", "mean_residual_noise", "one_round"),
        "oracle": Row("oracle", "oracle_noise", "one_round"),
    },
    columns=DIST_COLUMNS,
    cells={"one_round": Training(_words("fashion_mnist"), _watched(*_ESTIMATORS))},
    scales=ONE_ROUND,
    paper={"rpca": paper.TABLE3_ROBUST_HDP},
    comparison=Comparison(
        0.05,
        relative=True,
        better="lower",
        special={("rpca", "dist3"): Tolerance(0.12, "the paper cuts off after two decimals here")},
    ),
    minutes={"paper": 0.4},
    decimals=3,
    notes=(_NOTE, "The paper compares robust PCA with no other estimator; hetero_pca and raw_norm cost far less."),
)


# ---- weights: Figures 6, 7, 10, 12, 13


def _by_budget(lists: Mapping[str, list], name: str) -> list[tuple]:
    """A client's number over its place when sorted by budget."""
    order = sorted(range(len(lists["epsilon"])), key=lambda client: lists["epsilon"][client])
    return [(place, lists[name][client]) for place, client in enumerate(order, start=1)]


def _weights_panel(found: Found, row: str, column: str, names: Mapping[str, str]) -> Panel:
    cells = found.get((row, column), ())
    lists = cells[0]["first_round"] if cells else {}
    series = {
        title: _by_budget(lists, f"{name}_weights") for name, title in names.items() if f"{name}_weights" in lists
    }
    if lists:
        total = sum(lists["epsilon"])
        claimed = {**lists, "weiavg_weights": [epsilon / total for epsilon in lists["epsilon"]]}
        series["WeiAvg"] = _by_budget(claimed, "weiavg_weights")
    return Panel("Weights", "client, sorted by epsilon", "weight", series)


def _draw_figure6(found: Found) -> list[Panel]:
    return [_weights_panel(found, "excess", "dist2", {"oracle": "oracle", "rpca_200000": "Robust-HDP"})]


FIGURE6 = Experiment(
    name="noise_aware.figure6",
    title="Figure 6, weights from the first 200,000 parameters, CIFAR-10, Dist2, ResNet-18",
    shows=EXCESS,
    rows={"excess": Row("noise / least", "rpca_200000_excess", "one_round")},
    columns={"dist2": Column("Dist2")},
    cells={"one_round": Training(_words("cifar10"), _watched(rows=(200_000,)))},
    scales=ONE_ROUND,
    minutes={"paper": 10},
    decimals=3,
    draw=_draw_figure6,
    notes=("In the paper's figure Robust-HDP is almost on the oracle's weights.", _NOTE),
)

_COUNTS = (2_000, 20_000, 200_000, 2_000_000)


def _draw_figure7(found: Found) -> list[Panel]:
    names = {"oracle": "oracle", **{f"rpca_{count}": f"{count:,} parameters" for count in _COUNTS}}
    return [_weights_panel(found, f"rows{_COUNTS[0]}", "dist2", names)]


FIGURE7 = Experiment(
    name="noise_aware.figure7",
    title="Figure 7, weights from more and more parameters, CIFAR-10, Dist2, ResNet-18",
    shows=EXCESS,
    rows={f"rows{count}": Row(f"{count:,} parameters", f"rpca_{count}_excess", "one_round") for count in _COUNTS},
    columns={"dist2": Column("Dist2")},
    cells={"one_round": Training(_words("cifar10"), _watched(rows=_COUNTS))},
    scales=ONE_ROUND,
    minutes={"paper": 13},
    decimals=3,
    draw=_draw_figure7,
    notes=("The paper's numbers of parameters cannot be read off its figure.", _NOTE),
)


def _draw_figure9(found: Found) -> list[Panel]:
    panels = []
    for (_, column), cells in found.items():
        spectra = zip(("updates", "their low-rank part"), cells[0]["first_round"]["singular_values"], strict=True)
        series = {name: list(enumerate(values, start=1)) for name, values in spectra}
        panels.append(Panel(column.capitalize(), "number", "singular value", series))
    return panels


FIGURE9 = Experiment(
    name="noise_aware.figure9",
    title="Figure 9, singular values of the first round's updates and of their low-rank part, MNIST",
    shows=EXCESS,
    rows={"excess": Row("noise / least", "rpca_excess", "one_round")},
    columns={dist: DIST_COLUMNS[dist] for dist in ("dist3", "dist9")},
    cells={"one_round": Training(_words("mnist"), _watched("rpca", singular_values=True))},
    scales=ONE_ROUND,
    minutes={"paper": 0.4},
    decimals=3,
    draw=_draw_figure9,
    notes=("In the paper's figure the low-rank part's values concentrate at 0, most for Dist3.",),
)


def _draw_figure10(found: Found) -> list[Panel]:
    weights = _weights_panel(found, "excess", "dist8", {"oracle": "oracle", "rpca": "Robust-HDP"})
    cells = found.get(("excess", "dist8"), ())
    names = {"truth": "true", "rpca_variance": "estimated"}
    lists = cells[0]["first_round"] if cells else {}
    variances = {title: _by_budget(lists, name) for name, title in names.items() if name in lists}
    title = "Noise variance of updates, per parameter"
    return [weights, Panel(title, "client, sorted by epsilon", "variance / lr^2", variances, log="y")]


FIGURE10 = Experiment(
    name="noise_aware.figure10",
    title="Figure 10, weights and noise variances, true and estimated, MNIST, Dist8",
    shows=EXCESS,
    rows={"excess": Row("noise / least", "rpca_excess", "one_round")},
    columns={"dist8": DIST_COLUMNS["dist8"]},
    cells={"one_round": Training(_words("mnist"), _watched("rpca"))},
    scales=ONE_ROUND,
    minutes={"paper": 0.4},
    decimals=3,
    draw=_draw_figure10,
    notes=("In the paper's figure the client with the largest batch has the largest weight.", _NOTE),
)


# ---- Figures 12 and 13: 60 clients


def _anchors(published: bool) -> Callable[[str, Mapping[str, str]], Values]:
    def compute(column: str, departures: Mapping[str, str]) -> Values:
        from dpfl_lightning.config.published import BATCH_SIZES
        from experiments.papers.noise_aware.formulas import weights_of_60

        found = weights_of_60(BATCH_SIZES[60] if published else [128] * 60, column, accountant(departures))
        oracle = found["oracle_weights"]
        return {"client59": oracle[58], "largest_six": sum(sorted(oracle)[-6:]), **found}

    return compute


def _eight_labels_words(batch_size: str) -> Callable[[str, str, str], list[str]]:
    def words(row: str, column: str, scale: str) -> list[str]:
        return [*eight_labels("dpfedavg", column, scale, batch_size), *_PAPERS]

    return words


def _draw_60(found: Found) -> list[Panel]:
    series = {}
    for cells in found.values():
        values = cells[0]["values"]
        if "oracle_weights" in values:
            series["oracle"] = list(enumerate(values["oracle_weights"], start=1))
            series["WeiAvg"] = list(enumerate(values["weiavg_weights"], start=1))
        else:
            series["Robust-HDP"] = _by_budget(cells[0]["first_round"], "rpca_weights")
    return [Panel("Weights of 60 clients, Dist1", "client, sorted by epsilon", "weight", series)]


def _weights_of_60(number: int, setting: str, batch_size: str, of_59: float, of_six: float | None) -> Experiment:
    return Experiment(
        name=f"noise_aware.figure{number}",
        title=f"Figure {number}, weights of 60 clients with at most 8 labels, {setting}, MNIST, Dist1",
        shows="best weights by formula; " + EXCESS,
        rows={
            "client59": Row("best weight of client 59", "client59", "formulas"),
            "largest_six": Row("the six largest together", "largest_six", "formulas"),
            "excess": Row("Robust-HDP: noise / least", "rpca_excess", "one_round"),
        },
        columns={"dist1": Column("Dist1")},
        cells={
            "formulas": Computation(_anchors(published=batch_size != "128"), ("privacy.accountant",)),
            "one_round": Training(_eight_labels_words(batch_size), _watched("rpca")),
        },
        scales={"paper": "weights by formula, and one round of training with the noise of 200"},
        paper={"client59": (of_59,), "largest_six": (of_six,)},
        comparison=Comparison(
            0.02,
            special={("largest_six", "dist1"): Tolerance(0.05, "the paper says only that it is more than a half")},
        ),
        minutes={"paper": 0.5},
        decimals=3,
        draw=_draw_60,
        notes=("Client 59 has the second largest budget of the 60.", _NOTE),
    )


FIGURE12 = _weights_of_60(12, "batch 128", "128", 0.05, None)
FIGURE13 = _weights_of_60(13, "unequal batch sizes", "{name: published}", 0.18, 0.5)

MEASURED = (TABLE3_MEASURED, FIGURE6, FIGURE7, FIGURE9, FIGURE10, FIGURE12, FIGURE13)
