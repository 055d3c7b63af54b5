"""Tables of Ma, Zhou, Li, Sheng, Cui and Liu, "The Power of Bias: Optimizing Client Selection in Federated Learning
with Heterogeneous Differential Privacy", and of what it leaves out.
"""

from experiments.papers.declarations import by_scale, entry, lazy, named, table, with_lines
from experiments.papers.experiment import Comparison, Tolerance

_SAME = (
    "All methods have the same 100 clients (Dirichlet(3)), with one full batch each in a round, and noise calibrated "
    "for each client's participations. Neighbours differ in one replaced record. With Gaussian noise 20 clients take "
    "part in a round. With Laplace noise 2 do, where a row does not say 20, the paper's number: the fewer "
    "participations, the less noise."
)
_MOMENTUM_NOTE = (
    "The momentum of 0.9 that the paper prints is the server's, on the noised mean (post-processing): a client has one "
    "step a round. Each row has the rate that selection.tuning chose for it on public records."
)
_PERSONAL_NOTE = (
    "PRIVATEFL's accuracy is the mean over clients of the net behind a client's input transformation, on the common "
    "test set. Personal parameters are noised, too: without noise no guarantee would hold."
)

_BASE = {
    "rounds": by_scale(small=100, paper=200),
    "clients.count": 100,
    "clients.batch_size": None,
    "clients.optimizer": {"name": "sgd", "weight_decay": 2.0e-4},
    "clients.schedule.name": "inverse",
    "privacy.epsilon.name": "uniform",
    "privacy.adjacency": "replace_one",
    "data.public_records": 12000,
    "evaluation.every": by_scale(small=20, paper=40),
}
_RUN = {**_BASE, "data.partition": {"name": "dirichlet", "alpha": 3, "min_records": 10}}
_FASHION = {
    "data.name": "fashion_mnist",
    "model.name": by_scale(small="cnn_tiny", paper="lenet5"),
    "privacy.clip_norm": 25,
    "privacy.epsilon.low": 0.5,
    "privacy.epsilon.high": 4,
    "clients.schedule.half_after": by_scale(small=100, paper=200),
}
_GAUSSIAN = {**_FASHION, "privacy.delta": {"name": "uniform", "low": 1.0e-5, "high": 1.0e-4}}
_LAPLACE = {**_FASHION, "privacy.mechanism": "laplace", "privacy.delta": 0}
_THREE = {"small": [0, 1, 2], "paper": [0, 1, 2]}
_TEN = {"small": list(range(10)), "paper": [0, 1, 2]}  # seeds with Laplace noise, where cells are quick


def _columns(seeds_with_laplace: dict) -> list[dict]:
    return [
        entry("fashion_mnist_gaussian", "Fashion-MNIST, Gaussian", _GAUSSIAN),
        entry("fashion_mnist_laplace", "Fashion-MNIST, Laplace", _LAPLACE, seeds=seeds_with_laplace),
    ]


_PERSONAL = {"model.personal_input": True}
_MOMENTUM: dict = {"server_momentum": {}}  # 0.9
# By default 20 of 100 clients take part in a round, with Laplace noise 2.
_EQUAL: dict = {**_MOMENTUM, "uniform_selection": {}}
_TWENTY: dict = {**_MOMENTUM, "uniform_selection": {"clients_per_round": 20}}
_BIASED: dict = {**_MOMENTUM, "biased_selection": {}}
_TWO_STAGES: dict = {**_MOMENTUM, "experiments.papers.selection.two_stages.PaperTwoStages": {}}
#: name -> title, series, options, and fields of a row
_METHODS: dict = {
    "fedsgd": ("FedSGD, no privacy", "FedSGD", {"strategies": _EQUAL, "privacy": None}),
    "uniform": ("uniform (DPSGD with Gaussian, DMLDP with Laplace noise)", "uniform", {"strategies": _EQUAL}),
    "weiavg": ("WeiAvg", "WeiAvg", {"strategies": {**_EQUAL, "epsilon_weighted": {}}}),
    "least_noise": (
        "Proposition 1, capped",
        "Proposition 1",
        {"strategies": {**_MOMENTUM, "biased_selection": {"dissimilarity": 0}}},
    ),
    "pfa": (
        "PFA, per tensor",
        "PFA",
        {"strategies": {**_MOMENTUM, "pfa": {"grouping": "top"}, "uniform_selection": {"top_fraction": 0.1}}},
    ),
    "privatefl": ("PRIVATEFL", "PRIVATEFL", {**_PERSONAL, "strategies": _EQUAL}),
    "two_stage": ("DPFL-BCS, the paper's two stages made sound", "two stages", {"strategies": _TWO_STAGES}),
    "biased": ("biased selection, anchored by a constant", "biased selection", {"strategies": _BIASED}),
    "privatefl_two_stage": (
        "PRIVATEFL-BCS, the paper's two stages made sound",
        "PRIVATEFL-BCS",
        {**_PERSONAL, "strategies": _TWO_STAGES},
    ),
    "privatefl_biased": (
        "PRIVATEFL with biased selection",
        "PRIVATEFL with biased selection",
        {**_PERSONAL, "strategies": _BIASED},
    ),
    "ours": ("uniform, noise_aware (ours)", "noise_aware (ours)", {"strategies": {**_EQUAL, "noise_aware": {}}}),
    "uniform20": ("uniform, 20 clients in a round", "uniform, 20 clients", {"strategies": _TWENTY}),
    "ours20": (
        "uniform, noise_aware (ours), 20 clients in a round",
        "noise_aware (ours), 20 clients",
        {"strategies": {**_TWENTY, "noise_aware": {}}},
    ),
}


def _elsewhere(name: str, setting: str = "") -> dict:
    """Runs without noise stand beside both kinds of noise; with Gaussian noise 20 clients take part anyhow."""
    if name == "fedsgd":
        return {"fashion_mnist_laplace": {"column": "fashion_mnist_gaussian"}}
    return {"fashion_mnist_gaussian": {"cell": name.removesuffix("20") + setting}} if name.endswith("20") else {}


def _rows(*names: str, **fields) -> list[dict]:
    tuned = {"clients.learning_rate": lazy("leaderboard.tuning:chosen", table="selection.tuning")}
    return [
        entry(
            name,
            title,
            {**tuned, **options},
            series=series,
            value="test_accuracy",
            elsewhere=_elsewhere(name),
            **fields,
        )
        for name, (title, series, options) in _METHODS.items()
        if not names or name in names
    ]


_SHOWS = "test accuracy, % after the last round"
_SCALES = {
    "small": "100 rounds with noise calibrated for them; Fashion-MNIST with the CNN of 4,266 parameters",
    "paper": "200 rounds; Fashion-MNIST with LeNet-5 of 61,706 parameters",
}
_OTHER_SIZE = Tolerance(None, "the paper's rounds have 20 clients, and ours 2")

_TRAINED = [
    table(
        "selection.tuning",
        title="Learning rates of selection.methods, on public records alone",
        shows="accuracy on 2,000 public records, %, of clients that draw theirs from 10,000 other public records",
        rows=[
            entry(
                f"{name}_{rate}",
                f"{title}, {rate}",
                {"clients.learning_rate": rate, **options},
                value="test_accuracy",
                elsewhere=_elsewhere(name, f"_{rate}"),
            )
            for name, (title, _, options) in _METHODS.items()
            for rate in (0.0032, 0.008, 0.02, 0.05, 0.125)
        ],
        columns=_columns(_THREE),
        options={
            **_BASE,
            "evaluation.every": by_scale(small=100, paper=200),
            "data.use_public": True,
            "data.partition.name": "overlapping",
            "data.records_per_client": 480,
        },
        recorder="selection.recorder:SelectionRecorder",
        seeds={"small": [0], "paper": [0, 1, 2]},
        scales={"small": "100 rounds", "paper": "200 rounds"},
        minutes={"small": 0.3, "paper": 20},
        summary="leaderboard.tuning:choices",
        notes=["No private record takes part."],
    ),
    table(
        "selection.methods",
        title="All methods",
        shows=_SHOWS,
        rows=_rows(),
        columns=_columns(_TEN),
        options=_RUN,
        recorder="selection.recorder:SelectionRecorder",
        scales=_SCALES,
        seeds=_THREE,
        minutes={"small": 0.4, "paper": 20},
        ours="ours",
        rivals=["uniform", "weiavg", "least_noise", "pfa", "privatefl", "two_stage", "biased", "privatefl_two_stage"],
        notes=[_SAME, _MOMENTUM_NOTE, _PERSONAL_NOTE],
    ),
    table(
        "selection.fairness",
        title="Whom the model serves, and who takes part, in the runs of selection.methods",
        shows="accuracy on clients' test records in %, its difference between the quarters with the largest and the "
        "smallest budgets in points",
        rows=with_lines(
            [
                row
                for name in ("uniform", "ours", "biased", "least_noise", "two_stage")
                for row in _rows(name, experiment="selection.methods")
            ],
            [
                entry("worst", ": worst fifth of clients", value="accuracy_worst_fifth"),
                entry("gap", ": largest minus smallest budgets", value="budget_gap"),
                entry("equality", ": Jain's index of participation", value="equality"),
                entry("never", ": clients without participation, %", value="never"),
            ],
        ),
        columns=_columns(_TEN),
        scales=_SCALES,
        seeds=_THREE,
        notes=["Biased selection asks clients with small budgets less often."],
    ),
    table(
        "selection.table1",
        title="Table I, PRIVATEFL alone, with two stages, and with biased selection",
        shows=_SHOWS,
        rows=_rows("privatefl", "privatefl_two_stage", "privatefl_biased", experiment="selection.methods"),
        columns=_columns(_TEN),
        scales=_SCALES,
        seeds=_THREE,
        paper={"privatefl": [57.12, 14.94], "privatefl_two_stage": [80.73, 69.42]},
        comparison=Comparison(
            5,
            better="higher",
            special={(row, "fashion_mnist_laplace"): _OTHER_SIZE for row in ("privatefl", "privatefl_two_stage")},
        ),
        notes=[
            _PERSONAL_NOTE,
            "The paper does not give evaluation, batches, seeds and calibration: compare the order of the rows. Its "
            "Lending Club and FEMNIST cannot be read here.",
        ],
    ),
    table(
        "selection.gap",
        title="The budgets that the paper's accuracy would take, PRIVATEFL-BCS on Fashion-MNIST with Gaussian noise",
        shows=_SHOWS,
        rows=_rows("privatefl_two_stage"),
        columns=[
            entry("fashion_mnist_gaussian", "epsilon 0.5 to 4", experiment="selection.methods"),
            *(
                entry(
                    f"fashion_mnist_gaussian_{times}",
                    f"epsilon {low} to {high}",
                    {**_GAUSSIAN, "privacy.epsilon.low": low, "privacy.epsilon.high": high},
                )
                for times, low, high in ((10, 5, 40), (100, 50, 400))
            ),
        ],
        options=_RUN,
        recorder="selection.recorder:SelectionRecorder",
        scales=_SCALES,
        paper={"privatefl_two_stage": [80.73, None, None]},
        seeds={"small": [0], "paper": [0]},
        minutes={"small": 1, "paper": 20},
        notes=[_PERSONAL_NOTE, "The rate is the one chosen for epsilon 0.5 to 4."],
    ),
]


def _budgets(mechanism: str, alpha: float, *ranges: tuple[float, float]) -> list[dict]:
    """Columns of a simulated problem."""
    return [
        entry(
            f"{mechanism}_a{alpha:g}_{low:g}",
            f"{mechanism}, alpha {alpha:g}, epsilon {low:g} to {high:g}",
            x=high,
            arguments={"mechanism": mechanism, "alpha": alpha, "low": low, "high": high},
        )
        for low, high in ranges
    ]


def _with_suffix(titles: dict[str, str], suffix: str, title: str) -> list[dict]:
    """A row for each value, and one below it for the value whose name ends with the suffix."""
    pairs = ((name, words, suffix, title) for name, words in titles.items())
    return named(
        {key: value for name, words, end, below in pairs for key, value in ((name, words), (name + end, below))},
        cell="all",
    )


_FOUR = ((0.1, 3), (0.3, 9), (1, 30), (10, 300))
_VERIFIED = [
    *_budgets("gaussian", 0.5, *_FOUR),
    *_budgets("gaussian", 3.0, *_FOUR),
    *_budgets("laplace", 0.5, (0.5, 15), (5, 150)),
    entry(
        "clip4",
        "gaussian, alpha 0.5, epsilon 4 to 120, clip norm 4 in place of 1",
        arguments={"mechanism": "gaussian", "alpha": 0.5, "low": 4.0, "high": 120.0, "clip_norm": 4.0},
    ),
]
_NOISY = [*_budgets("gaussian", 0.5, (0.1, 3)), *_budgets("laplace", 0.5, (0.5, 15), (5, 150))]
_RULES = {
    "fedsgd": "FedSGD, no privacy",
    "uniform": "uniform (DPSGD, DMLDP)",
    "weiavg": "WeiAvg",
    "inverse": "uniform, weights by inverse noise",
    "least_noise": "biased selection, least noise (Proposition 1, capped)",
    "anchored": "biased selection, anchored by a constant",
    "effects": "uniform, random-effects weights (ours)",
}

# What needs no training: a simulated problem, noise of a round, calibrations, fitted constants, and three clients.
_SIMULATED = [
    table(
        "selection.verification",
        title="A simulated problem: ten classes, 30 clients split by a Dirichlet distribution, 6 in a round, 100 "
        "rounds",
        shows="test accuracy after the last round, %, mean of 20 draws (spread: their standard deviation)",
        compute="selection.simulation:methods_of",
        rows=[
            row | ({"series": "FedSGD"} if row["name"] == "fedsgd" else {})
            for row in _with_suffix(
                {
                    **_RULES,
                    "effects2": "uniform, random-effects weights, 2 clients in a round",
                    "effects12": "uniform, random-effects weights, 12 clients in a round",
                },
                "_std",
                "its spread",
            )
        ],
        columns=_VERIFIED,
        scales={
            "paper": "simulated: a linear softmax model, full batches, exact calibration; learning rate 4 / (1 + round "
            "/ 50) for all methods, not tuned"
        },
        decimals=1,
        panels=[
            {
                "title": f"{mechanism} noise, alpha {alpha}",
                "columns": f"{mechanism}_a{alpha}_.*",
                "x": "largest epsilon",
                "log": "x",
                "y": "test accuracy, %",
                "rows": list(_RULES),
            }
            for mechanism, alpha in (("gaussian", "0.5"), ("gaussian", "3"), ("laplace", "0.5"))
        ],
        notes=[
            "Quotas and weights are planned from public facts. The variance between clients, which random-effects "
            "weights need, is estimated from the released updates: their spread minus the known noise."
        ],
    ),
    table(
        "selection.regret",
        title="What a better constant would gain, and what weights gain over quotas, in the runs of "
        "selection.verification",
        shows="points of test accuracy, mean of 20 paired draws, and standard errors",
        rows=[
            {**row, "value": row["name"], "experiment": "selection.verification"}
            for row in _with_suffix(
                {
                    "quota_regret": "biased selection: best assumed variance between clients, minus its constant 0.1",
                    "weight_regret": "random-effects weights: best assumed variance, minus the estimated one",
                    "gain": "random-effects weights minus biased selection",
                },
                "_error",
                "its standard error",
            )
        ],
        columns=_VERIFIED,
        scales={"paper": "simulated"},
        notes=[
            "The best of 0, 0.001, 0.01, 0.1 and 1 (shares of the squared clip norm) is chosen for each column on the "
            "draws that are shown, so regrets are rather too large."
        ],
    ),
    table(
        "selection.rates",
        title="The methods of selection.verification, each with the learning rate that is best for it on 20 other "
        "draws",
        shows="test accuracy after the last round, %, mean of 20 draws",
        compute="selection.simulation:tuned_of",
        rows=_with_suffix(_RULES, "_rate", "its rate"),
        columns=_NOISY,
        scales={"paper": "simulated; rates 0.5, 1, 2, 4, 8, 16, 32 and 64"},
        decimals=1,
    ),
    table(
        "selection.participations",
        title="Quotas and weights by the number of clients in a round, on the same problem",
        shows="test accuracy after the last round, %, mean of 20 draws",
        compute="selection.simulation:participations_of",
        rows=named(
            {
                **{
                    f"{name}{count}": f"{title}, {count} clients in a round"
                    for name, title in (
                        ("anchored", "biased selection"),
                        ("effects", "uniform, random-effects weights"),
                        ("both", "biased selection, random-effects weights"),
                    )
                    for count in (2, 6, 12)
                },
                "gain2": "weights minus quotas, 2 clients, points",
                "gain2_error": "its standard error",
                "both_gain": "both minus weights alone, 6 clients, points",
                "both_gain_error": "its standard error",
            },
            cell="all",
        ),
        columns=_NOISY,
        scales={"paper": "simulated"},
        decimals=1,
    ),
    table(
        "selection.bias_term",
        title="The paper's bias term with true values of unlikeness, on the same problem",
        shows="test accuracy after the last round, %, mean of six draws (spread: their standard deviation)",
        compute="selection.simulation:ratios_of",
        rows=_with_suffix(
            {
                "uniform": "uniform",
                **{f"ratio{ratio}": f"least noise and the bias term times {ratio}" for ratio in (0, 3, 30, 300)},
                "anchored": "anchored",
            },
            "_std",
            "its spread",
        ),
        columns=_budgets("gaussian", 0.5, (0.1, 3), (1, 30), (10, 300)),
        scales={"paper": "simulated; what no server can know is given to it"},
        decimals=1,
        notes=[
            "Unlikeness is how much worse the best common model serves a client than its best separate one. Even its "
            "true value gains nothing over least noise, and a large weight of it costs points."
        ],
    ),
]

_BY_FORMULA = [
    table(
        "selection.noise",
        title="Noise in a round's mean update, of other ways to use budgets over that of quotas of least noise",
        shows="variance as a multiple of that of Proposition 1; 100 clients of equal size, 20 in a round, 200 rounds",
        compute="selection.formulas:noise_of_a_round",
        rows=named(
            {
                "uniform": "equal quotas, equal weights (DPSGD, DMLDP)",
                "weiavg": "equal quotas, weights by epsilon (WeiAvg)",
                "inverse": "equal quotas, weights by inverse noise in each round",
                "shares": "equal quotas, shares of least noise",
                "shares2": "equal quotas, shares of least noise, 2 clients in a round",
                "unbiased": "quotas of Proposition 1, weights that remove their bias",
            },
            cell="formulas",
        ),
        columns=[
            entry(
                f"{mechanism}_{low:g}",
                f"{mechanism}, epsilon {low:g} to {high:g}",
                arguments={"mechanism": mechanism, "budgets": [low, high]},
            )
            for mechanism in ("gaussian", "laplace")
            for low, high in ((0.1, 3.0), (0.5, 4.0), (1.0, 6.0))
        ],
        scales={"paper": "computed, mean of 200 draws of budgets"},
        notes=[
            "Equal quotas with shares of least noise have as little noise as the best quotas, and less with Laplace "
            "noise, where fewer participations of each client help most. With Gaussian noise weights that remove the "
            "bias remove the gain, too."
        ],
    ),
    table(
        "selection.noise_over_clip",
        title="Length of the noise in a round's mean gradient on Fashion-MNIST, beside the clip norm",
        shows="multiple of the clip norm, which no mean gradient without noise exceeds; 100 clients of 600 records, "
        "epsilon 0.5 to 4",
        compute="selection.formulas:noise_over_clip",
        rows=named(
            {
                "uniform": "equal quotas, equal weights (DPSGD, DMLDP)",
                "weiavg": "equal quotas, weights by epsilon (WeiAvg)",
                "least_noise": "quotas of Proposition 1, equal weights",
                "shares": "equal quotas, shares of least noise",
                "shares2": "equal quotas, shares of least noise, 2 clients in a round",
            },
            cell="formulas",
        ),
        columns=[
            entry(
                f"{mechanism}_{scale}",
                f"{mechanism}, {model}, {rounds} rounds",
                arguments={"mechanism": mechanism, "budgets": [0.5, 4.0], "num_params": num_params, "rounds": rounds},
            )
            for mechanism in ("gaussian", "laplace")
            for scale, num_params, rounds, model in (
                ("small", 4266, 100, "CNN of 4,266 parameters"),
                ("paper", 61706, 200, "LeNet-5 of 61,706 parameters"),
            )
        ],
        scales={"paper": "computed, mean of 200 draws of budgets"},
        notes=[
            "20 clients take part in a round, where no number is given. The clip norm is L2 with Gaussian and L1 with "
            "Laplace noise. The paper has the columns with LeNet-5."
        ],
    ),
    table(
        "selection.calibration",
        title="Noise of one participation by how a budget is split among them",
        shows="standard deviation over the sensitivity, at epsilon 1.5 and delta 5e-5 for all participations together",
        compute="selection.formulas:calibrations",
        rows=named(
            {
                "exact": "exact composition (what runs take)",
                "lemma1": "the paper's Lemma 1, its constant taken as the root of 2",
                "linear": "the paper's Algorithm 2 to the letter: epsilon and delta in equal parts",
            },
            cell="formulas",
        ),
        columns=[
            entry(f"t{times}", f"{times} times", arguments={"participations": times})
            for times in (2, 5, 10, 20, 40, 80, 160)
        ],
        scales={"paper": "computed for full batches"},
        notes=[
            "All three keep the budget. The variance of equal parts grows as the square of the participations. Lemma "
            "1's constant is not in the paper: the root of 2 is enough up to epsilon 7.5 at delta 1e-4."
        ],
    ),
    table(
        "selection.identifiability",
        title="The constants of Table III, fitted to one and the same first stage from four starts",
        shows="constants whose predicted loss is the reported one",
        compute="selection.formulas:fitted_constants",
        rows=named(
            {
                "gamma": "gamma",
                "smoothness": "L",
                "convexity": "mu",
                "offset": "8 L / mu, which gamma must be",
                "decides": "L + 3/8 mu (gamma + 190), which decides the quotas",
                "residual": "what is left of the equation",
            },
            cell="fit",
        ),
        columns=[  # |w_0 - w*|^2, gamma, sigma^2, L, mu
            entry(name, f"from {', '.join(f'{number:g}' for number in start)}", arguments={"start": start})
            for name, start in {
                "usual": [1.0, 8.0, 1.0, 1.0, 0.1],
                "far": [5.0, 20.0, 0.1, 4.0, 1.0],
                "flat": [0.1, 1.0, 3.0, 0.5, 0.3],
                "steep": [2.0, 100.0, 1.0, 9.0, 2.0],
            }.items()
        ],
        scales={"paper": "simulated losses of 100 clients in 10 rounds"},
        notes=["One equation has five unknowns: every start ends in another exact solution. Our default needs none."],
    ),
    table(
        "selection.figure1",
        title="Figure 1 in numbers, three clients that share twelve participations",
        shows="participations; noise factors 1, 2 and 4, unlikeness 0.5, 0.1 and 0",
        compute="selection.formulas:three_clients",
        rows=named(
            {
                "real0": "client 1 (least noise), real",
                "real1": "client 2 (some noise), real",
                "real2": "client 3 (most noise, most like the others), real",
                "whole0": "client 1, whole",
                "whole1": "client 2, whole",
                "whole2": "client 3, whole",
                "price": "price of one participation more",
                "cost": "cost of the whole ones",
            },
            cell="formulas",
        ),
        columns=[
            entry(
                f"{mechanism}_r{ratio}",
                f"{mechanism}, bias term {ratio}",
                arguments={"ratio": ratio, "exponent": exponent},
            )
            for mechanism, exponent in (("gaussian", 1), ("laplace", 2))
            for ratio in (0, 2, 60)
        ],
        scales={"paper": "computed"},
        notes=[
            "Without the bias term the client with least noise comes first; with a large one the most like the others."
        ],
    ),
]

TABLES = [*_TRAINED, *_SIMULATED, *_BY_FORMULA]
