"""Noise streams: keyed ones that never collide, and cryptographic ones of the right distributions."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.privacy.noise import SecureGenerator, Streams, stream_words
from dpfl_lightning.privacy.sampling import draw_steps, poisson_rows

KEY = 0x00112233445566778899AABBCCDDEEFF


def pools(key: int, words: np.ndarray) -> np.ndarray:
    """What `SeedSequence(key, spawn_key=row).pool` is for every row of words `[n, w]`: uint32 `[n, 4]`.

    numpy's own algorithm on many rows at once (a million of its objects take half a minute). A generator's state
    follows from the pool one to one.
    """
    key_words = [key >> 32 * i & 0xFFFFFFFF for i in range(4)]
    entropy = [np.full(len(words), word, np.uint32) for word in key_words] + list(words.T.astype(np.uint32))
    constant = 0x43B0D7E5

    def hashed(value: np.ndarray) -> np.ndarray:
        nonlocal constant
        value = value ^ np.uint32(constant)
        constant = constant * 0x931E8875 & 0xFFFFFFFF
        value = value * np.uint32(constant)
        return value ^ value >> np.uint32(16)

    def mixed(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        value = x * np.uint32(0xCA01F9DD) - y * np.uint32(0x4973F715)
        return value ^ value >> np.uint32(16)

    pool = [hashed(word) for word in entropy[:4]]
    for source, target in itertools.permutations(range(4), 2):
        pool[target] = mixed(pool[target], hashed(pool[source]))
    for word, target in itertools.product(entropy[4:], range(4)):
        pool[target] = mixed(pool[target], hashed(word))
    return np.stack(pool, axis=1)


def test_a_million_streams_have_a_million_states():
    purposes, numbers = ("noise", "sampling", "query select", "query loss"), np.indices((250, 500, 2)).reshape(3, -1).T
    named = [np.array(stream_words(purpose)) for purpose in purposes]
    low = np.zeros((len(numbers), 6), np.int64)
    low[:, 1::2] = numbers  # the upper half of a small number's two words is 0
    words = np.concatenate([np.hstack([np.tile(name, (len(low), 1)), low]) for name in named])
    assert len(words) == 10**6
    found = pools(KEY, words)
    for row in random.Random(0).sample(range(10**6), 1000):  # these are the streams that clients draw from
        purpose, own = purposes[row // len(numbers)], [int(one) for one in numbers[row % len(numbers)]]
        generator = Streams(KEY).generator(purpose, *own)
        assert np.array_equal(generator.bit_generator.seed_seq.pool, found[row])
    assert len(np.unique(found.view([("", np.uint32)] * 4))) == 10**6


@given(*[st.tuples(st.text(max_size=3), *[st.integers(0, 2**64 - 1)] * 3)] * 2)
def test_different_streams_have_different_words(one, other):
    assert (stream_words(*one) == stream_words(*other)) == (one == other)


@given(st.text(), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_words_can_be_read_back(purpose, round, client):
    words = stream_words(purpose, round, client)
    assert all(0 <= word < 2**32 for word in words) and words[:2] == stream_words(purpose)
    assert [high << 32 | low for high, low in zip(words[2::2], words[3::2], strict=True)] == [round, client]


def test_a_stream_repeats_under_its_key_and_no_other():
    def first(key, *name):
        return Streams(key).generator(*name).integers(2**63)

    assert first(5, "noise", 1, 2, 0) == first(5, "noise", 1, 2, 0) != first(6, "noise", 1, 2, 0)


# -- secure mode

#: of the tests with fresh randomness, which no seed fixes, each
FALSE_ALARM = 1e-7


def from_seed(seed: int) -> SecureGenerator:
    return SecureGenerator(np.random.default_rng(seed).bytes)


def test_uniform_numbers_never_reach_0_or_1():
    lowest, highest = SecureGenerator(lambda count: b"\0" * count), SecureGenerator(lambda count: b"\xff" * count)
    assert lowest._uniform(1)[0] == 2.0**-53 and highest._uniform(1)[0] == 1 - 2.0**-53
    extremes = [one.standard_normal(1)[0] for one in (lowest, highest)]
    assert extremes[0] == -extremes[1] and 16 < extremes[1] < 17  # four of 8.2 standard deviations, halved
    for one in (lowest, highest):
        assert np.isfinite(one.gumbel(0.0, 1.0, 1)[0]) and np.isfinite(one.laplace(0.0, 1.0, 1)[0])


@pytest.mark.parametrize("generator", [from_seed(0), SecureGenerator()], ids=["seed 0", "fresh"])
@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda g, n: g.standard_normal(n), "norm"),
        (lambda g, n: g.standard_normal((n // 100, 100), dtype=np.float32).ravel(), "norm"),
        (lambda g, n: (g.laplace(3.0, 2.0, n) - 3) / 2, "laplace"),
        (lambda g, n: (g.gumbel(3.0, 2.0, n) - 3) / 2, "gumbel_r"),
        (lambda g, n: g._uniform(n), "uniform"),
    ],
    ids=["normal", "normal, float32", "laplace", "gumbel", "uniform"],
)
def test_secure_draws_have_their_distribution(draw, name, generator):
    assert stats.kstest(draw(generator, 200_000), name).pvalue > FALSE_ALARM  # Kolmogorov-Smirnov


def test_secure_normals_are_independent_across_blocks_and_places():
    draws = from_seed(1).standard_normal((50, 20_000))  # several blocks; seed 1
    correlation = np.corrcoef(draws)[np.triu_indices(50, 1)] * math.sqrt(20_000)  # 1,225 standard normals
    assert np.abs(correlation).max() < stats.norm.isf(FALSE_ALARM / 2 / 1225)
    assert len(np.unique(draws)) == draws.size


def test_a_secure_normal_is_the_sum_of_four():
    """Of bytes that are known: four uniform numbers a normal, whatever the place in the vector."""
    words = np.random.default_rng(2).integers(0, 2**64, 4 * 3, dtype=np.uint64)
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    drawn = SecureGenerator(lambda count: words.tobytes()[:count]).standard_normal(3)
    assert drawn == pytest.approx(stats.norm.ppf(uniform).reshape(4, 3).sum(axis=0) / 2, rel=1e-12)


@pytest.mark.parametrize("rate", [0.1, 0.5, 1e-3])
@pytest.mark.parametrize("generator", [from_seed(3), SecureGenerator()], ids=["seed 3", "fresh"])
def test_secure_poisson_sizes_are_binomial_and_records_equally_likely(rate, generator):
    draws = [poisson_rows(50, rate, generator) for _ in range(20_000)]
    assert all(len(set(draw)) == len(draw) for draw in draws)
    sizes = np.bincount([len(draw) for draw in draws], minlength=51)
    expected = stats.binom.pmf(np.arange(51), 50, rate) * len(draws)
    kept = expected > 50  # the others are one class; chi-square is close to its limit
    rest = [sizes[~kept].sum()], [expected[~kept].sum()]
    found, due = (np.concatenate([one[kept], other]) for one, other in zip((sizes, expected), rest, strict=True))
    assert stats.chi2.sf(((found - due) ** 2 / due).sum(), kept.sum()) > FALSE_ALARM
    counts, each = np.bincount(np.concatenate(draws), minlength=50), rate * len(draws)
    assert stats.chi2.sf(((counts - each) ** 2 / (each * (1 - rate))).sum(), 50) > FALSE_ALARM


def test_coins_are_exact():
    """A word below p * 2^64 is heads, and no other."""
    threshold = int(0.3 * 2.0**64)
    for word, heads in ((threshold - 1, 5), (threshold, 0)):
        source = SecureGenerator(lambda count, word=word: word.to_bytes(8, "little") * (count // 8))
        assert source.binomial(5, 0.3) == heads
    assert SecureGenerator().binomial(5, 0.0) == 0


def test_secure_permutations_are_equally_likely():
    for generator in (from_seed(4), SecureGenerator()):
        counts = np.bincount([int("".join(map(str, generator.permutation(3))), 3) for _ in range(6000)])
        counts = counts[counts > 0]
        assert len(counts) == 6 and stats.chisquare(counts).pvalue > FALSE_ALARM
    batches = list(draw_steps("shuffle", 10, 0.3, 4, SecureGenerator()))
    assert sorted(np.concatenate(batches)) == list(range(10))


def test_secure_streams_are_fresh_on_every_attempt_and_know_no_key():
    streams = Streams(None)
    draws = [streams.generator("noise", 1, 2, 0).standard_normal(4) for _ in range(2)]
    assert not set(draws[0]) & set(draws[1])
    mechanism = Gaussian(clip_norm=3.0, noise_multiplier=2.0, sample_rate=0.1, expected_batch_size=10.0)
    noisy = mechanism.privatise(torch.zeros(1, 200_000), streams.generator("noise", 1, 0))[0]
    assert noisy.dtype == torch.float32 and stats.kstest(noisy.numpy() / 0.6, "norm").pvalue > FALSE_ALARM


def test_what_a_secure_generator_does_not_offer_is_an_error():
    with pytest.raises(NotImplementedError):
        SecureGenerator().choice(5, 3, replace=True, shuffle=False)
    with pytest.raises(AttributeError):
        SecureGenerator().exponential()
