"""The study: which worker takes which trial, and what remains when a worker dies or the storage is another one."""

import dataclasses
import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import optuna
import pytest
from optuna.storages import RetryHeartbeatStaleTrialCallback as Retry
from optuna.trial import TrialState

from dpfl_lightning.config.options import Options
from dpfl_lightning.errors import UserError
from dpfl_lightning.runtime import stopping
from dpfl_lightning.runtime.digests import object_digest
from dpfl_lightning.search.objectives import _Reporting
from dpfl_lightning.search.options import SweepOptions
from dpfl_lightning.search.scores import directions
from dpfl_lightning.search.space import parse
from dpfl_lightning.search.study import Pruned, Study

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SPACE = {"model.width": {"low": 1, "high": 1000}, "model.norm": {"choices": ["none", "group"]}}


def study(url: str, seed: int = 0, first: bool = True, identity: dict | None = None, **changed) -> Study:
    usual = {"name": "s", "space": SPACE, "trials": 4, "sampler": {"name": "random"}, "heartbeat_seconds": 1}
    options = SweepOptions(**{**usual, **changed})
    better = directions(options.scores, Options(privacy=None))
    return Study(options, parse(options.space, "set"), url, identity or {"rounds": 1}, better, seed, first)


@pytest.fixture
def url(tmp_path) -> str:
    return f"sqlite:///{tmp_path}/study.db"


def width(running) -> tuple[float, ...]:
    return (running.params["model.width"] / 1000,)


def work(study: Study, act=width) -> list:
    """The trials that ended in this study's work."""
    ended: list = []
    study.work(act, ended.append)
    return ended


def at_once(*calls) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_study_makes_the_missing_trials_only(url):
    trials = work(study(url))
    assert [trial.number for trial in trials] == [0, 1, 2, 3]
    assert work(study(url)) == []
    more = study(url, trials=6)
    trials += work(more)
    assert [trial.number for trial in trials] == [0, 1, 2, 3, 4, 5]
    assert len({trial.found["model.width"] for trial in trials}) > 4, "a resumed study draws other values"
    assert more.best()[0].scores["accuracy"] == max(trial.scores["accuracy"] for trial in trials)


def test_the_seed_makes_a_new_study_repeatable(tmp_path):
    studies = [study(f"sqlite:///{tmp_path}/{number}.db", seed) for number, seed in enumerate((0, 0, 1))]
    drawn = [[trial.found for trial in work(one)] for one in studies]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_trial_that_fails_is_kept_with_its_reason_and_the_study_continues(url):
    def act(running):
        if running.number == 1:
            raise UserError("`model.width` must be even, got 7.")
        if running.number == 2:
            raise ZeroDivisionError("by nought")
        return (math.nan,) if running.number == 3 else width(running)

    first = study(url)
    trials = work(first, act)
    assert [trial.state for trial in first.trials()] == ["complete", "failed", "failed", "failed"]
    assert trials[1].reason == "`model.width` must be even, got 7." and "error" not in trials[1].facts
    assert trials[2].reason == "ZeroDivisionError: by nought" and "Traceback" in trials[2].facts["error"]
    assert [trial.number for trial in first.best()] == [0], "a score that is no number fails, too"


def test_pruned_trials_count_and_have_a_reason(url):
    def act(running):
        if one.report(1, 1.0 - running.number / 10) and running.number == 3:
            raise Pruned("after 1 of 2 nets")
        return width(running)

    one = study(url, pruner={"name": "median", "startup_trials": 1})
    last = work(one, act)[3]
    assert (last.state, last.reason, last.steps) == ("pruned", "after 1 of 2 nets", {1: 0.7})


def test_several_scores_have_a_front(url):
    values = [(0.5, 100), (0.9, 300), (0.8, 300), (0.6, 200)]

    def act(running):
        assert several.report(2, 0.25) is False
        return values[running.number]

    several = study(url, scores=("accuracy", "num_params"))
    work(several, act)
    assert [trial.number for trial in several.best()] == [1, 3, 0]
    assert several.best()[0].scores == {"accuracy": 0.9, "num_params": 300}


def test_a_score_may_have_the_name_of_a_column_of_the_storage(url):
    """A metric of the user's own, which the table shows beside the numbers and the states of trials."""
    named = study(url)
    named._sweep = dataclasses.replace(named._sweep, scores=("state",))
    named._directions = {"state": True}

    def act(running):
        running.set_user_attr("state", *width(running))
        return width(running)

    work(named, act)
    head, *rows = named.table().splitlines()[1:]
    assert head.split()[:2] == ["number", "state"] and len(rows) == 4
    shown = [float(row.split()[1]) for row in rows]
    assert shown == sorted((trial.scores["state"] for trial in named.trials()), reverse=True)


def test_workers_and_resumed_studies_share_one_grid_that_ends(url):
    space = {"model.width": {"low": 8, "high": 28, "step": 4}, "model.norm": {"choices": ["none", "group"]}}
    grid = {"space": space, "seed": 1}
    work(study(url, trials=4, sampler={"name": "grid"}, **grid))
    work(study(url, trials=8, first=False, sampler={"name": "grid"}, **grid))
    last = study(url, trials=50, sampler={"name": "grid"}, **grid)
    assert last.wanted == 12
    work(last)
    assert len({tuple(trial.found.values()) for trial in last.trials()}) == len(last.trials()) == 12


def test_every_sampler_draws_and_every_pruner_answers(tmp_path):
    def act(running):
        for step in range(3):
            one.report(step + 1, 0.5)
        return width(running)

    samplers = [{"sampler": {"name": name}} for name in ("tpe", "random", "qmc", "gp", "nsga2")]
    pruners = ({"name": "median"}, {"name": "halving"}, {"name": "hyperband"})
    for number, options in enumerate([*samplers, *({"pruner": pruner} for pruner in pruners)]):
        one = study(f"sqlite:///{tmp_path}/{number}.db", **options)
        assert len(work(one, act)) == 4, options


WHEN = {"model.norm": {"choices": ["none"]}, "model.width": {"choices": [8], "when": {"model.norm": "none"}}}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sampler": {"name": "tpee"}}, ["sweep.sampler.name", "Did you mean `tpe`"]),
        ({"sampler": {"name": "tpe", "startup": 3}}, ["sweep.sampler.startup", "Did you mean `startup_trials`"]),
        ({"sampler": {"name": "tpe", "seed": -1}}, ["sweep.sampler.seed", "-1"]),
        ({"pruner": {"name": "medain"}}, ["sweep.pruner.name", "Did you mean `median`"]),
        ({"pruner": {"name": "halving", "reduction_factor": 1}}, ["sweep.pruner", "in range"]),
        ({"pruner": {"name": "hyperband", "reduction_factor": 1}}, ["sweep.pruner.reduction_factor", ">= 2"]),
        ({"sampler": {"name": "grid"}, "space": {"clients.learning_rate": {"low": 0.1, "high": 1.0}}},
         ["sweep.space.clients.learning_rate", "a step for sampler grid"]),
        ({"sampler": {"name": "grid"}, "space": WHEN}, ["grid", "`when`"]),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_before_a_database_is_touched(url, changed, words):
    with pytest.raises(UserError) as error:
        study(url, **changed)
    assert not [word for word in words if word not in str(error.value)], error.value
    assert not Path(url.removeprefix("sqlite:///")).exists()


def test_a_storage_that_does_not_answer_is_named_without_its_password():
    for bad in ("nosuchdatabase://x/y", "no url", "sqlite:////no/such/folder/study.db"):
        with pytest.raises(UserError, match=r"sweep\.storage"):
            study(bad)
    with pytest.raises(UserError, match=r"postgresql\+psycopg://127\.0\.0\.1:1/studies") as error:
        study("postgresql+psycopg://me:secret@127.0.0.1:1/studies")
    assert "secret" not in str(error.value) and "me:" not in str(error.value)


def test_a_study_that_searches_something_else_is_refused(url):
    study(url)
    with pytest.raises(UserError, match=r"`rounds` must be the same as in study s of that storage \(1\), got '2'"):
        study(url, identity={"rounds": 2})
    other = optuna.create_study(storage=url, study_name="other")
    other.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(UserError, match="a study that this command created"):
        study(url, name="other")


# ---- stopped and concurrent workers


def test_a_worker_may_join_while_another_one_begins(url, monkeypatch):
    get_trials, others = optuna.Study.get_trials, []

    def late(self, *args, **options):
        if not others:
            others.append("one")
            work(study(url))
        return get_trials(self, *args, **options)

    monkeypatch.setattr(optuna.Study, "get_trials", late)
    assert work(study(url)) == []


def test_ctrl_c_loses_no_trial(url):
    def act(running):
        if running.number == 1:
            raise KeyboardInterrupt
        return width(running)

    with pytest.raises(KeyboardInterrupt):
        work(study(url), act)
    resumed = study(url)
    work(resumed)
    assert Counter(trial.state for trial in resumed.trials()) == {"complete": 4, "failed": 1}
    stopped, again = resumed.trials()[1:3]
    assert stopped.again and stopped.reason == "stopped by Ctrl-C" and again.found == stopped.found


def test_a_part_of_another_process_begins_no_trial_once_that_has_ended(url, monkeypatch):
    monkeypatch.setattr(stopping, "_starter", os.getppid())

    def act(running):
        monkeypatch.setattr(stopping, "_starter", -1)  # the parent is another one
        return width(running)

    left = study(url)
    with pytest.raises(stopping.Orphaned):
        left.work(act, lambda trial: None)
    assert [trial.state for trial in left.trials()] == ["complete"]


def test_a_stopped_trial_is_not_repeated_if_the_others_are_enough(url):
    def act(running):
        if running.number == 2:
            raise KeyboardInterrupt
        return width(running)

    with pytest.raises(KeyboardInterrupt):
        work(study(url), act)
    assert work(study(url, trials=2)) == []
    assert [trial.number for trial in work(study(url, trials=3))] == [3]


def test_concurrent_workers_take_each_trial_once(url):
    """Twelve waiting trials and four workers: SQLite alone would hand some of them out twice."""
    numbers, lock = [], threading.Lock()
    first = study(url, trials=12)
    for number in range(12):
        first._study.enqueue_trial({"model.width": number + 1, "model.norm": "none"})

    def act(running):
        with lock:
            numbers.append(running.number)
        return width(running)

    workers = [study(url, trials=12, first=False) for _ in range(4)]
    at_once(*(lambda worker=worker: work(worker, act) for worker in workers))
    assert sorted(numbers) == list(range(12)) and len(first.trials()) == len(first.begun()) == 12


def test_the_last_trial_is_made_once_though_several_workers_take_it(url, monkeypatch):
    """All see that one is left before the first of them takes it."""
    workers = [study(url, trials=1, first=number == 0) for number in range(3)]
    numbers, ended, left = [], [], Study._left
    monkeypatch.setattr(Study, "_left", lambda self, last=math.inf: 1 if last == math.inf else left(self, last))

    def act(running):
        numbers.append(running.number)
        return width(running)

    for worker in workers:
        worker._on_end = ended.append
        worker._one_trial(act)
    assert numbers == [0] and [trial.number for trial in ended] == [0]
    monkeypatch.undo()
    assert [trial.number for trial in workers[0].trials()] == [0] and len(workers[0].begun()) == 1
    more = study(url, trials=2)
    work(more, act)
    assert len(numbers) == 2 and len(more.trials()) == 2


DYING = """
import sys, time
from test_study import study, work
def act(running):
    print(running.params["model.width"], flush=True)
    time.sleep(600)
work(study(sys.argv[1], trials=2), act)
"""


def test_the_trial_of_a_killed_worker_is_repeated(url):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": path}
    worker = subprocess.Popen([sys.executable, "-c", DYING, url], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        drawn = int(worker.stdout.readline())
    finally:
        worker.kill()
        worker.wait()
    resumed, start = study(url, trials=2), time.monotonic()
    died = [trial for trial in work(resumed) if trial.state == "failed"]
    assert [(trial.number, trial.reason, trial.again) for trial in died] == [(0, "its worker died", True)]
    complete = [trial.found["model.width"] for trial in resumed.trials() if trial.state == "complete"]
    assert drawn in complete and len(complete) == 2 and time.monotonic() - start < 60


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_worker_that_died_before_its_first_heartbeat_is_noticed(url):
    study(url, trials=1)._study.ask()  # a trial that has begun, and nothing since
    trials = work(study(url, trials=1, first=False))
    assert [trial.state for trial in trials] == ["failed", "complete"] and trials[0].again


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_trial_is_repeated_once_though_who_noticed_its_end_died_or_several_did(url):
    noticed = study(url, trials=2)
    noticed._study.ask()
    (trial,) = noticed._study.get_trials()
    noticed._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)  # and no more: it was killed then
    workers = [study(url, trials=2, first=False) for _ in range(2)]
    for worker in workers:
        Retry()(worker._study, trial)  # both have seen it before either queues it
    at_once(*(lambda worker=worker: work(worker) for worker in workers))
    failed, *complete = noticed.trials()
    assert failed.again and [trial.state for trial in complete] == ["complete"] * 2
    alone = study(url, trials=3)
    alone._study.ask()
    trial = alone._study.get_trials()[-1]
    alone._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
    work(alone)
    assert [trial.state for trial in alone.trials()].count("complete") == 3


def test_where_a_trial_reports_is_no_setting_of_its_run(tmp_path):
    """The digest of a study's objects would change with the connections of its database, even while it is taken."""
    digests = {
        object_digest(_Reporting(study(f"sqlite:///{tmp_path}/{number}.db").report, "accuracy", 0)) for number in (0, 1)
    }
    assert len(digests) == 1
