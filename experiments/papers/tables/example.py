"""An experiment of no paper, in seconds and without a download: to try the command, and to copy for a new paper."""

from experiments.papers.declarations import by_scale, entry, table

TABLES = [
    table(
        "example.digits",
        title="No paper's: handwritten digits, 5 clients with one budget",
        shows="mean accuracy of the clients on their own held-out records, %",
        rows=[
            entry("uniform", "uniform weights", {"strategies": {"uniform": {}}}),
            entry("size_weighted", "weights by data size", {"strategies": {"size_weighted": {}}}),
        ],
        columns=[entry(f"epsilon{epsilon}", f"epsilon {epsilon}", {"privacy.epsilon": epsilon}) for epsilon in (4, 16)],
        options={"config": "conf/digits.yaml", "rounds": by_scale(small=2, paper=20)},
        scales={"small": "2 rounds, to see how it works", "paper": "20 rounds"},
        minutes={"small": 0.1, "paper": 0.2},
    )
]
