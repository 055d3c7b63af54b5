"""Tables of Malekmohammadi, Yu and Cao (2024), "Noise-Aware Algorithm for Heterogeneous Differentially Private
Federated Learning", and of what it leaves out.
"""

from dpfl_lightning.config.published import EPSILONS
from experiments.papers.declarations import by_scale, entry, named, table
from experiments.papers.experiment import Comparison, Experiment, Tolerance

_ACCOUNTANT = (
    "The accountant is rdp. The paper's (--privacy.accountant paper_ma) needs 1.2 to 2 times the noise variance, and "
    "more below epsilon 0.25. PFA is as in the paper's released code, and so is Robust-HDP, but for the settings of "
    "its robust PCA."
)
_RATES = "Learning rates are the paper's choice (Tables 8 to 11), made with its noise."
_FIRST_ROUND = "The accountant is the paper's. Estimates are known up to a common factor."
_CLAIM = "A claim changes what the server believes, not the client's noise."
_TRUNCATED = "the paper cuts off after two decimals here"

#: name -> title and strategies; PFA and Robust-HDP are as in the paper's released code
_METHODS: dict = {
    "weiavg": ("WeiAvg", {"epsilon_weighted": {}}),
    "pfa": ("PFA", {"experiments.papers.noise_aware.pfa.WholeUpdatePfa": {}}),
    "dpfedavg": ("DPFedAvg", {"size_weighted": {}}),
    "min_eps": ("minimum epsilon", {"minimum_epsilon": {}}),
    "robust_hdp": ("Robust-HDP", {"robust_hdp": {"estimator": "rpca", "reestimate_every": 0, "row_choice": "head"}}),
    "ours": ("noise_aware, our default", {"noise_aware": {}}),
}


def _rows(methods: dict) -> list[dict]:
    return [entry(name, title, {"strategies": strategies}) for name, (title, strategies) in methods.items()]


#: Table 9, Fashion-MNIST: method -> learning rate for Dist1 ... Dist9, a neighbour's where the paper lists none
_LEARNING_RATES = {
    "weiavg": [0.005, 0.005, 0.005, 0.005, 0.002, 0.0005, 0.0005, 0.0005, 0.0005],
    "pfa": [0.002, 0.002, 0.005, 0.005, 0.005, 0.005, 0.002, 0.001, 0.001],
    "dpfedavg": [0.002, 0.001, 0.001, 0.001, 0.001, 0.0005, 0.0005, 0.0005, 0.0005],
    "min_eps": [0.001, 0.0005, 0.0005, 0.0005, 0.0005, 0.0001, 0.0005, 0.0005, 0.0005],
    "robust_hdp": [0.005, 0.005, 0.005, 0.005, 0.005, 0.001, 0.001, 0.001, 0.001],
}


def _rate(row: str, column: str, scale: str) -> float:
    """The paper's choice for a method (ours: Robust-HDP's) and a distribution of budgets.

    With a learning rate ~ 1 / rounds neither the path nor the noise of the whole run depends on the rounds.
    """
    rate = _LEARNING_RATES["robust_hdp" if row == "ours" else row][int(column.removeprefix("dist")) - 1]
    return float(f"{rate * (200 / 60 if scale == 'small' else 1):.4g}")


_DISTS = range(1, 10)
# DPFedAvg's first round: the updates do not depend on their weights.
_WATCHED = {"config": "conf/fmnist_paper.yaml", "privacy.accountant": "paper_ma", "evaluation.every": 200}
_NOISE = "noise variance of the sum, per parameter, divided by the squared learning rate"
_COMPUTED = {"paper": "computed for 200 rounds"}
_FORMULAS: dict = {"takes": ["privacy.accountant"], "scales": _COMPUTED}


def _weights_of_60(name: str, title: str, batch_sizes: object, arguments: dict, paper: dict) -> Experiment:
    return table(
        f"noise_aware.{name}",
        title=f"{title}, MNIST, Dist1",
        shows="best weights by formula; noise of the sum under Robust-HDP's weights of the first round, divided by the "
        "least possible",
        rows=[
            entry(
                "client59",
                "best weight of client 59",
                value="client59",
                cell="formulas",
                compute="noise_aware.formulas:best_weights_of_60",
                arguments=arguments,
            ),
            entry("largest_six", "the six largest together", value="largest_six", cell="formulas"),
            entry(
                "excess",
                "Robust-HDP: noise / least",
                value="rpca_excess",
                cell="one_round",
                arguments={"names": ["rpca"]},
                recorder="noise_aware.first_round:FirstRound",
            ),
        ],
        columns=[entry("dist1", "Dist1", {"privacy.epsilon.name": "dist1"})],
        options={
            **_WATCHED,
            "data.name": "mnist",
            "clients.count": 60,
            "data.records_per_client": 800,
            "data.held_out_per_client": 0.2,
            "data.partition.name": "shards",
            "data.partition.max_classes": 8,
            "strategies": {"size_weighted": {}},
            "clients.batch_size": batch_sizes,
            "clients.learning_rate": 0.005,
        },
        takes=["privacy.accountant"],
        scales={"paper": "weights by formula, and one round of training with the noise of 200"},
        paper=paper,
        comparison=Comparison(
            0.02, special={("largest_six", "dist1"): Tolerance(0.05, 'the paper says only "more than a half"')}
        ),
        minutes={"paper": 0.5},
        decimals=3,
        draw="noise_aware.figures:weights_of_60",
        notes=["Client 59 has the second largest budget of the 60.", _FIRST_ROUND],
    )


_REPRODUCED = [
    table(
        "noise_aware.table3",
        title="Table 3, noise by formula, 20 clients of 2,400 records",
        shows=_NOISE,
        compute="noise_aware.formulas:table3",
        rows=named(
            {"weiavg": "WeiAvg", "dpfedavg": "DPFedAvg", "min_eps": "minimum epsilon", "oracle": "oracle"},
            cell="formulas",
        ),
        columns=[entry(f"dist{number}", f"Dist{number}", arguments={"dist": f"dist{number}"}) for number in _DISTS],
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
        notes=[
            "Robust-HDP's row is measured: noise_aware.table3_measured. All numbers are smaller with "
            "--privacy.accountant rdp."
        ],
        **_FORMULAS,
    ),
    table(
        "noise_aware.figure2",
        title="Figure 2, noise by batch size and epsilon",
        shows="noise variance of an update of 28,938 parameters at learning rate 0.01",
        compute="noise_aware.formulas:noise_by_batch_size",
        rows=named(
            {f"eps{epsilon:g}": f"epsilon {epsilon:g}" for epsilon in (0.2, 0.3, 0.5, 1, 2, 3, 5)}, cell="formulas"
        ),
        columns=[entry(f"b{size}", f"batch {size}", arguments={"size": size}) for size in (16, 32, 64, 128)],
        decimals=1,
        draw="noise_aware.figures:noise_by_batch_size",
        notes=["The paper does not say whose 20 clients it shows: with Dist8 six of them stand out, as in its figure."],
        **_FORMULAS,
    ),
    table(
        "noise_aware.figure8",
        title="Figure 8, noise by sample rate",
        shows="noise multiplier z for sample rate q, 200 epochs at delta 1e-4",
        compute="noise_aware.formulas:noise_by_sample_rate",
        rows=named({f"eps{epsilon:g}": f"epsilon {epsilon:g}" for epsilon in (0.5, 1, 2, 5)}, cell="formulas"),
        columns=[
            entry(f"q{rate:g}", f"q {rate:g}", x=rate, arguments={"rate": rate})
            for rate in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
        ],
        panels=[{"title": "Noise multiplier by sample rate", "x": "sample rate q", "y": "noise multiplier z"}],
        notes=["The paper's values cannot be read off its figure: z grows with q, more slowly than in proportion."],
        **_FORMULAS,
    ),
    table(
        "noise_aware.figure11",
        title="Figure 11, noise by data size, epsilon 3, batch 32",
        shows="H(N) = N z(N)^2, to which an update's noise is proportional, and 1 / H(N) in millionths",
        compute="noise_aware.formulas:noise_by_data_size",
        rows=[
            entry("h", "H(N)", cell="formulas"),
            entry("inverse", "1 / H(N)", series="epsilon 3, batch 32", cell="formulas"),
        ],
        columns=[
            entry(f"n{records}", f"{records:,} records", x=records, arguments={"records": records})
            for records in (500, 1000, 1500, 2000, 2500, 3000, 4000, 5000)
        ],
        decimals=1,
        panels=[{"title": "Weight by data size", "x": "records N", "y": "1 / H(N), millionths", "rows": ["inverse"]}],
        notes=["The ripples of the paper's curve come from its z, which is rounded to two decimals."],
        **_FORMULAS,
    ),
    table(
        "noise_aware.table13",
        title="Table 13, Fashion-MNIST, 20 clients",
        shows="mean accuracy of the clients on their held-out records, %",
        rows=_rows(_METHODS),
        columns=[
            entry(f"dist{number}", f"Dist{number}", {"privacy.epsilon.name": f"dist{number}"}) for number in _DISTS
        ],
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
        notes=[_RATES, _ACCOUNTANT],
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
        columns=[
            entry(f"dist{number}", f"Dist{number}", {"privacy.epsilon.name": f"dist{number}"}) for number in _DISTS
        ],
        options={**_WATCHED, "clients.learning_rate": lambda row, column, scale: _rate("robust_hdp", column, scale)},
        scales={"paper": "one round of training with the noise of 200"},
        paper={"rpca": [0.27, 0.47, 0.07, 0.64, 0.39, 7.62, 2.25, 13.86, 5.95]},
        comparison=Comparison(
            0.05, relative=True, better="lower", special={("rpca", "dist3"): Tolerance(0.12, _TRUNCATED)}
        ),
        minutes={"paper": 0.4},
        decimals=3,
        notes=[_FIRST_ROUND, "The paper has robust PCA alone; hetero_pca and raw_norm cost far less."],
    ),
    _weights_of_60(
        "figure12",
        "Figure 12, weights of 60 clients with at most 8 labels, batch 128",
        128,
        {},
        {"client59": [0.05], "largest_six": [None]},
    ),
    _weights_of_60(
        "figure13",
        "Figure 13, weights of 60 clients with at most 8 labels, unequal batch sizes",
        {"name": "published"},
        {"published": True},
        {"client59": [0.18], "largest_six": [0.5]},
    ),
]

_SIGNALS = {"equal": "equal signals", "steps": "signal as the number of steps"}

# What the paper leaves out: its estimator beside others, as the common signal grows out of the quietest noise, and data
# that differ between clients.
_FURTHER = [
    table(
        "noise_aware.ablation",
        title="Estimators of noise while the common signal grows, simulated updates of 20 clients, Dist1",
        shows="noise of the sum under weights from the estimates, divided by the least possible; mean of three",
        compute="noise_aware.ablation:excess_noise",
        takes=["privacy.accountant"],
        rows=named(
            {
                "rpca": "robust PCA",
                "rpca5000": "robust PCA, 5,000 parameters",
                "hetero_pca": "hetero_pca",
                "raw_norm": "raw_norm",
                "mean_residual": "mean_residual",
                "uniform": "uniform weights",
            },
            cell="all",
        ),
        columns=[
            entry(f"{signal}_{ratio:g}", f"{signal}, {ratio:g}", x=ratio, arguments={"signal": signal, "ratio": ratio})
            for signal in _SIGNALS
            for ratio in (0.1, 0.3, 1, 3, 10, 30)
        ],
        scales={"paper": "28,938 parameters; beside the common direction each client has another one, a tenth as long"},
        panels=[
            {
                "title": title.capitalize(),
                "columns": f"{signal}_.*",
                "log": "xy",
                "x": "signal of the quietest client / its noise",
                "y": "noise of the sum / least possible",
            }
            for signal, title in _SIGNALS.items()
        ],
        notes=[
            "Columns: length of the quietest client's signal, in lengths of its noise; signals are equal for all "
            "clients, or in proportion to their steps. With a large signal, an estimator that takes it for noise gives "
            "the quiet clients too little weight; no estimator can tell a client's separate direction from noise."
        ],
    ),
    table(
        "noise_aware.signal",
        title="Signal per noise of the weighted sum, simulated updates of 20 clients, Dist1",
        shows="squared ratio of signal to noise, divided by the best possible; mean of ten draws",
        compute="noise_aware.ablation:signal_to_noise",
        takes=["privacy.accountant"],
        rows=named(
            {
                **{
                    f"{kind}_{at}": f"noise_aware{words}, {when}"
                    for kind, words in (("planned", ""), ("estimated", ", noise: estimated"))
                    for at, when in (
                        ("first", "first round"),
                        ("tenth", "tenth round"),
                        ("lasting", "tenth of 30 rounds, directions that last"),
                        ("lasting200", "tenth of 200 rounds, directions that last"),
                    )
                },
                "rpca": "least noise by robust PCA, as in the paper",
                "inverse": "weights by the inverse of the true noise",
                "uniform": "uniform weights",
            },
            cell="all",
        ),
        columns=[
            entry(
                f"k{models}_{signal}_{ratio:g}",
                f"{models}, {signal}, {ratio:g}",
                x=ratio,
                arguments={"models": models, "signal": signal, "ratio": ratio},
            )
            for models in (1, 4)
            for signal in _SIGNALS
            for ratio in (0.1, 0.3, 1, 3)
        ],
        scales={"paper": "28,938 parameters; beside the common direction each client has another one, a tenth as long"},
        panels=[
            {
                "title": f"{title}, {words}",
                "columns": f"k{models}_{signal}_.*",
                "log": "x",
                "x": "signal of the quietest client / its noise",
                "y": "signal to noise / best possible",
            }
            for models, title in ((1, "One model"), (4, "Four models of five clients"))
            for signal, words in _SIGNALS.items()
        ],
        notes=[
            "Columns: number of models, signals, and length of the quietest client's signal in lengths of its noise. "
            "For noise_aware the best has the same bound on one client's share of the signal; the best of the others "
            "has none.",
            "Each round draws all directions anew, except where they last. There noise_aware takes a client's own "
            "direction for bias, which the best of this table does not count.",
        ],
    ),
    table(
        "noise_aware.unlike",
        title="Unlike data, digits, 10 clients with unequal budgets",
        shows="mean over the clients of the accuracy on their held-out records, %",
        rows=_rows(
            {
                "size_weighted": ("DPFedAvg, weights by data size", {"size_weighted": {}}),
                "uniform": ("uniform", {"uniform": {}}),
                "robust_hdp": ("Robust-HDP", {"robust_hdp": {"estimator": "rpca"}}),
                "ours": ("noise_aware, our default", {"noise_aware": {}}),
            }
        ),
        columns=[
            entry(
                f"alpha{alpha:g}_{name}",
                f"Dirichlet {alpha:g}, {title}",
                {"data.partition.alpha": alpha, "privacy.epsilon": [*budgets, *budgets]},
            )
            for alpha in (1.0, 0.3, 0.1)
            for name, title, budgets in (
                ("high", "epsilon 8 to 64", [8, 16, 32, 32, 64]),
                ("low", "epsilon 1 to 8", [1, 2, 4, 4, 8]),
            )
        ],
        options={
            "config": "conf/digits.yaml",
            "clients.count": 10,
            "clients.batch_size": 30,
            "data.partition": {"name": "dirichlet", "min_records": 30},
        },
        scales={"small": "20 rounds, learning rate 0.5, delta 1e-3"},
        seeds={"small": list(range(15))},
        minutes={"small": 0.2},
        ours="ours",
        rivals=["size_weighted", "uniform", "robust_hdp"],
        notes=[
            "The learning rate is that of conf/digits.yaml for all rows. Batch sizes are equal, numbers of records are "
            "not."
        ],
    ),
    table(
        "noise_aware.falsified",
        title="Fashion-MNIST, Dist5, a client of budget 0.95 that claims more",
        shows="accuracy on the official test set, %",
        rows=[
            {**row, "value": "test_accuracy"} for row in _rows({name: _METHODS[name] for name in ("weiavg", "ours")})
        ],
        columns=[
            entry(
                f"claim{claim}",
                f"claims {claim}",
                {"clients.reported_epsilon": [float(claim), *EPSILONS["dist5"][20][1:]]},
            )
            for claim in (0.95, 10, 100)
        ],
        options={
            "config": "conf/fmnist.yaml",
            "privacy.accountant": "rdp",
            "evaluation.every": 5,
            "privacy.epsilon.name": "dist5",
            "clients.learning_rate": 0.1,
        },
        scales={"small": "30 rounds"},
        minutes={"small": 4},
        notes=[
            _CLAIM,
            "With noise: estimated noise_aware reads no claim: a false one changes no bit of its weights "
            "(tests/strategies/test_noise_aware.py).",
        ],
    ),
]

TABLES = [*_REPRODUCED, *_FURTHER]
