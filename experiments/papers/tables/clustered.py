"""Tables of Malekmohammadi, Taik and Farnadi (2024), "Mitigating Disparate Impact of Differential Privacy in Federated
Learning through Robust Clustering"; revised: "A Provably Robust Algorithm for Differentially Private Clustered
Federated Learning".
"""

import math

from experiments.papers.declarations import by_scale, entry, lazy, named, table, with_lines
from experiments.papers.experiment import Comparison, Tolerance

#: name -> title and strategies
_METHODS: dict = {
    "dpfedavg": ("DPFedAvg", {"size_weighted": {}}),
    "ifca": ("f-CDPFL, private choices", {"ifca": {"num_clusters": 4}}),
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
    "ifca_argmin": (
        "f-CDPFL as published",
        {"ifca": {"num_clusters": 4, "selection": "paper_argmin"}},
    ),
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
_FIRST_BATCHES = (32, 128, 512, 2048, 6600)
_COMPUTED: dict = {"scales": {"paper": "computed for 6,600 records, batch 32, 200 rounds, delta 1e-4"}, "decimals": 3}

# ---- tuned alike

_COMPARED: dict = {
    "dpfedavg": _METHODS["dpfedavg"],
    "ifca_published": _WITH_ARGMIN["ifca_argmin"],
    "ifca_private": _METHODS["ifca"],
    "kmeans_clients": ("KM-CDPFL, models of clients", {"uniform": {}, "kmeans_clusters": {"num_clusters": 4}}),
    "kmeans_server": (
        "KM-CDPFL, models of the server",
        {"uniform": {}, "kmeans_clusters": {"num_clusters": 4, "models": "of_clusters"}},
    ),
    "ours": _METHODS["ours"],
    "paper": _METHODS["paper"],
    "oracle": _METHODS["oracle"],
}
_RATES = (0.016, 0.04, 0.1, 0.25, 0.625)
_SHIFTS = {
    "rotation": {"data.groups": {"name": "rotation", "sizes": [3, 6, 6, 6]}},
    "labels": {"data.groups": {"name": "label_shift", "sizes": [3, 6, 6, 6]}},
}
_LINES = {  # what a row has -> its title, its value, and which of two is better
    "all": ("all clients", "accuracy", "higher"),
    "majority": ("majority", "accuracy_majority", "higher"),
    "minority": ("minority", "accuracy_minority", "higher"),
    "worst": ("worst client", "accuracy_worst", "higher"),
    "f_acc": ("F_acc", "fairness_acc", "lower"),
    "f_loss": ("F_loss", "fairness_loss", "lower"),
}
#: Tables 5 and 6 at epsilon 5 and 2, and Tables 3 and 4 (MNIST) at 5: all, majority, minority, worst, F_acc, F_loss
_PUBLISHED: dict = {
    "dpfedavg": (
        (62.22, 65.86, 41.61, 40.69, 24.86, 1.02),
        (59.78, 62.96, 43.23, 42.22, 22.97, 0.77),
        (79.37, 81.16, 64.04, 63.26, 20.81, 1.49),
    ),
    "ifca_published": (
        (74.37, 73.43, 73.43, 66.73, 11.43, 0.33),
        (70.42, 67.35, 69.88, 64.93, 12.87, 0.33),
        (89.12, 91.25, 79.12, 78.76, 13.39, 0.81),
    ),
    "kmeans_clients": (
        (57.65, 58.75, 31.72, 12.41, 59.2, 3.36),
        (53.55, 58.3, 19.7, 14.03, 54.5, 2.28),
        (77.8, 79.2, 59.01, 48.66, 41.43, 2.73),
    ),
    "paper": (
        (78.15, 78.41, 77.23, 75.16, 7.25, 0.24),
        (74.84, 74.93, 73.29, 71.76, 6.92, 0.27),
        (90.7, 90.63, 89.33, 88.71, 3.13, 0.46),
    ),
    "oracle": (
        (78.44, 78.42, 78.35, 76.61, 6.27, 0.24),
        (75.11, 75.21, 75.0, 72.71, 6.55, 0.2),
        (91.06, 91.1, 90.28, 89.36, 3.1, 0.36),
    ),
}
_PUBLISHED["kmeans_server"] = _PUBLISHED["kmeans_clients"]  # the papers do not say which form theirs is


def _tuned_rate(row: str, column: str, scale: str) -> float:
    """The rate that `clustered.rates` chooses for a row, for the shift with which the column's name begins."""
    return lazy("tuning:chosen", table="clustered.rates")(row, column, scale)


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
            "ifca_argmin_all": [74.37, 70.42],
            "ifca_argmin_majority": [73.43, 67.35],
            "ifca_argmin_minority": [73.43, 69.88],
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
        upper_bounds={"oracle_all": [f"{row}_all" for row in _WITH_ARGMIN if row != "oracle"]},
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
            "ifca_argmin_worst": [66.73, 64.93],
            "ifca_argmin_gap": [13.11, 11.08],
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
        "clustered.rates",
        title="Learning rates of all rows of clustered.paired, from the same range, on public records alone",
        shows="mean accuracy of the clients, %, who draw from 10,000 public records, each scored on 1,666 others like "
        "its own",
        rows=[
            *(
                entry(f"{name}_{rate}", f"{title}, {rate}", {"strategies": strategies, "clients.learning_rate": rate})
                for name, (title, strategies) in _COMPARED.items()
                for rate in _RATES
            ),
            *(
                entry(
                    f"{name}_beyond",
                    f"{title}, beyond the end",
                    {"strategies": strategies, "clients.learning_rate": lazy("tuning:beyond", table="clustered.rates")},
                )
                for name, (title, strategies) in _COMPARED.items()
            ),
        ],
        columns=[entry(name, f"{name}, epsilon 5", shift) for name, shift in _SHIFTS.items()],
        options={
            **_FASHION,
            "privacy.epsilon": 5,
            "data.use_public": True,
            "data.partition.name": "overlapping",
            "rounds": 20,
            "privacy.reserve_rounds": 40,
            "evaluation.every": 20,
        },
        recorder="clustered.recorder:GroupRecorder",
        scales={"small": "20 rounds, with the noise of 60"},
        seeds={"small": [0, 1, 2]},
        minutes={"small": 3},
        summary="tuning:choices",
        notes=["No private record takes part. All data sets and budgets of a kind of shift have its rates."],
    ),
    table(
        "clustered.paired",
        title="Tables 3 to 6, all rows tuned alike, in common seeds: accuracy, F_acc and F_loss",
        shows="accuracy on each client's test records, %, F_acc in points, F_loss in nats; the minority are 3 of 21 "
        "clients",
        rows=with_lines(
            [entry(name, title, {"strategies": strategies}) for name, (title, strategies) in _COMPARED.items()],
            [entry(name, f": {title}", value=value) for name, (title, value, _) in _LINES.items()],
        ),
        columns=[
            entry("rotation", "rotation, epsilon 5", _SHIFTS["rotation"]),
            entry("labels", "labels, epsilon 5", _SHIFTS["labels"]),
            entry(
                "rotation_eps2",
                "rotation, epsilon 2",
                {**_SHIFTS["rotation"], "privacy.epsilon": 2},
                seeds={"small": [0, 1, 2]},
            ),
            *(
                entry(
                    f"{name}_mnist",
                    f"{name}, MNIST, epsilon 5",
                    {**shift, "data.name": "mnist"},
                    seeds={"small": [0, 1, 2]},
                )
                for name, shift in _SHIFTS.items()
            ),
        ],
        options={
            **_FASHION,
            "privacy.epsilon": 5,
            "clients.learning_rate": _tuned_rate,
            "evaluation.every": 60,
            "evaluation.fairness": {"name": "central_models", "epochs": 10},
        },
        recorder="clustered.recorder:GroupRecorder",
        scales={"small": _SCALES["small"]},
        paper={
            f"{row}_{line}": [eps5[place], None, eps2[place], mnist[place], None]
            for row, (eps5, eps2, mnist) in _PUBLISHED.items()
            for place, line in enumerate(_LINES)
        },
        comparison=Comparison(
            3,
            better={f"{row}_{line}": better for row in _COMPARED for line, (_, _, better) in _LINES.items()},
            special={
                (f"{row}_f_loss", ""): Tolerance(0.1, "F_loss is in nats, of training records") for row in _PUBLISHED
            },
        ),
        upper_bounds={"oracle_all": [f"{row}_all" for row in _COMPARED if row != "oracle"]},
        ours="paper_all",
        rivals=[f"{row}_all" for row in _COMPARED if row not in ("paper", "oracle")],
        seeds={"small": [0, 1, 2, 3, 4]},
        minutes={"small": 16},
        notes=[
            "Learning rates are those of clustered.rates, the same for all budgets and data sets of a kind of shift.",
            "RC-DPFL and f-CDPFL as published release choices without noise: their real epsilon is infinite, and that "
            "of the column is for the noise of training. The paper has no numbers of private choices.",
            "Both readings of KM-CDPFL stand beside the paper's one number.",
            "The theta* of F_acc and F_loss are trained for ten epochs; the paper does not say how its were.",
        ],
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
        "clustered.lemma41",
        title="Lemma 4.1: by how much a ten times larger first batch lowers the variance of the first update",
        shows="noise multipliers, and the ratio of the variances",
        compute="clustered.formulas:first_round_variance",
        arguments={"batch": 660, "times": 10},
        rows=named(
            {"small": "z, first batch of 660", "large": "z, first batch of 6,600", "factor": "variance, ratio"},
            cell="formulas",
        ),
        columns=_BUDGETS,
        notes=["The papers say about a thousand, without the growth of z. The accountant is rdp."],
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
    table(
        "clustered.number_of_groups",
        title="M by the largest MSS: how often it is 4 for updates of four groups (simulated)",
        shows="share of 25 draws. Columns: SS / p^(1/4), for p = 2,000 and for the papers' network",
        compute="clustered.recovery:number_of_groups",
        rows=named(
            {
                "mss_equidistant": "M of the largest MSS, as in the papers: equidistant groups",
                "robust_equidistant": "`clustered`: equidistant groups",
                "mss_nested": "M of the largest MSS: two pairs of groups",
                "robust_nested": "`clustered`: two pairs of groups",
            },
            cell="simulation",
        ),
        columns=[
            entry(f"p{params}_{ss:g}", f"{ss:g}, p {params:,}", arguments={"params": params, "separation": ss})
            for params in (2000, 28938)
            for ss in (0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
        ],
        arguments={"draws": 25},
        scales={"paper": "isotropic noise, 21 clients in groups of 3, 6, 6 and 6"},
        decimals=2,
        notes=[
            "The revised paper says that the largest MSS finds M with high accuracy. Pairs are three times as far from "
            "each other as their groups are, as rotations by 0 and 180 against 90 and 270 degrees may be."
        ],
    ),
    table(
        "clustered.lemma42",
        title="Lemma 4.2: overlap of the groups' components, and whether a mixture finds the groups (simulated)",
        shows="overlaps, and shares of 25 draws with all 21 clients in the right group. Columns: batch size of round 1",
        compute="clustered.recovery:recovery",
        rows=named(
            {
                "z": "z",
                "separation": "SS",
                "bound": "the lemma's bound on the overlap, 2 Q(SS)",
                "overlap": "overlap by sampling, of known components",
                "paper": "found by the papers' mixture, given 4 groups",
                "robust": "found by `clustered`, given 4 groups",
            },
            cell="simulation",
        ),
        columns=[entry(f"b{batch}", f"{batch:,}", arguments={"first_batch": batch}) for batch in _FIRST_BATCHES],
        arguments={"distance": 0.02, "epsilon": 5.0, "draws": 25},
        scales={
            "paper": "6,600 records, 200 rounds of batch 32, epsilon 5, delta 1e-4, p = 28,938; mean clipped gradients "
            "of two groups are 0.02 clip norms apart"
        },
        notes=[
            "The lemma holds for known components. A mixture of 21 points has to find them, for which SS must be about "
            "1.2 to 1.5 p^(1/4), here 16 to 20, and not 3. Overlaps as small as these are not found by 200,000 draws: "
            "clustered.overlap has larger ones."
        ],
        decimals=5,
    ),
    table(
        "clustered.overlap",
        title="Lemma 4.2: the overlap of two components of known means (simulated)",
        shows="overlap. Columns: SS",
        compute="clustered.recovery:overlap",
        rows=named(
            {
                "sampled": "overlap by sampling",
                "formula": "2 Q(SS)",
                "errors": "distance from 2 Q(SS) in standard errors",
            },
            cell="simulation",
        ),
        columns=[entry(f"ss{ss:g}", f"{ss:g}", arguments={"separation": ss}) for ss in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)],
        arguments={"draws": 400_000},
        scales={"paper": "two Gaussians with equal isotropic noise in ten dimensions, 400,000 draws"},
        decimals=4,
    ),
    table(
        "clustered.theorem43",
        title="Theorem 4.3: how fast EM converges when two groups overlap (simulated)",
        shows="contraction of the error in an iteration, mean of 3 draws of 40,000 points. Columns: SS",
        compute="clustered.recovery:em_rate",
        rows=named(
            {"rate": "rate of EM", "order": "O^0.5", "overlap": "overlap O = 2 Q(SS)"},
            cell="simulation",
        ),
        columns=[entry(f"ss{ss:g}", f"{ss:g}", arguments={"separation": ss}) for ss in (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)],
        arguments={"seeds": 3},
        scales={"paper": "two equally likely Gaussians in one dimension; all five parameters are fitted"},
        decimals=4,
        notes=[
            "The rate falls with the overlap, as the theorem says of the limit; it is above O^0.5 in every column. "
            "With 21 updates in p dimensions the theorem, for infinitely many points, guarantees nothing."
        ],
    ),
]
