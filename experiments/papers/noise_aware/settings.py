"""The paper's methods, learning rates and data as arguments of `fit`."""

from __future__ import annotations

from experiments.papers.experiment import Column, Row

DISTS = tuple(f"dist{number}" for number in range(1, 10))
DIST_COLUMNS = {dist: Column(dist.capitalize()) for dist in DISTS}

#: row -> what the table calls it, and the strategy. PFA and Robust-HDP are as in the paper's released code.
METHODS = {
    "weiavg": ("WeiAvg", "{epsilon_weighted: {}}"),
    "pfa": ("PFA", "{pfa: {variant: hdpfl}}"),
    "dpfedavg": ("DPFedAvg", "{size_weighted: {}}"),
    "min_eps": ("minimum epsilon", "{minimum_epsilon: {}}"),
    "robust_hdp": (
        "Robust-HDP",
        "{noise_aware: {estimator: rpca, objective: min_variance, reestimate_every: 0, row_choice: head}}",
    ),
    "ours": ("noise_aware, our default", "{noise_aware: {}}"),
}
ROWS = {name: Row(title) for name, (title, _) in METHODS.items()}
ROWS_WITHOUT_MINIMUM = {name: row for name, row in ROWS.items() if name != "min_eps"}

SMALL_ROUNDS, PAPER_ROUNDS = 60, 200
SCALES = {
    "small": "60 rounds with noise calibrated for them and learning rates times 200 / 60, so that signal and noise of "
    "the whole run are nearly those of the paper's 200 rounds",
    "paper": "200 rounds, as in the paper",
}

#: Tables 8 to 11: data -> row -> learning rate for Dist1 ... Dist9. What the paper does not list takes a neighbour's.
# fmt: off
LEARNING_RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "mnist": {
        "weiavg":     (1e-2, 5e-3, 1e-2, 5e-3, 5e-3, 1e-3, 1e-3, 1e-3, 1e-3),
        "pfa":        (5e-3, 5e-3, 5e-3, 5e-3, 5e-3, 1e-3, 1e-3, 1e-3, 5e-4),
        "dpfedavg":   (5e-3, 1e-3, 1e-3, 1e-3, 1e-3, 5e-4, 1e-3, 1e-3, 1e-3),
        "min_eps":    (5e-4, 5e-4, 5e-4, 5e-4, 1e-3, 1e-4, 1e-3, 5e-4, 1e-3),
        "robust_hdp": (1e-2, 1e-2, 1e-2, 1e-2, 5e-3, 2e-3, 2e-3, 2e-3, 2e-3),
    },
    "fashion_mnist": {
        "weiavg":     (5e-3, 5e-3, 5e-3, 5e-3, 2e-3, 5e-4, 5e-4, 5e-4, 5e-4),
        "pfa":        (2e-3, 2e-3, 5e-3, 5e-3, 5e-3, 5e-3, 2e-3, 1e-3, 1e-3),
        "dpfedavg":   (2e-3, 1e-3, 1e-3, 1e-3, 1e-3, 5e-4, 5e-4, 5e-4, 5e-4),
        "min_eps":    (1e-3, 5e-4, 5e-4, 5e-4, 5e-4, 1e-4, 5e-4, 5e-4, 5e-4),
        "robust_hdp": (5e-3, 5e-3, 5e-3, 5e-3, 5e-3, 1e-3, 1e-3, 1e-3, 1e-3),
    },
    "cifar10": {
        "weiavg":     (2e-3, 1e-3, 1e-3, 5e-4, 5e-4, 2e-4, 2e-4, 2e-4, 2e-4),
        "pfa":        (2e-3, 2e-3, 2e-3, 2e-3, 2e-3, 1e-3, 5e-4, 5e-4, 2e-4),
        "dpfedavg":   (1e-3, 5e-4, 2e-4, 2e-4, 2e-4, 1e-4, 1e-4, 5e-5, 1e-4),
        "min_eps":    (2e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-4, 5e-4, 2e-4, 2e-4),
        "robust_hdp": (2e-3, 2e-3, 2e-3, 2e-3, 2e-3, 5e-4, 1e-3, 2e-4, 2e-4),
    },
    "cifar100": {
        "weiavg":     (1e-3, 1e-3, 1e-3, 5e-4, 5e-4, 2e-4, 2e-4, 2e-4, 2e-4),
        "pfa":        (2e-3, 2e-3, 2e-3, 1e-3, 1e-3, 5e-4, 2e-4, 2e-4, 1e-4),
        "dpfedavg":   (5e-4, 5e-4, 1e-4, 1e-4, 1e-4, 5e-5, 5e-5, 2e-5, 2e-5),
        "min_eps":    (2e-4, 2e-4, 1e-4, 1e-4, 1e-4, 5e-5, 5e-5, 2e-5, 2e-5),
        "robust_hdp": (2e-3, 2e-3, 2e-3, 2e-3, 2e-3, 1e-3, 1e-3, 1e-3, 1e-3),
    },
}
# fmt: on


def learning_rate(data: str, row: str, dist: str, scale: str) -> str:
    """The paper's choice as text; our row takes Robust-HDP's.

    The noise of T rounds has a multiplier ~ sqrt(T): with a learning rate ~ 1 / T neither the path nor the noise of the
    whole run depends on T.
    """
    rate = LEARNING_RATES[data]["robust_hdp" if row == "ours" else row][DISTS.index(dist)]
    return f"{rate * (PAPER_ROUNDS / SMALL_ROUNDS if scale == 'small' else 1):.4g}"


CONF = ["--config", "conf/fmnist_paper.yaml"]
#: what differs from that configuration: the data and its net, and how it is dealt out to 20 clients
DATA: dict[str, list[str]] = {
    "fashion_mnist": [],
    "mnist": ["--data.name", "mnist"],
    "cifar10": ["--data.name", "cifar10", "--data.held_out_per_client", "0", "--model.name", "resnet18"],
}
STRATIFIED = ["--data.records_per_client", "2500", "--data.partition.name", "stratified"]
PARTS: dict[str, list[str]] = {"fashion_mnist": [], "mnist": [], "cifar10": STRATIFIED}


def words(
    data: str, row: str, dist: str, scale: str, parts: list[str] | None = None, budget: list[str] | None = None
) -> list[str]:
    """A run of the main body: 20 clients, published budgets and batch sizes, unless told otherwise.

    Args:
        data: a key of `DATA`.
        row: of `METHODS`.
        dist: whose learning rate is taken, and whose budgets unless there are others.
        scale: small or paper.
        parts: how the data is dealt out.
        budget: the option with other budgets.
    """
    return [
        *(*CONF, *rounds(scale), *DATA[data], *(PARTS[data] if parts is None else parts)),
        *(["--privacy.epsilon.name", dist] if budget is None else budget),
        *method(row),
        *("--clients.learning_rate", learning_rate(data, row, dist, scale)),
    ]


def rounds(scale: str) -> list[str]:
    """The configuration has the paper's; accuracy is looked at every five."""
    return [*(["--rounds", str(SMALL_ROUNDS)] if scale == "small" else []), "--evaluation.every", "5"]


def method(row: str) -> list[str]:
    """The strategy of a row."""
    return ["--strategies", METHODS[row][1]]
