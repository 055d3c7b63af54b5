"""What is read off a run of the selection paper, beside the usual."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.view import View
from experiments.papers.recorder import Recorder
from experiments.papers.selection.paper import deciding

_OF_CLIENTS = ("quota", "participations", "unlikeness")


class SelectionRecorder(Recorder):
    """Accuracy on the common test set over rounds, who took part how often, and whom the model serves.

    Values beside the usual: `test_loss`; `equality`, Jain's index of participation; `never`, clients that took no part,
    %; `budget_gap`, accuracy of the quarter with the largest budgets minus that of the quarter with the smallest, in
    points; every number that strategies tell, and `offset` and `decides` of fitted constants, see `deciding`.
    `test_curve`: round -> test accuracy in per cent, or test loss of a regression. `clients` have also
    quota, participations and, where it was estimated, unlikeness.
    """

    def __init__(self) -> None:
        super().__init__()
        self._test: dict[int, float] = {}

    def on_round_end(self, view: View, report: RoundReport) -> None:
        super().on_round_end(view, report)
        if report.test_accuracy is not None:
            self._test[report.round] = 100 * report.test_accuracy
        elif report.test_loss is not None:
            self._test[report.round] = report.test_loss

    def on_fit_end(self, view: View, result: RunResult) -> None:
        super().on_fit_end(view, result)
        self.found["test_curve"] = {str(at): value for at, value in self._test.items()}
        if "clients" in self.found:
            self.found["clients"] |= {name: result.metrics[name] for name in _OF_CLIENTS if name in result.metrics}

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        told = {name: value for name, value in result.metrics.items() if isinstance(value, float)}
        values = {**super()._values(view, result), **told}
        if result.test_loss is not None:
            values["test_loss"] = result.test_loss
        if isinstance(counts := result.metrics.get("participations"), list):
            values["equality"] = told["participation_equality"]
            values["never"] = 100 * fmean(not count for count in counts)
        if "fitted_lr_offset" in told:
            values |= deciding(told["fitted_lr_offset"], told["fitted_smoothness"], told["fitted_convexity"])
        return values | budget_gap(result)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "test": dict(self._test)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._test = dict(state["test"])


def budget_gap(result: RunResult) -> dict[str, float]:
    """Accuracy of the clients with the largest budgets, a quarter of all, minus that of those with the smallest."""
    known = [(row["epsilon_budget"], 100 * row["accuracy"]) for row in result.clients if row["accuracy"] is not None]
    if not known or any(budget is None for budget, _ in known):
        return {}
    own = [accuracy for _, accuracy in sorted(known)]
    quarter = -(-len(own) // 4)
    return {"budget_gap": fmean(own[-quarter:]) - fmean(own[:quarter])}
