"""The study: who takes which trial, and what is left when a worker dies or the storage is another one."""

from __future__ import annotations

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

from dpfl_lightning.errors import UserError
from dpfl_lightning.search.options import SweepOptions
from dpfl_lightning.search.space import parse
from dpfl_lightning.search.study import Pruned, Study

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SPACE = {"model.width": {"low": 1, "high": 1000}, "model.norm": {"choices": ["none", "group"]}}


def sweep(**changed) -> SweepOptions:
    plain = {"name": "s", "space": SPACE, "trials": 4, "sampler": {"name": "random"}, "heartbeat_seconds": 1}
    return SweepOptions(**{**plain, **changed})


def study(url: str, seed: int = 0, first: bool = True, identity: dict | None = None, **changed) -> Study:
    own = sweep(**changed)
    return Study(own, parse(own.space, "set"), url, identity or {"rounds": 1}, seed, first)


@pytest.fixture
def url(tmp_path) -> str:
    return f"sqlite:///{tmp_path}/study.db"


def width(running) -> tuple[float, ...]:
    return (running.found["model.width"] / 1000,)


def test_trials_are_made_until_there_are_enough_and_more_are_made_when_more_are_wanted(url):
    told = []
    study(url).work(width, told.append)
    assert [one.number for one in told] == [0, 1, 2, 3]
    study(url).work(width, told.append)
    assert len(told) == 4
    more = study(url, trials=6)
    more.work(width, told.append)
    assert [one.number for one in told] == [0, 1, 2, 3, 4, 5]
    assert len({one.found["model.width"] for one in told}) > 4, "one that comes back draws other values"
    assert more.best()[0].scores["accuracy"] == max(one.scores["accuracy"] for one in told)


def test_the_seed_makes_a_new_study_repeatable(tmp_path):
    drawn = []
    for number, seed in enumerate((0, 0, 1)):
        told = []
        study(f"sqlite:///{tmp_path}/{number}.db", seed).work(width, told.append)
        drawn.append([one.found for one in told])
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_trial_that_fails_is_kept_with_its_reason_and_the_study_goes_on(url):
    def act(running):
        if running.number == 1:
            raise UserError("`model.width` must be even, got 7.")
        if running.number == 2:
            raise ZeroDivisionError("by nought")
        return width(running)

    own, told = study(url), []
    own.work(act, told.append)
    assert [one.state for one in own.trials()] == ["complete", "failed", "failed", "complete"]
    assert told[1].reason == "`model.width` must be even, got 7." and "error" not in told[1].facts
    assert told[2].reason == "ZeroDivisionError: by nought" and "Traceback" in told[2].facts["error"]


def test_a_score_that_is_no_number_fails(url):
    own = study(url, trials=1)
    own.work(lambda running: (float("nan"),), lambda trial: None)
    assert own.trials()[0].state == "failed" and own.best() == []


def test_pruned_trials_count_and_say_when(url):
    def act(running):
        if running.report(1, 1.0 - running.number / 10) and running.number == 3:
            raise Pruned("after 1 of 2 nets")
        return width(running)

    own = study(url, pruner={"name": "median", "startup_trials": 1})
    own.work(act, lambda trial: None)
    last = own.trials()[3]
    assert (last.state, last.reason, last.steps) == ("pruned", "after 1 of 2 nets", {1: 0.7})


def test_several_scores_have_a_front(url):
    values = [(0.5, 100), (0.9, 300), (0.8, 300), (0.6, 200)]
    own = study(url, scores=("accuracy", "num_params"))
    own.work(lambda running: values[running.number], lambda trial: None)
    assert [one.number for one in own.best()] == [1, 3, 0]
    assert own.best()[0].scores == {"accuracy": 0.9, "num_params": 300}


def test_accuracies_on_the_way_to_several_scores_are_noted(url):
    def act(running):
        assert running.report(2, 0.25) is False
        return 0.5, 100.0

    own = study(url, scores=("accuracy", "num_params"), trials=1)
    own.work(act, lambda trial: None)
    assert own.trials()[0].steps == {2: 0.25}


def test_a_grid_is_made_once_and_then_ends(url):
    space = {"model.width": {"low": 8, "high": 16, "step": 4}, "model.norm": {"choices": ["none", "group"]}}
    own = study(url, space=space, sampler={"name": "grid"}, trials=50)
    assert own.wanted == 6
    own.work(width, lambda trial: None)
    assert len({tuple(one.found.values()) for one in own.trials()}) == len(own.trials()) == 6


@pytest.mark.parametrize("more", [{}, {"seed": 5}, {"seed": None}])
def test_workers_and_those_that_come_back_share_one_grid(url, more):
    space = {"model.width": {"low": 8, "high": 28, "step": 4}, "model.norm": {"choices": ["none", "group"]}}
    own = {"space": space, "sampler": {"name": "grid"}, "seed": 1}
    study(url, trials=4, **own).work(width, lambda trial: None)
    study(url, trials=8, first=False, **own).work(width, lambda trial: None)
    last = study(url, trials=50, **{**own, "sampler": {"name": "grid", **more}})
    last.work(width, lambda trial: None)
    assert len({tuple(one.found.values()) for one in last.trials()}) == len(last.trials()) == 12


def test_workers_and_those_that_come_back_go_on_with_one_sequence(tmp_path):
    found = []
    for name, parts in (("whole", [8]), ("parts", [3, 6, 8])):
        for number, trials in enumerate(parts):
            own = study(f"sqlite:///{tmp_path}/{name}.db", 1, number == 0, trials=trials, sampler={"name": "qmc"})
            own.work(width, lambda trial: None)
        found.append([one.found for one in own.trials()])
    assert found[0] == found[1]


def test_workers_at_the_start_of_a_sequence_draw_differently(url):
    """Nothing is known of the space until a first trial ended, and they must not all make the same one."""
    workers = [study(url, 1, first, sampler={"name": "qmc"}, trials=3) for first in (True, False, False)]
    found = [one._study.sampler._independent_sampler._rng.rng.random() for one in workers]
    assert len(set(found)) == 3


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", "gp", "nsga2"])
def test_every_sampler_draws(url, sampler):
    own = study(url, sampler={"name": sampler})
    own.work(width, lambda trial: None)
    assert len(own.trials()) == 4


@pytest.mark.parametrize(
    "pruner", [{"name": "percentile", "percentile": 50.0}, {"name": "halving"}, {"name": "hyperband"}]
)
def test_every_pruner_answers(url, pruner):
    def act(running):
        for step in range(3):
            running.report(step + 1, 0.5)
        return width(running)

    own = study(url, pruner=pruner)
    own.work(act, lambda trial: None)
    assert len(own.trials()) == 4


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sampler": {"name": "tpee"}}, ["sweep.sampler.name", "Did you mean `tpe`"]),
        ({"sampler": {"name": "tpe", "startup": 3}}, ["sweep.sampler.startup", "Did you mean `startup_trials`"]),
        ({"sampler": {"name": "tpe", "seed": -1}}, ["sweep.sampler.seed", "-1"]),
        ({"pruner": {"name": "medain"}}, ["sweep.pruner.name", "Did you mean `median`"]),
        ({"pruner": {"name": "percentile", "percentile": 200.0}}, ["sweep.pruner.percentile", "(0, 100)"]),
        ({"pruner": {"name": "halving", "reduction_factor": 1}}, ["sweep.pruner", "in range"]),
        ({"pruner": {"name": "hyperband", "reduction_factor": 1}}, ["sweep.pruner.reduction_factor", ">= 2"]),
        (
            {"sampler": {"name": "grid"}, "space": {"clients.learning_rate": {"low": 0.1, "high": 1.0}}},
            ["sweep.space.clients.learning_rate", "a step for sampler grid"],
        ),
        (
            {
                "sampler": {"name": "grid"},
                "space": {
                    "model.norm": {"choices": ["none"]},
                    "model.width": {"choices": [8], "when": {"model.norm": "none"}},
                },
            },
            ["grid", "`when`"],
        ),
    ],
)
def test_what_cannot_be_is_refused_before_a_database_is_touched(url, changed, words):
    with pytest.raises(UserError) as error:
        study(url, **changed)
    for word in words:
        assert word in str(error.value)
    assert not Path(url.removeprefix("sqlite:///")).exists()


@pytest.mark.parametrize("bad", ["nosuchdatabase://x/y", "no url", "sqlite:////no/such/folder/study.db"])
def test_a_storage_that_does_not_answer_is_named(bad):
    with pytest.raises(UserError, match=r"sweep\.storage"):
        study(bad)


def test_a_password_is_not_shown():
    with pytest.raises(UserError) as error:
        study("postgresql+psycopg://me:secret@127.0.0.1:1/studies")
    assert "secret" not in str(error.value) and "me:***@" in str(error.value)


def test_a_study_that_searches_something_else_is_refused(url):
    study(url)
    with pytest.raises(UserError, match=r"`rounds` must be the same as in study s of that storage \(1\), got 2"):
        study(url, identity={"rounds": 2})
    other = optuna.create_study(storage=url, study_name="other")
    other.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(UserError, match="a study that this command created"):
        study(url, name="other")


def test_ctrl_c_loses_no_trial(url):
    def act(running):
        if running.number == 1:
            raise KeyboardInterrupt
        return width(running)

    own = study(url)
    with pytest.raises(KeyboardInterrupt):
        own.work(act, lambda trial: None)
    own = study(url)
    own.work(width, lambda trial: None)
    states = Counter(one.state for one in own.trials())
    assert states == {"complete": 4, "failed": 1}
    stopped, again = own.trials()[1], own.trials()[2]
    assert stopped.again and stopped.reason == "stopped by Ctrl-C" and again.found == stopped.found


def test_a_trial_that_was_given_to_another_worker_may_still_end(url):
    """Its worker was silent for too long, and comes back."""

    def act(running):
        if running.number == 0:
            study(url)._study._storage.set_trial_state_values(1, optuna.trial.TrialState.FAIL)
        return width(running)

    own = study(url, trials=2)
    own.work(act, lambda trial: None)
    assert Counter(one.state for one in own.trials()) == {"failed": 1, "complete": 2}


def test_workers_at_once_take_each_trial_once(url):
    """Twelve waiting trials and four workers: SQLite alone would hand some of them out twice."""
    made, lock = [], threading.Lock()
    first = study(url, trials=12)
    for number in range(12):
        first._study.enqueue_trial({"model.width": number + 1, "model.norm": "none"})

    def act(running):
        with lock:
            made.append(running.number)
        return width(running)

    workers = [study(url, trials=12, first=False) for _ in range(4)]
    threads = [threading.Thread(target=one.work, args=(act, lambda trial: None)) for one in workers]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(made) == list(range(12)) and len(first.trials()) == len(first.begun()) == 12


def test_the_last_trial_is_made_once_though_several_workers_take_it(url, monkeypatch):
    """All see that one is left before the first of them takes it."""
    workers, made, told = [study(url, trials=1, first=number == 0) for number in range(3)], [], []
    monkeypatch.setattr(
        Study, "_left", lambda self, last=math.inf, own=Study._left: 1 if last == math.inf else own(self, last)
    )

    def act(running):
        made.append(running.number)
        return width(running)

    for one in workers:
        one._on_end = told.append
        one._one_trial(act)
    assert made == [0] and [one.number for one in told] == [0]
    monkeypatch.undo()
    assert [one.number for one in workers[0].trials()] == [0] and len(workers[0].begun()) == 1
    more = study(url, trials=2)
    more.work(act, told.append)
    assert len(made) == 2 and len(more.trials()) == 2


def test_workers_may_begin_at_once_on_a_database_that_is_new(url):
    begin, made = threading.Barrier(5), []

    def worker(number: int) -> None:
        begin.wait()
        made.append(study(url, first=number == 0))

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(5)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(made) == 5


DYING = """
import sys, time
from test_study import study
def act(running):
    print(running.found["model.width"], flush=True)
    time.sleep(600)
study(sys.argv[1], trials=2).work(act, lambda trial: None)
"""


def killed_worker(url: str) -> int:
    """What the worker had drawn when it was killed in the midst of its first trial."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    own = {**os.environ, "PYTHONPATH": path}
    worker = subprocess.Popen([sys.executable, "-c", DYING, url], stdout=subprocess.PIPE, text=True, env=own)
    try:
        drawn = int(worker.stdout.readline())
    finally:
        worker.kill()
        worker.wait()
    return drawn


def check_nothing_is_lost(url: str) -> None:
    drawn, told = killed_worker(url), []
    own, begun = study(url, trials=2), time.monotonic()
    own.work(width, told.append)
    died = [one for one in told if one.state == "failed"]
    assert [(one.number, one.reason, one.again) for one in died] == [(0, "its worker died", True)]
    complete = [one.found["model.width"] for one in own.trials() if one.state == "complete"]
    assert drawn in complete and len(complete) == 2
    assert time.monotonic() - begun < 60


def test_what_a_killed_worker_was_at_is_made_again(url):
    check_nothing_is_lost(url)


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_worker_that_died_before_its_first_heartbeat_is_noticed(url):
    first = study(url, trials=1)
    first._study.ask()  # begun, and nothing since
    told = []
    study(url, trials=1, first=False).work(width, told.append)
    assert [one.state for one in told] == ["failed", "complete"] and told[0].again
