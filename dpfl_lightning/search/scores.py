"""Scores of a trial: what a run measures, its metrics, its size and its time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from dpfl_lightning.config.options import Options
from dpfl_lightning.errors import require, require_one_of
from dpfl_lightning.federated.client.metrics import METRICS, metrics_of
from dpfl_lightning.federated.client.module import named_metrics
from dpfl_lightning.models.tasks import MEASURES, Measure, Task
from dpfl_lightning.search.options import AT_THE_END

Measured = Mapping[str, float | None]  # name -> value on the records that score; None where they do not define it


def measured(accuracy: float | None, loss: float | None, metrics: Measured) -> Measured:
    """Return the scores of a model by name."""
    return {"accuracy": accuracy, "loss": loss, **metrics}


@dataclass(frozen=True)
class Outcome:
    """What a trial measured for each seed (or model), the parameters of one model, and the seconds of the trial.

    The records that score it trained no model of the trial.
    """

    measured: Sequence[Measured]
    num_params: int
    seconds: float

    def mean(self, name: str) -> float:
        """Return a score, the mean over seeds. Raises UserError if the records do not define it for each seed."""
        if name in AT_THE_END:
            return float(getattr(self, name))
        values = self._known(name)
        advice = "It may need records of several classes, and finite outputs."
        require(len(values) == len(self.measured), "sweep.scores", "be defined on the records that score", name, advice)
        return fmean(values)

    def notes(self) -> dict[str, float]:
        """Return all scores by name, and as NAME_std the standard deviation of a score over several seeds."""
        notes = {"num_params": self.num_params, "seconds": self.seconds}
        for name in self.measured[0]:
            if len(values := self._known(name)) == len(self.measured) and all(map(math.isfinite, values)):
                spread = {f"{name}_std": stdev(values)} if len(values) > 1 else {}
                notes |= {name: fmean(values), **spread}
        return notes

    def _known(self, name: str) -> list[float]:
        return [value for one in self.measured if (value := one.get(name)) is not None]


def directions(scores: Sequence[str], options: Options) -> dict[str, bool]:
    """Return whether a larger value of each score of a run is better. Raises UserError if it is unknown, or neither.

    >>> directions(["auroc", "mae"], Options())
    {'auroc': True, 'mae': False}
    """
    metrics = {**METRICS, **named_metrics(options.evaluation.metrics)}
    known = {**MEASURES, **dict.fromkeys(AT_THE_END, Measure(higher_is_better=False))}
    for name in scores:
        require_one_of([*MEASURES, *AT_THE_END, *metrics], "sweep.scores", name)
        known |= {name: metrics[name].measure()} if name in metrics else {}
        extreme = "be scores whose best value is the largest or the smallest"
        require(known[name].target is None, "sweep.scores", extreme, name, "Use another score, such as pinball.")
    return {name: bool(known[name].higher_is_better) for name in scores}


def reported(scores: Sequence[str], options: Options) -> Options:
    """Return the options of a run that evaluates these scores, beside the metrics that it has."""
    metrics = options.evaluation.metrics
    missing = [name for name in scores if name in METRICS and name not in metrics]
    if not missing:
        return options
    usual = metrics or METRICS[missing[0]].tasks[0].metrics
    every = tuple(dict.fromkeys([*usual, *missing]))
    return dataclasses.replace(options, evaluation=dataclasses.replace(options.evaluation, metrics=every))


def check_scores(scores: Sequence[str], task: Task, options: Options, undefined: Sequence[str] = ()) -> None:
    """Raise UserError unless a model of the task has these scores, of which random records leave none `undefined`."""
    metrics = {**metrics_of(task), **named_metrics(options.evaluation.metrics)}
    known = [*(["accuracy"] if task.has_accuracy else []), "loss", *metrics, *AT_THE_END]
    for name in scores:
        require(name in known, "sweep.scores", f"be scores of task {task.name} ({', '.join(known)})", name)
        must, advice = "be defined on random outputs and labels", "Its compute() returns no finite number."
        require(name not in undefined, "sweep.scores", must, name, advice)
