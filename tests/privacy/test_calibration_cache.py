"""Cached noise: found again by other processes, worth nothing when damaged, harmless when it lies."""

import multiprocessing
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpfl_lightning.privacy.accounting import calibration_cache, schedule
from dpfl_lightning.privacy.accounting.accountant import Pld, Rdp, get_accountant
from dpfl_lightning.privacy.accounting.calibration_cache import CalibrationCache
from dpfl_lightning.privacy.accounting.events import GaussianEvent, SelectionEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate

RDP, PLD = (get_accountant(name) for name in ("rdp", "pld"))


def plan_of(epsilon=2.0, rate=0.1, steps=10, count=9, delta=1e-4):
    return ClientSchedule(epsilon, delta, (Planned("train", GaussianEvent(rate, None, steps), count),))


def solve(folder, plans, accountant=RDP):
    return [one.noise_multiplier("train") for one in calibrate(plans, accountant, cache=CalibrationCache(folder))]


def forbid_solving(monkeypatch):
    def solver(plans, *_):
        assert not plans, "it was to be found in the cache"
        return []

    monkeypatch.setattr(schedule, "_smallest_noise", solver)


def file_of(folder) -> Path:
    return CalibrationCache(folder).file


def write(folder, plan, noise, accountant=RDP):
    """An entry that looks like a good one."""
    CalibrationCache(folder).keep({plan: noise}, accountant)


@pytest.mark.parametrize("accountant", [RDP, PLD], ids=["rdp", "pld"])
def test_the_second_time_nothing_is_solved(tmp_path, monkeypatch, accountant):
    plans = [plan_of(epsilon, rate=0.1) for epsilon in (1.0, 2.0, 1.0)]
    first = solve(tmp_path / "new" / "folder", plans, accountant)
    forbid_solving(monkeypatch)
    cache = CalibrationCache(tmp_path / "new" / "folder")
    progress: list[tuple[int, int]] = []
    for _ in range(2):  # one object serves several calls
        again = calibrate(plans, accountant, lambda done, total: progress.append((done, total)), cache)
        assert [one.noise_multiplier("train") for one in again] == first
    assert progress == [(1, 2), (2, 2)] * 2


def test_known_and_new_clients_keep_their_order(tmp_path):
    plans = [plan_of(1.0 + i) for i in range(4)]
    plain = [one.noise_multiplier("train") for one in calibrate(plans, RDP)]
    solve(tmp_path, [plans[2], plans[0]])
    assert solve(tmp_path, plans) == plain


def test_only_the_same_question_has_the_same_answer(tmp_path, monkeypatch):
    plan = plan_of()
    write(tmp_path, plan, 1.5)

    def held(asked, accountant=RDP):
        return CalibrationCache(tmp_path).noises([asked], accountant)[0]

    assert held(plan) == 1.5
    others = [plan_of(epsilon=2.1), plan_of(rate=0.11), plan_of(steps=11), plan_of(count=8), plan_of(delta=1e-5)]
    first = Planned("first_round", GaussianEvent(1.0, 5.0), 1)
    others.append(ClientSchedule(2.0, 1e-4, (*plan.planned, first)))
    others.append(ClientSchedule(2.0, 1e-4, (*plan.planned, Planned("select", SelectionEvent(0.1), 1))))
    assert [held(one) for one in others] == [None] * len(others)
    assert held(plan, PLD) is None and held(plan, Rdp(orders=(2.0, 3.0))) is None
    for one in (Rdp(), Pld()):
        write(tmp_path, plan, 1.5, one)
        one.adjacency = "replace_one"
        assert held(plan, one) is None, "with this relation between data sets the same noise costs more"
    monkeypatch.setattr(calibration_cache, "_versions", lambda: "other code or libraries")
    assert held(plan) is None
    monkeypatch.undo()
    assert all(name in calibration_cache._versions() for name in ("dp-accounting", "opacus", "numpy", "scipy", "code"))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(epsilon=st.floats(0.1, 20.0), lie=st.floats(0.001, 0.9999999))
def test_a_noise_that_is_too_small_is_not_used(tmp_path, epsilon, lie):
    plan = plan_of(epsilon)
    honest = calibrate([plan], RDP)[0].noise_multiplier("train")
    write(tmp_path, plan, lie * honest)
    (noise,) = solve(tmp_path, [plan])
    assert RDP.epsilon(plan.with_noise(noise).events(), plan.delta) <= epsilon


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_nor_by_another_accountant(tmp_path, rate):
    plan = plan_of(rate=rate)
    write(tmp_path, plan, 0.5, PLD)
    assert solve(tmp_path, [plan], PLD) == solve(tmp_path / "empty", [plan], PLD)


def test_what_is_no_noise_is_no_entry(tmp_path):
    plan = plan_of()
    honest = solve(tmp_path / "other", [plan])
    for noise in (0.0, -1.0, float("inf"), float("nan"), 5e-324):
        write(tmp_path / str(noise), plan, noise)
        assert solve(tmp_path / str(noise), [plan]) == honest


def test_a_damaged_file_changes_no_result(tmp_path):
    """Seed 0: single bytes changed, cut out or put in, anywhere; the result is that of an empty cache."""
    plans = [plan_of(1.0), plan_of(2.0)]
    honest = solve(tmp_path, plans)
    good, chance = file_of(tmp_path).read_bytes(), random.Random(0)
    for _ in range(60):
        at = chance.randrange(len(good))
        junk = bytes([chance.randrange(256)])
        damaged = chance.choice([good[:at] + junk + good[at + 1 :], good[:at] + good[at + 1 :], good[:at] + junk])
        file_of(tmp_path).write_bytes(damaged)
        assert solve(tmp_path, plans) == honest
    file_of(tmp_path).write_bytes(os.urandom(10_000))
    assert solve(tmp_path, plans) == honest


def test_a_torn_line_spoils_no_other_and_the_last_of_several_counts(tmp_path):
    write(tmp_path, plan_of(1.0), 3.0)
    file_of(tmp_path).write_bytes(file_of(tmp_path).read_bytes()[:-9])
    for noise in (5.0, 4.0):
        write(tmp_path, plan_of(2.0), noise)
    assert CalibrationCache(tmp_path).noises([plan_of(1.0), plan_of(2.0)], RDP) == [None, 4.0]


def test_a_place_that_cannot_be_used_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "noise_multipliers.txt").mkdir()
    plan = plan_of()
    honest = calibrate([plan], RDP)[0].noise_multiplier("train")
    for folder in (tmp_path / "file", tmp_path, Path("/proc/nowhere"), tmp_path / ("x" * 300)):
        assert solve(folder, [plan]) == [honest]

    def read_only(*_):
        raise PermissionError(13, "read only")

    monkeypatch.setattr(os, "open", read_only)
    assert solve(tmp_path / "locked", [plan]) == [honest]


def test_a_file_that_grew_too_large_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration_cache, "_MOST_BYTES", 500)
    for i in range(40):
        write(tmp_path, plan_of(1.0 + i), 3.0)
    assert file_of(tmp_path).stat().st_size < 700
    assert CalibrationCache(tmp_path).noises([plan_of(40.0)], RDP) == [3.0]
    file_of(tmp_path).write_bytes(b"x" * 1001)
    assert CalibrationCache(tmp_path).noises([plan_of(40.0)], RDP) == [None]


def _append(folder, first):
    for i in range(first, first + 50):
        write(folder, plan_of(1.0 + i), 1.0 + i)


def test_processes_append_at_once(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(_append, [(tmp_path, 50 * k) for k in range(4)], chunksize=1)
    held = CalibrationCache(tmp_path).noises([plan_of(1.0 + i) for i in range(200)], RDP)
    assert held == [1.0 + i for i in range(200)]
