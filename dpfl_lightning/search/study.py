"""The study (the only optuna import): storage, sampler, pruner, and workers that lose no trial."""

from __future__ import annotations

import json
import math
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
import sqlalchemy
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    PercentilePruner,
    SuccessiveHalvingPruner,
)
from optuna.samplers import (
    BaseSampler,
    GPSampler,
    GridSampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.registry import call
from dpfl_lightning.search.options import SCORES, SweepOptions
from dpfl_lightning.search.space import Dimension, drawn
from dpfl_lightning.search.trial import Pruned, Trial

optuna.logging.set_verbosity(optuna.logging.ERROR)  # what a trial came to is told once, by us

_IDENTITY, _MLFLOW = "searched", "mlflow_run"
_MOST_RETRIES = 3  # of a trial whose worker died: the trial itself may be what kills it
_POLL_SECONDS = 1.0
_DIED = "its worker died"
_STORAGE_FAILS = (
    sqlalchemy.exc.SQLAlchemyError,
    optuna.exceptions.OptunaError,
    ImportError,
    RuntimeError,
    ValueError,
)


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
            that come back, draw differently, lest they try the same again.
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
        _sampler(sweep, dimensions, None), _pruner(sweep)  # refused before a database is touched
        self._study, self._storage = _opened(sweep, url, self._given_up)
        repeatable = _agreed(self._study, identity) and first
        self._study.sampler = _sampler(sweep, dimensions, sweep.sampler.get("seed", seed) if repeatable else None)
        self._study.pruner = _pruner(sweep)
        self._wanted = min(sweep.trials, _size_of_grid(dimensions)) if sweep.sampler["name"] == "grid" else sweep.trials
        self._on_end: Callable[[Trial], None] = lambda trial: None

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
            _quietly(optuna.storages.fail_stale_trials, self._study)

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
        try:
            scores = tuple(act(Running(own, self._dimensions, len(self._sweep.scores) == 1)))
            require(all(map(math.isfinite, scores)), "scores", "be finite", scores, "Did training diverge?")
            return scores
        except Pruned as error:
            own.set_user_attr("reason", str(error))
            raise optuna.TrialPruned from None
        except KeyboardInterrupt:  # not the trial's fault: somebody makes it again
            _make_again(self._study, self._study.trials[own.number])
            own.set_user_attr("reason", "stopped by Ctrl-C")
            raise
        except Exception as error:
            own.set_user_attr("reason", _in_one_line(error))
            if not isinstance(error, UserError):
                own.set_user_attr("error", traceback.format_exc())
            raise

    def _ended(self, study: optuna.Study, own: FrozenTrial) -> None:
        self._on_end(self._trial(own, set()))

    def _given_up(self, study: optuna.Study, own: FrozenTrial) -> None:
        """A trial that was silent for too long is made again by whoever comes next."""
        self._on_end(self._trial(own, {own.number}))
        _make_again(study, own, _MOST_RETRIES)

    def _left(self) -> int:
        """How many trials are still to begin. One that is made again counts once, and one that waits not at all."""
        trials = self._study.get_trials(deepcopy=False)
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
        trials = self._study.get_trials(deepcopy=False)
        again = _made_again(trials)
        return [self._trial(own, again) for own in trials if own.state.is_finished()]

    def begun(self) -> list[Mapping[str, Any]]:
        """What was noted of every trial that began, also of those that go on or died."""
        trials = self._study.get_trials(deepcopy=False)
        return [own.user_attrs for own in trials if own.state != TrialState.WAITING]

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


# ---- how it is made


def _opened(
    sweep: SweepOptions, url: str, given_up: Callable[[optuna.Study, FrozenTrial], None]
) -> tuple[optuna.Study, RDBStorage]:
    try:
        storage = _quietly(
            RDBStorage,
            url,
            {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None,
            heartbeat_interval=sweep.heartbeat_seconds,
            grace_period=3 * sweep.heartbeat_seconds,
            heartbeat_stale_trial_callback=given_up,
        )
        _one_at_a_time(storage.engine)
        directions = [StudyDirection.MAXIMIZE if SCORES[score] else StudyDirection.MINIMIZE for score in sweep.scores]
        study = optuna.create_study(storage=storage, study_name=sweep.name, directions=directions, load_if_exists=True)
        return study, storage
    except _STORAGE_FAILS as error:
        raise UserError(
            f"`sweep.storage` must be the URL of a database that answers, got {without_password(url)!r} "
            f"({_in_one_line(error)}). Such as sqlite:///study.db or postgresql+psycopg://host/name, for which pip "
            "installs psycopg[binary]."
        ) from None


def _one_at_a_time(engine: sqlalchemy.Engine) -> None:
    """SQLite has no SELECT FOR UPDATE, by which workers agree who takes a trial: there a transaction is exclusive."""
    if engine.dialect.name != "sqlite":
        return

    def by_hand(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # or Python would begin a transaction of its own, and later

    sqlalchemy.event.listen(engine, "connect", by_hand)
    sqlalchemy.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    engine.dispose()  # connections made before


def _agreed(study: optuna.Study, identity: Mapping[str, Any]) -> bool:
    """Whether the study is new; one that is not must search the same."""
    ours = json.loads(json.dumps(identity))
    theirs = study.user_attrs.get(_IDENTITY)
    if theirs is None:
        foreign = bool(study.get_trials(deepcopy=False))
        advice = "Choose another sweep.name, or another sweep.storage."
        require(not foreign, "sweep.name", "be new, or a study of this command", study.study_name, advice)
        study.set_user_attr(_IDENTITY, ours)
        return True
    for key in {**theirs, **ours}:
        same = theirs.get(key) == ours.get(key)
        must = f"stay what study {study.study_name} has in that storage ({theirs.get(key)!r})"
        advice = "Its trials cannot be compared with new ones: choose another --sweep.name or --output_dir."
        require(same, key, must, ours.get(key), advice)
    return False


def _sampler(sweep: SweepOptions, dimensions: Mapping[str, Dimension], seed: int | None) -> BaseSampler:
    options = {name: value for name, value in sweep.sampler.items() if name not in ("name", "seed")}
    given = sweep.sampler.get("seed")
    whole = given is None or (isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 2**32)
    require(whole, "sweep.sampler.seed", "be a whole number in [0, 2^32)", given)

    def tpe(startup_trials: int = 10, multivariate: bool = False) -> BaseSampler:
        return TPESampler(n_startup_trials=startup_trials, multivariate=multivariate, constant_liar=True, seed=seed)

    def random() -> BaseSampler:
        return RandomSampler(seed)

    def grid() -> BaseSampler:
        conditional = [key for key, own in dimensions.items() if own.when]
        require(not conditional, "sweep.sampler.name", "not be grid where keys have a `when`", conditional)
        return GridSampler({key: own.grid() for key, own in dimensions.items()}, seed)

    def qmc() -> BaseSampler:
        return QMCSampler(seed=seed, scramble=True)

    def gp(startup_trials: int = 10) -> BaseSampler:
        return GPSampler(seed=seed, n_startup_trials=startup_trials)

    def nsga2(population_size: int = 50) -> BaseSampler:
        require(population_size >= 2, "sweep.sampler.population_size", "be >= 2", population_size)
        return NSGAIISampler(population_size=population_size, seed=seed)

    known = {"tpe": tpe, "random": random, "grid": grid, "qmc": qmc, "gp": gp, "nsga2": nsga2}
    return _quietly(call, "sweep.sampler", known, str(sweep.sampler["name"]), **options)


def _pruner(sweep: SweepOptions) -> BasePruner:
    options = {name: value for name, value in sweep.pruner.items() if name != "name"}

    def median(startup_trials: int = 5, warmup_steps: int = 0) -> BasePruner:
        return MedianPruner(startup_trials, warmup_steps)

    def percentile(percentile: float, startup_trials: int = 5, warmup_steps: int = 0) -> BasePruner:
        """Keeps those in the top `percentile` per cent."""
        require(0 < percentile < 100, "sweep.pruner.percentile", "be in (0, 100)", percentile)
        return PercentilePruner(percentile, startup_trials, warmup_steps)

    def halving(min_resource: int = 1, reduction_factor: int = 4) -> BasePruner:
        return SuccessiveHalvingPruner(min_resource, reduction_factor)

    def hyperband(min_resource: int = 1, reduction_factor: int = 3) -> BasePruner:
        return HyperbandPruner(min_resource, reduction_factor=reduction_factor)

    known = {"none": NopPruner, "median": median, "percentile": percentile, "halving": halving, "hyperband": hyperband}
    try:
        return _quietly(call, "sweep.pruner", known, str(sweep.pruner["name"]), **options)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"`sweep.pruner` must have options in range, got {sweep.pruner}: {error}") from None


def _size_of_grid(dimensions: Mapping[str, Dimension]) -> int:
    size = 1
    for own in dimensions.values():
        size *= len(own.grid())
    return size


# ---- details


def _make_again(study: optuna.Study, own: FrozenTrial, most: int | None = None) -> None:
    """Whoever comes next makes a trial of the same values, unless that was done `most` times."""
    _quietly(lambda: RetryHeartbeatStaleTrialCallback(most)(study, own))


def _made_again(trials: Sequence[FrozenTrial]) -> set[int]:
    return {number for own in trials for number in _quietly(RetryHeartbeatStaleTrialCallback.retry_history, own)}


def _lost(own: FrozenTrial) -> bool:
    """Its worker died, and the one that noticed died, too, before it could ask for another."""
    return own.state == TrialState.FAIL and "reason" not in own.user_attrs and len(_history(own)) < _MOST_RETRIES


def _history(own: FrozenTrial) -> list[int]:
    return _quietly(RetryHeartbeatStaleTrialCallback.retry_history, own)


def _quietly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What optuna calls experimental, without its saying so in every trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return function(*args, **options)


def without_password(url: str) -> str:
    """The URL without its password.

    >>> without_password("postgresql://me:secret@host/studies")
    'postgresql://me:***@host/studies'
    """
    try:
        return sqlalchemy.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return url


def _in_one_line(error: BaseException) -> str:
    """An error's first line; what is no user's mistake also says its kind."""
    line = (str(error).strip().splitlines() or [""])[0][:300]
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"
