"""What the paper does not show: selection beside weights by noise and beside groups of clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.papers.experiment import Column, Experiment, Row, Training, as_words

if TYPE_CHECKING:
    from experiments.papers.recorder import Recorder

_EQUAL, _BIASED = "uniform_selection: {clients_per_round: 7}", "biased_selection: {clients_per_round: 7}"
#: row of cells -> what it is called, and strategies
_COMPOSED = {
    "uniform": ("equal quotas", _EQUAL),
    "biased": ("+ biased selection", _BIASED),
    "biased_noise": ("+ biased selection, weights by noise", f"noise_aware: {{}}, {_BIASED}"),
    "all": ("+ biased selection, weights by noise, clusters", f"noise_aware: {{}}, clustered: {{}}, {_BIASED}"),
    "noise": ("+ weights by noise alone", f"noise_aware: {{}}, {_EQUAL}"),
    "clusters": ("+ clusters alone", f"clustered: {{}}, {_EQUAL}"),
    "clusters_biased": ("+ clusters, biased selection", f"clustered: {{}}, {_BIASED}"),
}
_SHOWN = {"all": "accuracy", "worst": "accuracy_worst", "right_cluster": "clustering_accuracy"}


def _group_recorder(row: str, column: str) -> Recorder:
    from experiments.papers.clustered.recorder import GroupRecorder

    return GroupRecorder()


def _composed_words(row: str, column: str, scale: str) -> list[str]:
    changed = {"strategies": f"{{{_COMPOSED[row][1]}}}", "privacy.epsilon": _BUDGETS[column][1]}
    return ["--config", "conf/composed_selection.yaml", *as_words(changed)]


_BUDGETS = {
    "unequal": ("epsilon 1.5 to 10", "{name: uniform, low: 1.5, high: 10}"),
    "small": ("epsilon 1 to 3", "{name: uniform, low: 1, high: 3}"),
}
COMPOSED = Experiment(
    name="selection.composed",
    title="Selection, weights by noise and groups of clients in one run: 21 clients in three groups, 7 in a round",
    shows="accuracy on each client's own test records, %; clients in the right cluster in the last round, %",
    rows={
        f"{name}_{key}": Row(f"{title}: {key.replace('_', ' ')}", value, name)
        for name, (title, _) in _COMPOSED.items()
        for key, value in _SHOWN.items()
        if key != "right_cluster" or "clustered" in _COMPOSED[name][1]
    },
    columns={name: Column(title) for name, (title, _) in _BUDGETS.items()},
    cells=dict.fromkeys(_COMPOSED, Training(_composed_words, _group_recorder)),
    scales={"small": "40 rounds of conf/composed_selection.yaml"},
    seeds={"small": (0, 1, 2)},
    minutes={"small": 5},
    notes=(
        "No paper combines the three. All rows have the same clients, records, budgets and learning rate; what is not "
        "named is equal.",
        "Images are turned by 0, 90 and 180 degrees, and one model for all must serve three kinds of clients.",
    ),
)

BEYOND = (COMPOSED,)
