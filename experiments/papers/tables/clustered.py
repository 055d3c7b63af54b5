"""Tables of Malekmohammadi, Taik and Farnadi (2024), "Mitigating Disparate Impact of Differential Privacy in Federated
Learning through Robust Clustering"; revised: "A Provably Robust Algorithm for Differentially Private Clustered
Federated Learning".
"""

import math

from experiments.papers.declarations import by_scale, entry, lazy, named, table, with_lines
from experiments.papers.experiment import Comparison

#: name -> title and strategies
_METHODS: dict = {
    "dpfedavg": ("DPFedAvg", {"size_weighted": {}}),
    "ifca": ("f-CDPFL", {"ifca": {"num_clusters": 4}}),
    "kmeans": ("KM-CDPFL", {"kmeans_clusters": {"num_clusters": 4}}),
    "ours": ("clustered, our default", {"clustered": {}}),
    "paper": (
        "RC-DPFL",
        {
            "clustered": {
                "num_clusters": 4,
                "mixture": "paper",
                "first_round_noise_multiplier": "same",
                "selection": "paper_argmin",
                "reuse_first_round": False,
            }
        },
    ),
    "oracle": ("Oracle-CDPFL", {"oracle_clusters": {}}),
}
_WITH_ARGMIN = _METHODS | {
    "ours_argmin": ("clustered, choices without noise", {"clustered": {"selection": "paper_argmin"}}),
    "ifca_argmin": ("f-CDPFL, choices without noise", {"ifca": {"num_clusters": 4, "selection": "paper_argmin"}}),
}
_ROWS = [entry(name, title, {"strategies": strategies}) for name, (title, strategies) in _WITH_ARGMIN.items()]
_BUDGETS = [
    entry(f"eps{epsilon}", f"epsilon {epsilon}", {"privacy.epsilon": epsilon}, arguments={"epsilon": epsilon})
    for epsilon in (10, 5, 4, 3, 2)
]
_TRAINED_BUDGETS = [budget for budget in _BUDGETS if budget["name"] in ("eps5", "eps2")]


def _learning_rate(row: str, column: str, scale: str) -> float:
    """The rate that `clustered.tuning` chooses for a method on public records; others have the middle one.

    The noise of T steps has a multiplier ~ sqrt(T): with a learning rate ~ 1 / T neither the path nor the noise of the
    whole run depends on T.
    """
    steps = {"small": 60 * math.ceil(2285 / 32), "paper": 200 * math.ceil(8000 / 32)}
    method = row.removesuffix("_argmin")
    chosen = lazy("tuning:chosen", table="clustered.tuning")
    rate = chosen(method, "eps5", "small") if method in _METHODS else 0.1
    return float(f"{rate * steps['small'] / steps[scale]:.4g}")


_RUN = {
    "privacy.accountant": "rdp",
    "clients.count": 21,
    "clients.batch_size": 32,
    "data.test_per_client": 1666,
    "evaluation.every": 5,
    "data.partition.name": by_scale(paper="overlapping"),
    "rounds": by_scale(small=60, paper=200),
}
_ROTATED = {
    "data.groups": {"name": "rotation", "sizes": [3, 6, 6, 6]},
    "privacy.clip_norm": 1,
    "data.public_records": by_scale(small=12000),
    "data.records_per_client": by_scale(small=2285, paper=8000),
    "clients.learning_rate": _learning_rate,
}
_FASHION = {**_ROTATED, **_RUN}
_FIRST_BATCH = {**_FASHION, "privacy.epsilon": 5, "privacy.delta": 1e-4, "strategies": {"clustered": {}}}

_SCALES = {
    "small": "60 rounds with noise calibrated for them, and disjoint records; in the paper 200, and overlapping ones",
    "paper": "200 rounds, and clients' records overlap, as in the paper",
}
_SEEDS = {"small": [0, 1, 2], "paper": [0, 1, 2]}
_MINUTES = {"small": 9, "paper": 95}
_COMPUTED: dict = {"scales": {"paper": "computed for 6,600 records, batch 32, 200 rounds, delta 1e-4"}, "decimals": 3}

TABLES = [
    table(
        "clustered.table5",
        title="Table 5, Fashion-MNIST, rotated images: mean accuracy of all clients, of the majority and of the "
        "minority",
        shows="accuracy on each client's test records, %; the minority are 3 of 21 clients",
        rows=with_lines(
            _ROWS,
            [
                entry("all", ": all", value="accuracy"),
                entry("majority", ": majority", value="accuracy_majority"),
                entry("minority", ": minority", value="accuracy_minority"),
            ],
        ),
        columns=_TRAINED_BUDGETS,
        options=_FASHION,
        recorder="clustered.recorder:GroupRecorder",
        scales=_SCALES,
        paper={
            "dpfedavg_all": [62.22, 59.78],
            "dpfedavg_majority": [65.86, 62.96],
            "dpfedavg_minority": [41.61, 43.23],
            "ifca_all": [74.37, 70.42],
            "ifca_majority": [73.43, 67.35],
            "ifca_minority": [73.43, 69.88],
            "kmeans_all": [57.65, 53.55],
            "kmeans_majority": [58.75, 58.3],
            "kmeans_minority": [31.72, 19.7],
            "paper_all": [78.15, 74.84],
            "paper_majority": [78.41, 74.93],
            "paper_minority": [77.23, 73.29],
            "oracle_all": [78.44, 75.11],
            "oracle_majority": [78.42, 75.21],
            "oracle_minority": [78.35, 75],
        },
        comparison=Comparison(
            3,
            better=dict.fromkeys(
                [f"{row}_{line}" for row in _WITH_ARGMIN for line in ("all", "majority", "minority")], "higher"
            ),
        ),
        seeds=_SEEDS,
        minutes=_MINUTES,
        notes=[
            "Learning rates are each method's best of clustered.tuning, in proportion to 1 / steps.",
            "A choice of models without noise, as in RC-DPFL, makes the real epsilon infinite: that of the column is "
            "then only for the training noise.",
            "The paper's All can be 4.5 points off the mean of its Maj and Min: compare orderings and large gaps.",
        ],
    ),
    table(
        "clustered.table6",
        title="Table 6, Fashion-MNIST, rotated images: fairness of the runs of Table 5",
        shows="accuracy of the worst client in %, best - worst in points",
        rows=[
            {**row, "experiment": "clustered.table5"}
            for row in with_lines(
                _ROWS,
                [
                    entry("worst", ": worst client", value="accuracy_worst"),
                    entry("gap", ": best - worst", value="accuracy_gap"),
                ],
            )
        ],
        columns=_TRAINED_BUDGETS,
        scales=_SCALES,
        paper={
            "dpfedavg_worst": [40.69, 42.22],
            "dpfedavg_gap": [28.11, 25.12],
            "ifca_worst": [66.73, 64.93],
            "ifca_gap": [13.11, 11.08],
            "kmeans_worst": [12.41, 14.03],
            "kmeans_gap": [62.78, 57.91],
            "paper_worst": [75.16, 71.76],
            "paper_gap": [5.5, 5.66],
            "oracle_worst": [76.61, 72.71],
            "oracle_gap": [3.91, 4.75],
        },
        comparison=Comparison(
            3,
            better={
                f"{row}_{line}": better
                for row in _WITH_ARGMIN
                for line, better in {"worst": "higher", "gap": "lower"}.items()
            },
        ),
        seeds=_SEEDS,
        notes=["Test records are a sample: 21 equal clients with 80 % right answers are still 3.4 points apart."],
    ),
    table(
        "clustered.tuning",
        title="Learning rates, Fashion-MNIST, rotated images, on public records alone",
        shows="mean accuracy of the clients, %, who draw from 10,000 public records, each scored on 1,666 others like "
        "its own",
        rows=[
            *(
                entry(f"{name}_{rate}", f"{title}, {rate}", {"strategies": strategies, "clients.learning_rate": rate})
                for name, (title, strategies) in _METHODS.items()
                for rate in (0.04, 0.1, 0.25)
            ),
            *(
                entry(
                    f"{name}_beyond",
                    f"{title}, beyond the end",
                    {
                        "strategies": strategies,
                        "clients.learning_rate": lazy("tuning:beyond", table="clustered.tuning"),
                    },
                )
                for name, (title, strategies) in _METHODS.items()
            ),
        ],
        columns=[entry("eps5", "epsilon 5", {"privacy.epsilon": 5})],
        options={
            **_FASHION,
            "data.use_public": True,
            "data.partition.name": "overlapping",
            "rounds": 10,
            "privacy.reserve_rounds": 50,
        },
        recorder="clustered.recorder:GroupRecorder",
        scales={"small": "10 rounds, with the noise of 60"},
        minutes={"small": 1.5},
        summary="tuning:choices",
        notes=["No private record takes part. All budgets have these rates."],
    ),
    table(
        "clustered.first_updates",
        title="Groups found from the first full batches of real clients, Fashion-MNIST, rotated images",
        shows="share of seeds in which the groups of all 21 clients are right. Columns: records a client",
        study="clustered.first_updates:found",
        arguments={"epsilons": [5, 2], "methods": ["ours", "paper"]},
        rows=[
            entry(name, f"{title}, epsilon {epsilon}{words}", value=name, cell="all")
            for method, title, value, words in (
                ("ours", "clustered, our default", "perfect", ""),
                ("ours", "clustered, our default", "probability", ": probability of the groups as reported"),
                ("ours", "clustered, our default", "groups", ": number of groups"),
                ("paper", "RC-DPFL, given 4 groups", "perfect", ""),
            )
            for epsilon in (5, 2)
            for name in [f"{method}_eps{epsilon}_{value}"]
        ],
        columns=[
            entry(f"n{count}", f"{count:,}", {"data.records_per_client": count}) for count in (500, 1000, 1500, 2285)
        ],
        options=_FIRST_BATCH,
        scales={"small": "one full batch, with the noise of a plan of 60 rounds, delta 1e-4"},
        seeds={"small": list(range(10))},
        minutes={"small": 1},
        decimals=2,
    ),
    table(
        "clustered.false_alarms",
        title="Groups found where there are none, from the first full batches of real clients, Fashion-MNIST, epsilon "
        "5",
        shows="mean over 25 draws of clients and initial models",
        study="clustered.first_updates:found",
        arguments={"epsilons": [5], "methods": ["ours"]},
        rows=[entry(name, name, value=f"ours_eps5_{name}", cell="all") for name in ("groups", "probability")],
        columns=[
            entry("iid", "IID", {"data.records_per_client": 1142}),
            *(
                entry(
                    f"dirichlet{alpha:g}",
                    f"Dirichlet {alpha:g}",
                    {"data.records_per_client": None, "data.partition": {"name": "dirichlet", "alpha": alpha}},
                )
                for alpha in (0.3, 1, 10)
            ),
        ],
        options={
            **_FIRST_BATCH,
            "data.groups": None,
            "data.public_records": 36000,
            "data.partition.name": "iid",
            "data.test_per_client": 100,
        },
        scales={"small": "24,000 records; one full batch, with the noise of a plan of 60 rounds, delta 1e-4"},
        seeds={"small": list(range(25))},
        minutes={"small": 0.5},
        decimals=2,
        notes=["More than one group is a false alarm."],
    ),
    table(
        "clustered.full_batch_cost",
        title="What a first round of all records costs the others",
        shows="noise multipliers of the rounds after the first one; epsilons of that one round",
        compute="clustered.formulas:full_batch_cost",
        rows=named(
            {
                "without": "z without such a round",
                "same": "z, the same in all rounds (the papers')",
                "increase": "more by, %",
                "own3": "z with 3 in the first round",
                "own5": "z with 5 in the first round",
                "alone": "epsilon of the first round alone at the same z",
                "alone5": "epsilon of the first round alone at 5",
            },
            cell="formulas",
        ),
        columns=_BUDGETS,
        notes=[
            "The papers say that z changes very little. A separate noise for the first round leaves nearly the whole "
            "budget to the others. The accountant is rdp."
        ],
        **_COMPUTED,
    ),
    table(
        "clustered.selection_cost",
        title="What it costs to choose models by loss with privacy",
        shows="noise multipliers of training beside a full-batch round of the same noise; epsilons of choices alone",
        compute="clustered.formulas:selection_cost",
        rows=named(
            {
                "free": "z, choices not paid for (the papers')",
                "joint": "z, 20 choices composed with training (ours)",
                "joint_increase": "more by, %",
                "every_round": "z, 100 choices composed with training",
                "alone": "epsilon of 20 choices alone",
                "alone_every_round": "epsilon of 100 choices alone",
            },
            cell="formulas",
        ),
        columns=_BUDGETS,
        notes=[
            "One choice has range 0.03 epsilon. The revised paper says that a choice without noise costs nothing, "
            "which is no bound for the worst case. The accountant is rdp."
        ],
        **_COMPUTED,
    ),
]
