"""An experiment of no paper, in seconds and without a download: to try the command, and to copy for a new paper."""

from experiments.papers.declarations import by_scale, table

TABLES = [
    table(
        "example.digits",
        title="No paper's: handwritten digits, 5 clients with one budget",
        shows="mean accuracy of the clients on their own held-out records, %",
        rows=[
            {"name": "uniform", "title": "uniform weights", "options": {"strategies": {"uniform": {}}}},
            {
                "name": "size_weighted",
                "title": "weights by data size",
                "options": {"strategies": {"size_weighted": {}}},
            },
        ],
        columns=[
            {"name": f"epsilon{epsilon}", "title": f"epsilon {epsilon}", "options": {"privacy.epsilon": epsilon}}
            for epsilon in (4, 16)
        ],
        options={"config": "conf/digits.yaml", "rounds": by_scale(small=2, paper=20)},
        scales={"small": "2 rounds, to see how it works", "paper": "20 rounds"},
        minutes={"small": 0.1, "paper": 0.2},
    )
]
