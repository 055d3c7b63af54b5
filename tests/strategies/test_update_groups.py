"""Groups and memberships: found where they are, and not found in noise or in sampled records."""

import math

import numpy as np
import pytest
import torch
from grouped_updates import CNN, TRUE, grouped, updates_of
from scipy.stats import norm
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from dpfl_lightning.algorithms.update_geometry import overlap
from dpfl_lightning.algorithms.update_groups import GroupOptions, find_groups, given_cut, noise_alone, two_way
from dpfl_lightning.algorithms.update_mixture import (
    memberships,
    paper_mixture,
    robust_mixture,
    scaled_principal_coordinates,
    switch_round,
)
from dpfl_lightning.errors import UserError

RULES = ("split", "mss")


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


#: noise of one client after the other, what differs between their records, and the largest share of alarms
NOISE = {
    "equal": (np.ones(21), 0.0, 0.03),
    "unequal": (np.geomspace(1, 4, 21), 0.0, 0.03),
    "records": (np.ones(21), 9.6, 0.03),
    "many records": (np.ones(21), 69.0, 0.09),  # there the floor alone decides: it is made for 5 %
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", NOISE)
def test_noise_is_no_group(rule, case):
    """Nominal 1 %, seed 3, 200 draws: more than 3 % has probability 0.004 at 1 % (binomial), 0.03 at 1.5 %.

    With `sampling`, clients of one group differ by their records in ten directions, by so much in all: sqrt(records) /
    noise multiplier is 9.6 at 2,285 records and noise 5, and 69 at 8,000 and 1.3.
    """
    noise, sampling, most = NOISE[case]
    rng = np.random.default_rng(3)

    def draw():
        x = rng.standard_normal((21, 2000)) * noise[:, None]
        x[:, :10] += rng.standard_normal((21, 10)) * sampling / math.sqrt(10)
        return updates_of(x, noise, sampling)

    assert false_alarms(draw, 200, choose=rule) <= most
    if case == "many records":
        assert false_alarms(draw, 30, data_floor=0.0) > 0.9, "without the floor they look like groups"


@pytest.mark.slow
def test_noise_of_the_papers_net_is_no_group_and_a_given_number_is_not_believed():
    """By Gram matrices: of 60 draws more than 5 % has probability 0.003 at 1 %; of 200, as above."""
    for rule in RULES:
        draws = noise_alone(CNN, [1.0] * 21, draws=60, seed=[5])
        assert false_alarms(lambda draws=draws: next(draws), 60, choose=rule) <= 0.05
    for groups in (2, 4, 8):
        rng = np.random.default_rng(7)
        draws = (updates_of(rng.standard_normal((21, 500))) for _ in range(200))
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


@pytest.mark.e2e
def test_the_curve_and_the_threshold_are_reported():
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


def test_mistakes_are_one_sentence():
    for wrong, words in (
        ({"num_groups": 0}, "`num_clusters` must be `auto` or at least 1, got 0"),
        ({"choose": "slpit"}, "`choose_m` must be one of split, mss, got 'slpit'. Did you mean `split`"),
        ({"min_size": 0}, "`min_cluster_size` must be at least 1"),
        ({"data_floor": -1.0}, "`data_floor` must be at least 0"),
    ):
        with pytest.raises(UserError, match=words):
            GroupOptions(**wrong)


GROUPS = [np.flatnonzero(group == TRUE) for group in range(4)]


def robust(x, **options):
    return robust_mixture(torch.from_numpy(x), [1.0] * len(x), [0.0] * len(x), GroupOptions(**options))


def score(mixture) -> float:
    return adjusted_rand_score(TRUE, mixture.responsibilities.argmax(dim=1))


# ---- the sound mixture


@pytest.mark.parametrize("num_groups", [None, 4])
def test_groups_far_apart_have_sure_members(num_groups):
    found = robust(grouped(25, CNN, 0), num_groups=num_groups)
    assert score(found) == 1 and found.num_groups == 4 and found.confident
    assert found.separation == pytest.approx(25, rel=0.05) and found.overlap < 1e-100
    torch.testing.assert_close(found.responsibilities, torch.eye(4, dtype=torch.float64)[torch.from_numpy(TRUE)])
    assert found.embedding.shape == (21, 2)
    assert found.diagnostics["separation_of_4"] == pytest.approx(found.separation)
    assert 7 < found.diagnostics["separation_threshold"] < 14
    biased = math.sqrt(25**2 + CNN / 4 * (1 / 6 + 1 / 6))
    assert found.diagnostics["separation_with_noise"] == pytest.approx(biased, rel=0.03)


def test_noise_is_one_group_or_an_unsure_mixture():
    for seed in range(5):
        x = np.random.default_rng(100 + seed).standard_normal((21, 2000))
        found, given = robust(x), robust(x, num_groups=4)
        assert found.num_groups == 1 and found.responsibilities.eq(1).all()
        assert given.num_groups == 4
        for own in (found, given):
            assert not own.confident and own.overlap == 1 and switch_round(own.overlap, 200) == 1


def test_memberships_are_soft_between_groups_that_touch():
    """Seed 0: three groups in a row, noise of standard deviation 1; beside the law they were drawn from."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 2))
    x[:, 0] += np.repeat([0.0, 3.0, 6.0], 40)
    found = memberships(updates_of(x), [np.arange(40), np.arange(40, 80), np.arange(80, 120)])
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    assert 10 < (found.max(axis=1) < 0.9).sum() < 80
    middle = norm(3).pdf(x[:, 0]) / sum(norm(centre).pdf(x[:, 0]) for centre in (0, 3, 6))
    assert np.abs(found[:, 1] - middle).mean() < 0.1


def test_where_em_fails_the_cut_decides(monkeypatch):
    x = grouped(25, 2000, 0)
    expected = np.eye(4)[TRUE]
    monkeypatch.setattr(GaussianMixture, "predict_proba", lambda self, points: np.eye(4)[[1] * 21])
    np.testing.assert_array_equal(memberships(updates_of(x), GROUPS), expected, "a component without a client")
    monkeypatch.undo()

    def broken(self, points):
        raise ValueError("a component collapsed")

    monkeypatch.setattr(GaussianMixture, "fit", broken)
    np.testing.assert_array_equal(memberships(updates_of(x), GROUPS), expected)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_or_identical_updates(count):
    same = torch.ones(count, 7)
    for num_groups in (None, 4):
        for found in (
            robust_mixture(same, [1.0] * count, [0.0] * count, GroupOptions(num_groups)),
            paper_mixture(same, num_groups),
        ):
            assert found.responsibilities.isfinite().all() and found.embedding.isfinite().all()
            torch.testing.assert_close(found.responsibilities.sum(dim=1), torch.ones(count, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_updates_of_any_type(dtype):
    x = torch.from_numpy(grouped(25, 2000, 1)).to(dtype)
    assert score(robust_mixture(x, [1.0] * 21, [0.0] * 21)) == score(paper_mixture(x, 4)) == 1


# ---- rounds


@pytest.mark.parametrize(
    ("separation", "mpo", "last"), [(0.0, 1.0, 1), (1.24, 0.215, 78), (5.0, 5.7e-7, 99), (6.0, 2e-9, 100), (99, 0, 100)]
)
def test_the_round_in_which_losses_take_over(separation, mpo, last):
    assert overlap(separation) == pytest.approx(mpo, rel=0.02, abs=1e-9)
    assert switch_round(overlap(separation), 200) == last
    assert [switch_round(overlap(separation), rounds) for rounds in (1, 2)] == [1, 1]


# ---- the papers' mixture


def test_the_papers_pipeline_is_scikit_learns():
    for seed in range(5):
        x = grouped(8.0, 300, seed) * np.random.default_rng(seed).uniform(0.1, 9, 300) + 5.0
        x[:, 7] = 1.5  # a parameter that nobody moves
        theirs = PCA(21).fit(StandardScaler().fit_transform(x)).transform(x)[:, :2]
        theirs = MinMaxScaler().fit_transform(theirs)
        ours = scaled_principal_coordinates(torch.from_numpy(x))
        for axis in (0, 1):
            turned = 1 - ours[:, axis]
            error = min(np.abs(one - theirs[:, axis]).max() for one in (ours[:, axis], turned))
            assert error < 1e-8
        mixture = GaussianMixture(
            4, covariance_type="spherical", init_params="k-means++", tol=1e-6, random_state=3, weights_init=[0.25] * 4
        ).fit(ours)
        mixture.weights_ = np.full(4, 0.25)
        gaps = [
            np.linalg.norm(mixture.means_[a] - mixture.means_[b]) / (2 * np.sqrt(max(mixture.covariances_[[a, b]])))
            for a in range(4)
            for b in range(a)
        ]
        found = paper_mixture(torch.from_numpy(x), 4, seed=3)
        assert found.separation == pytest.approx(min(gaps)) and found.overlap == pytest.approx(2 * norm.sf(min(gaps)))
        np.testing.assert_allclose(found.responsibilities, mixture.predict_proba(ours), atol=1e-9)
        assert found.confident, "it is never unsure"
