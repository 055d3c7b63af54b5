"""Strategies beside clients that send false updates. No paper has these tables."""

from experiments.papers.declarations import entry, table

DIGITS = {
    "config": "conf/digits.yaml",
    "rounds": 12,
    "clients.count": 20,
    "privacy.epsilon": [4, 8, 16, 8] * 5,
    "privacy.delta": 1.0e-3,
}
RULES = [
    entry(name, title, {"strategies": strategies})
    for name, title, strategies in (
        ("size_weighted", "weights by data size", {"size_weighted": {}}),
        ("epsilon_weighted", "weights by budget", {"epsilon_weighted": {}}),
        ("pfa", "PFA, per tensor", {"pfa": {}}),
        ("robust_hdp", "Robust-HDP", {"robust_hdp": {"estimator": "rpca"}}),
        ("noise_aware", "noise_aware (ours)", {"noise_aware": {}}),
        ("noise_floor", "noise_aware and noise_floor (ours)", {"noise_aware": {}, "noise_floor": {}}),
        ("norm_bound", "norm bound", {"size_weighted": {}, "norm_bound": {}}),
        ("median", "median", {"size_weighted": {}, "median": {}}),
        ("trimmed_mean", "trimmed mean of the middle 20 %", {"size_weighted": {}, "trimmed_mean": {"share": 0.4}}),
        ("multi_krum", "multi-Krum, 40 % left out", {"size_weighted": {}, "multi_krum": {"share": 0.4}}),
        ("geometric_median", "geometric median", {"size_weighted": {}, "geometric_median": {}}),
    )
]
SCALES = {"small": "12 rounds, epsilon 4, 8 and 16, delta 1e-3"}

TABLES = [
    table(
        "robustness.attacks",
        title="Clients that send false updates, digits, 20 clients",
        shows="accuracy on the test set, %. Columns: attack and share of the clients",
        study="robustness.attacks:attacked",
        rows=RULES,
        columns=[
            entry("none", "none"),
            *(
                entry(f"{attack}_{share}", f"{attack}, {share} %")
                for attack in ("flip", "noise", "labels", "tiny", "collude", "push")
                for share in (10, 20, 40)
            ),
        ],
        options=DIGITS,
        scales=SCALES,
        seeds={"small": [0, 1, 2]},
        minutes={"small": 0.15},
        ours="noise_floor",
        rivals=[rule["name"] for rule in RULES if rule["name"] not in ("noise_aware", "noise_floor")],
        notes=[
            "flip: ten times the opposite update. noise: the update and ten times its length of noise. labels: honest "
            "updates from wrong labels. tiny: a hundredth of the update. collude: all attackers send one vector, "
            "opposite to the mean of the others and as long as their median update, without noise. push: all send one "
            "random vector in all rounds, a thousand times as long as the others' median update."
        ],
    ),
    table(
        "robustness.false_alarms",
        title="Honest updates that noise_floor leaves out, digits, 20 clients",
        shows="number of updates, mean over the seeds",
        recorder="robustness.attacks:FalseAlarms",
        rows=[
            entry("updates", "honest updates", value="updates", cell="all"),
            entry("removed", "left out", value="removed", cell="all"),
        ],
        columns=[
            entry("usual", "learning rate 0.5"),
            entry("fast", "learning rate 5", {"clients.learning_rate": 5}),
            entry("convnet", "cnn_tiny", {"model.name": "cnn_tiny"}),
            entry("laplace", "Laplace noise", {"privacy.mechanism": "laplace", "clients.batch_size": None}),
        ],
        options={
            **DIGITS,
            "rounds": 100,
            "evaluation.every": 100,
            "strategies": {"size_weighted": {}, "noise_floor": {}},
        },
        scales={"small": "100 rounds, epsilon 4, 8 and 16, delta 1e-3"},
        seeds={"small": [0, 1, 2, 3, 4]},
        minutes={"small": 0.5},
        decimals=1,
    ),
]
