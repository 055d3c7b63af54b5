"""Strategies of this package on one task: clients with unequal privacy budgets. No paper has these tables.

One rule chooses the setting of every row on public records. All rows of a seed have the same data and initial model.
"""

from experiments.papers.declarations import by_column, entry, lazy, table

_PLACES = {"dist1": "dist1", "dist5": "dist5", "dist9": "dist9"}
TUNED = {"table": "leaderboard.tuning", "columns": {**_PLACES, "dirichlet": "groups", "groups": "groups"}}
_tuned = lazy("leaderboard.tuning:chosen", **TUNED)
_beyond = lazy("leaderboard.tuning:beyond", table="leaderboard.tuning")

_NO_PRIVACY: dict = {"privacy": None, "strategies": {"size_weighted": {}}}
#: name -> title, options, and three settings of the learning rate in steps of 2.5 around a guess
_METHODS: dict = {
    "fedavg": ("FedAvg without privacy", _NO_PRIVACY, (0.04, 0.1, 0.25)),
    "dpfedavg": ("DPFedAvg", {"strategies": {"size_weighted": {}}}, (0.08, 0.2, 0.5)),
    "weiavg": ("WeiAvg", {"strategies": {"epsilon_weighted": {}}}, (0.08, 0.2, 0.5)),
    "pfa": ("PFA", {"strategies": {"pfa": {}}}, (0.08, 0.2, 0.5)),
    "robust_hdp": (
        "Robust-HDP as printed",
        {"strategies": {"robust_hdp": {"estimator": "rpca", "row_choice": "head"}}},
        (0.08, 0.2, 0.5),
    ),
    "ours": ("noise_aware (ours)", {"strategies": {"noise_aware": {}}}, (0.08, 0.2, 0.5)),
    "groups": (
        "clustered and noise_aware (ours)",
        {"strategies": {"clustered": {}, "noise_aware": {}}},
        (0.08, 0.2, 0.5),
    ),
    # A client alone has the noise of one update, not of a mean; momentum of 0.9 makes steps ten times as long.
    "local": ("local", {"strategies": {"size_weighted": {}, "local": {}}}, (0.02, 0.05, 0.125)),
    "dpfedavg_momentum": (
        "DPFedAvg and server_momentum",
        {"strategies": {"size_weighted": {}, "server_momentum": {}}},
        (0.02, 0.05, 0.125),
    ),
}
# Adam divides by the size of the updates, so the rate of the server is tuned instead of the rate of the clients.
_FEDADAM = {"strategies": {"size_weighted": {}, "fedadam": {}}, "clients.learning_rate": 0.1}
# In a round the mean of the models moves by about a gradient / pull at any rate, so the pull is tuned instead.
_MR_MTL = {"strategies": {"size_weighted": {}, "mr_mtl": {}}, "clients.learning_rate": 0.05}

_MAIN_JOB = {"config": "conf/fmnist.yaml", "evaluation.every": 10}
_ROTATION = {"data.groups": {"name": "rotation", "sizes": [3, 5, 6, 6]}}
_AS_FIRST = {f"dist{number}": {"column": "dist1"} for number in (5, 9)}
_SAME = {column: {"cell": "dpfedavg"} for column in (*(f"dist{number}" for number in (1, 5, 9)), "groups")}
_SEEDS = {"small": [0, 1, 2]}


def _dist(number: int, **fields) -> dict:
    name = f"dist{number}"
    return entry(name, f"Dist{number}", {"privacy.epsilon.name": name}, **fields)


def _row(name: str, **fields) -> dict:
    title, options, _ = _METHODS[name]
    return entry(name, title, {"clients.learning_rate": _tuned, **options}, **fields)


_ROWS = [
    _row("fedavg", elsewhere=_AS_FIRST),
    _row("dpfedavg"),
    entry(
        "uniform",
        "uniform",
        {
            "strategies": {"uniform": {}},
            "clients.learning_rate": lambda row, column, scale: _tuned("dpfedavg", column, scale),
        },
        elsewhere=_SAME,
    ),
    *map(_row, ("weiavg", "pfa", "robust_hdp")),
    entry("fedadam", "FedAdam", {**_FEDADAM, "strategies.fedadam.learning_rate": _tuned}),
    entry("mr_mtl", "MR-MTL", {**_MR_MTL, "strategies.mr_mtl.pull": _tuned}),
    *map(_row, ("dpfedavg_momentum", "local", "ours", "groups")),
]

# Three settings a row, and one beyond the best of them if that is an end.
_TUNING_ROWS = [
    *(
        entry(
            f"{name}_{rate}",
            f"{title}, {rate}",
            {"clients.learning_rate": rate, **options},
            elsewhere=_AS_FIRST if name == "fedavg" else {},
        )
        for name, (title, options, rates) in _METHODS.items()
        for rate in rates
    ),
    *(
        entry(f"{name}_beyond", f"{title}, beyond the end", {"clients.learning_rate": _beyond, **options})
        for name, (title, options, _) in _METHODS.items()
        if name != "fedavg"
    ),
    *(
        entry(
            f"{name}_{setting}",
            f"{title}, beyond the end" if setting == "beyond" else f"{title}, {quantity} {setting}",
            {**options, key: _beyond if setting == "beyond" else setting},
        )
        for name, title, quantity, options, key, settings in (
            ("fedadam", "FedAdam", "server's rate", _FEDADAM, "strategies.fedadam.learning_rate", (0.004, 0.01, 0.025)),
            ("mr_mtl", "MR-MTL", "pull", _MR_MTL, "strategies.mr_mtl.pull", (0.2, 0.5, 1.25)),
        )
        for setting in (*settings, "beyond")
    ),
]

TABLES = [
    table(
        "leaderboard.tuning",
        title="Settings of the leaderboard, on public records alone",
        shows="mean accuracy of the clients, %, who draw from 10,000 public records, each scored on 2,000 others like "
        "its own",
        rows=_TUNING_ROWS,
        columns=[
            _dist(1, seeds=_SEEDS),
            _dist(5, seeds=_SEEDS),
            _dist(9),
            entry("groups", "four groups, Dist1", _ROTATION, seeds=_SEEDS),
        ],
        # The budget of 20 rounds is kept in reserve: noise calibrated for ten rounds is smaller, and rates that are
        # best beside it would be too high for 30.
        options={
            **_MAIN_JOB,
            "rounds": 10,
            "privacy.reserve_rounds": 20,
            "data.use_public": True,
            "data.partition.name": "overlapping",
            "data.test_per_client": 2000,
        },
        scales={"small": "10 rounds, with the noise of 30"},
        minutes={"small": 1.5},
        summary="leaderboard.tuning:choices",
        notes=[
            "No private record takes part. Dirichlet 0.3 has the settings of four groups. uniform has the rate of "
            "DPFedAvg, which it equals where all clients have as many records."
        ],
    ),
    table(
        "leaderboard.accuracy",
        title="Leaderboard, Fashion-MNIST, 20 clients",
        shows="mean over the clients of the accuracy of the client's model on official test records that are "
        "distributed like its own records, %",
        rows=_ROWS,
        columns=[
            *map(_dist, (1, 5, 9)),
            entry(
                "dirichlet",
                "Dirichlet 0.3",
                {"data.records_per_client": None, "data.partition.name": "dirichlet", "data.partition.alpha": 0.3},
            ),
            entry("groups", "four groups", _ROTATION),
        ],
        options={**_MAIN_JOB, "data.test_per_client": by_column({"dirichlet": 1000}, 10000)},
        scales={"small": "30 rounds"},
        seeds=_SEEDS,
        minutes={"small": 4},
        ours="ours",
        rivals=[
            "dpfedavg",
            "uniform",
            "weiavg",
            "pfa",
            "robust_hdp",
            "fedadam",
            "mr_mtl",
            "local",
            "dpfedavg_momentum",
        ],
        notes=[
            "In the columns Dist every client is scored on the whole official test set, with four groups on the whole "
            "set, rotated like its images, and with Dirichlet 0.3 on 1,000 draws with the shares of its classes.",
            "The columns Dirichlet 0.3 and four groups have the budgets of Dist1.",
            "FedAvg without privacy has no budget, so its cells of Dist1 stand in all columns Dist. uniform equals "
            "DPFedAvg where all clients have as many records.",
        ],
    ),
]
