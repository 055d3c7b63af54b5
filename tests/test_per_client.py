from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpfl_lightning.config.per_client import resolve
from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS, NORMAL_MIXTURES, UNIFORMS
from dpfl_lightning.errors import UserError

DISTS = [f"dist{i}" for i in range(1, 10)]


def test_one_value_is_everybodys() -> None:
    assert resolve("privacy.delta", 1e-4, 3, seed=0) == (1e-4, 1e-4, 1e-4)
    assert resolve("clients.batch_size", 8, 2, seed=0, kind=int) == (8, 8)


def test_whole_numbers_become_floats_where_floats_are_due() -> None:
    (value,) = resolve("privacy.epsilon", 2, 1, seed=0)
    assert isinstance(value, float)


def test_list_keeps_the_order_of_clients() -> None:
    assert resolve("privacy.epsilon", [3.0, 1.0, math.inf], 3, seed=0) == (3.0, 1.0, math.inf)


@given(num_clients=st.integers(1, 40), seed=st.integers(0, 2**40))
def test_every_named_distribution_stays_in_its_range(num_clients: int, seed: int) -> None:
    def drawn(key: str, kind: type = float, **options: object) -> tuple:
        values = resolve(key, options, num_clients, seed, kind)
        assert len(values) == num_clients
        assert values == resolve(key, options, num_clients, seed, kind)
        assert all(type(value) is kind for value in values)
        return values

    assert all(1 <= v <= 2.5 for v in drawn("clients.learning_rate", name="uniform", low=1, high=2.5))
    assert set(drawn("clients.batch_size", int, name="uniform", low=3, high=4)) <= {3, 4}
    assert set(drawn("clients.batch_size", int, name="choice", values=[16, 64])) <= {16, 64}
    assert min(drawn("privacy.epsilon", name="normal", mean=1, std=2, floor=0.3)) >= 0.3
    assert min(drawn("clients.local_epochs", int, name="normal", mean=1, std=2, floor=1)) >= 1
    assert min(drawn("privacy.epsilon", name="dist1", source="sampled")) >= 0.15


def test_whole_number_uniform_reaches_both_ends() -> None:
    values = resolve("clients.batch_size", {"name": "uniform", "low": 1, "high": 3}, 600, seed=0, kind=int)
    # Each count is binomial(600, 1/3): mean 200, standard deviation 11.5; false alarm below 1e-5 a count.
    assert all(abs(values.count(value) - 200) < 52 for value in (1, 2, 3))


def test_options_and_seeds_are_drawn_independently() -> None:
    spread = {"name": "uniform", "low": 0.1, "high": 0.9}
    draws = [
        resolve("clients.learning_rate", spread, 200, seed=0),
        resolve("privacy.clip_norm", spread, 200, seed=0),
        resolve("clients.learning_rate", spread, 200, seed=1),
    ]
    for one, other in itertools.combinations(draws, 2):
        # Correlation of 200 independent pairs: standard deviation 0.071, so 0.3 is beyond four of them.
        assert abs(statistics.correlation(one, other)) < 0.3


# ---- the published lists


def test_published_lists_are_those_of_the_release() -> None:
    assert {n: len(sizes) for n, sizes in BATCH_SIZES.items()} == {20: 20, 40: 40, 60: 60}
    assert {n: sum(sizes) for n, sizes in BATCH_SIZES.items()} == {20: 768, 40: 2224, 60: 3216}
    sums = {dist: [round(sum(of[n]), 2) for n in (20, 40, 60)] for dist, of in EPSILONS.items()}
    assert sums == {
        "dist1": [38.66, 75.16, 116.88],
        "dist2": [28.84, 53.18, 74.94],
        "dist3": [39.23, 86.11, 142.66],
        "dist4": [21.19, 22.15, 33.41],
        "dist5": [17.22, 37.26, 60.97],
        "dist6": [7.50, 15.33, 23.95],
        "dist7": [11.67, 21.01, 33.77],
        "dist8": [5.80, 11.13, 16.70],
        "dist9": [6.22, 12.89, 20.17],
    }


def test_published_clients_are_in_their_places() -> None:
    dist5 = EPSILONS["dist5"][20]
    assert [i for i, epsilon in enumerate(dist5) if epsilon == 0.95] == [0, 10, 16]
    assert {BATCH_SIZES[20][i] for i in (0, 10, 16)} == {32}
    assert EPSILONS["dist1"][60].index(3.73) == 43 and BATCH_SIZES[60][43] == 128
    assert sorted(EPSILONS["dist1"][60])[-2] == 3.73


@pytest.mark.parametrize("dist", DISTS)
def test_published_budgets_fit_their_distribution(dist: str) -> None:
    for epsilons in EPSILONS[dist].values():
        if dist in UNIFORMS:
            low, high = UNIFORMS[dist]
            assert low <= min(epsilons) and max(epsilons) <= high
        else:
            assert min(epsilons) >= 0.15


@pytest.mark.parametrize("dist", DISTS)
def test_sampled_budgets_have_the_stated_mean(dist: str) -> None:
    count, floor = 20_000, 1e-9
    values = resolve("privacy.epsilon", {"name": dist, "source": "sampled", "floor": floor}, count, seed=3)
    if dist in UNIFORMS:
        mean = sum(UNIFORMS[dist]) / 2
    else:
        mean = sum(weight * mean for weight, mean, _ in NORMAL_MIXTURES[dist])
    # Five standard errors, false alarm below 1e-6; the floor moves dist1's mean by 0.0085, dist4's by 0.002.
    assert abs(statistics.fmean(values) - mean) < 5 * statistics.stdev(values) / count**0.5 + 0.01
    assert sum(weight for weight, _, _ in NORMAL_MIXTURES.get(dist, ((1.0, 0, 0),))) == pytest.approx(1)


def test_mixture_components_have_their_shares() -> None:
    values = resolve("privacy.epsilon", {"name": "dist2", "source": "sampled"}, 20_000, seed=0)
    shares = [sum(low < v <= high for v in values) / len(values) for low, high in ((0, 0.3), (0.5, 1.5), (2.5, 99))]
    # Standard errors 0.003; 0.6 % of the third component lie below 2.5.
    assert shares == pytest.approx([0.2, 0.6, 0.2], abs=0.016)


def test_published_budgets_by_name_and_scale() -> None:
    assert resolve("privacy.epsilon", {"name": "dist7"}, 40, seed=9) == EPSILONS["dist7"][40]
    scaled = resolve("privacy.epsilon", {"name": "dist7", "scale": 10}, 20, seed=0)
    assert scaled == pytest.approx([10 * epsilon for epsilon in EPSILONS["dist7"][20]])
    assert resolve("clients.batch_size", {"name": "published"}, 60, seed=0, kind=int) == BATCH_SIZES[60]


def test_floor_raises_small_draws() -> None:
    sampled = {"name": "dist8", "source": "sampled", "floor": 0.3}
    values = resolve("privacy.epsilon", sampled, 50, seed=0)
    assert min(values) == 0.3 < max(values)


# ---- mistakes


@pytest.mark.parametrize(
    ("key", "value", "kind", "words"),
    [
        ("privacy.epsilon", [1.0, 2.0], float, ["`privacy.epsilon` must have 3 values", "got 2"]),
        ("privacy.epsilon", [], float, ["got 0"]),
        ("privacy.epsilon", 0, float, ["be above 0, got 0"]),
        ("privacy.epsilon", [1, 2, -1], float, ["be above 0, got -1", "client 2"]),
        ("privacy.epsilon", math.nan, float, ["be a number"]),
        ("privacy.epsilon", True, float, ["be a number, got True"]),
        ("privacy.epsilon", "dist1", float, ["be a number, got 'dist1'"]),
        ("privacy.delta", 1, float, ["be in [0, 1), got 1"]),
        ("privacy.noise_multiplier", -0.1, float, ["be >= 0"]),
        ("clients.learning_rate", math.inf, float, ["finite"]),
        ("clients.batch_size", 2.5, int, ["be a whole number, got 2.5"]),
        ("clients.batch_size", 0, int, ["be above 0"]),
        ("privacy.epsilon", {"name": "dist11"}, float, ["`privacy.epsilon.name`", "Did you mean `dist1`?"]),
        ("privacy.epsilon", {}, float, ["`privacy.epsilon.name` must be one of"]),
        ("privacy.epsilon", {"name": "dist1"}, float, ["20, 40 or 60 clients", "got 3", "source: sampled"]),
        ("privacy.epsilon", {"name": "dist1", "source": "published", "floor": 1}, float, ["20, 40 or 60"]),
        ("privacy.epsilon", {"name": "dist1", "sorce": "sampled"}, float, ["Did you mean `source`?"]),
        ("privacy.epsilon", {"name": "dist1", "source": "sample"}, float, ["Did you mean `sampled`?"]),
        ("privacy.epsilon", {"name": "dist1", "source": "sampled", "floor": "a"}, float, ["be a number"]),
        ("privacy.epsilon", {"name": "dist1", "source": "sampled", "scale": -1}, float, ["be above 0"]),
        (
            "privacy.epsilon",
            {"name": "dist1", "source": "sampled", "floor": 0},
            float,
            ["epsilon.floor` must be above 0"],
        ),
        ("privacy.epsilon", {"name": "published"}, float, ["be one of"]),
        ("clients.learning_rate", {"name": "dist1"}, float, ["be one of"]),
        ("clients.batch_size", {"name": "published"}, int, ["20, 40 or 60 clients", "choice"]),
        ("clients.batch_size", {"name": "choice", "values": 16}, int, ["`clients.batch_size.values` must be a list"]),
        ("clients.batch_size", {"name": "choice", "values": [1.5]}, int, ["be a whole number, got 1.5"]),
        ("clients.batch_size", {"name": "uniform", "low": 1.5, "high": 3}, int, ["`clients.batch_size.low`"]),
        ("clients.batch_size", {"name": "uniform", "low": 4, "high": 3}, int, ["at most `high`"]),
        ("privacy.epsilon", {"name": "uniform", "low": 1, "high": math.inf}, float, ["finite"]),
        ("privacy.epsilon", {"name": "uniform", "low": 1}, float, ["`privacy.epsilon.high` must be given"]),
        ("privacy.epsilon", {"name": "normal", "mean": 1, "std": -1, "floor": 1}, float, [".std` must be >= 0"]),
        ("privacy.epsilon", {"name": "normal", "mean": 0, "std": 0, "floor": 0}, float, ["be above 0"]),
        ("privacy.epsilon", {"name": "uniform", "low": 1, "high": 2, 3: 4}, float, ["`privacy.epsilon.3`"]),
    ],
)
def test_mistakes_name_key_value_and_way_out(key: str, value: object, kind: type, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolve(key, value, 3, seed=0, kind=kind)
    message = str(caught.value)
    assert message.startswith("`") and "\n" not in message
    for word in words:
        assert word in message


def test_floor_belongs_to_sampled_budgets() -> None:
    with pytest.raises(UserError, match="come with `source: sampled`"):
        resolve("privacy.epsilon", {"name": "dist1", "floor": 0.2}, 20, seed=0)
