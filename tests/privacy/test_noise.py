"""Random numbers: published words of the cipher, the right distributions far into their tails, and no stream twice."""

import itertools
import math
import os

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpfl_lightning.privacy import noise
from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.privacy.noise import (
    LAPLACE,
    NORMAL,
    RandomGenerator,
    Streams,
    device_noise,
    integer_noise,
    stream_words,
)
from dpfl_lightning.privacy.sampling import Poisson, Shuffled, poisson_rows, rows_of_each_class

#: of each test with fresh randomness, which no seed fixes
FALSE_ALARM = 1e-7
SCALE = 2.0**18  # of an ordinary run, in grid steps


def keyed(number: int) -> RandomGenerator:
    return RandomGenerator(number.to_bytes(32, "big"))


def fresh() -> RandomGenerator:
    return Streams().generator("noise", 1, 0)


def test_words_are_the_published_key_stream(monkeypatch):
    """NIST SP 800-38A, F.5.5 (its counter, then our zero): output blocks 1 to 4 of AES-256 in counter mode.

    With a zero counter: the hash key, the tag and the first block of test cases 13 and 14 of McGrew and Viega, GCM.
    """
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    plain = "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    plain += "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    cipher = "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
    cipher += "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    with monkeypatch.context() as patch:
        patch.setattr(noise.modes, "CTR", lambda zero, make=modes.CTR: make(counter))
        stream = RandomGenerator(key).words(8).tobytes()
    assert bytes(a ^ b for a, b in zip(stream, bytes.fromhex(plain), strict=True)) == bytes.fromhex(cipher)
    blocks = [
        "dc95c078a2408989ad48a21492842087",
        "530f8afbc74536b9a963b4f1c4cb738b",
        "cea7403d4d606b6e074ec5d3baf39d18",
    ]
    assert RandomGenerator(bytes(32)).words(6).tobytes().hex() == "".join(blocks)


def test_words_go_on_where_the_last_ones_ended():
    """For all sizes around blocks of 16 bytes and pieces of 64 KiB; and each is used once, whatever is drawn."""
    sizes = [0, 1, 2, 3, 8191, 8192, 8193, 20_000, 5]
    cipher = Cipher(algorithms.AES256((7).to_bytes(32, "big")), modes.CTR(bytes(16))).encryptor()
    whole = np.frombuffer(cipher.update(bytes(8 * sum(sizes))), np.uint64)
    generator = keyed(7)
    assert np.array_equal(np.concatenate([generator.words(size) for size in sizes]), whole)
    assert len(np.unique(whole)) == len(whole)


def test_no_word_serves_two_numbers():
    """Two draws of normal numbers in a row share no word, and a number changes when its word does, and no other."""
    generator, drawn = keyed(8), []
    words = generator.words
    generator.words = lambda count: drawn.append(words(count)) or drawn[-1].copy()  # they are written to
    for count in (1, 7, 5000):
        generator.integer_normals(count, SCALE)
    used = np.concatenate(drawn)
    assert np.array_equal(used, keyed(8).words(len(used)))

    first, _, layers = noise._ziggurat()

    def filled(words):
        out, left = np.zeros(len(words)), np.zeros(len(words), np.int64)
        return out, left[: first(words, *layers, SCALE, out, left)]

    _, left = filled(used[:1000])
    assert 5 < len(left) < 50
    easy = np.delete(used[:1000], left)  # one word a number
    before, left = filled(easy)
    assert len(left) == 0
    changed = easy.copy()
    changed[100] ^= np.uint64(1 << 63)
    assert np.flatnonzero(filled(changed)[0] != before).tolist() == [100]


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_uniform_numbers_are_above_0_and_at_most_1(monkeypatch):
    for word, extreme in ((0, 2.0**-65), (2**64 - 1, 1.0)):
        generator = keyed(0)
        monkeypatch.setattr(generator, "words", lambda count, word=word: np.full(count, word, np.uint64))
        assert generator.uniform(1)[0] == extreme
        assert not np.isnan(generator.gumbel(0.0, 1.0, 1)[0])
    halved = keyed(0)  # the first word is all zeros, the next one has a single zero bit in front
    words = iter([0, 1 << 62, 2**64 - 1, 0])
    monkeypatch.setattr(halved, "words", lambda count: np.full(count, next(words), np.uint64))
    assert halved.integer_laplace(1, 1000.0)[0] == -round(1000 * (55 * np.log(2)))  # 53 + 1 halvings, and a whole one


@pytest.mark.parametrize("generator", [keyed(1), fresh()], ids=["keyed", "fresh"])
def test_draws_have_their_distribution(generator):
    """Kolmogorov-Smirnov; integers of a scale at which their grid is far below what 400,000 numbers resolve."""
    draws = {
        "norm": lambda n: generator.integer_normals(n, SCALE) / SCALE,
        "laplace": lambda n: generator.integer_laplace(n, SCALE) / SCALE,
        "gumbel_r": lambda n: (generator.gumbel(3.0, 2.0, n) - 3) / 2,
        "uniform": generator.uniform,
    }
    for name, draw in draws.items():
        assert stats.kstest(draw(400_000), name).pvalue > FALSE_ALARM, name


def in_classes(draws: np.ndarray, edges: np.ndarray, distribution) -> float:
    """p-value of chi-square over classes between edges and beyond them; each holds ten expected numbers or more."""
    found = np.bincount(np.searchsorted(edges, draws), minlength=len(edges) + 1)
    due = len(draws) * np.diff([0.0, *distribution.cdf(edges), 1.0])
    assert due.min() > 10
    return stats.chi2.sf(((found - due) ** 2 / due).sum(), len(edges))


@pytest.mark.parametrize("generator", [keyed(2), fresh()], ids=["keyed", "fresh"])
def test_tails_are_right_far_out(generator):
    """Six million normal numbers: classes from 2.5 to 4.5 standard deviations, across the tail's begin at 3.654."""
    draws = generator.integer_normals(6_000_000, SCALE) / SCALE
    edges = np.array([2.5, 3, 3.3, 3.5, 3.6, 3.65, 3.66, 3.7, 3.8, 4, 4.2, 4.5])
    assert in_classes(draws, np.array([*-edges[::-1], *edges]), stats.norm) > FALSE_ALARM
    beyond = np.abs(draws[np.abs(draws) > 4])
    assert stats.kstest(stats.norm.sf(beyond) / stats.norm.sf(4), "uniform").pvalue > FALSE_ALARM
    draws = generator.integer_laplace(1_000_000, SCALE) / SCALE
    edges = np.array([3.0, 6, 8, 10])
    assert in_classes(draws, np.array([*-edges[::-1], *edges]), stats.laplace) > FALSE_ALARM


@pytest.mark.e2e
def test_integers_are_rounded_numbers():
    """At scales at which their grid shows: chi-square of every integer."""
    for scale, (draw, exact) in itertools.product(
        (0.4, 1.7, 30.0), ((keyed(3).integer_normals, stats.norm), (keyed(3).integer_laplace, stats.laplace))
    ):
        most = round(3.5 * scale)
        edges = np.arange(-most, most + 1) - 0.5
        assert in_classes(draw(1_000_000, scale), edges, exact(scale=scale)) > FALSE_ALARM


@pytest.mark.e2e
def test_the_ziggurat_is_the_same_in_pieces():
    """Spare words that come three at a time, after first tries of which none is enough: no number is favoured (seed 4).

    Layer 0 beyond its box is the tail; all other first words lie in layer 1, where the curve decides.
    """
    first, others, layers = noise._ziggurat()
    ends, _, inside, _ = layers
    generator, count, tails = keyed(4), 200_000, 2_000
    steps = np.full(count, (inside[1] + 2.0**53) / 2, np.int64)
    steps[:tails] = 2**53 - 5
    words = (steps << 10).view(np.uint64) | np.uint64(1)
    words[:tails] -= np.uint64(1)
    out, left = np.zeros(count), np.zeros(count, np.int64)
    left = left[: first(words, *layers, SCALE, out, left)]
    assert len(left) == count
    settled, pieces = 0, generator.words(9 * count).reshape(-1, 3)
    for three in pieces:
        settled = others(words, left, three, *layers, SCALE, out, settled)
    assert settled == count
    tail, rest = out[:tails] / SCALE, out[tails:] / SCALE
    assert stats.kstest(stats.norm.sf(tail) / stats.norm.sf(layers[3]), "uniform").pvalue > FALSE_ALARM
    x = steps[-1] * 2.0**-53 * ends[1]
    rejected = rest[np.abs(rest - x) > 2 / SCALE]  # they begin again
    assert 0.2 < len(rejected) / len(rest) < 0.8
    assert stats.kstest(rejected, "norm").pvalue > FALSE_ALARM
    edges = np.array([2.5, 3, 3.5, 3.66])
    assert in_classes(rejected, np.array([*-edges[::-1], *edges]), stats.norm) > FALSE_ALARM


def test_layers_have_one_area_and_end_under_the_curve():
    ends, heights, _, begin = noise._layers()
    assert np.allclose(heights[1:], np.exp(-0.5 * ends[1:] ** 2), atol=1e-15) and ends[1] == begin
    areas = ends[1:256] * np.diff(heights)[1:]
    assert np.allclose(areas, ends[0] * heights[1], rtol=1e-9) and abs(heights[256] - 1) < 1e-9
    assert 256 * areas[0] > math.sqrt(math.pi / 2), "the layers cover the curve"


@pytest.mark.e2e
def test_draws_are_independent_of_those_before_and_of_other_streams():
    streams = [Streams(bytes(32)).generator("noise", 1, client) for client in range(25)]
    rows = np.array([one.integer_normals(20_000, SCALE) for one in [*streams, *(fresh() for _ in range(25))]])
    correlation = np.corrcoef(rows)[np.triu_indices(50, 1)] * math.sqrt(20_000)  # 1,225 standard normals
    assert np.abs(correlation).max() < stats.norm.isf(FALSE_ALARM / 2 / 1225)
    draws = keyed(5).integer_normals(10**6, SCALE) / SCALE
    for values in (draws, np.abs(draws) - np.abs(draws).mean()):
        lagged = [values[:-lag] @ values[lag:] / (values @ values) * 1000 for lag in range(1, 65)]
        assert np.abs(lagged).max() < stats.norm.isf(FALSE_ALARM / 2 / 64)


@pytest.mark.parametrize(("distribution", "name"), [(NORMAL, "norm"), (LAPLACE, "laplace")], ids=["normal", "laplace"])
def test_a_devices_noise_has_the_same_distribution(distribution, name):
    """The code of a GPU, here with a CPU's generator (seed 0), and that of a CPU."""
    like = torch.empty(2, 200_000, dtype=torch.int64)
    drawn = (
        device_noise(torch.Generator().manual_seed(0), distribution.fill, SCALE, like),
        integer_noise(keyed(6), distribution, SCALE, like),
    )
    for values in drawn:
        assert torch.equal(values, values.round()) and values.shape == like.shape
        assert stats.kstest(values.flatten().double().numpy() / SCALE, name).pvalue > FALSE_ALARM


def test_a_device_gets_all_bits_of_a_word():
    seeds = {RandomGenerator(bytes(31) + bytes([i])).on(torch.device("cpu")).initial_seed() for i in range(64)}
    assert len(seeds) == 64 and max(seeds) >= 2**63 > min(seeds)


@pytest.mark.e2e
@pytest.mark.parametrize("generator", [keyed(9), fresh()], ids=["keyed", "fresh"])
def test_poisson_sizes_are_binomial_and_records_equally_likely(generator):
    for rate in (0.1, 0.5, 1e-3):
        draws = [poisson_rows(50, rate, generator) for _ in range(20_000)]
        assert all(np.all(np.diff(draw) > 0) for draw in draws)
        sizes = np.bincount([len(draw) for draw in draws], minlength=51)
        expected = stats.binom.pmf(np.arange(51), 50, rate) * len(draws)
        kept = expected > 50  # the others are one class; chi-square is close to its limit
        rest = [sizes[~kept].sum()], [expected[~kept].sum()]
        found, due = (np.concatenate([one[kept], other]) for one, other in zip((sizes, expected), rest, strict=True))
        assert stats.chi2.sf(((found - due) ** 2 / due).sum(), kept.sum()) > FALSE_ALARM
        counts, each = np.bincount(np.concatenate(draws), minlength=50), rate * len(draws)
        assert stats.chi2.sf(((counts - each) ** 2 / (each * (1 - rate))).sum(), 50) > FALSE_ALARM


def test_coins_are_exact(monkeypatch):
    """A word below p * 2^64 is heads, and no other."""
    generator, threshold = keyed(0), int(0.3 * 2.0**64)
    for word, heads in ((threshold - 1, 5), (threshold, 0)):
        monkeypatch.setattr(generator, "words", lambda count, word=word: np.full(count, word, np.uint64))
        assert generator.coins(5, 0.3).sum() == heads
    assert fresh().coins(1000, 0.0).sum() == 0


def test_permutations_are_equally_likely():
    for generator in (keyed(10), fresh()):
        counts = np.bincount([int("".join(map(str, generator.permutation(3))), 3) for _ in range(6000)])
        counts = counts[counts > 0]
        assert len(counts) == 6 and stats.chisquare(counts).pvalue > FALSE_ALARM
        drawn = np.concatenate([rows_of_each_class(np.array([0, 1, 1, 1]), 1, generator) for _ in range(3000)])
        counts = np.bincount(drawn)
        assert counts[0] == 3000 and stats.chisquare(counts[1:]).pvalue > FALSE_ALARM


def test_shuffled_epochs_use_every_record_once():
    batches = list(Shuffled(Gaussian(1.0, 1.0, 0.3, 3.0), 8).draws(10, fresh()))
    assert [len(batch) for batch in batches] == [3, 3, 3, 1] * 2
    assert sorted(np.concatenate(batches[:4])) == sorted(np.concatenate(batches[4:])) == list(range(10))


def test_a_tiny_rate_gives_empty_batches_and_a_rate_of_1_everybody():
    assert any(len(rows) == 0 for rows in Poisson(Gaussian(1.0, 1.0, 0.001, 1.0), 50).draws(100, keyed(11)))
    assert np.array_equal(poisson_rows(100, 1.0, keyed(11)), np.arange(100))


NAMES = st.tuples(st.text(max_size=3), *[st.integers(0, 2**64 - 1)] * 3)


def first(streams: Streams, name) -> int:
    return int(streams.generator(*name).words(1)[0])


@pytest.mark.e2e
@given(NAMES, NAMES)
def test_a_simulation_repeats_each_stream_and_no_two_are_alike(one, other):
    streams = Streams(bytes(32))
    assert (first(streams, one) == first(Streams(bytes(32)), other)) == (one == other)
    assert len({first(Streams(), one), first(Streams(), one), first(streams, one)}) == 3, "fresh streams never repeat"


@given(*[st.tuples(st.text("0123456789abcdef", min_size=32, max_size=32), st.integers(0, 2**64), st.text())] * 2)
def test_simulations_of_other_keys_seeds_and_configurations_have_other_streams(one, other):
    assert (Streams.of_key(*one).secret == Streams.of_key(*other).secret) == (one == other)


def test_every_fresh_generator_has_a_key_from_the_operating_system(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "urandom", lambda count: asked.append(count) or (0xFFF - len(asked)).to_bytes(count, "big"))
    streams = Streams()
    drawn = {first(streams, ("noise", 1, 2, 0)) for _ in range(5)}
    assert asked == [32] * 5 and len(drawn) == 5
    assert drawn == {int(keyed(0xFFF - number).words(1)[0]) for number in range(1, 6)}


@given(*[st.tuples(st.text(max_size=3), *[st.integers(0, 2**64 - 1)] * 3)] * 2)
def test_different_public_streams_have_different_words(one, other):
    assert (stream_words(*one) == stream_words(*other)) == (one == other)
    words = stream_words(*one)
    assert [high << 32 | low for high, low in zip(words[2::2], words[3::2], strict=True)] == [*one[1:]]
