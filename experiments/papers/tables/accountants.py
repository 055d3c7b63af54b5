"""An experiment of no paper: what a tight accountant gains, for the same budgets and seeds."""

from experiments.papers.declarations import table, with_lines

TABLES = [
    table(
        "accountants.gain",
        title="The same budgets with two accountants, Fashion-MNIST",
        shows="accuracy, %; mean noise multiplier of the clients",
        rows=with_lines(
            [{"name": name, "title": name, "options": {"privacy.accountant": name}} for name in ("pld", "rdp")],
            [
                {"name": "accuracy", "title": ": accuracy", "value": "accuracy"},
                {"name": "noise", "title": ": noise multiplier", "value": "noise_multiplier"},
            ],
        ),
        columns=[
            {
                "name": "main",
                "title": "main job, learning rate 0.2",
                "options": {"config": "conf/fmnist.yaml", "clients.learning_rate": 0.2, "evaluation.every": 30},
            },
            {
                "name": "clustered",
                "title": "clustered, 10 rounds",
                "options": {"config": "conf/clustered.yaml", "rounds": 10, "evaluation.every": 10},
            },
            {
                "name": "selection",
                "title": "biased selection, 60 rounds",
                "options": {"config": "conf/biased_selection.yaml", "rounds": 60, "evaluation.every": 60},
            },
        ],
        recorder="recorder:NoiseRecorder",
        scales={"small": "main job with 30 rounds, others with fewer rounds"},
        seeds={"small": [0, 1, 2]},
        minutes={"small": 5},
        decimals=3,
        notes=[
            "Accuracy is that of the model on the official test set; with clusters, the mean over clients of their "
            "accuracy on their test records."
        ],
    )
]
