"""The study: trials that several workers share, without losing any."""

import copy
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import optuna
from optuna.storages import RetryHeartbeatStaleTrialCallback as Retry
from optuna.trial import FrozenTrial, TrialState

from dpfl_lightning.errors import UserError, in_one_line, require
from dpfl_lightning.runtime.stopping import check_starter, words_and_status
from dpfl_lightning.search.options import AT_THE_END, SweepOptions
from dpfl_lightning.search.samplers import pruner, sampler
from dpfl_lightning.search.space import Dimension, drawn
from dpfl_lightning.search.storage import agreed, opened

optuna.logging.set_verbosity(optuna.logging.ERROR)  # the command reports each trial itself

Running = optuna.Trial

_MLFLOW = "mlflow_run"
_MOST_RETRIES = 3  # retries of a trial whose worker died, because the trial itself may kill its worker
_POLL_SECONDS = 1.0
_SURPLUS = "surplus"


class Pruned(Exception):
    """Raised by a trial that ends early because others did better. The message states after how much."""


class _Surplus(Exception):
    """Raised by a trial that is not needed, because the study has all its trials without it."""


@dataclass(frozen=True)
class Trial:
    """A finished trial."""

    number: int
    state: str  # complete, pruned or failed
    found: Mapping[str, Any]  # dotted key -> drawn value (label, for choices)
    scores: Mapping[str, float]  # name -> value; a pruned trial has its last value
    reason: str = ""  # why it failed or was pruned
    begun: datetime | None = None
    ended: datetime | None = None
    steps: Mapping[int, float] = field(default_factory=dict)  # step -> first score after that step
    facts: Mapping[str, Any] = field(default_factory=dict)  # notes: all scores, their spread (NAME_std), host, error
    again: bool = False  # whether another trial repeats it


class Study:
    """The trials of one search, which all its workers share through a database.

    Args:
        identity: everything that determines the meaning of a trial, ready for JSON; all workers must have the same.
        directions: of each score whether a larger value is better.
        seed: seed of the sampler, unless it has a seed itself. Only the first worker of a new study draws with it, so
            that others do not repeat its trials. All continue its order of a grid or a sequence (qmc).
        first: whether this is the first worker on this machine.
    """

    def __init__(
        self,
        sweep: SweepOptions,
        dimensions: Mapping[str, Dimension],
        url: str,
        identity: Mapping[str, Any],
        directions: Mapping[str, bool],
        seed: int,
        first: bool = True,
    ) -> None:
        self._sweep, self._dimensions, self._directions = sweep, dimensions, directions
        self._running: Running | None = None  # the trial that runs here
        sampler(sweep, dimensions, None, 0), pruner(sweep)  # checks both before the database is opened
        self._study, self._storage = opened(sweep, url, directions, self._given_up)
        new = agreed(self._study, identity)
        seed = seed if sweep.sampler.get("seed") is None else sweep.sampler["seed"]
        self._study.sampler = sampler(sweep, dimensions, seed if new and first else None, seed)
        self._study.pruner = pruner(sweep)
        self.wanted = sweep.trials
        if sweep.sampler["name"] == "grid":
            self.wanted = min(sweep.trials, math.prod(len(dimension.grid()) for dimension in dimensions.values()))
        self._on_end: Callable[[Trial], None] = lambda trial: None

    # -- running trials

    def work(self, act: Callable[[Running], Sequence[float]], on_end: Callable[[Trial], None]) -> None:
        """Run trials until the study has all of them, including trials that other workers leave unfinished.

        `act` runs a trial with its drawn `params`, stores facts about it with `set_user_attr`, and returns its scores;
        it raises `Pruned` if the trial ends early, and may raise any error.
        `on_end` is called with each trial that ended here, or whose worker was found to have died.
        """
        self._on_end = on_end
        vouched: set[int] = set()
        while True:
            check_starter()
            self._queue_again()
            if self._left() > 0:
                self._one_trial(act)
                continue
            running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if not running:
                return
            ids = {trial._trial_id for trial in running}
            for trial_id in ids - vouched:  # a worker may have died before its first heartbeat
                self._storage.record_heartbeat(trial_id)
            vouched |= ids
            time.sleep(_POLL_SECONDS)
            optuna.storages.fail_stale_trials(self._study)

    def report(self, step: int, score: float) -> bool:
        """Report the first score of the trial that runs here, and return whether others did better at this step."""
        if self._running is None or len(self._sweep.scores) > 1:  # Optuna keeps no course of several scores
            return False
        self._running.report(score, step)
        return self._running.should_prune()

    def _one_trial(self, act: Callable[[Running], Sequence[float]]) -> None:
        try:
            self._study.optimize(
                lambda trial: self._scores(trial, act), n_trials=1, catch=(Exception,), callbacks=[self._ended]
            )
        except (ValueError, AssertionError, optuna.exceptions.OptunaError):  # optuna raises any of these
            # if the trial was given to another worker, because this one was silent for too long
            failed = self._study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
            if self._running is None or self._running.number not in {trial.number for trial in failed}:
                raise

    def _scores(self, trial: Running, act: Callable[[Running], Sequence[float]]) -> tuple[float, ...]:
        self._running = trial
        # several workers took the last trial at once, or have queued one again: this one is not run
        if self._left(trial.number) < 0 or self._is_made(trial.number):
            trial.set_user_attr(_SURPLUS, True)
            raise _Surplus
        try:
            drawn(self._dimensions, lambda dimension: _draw(trial, dimension))
            scores = tuple(act(trial))
            require(all(map(math.isfinite, scores)), "scores", "be finite", scores, "Did training diverge?")
            return scores
        except Pruned as error:
            trial.set_user_attr("reason", str(error))
            raise optuna.TrialPruned from None
        except KeyboardInterrupt as error:  # not a failure of the trial, so it is queued again
            Retry()(self._study, self._study.trials[trial.number])
            trial.set_user_attr("reason", words_and_status(error)[0])
            raise
        except Exception as error:
            trial.set_user_attr("reason", in_one_line(error))
            if not isinstance(error, UserError):
                trial.set_user_attr("error", traceback.format_exc())
            raise

    def _ended(self, study: optuna.Study, trial: FrozenTrial) -> None:
        if _SURPLUS not in trial.user_attrs:
            self._on_end(self._trial(trial))

    def _given_up(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Report a trial whose worker was silent for too long; `_queue_again` queues it."""
        self._on_end(self._trial(trial, {trial.number}))

    def _queue_again(self) -> None:
        """Queue the trials again whose worker died. The study alone says which: who noticed it may have died, too."""
        trials = self._known()
        again = _repeated(trials)
        for trial in trials:
            if trial.state == TrialState.FAIL and "reason" not in trial.user_attrs and trial.number not in again:
                Retry(_MOST_RETRIES)(self._study, copy.deepcopy(trial))  # it changes the trial

    def _is_made(self, number: int) -> bool:
        """Return whether an earlier trial than `number` repeats the same one, because several workers queued it."""
        trials = self._known()
        again = _repeated(trials)
        first = {trial.number: Retry.retried_trial_number(trial) for trial in trials if trial.number not in again}
        return first[number] is not None and any(first[one] == first[number] for one in first if one < number)

    def _known(self) -> list[FrozenTrial]:
        """Return all trials except those that a worker took in excess."""
        return [trial for trial in self._study.get_trials(deepcopy=False) if _SURPLUS not in trial.user_attrs]

    def _left(self, last: float = math.inf) -> int:
        """Return how many trials are wanted beside those up to number `last` that run or ended and are not repeated.

        Optuna's `MaxTrialsCallback` counts after a trial: several workers would begin, and charge, too many.
        """
        trials = [trial for trial in self._known() if trial.number <= last]
        again = _repeated(trials)
        return self.wanted - sum(trial.state != TrialState.WAITING and trial.number not in again for trial in trials)

    # -- results

    def trials(self) -> list[Trial]:
        """Return all finished trials by number."""
        trials = self._known()
        again = _repeated(trials)
        return [self._trial(trial, again) for trial in trials if trial.state.is_finished()]

    def begun(self) -> list[Mapping[str, Any]]:
        """Return the notes of every trial that began, including those that are running or whose worker died."""
        return [trial.user_attrs for trial in self._known() if trial.state != TrialState.WAITING]

    def best(self) -> list[Trial]:
        """Return the best trial, or the Pareto front of several scores ordered by the first score; may be empty."""
        if not self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            return []
        first, higher = next(iter(self._directions.items()))
        front = sorted(map(self._trial, self._study.best_trials), key=lambda one: one.scores[first], reverse=higher)
        return front[:1] if len(self._sweep.scores) == 1 else front  # of one score, several may share the best value

    def table(self, most: int = 10) -> str:
        """Return the best complete trials, or the whole Pareto front, as a table ordered by the first score."""
        scores = self._directions
        first, higher = next(iter(scores.items()))
        frame = self._study.trials_dataframe(("number", "state", "user_attrs", "params"))
        frame = frame[frame["state"] == "COMPLETE"]
        complete, frame = len(frame), frame.sort_values(f"user_attrs_{first}", ascending=not higher)
        title = f"The best {min(most, complete)} of {complete} complete trials"
        if len(scores) > 1:
            front = [one.number for one in self.best()]
            title = f"Pareto front of {', '.join(scores)}: {len(front)} of {complete} trials"
            frame, most = frame[frame["number"].isin(front)], len(front)
        facts = [part for name in dict.fromkeys([*scores, *AT_THE_END]) for part in (name, f"{name}_std")]
        shown = [*(f"user_attrs_{name}" for name in facts), *(f"params_{name}" for name in self._dimensions)]
        frame = frame[["number", *(name for name in shown if name in frame)]].head(most)
        frame.columns = [name.removeprefix("user_attrs_").removeprefix("params_") for name in frame.columns]
        return f"{title}:\n{frame.to_string(index=False, na_rep='-', float_format='{:.4g}'.format)}"

    def _trial(self, trial: FrozenTrial, again: Sequence[int] | set[int] = ()) -> Trial:
        states = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned"}
        facts = dict(trial.user_attrs)
        died = "its worker died" if trial.state == TrialState.FAIL else ""
        return Trial(
            trial.number,
            states.get(trial.state, "failed"),
            trial.params,
            dict(zip(self._sweep.scores, trial.values or (), strict=False)),
            facts.pop("reason", died),
            trial.datetime_start,
            trial.datetime_complete,
            trial.intermediate_values,
            facts,
            trial.number in again,
        )

    @property
    def mlflow_run(self) -> str | None:
        """Id of the tracked run in which the runs of the trials are nested."""
        return self._study.user_attrs.get(_MLFLOW)

    @mlflow_run.setter
    def mlflow_run(self, run_id: str) -> None:
        self._study.set_user_attr(_MLFLOW, run_id)


def _draw(trial: Running, dimension: Dimension) -> Any:
    key, low, high = dimension.key, dimension.low, dimension.high
    if dimension.choices is not None:
        return trial.suggest_categorical(key, list(dimension.choices))
    if dimension.whole:
        return trial.suggest_int(key, int(low), int(high), step=int(dimension.step or 1), log=dimension.log)
    return trial.suggest_float(key, low, high, step=dimension.step, log=dimension.log)


def _repeated(trials: Sequence[FrozenTrial]) -> set[int]:
    return {number for trial in trials for number in Retry.retry_history(trial)}
