"""Tables of Ma, Zhou, Li, Sheng, Cui and Liu, "The Power of Bias: Optimizing Client Selection in Federated Learning
with Heterogeneous Differential Privacy".
"""

from experiments.papers.declarations import by_scale, entry, lazy, named, table
from experiments.papers.experiment import Comparison, Tolerance

_PERSONAL_NOTE = (
    "PRIVATEFL's accuracy is the mean over clients of the model behind a client's input transformation, on the common "
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
_CONVEX = {**_GAUSSIAN, "model.name": "logistic"}
_MNIST = {
    **_GAUSSIAN,
    "data.name": "mnist",
    "model.name": "cnn_tiny",
    "privacy.clip_norm": 20,
    "privacy.epsilon.low": 0.1,
    "privacy.epsilon.high": 3,
}
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
_TWO_STAGES: dict = {**_MOMENTUM, "two_stages_as_printed": {}}
#: name -> title and options
_METHODS: dict = {
    "fedsgd": ("FedSGD, no privacy", {"strategies": _EQUAL, "privacy": None}),
    "uniform": ("uniform (DPSGD with Gaussian, DMLDP with Laplace noise)", {"strategies": _EQUAL}),
    "weiavg": ("WeiAvg", {"strategies": {**_EQUAL, "epsilon_weighted": {}}}),
    "least_noise": (
        "Proposition 1, capped",
        {"strategies": {**_MOMENTUM, "biased_selection": {"dissimilarity": 0}}},
    ),
    "pfa": (
        "PFA, per tensor",
        {"strategies": {**_MOMENTUM, "pfa": {"grouping": "top"}, "uniform_selection": {"top_fraction": 0.1}}},
    ),
    "privatefl": ("PRIVATEFL", {**_PERSONAL, "strategies": _EQUAL}),
    "two_stage": ("DPFL-BCS, the paper's two stages made sound", {"strategies": _TWO_STAGES}),
    "biased": ("biased selection, anchored by a constant", {"strategies": _BIASED}),
    "privatefl_two_stage": (
        "PRIVATEFL-BCS, the paper's two stages made sound",
        {**_PERSONAL, "strategies": _TWO_STAGES},
    ),
    "privatefl_biased": ("PRIVATEFL with biased selection", {**_PERSONAL, "strategies": _BIASED}),
    "ours": ("uniform, noise_aware (ours)", {"strategies": {**_EQUAL, "noise_aware": {}}}),
    "uniform20": ("uniform, 20 clients in a round", {"strategies": _TWENTY}),
}


def _elsewhere(name: str, setting: str = "") -> dict:
    """Runs without noise stand beside both kinds of noise; with Gaussian noise 20 clients take part anyhow."""
    if name == "fedsgd":
        return {"fashion_mnist_laplace": {"column": "fashion_mnist_gaussian"}}
    return {"fashion_mnist_gaussian": {"cell": name.removesuffix("20") + setting}} if name.endswith("20") else {}


def _rows(*names: str, **fields) -> list[dict]:
    tuned = {"clients.learning_rate": lazy("tuning:chosen", table="selection.tuning")}
    return [
        entry(name, title, {**tuned, **options}, value="test_accuracy", elsewhere=_elsewhere(name), **fields)
        for name, (title, options) in _METHODS.items()
        if not names or name in names
    ]


_SHOWS = "test accuracy, % after the last round"
_SCALES = {
    "small": "100 rounds with noise calibrated for them; Fashion-MNIST with the CNN of 4,266 parameters",
    "paper": "200 rounds; Fashion-MNIST with LeNet-5 of 61,706 parameters",
}
_SWEPT = ("uniform", "weiavg", "pfa", "privatefl", "two_stage", "biased")
_SETTINGS = (("fashion_mnist_gaussian", "CNN", _GAUSSIAN), ("convex", "logistic regression", _CONVEX))
_SWEEP: dict = {
    "scales": {"small": _SCALES["small"]},
    "seeds": {"small": [0, 1, 2]},
    "minutes": {"small": 0.4},
    "ours": "two_stage",
    "rivals": ["uniform", "weiavg", "pfa", "privatefl"],
}


def _dirichlet(alpha: float) -> dict:
    return {"data.partition": {"name": "dirichlet", "alpha": alpha, "min_records": 10}}


_OTHER_SIZE = Tolerance(None, "the paper's rounds have 20 clients, and ours 2")

TABLES = [
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
            for name, (title, options) in _METHODS.items()
            for rate in (0.0032, 0.008, 0.02, 0.05, 0.125)
        ],
        columns=[
            *_columns(_THREE),
            entry("convex", "Fashion-MNIST, Gaussian, logistic regression", _CONVEX),
            entry("mnist", "MNIST, Gaussian", _MNIST),
        ],
        options={
            **_BASE,
            "evaluation.every": by_scale(small=100, paper=200),
            "data.use_public": True,
            "data.partition.name": "overlapping",
            "data.records_per_client": 480,
        },
        seeds={"small": [0], "paper": [0, 1, 2]},
        scales={"small": "100 rounds", "paper": "200 rounds"},
        minutes={"small": 0.3, "paper": 20},
        summary="tuning:choices",
        notes=["No private record takes part."],
    ),
    table(
        "selection.methods",
        title="All methods, Fashion-MNIST, 100 clients",
        shows=_SHOWS,
        rows=_rows(),
        columns=_columns(_TEN),
        options=_RUN,
        scales=_SCALES,
        seeds=_THREE,
        minutes={"small": 0.4, "paper": 20},
        ours="ours",
        rivals=["uniform", "weiavg", "least_noise", "pfa", "privatefl", "two_stage", "biased", "privatefl_two_stage"],
        notes=[
            "All methods have the same 100 clients (Dirichlet(3)), with one full batch each in a round, and noise "
            "calibrated for each client's participations. Neighbours differ in one replaced record. With Gaussian "
            "noise 20 clients take part in a round, with Laplace noise 2, where a row does not say 20.",
            _PERSONAL_NOTE,
        ],
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
            "Lending Club and FEMNIST are read from files, which nobody has put here.",
        ],
    ),
    table(
        "selection.mnist",
        title="Table I, MNIST, Gaussian noise: PRIVATEFL alone and with two stages",
        shows=_SHOWS,
        rows=_rows("privatefl", "privatefl_two_stage"),
        columns=[entry("mnist", "MNIST, Gaussian", _MNIST)],
        options=_RUN,
        scales={"small": "100 rounds with noise calibrated for them; the paper's CNN of 4,266 parameters"},
        seeds={"small": [0, 1, 2]},
        minutes={"small": 0.4},
        paper={"privatefl": [22.95], "privatefl_two_stage": [91.84]},
        comparison=Comparison(5, better="higher"),
        notes=[_PERSONAL_NOTE],
    ),
    table(
        "selection.p2",
        title="Problem P2: constants that fit one loss, by the start of the search",
        shows="fitted constants, the residual of the loss, and the ratio of bias to noise that P1 takes from them",
        compute="selection.formulas:fitted",
        rows=named(
            {
                "smoothness": "L",
                "strong_convexity": "mu",
                "lr_offset": "gamma",
                "residual": "residual",
                "ratio": "L + 3/8 mu (gamma + 190)",
                "relative": "the same / that of the first start",
            },
            cell="formulas",
        ),
        columns=[
            entry(name, f"start {', '.join(map(str, start))}", arguments={"start": start})
            for name, start in (
                ("first", [1.0, 8.0, 1.0, 1.0, 0.1]),
                ("second", [1.0, 2.0, 1.0, 3.0, 1.0]),
                ("third", [1.0, 8.0, 1.0, 2.0, 0.7]),
            )
        ],
        decimals=4,
        scales={
            "paper": "100 equal clients, 10 rounds of the first stage, 190 of the second; a reported loss of ln 10"
        },
        notes=[
            "A start is |w_0 - w*|^2, gamma, sigma^2, L and mu, of which the paper gives none. The distance alone fits "
            "the loss; the other constants stay those of the start."
        ],
    ),
    table(
        "selection.quotas",
        title="Quotas that are no whole numbers: participations, and what they spend of the budget",
        shows="number of participations; share of the budget that they spend with Laplace noise. Columns: T_n",
        compute="selection.formulas:spent",
        rows=named(
            {
                "up": "participations as printed: until C_n >= T_n",
                "spent": "share of the budget, each with epsilon / T_n",
            },
            cell="formulas",
        ),
        columns=[entry(f"t{quota:g}", f"{quota:g}", arguments={"quota": quota}) for quota in (0.4, 1.3, 2.5, 9.7)],
        decimals=3,
        scales={"paper": "Laplace noise, delta 0, where the epsilons of participations add up"},
        notes=["Ours are the exact optimum among whole numbers, not rounded ones of the paper's."],
    ),
    table(
        "selection.alpha",
        title="Figure 5, unequal shares of classes, Fashion-MNIST, 100 clients",
        shows=_SHOWS,
        rows=_rows(*_SWEPT),
        columns=[
            entry(f"{name}_alpha{alpha:g}", f"{title}, Dirichlet({alpha:g})", {**options, **_dirichlet(alpha)})
            for name, title, options in _SETTINGS
            for alpha in (0.5, 2, 8)
        ],
        options=_BASE,
        **_SWEEP,
        notes=["The paper's figure has no readable numbers: gains of 30 to 40 points at a very small alpha."],
    ),
    table(
        "selection.budgets",
        title="Figure 4, the largest budget, Fashion-MNIST, 100 clients",
        shows=_SHOWS,
        rows=_rows(*_SWEPT),
        columns=[
            entry(f"{name}_eps{high}", f"{title}, epsilon up to {high}", {**options, "privacy.epsilon.high": high})
            for name, title, options in _SETTINGS
            for high in (1, 2, 6)
        ],
        options=_RUN,
        **_SWEEP,
        notes=["The paper's figure has no readable numbers. Budgets are uniform from 0.5 on."],
    ),
]
