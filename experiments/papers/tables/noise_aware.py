"""Tables of Malekmohammadi, Yu and Cao (2024), "Noise-Aware Algorithm for Heterogeneous Differentially Private
Federated Learning".
"""

from dpfl_lightning.config.published import EPSILONS
from experiments.papers.declarations import by_scale, entry, lazy, named, table, with_lines
from experiments.papers.experiment import Comparison, Tolerance

_TRUNCATED = "the paper cuts off after two decimals here"

#: name -> title and strategies; PFA and Robust-HDP are as in the paper's released code
_METHODS: dict = {
    "weiavg": ("WeiAvg", {"epsilon_weighted": {}}),
    "pfa": ("PFA, whole update", {"experiments.papers.noise_aware.pfa.WholeUpdatePfa": {}}),
    "dpfedavg": ("DPFedAvg", {"size_weighted": {}}),
    "min_eps": ("minimum epsilon", {"minimum_epsilon": {}}),
    "robust_hdp": ("Robust-HDP", {"robust_hdp": {"estimator": "rpca", "reestimate_every": 0, "row_choice": "head"}}),
}


#: Table 9, Fashion-MNIST: method -> learning rate for Dist1 ... Dist9, a neighbour's where the paper lists none
_LEARNING_RATES = {
    "weiavg": [0.005, 0.005, 0.005, 0.005, 0.002, 0.0005, 0.0005, 0.0005, 0.0005],
    "pfa": [0.002, 0.002, 0.005, 0.005, 0.005, 0.005, 0.002, 0.001, 0.001],
    "dpfedavg": [0.002, 0.001, 0.001, 0.001, 0.001, 0.0005, 0.0005, 0.0005, 0.0005],
    "min_eps": [0.001, 0.0005, 0.0005, 0.0005, 0.0005, 0.0001, 0.0005, 0.0005, 0.0005],
    "robust_hdp": [0.005, 0.005, 0.005, 0.005, 0.005, 0.001, 0.001, 0.001, 0.001],
}


def _rate(row: str, column: str, scale: str) -> float:
    """The paper's choice for a method and a distribution of budgets.

    With a learning rate ~ 1 / rounds neither the path nor the noise of the whole run depends on the rounds.
    """
    rate = _LEARNING_RATES[row][int(column.removeprefix("dist")) - 1]
    return float(f"{rate * (200 / 60 if scale == 'small' else 1):.4g}")


_DISTS = [
    entry(name, name.capitalize(), {"privacy.epsilon.name": name}, arguments={"dist": name})
    for name in (f"dist{number}" for number in range(1, 10))
]
# DPFedAvg's first round: the updates do not depend on their weights.
_WATCHED = {"config": "conf/fmnist_paper.yaml", "privacy.accountant": "paper_ma", "evaluation.every": 200}
_REPORTED = (0.95, 2, 5, 10, 20, 50, 100)  # of the client that falsifies its budget of 0.95
_READ = (250, 500, 1000, 2000, 5000, 10_000)  # rows p' of robust PCA, of 28,938
_BLOCKS = {
    f"{choice}_{rows}_{words}": {"name": "rpca", "rows": rows, "blocks": count, "row_choice": choice}
    for choice in ("head", "random")
    for rows in _READ
    for words, count in (("one", 1), ("all", None))
}

#: the same federation for the claims: small enough for five seeds of every rule
_RATES = (0.05, 0.12, 0.3)
_SMALL = {
    "config": "conf/fmnist.yaml",
    "rounds": 10,
    "privacy.reserve_rounds": 20,  # the noise of 30 rounds
    "evaluation.every": 2,
    "model": {"name": "cnn_tiny"},
    "data.records_per_client": 480,
}
_SCALE = {"small": "10 rounds with the noise of 30; 480 records, a small CNN and three times the paper's budgets"}
_SEEDS = {"small": [200, 201, 202, 203, 204]}


def _budgets(number: int) -> dict:
    return {"privacy.epsilon": {"name": f"dist{number}", "scale": 3}}


def reported(liars: int, factor: float) -> dict:
    """As many clients, spread over the budgets, report `factor` times their own."""
    epsilons = [3 * epsilon for epsilon in EPSILONS["dist5"][20]]
    ranked = sorted(range(20), key=lambda client: epsilons[client])
    lying = {ranked[place * 20 // liars] for place in range(liars)} if liars else set()
    claimed = [round(one * factor if client in lying else one, 6) for client, one in enumerate(epsilons)]
    return {**_budgets(5), "clients.reported_epsilon": claimed}


def _rules(*names: str) -> list[dict]:
    rate = lazy("tuning:chosen", table="noise_aware.tuning")
    return [
        entry(name, _METHODS[name][0], {"clients.learning_rate": rate, "strategies": _METHODS[name][1]})
        for name in names
    ]


_NOISE = "noise variance of the sum, per parameter, divided by the squared learning rate"

TABLES = [
    table(
        "noise_aware.table3",
        title="Table 3, noise by formula, 20 clients of 2,400 records",
        shows=_NOISE,
        compute="noise_aware.formulas:table3",
        rows=named(
            {"weiavg": "WeiAvg", "dpfedavg": "DPFedAvg", "min_eps": "minimum epsilon", "oracle": "oracle"},
            cell="formulas",
        ),
        columns=_DISTS,
        paper={
            "weiavg": [1.02, 1.89, 0.92, 3.22, 4.58, 28.29, 9.85, 48.15, 34.91],
            "dpfedavg": [1.27, 16.94, 16.28, 26.87, 25.64, 70.71, 18.5, 85.7, 43.2],
            "min_eps": [4.68, 103.91, 103.91, 127.18, 103.91, 1868.45, 74.41, 241.37, 87.15],
            "oracle": [0.27, 0.47, 0.07, 0.64, 0.39, 7.6, 2.25, 13.81, 5.93],
        },
        comparison=Comparison(
            0.02,
            relative=True,
            special={
                ("dpfedavg", "dist6"): Tolerance(
                    0.06, "one client's epsilon of 0.15 is next to the accountant's floor"
                ),
                ("min_eps", "dist6"): Tolerance(
                    None, "all clients have epsilon 0.15, next to the accountant's floor: rounding decides"
                ),
                ("min_eps", "dist8"): Tolerance(0.04, "all clients have epsilon 0.17, near the accountant's floor"),
                ("oracle", "dist3"): Tolerance(0.09, _TRUNCATED),
            },
        ),
        decimals=3,
        notes=["Robust-HDP's row is measured: noise_aware.table3_measured."],
        scales={"paper": "computed for 200 rounds"},
    ),
    table(
        "noise_aware.table13",
        title="Table 13, Fashion-MNIST, 20 clients",
        shows="mean accuracy of the clients on their held-out records, %",
        rows=[entry(name, title, {"strategies": strategies}) for name, (title, strategies) in _METHODS.items()],
        columns=_DISTS,
        options={
            "config": "conf/fmnist_paper.yaml",
            "privacy.accountant": "rdp",
            "rounds": by_scale(small=60),
            "evaluation.every": 5,
            "clients.learning_rate": _rate,
        },
        scales={
            "small": "60 rounds with noise calibrated for them and learning rates times 200 / 60, for nearly the "
            "signal and noise of 200 rounds",
            "paper": "200 rounds, as in the paper",
        },
        paper={
            "weiavg": [77.65, 78.3, 75.92, 77.1, 72.38, 64.15, 66.8, 66.86, 64.79],
            "pfa": [75.03, 74.85, 72.9, 77.1, 72.44, 71.08, 66.3, 67.89, 64.69],
            "dpfedavg": [74.12, 71.68, 71.97, 68.1, 70.2, 62.46, 64.15, 65.87, 65.5],
            "min_eps": [73.15, 64.26, 64.26, 62.6, 64.35, 28.66, 65.13, 58.44, 66.36],
            "robust_hdp": [75.13, 76.25, 75.04, 76.19, 73.8, 71.3, 66.85, 68.32, 66.96],
        },
        comparison=Comparison(2, better="higher"),
        minutes={"small": 8, "paper": 26},
        notes=[
            "Learning rates are the paper's choice (Tables 8 to 11), made with its noise.",
            "The accountant is rdp. The paper's (--privacy.accountant paper_ma) needs more: noise_aware.accountants.",
        ],
    ),
    table(
        "noise_aware.accountants",
        title="The paper's accountant beside ours, 20 clients of 2,400 records",
        shows="noise variance of a client's update by the paper's accountant / that by ours",
        compute="noise_aware.formulas:accountant_cost",
        rows=[
            entry(f"{name}_{end}", f"{words}, {end}", value=end, cell=name, arguments=arguments)
            for name, words, arguments in (
                ("rdp", "rdp, 60 rounds (noise_aware.table13)", {"accountant": "rdp", "rounds": 60}),
                ("pld", "pld, 200 rounds (conf/fmnist_paper.yaml)", {"accountant": "pld", "rounds": 200}),
            )
            for end in ("least", "most")
        ],
        columns=_DISTS,
        scales={"paper": "computed"},
    ),
    table(
        "noise_aware.table3_measured",
        title="Table 3, Robust-HDP's row measured, and other estimators, Fashion-MNIST",
        shows=_NOISE,
        recorder="noise_aware.first_round:FirstRound",
        arguments={"names": ["rpca", "hetero_pca", "raw_norm", "mean_residual"]},
        rows=[
            entry(name, title, value=f"{name}_noise", cell="one_round")
            for name, title in (
                ("rpca", "Robust-HDP (robust PCA)"),
                *((name, name) for name in ("hetero_pca", "raw_norm", "mean_residual", "oracle")),
            )
        ],
        columns=_DISTS,
        options={**_WATCHED, "clients.learning_rate": lambda row, column, scale: _rate("robust_hdp", column, scale)},
        scales={"paper": "one round of training with the noise of 200"},
        paper={"rpca": [0.27, 0.47, 0.07, 0.64, 0.39, 7.62, 2.25, 13.86, 5.95]},
        comparison=Comparison(
            0.05, relative=True, better="lower", special={("rpca", "dist3"): Tolerance(0.12, _TRUNCATED)}
        ),
        minutes={"paper": 0.4},
        decimals=3,
        notes=[
            "The accountant is the paper's. The paper has robust PCA alone; hetero_pca and raw_norm cost far less.",
        ],
    ),
    table(
        "noise_aware.rows",
        title="Figure 7, rows p' and blocks Q of robust PCA, Fashion-MNIST, CNN of 28,938 parameters",
        shows="noise variance of the sum under Robust-HDP's weights / the least possible",
        recorder="noise_aware.first_round:FirstRound",
        arguments={"names": _BLOCKS},
        rows=[
            entry(
                name,
                f"{options['rows']:,} rows, {'first' if options['row_choice'] == 'head' else 'random'} "
                f"{'block' if options['blocks'] else 'blocks, all'}",
                value=f"{name}_excess",
                cell="one_round",
            )
            for name, options in _BLOCKS.items()
        ],
        columns=[_DISTS[number - 1] for number in (1, 2, 5, 8)],
        options={**_WATCHED, "clients.learning_rate": lambda row, column, scale: _rate("robust_hdp", column, scale)},
        scales={"paper": "one round of training with the noise of 200"},
        minutes={"paper": 1},
        decimals=3,
        notes=[
            "The paper has ResNet-18, CIFAR-10 and Dist2, and a figure without numbers: with 200,000 of 11,181,642 "
            "rows (1.8 %, here 500) Robust-HDP is almost at the oracle."
        ],
    ),
    table(
        "noise_aware.falsified_noise",
        title="Figure 5, right, by formula: one of 20 clients reports another epsilon than its 0.95, Dist5",
        shows="noise variance of the sum, per parameter, divided by the squared learning rate; the liar's weight",
        compute="noise_aware.formulas:falsified",
        rows=named({"weiavg": "WeiAvg", "oracle": "oracle", "liar": "WeiAvg: weight of the liar"}, cell="formulas"),
        columns=[entry(f"eps{one:g}", f"{one:g}", arguments={"reported": one}) for one in _REPORTED],
        decimals=3,
        scales={"paper": "computed for 200 rounds"},
        notes=["The paper's figure has no readable numbers. DPFedAvg and Robust-HDP read no reported budget."],
    ),
    table(
        "noise_aware.tuning",
        title="Learning rates of five rules, on public records alone",
        shows="accuracy on 2,000 public records of clients that draw from 10,000 others, %",
        rows=[
            entry(f"{name}_{rate}", f"{title}, {rate}", {"clients.learning_rate": rate, "strategies": strategies})
            for name, (title, strategies) in _METHODS.items()
            for rate in _RATES
        ],
        columns=[entry(f"dist{number}", f"Dist{number}", _budgets(number)) for number in (1, 5, 6, 9)],
        options={**_SMALL, "data.use_public": True, "data.partition.name": "overlapping"},
        scales=_SCALE,
        minutes={"small": 0.4},
        summary="tuning:choices",
        notes=["No private record takes part. Where the best rate is an end of the range, that is said."],
    ),
    table(
        "noise_aware.paired",
        title="Accuracy and convergence, Fashion-MNIST, 20 clients with IID data",
        shows="accuracy on the test set, %; its mean over all evaluated rounds, %; first round with 60 %, 11: none",
        recorder="noise_aware.convergence:Convergence",
        arguments={"goal": 60},
        rows=with_lines(
            _rules(*_METHODS),
            [
                entry("accuracy", "", value="test_accuracy"),
                entry("speed", ", mean of the rounds", value="speed"),
                entry("rounds", ", rounds to 60 %", value="rounds"),
            ],
        ),
        columns=[entry(f"dist{number}", f"Dist{number}", _budgets(number)) for number in (1, 5, 9)],
        options=_SMALL,
        scales=_SCALE,
        seeds=_SEEDS,
        minutes={"small": 0.4},
    ),
    table(
        "noise_aware.falsified",
        title="Figure 5, right: clients that report ten times their budgets, Fashion-MNIST, Dist5",
        shows="accuracy on the test set, %",
        rows=[{**row, "value": "test_accuracy"} for row in _rules("weiavg", "pfa", "dpfedavg", "robust_hdp")],
        columns=[
            entry(f"dist5_{liars}", f"{words} lie" if liars else "none", reported(liars, 10))
            for liars, words in ((0, "none"), (1, "one"), (4, "20 %"), (8, "40 %"))
        ],
        options=_SMALL,
        scales=_SCALE,
        seeds=_SEEDS,
        minutes={"small": 0.4},
        ours="robust_hdp",
        rivals=["weiavg", "pfa", "dpfedavg"],
        notes=[
            "The liars have every fifth or so of the budgets in ascending order; their noise is that of the true ones."
        ],
    ),
    table(
        "noise_aware.clients",
        title="Table 17, the number of clients, Fashion-MNIST, Dist6",
        shows="accuracy on the test set, %",
        rows=[{**row, "value": "test_accuracy"} for row in _rules("weiavg", "dpfedavg", "robust_hdp")],
        columns=[
            entry(f"dist6_n{count}", f"{count} clients", {**_budgets(6), "clients.count": count})
            for count in (20, 40, 60)
        ],
        options=_SMALL,
        scales=_SCALE,
        seeds=_SEEDS,
        minutes={"small": 0.8},
        ours="robust_hdp",
        rivals=["weiavg", "dpfedavg"],
        notes=["Every client has 480 records; the paper distributes the same 60,000 images of MNIST."],
    ),
    table(
        "noise_aware.equal",
        title="Table 20, equal budgets and batch sizes, 20 clients by Dirichlet 1",
        shows="mean accuracy of the clients on their held-out records, %",
        rows=_rules("weiavg", "dpfedavg", "robust_hdp"),
        columns=[
            entry(f"dist1_eps{epsilon:g}", f"epsilon {epsilon:g} of all", {"privacy.epsilon": round(3 * epsilon, 6)})
            for epsilon in (2.6, 0.6)
        ],
        options={
            **_SMALL,
            "clients.batch_size": 32,
            "data.records_per_client": None,
            "data.partition": {"name": "dirichlet", "alpha": 1, "min_records": 300},
            "data.held_out_per_client": 120,
        },
        scales=_SCALE,
        seeds=_SEEDS,
        minutes={"small": 2},
        ours="robust_hdp",
        rivals=["weiavg", "dpfedavg"],
        notes=[
            "The paper has CIFAR-10; with equal budgets WeiAvg has equal weights. Rates are those of "
            "noise_aware.tuning, Dist1."
        ],
    ),
    table(
        "noise_aware.skew",
        title="Tables 4 and 22, at most eight classes a client, equal and unequal batch sizes, 60 clients, Dist1",
        shows="mean accuracy of the clients on their held-out records, %",
        rows=_rules("weiavg", "pfa", "dpfedavg", "robust_hdp"),
        columns=[
            entry("dist1_equal", "batches of 128", {"clients.batch_size": 128}),
            entry("dist1_unequal", "batches of 16 to 128"),
        ],
        options={
            **_SMALL,
            **_budgets(1),
            "clients.count": 60,
            "data.partition": {"name": "shards", "max_classes": 8},
            "data.held_out_per_client": 120,
        },
        scales=_SCALE,
        seeds=_SEEDS,
        minutes={"small": 1.2},
        ours="robust_hdp",
        rivals=["weiavg", "pfa", "dpfedavg"],
        notes=["The paper has MNIST; its rates are not given. Rates are those of noise_aware.tuning, Dist1."],
    ),
]
