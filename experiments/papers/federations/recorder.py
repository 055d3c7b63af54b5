"""When the true groups of clients were found, and groups where there are none."""

from typing import Any

from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.view import View
from experiments.papers.recorder import Recorder, numbers_of


class GroupsFound(Recorder):
    """`rounds`: the first round from which on all clients were in the right group, or one more than the run has.

    `false`: 100 if the last round shows more than one group, else 0.
    """

    _kept = ("_right",)

    def __init__(self) -> None:
        super().__init__()
        self._right: list[bool] = []  # of each round

    def on_round_end(self, view: View, report: RoundReport) -> None:
        self._right.append(bool(report.metrics.get("clustering_accuracy") == 1))

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        wrong = [number for number, right in enumerate(self._right, start=1) if not right]
        several = numbers_of(result).get("num_groups", 1.0) > 1
        return {**super()._values(view, result), "rounds": max(wrong, default=0) + 1, "false": 100.0 * several}
