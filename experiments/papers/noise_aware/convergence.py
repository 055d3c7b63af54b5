"""How fast a rule converges: from the accuracies on the test set of one run."""

from statistics import fmean
from typing import Any

from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.view import View
from experiments.papers.recorder import Recorder


class Convergence(Recorder):
    """`speed` is the mean test accuracy of all evaluated rounds, %: the higher, the earlier a rule learns.

    `rounds` is the first round with at least `goal` percent, or one more than the run has. The file of a cell has the
    whole `curve`.
    """

    _kept = ("_curve",)

    def __init__(self, goal: float) -> None:
        super().__init__()
        self.goal = goal
        self._curve: list[tuple[int, float]] = []  # round, accuracy

    def on_round_end(self, view: View, report: RoundReport) -> None:
        if report.test_accuracy is not None:
            self._curve.append((report.round, 100 * report.test_accuracy))

    def on_fit_end(self, view: View, result: RunResult) -> None:
        super().on_fit_end(view, result)
        self.record["curve"] = self._curve

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        reached = [number for number, accuracy in self._curve if accuracy >= self.goal]
        speed = fmean(accuracy for _, accuracy in self._curve)
        return {**super()._values(view, result), "speed": speed, "rounds": min(reached, default=result.rounds + 1)}
