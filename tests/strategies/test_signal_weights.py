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
    common = np.eye(max(3, len(signal)), NUM_PARAMS)
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
@pytest.mark.parametrize("signal", ["equal", "steps"])
@pytest.mark.parametrize("models", [1, 4])
def test_simulated_updates_of_the_paper_reach_nearly_the_best_from_the_first_round(models, signal):
    found = signal_to_noise(models, signal, 0.1)
    assert found["first"] > 0.96 and found["tenth"] > 0.97 and found["lasting"] > 0.97


@pytest.mark.parametrize("quietest", [1.0, 0.5], ids=["in the range of the others", "outside"])
def test_signals_that_noise_hides_are_taken_as_equally_long(quietest):
    """What chance shows of the client with the least noise, which matters most, is not followed."""
    noise, signal, found = np.concatenate([[quietest], np.linspace(1.0, 10.0, 19)]), np.full(20, 0.005), []
    for seed in range(20):
        _, weight = shares(drawn(signal, noise, seed=seed))
        found.append((weight @ signal) ** 2 / (weight**2 @ noise**2) / best_ratio(signal, noise**2, 0.25))
    assert np.mean(found) > 0.99 and min(found) > 0.95


def test_a_client_against_the_others_does_not_add_directions_or_signal_to_them():
    loads = np.array([[0.6, 0.0]] * 4 + [[-0.3, 0.95]])
    draws = np.random.default_rng(0).standard_normal((10, 5, 5)) / NUM_PARAMS**0.5
    for noise in draws:
        cosines = loads @ loads.T + (noise + noise.T) / 2**0.5
        np.fill_diagonal(cosines, 1.0)
        (signals,) = estimate_signals(cosines, np.ones(5), [list(range(5))], np.full((5, 5), float(NUM_PARAMS)))
        assert signals.factors[:, 0] == pytest.approx([0.6] * 4 + [-0.3], abs=0.06)
        assert signals.factors.shape[1] == 1
        assert signals.shared[:4] ** 2 == pytest.approx(np.full(4, 0.36), abs=0.06)


@pytest.mark.parametrize("count", [20, 50])
@pytest.mark.parametrize("cosine", [-0.1, -0.25, -0.5, -0.75, -0.9])
def test_a_client_against_the_others_does_not_change_their_weights(count, cosine):
    noise, rest = np.geomspace(1, 10, count), np.arange(count) != count // 2
    updates = drawn(np.full(count, 3.0), noise)
    updates[count // 2] = 0
    updates[count // 2, :2] = 5 * cosine, 5 * (1 - cosine**2) ** 0.5
    weight = shares(updates)[1][rest]
    ratio = weight.sum() ** 2 / (weight**2 @ noise[rest] ** 2)
    assert ratio / best_ratio(np.ones(count - 1), noise[rest] ** 2, 0.25) > 0.97


@pytest.mark.parametrize(("quiet", "noisy", "times", "signal"), [(8, 12, 100, 1), (10, 10, 30, 3), (50, 50, 50, 1)])
def test_a_noisy_half_does_not_add_directions(quiet, noisy, times, signal):
    """Cosines of all quiet clients with one noisy client have one common error."""
    noise = np.repeat([1.0, times], [quiet, noisy])
    for seed in range(5):
        weight = shares(drawn(np.full(len(noise), float(signal)), noise, seed=seed))[1]
        ratio = weight.sum() ** 2 / (weight**2 @ noise**2)
        assert ratio / best_ratio(np.ones(len(noise)), noise**2, 0.25) > 0.99


@pytest.mark.parametrize("seed", range(3))
def test_two_opposed_kinds_of_data_are_two_directions(seed):
    noise, kinds = np.repeat([1.0, 5.0], [5, 15]), np.repeat([1, 0], [5, 15])
    rounds = []
    for number in range(8):
        updates = drawn(np.full(20, 3.0), noise, kinds, 100 * seed + number)
        updates[kinds == 1, 0] -= 1.5
        rounds.append(cosines_of(updates))
    cosines, lengths = (np.mean(values, axis=0) for values in zip(*rounds, strict=True))
    (signals,) = estimate_signals(cosines, lengths, [list(range(20))], np.full((20, 20), 8.0 * NUM_PARAMS))
    assert signals.factors.shape[1] == 2
    assert signals.shared[5:] ** 2 == pytest.approx(np.full(15, 9 / 34), abs=0.05)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_many_parameters_of_opposite_updates_give_finite_weights(count):
    cosines = np.full((count, count), -1 / (count - 1))
    np.fill_diagonal(cosines, 1.0)
    for num_params in (1e6, 1e9, 1e12):
        precision = np.full(cosines.shape, num_params)
        (signals,) = estimate_signals(cosines, np.linspace(1, 2, count), [list(range(count))], precision)
        share = contributions(signals, 30, 0.5)
        assert np.isfinite(share).all() and share.sum() == pytest.approx(1.0)


def test_a_client_alone_with_its_model_shows_no_signal():
    cosines = np.eye(4)
    models, precision = [[0], [1, 2, 3]], np.full((4, 4), float(NUM_PARAMS))
    alone, _ = estimate_signals(cosines, np.ones(4), models, precision)
    assert alone.noise_share == pytest.approx([1.0]) and contributions(alone, 30, 0.5).tolist() == [1.0]


def test_noise_alone_is_not_followed():
    """Forty rounds of cosines that are noise: the weights are those of equal signals but for a few."""
    powers = []
    for seed in range(40):
        noise = np.random.default_rng(seed).standard_normal((12, 12)) / NUM_PARAMS**0.5
        cosines = (noise + noise.T) / 2**0.5
        (signals,) = estimate_signals(cosines, NOISE, [list(range(12))], np.full((12, 12), float(NUM_PARAMS)))
        weight = contributions(signals, 30, 1.0) / NOISE
        powers.append(-np.polyfit(np.log(NOISE), np.log(weight), 1)[0])
        assert signals.factors.shape[1] == 1
    assert sum(0.9 < power < 2.1 for power in powers) >= 38
    assert np.median(powers) == pytest.approx(2.0, abs=0.15)


@pytest.mark.parametrize(("clients", "params"), [(100, 2000), (200, 7850)])
def test_noise_of_many_clients_shows_no_direction(clients, params):
    """The matrix of cosines of noise has an edge that grows with clients / parameters, too."""
    rows = list(range(clients))
    for seed in range(5):
        deltas = np.random.default_rng(seed).standard_normal((clients, params))
        cosines, lengths = cosines_of(deltas)
        (signals,) = estimate_signals(cosines, lengths, [rows], np.full(cosines.shape, float(params)))
        assert signals.factors.shape[1] == 1


def test_pairs_that_were_seen_in_fewer_rounds_show_no_direction():
    """Half of 100 clients took part in three earlier rounds, too."""
    old = np.arange(100) < 50
    rounds = 1 + 3.0 * np.outer(old, old)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        total = cosines_of(rng.standard_normal((100, 2000)))[0]
        for _ in range(3):
            total[:50, :50] += cosines_of(rng.standard_normal((50, 2000)))[0]
        (signals,) = estimate_signals(total / rounds, np.ones(100), [list(range(100))], 2000 * rounds)
        assert signals.factors.shape[1] == 1, seed


def test_without_any_signal_weights_lie_between_those_of_equal_signals_and_of_equal_shares():
    _, weight = shares(drawn(np.zeros(12), NOISE, seed=3), bound=1.0)
    assert np.all(np.diff(weight) < 0)
    assert 1.0 < np.log(weight[0] / weight[-1]) / np.log(NOISE[-1] / NOISE[0]) < 2.0


def test_the_lengths_of_another_model_limit_none():
    signal, noise = np.full(20, 0.1), np.append(np.full(14, 200.0), np.geomspace(1, 10, 6))
    _, weight = shares(drawn(signal, noise), models=[list(range(14)), list(range(14, 20))], bound=0.5)
    found = (weight[14:] @ signal[14:]) ** 2 / (weight[14:] ** 2 @ noise[14:] ** 2)
    assert found / best_ratio(signal[14:], noise[14:] ** 2, 0.5) > 0.9


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


@pytest.mark.parametrize("attackers", [[4], [4, 8]], ids=["one", "two"])
@pytest.mark.parametrize("signal", [1.0, 3.0])
@pytest.mark.parametrize("rounds", [1, 10])
def test_clients_that_go_against_the_others_have_no_part_and_do_not_change_theirs(rounds, signal, attackers):
    rest, cosines = np.setdiff1d(range(12), attackers), np.zeros((12, 12))
    for seed in range(rounds):
        deltas = drawn(np.full(12, signal), NOISE, seed=seed)
        deltas[attackers] = 0.0
        deltas[attackers, 0] = -np.median(NOISE)
        latest, lengths = cosines_of(deltas)
        cosines += latest / rounds
    (signals,) = estimate_signals(cosines, lengths, [list(range(12))], np.full((12, 12), float(rounds * NUM_PARAMS)))
    share = contributions(signals, 30, 0.25)
    weight = (share / lengths)[rest]
    assert share[attackers].sum() == 0
    found = (weight.sum() * signal) ** 2 / (weight**2 @ NOISE[rest] ** 2)
    assert found / best_ratio(np.full(len(rest), signal), NOISE[rest] ** 2, 0.25) > 0.97


@pytest.mark.parametrize("quiet, noisy, attackers", [(2, 7, 1), (2, 8, 2), (3, 9, 2)])
def test_attackers_without_noise_do_not_turn_the_weights_against_the_quietest_clients(quiet, noisy, attackers):
    """The cosines of a few quiet clients with the noisy ones are small beside those with the attackers."""
    alignment = np.array([0.4] * quiet + [0.02] * noisy)
    deltas = drawn(alignment, np.sqrt(1 - alignment**2), seed=1)
    attack = np.zeros((attackers, NUM_PARAMS))
    attack[:, 0] = -1.0
    directions = []
    for sent in (deltas, np.vstack([deltas, attack])):
        combined = shares(sent, most_influence(len(sent)))[1] @ sent
        directions.append(combined[0] / np.linalg.norm(combined))
    assert directions[1] > 0.9 * directions[0] > 0.3


def test_a_minority_with_other_data_is_not_taken_for_attackers():
    """Cosines of 0.21 within seven clients, 0.17 within three others, and -0.14 between them."""
    first, second = 0.21**0.5, 0.17**0.5
    angle = np.arccos(-0.14 / (first * second))
    deltas = drawn(np.zeros(10), np.sqrt(1 - np.array([first] * 7 + [second] * 3) ** 2), seed=2)
    deltas[:7, 0] += first
    deltas[7:, 0] += second * np.cos(angle)
    deltas[7:, 1] += second * np.sin(angle)
    assert shares(deltas, rounds=20)[0].min() > 0.05


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


def signals_of(deltas, lasting=None, error=1e-4):
    cosines, lengths = cosines_of(deltas)
    precision = np.full(cosines.shape, float(deltas.shape[1]))
    if lasting is not None:
        lasting = (np.asarray(lasting), np.full(len(deltas), error))
    (signals,) = estimate_signals(cosines, lengths, [list(range(len(deltas)))], precision, lasting)
    return signals


def test_a_signal_that_a_client_has_alone_counts_as_far_as_it_is_proven():
    """Ten clients share one signal and two pairs of them another one; the last has a third one for itself."""
    deltas = drawn(np.full(11, 2.0), np.ones(11), directions=[0] * 8 + [1] * 2 + [2])
    share = contributions(signals_of(deltas), 30, 0.25)
    assert share[-1] < 0.001, "its cosines with others are those of noise"
    lasting = np.zeros(11)
    for proven, least, most in ((0.0, 0.0, 0.001), (0.2, 0.04, 0.1), (0.79, 0.08, 0.12)):
        lasting[-1] = proven
        signals = signals_of(deltas, lasting)
        assert least <= contributions(signals, 30, 0.25)[-1] <= most, proven
        assert not signals.private[:-1].any() and signals.noise_share[-1] == pytest.approx(1 - proven, abs=0.01)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_what_all_clients_have_alone_is_seen_though_it_is_proven_for_none(ratio):
    """Cosines between rounds, with errors of two thirds of what they show in the second case."""
    found = []
    for seed in range(20):
        deltas, rng = drawn(np.full(12, 0.3), np.ones(12), seed=seed), np.random.default_rng(seed)
        signals = signals_of(deltas, (1 + ratio) * 0.3**2 + 0.03 * rng.standard_normal(12), error=0.03)
        found.append(np.mean(signals.private**2) / 0.3**2)
    assert np.mean(found) == pytest.approx(ratio * 0.8, abs=0.15)


@pytest.mark.parametrize("signal", [0.3, 1.0])
def test_one_client_does_not_decide_what_all_have_alone(signal):
    """Without noise it sends a part of the common signal and a direction of its own, the same in every round."""
    deltas = drawn(np.full(12, signal), NOISE)
    deltas[3] = 0.0
    deltas[3, [0, 1]] = np.median(NOISE) * np.array([0.6, 0.8])
    lengths = np.linalg.norm(deltas, axis=1)
    lasting = np.where(np.arange(12) == 3, 1.0, (signal / lengths) ** 2)
    share = contributions(signals_of(deltas, lasting, error=0.004), 30, 0.25)
    rest = np.arange(12) != 3
    weight = share[rest] / lengths[rest]
    found = (weight.sum() * signal) ** 2 / (weight**2 @ NOISE[rest] ** 2)
    assert found / best_ratio(np.full(11, signal), NOISE[rest] ** 2, 0.25) > 0.9


def test_a_further_direction_of_a_client_is_no_longer_than_what_lasts():
    deltas, share = drawn(np.full(12, 1.5), np.ones(12), directions=[0] * 6 + [1] * 6), 1.5**2 / (1.5**2 + 1)
    lasting = np.append(np.full(11, share), 0.1)
    further = np.square(signals_of(deltas, lasting).factors[:, 1:]).sum(axis=1)
    assert further[6:11].min() > 0.3 and further[11] < 0.11


@pytest.mark.parametrize("turning", [0.0, -0.69], ids=["turning", "alternating"])
def test_a_kind_of_data_is_kept_though_its_signal_does_not_last(turning):
    deltas = drawn(np.full(12, 1.5), np.ones(12), directions=[0] * 7 + [1] * 5)
    share = contributions(signals_of(deltas, np.full(12, turning), error=0.01), 30, 0.25)
    assert share[7:].sum() == pytest.approx(5 / 12, abs=0.05)


def test_a_signal_alone_that_is_hidden_in_noise_counts_as_usual():
    """All signals have length 1; that of six clients is half shared, and the noisier six have nothing in common."""
    noise = np.array([2.0] * 6 + [4.0] * 6)
    for seed in range(5):
        deltas = drawn([0.7] * 6 + [0.0] * 6, noise, seed=seed)
        deltas += drawn([0.7] * 6 + [1.0] * 6, np.zeros(12), directions=range(12))
        lasting = 1 / (1 + noise**2) + 0.03 * np.random.default_rng(seed).standard_normal(12)
        weight = contributions(signals_of(deltas, lasting, error=0.03), 1000, 0.25) / np.linalg.norm(deltas, axis=1)
        assert weight[6:].min() > 0.7 * weight[:6].mean(), seed


@pytest.mark.parametrize("length", [2.0, 10.0])
def test_long_signals_count_as_twice_the_median_at_most(length):
    deltas = drawn([1.0] * 9 + [length] * 3, np.full(12, 0.1), directions=range(12))
    share = contributions(signals_of(deltas, np.full(12, 0.98)), 30, 0.5)
    assert share[-1] == pytest.approx(2 * share[0], rel=0.1)


def test_what_a_client_shares_is_not_counted_twice():
    deltas = drawn(np.full(8, 2.0), np.ones(8))
    signals = signals_of(deltas, np.full(8, 0.8))
    assert (signals.private**2 < 0.02).all() and (np.abs(contributions(signals, 30, 0.25) - 1 / 8) < 0.01).all()


@pytest.mark.parametrize("count", [8, 20])
@pytest.mark.parametrize(("cosine", "opposed"), [(-0.1, False), (-0.3, False), (-0.6, False), (-1.0, True)])
def test_a_single_client_is_opposed_only_if_it_mirrors_the_others(count, cosine, opposed):
    deltas = drawn(np.full(count, 3.0), np.ones(count))
    deltas[0, 0] += 3.0 * (cosine - 1)
    deltas[0, 1] += 3.0 * (1 - cosine**2) ** 0.5
    lasting = np.append(0.89, np.zeros(count - 1))
    signals = signals_of(deltas, lasting)
    assert signals.factors[0, 0] == pytest.approx(cosine * 0.9**0.5, abs=0.05)
    assert (contributions(signals, 30, 0.5)[0] < 1e-3) == opposed
