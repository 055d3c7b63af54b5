"""Weights by signal and noise from cosines: near the best, equal for false claims, and no client decides."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning.algorithms.signal_weights import (
    contributions,
    estimate_signals,
    limited_shares,
    most_influence,
)
from experiments.papers.noise_aware.ablation import best_ratio, signal_to_noise

NUM_PARAMS = 20_000


def cosines_of(deltas):
    gram = deltas @ deltas.T
    lengths = np.sqrt(np.diag(gram))
    return gram / np.outer(lengths, lengths), lengths


def shares(deltas, bound=0.25, models=None, rounds=30):
    """Each client's contribution, and the weights that give it."""
    cosines, lengths = cosines_of(deltas)
    models = models or [list(range(len(deltas)))]
    precision = np.full(cosines.shape, float(deltas.shape[1]))
    share = np.zeros(len(deltas))
    for rows, signals in zip(models, estimate_signals(cosines, lengths, models, precision), strict=True):
        share[rows] = contributions(signals, rounds, bound)
    return share, share / lengths


def drawn(signal, noise_std, directions=None, seed=0):
    """Updates `[C, P]`: a direction for each client, with the signal's length, and noise of these total lengths."""
    rng = np.random.default_rng(seed)
    common = np.zeros((3, NUM_PARAMS))
    common[range(3), range(3)] = 1.0
    rows = np.zeros(len(signal), dtype=int) if directions is None else np.asarray(directions)
    noise = rng.standard_normal((len(signal), NUM_PARAMS)) * np.asarray(noise_std)[:, None] / NUM_PARAMS**0.5
    return np.asarray(signal)[:, None] * common[rows] + noise


NOISE = np.geomspace(1.0, 10.0, 12)


@pytest.mark.parametrize("power", [0.0, 1.0], ids=["equal signals", "equal shares of signal"])
@pytest.mark.parametrize("ratio", [0.2, 1.0, 3.0])
def test_the_sum_has_nearly_the_best_ratio_of_signal_to_noise(power, ratio):
    signal = ratio * NOISE**power
    _, weight = shares(drawn(signal, NOISE))
    ratio_of_ours = (weight @ signal) ** 2 / (weight**2 @ NOISE**2)
    assert ratio_of_ours / best_ratio(signal, NOISE**2, 0.25) > 0.97


@pytest.mark.slow
def test_simulated_updates_of_the_paper_reach_the_best_within_ten_rounds():
    for models in (1, 4):
        for signal in ("equal", "steps"):
            assert signal_to_noise(models, signal, 0.1)["tenth"] > 0.97


def test_noise_alone_is_not_followed():
    """Forty rounds of cosines that are noise: the weights are those of the law but for a few."""
    powers = []
    for seed in range(40):
        noise = np.random.default_rng(seed).standard_normal((12, 12)) / NUM_PARAMS**0.5
        cosines = (noise + noise.T) / 2**0.5
        (signals,) = estimate_signals(cosines, NOISE, [list(range(12))], np.full((12, 12), float(NUM_PARAMS)))
        weight = contributions(signals, 30, 1.0) / NOISE
        powers.append(-np.polyfit(np.log(NOISE), np.log(weight), 1)[0])
        assert signals.factors.shape[1] == 1
    assert sum(0.9 < power < 2.1 for power in powers) >= 38
    assert np.median(powers) == pytest.approx(1.4, abs=0.15)


def test_without_any_signal_weights_lie_between_those_of_equal_signals_and_of_equal_shares():
    _, weight = shares(drawn(np.zeros(12), NOISE, seed=3), bound=1.0)
    assert np.all(np.diff(weight) < 0)
    assert 1.0 < np.log(weight[0] / weight[-1]) / np.log(NOISE[-1] / NOISE[0]) < 2.0


def test_models_are_estimated_apart_and_share_only_the_law():
    deltas = drawn(np.full(12, 1.0), NOISE, directions=[0, 1, 2] * 4)
    models = [list(range(model, 12, 3)) for model in range(3)]
    share, _ = shares(deltas, models=models)
    assert [round(float(share[rows].sum()), 9) for rows in models] == [1.0] * 3
    together = estimate_signals(*cosines_of(deltas), models=[list(range(12))], precision=np.full((12, 12), 20_000.0))[0]
    assert together.factors.shape[1] == 3, "as one model they show three directions"


@pytest.mark.parametrize("noisy", [1.0, 10.0])
def test_visible_kinds_of_data_count_as_in_the_plain_mean(noisy):
    """Two kinds of clients, one far noisier: least noise would forget it, and so does the first direction alone."""
    noise = np.array([1.0] * 6 + [noisy] * 6)
    _, weight = shares(drawn(np.full(12, 3.0), noise, directions=[0] * 6 + [1] * 6))
    signal = [3 * float(weight[rows].sum()) for rows in (slice(6), slice(6, 12))]
    assert signal[1] / signal[0] == pytest.approx(1, abs=0.35)
    least_noise = 1 / noise**2
    assert noisy == 1.0 or least_noise[6:].sum() / least_noise[:6].sum() < 0.02


@given(scale=st.floats(-8, 8), client=st.integers(0, 11))
@settings(deadline=None, max_examples=25)
def test_a_client_gains_nothing_by_the_length_of_its_update(scale, client):
    """An update shortened or lengthened by any factor has at most the part of one of usual length, doubled."""
    deltas = drawn(np.full(12, 0.3), NOISE)
    usual, _ = shares(deltas)
    deltas[client] *= 10.0**scale
    share, _ = shares(deltas)
    assert share[client] <= max(2 * usual.max(), 1e-9) and share[client] <= 0.25 + 1e-9
    rest = np.arange(12) != client
    ratios = [(part[rest] @ (0.3 / NOISE[rest])) ** 2 / (part[rest] @ part[rest]) for part in (share, usual)]
    assert ratios[0] > 0.85 * ratios[1], "the others are weighted as well as before"


@pytest.mark.parametrize("length", [1e-12, 1.0, 1e12])
def test_one_client_without_noise_has_at_most_its_bound(length):
    """It sends what it likes, free of noise: the common direction, or another one."""
    for kind in (0, 2):
        deltas = drawn(np.full(12, 0.5), NOISE)
        deltas[4] = 0.0
        deltas[4, kind] = length
        for bound in (0.25, 0.1):
            share, weight = shares(deltas, bound)
            assert share[4] <= bound * (1 + 1e-9)
            assert (
                np.linalg.norm(weight[4] * deltas[4])
                <= bound * np.linalg.norm(weight[:, None] * deltas, axis=1).sum() * 1.001
            )
    assert kind == 2 and share[4] < 0.05, "a direction that nobody shares is taken for noise"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_clients(count):
    share, weight = shares(drawn(np.full(count, 1.0), NOISE[:count]), bound=most_influence(count))
    assert share.sum() == pytest.approx(1) and bool(np.isfinite(weight).all()) and bool((weight > 0).all())
    assert count == 1 or share.max() <= 0.5 + 1e-12


def test_pairs_that_were_never_seen_together_are_not_read():
    deltas = drawn(np.full(6, 2.0), np.ones(6))
    cosines, lengths = cosines_of(deltas)
    precision = np.full((6, 6), float(NUM_PARAMS))
    precision[0, 1:] = precision[1:, 0] = 0.0
    nonsense = cosines.copy()
    nonsense[0, 1:] = nonsense[1:, 0] = 0.99
    one, other = (estimate_signals(seen, lengths, [list(range(6))], precision)[0] for seen in (cosines, nonsense))
    np.testing.assert_array_equal(one.alignment, other.alignment)
    assert 0 < one.alignment[0] < 1


def test_shares_that_are_all_zero_become_equal():
    assert limited_shares(np.zeros(4), 0.5).tolist() == [0.25] * 4


@pytest.mark.parametrize("attackers", [2, 4])
def test_a_minority_cannot_turn_the_sum_by_long_opposite_updates(attackers):
    """Clients that disagree count as clients with other data, but not by the length of their signals."""
    rng = np.random.default_rng(3)
    signal = rng.normal(size=400)
    deltas = 4 * signal / np.linalg.norm(signal) + 0.1 * rng.normal(size=(20, 400))
    deltas[:attackers] *= -10
    lengths = np.linalg.norm(deltas, axis=1)
    cosines = deltas @ deltas.T / np.outer(lengths, lengths)
    (signals,) = estimate_signals(cosines, lengths, [range(20)], np.full((20, 20), 400.0))
    share = contributions(signals, 10, 0.25)
    combined = (share / lengths) @ deltas
    assert combined @ signal / np.linalg.norm(combined) / np.linalg.norm(signal) > 0.8
