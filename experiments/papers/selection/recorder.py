"""Read a run of the selection paper."""

from statistics import fmean
from typing import Any

from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.view import View
from experiments.papers.recorder import Recorder, named, numbers_of
from experiments.papers.selection.formulas import deciding

_OF_CLIENTS = ("quota", "participations", "unlikeness")


class SelectionRecorder(Recorder):
    """Accuracy on the common test set over rounds, participations, and accuracy by budget.

    `equality` is Jain's index of participation, `never` the share of clients without one in per cent; see `deciding`.
    """

    _kept = ("_curve", "_test")

    def __init__(self) -> None:
        super().__init__()
        self._test: dict[int, float] = {}

    def on_round_end(self, view: View, report: RoundReport) -> None:
        super().on_round_end(view, report)
        if report.test_accuracy is not None:
            self._test[report.round] = 100 * report.test_accuracy

    def on_fit_end(self, view: View, result: RunResult) -> None:
        super().on_fit_end(view, result)
        self.record["test_curve"] = named(self._test)
        if "clients" in self.record:
            self.record["clients"] |= {name: result.metrics[name] for name in _OF_CLIENTS if name in result.metrics}

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        metrics = numbers_of(result)
        values = {**super()._values(view, result), **metrics}
        if isinstance(counts := result.metrics.get("participations"), list):
            values["equality"] = metrics["participation_equality"]
            values["never"] = 100 * fmean(not count for count in counts)
        if "fitted_lr_offset" in metrics:
            values |= deciding(metrics["fitted_lr_offset"], metrics["fitted_smoothness"], metrics["fitted_convexity"])
        return values | budget_gap(result)


def budget_gap(result: RunResult) -> dict[str, float]:
    """Accuracy of the quarter of clients with the largest budgets minus that with the smallest, in points."""
    known = [(row["epsilon_budget"], 100 * row["accuracy"]) for row in result.clients if row["accuracy"] is not None]
    if not known or any(budget is None for budget, _ in known):
        return {}
    by_budget = [accuracy for _, accuracy in sorted(known)]
    quarter = -(-len(by_budget) // 4)
    return {"budget_gap": fmean(by_budget[-quarter:]) - fmean(by_budget[:quarter])}
