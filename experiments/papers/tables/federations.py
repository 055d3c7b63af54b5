"""Seven rules in five federations, each with one learning rate for all of them. No paper has these tables."""

from experiments.papers.declarations import by_column, entry, lazy, table

RATES = (0.05, 0.12, 0.3)  # candidates of every rule
#: name -> title and strategies
_RULES: dict = {
    "dpfedavg": ("DPFedAvg", {"size_weighted": {}}),
    "noise_aware": ("noise_aware", {"noise_aware": {}}),
    "robust_hdp": ("Robust-HDP as printed", {"robust_hdp": {"estimator": "rpca", "row_choice": "head"}}),
    "local": ("local", {"size_weighted": {}, "local": {}}),
    "mr_mtl": ("MR-MTL, pull 0.2", {"size_weighted": {}, "mr_mtl": {"pull": 0.2}}),
    "clustered": ("clustered and noise_aware", {"noise_aware": {}, "clustered": {}}),
    "mixed_effects": ("mixed_effects", {"mixed_effects": {}}),
}
_ROTATION = {"data.groups": {"name": "rotation", "sizes": [3, 5, 6, 6]}}
_IID = {"clients.learning_rate": RATES[0], "model": {"name": "cnn_tiny"}, "data.records_per_client": 480}
_RUN = {
    "config": "conf/fmnist.yaml",
    "rounds": 10,
    "privacy.reserve_rounds": 20,  # the noise of 30 rounds
    "evaluation.every": 10,
}


def _dist(number: int) -> dict:
    return entry(f"dist{number}", f"Dist{number}", {"privacy.epsilon.name": f"dist{number}"})


TABLES = [
    table(
        "federations.tuning",
        title="Learning rates of seven rules, on public records alone",
        shows="mean accuracy of the clients, %, who draw from 10,000 public records, each scored on 2,000 others like "
        "its own",
        rows=[
            entry(f"{name}_{rate}", f"{title}, {rate}", {"clients.learning_rate": rate, "strategies": strategies})
            for name, (title, strategies) in _RULES.items()
            for rate in RATES
        ],
        columns=[_dist(1), _dist(5), entry("groups", "four groups", _ROTATION)],
        options={
            **_RUN,
            "data.use_public": True,
            "data.partition.name": "overlapping",
            "data.test_per_client": 2000,
        },
        scales={"small": "10 rounds, with the noise of 30"},
        minutes={"small": 1.5},
        summary="federations.rates:choices",
        notes=["No private record takes part. A rule has the rate with the best mean over the three columns."],
    ),
    table(
        "federations.accuracy",
        title="One rule for every federation, Fashion-MNIST, 20 clients",
        shows="mean over the clients of the accuracy of the client's model on official test records that are "
        "distributed like its own records, %",
        rows=[
            entry(
                name,
                title,
                {
                    "clients.learning_rate": lazy("federations.rates:chosen", table="federations.tuning"),
                    "strategies": strategies,
                },
            )
            for name, (title, strategies) in _RULES.items()
        ],
        columns=[
            *map(_dist, (1, 5, 9)),
            entry(
                "dirichlet",
                "Dirichlet 0.3",
                {"data.records_per_client": None, "data.partition.name": "dirichlet", "data.partition.alpha": 0.3},
            ),
            entry("groups", "four groups", _ROTATION),
        ],
        options={**_RUN, "data.test_per_client": by_column({"dirichlet": 1000}, 10000)},
        scales={"small": "10 rounds, with the noise of 30"},
        seeds={"small": [200, 201, 202, 203, 204]},
        minutes={"small": 1.7},
        ours="mixed_effects",
        rivals=[name for name in _RULES if name != "mixed_effects"],
        summary="federations.rates:largest_deficits",
        notes=["The columns Dirichlet 0.3 and four groups have the budgets of Dist1."],
    ),
    table(
        "federations.found",
        title="Rounds until groups are found, Fashion-MNIST, 21 clients in four groups of rotated images",
        shows="first round from which on every client is in the right group; 31: never",
        recorder="federations.recorder:GroupsFound",
        rows=[
            entry(name, _RULES[name][0], {"strategies": _RULES[name][1]}, value="rounds")
            for name in ("mixed_effects", "clustered")
        ],
        columns=[
            entry(
                f"n{records}_eps{epsilon}",
                f"{records:,} records, epsilon {epsilon}",
                {"data.records_per_client": records, "privacy.epsilon": epsilon},
            )
            for epsilon in (2, 5)
            for records in (500, 1000, 2285)
        ],
        options={
            "config": "conf/clustered.yaml",
            "rounds": 30,
            "clients.learning_rate": RATES[0],
            "evaluation.every": 30,
        },
        scales={"small": "30 rounds"},
        seeds={"small": [200, 201, 202]},
        minutes={"small": 3},
        decimals=1,
    ),
    table(
        "federations.false_groups",
        title="Groups found where there are none, and where there are four, Fashion-MNIST, 20 clients",
        shows="runs of mixed_effects that end with more than one group, %",
        recorder="federations.recorder:GroupsFound",
        rows=[entry("mixed_effects", "mixed_effects", {"strategies": {"mixed_effects": {}}}, value="false")],
        columns=[entry("iid", "IID"), entry("groups", "four groups", _ROTATION)],
        options={**_RUN, **_IID, "privacy.epsilon": {"name": "dist1", "scale": 3}},
        scales={"small": "10 rounds, with the noise of 30; 480 records, a small CNN and three times Dist1's budgets"},
        seeds={"small": list(range(300, 400))},
        minutes={"small": 0.3},
        decimals=1,
    ),
    table(
        "federations.faults",
        title="Clients that lie or drop out, Fashion-MNIST, 20 clients with IID data, Dist1",
        shows="mean over the honest clients of the accuracy of the client's model, %",
        study="robustness.attacks:attacked",
        rows=[
            entry(name, _RULES[name][0], {"strategies": _RULES[name][1]})
            for name in ("dpfedavg", "noise_aware", "mixed_effects", "clustered")
        ],
        columns=[
            entry("none", "none"),
            entry("flip_5", "one sends ten times the opposite"),
            entry("collude_10", "two collude"),
            entry("absent", "30 % drop out of each round", {"network.dropout": 0.3}),
        ],
        options={**_RUN, **_IID, "privacy.epsilon.name": "dist1", "data.test_per_client": 10000},
        scales={"small": "10 rounds, with the noise of 30; 480 records and a small CNN"},
        seeds={"small": [200, 201, 202]},
        minutes={"small": 0.4},
        ours="mixed_effects",
        rivals=["dpfedavg", "noise_aware", "clustered"],
        notes=["Two colluding clients send one vector, opposite to the mean of the others and as long as theirs."],
    ),
]
