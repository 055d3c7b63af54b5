"""The database that workers share: how it is opened, and whether they search the same."""

from __future__ import annotations

import json
import random
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import optuna
import sqlalchemy
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.search.options import SCORES, SweepOptions

_IDENTITY = "searched"
_LOOKS = 20  # at a database whose tables others are making
_FAILS = (
    sqlalchemy.exc.SQLAlchemyError,
    optuna.exceptions.OptunaError,
    ImportError,
    RuntimeError,
    ValueError,
)


def opened(
    sweep: SweepOptions, url: str, given_up: Callable[[optuna.Study, FrozenTrial], None]
) -> tuple[optuna.Study, RDBStorage]:
    """The study of that name in the database, made if need be.

    Args:
        given_up: called with a trial whose worker has been silent for three heartbeats.

    Raises:
        UserError: the database does not answer.
    """
    try:
        storage = _with_tables(
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
    except _FAILS as error:
        raise UserError(
            f"`sweep.storage` must be the URL of a database that answers, got {without_password(url)!r} "
            f"({in_one_line(error)}). Such as sqlite:///study.db or postgresql+psycopg://host/name, for which pip "
            "installs psycopg[binary]."
        ) from None


def _with_tables(*args: Any, **options: Any) -> RDBStorage:
    """The storage. A new database's tables are made by whoever comes first; who came at the same time looks again."""
    for _ in range(_LOOKS - 1):
        try:
            return quietly(RDBStorage, *args, **options)
        except sqlalchemy.exc.SQLAlchemyError as error:
            if not isinstance(error, sqlalchemy.exc.IntegrityError) and "already exists" not in str(error):
                raise
        time.sleep(random.uniform(0.1, 0.5))
    return quietly(RDBStorage, *args, **options)


def _one_at_a_time(engine: sqlalchemy.Engine) -> None:
    """SQLite has no SELECT FOR UPDATE, by which workers agree who takes a trial: there a transaction is exclusive."""
    if engine.dialect.name != "sqlite":
        return

    def by_hand(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # or Python would begin a transaction of its own, and later

    sqlalchemy.event.listen(engine, "connect", by_hand)
    sqlalchemy.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    engine.dispose()  # connections made before


def agreed(study: optuna.Study, identity: Mapping[str, Any]) -> bool:
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


def without_password(url: str) -> str:
    """The URL without its password.

    >>> without_password("postgresql://me:secret@host/studies")
    'postgresql://me:***@host/studies'
    """
    try:
        return sqlalchemy.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return url


def in_one_line(error: BaseException) -> str:
    """An error's first line; what is no user's mistake also says its kind."""
    line = (str(error).strip().splitlines() or [""])[0][:300]
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"


def quietly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What optuna calls experimental, without its saying so in every trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return function(*args, **options)
