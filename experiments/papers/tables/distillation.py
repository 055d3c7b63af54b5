"""Tables of Wang and Wang (2024), "DistDD: Distributed Data Distillation Aggregation through Gradient Matching", and of
what it leaves out.
"""

from experiments.papers.declarations import by_column, by_scale, entry, lazy, named, table, with_lines
from experiments.papers.experiment import Comparison

_TUNED_NOTE = "With tuned image steps clients hold 48,000 records: the 12,000 of distillation.tuning are set aside."
_CHOICE = (
    "Candidates are ranked by accuracy on 12,000 public records, no test record chooses. Those that train on public "
    "records train on 10,000, as long as the federated ones, and are ranked on the other 2,000. Ranking on the set's "
    "other images needs no public record: each of three nets trains on two thirds of the set."
)
_TEST = "accuracy on the official test set, %; for a set the mean of three fresh nets trained on it"


def _set(**options) -> dict:
    """Options of the strategy."""
    return {f"strategies.distillation.{name}": value for name, value in options.items()}


# Clients by Dirichlet draws of each class, with enough records for a batch of 64 each.
_RECORDS = {"data.name": "fashion_mnist", "data.partition": {"name": "dirichlet", "alpha": 1.0, "min_records": 64}}
_POPULATION = {**_RECORDS, "privacy": None}
_NET = {"model.name": "convnet", "model.width": by_scale(small=32, paper=128)}
# Half of the clients a round, the condensation paper's steps for ten images a class, and one evaluation at the end.
_STEPS_OF_PAPER = {
    "images_per_class": by_scale(small=10, paper=100),
    "participation_fraction": 0.5,
    "image_learning_rate": by_scale(small=10.6, paper=39.4),
    "records_per_class": by_scale(small=64, paper=256),
}
_DISTILLED = {
    **_NET,
    "rounds": by_scale(small=100, paper=500),
    "evaluation.every": by_scale(small=100, paper=500),
    **_set(**_STEPS_OF_PAPER),
}
_EVERYONE = {**_DISTILLED, **_set(participation_fraction=1.0)}
_ONE = {"clients.count": 1, **_set(min_participants=1, min_records_per_target=1)}
_DSA = _set(augmentation="dsa")


def _best(option: str):
    """What distillation.tuning chooses."""
    path = f"strategies.distillation.{option}"
    columns = {"": "public"}
    return lazy("leaderboard.tuning:option_of_best", table="distillation.tuning", columns=columns, option=path)


_STEPS = _set(image_steps=_best("image_steps"), image_learning_rate=_best("image_learning_rate"))
# A class gradient of one client of as many records as one of five clients.
_OF_FIVE = _set(records_per_class=320)
_SET_ASIDE = {"data.public_records": 12000}  # the records that chose these steps, which no client holds
# Few rounds with a new net in every second one, whatever the size of the set.
_SHORT = {**_STEPS, "rounds": 20, "evaluation.every": 20, **_set(reinit_every=2)}
_TUNED = {**_SET_ASIDE, **_DISTILLED, **_SHORT}

_FEDERATED: dict = {"study": "distillation.studies:federated"}
_RANDOM: dict = {"study": "distillation.studies:random_records"}
_TRAINED_SET: dict = {"study": "distillation.studies:distilled"}
_AT_TEN: dict = {"experiment": "distillation.baselines", "column": "alpha1"}
_SEEDS = {"small": [0, 1, 2]}


def _shown(rows: list[dict]) -> list[dict]:
    return [{"value": "test_accuracy", **row} for row in rows]


# What all private tables share, and what distillation.private_tuning chooses: up to epsilon 2 at 1, above at 8.
_BUDGET = {**_SET_ASIDE, **_RECORDS, "clients.count": 10, "privacy.delta": 1.0e-5, "privacy.clip_norm": 1.0}
_DP_FEDAVG = {**_NET, "clients.batch_size": 64, "strategies": {"size_weighted": {}}}


def _best_private(rows: str, option: str):
    return lazy(
        "leaderboard.tuning:option_of_best",
        table="distillation.private_tuning",
        columns={"eps0.5": "eps1", "eps1": "eps1", "eps2": "eps1", "eps4": "eps8", "eps8": "eps8"},
        rows=rows,
        option=option,
    )


_PRIVATE_SET = {
    **_EVERYONE,
    "rounds": _best_private("distdd", "rounds"),
    "evaluation.every": _best_private("distdd", "evaluation.every"),
    **_set(
        row_weights="noise_aware",
        image_steps=_best("image_steps"),
        image_learning_rate=_best_private("distdd", "strategies.distillation.image_learning_rate"),
        reinit_every=_best_private("distdd", "strategies.distillation.reinit_every"),
    ),
}
_TUNED_FEDAVG = {
    **_DP_FEDAVG,
    "rounds": 5,
    "evaluation.every": 5,
    "clients.learning_rate": _best_private("dpfedavg", "clients.learning_rate"),
}

_SETS = [
    table(
        "distillation.baselines",
        title="What a set of 10 images a class is worth, Fashion-MNIST, 10 clients, half of them a round, without "
        "privacy",
        shows=_TEST,
        rows=_shown(
            [
                entry(
                    "literal",
                    "DistDD as printed: one initialisation",
                    {
                        **_DISTILLED,
                        # dots in the name of a class are no levels
                        "strategies": {"experiments.papers.distillation.printed.AsPrinted": _STEPS_OF_PAPER},
                    },
                ),
                entry("one_step", "DistDD, new initialisations", _DISTILLED),
                entry("ten_steps", "DistDD, ten image steps a release", {**_DISTILLED, **_set(image_steps=10)}),
                entry("ten_steps_dsa", "DistDD, ten steps and DSA", {**_DISTILLED, **_set(image_steps=10), **_DSA}),
                entry("tuned", "DistDD, 20 rounds, image steps tuned on public records", _TUNED),
                entry(
                    "centralised",
                    "centralised matching, the same rounds and image steps",
                    {**_TUNED, **_OF_FIVE, **_ONE},
                    column="alpha1",
                ),
                entry(
                    "local",
                    "local matching, the same rounds and image steps: mean of four clients",
                    {**_TUNED, **_OF_FIVE},
                    study="distillation.studies:local",
                ),
                entry("random", "as many random real records", _DISTILLED, column="alpha1", **_RANDOM),
                entry(
                    "random_dsa",
                    "as many random real records, trained with DSA",
                    {**_DISTILLED, **_DSA},
                    column="alpha1",
                    **_RANDOM,
                ),
                entry(
                    "noise", "as many images of noise", _DISTILLED, column="alpha1", study="distillation.studies:noise"
                ),
                entry(
                    "public",
                    "a net trained on the 12,000 public records, 30 epochs",
                    {**_DISTILLED, **_SET_ASIDE},
                    column="alpha1",
                    study="distillation.studies:public_records",
                ),
                entry(
                    "whole",
                    "all records, 30 epochs",
                    _DISTILLED,
                    column="alpha1",
                    study="distillation.studies:all_records",
                ),
            ]
        ),
        columns=[
            entry(f"alpha{alpha:g}", f"Dirichlet {alpha:g}", {"data.partition.alpha": alpha}) for alpha in (1.0, 0.1)
        ],
        options={**_POPULATION, "clients.count": 10},
        **_TRAINED_SET,
        scales={
            "small": "100 rounds, where a row does not say 20, ConvNet of width 32, at most 64 records a class and "
            "client, 10 images a class"
        },
        minutes={"small": 6},
        seeds=_SEEDS,
        notes=[
            "More image steps a release cost neither traffic nor privacy. Rows without clients show the same cell "
            "twice. Nets train 300 epochs on a set, and 1,000 with DSA. Centralised and local gradients have as many "
            "records as those of a round: 320 of a class.",
            _TUNED_NOTE,
        ],
    ),
    table(
        "distillation.tuning",
        title="Steps of the images towards a release, on public records alone: 10 clients with 10,000 of them, "
        "Dirichlet 1",
        shows="accuracy on 2,000 other public records, %, mean of three fresh nets trained on the set",
        rows=_shown(
            [
                entry(
                    f"lr{rate:g}_steps{steps}",
                    f"learning rate {rate:g}, {steps} steps",
                    _set(image_learning_rate=rate, image_steps=steps),
                )
                for steps, rates in ((10, (10.6, 31.8, 106, 318, 1060)), (30, (106, 318, 1060, 3180)))
                for rate in rates
            ]
        ),
        columns=named({"public": "accuracy"}),
        options={
            **_DISTILLED,
            **_SET_ASIDE,
            **_POPULATION,
            "clients.count": 10,
            "data.use_public": True,
            "rounds": 40,
            "evaluation.every": 40,
        },
        **_TRAINED_SET,
        scales={"small": "40 rounds, ConvNet of width 32, at most 64 records a class and client"},
        minutes={"small": 3},
        notes=["No private record and no test record takes part."],
    ),
    table(
        "distillation.sizes",
        title="Figure 8, what a set is worth by its size, in the setting of distillation.baselines at Dirichlet 1",
        shows=_TEST,
        rows=_shown(
            [
                entry(
                    "tuned",
                    "DistDD, 20 rounds, image steps tuned on public records at ten images",
                    _SHORT,
                    elsewhere={"ipc10": _AT_TEN},
                ),
                entry("random", "as many random real records", **_RANDOM, elsewhere={"ipc10": _AT_TEN}),
            ]
        ),
        columns=[
            entry(f"ipc{count}", f"{count} a class", _set(images_per_class=count), x=count) for count in (1, 10, 20, 50)
        ],
        options={**_POPULATION, **_SET_ASIDE, **_DISTILLED, "clients.count": 10, **_set(reinit_every=10)},
        **_TRAINED_SET,
        scales={"small": "ConvNet of width 32, at most 64 records a class and client"},
        seeds=_SEEDS,
        minutes={"small": 8},
        panels=[{"title": "Fashion-MNIST", "x": "images a class", "y": "test accuracy, %", "band": "several"}],
        notes=[
            "A new net every two rounds, whatever the size of the set. The paper has 20 clients, 30 and 40 images, "
            "too, and centralised and local matching, which are in distillation.baselines."
        ],
    ),
    table(
        "distillation.widths",
        title="What a set of 10 images a class is worth by the width of its net, in the setting of "
        "distillation.baselines at Dirichlet 1",
        shows=_TEST,
        rows=_shown(
            [
                entry(
                    "tuned",
                    "DistDD, 20 rounds, image steps tuned on public records at width 32",
                    _SHORT,
                    elsewhere={"w32": _AT_TEN},
                ),
                entry("random", "as many random real records", **_RANDOM, elsewhere={"w32": _AT_TEN}),
            ]
        ),
        columns=[entry(f"w{width}", f"width {width}", {"model.width": width}, x=width) for width in (16, 32, 64, 128)],
        options={**_POPULATION, **_SET_ASIDE, **_DISTILLED, "clients.count": 10, **_set(reinit_every=10)},
        **_TRAINED_SET,
        scales={"small": "at most 64 records a class and client, 10 images a class"},
        seeds=_SEEDS,
        minutes={"small": 15},
        panels=[{"title": "Fashion-MNIST", "x": "width", "log": "x", "y": "test accuracy, %", "band": "several"}],
        notes=["Nets of one width make the set and are trained on it."],
    ),
    table(
        "distillation.inversion",
        title="What one round of class gradients gives away: one client, a tenth of its records of each class on "
        "average",
        shows="correlation of the server's image of a class with the nearest record, mean over classes",
        study="distillation.studies:given_away",
        rows=with_lines(
            [
                *(
                    entry(
                        f"records{count}",
                        f"{count:,} records, without noise",
                        {"data.records_per_client": count, "privacy": None},
                    )
                    for count in (10, 100, 1000)
                ),
                entry(
                    "records10_private",
                    "10 records, epsilon 8",
                    {
                        "data.records_per_client": 10,
                        "privacy.epsilon": 8.0,
                        "privacy.delta": 1.0e-5,
                        "privacy.clip_norm": 1.0,
                    },
                ),
            ],
            [
                entry("own", ": nearest record of the client", value="own"),
                entry("strangers", ": nearest of as many test records", value="strangers"),
            ],
        ),
        columns=[
            entry("logistic", "logistic regression", {"model": {"name": "logistic"}}),
            entry("convnet", "ConvNet", _NET),
        ],
        options={
            "data.name": "fashion_mnist",
            "data.partition.name": "stratified",
            **_ONE,
            "clients.batch_size": None,
            "rounds": 1,
            **_set(
                images_per_class=1,
                image_steps=500,
                net_epochs=0,
                evaluation_epochs=1,
                sampling="full",
                image_learning_rate=by_column({"logistic": 100, "convnet": 1060}),
            ),
        },
        scales={"small": "one round, one image a class, 500 image steps"},
        minutes={"small": 0.3},
        notes=[
            "Distillation refuses one participant unless `min_participants` and `min_records_per_target` are 1. Test "
            "records are of the same class."
        ],
    ),
    # From one initialisation to the next there are as many rounds as images a class.
    table(
        "distillation.published",
        title="The centralised method at its papers' scale, Fashion-MNIST",
        shows=_TEST,
        rows=_shown(
            [
                entry(
                    name,
                    title,
                    {
                        **_DISTILLED,
                        **_ONE,
                        "rounds": by_column({"ipc1": 1000, "ipc10": 10000, "ipc50": 50000}),
                        "evaluation.every": by_column({"ipc1": 200, "ipc10": 2000, "ipc50": 10000}),
                        **_set(image_learning_rate=by_column({"ipc1": 394, "ipc10": 39.4, "ipc50": 7.88})),
                        **augmentation,
                    },
                )
                for name, title, augmentation in (
                    ("dc", "gradient matching", {}),
                    ("dsa", "gradient matching with DSA", _DSA),
                )
            ]
            + [
                entry(
                    "tuned",
                    "gradient matching, 40 rounds, image steps tuned on public records",
                    {
                        **_SET_ASIDE,
                        **_DISTILLED,
                        **_ONE,
                        **_STEPS,
                        "rounds": 40,
                        "evaluation.every": 20,
                        **_set(reinit_every=10),
                    },
                )
            ]
        ),
        columns=[entry(f"ipc{count}", f"{count} a class", _set(images_per_class=count)) for count in (1, 10, 50)],
        options=_POPULATION,
        **_TRAINED_SET,
        scales={"paper": "1,000 initialisations of 1, 10 or 50 rounds, ConvNet of width 128, 256 records a class"},
        paper={"dc": [70.5, 82.3, 83.6], "dsa": [70.6, 84.6, 88.7]},
        comparison=Comparison(3, better="higher"),
        minutes={"paper": 120},
        notes=[
            "The paper's numbers are those of Zhao, Mopuri and Bilen (2021), and with DSA of Zhao and Bilen (2021). No "
            "paper has the last row: image steps tuned at width 32 and 10 images a class (distillation.tuning). In the "
            "other rows a step is the papers' 0.1 for any number of images."
        ],
    ),
]

_BY_SIZE = by_column({"eps1_ipc1": 1, "eps8_ipc1": 1, "eps1_ipc50": 50, "eps8_ipc50": 50}, 10)
_AT_EPS1, _AT_EPS8 = {"column": "eps1_ipc10"}, {"column": "eps8_ipc10"}
_ONE_RECORD, _FIFTY = ({"experiment": "distillation.sizes", "column": column} for column in ("ipc1", "ipc50"))

_PRIVATE = [
    table(
        "distillation.private_tuning",
        title="Rounds and learning rates with privacy, on public records alone: 10 clients who draw 4,800 of 10,000 "
        "each",
        shows="accuracy on 2,000 other public records, %; for a set the mean of three fresh nets trained on it",
        rows=_shown(
            [
                entry(
                    f"distdd_rounds{rounds}_lr{rate}",
                    f"DistDD, {rounds} rounds, learning rate {rate}",
                    {
                        **_EVERYONE,
                        **_STEPS,
                        "rounds": rounds,
                        "evaluation.every": rounds,
                        **_set(row_weights="noise_aware", reinit_every=reinit, image_learning_rate=rate),
                    },
                )
                for rounds, reinit, rate in ((5, 1, 106), (5, 1, 318), (5, 1, 1060), (20, 5, 318))
            ]
            + [
                entry(
                    f"dpfedavg_lr{rate}",
                    f"DP-FedAvg, 5 rounds, learning rate {rate}",
                    {**_DP_FEDAVG, "rounds": 5, "evaluation.every": 5, "clients.learning_rate": rate},
                    **_FEDERATED,
                )
                for rate in (0.05, 0.1, 0.25, 0.625)
            ]
        ),
        columns=[entry(f"eps{epsilon}", f"epsilon {epsilon}", {"privacy.epsilon": epsilon}) for epsilon in (1, 8)],
        options={
            **_BUDGET,
            "data.use_public": True,
            "data.partition": {"name": "overlapping"},
            "data.records_per_client": 4800,
        },
        **_TRAINED_SET,
        scales={"small": "ConvNet of width 32, 10 images a class, all clients in every round"},
        minutes={"small": 8},
        notes=[
            "Clients have as many records as in the private tables, so that noise and numbers of steps are the same. "
            "Their records overlap, and have all classes alike. A new net every round of 5, and every fifth of 20. No "
            "private record and no test record takes part."
        ],
    ),
    table(
        "distillation.one_shot",
        title="Private sets by budget and size: one release of each client, or several rounds; Fashion-MNIST, 10 "
        "clients, Dirichlet 1, width 32",
        shows=_TEST,
        rows=_shown(
            [
                entry(
                    "one_shot",
                    "one release of feature means, no public record",
                    {**_NET, "rounds": 1, "evaluation.every": 1, "strategies.feature_means.images_per_class": _BY_SIZE},
                ),
                entry(
                    "tuned",
                    "DistDD, rounds and image steps tuned on public records",
                    {**_PRIVATE_SET, **_set(images_per_class=_BY_SIZE)},
                ),
                entry(
                    "dpfedavg",
                    "DP-FedAvg, 5 rounds, learning rate tuned on public records",
                    _TUNED_FEDAVG,
                    **_FEDERATED,
                    elsewhere={
                        "eps8_ipc1": _AT_EPS8,
                        "eps8_ipc50": _AT_EPS8,
                        "eps1_ipc1": _AT_EPS1,
                        "eps1_ipc50": _AT_EPS1,
                    },
                ),
                entry(
                    "random",
                    "as many random real records, which nobody may hand out",
                    **_AT_TEN,
                    elsewhere={
                        "eps1_ipc1": _ONE_RECORD,
                        "eps8_ipc1": _ONE_RECORD,
                        "eps1_ipc50": _FIFTY,
                        "eps8_ipc50": _FIFTY,
                    },
                ),
                entry("public", "a net trained on the 12,000 public records, 30 epochs, no client", **_AT_TEN),
            ]
        ),
        columns=[
            entry(
                f"eps{epsilon:g}_ipc{count}",
                f"epsilon {epsilon:g}, {count} {'image' if count == 1 else 'images'} a class",
                {"privacy.epsilon": epsilon},
            )
            for epsilon, count in ((0.5, 10), (1, 10), (2, 10), (4, 10), (8, 10), (1, 1), (8, 1), (1, 50), (8, 50))
        ],
        options=_BUDGET,
        **_TRAINED_SET,
        seeds=_SEEDS,
        scales={"small": "all clients and all their records"},
        minutes={"small": 6},
        summary="distillation.figures:costs_of_sets",
        notes=[
            "Clients hold 48,000 records: the 12,000 public ones, by which distillation.private_tuning chooses, are "
            "set aside. Epsilons are those of one record of one client (add or remove one) at delta 1e-5, with full "
            "batches for sets and Poisson sampling for DP-FedAvg. Budgets of sets are composed exactly.",
            "Random records are of all 60,000 with 10 images a class, and of the 48,000 with 1 and 50. Defaults of the "
            "one release were fixed before this table. DistDD and DP-FedAvg have the settings of epsilon 1 up to 2, "
            "and those of 8 above. Where a row repeats a number, it does not depend on the budget or on the size.",
        ],
    ),
    table(
        "distillation.private_search",
        title="One budget for a search and the final run: 8 candidates, Fashion-MNIST, 10 clients, Dirichlet 1",
        shows="accuracy of the final run on the official test set, %",
        rows=_shown(
            [
                entry(
                    "set",
                    "private set of one release (half of epsilon), nets ranked on its held-out images, and final run",
                    study="distillation.private_search:tuned_on_set",
                ),
                entry(
                    "default",
                    "default net, whole budget",
                    cell="dpfedavg",
                    experiment="distillation.one_shot",
                    column="eps2_ipc10",
                    elsewhere={"eps8": _AT_EPS8},
                ),
                entry(
                    "public",
                    "tuned on 12,000 public records, whole budget",
                    study="distillation.private_search:tuned_on_public",
                ),
                entry(
                    "trials",
                    "five private trials of two rounds (0.15 of epsilon each) and final run, scored on public records",
                    study="distillation.private_search:private_trials",
                ),
            ]
        ),
        columns=[
            entry(f"eps{epsilon:g}", f"epsilon {epsilon:g}", {"privacy.epsilon": epsilon}) for epsilon in (2.0, 8.0)
        ],
        options={**_BUDGET, **_TUNED_FEDAVG},
        scales={"small": "ConvNet of width 32; a set of 10 images a class from one release"},
        seeds=_SEEDS,
        minutes={"small": 40},
        summary="distillation.private_search:orders",
        notes=[
            "Every row costs each client at most the epsilon of its column at delta 1e-5, composed by the accountant. "
            "Candidates are ConvNets of width 16 or 32, norm instance or none, pooling avg or max; the default is 32 "
            "wide with instance and avg. All final runs have five rounds and the learning rate that "
            "distillation.private_tuning chooses for the default on public records. Scores on public records are free."
        ],
    ),
]

_FEW_RECORDS = {**_SET_ASIDE, **_POPULATION, "clients.count": 10, "data.records_per_client": 1200}
_CANDIDATE = {
    **_FEW_RECORDS,
    "strategies": {"size_weighted": {}},
    "rounds": by_column({"early": 1}, 10),
    "evaluation.every": by_column({"early": 1}, 10),
}
_SEARCH_SCALE = {"small": "12,000 records, 10 rounds; the set: 100 rounds, 10 images a class"}
_ON_TEST = "accuracy of the candidate on the official test set, %, as each scorer trains it"
_SCORERS = {
    "federated": "federated, 10 rounds",
    "distilled": "trained on the distilled set",
    "set_only": "trained on parts of the set, ranked on its other images",
    "random": "trained on as many random records",
    "public": "trained on public records",
    "early": "federated, 1 round",
}
# width, depth, norm, pooling; random.Random(0).sample after the first
_NETS = [
    entry(
        f"net{number:02}",
        f"{width} wide, {depth} deep, norm {norm}, {pooling} pooling",
        {"model": {"name": "convnet", "width": width, "depth": depth, "norm": norm, "pooling": pooling}},
        value="test_accuracy",
    )
    for number, (width, depth, norm, pooling) in enumerate(
        [
            (32, 3, "instance", "avg"),
            (64, 2, "none", "avg"),
            (64, 2, "instance", "avg"),
            (16, 2, "instance", "max"),
            (32, 2, "group", "max"),
            (64, 3, "none", "avg"),
            (64, 3, "instance", "max"),
            (32, 2, "instance", "avg"),
            (32, 2, "none", "max"),
            (64, 2, "instance", "max"),
            (16, 3, "instance", "avg"),
            (64, 2, "group", "avg"),
            (16, 3, "group", "avg"),
            (32, 3, "none", "max"),
            (16, 3, "none", "max"),
            (64, 3, "none", "max"),
            (16, 2, "group", "max"),
            (64, 3, "group", "max"),
            (32, 3, "none", "avg"),
            (16, 2, "instance", "avg"),
            (16, 3, "instance", "max"),
        ]
    )
]
_SETTINGS = [
    (rate, batch_size, epochs) for rate in (0.003, 0.01, 0.03, 0.1, 0.3) for batch_size in (16, 64) for epochs in (1, 2)
]

_SEARCHES = [
    table(
        "distillation.search_set",
        title="The set that searches train on: Fashion-MNIST, 12,000 records of 10 clients, Dirichlet 1",
        shows="accuracy on the official test set, %; the mean of three fresh nets trained on it",
        rows=_shown([entry("distdd", "DistDD, 30 image steps, learning rate 318")]),
        columns=named({"set": "accuracy"}),
        options={**_FEW_RECORDS, **_DISTILLED, **_set(image_steps=30, image_learning_rate=318)},
        **_TRAINED_SET,
        scales=_SEARCH_SCALE,
        minutes={"small": 12},
        notes=["The best of seven settings in distillation.tuning when the searches were made."],
    ),
    table(
        "distillation.nas",
        title="Search of a net: 21 ConvNets, Fashion-MNIST, 10 clients of 1,200 records on average, Dirichlet 1",
        shows=_ON_TEST,
        rows=_NETS,
        columns=named(_SCORERS),
        options={**_CANDIDATE, "clients.batch_size": 32, "clients.learning_rate": 0.05},
        study="distillation.studies:candidate_net",
        scales=_SEARCH_SCALE,
        minutes={"small": 1},
        draw="distillation.figures:scorers",
        summary="distillation.figures:judgements",
        notes=[
            _CHOICE,
            "The first net is the one without a search; the others are drawn once from 36. All train with batch 32 and "
            "learning rate 0.05, and 200 epochs on the set of the first net (distillation.search_set).",
        ],
    ),
    table(
        "distillation.hpo",
        title="Search of hyperparameters: 20 settings, Fashion-MNIST, 10 clients of 1,200 records on average, "
        "Dirichlet 1",
        shows=_ON_TEST,
        rows=[
            entry(
                f"rate{number:02}",
                f"learning rate {rate:g}, batch {batch_size}, {epochs} epoch{'s' if epochs > 1 else ''}",
                {"clients.learning_rate": rate, "clients.batch_size": batch_size, "clients.local_epochs": epochs},
                value="test_accuracy",
            )
            for number, (rate, batch_size, epochs) in enumerate(_SETTINGS)
        ],
        columns=named(_SCORERS),
        options={
            **_CANDIDATE,
            "model": {"name": "convnet", "width": 32, "depth": 3, "norm": "instance", "pooling": "avg"},
        },
        study="distillation.studies:candidate_hyperparameters",
        scales=_SEARCH_SCALE,
        minutes={"small": 1},
        draw="distillation.figures:scorers",
        summary="distillation.figures:judgements",
        notes=[_CHOICE, "The paper has no numbers of it. On a set a net makes 60 passes for each local epoch."],
    ),
    *(
        table(
            f"distillation.{name}",
            title=title,
            shows=_ON_TEST,
            rows=[{**net, "experiment": "distillation.nas"} for net in _NETS],
            columns=named({scorer: _SCORERS[scorer] for scorer in ("federated", "distilled")}),
            scales=_SEARCH_SCALE,
            shown=False,
            draw=f"distillation.figures:{draw}",
            notes=[note],
        )
        for name, title, draw, note in (
            (
                "figure4",
                "Figure 4, search of a net, the best of the first k candidates",
                "best_of_first",
                "The choice is made on public records, the curves are of the test set.",
            ),
            (
                "figure5",
                "Figure 5, what n tunings cost",
                "costs_of_tunings",
                "Means on one machine, where clients and server share its cores, without the time of a network.",
            ),
        )
    ),
]

TABLES = [*_SETS, *_PRIVATE, *_SEARCHES]
