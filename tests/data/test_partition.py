"""Properties of every partition over random labels, and the paper's numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning.data.partition import PARTITIONS, matched_shares, partition
from dpfl_lightning.errors import UserError

COVERING = {"iid": {}, "stratified": {}, "dirichlet": {"min_records": 1, "alpha": 1.0}, "shards": {"max_classes": 3}}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def balanced(records: int, classes: int = 10) -> np.ndarray:
    return np.arange(records) % classes


def class_counts(labels: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


SOME = [0, 1, 2, 3, 4] * 9  # so many records of each class at least
cases = given(
    labels=st.lists(st.integers(0, 4), min_size=150, max_size=400).map(lambda drawn: np.array([*SOME, *drawn])),
    num_clients=st.integers(2, 8),
    seed=st.integers(0, 2**32),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", COVERING)
@settings(max_examples=40, deadline=None)
@cases
def test_parts_are_disjoint_cover_and_repeat(name, labels, num_clients, seed):
    parts = partition(name, labels, num_clients, rng(seed), **COVERING[name])
    assert len(parts) == num_clients and min(map(len, parts)) >= 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    again = partition(name, labels, num_clients, rng(seed), **COVERING[name])
    assert all(np.array_equal(one, two) for one, two in zip(parts, again, strict=True))
    if name == "stratified":
        counts = class_counts(labels, parts)
        assert np.ptp(counts, axis=0).max() <= 1 and np.ptp(counts.sum(axis=1)) <= 1


@settings(max_examples=20, deadline=None)
@cases
def test_sizes_are_kept(labels, num_clients, seed):
    sizes = list(range(1, num_clients + 1))
    parts = partition("sizes", labels, num_clients, rng(seed), sizes=sizes)
    assert [len(part) for part in parts] == sizes
    assert len(np.unique(np.concatenate(parts))) == sum(sizes)
    for name in ("iid", "stratified", "dirichlet"):  # thinned first
        parts = partition(name, labels, num_clients, rng(seed), records_per_client=20, **COVERING[name])
        rows = np.concatenate(parts)
        assert len(rows) == len(np.unique(rows)) == 20 * num_clients and rows.max() < len(labels)
        assert name == "dirichlet" or {len(part) for part in parts} == {20}


@settings(max_examples=40, deadline=None)
@given(num_clients=st.integers(4, 40), max_classes=st.integers(3, 10), seed=st.integers(0, 2**32))
def test_shards_keep_the_class_bound(num_clients, max_classes, seed):
    labels = rng(seed).permutation(np.repeat(np.arange(10), np.arange(60, 80, 2)))  # unequal classes
    counts = class_counts(labels, partition("shards", labels, num_clients, rng(seed), max_classes=max_classes))
    assert (counts > 0).sum(axis=1).max() <= max_classes
    assert counts.sum() == len(labels)


def test_iid_is_random_in_order_and_in_classes():
    labels = np.sort(balanced(10_000))
    parts = partition("iid", labels, 10, rng())
    counts = class_counts(labels, parts)
    assert {len(part) for part in parts} == {1000} and len(np.unique(counts)) > 5
    assert not np.array_equal(parts[0], np.sort(parts[0]))


def test_dirichlet_is_redrawn_until_every_client_has_enough():
    labels = balanced(6_000)
    sizes = [len(part) for part in partition("dirichlet", labels, 20, rng(), alpha=0.3, min_records=128)]
    assert min(sizes) >= 128 and sum(sizes) == 6_000
    loose = [len(part) for part in partition("dirichlet", labels, 20, rng(), alpha=0.3, min_records=1)]
    assert min(loose) < 128  # the floor did something


def test_dirichlet_follows_alpha():
    labels = balanced(20_000)
    spread = {
        alpha: class_counts(labels, partition("dirichlet", labels, 10, rng(), alpha=alpha, min_records=1)).std()
        for alpha in (0.1, 1.0, 100.0)
    }
    assert spread[0.1] > 1.5 * spread[1.0] > 1.5 * spread[100.0] > 0
    # one cell of Dir(1, ..., 1) over ten clients has mean 0.1 and standard deviation 0.0905; 100 cells
    assert spread[1.0] / 2000 == pytest.approx(0.0905, rel=0.25)


def test_overlapping_has_more_clients_than_records_allow():
    parts = partition("overlapping", balanced(50), 200, rng(), records_per_client=30)
    assert all(len(np.unique(part)) == len(part) == 30 for part in parts)
    assert len({tuple(part) for part in parts}) == 200


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("idd", {}, r"`data.partition.name` must be one of iid, .* got 'idd'. Did you mean `iid`\?"),
        ("dirichlet", {"alpha": 0}, "`data.partition.alpha` must be a number > 0 and finite, got 0"),
        ("dirichlet", {"min_records": 26}, "`data.partition.min_records` must be from 1 to 25, the mean"),
        ("dirichlet", {"min_records": 25, "max_draws": 5}, "none of 5 draws at alpha 1.0 .* Lower it, or raise alpha"),
        ("iid", {"records_per_client": 26}, "a whole number from 1 to 25.*`overlapping` lets clients share records"),
        ("shards", {"max_classes": 2}, "must give every one of 10 classes a shard among 4 clients, got 2"),
        ("shards", {"max_classes": 30}, "must leave a record for each of 120 shards"),
        ("sizes", {"sizes": 5}, "must be a list of whole numbers, got 5"),
        ("sizes", {"sizes": [1, 2, 0, 4]}, "must be at least 1 each, got 0"),
        ("sizes", {"sizes": [99, 1, 1, 1]}, "must sum to at most the 100 records, got 102"),
        ("overlapping", {}, "`data.partition.records_per_client` must be given for overlapping"),
    ],
)
def test_wrong_options_are_named(name, options, message):
    with pytest.raises(UserError, match=message):
        partition(name, balanced(100), 4, rng(), **options)


def test_more_clients_than_records_are_refused():
    assert set(PARTITIONS) == {*COVERING, "sizes", "overlapping"}, "all are tested"
    for name in (*COVERING, "sizes"):
        for num_clients in (0, 11):
            with pytest.raises(UserError, match="`num_clients` must be from 1 to the number of records, 10, got"):
                partition(name, balanced(10), num_clients, rng())


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.lists(st.integers(0, 200), min_size=4, max_size=4), min_size=1, max_size=12).map(np.array),
    test=st.lists(st.integers(0, 3), min_size=0, max_size=120).map(lambda labels: np.array(labels, dtype=np.int64)),
    seed=st.integers(0, 2**32),
)
def test_matched_shares_are_disjoint_and_in_proportion(counts, test, seed):
    shares = matched_shares(test, counts, rng(seed))
    rows = np.concatenate(shares)
    assert len(shares) == len(counts) and len(np.unique(rows)) == len(rows)
    got, held, available = class_counts(np.append(test, 3), shares), counts.sum(axis=0), np.bincount(test, minlength=4)
    both = (held > 0) & (available > 0)
    if both.any():
        rate = (available[both] / held[both]).min()
        assert np.abs(got - rate * counts)[:, both].max() < 1 and got[:, ~both].sum() == 0


def test_matched_shares_favour_no_client():
    """Two hundred clients share a hundred test records of two classes: the clients without any depend on the seed."""
    counts = np.full((200, 2), 3)
    drawn = [[len(share) for share in matched_shares(balanced(100, 2), counts, rng(seed))] for seed in range(40)]
    assert {sum(lengths) for lengths in drawn} == {100}
    assert min(sum(column) for column in zip(*drawn, strict=True)) > 0
