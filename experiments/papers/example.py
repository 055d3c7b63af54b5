"""An experiment of no paper, in seconds and without a download: to try the command, and to copy for a new paper."""

from __future__ import annotations

from experiments.papers.experiment import Column, Experiment, Row, Training

_STRATEGIES = {"uniform": "{uniform: {}}", "size_weighted": "{size_weighted: {}}"}


def _words(row: str, column: str, scale: str) -> list[str]:
    rounds = {"small": "2", "paper": "20"}[scale]
    words = ["--config", "conf/digits.yaml", "--rounds", rounds, "--strategies", _STRATEGIES[row]]
    return [*words, "--privacy.epsilon", column.removeprefix("epsilon")]


EXPERIMENTS = (
    Experiment(
        name="example.digits",
        title="No paper's: handwritten digits, 5 clients with one budget",
        shows="mean accuracy of the clients on their own held-out records, %",
        rows={"uniform": Row("uniform weights"), "size_weighted": Row("weights by data size")},
        columns={"epsilon4": Column("epsilon 4"), "epsilon16": Column("epsilon 16")},
        cells=dict.fromkeys(_STRATEGIES, Training(_words)),
        scales={"small": "2 rounds, to see how it works", "paper": "20 rounds"},
        minutes={"small": 0.1, "paper": 0.2},
    ),
)
