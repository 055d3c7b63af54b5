"""Early stopping on the public test set."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Interval

from dpfl_lightning.errors import nearest, require, warn_user
from dpfl_lightning.federated.messages.evaluation import Score
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.models.tasks import MEASURES, Measure


@dataclass
class EarlyStopping(Strategy):
    """Ends the run when a score on the public test set has not improved in `patience` evaluations.

    Args:
        metric: loss, accuracy, or the name of one of evaluation.metrics. An evaluation whose records do not define it
            counts for nothing.
        patience: number of evaluations without a better score.

    **Privacy** When a run ends follows from its releases, so guarantees state all that was planned. Held-out records of
    clients are private: without a test set it is refused.
    """

    metric: str = "loss"
    patience: Annotated[int, Interval(ge=1, le=1_000_000)] = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._best: float | None = None
        self._without_gain = self._seen = 0  # evaluations, and the last evaluated round
        self._warned = False

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        advice = "Name one, such as data.init_args.test: held-out records of clients are private."
        require(view.facts.test_set, f"strategies.{self.config_name}", "have a public test set", None, advice)
        known, further = view.module.scores, view.module.further_scores
        advice = f"Name it: evaluation.metrics: [{self.metric}]."
        if self.metric not in further:
            advice = f"{nearest(self.metric, [*known, *further])} Other scores are named by evaluation.metrics.".strip()
        require(self.metric in known, self._key("metric"), f"be one of {', '.join(known)}", self.metric, advice)
        return schedule

    def describe(self, view: View) -> tuple[str, ...]:
        words = f"The run ends when {self.metric} on the test set has not improved in {self.patience} evaluations"
        return (f"{words}: its final score is chosen by the same records.",)

    def stop(self, view: View) -> str | None:
        if view.test_score is not None and view.state.round > self._seen:
            self._seen = view.state.round
            self._compare(view.test_score, {**MEASURES, **view.module.scores}.get(self.metric, Measure()))
        if self._without_gain < self.patience:
            return None
        return f"{self.metric} has not improved in {self.patience} evaluations (strategies.{self.config_name}.patience)"

    def _compare(self, score: Score, measure: Measure) -> None:
        value = {"loss": score.loss, "accuracy": score.accuracy, **score.metrics}.get(self.metric)
        if value is None:
            if not self._warned:
                words = f"the test set does not define {self.metric} after round {self._seen}"
                warn_user(f"{words}: such an evaluation does not count for strategies.{self.config_name}")
            self._warned = True
            return
        gain = math.isfinite(value) and (self._best is None or measure.merit(value) > measure.merit(self._best))
        self._best, self._without_gain = (value, 0) if gain else (self._best, self._without_gain + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "without_gain": self._without_gain, "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best, self._without_gain, self._seen = state["best"], state["without_gain"], state["seen"]
