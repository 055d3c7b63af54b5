"""Options per client: one value for all clients, a mapping from their names, a list, or a named distribution.

A mapping such as `{berlin: 1, oslo: 4}` has one value for each client by name. A list has one value per client, in the
order of `Population.names`. A mapping with the key `name` is a distribution.

The distributions and their options:

* `{name: uniform, low: , high: }`: uniform between `low` and `high` (both included for whole-number options)
* `{name: choice, values: [...]}`: one of `values` for each client, with equal probability
* `{name: normal, mean: , std: , floor: }`: normal; draws below `floor` are raised to it
* `{name: dist1}` ... `{name: dist9}`: privacy budgets of the noise-aware paper. `source: published` (default)
  uses its lists for 20, 40 or 60 clients; `source: sampled` draws from its distribution (draws below
  `floor`, 0.15, are raised to it); `scale` multiplies the budgets (10 for CIFAR-100)
* `{name: published}`: the paper's batch sizes for 20, 40 or 60 clients
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS, NORMAL_MIXTURES, UNIFORMS
from dpfl_lightning.config.registry import call
from dpfl_lightning.config.typed import converted, in_words
from dpfl_lightning.errors import UserError, nearest, require

Kind = type[int] | type[float]


class Bound(NamedTuple):
    """A condition on every value of an option: in words (after "must"), and as a test."""

    words: str
    holds: Callable[[Any], bool]


# The paper states no floor; its published lists show 0.25 for dist1. This one lies just above the smallest epsilon that
# the paper's accountant can certify.
_FLOOR = 0.15
_NOT_NEGATIVE = Bound("be >= 0 and finite", lambda value: 0 <= value < math.inf)
_POSITIVE = Bound("be above 0", lambda value: value > 0)
_POSITIVE_FINITE = Bound("be above 0 and finite", lambda value: 0 < value < math.inf)
# By the last part of an option's key; all other values must be above 0.
_BOUNDS = {
    "delta": Bound("be in [0, 1)", lambda value: 0 <= value < 1),
    "learning_rate": _POSITIVE_FINITE,
    "clip_norm": _POSITIVE_FINITE,
    "noise_multiplier": _NOT_NEGATIVE,
    "latency_seconds": _NOT_NEGATIVE,
    "compute_seconds": _NOT_NEGATIVE,
    "dropout": Bound("be in [0, 1]", lambda value: 0 <= value <= 1),
}


def by_client(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Return whether the value of an option is a mapping from the clients' names, which is no distribution."""
    return isinstance(value, Mapping) and len(value) > 0 and "name" not in value


def resolve(
    key: str, value: object, num_clients: int, seed: int, kind: Kind = float, names: Sequence[str] = ()
) -> tuple[Any, ...]:
    """Return the value of one option for each client, or raise UserError. Equal arguments give equal values.

    Args:
        key: dotted name of the option. Options with different names are drawn independently. The last part determines
            the range.
        value: a number, a list of `num_clients` numbers, a mapping from `names` to numbers, or a mapping with a `name`
            (see the top of this module).
        kind: `int` for an option that counts something; normal draws are then rounded.
        names: of the clients; empty if they have none.

    >>> resolve("privacy.epsilon", {"oslo": 4, "berlin": 1}, num_clients=2, seed=0, names=("berlin", "oslo"))
    (1.0, 4.0)
    >>> resolve("clients.batch_size", [16, 64], num_clients=2, seed=0, kind=int)
    (16, 64)
    >>> resolve("privacy.epsilon", {"name": "dist1"}, num_clients=20, seed=0)[:3]
    (2.81, 1.69, 1.74)
    """
    values: Sequence[Any]
    one_each = isinstance(value, Mapping | Sequence) and not isinstance(value, str)
    if by_client(value):
        by_name = {str(name): one for name, one in value.items()}
        require(len(by_name) == len(value), key, "name each client once", list(value))
        values = _in_order(key, by_name, names)
    elif isinstance(value, Mapping):
        known = _ANYWHERE | _ONLY_FOR.get(key.rpartition(".")[2], {})
        options = {str(option): one for option, one in value.items()}
        # The key is part of the seed, so that the options of a client are drawn independently.
        draw = _Draw(key, str(options.pop("name", None)), num_clients, [seed, *key.encode()], kind)
        values = call(key, known, draw.name, draw, **options)
    elif isinstance(value, Sequence) and one_each:
        advice = "Give one number for all clients, or a list with one number per client."
        must = f"have {num_clients} values, one per client"
        require(len(value) == num_clients, key, must, len(value), advice)
        values = value
    else:
        values = [value]
    bound = _BOUNDS.get(key.rpartition(".")[2], _POSITIVE)
    for client, one in enumerate(values):
        advice = f"It is the value of client {names[client] if names else client}." if one_each else ""
        _check_number(key, one, kind, advice)
        require(bound.holds(one), key, bound.words, one, advice)
    resolved = tuple(kind(one) for one in values)
    return resolved if one_each else resolved * num_clients


def _in_order(key: str, values: Mapping[str, Any], names: Sequence[str]) -> list:
    """Return the values of a mapping in the order of the clients' names."""
    advice = "Give a list with one value per client, or a distribution, which has a `name`."
    require(len(names) > 0, key, "be one value or a list for clients without names", dict(values), advice)
    known = set(names)
    unknown, missing = [name for name in values if name not in known], [name for name in names if name not in values]
    got = [f"the unknown {_listed(unknown)}"] * bool(unknown) + [f"no value for {_listed(missing)}"] * bool(missing)
    if got:
        hint = nearest(unknown[0], names) if unknown else ""
        must = f"have one value for each client ({_listed(names)})"
        raise UserError(f"`{key}` must {must}, got {' and '.join(got)}. {hint}".rstrip())
    return [values[name] for name in names]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + ", ..." * (len(names) > 20)


class _Draw(NamedTuple):
    """Arguments that every named distribution receives; its options follow by keyword."""

    key: str
    name: str
    num_clients: int
    seed: Sequence[int]
    kind: Kind


def _uniform(draw: _Draw, low: float, high: float) -> list:
    _check_number(f"{draw.key}.low", low, draw.kind)
    _check_number(f"{draw.key}.high", high, draw.kind)
    must = f"be finite and at most `high`, {high}"
    require(-math.inf < low <= high < math.inf, f"{draw.key}.low", must, low)
    rng = np.random.default_rng(draw.seed)
    if draw.kind is int:
        return rng.integers(int(low), int(high), size=draw.num_clients, endpoint=True).tolist()
    return rng.uniform(low, high, size=draw.num_clients).tolist()


def _choice(draw: _Draw, values: Any) -> list:
    listed = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
    require(listed, f"{draw.key}.values", "be a list of at least one number", values)
    return [values[i] for i in np.random.default_rng(draw.seed).integers(len(values), size=draw.num_clients)]


def _normal(draw: _Draw, mean: float, std: float, floor: float) -> list:
    require(0 <= std < math.inf, f"{draw.key}.std", "be >= 0 and finite", std)
    values = np.maximum(np.random.default_rng(draw.seed).normal(mean, std, size=draw.num_clients), floor)
    return (np.rint(values).astype(int) if draw.kind is int else values).tolist()


def _published_batch_sizes(draw: _Draw) -> list:
    return list(_published(draw, BATCH_SIZES, "Give a list, or {name: choice, values: [16, 32, 64, 128]}."))


def _budgets(draw: _Draw, source: str = "published", scale: float = 1.0, floor: float | None = None) -> list:
    sources = ("published", "sampled")
    require(source in sources, f"{draw.key}.source", "be published or sampled", source, nearest(source, sources))
    if source == "sampled":
        epsilons = _sampled_epsilons(draw, _FLOOR if floor is None else floor)
    else:
        advice = f"To draw budgets, set {{name: {draw.name}, source: sampled}}."
        epsilons = _published(draw, EPSILONS[draw.name], advice)
        require(floor is None, f"{draw.key}.floor", "come with `source: sampled`", floor, "Leave it out.")
    return [epsilon * scale for epsilon in epsilons]


def _sampled_epsilons(draw: _Draw, floor: float) -> Sequence[float]:
    """Draw budgets from a normal distribution, a mixture of normals (each client draws its component), or uniform."""
    require(floor > 0, f"{draw.key}.floor", "be above 0", floor)
    rng = np.random.default_rng(draw.seed)
    if draw.name in UNIFORMS:
        draws = rng.uniform(*UNIFORMS[draw.name], size=draw.num_clients)
    else:
        probability, mean, std = np.array(NORMAL_MIXTURES[draw.name]).T
        component = rng.choice(len(probability), size=draw.num_clients, p=probability)
        draws = rng.normal(mean[component], std[component])
    return np.maximum(draws, floor).tolist()


def _published(draw: _Draw, lists: Mapping[int, tuple], advice: str) -> tuple:
    """Return the list that was published for this number of clients."""
    must = "be used with 20, 40 or 60 clients, for which lists were published"
    require(draw.num_clients in lists, draw.key, must, draw.num_clients, advice)
    return lists[draw.num_clients]


def _check_number(key: str, value: Any, kind: Kind, advice: str = "") -> None:
    try:
        number = not math.isnan(converted(kind, value))
    except TypeError:
        number = False
    require(number, key, f"be {in_words(kind)}", value, advice)


_ANYWHERE: dict[str, Callable[..., list]] = {"uniform": _uniform, "choice": _choice, "normal": _normal}
# Names that are valid for one option only, by the last part of its key.
_DISTS: dict[str, Callable[..., list]] = dict.fromkeys(sorted(EPSILONS), _budgets)
_ONLY_FOR: dict[str, dict[str, Callable[..., list]]] = {
    "batch_size": {"published": _published_batch_sizes},
    "epsilon": _DISTS,
    "reported_epsilon": _DISTS,
}
