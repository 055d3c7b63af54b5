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

from dpfl_lightning.algorithms.update_geometry import Updates, overlap
from dpfl_lightning.algorithms.update_groups import (
    as_noisy_as_most,
    as_noisy_as_seen,
    assigned,
    find_groups,
    noisy_grams,
    rotated,
)
from dpfl_lightning.papers.clustered.update_mixture import (
    paper_mixture,
    robust_mixture,
    scaled_principal_coordinates,
    switch_round,
)

ONES = np.ones(21)


def test_simulated_updates_are_gram_matrices_of_points_with_noise():
    """Seeded; 4000 draws of 4 points, P = 6: mean and standard deviation of each entry, 5 standard errors."""
    noise = np.array([1.0, 1, 2, 3])
    drawn = np.concatenate(list(noisy_grams(np.zeros((4, 1)), noise, 6, 4000)))
    scale = np.outer(noise, noise)
    mean, std = 6 * np.eye(4) * scale, np.sqrt(6 * (1 + np.eye(4))) * scale
    np.testing.assert_array_less(np.abs(drawn.mean(axis=0) - mean), 5 * std / math.sqrt(4000))
    np.testing.assert_allclose(drawn.std(axis=0), std, rtol=0.12)
    points = np.arange(8.0).reshape(4, 2)
    shifted = np.concatenate(list(noisy_grams(points, noise, 6, 4000))).mean(axis=0)
    np.testing.assert_allclose(shifted, mean + points @ points.T, atol=3)
    few = np.concatenate(list(noisy_grams(np.zeros((4, 0)), np.ones(4), 2, 2000)))
    assert np.linalg.matrix_rank(few[0]) == 2, "fewer parameters than points"
    np.testing.assert_allclose(few.mean(axis=0), 2 * np.eye(4), atol=5 * 2 / math.sqrt(2000))


def test_rotations_keep_the_weighted_mean_and_the_spectrum():
    updates = updates_of(grouped(10, 300, 0), np.geomspace(1, 3, 21))
    root = np.sqrt(updates.weights)
    spectrum = np.linalg.eigvalsh(root[:, None] * centred(updates.gram, updates.weights) * root)
    turned = next(rotated(updates))[7]
    np.testing.assert_allclose(np.linalg.eigvalsh(root[:, None] * turned * root), spectrum, atol=1e-6 * spectrum[-1])
    np.testing.assert_allclose(turned @ updates.weights, 0, atol=1e-6 * spectrum[-1])


def centred(gram, weights):
    shift = np.eye(len(gram)) - weights / weights.sum()
    return shift @ gram @ shift.T


#: noise of one client after the other, and standard deviations of Gaussian differences of clients in some directions
ONE_GROUP = {
    "equal": (ONES, ()),
    "one noisy client": (np.r_[ONES[1:], 10.0], ()),
    "unequal": (np.geomspace(1, 4, 21), ()),
    "records": (ONES, [3.0] * 10),
    "labels": (ONES, [60.0, 50.0, 40.0, 30.0, 20.0, 10.0]),
    "unequal noise and labels": (np.geomspace(1, 4, 21), [60.0, 50.0, 40.0, 30.0, 20.0, 10.0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ONE_GROUP)
def test_clients_that_differ_by_one_gaussian_are_one_group(case):
    """Nominal 1 %, seed 3, 100 draws: more than 4 % has probability 0.003 (binomial)."""
    noise, spread = ONE_GROUP[case]
    rng, alarms = np.random.default_rng(3), 0
    for seed in range(100):
        points = rng.standard_normal((21, max(1, len(spread)))) * np.array(spread or [0.0])
        gram = next(noisy_grams(points, noise, 2000, 1, [seed]))[0]
        alarms += len(find_groups(Updates(gram, noise, 2000)).members) > 1
    assert alarms <= 4


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
def test_label_skew_is_no_group(alpha):
    """Clients' means are mixtures of ten classes in shares from Dir(alpha), not Gaussian; seed 4, 40 draws each.

    Noise explains far less: a test against noise alone splits all draws at alpha 0.3 and 1.
    """
    rng, alarms = np.random.default_rng(4), 0
    for seed in range(40):
        points = rng.dirichlet([alpha] * 10, size=21) @ (200.0 * np.eye(10))
        gram = next(noisy_grams(points, ONES, CNN, 1, [seed]))[0]
        alarms += len(find_groups(Updates(gram, ONES, CNN)).members) > 1
    assert alarms <= 3


@pytest.mark.slow
def test_groups_of_a_given_number_are_not_believed_in_noise():
    for groups in (2, 4, 8):
        rng = np.random.default_rng(7)
        draws = [find_groups(updates_of(rng.standard_normal((21, 500))), groups) for _ in range(20)]
        assert max(one.probability for one in draws) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("num_params", [2000, CNN])
def test_the_number_of_groups_is_found(num_params):
    """Seeds 0..9 at 1.5 P^(1/4); of groups within groups the inner ones are often missed, but no group is divided."""
    for nested in (False, True):
        labels = []
        for seed in range(10):
            updates = updates_of(grouped(1.5 * num_params**0.25, num_params, seed, nested))
            labels.append(find_groups(updates).labels)
            assert all(len(set(labels[-1][group == TRUE])) == 1 for group in range(4))
            assert labels[-1].max() > 0
        assert nested or all(adjusted_rand_score(TRUE, one) == 1 for one in labels)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8, 10])
def test_members_of_up_to_ten_groups_are_sure(count):
    """Seeds 0 to 3. A fitted mixture in three dimensions mixes groups that Ward's cut separates."""
    true = np.arange(21) % count
    points = 3 * math.sqrt(0.5) * CNN**0.25 * np.eye(count)[true]
    for seed in range(4):
        found = find_groups(Updates(next(noisy_grams(points, ONES, CNN, 1, [seed]))[0], ONES, CNN))
        assert adjusted_rand_score(true, found.labels) == 1
        assert count == 10 or found.memberships.max(axis=1).min() > 0.95, "of ten groups some have two members"


@pytest.mark.slow
def test_one_noisy_client_hides_no_groups():
    """Seeds 0..9. One of 21 clients has ten times the noise; the groups of the others are found in all draws."""
    noise = np.r_[ONES[1:], 10.0]
    for seed in range(10):
        x = grouped(0.0, CNN, seed) * noise[:, None] + grouped(25.0, CNN, seed) - grouped(0.0, CNN, seed)
        assert adjusted_rand_score(TRUE[:-1], find_groups(updates_of(x, noise)).labels[:-1]) == 1


@pytest.mark.e2e
@pytest.mark.parametrize("far", [10.0, 100.0])
def test_a_far_client_hides_no_groups(far):
    """Seeds 0 to 2, groups at 1.5 P^(1/4), and one of the last group `far` times P^(1/4) from all others."""
    for seed in range(3):
        x = grouped(1.5 * CNN**0.25, CNN, seed)
        x[20] += far * CNN**0.25 * np.eye(1, CNN)[0]
        found = find_groups(updates_of(x))
        assert adjusted_rand_score(TRUE[:-1], found.labels[:-1]) == 1 and len(found.members) == 4
        assert found.probability > 0.75 and found.separation > 10, "of the others"
        none = grouped(0.0, CNN, seed)
        none[20] = x[20]
        assert len(find_groups(updates_of(none)).members) == 1


@pytest.mark.slow
@pytest.mark.parametrize("part", ["all kinds", "two kinds", "none"])
@pytest.mark.parametrize(("count", "groups"), [(12, 3), (20, 4), (21, 7)])
def test_a_client_between_the_groups_joins_none(count, groups, part):
    """Seeds 0 to 2, distance 100. Twelve clients are too few to be sure; of more, it had joined two groups always."""
    true = np.arange(count) * groups // count
    means = 100 * math.sqrt(0.5) * np.eye(groups, CNN)
    own = {"all kinds": means.mean(axis=0), "two kinds": means[:2].mean(axis=0), "none": 0.0}[part]
    for seed in range(3):
        x = means[true] + np.random.default_rng(seed).standard_normal((count, CNN))
        x[0] += own - means[0]
        found = find_groups(updates_of(x))
        right = adjusted_rand_score(true[1:], found.labels[1:]) == 1
        assert right if count > 12 else len(found.members) == 1 and found.probability < 0.1


@pytest.mark.slow
def test_heavy_tails_are_seldom_groups():
    """Seeds 0 to 39, Cauchy's distribution: some clients are far from the others. No p-value is proven for it."""
    alarms = 0
    for seed in range(40):
        points = 50 * np.random.default_rng([seed, 7]).standard_t(1, (21, 6))
        alarms += len(find_groups(Updates(next(noisy_grams(points, ONES, CNN, 1, [seed]))[0], ONES, CNN)).members) > 1
    assert alarms <= 4


@pytest.mark.e2e
def test_a_client_that_may_be_anywhere_does_not_lower_the_probability():
    """Seeds 0 to 2. One of 21 clients has a hundred times the noise of the others, whose groups are found."""
    noise = np.r_[ONES[1:], 100.0]
    for seed in range(3):
        x = grouped(0.0, CNN, seed) * noise[:, None] + grouped(25.0, CNN, seed) - grouped(0.0, CNN, seed)
        found = find_groups(updates_of(x, noise), distance=2 * 1.5 * CNN**0.25)
        assert adjusted_rand_score(TRUE[:-1], found.labels[:-1]) == 1 and found.probability > 0.6, "0.2 if it counted"
        assert found.memberships[20].max() < 0.9 < found.memberships[:20].max(axis=1).min()


@pytest.mark.slow
@pytest.mark.parametrize("times", [10, 30])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_quiet_clients_of_unlike_labels_are_no_group(alpha, times):
    """Seed 11, 100 draws; three of 21 clients have a tenth or less of the noise. Nominal 1 %; above 4 % has 0.3 %."""
    rng, noise, alarms = np.random.default_rng(11), np.r_[np.full(3, 1 / times), ONES[3:]], 0
    for seed in range(100):
        points = rng.dirichlet([alpha] * 10, size=21) @ (200.0 * np.eye(10))
        gram = next(noisy_grams(points, noise, CNN, 1, [seed]))[0]
        alarms += len(find_groups(Updates(gram, noise, CNN)).members) > 1
    assert alarms <= 4


def test_quiet_clients_get_noise_up_to_the_median():
    noise = np.array([0.1, 0.5, 1.0, 1.0, 5.0])
    updates = Updates(np.zeros((5, 5)), noise, 400)
    noised = as_noisy_as_most(updates)
    assert noised.noise_std.tolist() == [1.0, 1.0, 1.0, 1.0, 5.0] and as_noisy_as_most(noised) is noised
    np.testing.assert_allclose(np.diag(noised.gram), 400 * (noised.noise_std**2 - noise**2), rtol=0.4)


@pytest.mark.parametrize("announced", [0.1, 0.01])
@pytest.mark.parametrize("true", [True, False])
def test_a_client_that_announces_little_noise_changes_no_groups(announced, true):
    """Seeds 0 and 1, groups at 4 P^(1/4). One of 21 clients announces a part of its noise, or really has so little."""
    noise = np.r_[ONES[1:], announced]
    for seed in range(2):
        x = grouped(4 * CNN**0.25, CNN, seed)
        x[20] -= (1 - announced) * true * grouped(0.0, CNN, seed)[20]
        found = find_groups(updates_of(x, noise))
        assert adjusted_rand_score(TRUE, found.labels) == 1 and found.probability > 0.9
        seen = as_noisy_as_seen(updates_of(x, noise)).noise_std
        assert seen[20] == pytest.approx(announced if true else 1.0, abs=0.02)
        assert seen[:20].tolist() == [1.0] * 20, "at least the median"


def test_few_clients_and_small_groups():
    far = np.zeros((6, 50))
    far[1:, 0] = 1000.0
    x = far + np.random.default_rng(1).standard_normal((6, 50))
    assert len(find_groups(updates_of(x)).members) == 1, "one client is no group"
    given = find_groups(updates_of(x), 2)
    assert [len(one) for one in given.members] == [3, 3] and given.probability < 0.2, "nor one of two groups"
    single = find_groups(updates_of(1000 * np.eye(3, 50)), 3)
    assert len(single.members) == 3 and single.probability == 0, "groups of a given number that are all too small"
    assert [len(find_groups(updates_of(x[:count]), 4).members) for count in (1, 2, 3)] == [1, 2, 3]
    assert find_groups(updates_of(x[:1])).probability == find_groups(updates_of(x[1:4])).probability == 0, "untested"


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_one_group_of_fewer_than_six_clients_has_no_probability(count):
    """Even two groups far apart look like one so often."""
    x = np.random.default_rng(0).standard_normal((count, 50))
    x[: count // 2, 0] += 30.0
    for draw in (x, x[:, 1:]):
        found = find_groups(updates_of(draw), distance=30.0)
        assert found.probability == 0 if len(found.members) == 1 else found.probability > 0.9


def test_identical_updates_are_one_group():
    found = find_groups(updates_of(np.ones((8, 30))))
    assert len(found.members) == 1 and found.separation == 0
    assert find_groups(updates_of(np.ones((8, 30))), 3).probability <= 0.5


def test_a_probability_counts_groups_that_noise_may_hide():
    """Seed 0: one group is certain only if groups at the distance that matters would have been found."""
    updates = updates_of(np.random.default_rng(0).standard_normal((21, 2000)))
    near, far = (find_groups(updates, distance=ratio * 2000**0.25).probability for ratio in (0.5, 4.0))
    assert near < 0.6 and far > 0.95 and find_groups(updates).probability > 0.95


def test_clients_in_another_order_are_the_same_groups():
    x = grouped(25, 2000, 0)
    order = np.random.default_rng(0).permutation(21)
    plain, mixed = find_groups(updates_of(x)), find_groups(updates_of(x[order]))
    assert adjusted_rand_score(plain.labels[order], mixed.labels) == 1 and mixed.labels[0] == 0
    assert mixed.separation == pytest.approx(plain.separation)


def robust(x, num_groups=None):
    return robust_mixture(torch.from_numpy(x), [1.0] * len(x), num_groups)


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
    assert found.diagnostics["p_value"] < 1e-4


def test_noise_is_one_group_or_an_unsure_mixture():
    for seed in range(3):
        x = np.random.default_rng(100 + seed).standard_normal((21, 2000))
        found, given = robust(x), robust(x, num_groups=4)
        assert found.num_groups == 1 and found.responsibilities.eq(1).all() and found.confident
        assert given.num_groups == 4 and not given.confident
        for own in (found, given):
            assert own.overlap == 1 and switch_round(own.overlap, 200) == 1


def test_memberships_are_soft_between_groups_that_touch():
    """Seed 0: three groups in a row, noise of standard deviation 1; beside the law they were drawn from."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 2))
    x[:, 0] += np.repeat([0.0, 4.0, 8.0], 40)
    groups = [np.arange(40), np.arange(40, 80), np.arange(80, 120)]
    moved, found = assigned(updates_of(x), groups)
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    middle = norm(4).pdf(x[:, 0]) / sum(norm(centre).pdf(x[:, 0]) for centre in (0, 4, 8))
    assert np.abs(found[:, 1] - middle).mean() < 0.05
    assert [one.tolist() for one in moved] == [np.flatnonzero(found.argmax(axis=1) == k).tolist() for k in range(3)]
    assert sum(len(np.setdiff1d(one, other)) for one, other in zip(moved, groups, strict=True)) < 12
    far = np.diag([0.0, 0, 0, 0, 100]) + 0.1 * rng.standard_normal((5, 5))
    apart = [np.arange(3), np.arange(3, 5)]  # client 3 is of the first group
    same, sure = assigned(updates_of(far, 0.1), apart)
    assert [one.tolist() for one in same] == [one.tolist() for one in apart] and set(sure.ravel()) == {0.0, 1.0}, (
        "nobody moves if a group would be too small"
    )


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_or_identical_updates(count):
    same = torch.ones(count, 7)
    for num_groups in (None, 4):
        for found in (
            robust_mixture(same, [1.0] * count, num_groups),
            paper_mixture(same, num_groups),
        ):
            assert found.responsibilities.isfinite().all() and found.embedding.isfinite().all()
            torch.testing.assert_close(found.responsibilities.sum(dim=1), torch.ones(count, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_updates_of_any_type(dtype):
    x = torch.from_numpy(grouped(25, 2000, 1)).to(dtype)
    assert score(robust_mixture(x, [1.0] * 21)) == score(paper_mixture(x, 4)) == 1


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
