"""The database that workers share, and a check that all workers search the same."""

import json
import random
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from dpfl_lightning.config.yaml_text import inline
from dpfl_lightning.errors import UserError, in_one_line, require
from dpfl_lightning.runtime.text import without_credentials
from dpfl_lightning.search.options import SweepOptions

warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # of heartbeats and samplers

_IDENTITY = "searched"
_LOOKS = 20  # attempts to open a database whose tables another process is creating
_FAILS = (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.OptunaError, ImportError, RuntimeError, ValueError)

GivenUp = Callable[[optuna.Study, FrozenTrial], None]


def opened(
    sweep: SweepOptions, url: str, directions: Mapping[str, bool], given_up: GivenUp
) -> tuple[optuna.Study, RDBStorage]:
    """Open the study of that name in the database; creates it if missing.

    `directions` say of each score whether a larger value is better. `given_up` is called with a trial whose worker has
    sent no heartbeat for three intervals.
    """
    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None
    try:
        storage = _with_tables(url, options, sweep.heartbeat_seconds, given_up)
        _one_at_a_time(storage.engine)
        known = {True: StudyDirection.MAXIMIZE, False: StudyDirection.MINIMIZE}
        wanted = [known[higher] for higher in directions.values()]
        study = optuna.create_study(storage=storage, study_name=sweep.name, directions=wanted, load_if_exists=True)
        return study, storage
    except _FAILS as error:
        raise UserError(
            f"`sweep.storage` must be the URL of a database that answers, got {without_credentials(url)!r} "
            f"({in_one_line(error)}). Examples: sqlite:///study.db, or postgresql+psycopg://host/name after "
            "pip install psycopg[binary]."
        ) from None


def _with_tables(url: str, options: dict[str, Any] | None, heartbeat: int, given_up: GivenUp) -> RDBStorage:
    """Return the storage. If another process creates the tables of a new database at the same time, try again."""
    for look in range(_LOOKS):
        try:
            return RDBStorage(
                url,
                options,
                heartbeat_interval=heartbeat,
                grace_period=3 * heartbeat,
                heartbeat_stale_trial_callback=given_up,
            )
        except sqlalchemy.exc.SQLAlchemyError as error:
            at_once = isinstance(error, sqlalchemy.exc.IntegrityError) or "already exists" in str(error)
            if not at_once or look == _LOOKS - 1:
                raise
        time.sleep(random.uniform(0.1, 0.5))
    raise AssertionError  # for mypy


def _one_at_a_time(engine: sqlalchemy.Engine) -> None:
    """Make SQLite transactions exclusive, because SQLite lacks SELECT FOR UPDATE, with which workers take a trial."""
    if engine.dialect.name != "sqlite":
        return

    def by_hand(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # otherwise Python would begin another transaction, and later

    sqlalchemy.event.listen(engine, "connect", by_hand)
    sqlalchemy.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    engine.dispose()  # closes the connections that were opened before


def study_names(database: Path) -> set[str]:
    """Return the names of the studies in a SQLite file; none if the file does not exist, or cannot be read yet."""
    if not database.is_file():
        return set()
    try:
        return set(optuna.get_all_study_names(f"sqlite:///{database}"))
    except _FAILS:
        return set()  # `opened` says what is wrong with it


def agreed(study: optuna.Study, identity: Mapping[str, Any]) -> bool:
    """Return whether the study is new. Raise UserError if it has another identity, or another program created it."""
    wanted = json.loads(json.dumps(identity))  # as it is stored
    foreign = bool(study.get_trials(deepcopy=False))  # looked at first, because another worker may begin meanwhile
    stored = study.user_attrs.get(_IDENTITY)
    if stored is None:
        advice = "Choose another sweep.name, or another sweep.storage."
        require(not foreign, "sweep.name", "be new, or a study that this command created", study.study_name, advice)
        study.set_user_attr(_IDENTITY, wanted)
        return True
    for key in {**stored, **wanted}:
        same = stored.get(key) == wanted.get(key)
        must = f"be the same as in study {study.study_name} of that storage ({inline(stored.get(key))})"
        advice = "Its trials cannot be compared with new ones. Choose another --output_dir or sweep.storage."
        require(same, key, must, inline(wanted.get(key)), advice)
    return False
