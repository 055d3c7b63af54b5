"""Tables of Malekmohammadi, Taik and Farnadi (2024), "Mitigating Disparate Impact of Differential Privacy in Federated
Learning through Robust Clustering"; revised: "A Provably Robust Algorithm for Differentially Private Clustered
Federated Learning"; and of what they leave out.
"""

import math

from experiments.papers.declarations import by_scale, entry, lazy, named, table, with_lines
from experiments.papers.experiment import Comparison, Reference, Tolerance

_RATES = (
    "Learning rates, in proportion to 1 / steps: each method's best of clustered.tuning for MNIST and Fashion-MNIST, "
    "for which the papers give none, else 0.1 for 60 rounds; the revised paper's 5e-4 for 200 rounds of CIFAR-10."
)
_SELECTION = (
    "f-CDPFL and our default choose models by private selections, which the budget covers. A choice without noise, as "
    "in RC-DPFL, makes the real epsilon infinite: that of the column is then only for the training noise."
)
_FIRST_NOISE = "RC-DPFL has a larger noise multiplier in all rounds, as its first one takes all records."
_NOT_MEANS = "The paper's All can be 4.5 points off the mean of its Maj and Min: compare orderings and large gaps."
_GAPS = "F_acc and F_loss are the largest differences between clients in what they lose against clustered.reference."
_SAMPLE = "Test records are a sample: 21 equal clients with 80 % right answers are still 3.4 points apart."
_RDP = "The accountant is rdp; with --privacy.accountant pld, the default of a run, less noise is needed."
_BAR = (
    "The papers call a separation of 3 complete, which holds for known means. 21 clients need 1.2 to 1.5 times the "
    "fourth root of the number of parameters, 16 to 20 for 28,938, if groups are at equal distances; nested ones need "
    "more."
)

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


def _rows(methods: dict) -> list[dict]:
    return [entry(name, title, {"strategies": strategies}) for name, (title, strategies) in methods.items()]


_BUDGETS = [
    entry(
        f"eps{epsilon}", f"epsilon {epsilon}", {"privacy.epsilon": epsilon}, x=epsilon, arguments={"epsilon": epsilon}
    )
    for epsilon in (10, 5, 4, 3, 2)
]


def _learning_rate(row: str, column: str, scale: str) -> float:
    """The rate that `clustered.tuning` chooses for a method on public records; others have the middle one.

    The noise of T steps has a multiplier ~ sqrt(T): with a learning rate ~ 1 / T neither the path nor the noise of the
    whole run depends on T.
    """
    steps = {"small": 60 * math.ceil(2285 / 32), "paper": 200 * math.ceil(8000 / 32)}
    method = row.removesuffix("_argmin")
    chosen = lazy("leaderboard.tuning:chosen", table="clustered.tuning")
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

_ALL = entry("all", ": all", value="accuracy")
_MAJORITY = entry("majority", ": majority", value="accuracy_majority")
_MINORITY = entry("minority", ": minority", value="accuracy_minority")
_WORST = entry("worst", ": worst", value="accuracy_worst")
_RIGHT_CLUSTER = entry("right_cluster", ": right cluster", value="clustering_accuracy")
_F_ACC = entry("f_acc", ": F_acc", value="fairness_gap_accuracy")
_GAP = entry("gap", ": best - worst", value="accuracy_gap")

_SCALES = {
    "small": "60 rounds with noise calibrated for them, and disjoint records; in the paper 200, and overlapping ones",
    "paper": "200 rounds, and clients' records overlap, as in the paper",
}
_SMALL = {"small": "60 rounds, disjoint records"}
_SEEDS = {"small": [0, 1, 2], "paper": [0, 1, 2]}
_REFERENCE = Reference("clustered.reference", "reference", "fashion_mnist", lazy("clustered.recorder:fairness"))
_LATER = (16, 32, 64, 128, 256, 512, 1024, 2048, 6600)
_FIRST_BATCHES = [
    entry(f"b{size}", f"first batch {size:,}", x=size, arguments={"first": size}) for size in (32, 128, 660, 2048, 6600)
]
_COMPUTED: dict = {"scales": {"paper": "computed for 6,600 records, batch 32, 200 rounds, delta 1e-4"}}
_SURFACE = {"paper": "computed for epsilon 5, 6,600 records, 200 rounds, delta 1e-4"}
_FORMULAS: dict = {"takes": ["privacy.accountant"], "decimals": 3}
_NOISE_ALONE = {"paper": "noise alone beside the groups"}
_FIRST_BATCH = {**_FASHION, "privacy.epsilon": 5, "privacy.delta": 1e-4, "strategies": {"clustered": {}}}

_REPRODUCED = [
    table(
        "clustered.table5",
        title="Table 5, Fashion-MNIST, turned images: mean accuracy of all clients, of the majority and of the "
        "minority",
        shows="accuracy on each client's test records, %; the minority are 3 of 21 clients",
        rows=with_lines(_rows(_WITH_ARGMIN), [_ALL, _MAJORITY, _MINORITY]),
        columns=_BUDGETS,
        options=_FASHION,
        recorder="clustered.recorder:GroupRecorder",
        scales=_SCALES,
        paper={
            "dpfedavg_all": [62.62, 62.22, 62.32, 59.58, 59.78],
            "dpfedavg_majority": [66.27, 65.86, 65.86, 62.9, 62.96],
            "dpfedavg_minority": [42.32, 41.61, 44.84, 38.15, 43.23],
            "ifca_all": [78.19, 74.37, 75.26, 70.1, 70.42],
            "ifca_majority": [76.12, 73.43, 72.48, 67.82, 67.35],
            "ifca_minority": [76.21, 73.43, 77.89, 69.85, 69.88],
            "kmeans_all": [60.17, 57.65, 57.34, 54.82, 53.55],
            "kmeans_majority": [57.79, 58.75, 63.22, 53.31, 58.3],
            "kmeans_minority": [59.81, 31.72, 15.95, 32.33, 19.7],
            "paper_all": [80.26, 78.15, 77.8, 74.04, 74.84],
            "paper_majority": [80.5, 78.41, 78.12, 75.11, 74.93],
            "paper_minority": [79.03, 77.23, 76.21, 69.35, 73.29],
            "oracle_all": [80.46, 78.44, 78.31, 75.19, 75.11],
            "oracle_majority": [80.76, 78.42, 78.31, 75.02, 75.21],
            "oracle_minority": [79.76, 78.35, 77.81, 75.33, 75],
        },
        comparison=Comparison(
            3,
            better=dict.fromkeys(
                [f"{row}_{line}" for row in _WITH_ARGMIN for line in ("all", "majority", "minority")], "higher"
            ),
        ),
        seeds=_SEEDS,
        minutes={"small": 9, "paper": 95},
        notes=[_RATES, _SELECTION, _FIRST_NOISE, _NOT_MEANS],
    ),
    table(
        "clustered.table6",
        title="Table 6, Fashion-MNIST, turned images: fairness of the runs of Table 5",
        shows="F_acc and best - worst in points, F_loss in nats, accuracy of the worst client in %",
        rows=[
            {**row, "experiment": "clustered.table5", "reference": _REFERENCE}
            for row in with_lines(
                _rows(_WITH_ARGMIN),
                [
                    _F_ACC,
                    entry("f_loss", ": F_loss, held-out records", value="fairness_gap_test_loss"),
                    {**_WORST, "title": ": worst client"},
                    _GAP,
                ],
            )
        ],
        columns=_BUDGETS,
        scales=_SCALES,
        paper={
            "dpfedavg_f_acc": [25.07, 24.86, 23.31, 26.53, 22.97],
            "dpfedavg_f_loss": [1.26, 1.02, 0.99, 0.83, 0.77],
            "dpfedavg_worst": [41.6, 40.69, 43.93, 37.3, 42.22],
            "dpfedavg_gap": [27.86, 28.11, 25.83, 29.58, 25.12],
            "ifca_f_acc": [11.59, 11.43, 12, 18.13, 12.87],
            "ifca_f_loss": [0.32, 0.33, 0.37, 0.42, 0.33],
            "ifca_worst": [72.31, 66.73, 70.61, 61.19, 64.93],
            "ifca_gap": [9.36, 13.11, 9.6, 15.08, 11.08],
            "kmeans_f_acc": [43.55, 59.2, 63.41, 48.46, 54.5],
            "kmeans_f_loss": [2.44, 3.36, 3.33, 1.89, 2.28],
            "kmeans_worst": [33.33, 12.41, 9.66, 21.03, 14.03],
            "kmeans_gap": [43.83, 62.78, 66.08, 51.4, 57.91],
            "paper_f_acc": [7.37, 7.25, 7.73, 10.55, 6.92],
            "paper_f_loss": [0.28, 0.24, 0.3, 0.22, 0.27],
            "paper_worst": [77.31, 75.16, 74.03, 67.66, 71.76],
            "paper_gap": [5.18, 5.5, 6.46, 9.21, 5.66],
            "oracle_f_acc": [7.37, 6.27, 6.5, 6.51, 6.55],
            "oracle_f_loss": [0.24, 0.24, 0.24, 0.2, 0.2],
            "oracle_worst": [77.7, 76.61, 75.98, 73.11, 72.71],
            "oracle_gap": [5.05, 3.91, 4.61, 4.08, 4.75],
        },
        comparison=Comparison(
            3,
            better={
                f"{row}_{line}": better
                for row in _WITH_ARGMIN
                for line, better in {"f_acc": "lower", "f_loss": "lower", "worst": "higher", "gap": "lower"}.items()
            },
            special={
                (f"{row}_f_loss", ""): Tolerance(None, "ours is of held-out records: training losses are private")
                for row in _WITH_ARGMIN
            },
        ),
        seeds=_SEEDS,
        notes=[_GAPS, _SAMPLE],
    ),
    table(
        "clustered.reference",
        title="Reference models: one net for each true group, trained without privacy on the records of its clients",
        shows="accuracy on each client's test records, %",
        rows=[
            entry("all", "all clients", cell="reference"),
            *(
                entry(f"group{group}", f"group {group}", value=f"accuracy_{group}", cell="reference")
                for group in range(4)
            ),
            entry("worst", "worst client", value="accuracy_worst", cell="reference"),
        ],
        columns=[entry("fashion_mnist", "Fashion-MNIST, turned images", {**_ROTATED, "clients.learning_rate": 0.05})],
        options={**_RUN, "privacy": None, "strategies": {"oracle_clusters": {}}},
        recorder="clustered.recorder:GroupRecorder",
        scales=_SCALES,
        seeds=_SEEDS,
        minutes={"small": 9, "paper": 95},
        notes=[
            "For evaluation only: FedAvg inside the true groups, at learning rate 0.05, without clipping and noise."
        ],
    ),
    table(
        "clustered.figure2",
        title="Figure 2 (Figure 4 of the revised paper), Fashion-MNIST, epsilon 5",
        shows="accuracy on each client's test records, %",
        rows=[{**row, "experiment": "clustered.table5", "reference": _REFERENCE} for row in _rows(_METHODS)],
        columns=named({"eps5": "epsilon 5"}),
        scales=_SCALES,
        seeds=_SEEDS,
        shown=False,
        draw="clustered.figures:groups_and_fairness",
    ),
    table(
        "clustered.figure3",
        title="Figure 3, accuracy of majority and minority over budgets, Fashion-MNIST",
        shows="accuracy on each client's test records, %",
        rows=[{**row, "experiment": "clustered.table5"} for row in _rows(_METHODS)],
        columns=_BUDGETS,
        scales=_SCALES,
        seeds=_SEEDS,
        shown=False,
        panels=[
            {"title": f"Fashion-MNIST: {group}", "x": "epsilon", "y": "accuracy, %", "value": f"accuracy_{group}"}
            for group in ("majority", "minority")
        ],
    ),
]

# The first round alone: groups that it shows.
_FIRST_ROUND = [
    table(
        "clustered.first_updates",
        title="Groups found from the first full batches of real clients, Fashion-MNIST, turned images",
        shows="share of seeds in which the groups of all 21 clients are right. Columns: records a client",
        study="clustered.first_updates:found",
        arguments={"epsilons": [5, 2], "methods": ["ours", "paper", "paper_auto"], "odd": True},
        rows=[
            entry(name, title, value=name, cell="all")
            for name, title in (
                *(
                    (f"{method}_eps{epsilon}_perfect", f"{method}, epsilon {epsilon}")
                    for method in ("ours", "paper", "paper_auto")
                    for epsilon in (5, 2)
                ),
                *(
                    (f"ours_eps{epsilon}_{value}", f"ours, epsilon {epsilon}: {value}")
                    for epsilon in (5, 2)
                    for value in ("probability", "groups")
                ),
                *(
                    (f"{client}_eps{epsilon}_{value}", f"{client}, epsilon {epsilon}: {value}")
                    for client in ("noisy", "few")
                    for epsilon in (5, 2)
                    for value in ("perfect", "others")
                ),
            )
        ],
        columns=[
            entry(f"n{count}", f"{count:,}", {"data.records_per_client": count}, x=count)
            for count in (500, 1000, 1500, 2285)
        ],
        options=_FIRST_BATCH,
        scales={"small": "one full batch, with the noise of a plan of 60 rounds, delta 1e-4"},
        seeds={"small": list(range(10))},
        minutes={"small": 1},
        decimals=2,
        notes=[
            "paper: the papers' mixture, given 4 groups; paper_auto: not given the number. noisy: one client has ten "
            "times the noise of the others; few: one client has a tenth of their records; others: the groups without "
            "this client. probability: that of the groups as reported."
        ],
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
            entry("iid", "alike", {"data.records_per_client": 1142}),
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
]

_BY_FORMULA = [
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
            "budget to the others.",
            _RDP,
        ],
        **_FORMULAS,
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
                "subtracted": "z, epsilon of 20 choices subtracted",
                "subtracted_increase": "more by, %",
                "every_round": "z, 100 choices composed with training",
                "alone": "epsilon of 20 choices alone",
                "alone_every_round": "epsilon of 100 choices alone",
            },
            cell="formulas",
        ),
        columns=_BUDGETS,
        paper={"joint_increase": [0, 0, 0, 0, 0]},
        notes=[
            "One choice has range 0.03 epsilon. The revised paper says that a choice without noise costs nothing, "
            "which is no bound for the worst case. The accountant is rdp."
        ],
        **_FORMULAS,
        **_COMPUTED,
    ),
    table(
        "clustered.figure5",
        title="Figure 5, noise by sample rate, one training of 200 epochs",
        shows="noise multiplier z for sample rate q, at delta 1e-4",
        compute="clustered.formulas:noise_by_sample_rate",
        rows=named({f"eps{epsilon}": f"epsilon {epsilon}" for epsilon in (2, 5, 10)}, cell="formulas"),
        columns=[
            entry(f"q{rate:g}", f"q {rate:g}", x=rate, arguments={"rate": rate})
            for rate in (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
        ],
        scales={"paper": "computed for 200 epochs"},
        panels=[{"title": "Noise multiplier by sample rate", "x": "sample rate q", "y": "noise multiplier z"}],
        notes=["The paper's values cannot be read off its figure: z grows more slowly than q.", _RDP],
        **{**_FORMULAS, "decimals": 2},
    ),
    table(
        "clustered.revised_figure3",
        title="Figure 3 of the revised paper, noise variance of updates by batch sizes, ResNet-18 of 11,181,642 "
        "parameters",
        shows="log10 of the noise variance of an update, all parameters together, at learning rate 5e-4 and clip norm "
        "3",
        compute="clustered.formulas:variances_by_batches",
        rows=named(
            {
                **{f"first_b{later}": f"first round, later batch {later}" for later in _LATER},
                **{f"later_b{later}": f"later round, later batch {later}" for later in _LATER},
                "tenfold": "variance with a tenth of the first batch / variance, not its log",
            },
            cell="formulas",
        ),
        columns=_FIRST_BATCHES,
        scales=_SURFACE,
        paper={"tenfold": [None, None, None, None, 1000]},
        comparison=Comparison(
            0.05,
            relative=True,
            special={
                ("tenfold", "b6600"): Tolerance(0.3, "the paper says about 1000, and z grows with the batch, too")
            },
        ),
        draw="clustered.figures:variances_by_batches",
        notes=["The first batch should be large, as it hardly raises later noise, and later ones small.", _RDP],
        **{**_FORMULAS, "decimals": 2},
    ),
    table(
        "clustered.revised_figure8",
        title="Figure 8 of the revised paper, noise multiplier by batch sizes",
        shows="noise multiplier z, the same in all rounds",
        compute="clustered.formulas:noise_by_batches",
        rows=named({f"b{later}": f"later batch {later}" for later in _LATER}, cell="formulas"),
        columns=_FIRST_BATCHES,
        scales=_SURFACE,
        draw="clustered.figures:noise_by_batches",
        notes=["The paper's appendix with this figure is not public.", _RDP],
        **_FORMULAS,
    ),
]

_SIMULATED = [
    table(
        "clustered.simulation",
        title="Simulated updates of 21 clients in groups of 3, 6, 6 and 6: which methods find the groups",
        shows="adjusted Rand index (1: the groups; 0: chance), least separation seen, number of groups found; mean of "
        "six draws. Columns: true separation, and number of parameters",
        compute="clustered.simulation:methods_at",
        rows=[
            entry(name, title, cell="all", series=series or None)
            for name, title, series in (
                ("raw_ari", "mixture of updates as they are: Rand index", "mixture as it is"),
                ("raw_separation", "its separation", ""),
                ("paper_ari", "the papers', two dimensions: Rand index", "the papers', 2-D"),
                ("paper_separation", "its separation", ""),
                ("paper_groups", "its number of groups out of 2 to 10", ""),
                ("ward_ari", "Ward's four groups: Rand index", "Ward"),
                ("ward_separation", "their separation without noise", ""),
                ("split_ari", "our default, number unknown: Rand index", "ours"),
                ("split_groups", "its number of groups", ""),
            )
        ],
        columns=[
            entry(
                f"p{size}_s{separation}",
                f"{separation} at {size:,}",
                x=separation,
                arguments={"num_params": size, "separation": separation},
            )
            for size, separations in ((28938, (0, 6, 10, 12, 15, 20, 25, 50)), (2000, (0, 6, 10, 25)))
            for separation in separations
        ],
        scales={"paper": "groups at equal distances, noise alone beside them"},
        panels=[
            {
                "title": "28,938 parameters",
                "x": "separation",
                "y": "adjusted Rand index",
                "rows": ".*_ari",
                "columns": "p28938_.*",
            }
        ],
        notes=[
            _BAR,
            "Without any separation a mixture finds 45 in all dimensions, the noise of means of six clients, and 1.1 "
            "to 1.3 in two.",
        ],
    ),
    table(
        "clustered.recovery",
        title="How often the number of groups is found, by separation, clients and parameters",
        shows="share of 40 draws with the right number, %, and mean adjusted Rand index. Columns: separation / fourth "
        "root of the number of parameters, of four groups at equal distances, or two pairs three times as far apart "
        "(nested)",
        compute="clustered.simulation:recovery",
        rows=with_lines(
            [
                *(
                    entry(f"ours_{size}", f"{size:,} parameters, 21 clients", arguments={"num_params": size})
                    for size in (2000, 28938, 11181642)
                ),
                entry(
                    "ours_28938_42",
                    "28,938 parameters, 42 clients",
                    arguments={"num_params": 28938, "sizes": [6, 12, 12, 12]},
                ),
            ],
            [entry("found", ": %", value="found"), entry("ari", ": Rand index", value="ari")],
        ),
        columns=[
            entry("none", "no groups", arguments={"ratio": 0.0}),
            *(
                entry(f"{kind}{ratio:g}", f"{kind} {ratio:g}", arguments={"ratio": ratio, **nested})
                for kind, nested in (("equal", {}), ("nested", {"nested": True}))
                for ratio in (0.8, 1.0, 1.2, 1.5)
            ),
        ],
        scales=_NOISE_ALONE,
        notes=["Without groups the right number is one.", _BAR],
    ),
    table(
        "clustered.numbers_of_groups",
        title="Two to ten groups at equal distances, 21 clients, 28,938 parameters, separation 1.5 times the fourth "
        "root",
        shows="share of 20 draws with all clients in the right group, %; mean probability as reported, %; membership "
        "of the least certain client",
        compute="clustered.simulation:numbers_of_groups",
        rows=named(
            {"right": "right groups", "probability": "reported probability", "least": "least membership"}, cell="all"
        ),
        columns=[entry(f"m{count}", f"{count} groups", x=count, arguments={"count": count}) for count in range(2, 11)],
        scales=_NOISE_ALONE,
        notes=["Ten groups of 21 clients have two or three members each."],
    ),
    table(
        "clustered.calibration",
        title="Reported probability of the groups against the frequency of right groups",
        shows="300 draws of 21 clients: half without groups, half with 2 to 6 at 1 to 1.5 times the smallest distance, "
        "at noise with which that distance is a separation of 0.5 to 2 times the fourth root of the number of "
        "parameters",
        compute="clustered.simulation:calibration",
        rows=named(
            {
                f"{name}_{low}": f"{title}, bin {low} to {high} %"
                for name, title in (
                    ("reported", "mean reported probability"),
                    ("right", "right groups"),
                    ("draws", "number of draws"),
                )
                for low, high in ((0, 25), (25, 50), (50, 75), (75, 90), (90, 100))
            },
            cell="all",
        ),
        columns=[entry(f"p{size}", f"{size:,} parameters", arguments={"num_params": size}) for size in (2000, 28938)],
        scales=_NOISE_ALONE,
        notes=[
            "Bins of the reported probability; its mean in %. right groups: share of draws in which all clients are in "
            "the right group, %."
        ],
    ),
]

# What the papers do not show: learning rates, other data, and weights by noise in clusters.
_FURTHER = [
    table(
        "clustered.tuning",
        title="Learning rates, Fashion-MNIST, turned images, on public records alone",
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
                        "clients.learning_rate": lazy("leaderboard.tuning:beyond", table="clustered.tuning"),
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
        summary="leaderboard.tuning:choices",
        notes=["No private record takes part. All budgets have these rates."],
    ),
    table(
        "clustered.kmeans",
        title="Two readings of KM-CDPFL, Fashion-MNIST, turned images, beside the paper's numbers for 200 rounds",
        shows="accuracy on each client's test records, %; F_acc and best - worst in points; adjusted Rand index of the "
        "last round's clusters and the groups",
        rows=[
            {**row, "reference": _REFERENCE}
            for row in with_lines(
                [
                    entry(
                        name,
                        title,
                        {"strategies": {"uniform": {}, "kmeans_clusters": {"num_clusters": 4, "merge": merge}}},
                    )
                    for name, title, merge in (
                        ("added", "added to own models", False),
                        ("merged", "merged models", True),
                    )
                ],
                [
                    _ALL,
                    _MAJORITY,
                    _MINORITY,
                    _WORST,
                    _GAP,
                    _F_ACC,
                    entry("rand", ": Rand index", value="adjusted_rand_index"),
                ],
            )
        ],
        columns=named({"eps5": "12 of 60 rounds, epsilon 5"}),
        options={
            **_FASHION,
            "privacy.epsilon": None,
            "privacy.noise_multiplier": 1.047,
            "rounds": 12,
            "evaluation.every": 4,
        },
        recorder="clustered.recorder:GroupRecorder",
        scales={"small": "the noise of 60 rounds at epsilon 5, of which the first 12 are trained; disjoint records"},
        paper={
            f"{row}_{line}": [number]
            for row in ("added", "merged")
            for line, number in {
                "all": 57.65,
                "majority": 58.75,
                "minority": 31.72,
                "worst": 12.41,
                "gap": 62.78,
                "f_acc": 59.2,
            }.items()
        },
        minutes={"small": 4},
        notes=[
            "Added: each client adds the mean update of its cluster to its own model. Merged: the clients of a cluster "
            "then also continue from the mean of their models."
        ],
    ),
    table(
        "clustered.other_data",
        title="Fewer records, and skewed labels within the groups, Fashion-MNIST, turned images, epsilon 5",
        shows="accuracy on each client's test records, %; clients in the right cluster in the last round, %",
        rows=with_lines(
            _rows({name: _METHODS[name] for name in ("dpfedavg", "ours", "paper", "oracle")}),
            [_ALL, _MINORITY, _RIGHT_CLUSTER],
        ),
        columns=[
            *(
                entry(f"n{count}", f"{count:,} records a client", {"data.records_per_client": count}, x=count)
                for count in (500, 1000, 1500)
            ),
            *(
                entry(
                    f"dirichlet{alpha:g}",
                    f"Dirichlet {alpha:g}",
                    {
                        "data.records_per_client": None,
                        "data.test_per_client": 1000,
                        "data.partition": {"name": "dirichlet", "alpha": alpha},
                    },
                )
                for alpha in (0.3, 1)
            ),
        ],
        options={**_FASHION, "privacy.epsilon": 5},
        recorder="clustered.recorder:GroupRecorder",
        scales=_SMALL,
        minutes={"small": 6},
        notes=[
            "Of 2,285 records a client clustered.table5 shows. With skewed labels test records have the client's "
            "shares of the classes."
        ],
    ),
    table(
        "clustered.composed",
        title="Weights by noise inside clusters: 24 clients with unequal budgets and batch sizes in three groups of 8",
        shows="accuracy on each client's test records, %; clients in the right cluster in the last round, %",
        rows=[
            line
            for name, title, clusters, lines in (
                ("one", "one model", dict[str, dict](), [_ALL, _WORST]),
                ("ours", "clustered", {"clustered": {}}, [_ALL, _WORST, _RIGHT_CLUSTER]),
                ("oracle", "true groups known", {"oracle_clusters": {}}, [_ALL, _WORST, _RIGHT_CLUSTER]),
            )
            for line in with_lines(
                [
                    entry(f"{name}_{weights}", f"{title}, {words}", {"strategies": {strategy: {}, **clusters}})
                    for weights, words, strategy in (
                        ("size", "weights by size", "size_weighted"),
                        ("noise", "noise-aware weights", "noise_aware"),
                    )
                ],
                lines,
            )
        ],
        columns=[
            entry(
                f"dist{number}",
                f"Dist{number} times 5",
                {"privacy.epsilon": {"name": f"dist{number}", "source": "sampled", "scale": 5}},
            )
            for number in (1, 3, 5)
        ],
        options={
            **_FASHION,
            "clients.count": 24,
            "clients.batch_size": {"name": "choice", "values": [16, 32, 64, 128]},
            "data.records_per_client": 2000,
            "data.groups": {"name": "rotation", "count": 3},
        },
        recorder="clustered.recorder:GroupRecorder",
        scales={"small": "60 rounds, disjoint records, 2,000 a client"},
        seeds={"small": [0, 1, 2]},
        minutes={"small": 8},
        notes=[
            "No paper combines the two. Budgets are those of the noise-aware paper times 5, as the first round alone "
            "costs 0.7."
        ],
    ),
]

TABLES = [*_REPRODUCED, *_FIRST_ROUND, *_BY_FORMULA, *_SIMULATED, *_FURTHER]
