"""Number of groups and who is in them: found where they are, and not found in noise or in sampled records."""

from __future__ import annotations

import functools
import math
import time

import numpy as np
import pytest
from grouped_updates import CNN, TRUE, grouped, updates_of
from sklearn.metrics import adjusted_rand_score

from dpfl_lightning.algorithms import null_separation
from dpfl_lightning.algorithms.null_separation import any_cut, given_cut, noise_alone, two_way
from dpfl_lightning.algorithms.update_groups import GroupOptions, find_groups
from dpfl_lightning.errors import UserError

RULES = ("split", "mss")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_params", "two_of_21", "two_of_6", "family"),
    [(2000, 4.7, 5.7, 4.95), (CNN, 9.2, 10.9, 9.3), (11_181_642, 41, 48, 40)],
)
def test_thresholds_of_pure_noise(num_params, two_of_21, two_of_6, family, monkeypatch):
    """Known ones are 95 % quantiles, of other and fewer draws. 1,000 draws: 2 % of error. Seeds are fixed."""
    monkeypatch.setattr(null_separation, "FALSE_ALARMS", 0.05)
    for name in ("_two_way", "_any_cut"):  # and nothing is remembered of the other quantile
        monkeypatch.setattr(null_separation, name, functools.cache(getattr(null_separation, name).__wrapped__))
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


#: noise of one client after the other, what differs between their records, options, and the largest share of alarms
NOISE = {
    "equal": (np.ones(21), 0.0, {}, 0.03),
    "unequal": (np.geomspace(1, 4, 21), 0.0, {}, 0.03),
    "records": (np.ones(21), 9.6, {}, 0.03),
    "many records": (np.ones(21), 69.0, {}, 0.09),  # there the floor alone decides: it is made for 5 %
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", NOISE)
def test_noise_is_no_group(rule, case):
    """Nominal 1 %, seed 3, 200 draws: more than 3 % has probability 0.004 at 1 % (binomial), 0.03 at 1.5 %.

    With `sampling`, clients of one group differ by their records in ten directions, by so much in all: sqrt(records) /
    noise multiplier is 9.6 at 2,285 records and noise 5, and 69 at 8,000 and 1.3.
    """
    noise, sampling, options, most = NOISE[case]
    rng = np.random.default_rng(3)

    def draw():
        x = rng.standard_normal((21, 2000)) * noise[:, None]
        x[:, :10] += rng.standard_normal((21, 10)) * sampling / math.sqrt(10)
        return updates_of(x, noise, sampling)

    assert false_alarms(draw, 200, choose=rule, **options) <= most
    if case == "many records":
        assert false_alarms(draw, 30, data_floor=0.0) > 0.9, "without the floor they look like groups"


@pytest.mark.slow
def test_noise_of_the_papers_net_is_no_group_and_a_given_number_is_not_believed():
    """By Gram matrices: of 60 draws more than 5 % has probability 0.003 at 1 %; of 200, as above."""
    for rule in RULES:
        draws = noise_alone(CNN, [1.0] * 21, draws=60, seed=[5])
        assert false_alarms(lambda draws=draws: next(draws), 60, choose=rule) <= 0.05
    for groups in (2, 4, 8):
        draws = noise_alone(500, [1.0] * 21, draws=200, seed=[7])
        assert np.mean([find_groups(one, GroupOptions(groups)).confident for one in draws]) <= 0.03


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
    solved = null_separation._two_way.cache_info().currsize
    two_way(777, [1.0004, *[0.9998] * 8])
    assert null_separation._two_way.cache_info().currsize == solved


def test_mistakes_are_one_sentence():
    for wrong, words in (
        ({"num_groups": 0}, "`num_clusters` must be `auto` or at least 1, got 0"),
        ({"choose": "slpit"}, "`choose_m` must be one of split, mss, got 'slpit'. Did you mean `split`"),
        ({"min_size": 0}, "`min_cluster_size` must be at least 1"),
        ({"data_floor": -1.0}, "`data_floor` must be at least 0"),
    ):
        with pytest.raises(UserError, match=words):
            GroupOptions(**wrong)
