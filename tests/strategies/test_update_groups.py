"""Number of groups and who is in them: found where they are, and not found in noise or in sampled records."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from grouped_updates import CNN, TRUE, grouped, updates_of
from sklearn.metrics import adjusted_rand_score

from dpfl_lightning.algorithms import update_groups
from dpfl_lightning.algorithms.update_groups import GroupOptions, any_cut, find_groups, given_cut, noise_alone, two_way
from dpfl_lightning.errors import UserError

RULES = ("split", "mss")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_params", "two_of_21", "two_of_6", "family"),
    [(2000, 4.7, 5.7, 4.95), (CNN, 9.2, 10.9, 9.3), (11_181_642, 41, 48, 40)],
)
def test_thresholds_of_pure_noise(num_params, two_of_21, two_of_6, family, monkeypatch, request):
    """Known ones are 95 % quantiles, of other and fewer draws. 1,000 draws: 2 % of error. Seeds are fixed."""
    monkeypatch.setattr(update_groups, "FALSE_ALARMS", 0.05)
    for threshold in (two_way, any_cut):  # nothing is remembered of the other quantile
        threshold.__wrapped__.cache_clear()
        request.addfinalizer(threshold.__wrapped__.cache_clear)
    begun = time.perf_counter()
    found = [two_way(num_params, [1.0] * 21), two_way(num_params, [1.0] * 6), any_cut(num_params, [1.0] * 21)]
    assert found == pytest.approx([two_of_21, two_of_6, family], rel=0.08)
    again = [two_way(num_params, [1.0] * 21), two_way(num_params, [1.0] * 6), any_cut(num_params, [1.0] * 21)]
    assert again == found
    assert time.perf_counter() - begun < 60, "a few seconds on an idle core, whatever P is"


def test_bartletts_draws_are_gram_matrices_of_normals():
    """Seeded; 4000 draws of 4 points, P = 6: mean and standard deviation of each entry, 5 standard errors."""
    drawn = np.stack([own.gram for own in noise_alone(6, [1.0, 1.0, 2.0, 3.0], draws=4000)])
    scale = np.outer([1, 1, 2, 3], [1, 1, 2, 3])
    mean, std = 6 * np.eye(4) * scale, np.sqrt(6 * (1 + np.eye(4))) * scale
    np.testing.assert_array_less(np.abs(drawn.mean(axis=0) - mean), 5 * std / math.sqrt(4000))
    np.testing.assert_allclose(drawn.std(axis=0), std, rtol=0.12)
    few = np.stack([own.gram for own in noise_alone(2, [1.0] * 4, draws=2000)])
    assert np.linalg.matrix_rank(few[0]) == 2, "fewer parameters than points"
    np.testing.assert_allclose(few.mean(axis=0), 2 * np.eye(4), atol=5 * 2 / math.sqrt(2000))


def false_alarms(draw, draws: int, **options) -> float:
    return np.mean([len(find_groups(draw(), GroupOptions(**options)).members) > 1 for _ in range(draws)])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampling", [0.0, 9.6, 69.0])
def test_noise_is_no_group(rule, sampling):
    """Nominal 1 %, seed 3, 200 draws: more than 3 % has probability 0.004 at 1 % (binomial), 0.03 at 1.5 %.

    With `sampling`, clients of one group differ by their records in ten directions, by so much in all: sqrt(records) /
    noise multiplier is 9.6 at 2,285 records and noise 5, and 69 at 8,000 and 1.3, where the floor alone decides: it is
    made for 5 %.
    """
    rng = np.random.default_rng(3)

    def draw():
        x = rng.standard_normal((21, 2000))
        x[:, :10] += rng.standard_normal((21, 10)) * sampling / math.sqrt(10)
        return updates_of(x, sampling=sampling)

    assert false_alarms(draw, 200, choose=rule) <= (0.09 if sampling > 50 else 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampling", [0.0, 9.6, 69.0])
def test_noise_of_the_papers_net_is_no_group_in_the_full_study(rule, sampling):
    """As above at P = 28,938, by the updates themselves: 200 draws, seed 3."""
    rng = np.random.default_rng(3)

    def draw():
        x = rng.standard_normal((21, CNN))
        x[:, :10] += rng.standard_normal((21, 10)) * sampling / math.sqrt(10)
        return updates_of(x, sampling=sampling)

    assert false_alarms(draw, 200, choose=rule) <= (0.09 if sampling > 50 else 0.03)


@pytest.mark.slow
def test_sampled_records_look_like_groups_without_the_floor():
    """Seed 3, 30 draws."""
    rng = np.random.default_rng(3)

    def draw():
        x = rng.standard_normal((21, 2000))
        x[:, :10] += rng.standard_normal((21, 10)) * 69 / math.sqrt(10)
        return updates_of(x, sampling=69)

    assert false_alarms(draw, 30, data_floor=0.0) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_noise_of_the_papers_net_is_no_group(rule):
    """As above at P = 28,938, 60 draws, by Gram matrices: more than 5 % has probability 0.003 at 1 %."""
    draws = noise_alone(CNN, [1.0] * 21, draws=60, seed=[5])
    assert false_alarms(lambda: next(draws), 60, choose=rule) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_unequal_noise_is_no_group(rule):
    """Noise of the clients from 1 to 4 times the least. Seed 1, 200 draws, as above."""
    noise = np.geomspace(1, 4, 21)
    rng = np.random.default_rng(1)
    alarm = false_alarms(lambda: updates_of(rng.standard_normal((21, 1000)) * noise[:, None], noise), 200, choose=rule)
    assert alarm <= 0.03


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_a_given_number_is_not_believed_in_noise(groups):
    """Seed 7, 200 draws, as above."""
    rng = np.random.default_rng(7)
    confident = [
        find_groups(updates_of(rng.standard_normal((21, 500))), GroupOptions(groups)).confident for _ in range(200)
    ]
    assert np.mean(confident) <= 0.03


@pytest.mark.slow
@pytest.mark.parametrize("num_params", [2000, CNN])
def test_groups_that_are_far_enough_are_found(num_params):
    """Seeds 0..9, at 1.5 P^(1/4) noise standard deviations; nothing at 0."""
    scores, none, confident = [], [], []
    for seed in range(10):
        found = find_groups(updates_of(grouped(1.5 * num_params**0.25, num_params, seed)), GroupOptions(4))
        scores.append(adjusted_rand_score(TRUE, found.labels))
        confident.append(found.confident)
        assert found.separation == pytest.approx(1.5 * num_params**0.25, rel=0.15)
        nothing = find_groups(updates_of(grouped(0.0, num_params, seed)), GroupOptions(4))
        none.append(adjusted_rand_score(TRUE, nothing.labels))
    assert np.mean(scores) >= 0.99 and all(confident)
    assert abs(np.mean(none)) < 0.1


def test_recovery_grows_with_separation():
    """Mean score over seeds 0..5 at P = 28,938, beside known values of other draws (standard error up to 0.08)."""
    known = {6: 0.03, 10: 0.55, 12: 0.75, 15: 0.98, 25: 1.0}
    for separation, score in known.items():
        found = [find_groups(updates_of(grouped(separation, CNN, seed)), GroupOptions(4)) for seed in range(6)]
        assert np.mean([adjusted_rand_score(TRUE, one.labels) for one in found]) == pytest.approx(score, abs=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("num_params", [2000, CNN])
def test_the_number_of_groups_is_found(num_params):
    """Seeds 0..9 at 1.5 P^(1/4): `mss` sees the coarse level only."""
    separation = 1.5 * num_params**0.25
    numbers = {(rule, nested): [] for rule in RULES for nested in (False, True)}
    for seed in range(10):
        for nested in (False, True):
            updates = updates_of(grouped(separation, num_params, seed, nested))
            for rule in RULES:
                found = find_groups(updates, GroupOptions(choose=rule))
                numbers[rule, nested].append(len(found.members))
                if rule == "split":
                    assert adjusted_rand_score(TRUE, found.labels) >= 0.95
    assert np.mean(np.array(numbers["mss", False]) == 4) >= 0.9
    assert numbers["mss", True] == [2] * 10
    for nested in (False, True):
        assert numbers["split", nested] == [4] * 10


@pytest.mark.slow
def test_groups_that_are_there_are_parted_in_1_percent_of_runs():
    """All cuts of a run together; seeds 0..199, 3 % as above."""
    found = [find_groups(updates_of(grouped(60, 500, seed))) for seed in range(200)]
    assert min(len(own.members) for own in found) == 4
    assert np.mean([len(own.members) > 4 for own in found]) <= 0.03


@pytest.mark.slow
def test_few_clients_and_small_groups():
    far = np.zeros((5, 50))
    far[1:, 0] = 1000.0
    x = far + np.random.default_rng(1).standard_normal((5, 50))
    for rule in RULES:
        assert len(find_groups(updates_of(x), GroupOptions(choose=rule)).members) == 1, "one client is no group"
        alone = find_groups(updates_of(x), GroupOptions(choose=rule, min_size=1))
        assert [one.tolist() for one in alone.members] == [[0], [1, 2, 3, 4]] and alone.confident
    given = find_groups(updates_of(x), GroupOptions(2))
    assert len(given.members) == 2 and not given.confident
    assert [len(find_groups(updates_of(x[:count]), GroupOptions(4)).members) for count in (1, 2, 3)] == [1, 2, 3]
    assert not find_groups(updates_of(x[:1])).confident


def test_identical_updates_are_one_group():
    found = find_groups(updates_of(np.ones((8, 30))))
    assert len(found.members) == 1 and found.separation == 0 and not found.confident
    assert not find_groups(updates_of(np.ones((8, 30))), GroupOptions(3)).confident


def test_without_noise_any_difference_counts_but_what_records_explain():
    x = np.zeros((8, 30))
    x[4:] = 1.0
    bare = find_groups(updates_of(x, noise=0.0))
    assert len(bare.members) == 2 and bare.separation == math.inf and bare.threshold == 0
    assert len(find_groups(updates_of(x, noise=0.0, sampling=1e9)).members) == 1


def test_the_curve_and_the_threshold_are_told():
    found = find_groups(updates_of(grouped(30, 2000, 0)))
    assert list(found.curve) == list(range(2, 11)) and max(found.curve, key=found.curve.get) == 4
    floored = find_groups(updates_of(grouped(30, 2000, 0), sampling=20.0), GroupOptions(data_floor=0.5))
    assert floored.threshold == pytest.approx(math.hypot(found.threshold, 10.0))
    assert found.threshold == two_way(2000, [1.0] * 21)
    assert find_groups(updates_of(grouped(30, 2000, 0)), GroupOptions(4)).threshold == given_cut(2000, [1.0] * 21, 4)


def test_clients_in_another_order_are_the_same_groups():
    x = grouped(25, 2000, 0)
    order = np.random.default_rng(0).permutation(21)
    plain, mixed = find_groups(updates_of(x)), find_groups(updates_of(x[order]))
    assert adjusted_rand_score(plain.labels[order], mixed.labels) == 1 and mixed.labels[0] == 0
    assert mixed.separation == pytest.approx(plain.separation)


def test_nearly_equal_noise_shares_its_thresholds():
    two_way(777, [1.0] * 9)
    solved = two_way.__wrapped__.cache_info().currsize
    two_way(777, [1.0004, *[0.9998] * 8])
    assert two_way.__wrapped__.cache_info().currsize == solved


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_groups": 0}, "`num_clusters` must be `auto` or at least 1, got 0"),
        ({"choose": "slpit"}, "`choose_m` must be one of split, mss, got 'slpit'. Did you mean `split`"),
        ({"min_size": 0}, "`min_cluster_size` must be at least 1"),
        ({"data_floor": -1.0}, "`data_floor` must be at least 0"),
    ],
)
def test_mistakes_are_one_sentence(wrong, words):
    with pytest.raises(UserError, match=words):
        GroupOptions(**wrong)
