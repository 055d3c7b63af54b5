"""An experiment of no paper: what a tight accountant gains, for the same budgets and seeds."""

from experiments.papers.declarations import entry, table, with_lines

TABLES = [
    table(
        "accountants.gain",
        title="The same budgets with two accountants, Fashion-MNIST",
        shows="accuracy, %; mean noise multiplier of the clients",
        rows=with_lines(
            [entry(name, name, {"privacy.accountant": name}) for name in ("pld", "rdp")],
            [
                entry("accuracy", ": accuracy", value="accuracy"),
                entry("noise", ": noise multiplier", value="noise_multiplier"),
            ],
        ),
        columns=[
            entry(
                "main",
                "main job, learning rate 0.2",
                {"config": "conf/fmnist.yaml", "clients.learning_rate": 0.2, "evaluation.every": 30},
            ),
            entry(
                "clustered",
                "clustered, 10 rounds",
                {"config": "conf/clustered.yaml", "rounds": 10, "evaluation.every": 10},
            ),
            entry(
                "selection",
                "biased selection, 60 rounds",
                {"config": "conf/biased_selection.yaml", "rounds": 60, "evaluation.every": 60},
            ),
        ],
        recorder="recorder:NoiseRecorder",
        scales={"small": "main job with 30 rounds, others with fewer rounds"},
        seeds={"small": [0, 1, 2]},
        minutes={"small": 5},
        decimals=3,
        notes=[
            "Accuracy is that of the model on the official test set; with clusters, the mean over clients of their "
            "accuracy on their test records.",
            "The cells were made with earlier defaults of the three strategies, the same for both accountants: their "
            "commands now give other numbers. A seed has the same clients and first model with both accountants.",
        ],
    )
]
