import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpfl_lightning.config.options import all_keys
from dpfl_lightning.config.per_client import resolve
from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS, NORMAL_MIXTURES, UNIFORMS
from dpfl_lightning.config.typed import of_one_client
from dpfl_lightning.errors import UserError

DISTS = [f"dist{i}" for i in range(1, 10)]


def test_one_value_or_a_list_becomes_one_value_a_client():
    assert resolve("privacy.delta", 1e-4, 3, seed=0) == (1e-4, 1e-4, 1e-4)
    assert resolve("clients.batch_size", 8, 2, seed=0) == (8, 8)
    assert isinstance(resolve("privacy.epsilon", 2, 1, seed=0)[0], float)
    assert resolve("privacy.epsilon", [3.0, 1.0, math.inf], 3, seed=0) == (3.0, 1.0, math.inf)


@pytest.mark.e2e
@given(num_clients=st.integers(1, 40), seed=st.integers(0, 2**40))
def test_every_named_distribution_stays_in_its_range(num_clients: int, seed: int):
    def drawn(key: str, kind: type = float, **options: object) -> tuple:
        values = resolve(key, options, num_clients, seed)
        assert len(values) == num_clients
        assert values == resolve(key, options, num_clients, seed)
        assert all(type(value) is kind for value in values)
        return values

    assert all(1 <= v <= 2.5 for v in drawn("clients.learning_rate", name="uniform", low=1, high=2.5))
    assert set(drawn("clients.batch_size", int, name="uniform", low=3, high=4)) <= {3, 4}
    assert set(drawn("clients.batch_size", int, name="choice", values=[16, 64])) <= {16, 64}
    assert min(drawn("privacy.epsilon", name="normal", mean=1, std=2, floor=0.3)) >= 0.3
    assert min(drawn("clients.local_epochs", int, name="normal", mean=1, std=2, floor=1)) >= 1
    assert min(drawn("privacy.epsilon", name="dist1", source="sampled")) >= 0.15


def test_options_and_seeds_are_drawn_independently():
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


def test_published_lists_are_those_of_the_release():
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


@pytest.mark.parametrize("dist", DISTS)
def test_published_and_sampled_budgets_fit_their_distribution(dist: str):
    low, high = UNIFORMS.get(dist, (0.15, math.inf))
    assert all(low <= epsilon <= high for epsilons in EPSILONS[dist].values() for epsilon in epsilons)
    mixture = NORMAL_MIXTURES.get(dist, ((1.0, (low + high) / 2, 0),))
    assert sum(weight for weight, _, _ in mixture) == pytest.approx(1)
    mean = sum(weight * mean for weight, mean, _ in mixture)
    values = resolve("privacy.epsilon", {"name": dist, "source": "sampled", "floor": 1e-9}, 20_000, seed=3)
    # Five standard errors, false alarm below 1e-6; the floor moves dist1's mean by 0.0085, dist4's by 0.002.
    assert abs(statistics.fmean(values) - mean) < 5 * statistics.stdev(values) / 20_000**0.5 + 0.01


def test_mixture_components_have_their_shares():
    values = resolve("privacy.epsilon", {"name": "dist2", "source": "sampled"}, 20_000, seed=0)
    shares = [sum(low < v <= high for v in values) / len(values) for low, high in ((0, 0.3), (0.5, 1.5), (2.5, 99))]
    # Standard errors 0.003; 0.6 % of the third component lie below 2.5.
    assert shares == pytest.approx([0.2, 0.6, 0.2], abs=0.016)


def test_published_budgets_by_name_and_scale():
    assert resolve("privacy.epsilon", {"name": "dist7"}, 40, seed=9) == EPSILONS["dist7"][40]
    scaled = resolve("privacy.epsilon", {"name": "dist7", "scale": 10}, 20, seed=0)
    assert scaled == pytest.approx([10 * epsilon for epsilon in EPSILONS["dist7"][20]])
    assert resolve("clients.batch_size", {"name": "published"}, 60, seed=0) == BATCH_SIZES[60]


# ---- mistakes


MISTAKES = [
    ("privacy.epsilon", [1.0, 2.0], "`privacy.epsilon` must have 3 values", "got 2"),
    ("privacy.epsilon", 0, "be a number > 0, got 0"),
    ("privacy.epsilon", [1, 2, -1], "be a number > 0, got -1", "client 2"),
    ("privacy.epsilon", math.nan, "be a number"),
    ("privacy.delta", 1, "be a number in [0, 1), got 1"),
    ("privacy.noise_multiplier", -0.1, "be a number >= 0"),
    ("clients.learning_rate", math.inf, "finite"),
    ("clients.batch_size", 2.5, "be a whole number in [1, 1e9], got 2.5"),
    ("privacy.epsilon", {"name": "dist11"}, "`privacy.epsilon.name`", "Did you mean `dist1`?"),
    ("privacy.epsilon", {"name": "dist1"}, "20, 40 or 60 clients", "got 3", "source: sampled"),
    ("privacy.epsilon", {"name": "dist1", "sorce": "sampled"}, "Did you mean `source`?"),
    ("privacy.epsilon", {"name": "dist1", "source": "sampled", "scale": -1}, "be a number > 0"),
    ("privacy.epsilon", {"name": "dist1", "source": "sampled", "floor": 0}, "epsilon.floor` must be a number > 0"),
    ("clients.learning_rate", {"name": "dist1"}, "be one of"),
    ("clients.batch_size", {"name": "published"}, "20, 40 or 60 clients", "choice"),
    ("clients.batch_size", {"name": "choice", "values": 16}, "`clients.batch_size.values` must be a list"),
    ("clients.batch_size", {"name": "uniform", "low": 4, "high": 3}, "at most `high`"),
    ("privacy.epsilon", {"name": "uniform", "low": 1, "high": math.inf}, "finite"),
    ("privacy.epsilon", {"name": "uniform", "low": 1}, "`privacy.epsilon.high` must be given"),
    ("privacy.epsilon", {"name": "normal", "mean": 1, "std": -1, "floor": 1}, ".std` must be a number >= 0"),
    ("privacy.epsilon", {"name": "uniform", "low": 1, "high": 2, 3: 4}, "`privacy.epsilon.3`"),
]


@pytest.mark.parametrize(("key", "value", "words"), [(key, value, words) for key, value, *words in MISTAKES])
def test_a_mistake_names_key_value_and_way_out(key: str, value: object, words: list[str]):
    with pytest.raises(UserError) as caught:
        resolve(key, value, 3, seed=0)
    message = str(caught.value)
    assert message.startswith("`") and "\n" not in message
    assert not [word for word in words if word not in message], message


def test_no_range_is_guessed():
    """Every option with a value for each client declares its range, and an option that nobody declared has none."""
    kinds = {key: of_one_client(known.hint) for key, known in all_keys().items()}
    assert not [key for key, kind in kinds.items() if kind and not kind.__metadata__]
    with pytest.raises(KeyError):
        resolve("clients.weight_decay", 1.0, 3, seed=0)


def test_floor_belongs_to_sampled_budgets():
    with pytest.raises(UserError, match="come with `source: sampled`"):
        resolve("privacy.epsilon", {"name": "dist1", "floor": 0.2}, 20, seed=0)


NAMES = ("berlin", "oslo", "2")


def test_values_by_name_go_to_the_client_of_that_name():
    assert resolve("privacy.epsilon", {2: 3, "oslo": 2, "berlin": 1}, 3, seed=0, names=NAMES) == (1.0, 2.0, 3.0)
    assert resolve("clients.batch_size", {"2": 3, "oslo": 2, "berlin": 1}, 3, 0, NAMES) == (1, 2, 3)
    assert resolve("privacy.epsilon", [1, 2, 3], 3, seed=0, names=NAMES) == (1.0, 2.0, 3.0), "a list: in their order"


@pytest.mark.parametrize(
    ("value", "names", "words"),
    [
        ({"berlin": 1, "oslo": 2}, NAMES, "one value for each client (berlin, oslo, 2), got no value for 2."),
        ({"berlin": 1, "oslo": 2, "2": 1, "rome": 1}, NAMES, "got the unknown rome."),
        ({"berlin": 1, "osl": 2, "2": 1}, NAMES, "got the unknown osl and no value for oslo. Did you mean `oslo`?"),
        ({"berlin": 1, "oslo": 2, "2": -1}, NAMES, "be a number > 0, got -1. It is the value of client 2."),
        ({"berlin": "a", "oslo": 2, "2": 1}, NAMES, "be a number > 0, got 'a'. It is the value of client berlin."),
        ({"berlin": 1}, (), "be one value or a list for clients without names, got {'berlin': 1}. Give a list"),
        ({"2": 1, 2: 1, "berlin": 1, "oslo": 1}, NAMES, "name each client once"),
    ],
)
def test_mistakes_in_values_by_name(value: dict, names: tuple, words: str):
    with pytest.raises(UserError) as caught:
        resolve("privacy.epsilon", value, 3, seed=0, names=names)
    assert words in str(caught.value)
