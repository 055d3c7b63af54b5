"""The study: workers that share its trials and lose none."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.runtime.stopping import words_and_status
from dpfl_lightning.search.options import SCORES, SweepOptions
from dpfl_lightning.search.samplers import pruner, sampler, size_of_grid
from dpfl_lightning.search.space import Dimension, drawn
from dpfl_lightning.search.storage import agreed, in_one_line, opened, quietly
from dpfl_lightning.search.trial import Pruned, Trial

optuna.logging.set_verbosity(optuna.logging.ERROR)  # what a trial came to is told once, by us

_MLFLOW = "mlflow_run"
_SEED = "seed"  # of the sampler when the study began
_MOST_RETRIES = 3  # of a trial whose worker died: the trial itself may be what kills it
_POLL_SECONDS = 1.0
_DIED = "its worker died"
_SURPLUS = "surplus"


class _Surplus(Exception):
    """The study has all its trials without this one."""


class Running:
    """A trial that goes on: what it drew, what it tells.

    Args:
        number: in the study.
    """

    def __init__(self, own: optuna.Trial, dimensions: Mapping[str, Dimension], single: bool) -> None:
        self._own, self._single, self.number = own, single, own.number
        self.found = drawn(dimensions, self._draw)

    def _draw(self, own: Dimension) -> Any:
        if own.choices is not None:
            return self._own.suggest_categorical(own.key, list(own.choices))
        if own.whole:
            return self._own.suggest_int(own.key, int(own.low), int(own.high), step=int(own.step or 1), log=own.log)
        return self._own.suggest_float(own.key, own.low, own.high, step=own.step, log=own.log)

    def report(self, step: int, accuracy: float) -> bool:
        """Whether the trial is to end, because others did better by then."""
        if not self._single:  # the library knows no values on the way to several scores
            self.note(f"accuracy_{step}", accuracy)
            return False
        self._own.report(accuracy, step)
        return self._own.should_prune()

    def note(self, name: str, value: Any) -> None:
        """A fact that outlives the worker."""
        self._own.set_user_attr(name, value)


class Study:
    """The trials of one search, shared by all its workers through a database.

    Args:
        sweep: its options.
        dimensions: its space.
        url: of the database.
        identity: all that decides what a trial means, ready for JSON; workers must agree on it.
        seed: of the sampler, unless it has its own. It holds for the first worker of a new study: the others, and those
            that come back, draw differently, lest they try the same again. Of a grid or a sequence (qmc) they go on
            with the order that the study began with.
        first: whether this is the first worker here.

    Raises:
        UserError: an unknown sampler or pruner, a space that the sampler cannot search, a database that does not
            answer, a study of this name that searches something else.
    """

    def __init__(
        self,
        sweep: SweepOptions,
        dimensions: Mapping[str, Dimension],
        url: str,
        identity: Mapping[str, Any],
        seed: int,
        first: bool = True,
    ) -> None:
        self._sweep, self._dimensions, self.url = sweep, dimensions, url
        self._now = -1  # the trial that is made here
        sampler(sweep, dimensions, None, 0), pruner(sweep)  # refused before a database is touched
        self._study, self._storage = opened(sweep, url, self._given_up)
        seed = seed if sweep.sampler.get("seed") is None else sweep.sampler["seed"]
        new = agreed(self._study, identity)
        if new:
            self._study.set_user_attr(_SEED, seed)
        shared = self._study.user_attrs.get(_SEED, seed)
        self._study.sampler = sampler(sweep, dimensions, seed if new and first else None, shared)
        self._study.pruner = pruner(sweep)
        if sweep.sampler["name"] == "grid":
            self._check_grid()
        self._wanted = min(sweep.trials, size_of_grid(dimensions)) if sweep.sampler["name"] == "grid" else sweep.trials
        self._on_end: Callable[[Trial], None] = lambda trial: None

    def _check_grid(self) -> None:
        """Refuse a grid after trials that are no points of it: it would be left before it is done."""
        drawn = sum(bool(own.params) and "grid_id" not in own.system_attrs for own in self._known())
        advice = "Give the search another sweep.name, or go on with another sampler."
        must = f"not be grid in a study with {drawn} trials that another sampler drew"
        require(not drawn, "sweep.sampler.name", must, "grid", advice)

    # -- making trials

    def work(self, act: Callable[[Running], Sequence[float]], on_end: Callable[[Trial], None]) -> None:
        """Make trials until the study has all it wants, also those that other workers leave behind.

        Args:
            act: makes a trial; returns its scores, or raises: `Pruned`, or whatever it failed by.
            on_end: told of each trial that ended here, or that was found to have died elsewhere.
        """
        self._on_end = on_end
        vouched: set[int] = set()
        while True:
            while self._left() > 0:
                self._one_trial(act)
            others = self._others()
            if not others:
                return
            for trial_id in others - vouched:  # one whose worker died before its first heartbeat would never be stale
                self._storage.record_heartbeat(trial_id)
            vouched |= others
            time.sleep(_POLL_SECONDS)
            quietly(optuna.storages.fail_stale_trials, self._study)

    def _one_trial(self, act: Callable[[Running], Sequence[float]]) -> None:
        try:
            self._study.optimize(
                lambda own: self._made(own, act), n_trials=1, catch=(Exception,), callbacks=[self._ended]
            )
        except (ValueError, AssertionError, optuna.exceptions.OptunaError):  # as the library happens to notice
            if not self._taken_away():
                raise

    def _taken_away(self) -> bool:
        """Whether this worker was silent for so long (a laptop asleep) that its trial was given to another one."""
        trials = self._study.get_trials(deepcopy=False)
        return any(own.number == self._now and own.state == TrialState.FAIL for own in trials)

    def _made(self, own: optuna.Trial, act: Callable[[Running], Sequence[float]]) -> tuple[float, ...]:
        self._now = own.number
        if self._left(own.number) < 0:  # two workers took the last one at once: nothing of this one is ever made
            own.set_user_attr(_SURPLUS, True)
            raise _Surplus
        try:
            scores = tuple(act(Running(own, self._dimensions, len(self._sweep.scores) == 1)))
            require(all(map(math.isfinite, scores)), "scores", "be finite", scores, "Did training diverge?")
            return scores
        except Pruned as error:
            own.set_user_attr("reason", str(error))
            raise optuna.TrialPruned from None
        except KeyboardInterrupt as error:  # not the trial's fault: somebody makes it again
            _make_again(self._study, self._study.trials[own.number])
            own.set_user_attr("reason", words_and_status(error)[0])
            raise
        except Exception as error:
            own.set_user_attr("reason", in_one_line(error))
            if not isinstance(error, UserError):
                own.set_user_attr("error", traceback.format_exc())
            raise

    def _ended(self, study: optuna.Study, own: FrozenTrial) -> None:
        if _SURPLUS not in own.user_attrs:
            self._on_end(self._trial(own, set()))

    def _given_up(self, study: optuna.Study, own: FrozenTrial) -> None:
        """A trial that was silent for too long is made again by whoever comes next."""
        self._on_end(self._trial(own, {own.number}))
        _make_again(study, own, _MOST_RETRIES)

    def _known(self) -> list[FrozenTrial]:
        """All trials but those that one worker took too many."""
        return [own for own in self._study.get_trials(deepcopy=False) if _SURPLUS not in own.user_attrs]

    def _left(self, last: float = math.inf) -> int:
        """How many trials are still to begin. One that is made again counts once, and one that waits not at all.

        Args:
            last: number of the last trial that counts.
        """
        trials = [own for own in self._known() if own.number <= last]
        again = _made_again(trials)
        lost = [own for own in trials if _lost(own) and own.number not in again]
        begun = [own for own in trials if own.state != TrialState.WAITING and own.number not in again]
        return self._wanted - len(begun) + len(lost)

    def _others(self) -> set[int]:
        """Trials that other workers still make."""
        return {own._trial_id for own in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))}

    # -- what came of them

    @property
    def wanted(self) -> int:
        """How many trials it is to have."""
        return self._wanted

    def trials(self) -> list[Trial]:
        """All that ended, by number."""
        trials = self._known()
        again = _made_again(trials)
        return [self._trial(own, again) for own in trials if own.state.is_finished()]

    def begun(self) -> list[Mapping[str, Any]]:
        """What was noted of every trial that began, also of those that go on or died."""
        return [own.user_attrs for own in self._known() if own.state != TrialState.WAITING]

    def best(self) -> list[Trial]:
        """The best trial, or the Pareto front of several scores, the best in the first score first; may be empty."""
        complete = [own for own in self._study.get_trials(deepcopy=False) if own.state == TrialState.COMPLETE]
        if not complete:
            return []
        if len(self._sweep.scores) == 1:
            return [self._trial(self._study.best_trial, set())]
        more = SCORES[self._sweep.scores[0]]
        front = [self._trial(own, set()) for own in self._study.best_trials]
        return sorted(front, key=lambda one: one.scores[self._sweep.scores[0]], reverse=more)

    def _trial(self, own: FrozenTrial, again: set[int]) -> Trial:
        states = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned"}
        facts = dict(own.user_attrs)
        noted = {int(name[9:]): facts.pop(name) for name in list(facts) if name.startswith("accuracy_")}
        failed = own.state == TrialState.FAIL
        return Trial(
            own.number,
            states.get(own.state, "failed"),
            own.params,
            dict(zip(self._sweep.scores, own.values or (), strict=False)),
            facts.pop("reason", _DIED if failed else ""),
            own.datetime_start,
            own.datetime_complete,
            own.intermediate_values or noted,
            facts,
            own.number in again,
        )

    # -- what it remembers

    @property
    def mlflow_run(self) -> str | None:
        """The tracked run that the trials' runs are nested in."""
        return self._study.user_attrs.get(_MLFLOW)

    @mlflow_run.setter
    def mlflow_run(self, run_id: str) -> None:
        self._study.set_user_attr(_MLFLOW, run_id)


def _make_again(study: optuna.Study, own: FrozenTrial, most: int | None = None) -> None:
    """Whoever comes next makes a trial of the same values, unless that was done `most` times."""
    quietly(lambda: RetryHeartbeatStaleTrialCallback(most)(study, own))


def _made_again(trials: Sequence[FrozenTrial]) -> set[int]:
    return {number for own in trials for number in quietly(RetryHeartbeatStaleTrialCallback.retry_history, own)}


def _lost(own: FrozenTrial) -> bool:
    """Its worker died, and the one that noticed died, too, before it could ask for another."""
    return own.state == TrialState.FAIL and "reason" not in own.user_attrs and len(_history(own)) < _MOST_RETRIES


def _history(own: FrozenTrial) -> list[int]:
    return quietly(RetryHeartbeatStaleTrialCallback.retry_history, own)
