"""What the paper does not compare: every method at its own best learning rate, which public records choose.

The setting is that of conf/fmnist.yaml: 30 rounds, clip norm 1, today's accountant, 12,000 public records.
"""

from __future__ import annotations

from experiments.papers.experiment import Column, Experiment, Row, Training
from experiments.papers.noise_aware.settings import ROWS, method
from experiments.papers.noise_aware.training_figures import claim

#: rivals and ours: what weighs by claimed budgets, the paper's method, and the default here
_NAMES = ("weiavg", "robust_hdp", "ours")
_COLUMNS = {dist: Column(dist.capitalize()) for dist in ("dist1", "dist7")}
RATES = ("0.02", "0.05", "0.1", "0.2", "0.4")
_CONF = ["--config", "conf/fmnist.yaml", "--evaluation.every", "5"]
#: clients that draw from the public records, of which the last 2,000 are for scoring
_PUBLIC = ["--data.use_public", "true", "--data.partition.name", "overlapping"]

#: method -> column -> the least learning rate within a standard error of the best in the cells of `TUNING`, which on
#: 2,000 records is 0.9 points; a guess where there are none
CHOSEN: dict[str, dict[str, str]] = {
    "weiavg": {"dist1": "0.1", "dist7": "0.05"},
    "robust_hdp": {"dist1": "0.1", "dist7": "0.05"},
    "ours": {"dist1": "0.2", "dist7": "0.05"},
}


def _run(name: str, column: str, rate: str) -> list[str]:
    return [*_CONF, "--privacy.epsilon.name", column, *method(name), "--clients.learning_rate", rate]


def _tuning_words(row: str, column: str, scale: str) -> list[str]:
    name, _, rate = row.rpartition("_")
    return [*_run(name, column, rate), *_PUBLIC]


def _tuned_words(row: str, column: str, scale: str) -> list[str]:
    return _run(row, column, CHOSEN[row][column])


_TUNING_ROWS = {
    f"{name}_{rate}": Row(f"{ROWS[name].title}, {rate}", "test_accuracy") for name in _NAMES for rate in RATES
}
TUNING = Experiment(
    name="noise_aware.tuning",
    title="Learning rates, Fashion-MNIST, on public records alone",
    shows="accuracy on 2,000 public records, %; clients draw theirs from 10,000 others",
    rows=_TUNING_ROWS,
    columns=_COLUMNS,
    cells=dict.fromkeys(_TUNING_ROWS, Training(_tuning_words)),
    scales={"small": "30 rounds"},
    minutes={"small": 3},
    notes=("No private record takes part. A rate is left out where its neighbours had settled the choice.",),
)

TUNED = Experiment(
    name="noise_aware.tuned",
    title="Fashion-MNIST, every method at the learning rate that noise_aware.tuning chose for it",
    shows="accuracy on the official test set, %",
    rows={name: Row(ROWS[name].title, "test_accuracy") for name in _NAMES},
    columns=_COLUMNS,
    cells=dict.fromkeys(_NAMES, Training(_tuned_words)),
    scales={"small": "30 rounds"},
    seeds={"small": (0, 1, 2)},
    minutes={"small": 3},
    notes=("WeiAvg believes the budgets that clients claim; the other two believe nothing.",),
)


# ---- one client claims more than its budget, on data that is at hand


def _claim_words(row: str, column: str, scale: str) -> list[str]:
    return [*_run(row, "dist5", "0.1"), *claim(column)]


FALSIFIED = Experiment(
    name="noise_aware.falsified",
    title="Fashion-MNIST, Dist5, a client of budget 0.95 that claims more",
    shows="accuracy on the official test set, %",
    rows={name: Row(ROWS[name].title, "test_accuracy") for name in ("weiavg", "ours")},
    columns={f"claim{number}": Column(f"claims {number}") for number in ("0.95", "10", "100")},
    cells=dict.fromkeys(("weiavg", "ours"), Training(_claim_words)),
    scales={"small": "30 rounds"},
    minutes={"small": 3},
    notes=(
        "A claim changes what the server believes, not the client's noise. noise_aware believes no claim: its columns "
        "differ by fresh noise alone.",
    ),
)

BEYOND = (TUNING, TUNED, FALSIFIED)
