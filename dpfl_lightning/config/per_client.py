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
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, get_args

import numpy as np
from annotated_types import Interval

from dpfl_lightning.config.options import NotNegative, Positive, all_keys
from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS, NORMAL_MIXTURES, UNIFORMS
from dpfl_lightning.config.registry import call
from dpfl_lightning.config.typed import That, of_one_client, valid
from dpfl_lightning.errors import UserError, nearest, require

Finite = Annotated[float, Interval(gt=-math.inf, lt=math.inf)]

# The paper states no floor; its published lists show 0.25 for dist1. This one lies just above the smallest epsilon that
# the paper's accountant can certify.
_FLOOR = 0.15


def by_client(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Return whether the value of an option is a mapping from the clients' names, which is no distribution."""
    return isinstance(value, Mapping) and len(value) > 0 and "name" not in value


def resolve(key: str, value: object, num_clients: int, seed: int, names: Sequence[str] = ()) -> tuple[Any, ...]:
    """Return the value of one option for each client, or raise UserError. Equal arguments give equal values.

    Args:
        key: dotted name of the option, which determines type and range. Options with different names are drawn
            independently.
        value: a number, a list of `num_clients` numbers, a mapping from `names` to numbers, or a mapping with a `name`
            (see the top of this module).
        names: of the clients; empty if they have none.

    >>> resolve("privacy.epsilon", {"oslo": 4, "berlin": 1}, num_clients=2, seed=0, names=("berlin", "oslo"))
    (1.0, 4.0)
    >>> resolve("clients.batch_size", [16, 64], num_clients=2, seed=0)
    (16, 64)
    >>> resolve("privacy.epsilon", {"name": "dist1"}, num_clients=20, seed=0)[:3]
    (2.81, 1.69, 1.74)
    """
    hint = of_one_client(all_keys()[key].hint)
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return (valid(key, value, hint),) * num_clients
    values: Sequence[Any]
    if by_client(value):
        by_name = {str(name): one for name, one in value.items()}
        require(len(by_name) == len(value), key, "name each client once", list(value))
        values = _in_order(key, by_name, names)
    elif isinstance(value, Mapping):
        options = {str(option): one for option, one in value.items()}
        # The key is part of the seed, so that the options of a client are drawn independently.
        draw = _Draw(key, str(options.pop("name", None)), num_clients, [seed, *key.encode()], get_args(hint)[0])
        values = call(key, _ANYWHERE | _ONLY_FOR.get(key, {}), draw.name, draw, **options)
    else:
        advice = "Give one number for all clients, or a list with one number per client."
        must = f"have {num_clients} values, one per client"
        require(len(value) == num_clients, key, must, len(value), advice)
        values = value
    return tuple(
        valid(key, one, hint, f"It is the value of client {names[client] if names else client}.")
        for client, one in enumerate(values)
    )


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
    kind: type


def _uniform(draw: _Draw, low: Finite, high: Finite) -> list:
    low, high = valid(f"{draw.key}.low", low, draw.kind), valid(f"{draw.key}.high", high, draw.kind)
    require(low <= high, f"{draw.key}.low", f"be at most `high`, {high}", low)
    rng = np.random.default_rng(draw.seed)
    if draw.kind is int:
        return rng.integers(int(low), int(high), size=draw.num_clients, endpoint=True).tolist()
    return rng.uniform(low, high, size=draw.num_clients).tolist()


def _choice(draw: _Draw, values: Annotated[Sequence[Any], That(bool, "that is not empty")]) -> list:
    return [values[i] for i in np.random.default_rng(draw.seed).integers(len(values), size=draw.num_clients)]


def _normal(draw: _Draw, mean: Finite, std: NotNegative, floor: float) -> list:
    values = np.maximum(np.random.default_rng(draw.seed).normal(mean, std, size=draw.num_clients), floor)
    return (np.rint(values).astype(int) if draw.kind is int else values).tolist()


def _published_batch_sizes(draw: _Draw) -> list:
    return list(_published(draw, BATCH_SIZES, "Give a list, or {name: choice, values: [16, 32, 64, 128]}."))


def _budgets(
    draw: _Draw,
    source: Literal["published", "sampled"] = "published",
    scale: float = 1.0,
    floor: Positive | None = None,
) -> list:
    if source == "sampled":
        epsilons = _sampled_epsilons(draw, _FLOOR if floor is None else floor)
    else:
        advice = f"To draw budgets, set {{name: {draw.name}, source: sampled}}."
        epsilons = _published(draw, EPSILONS[draw.name], advice)
        require(floor is None, f"{draw.key}.floor", "come with `source: sampled`", floor, "Leave it out.")
    return [epsilon * scale for epsilon in epsilons]


def _sampled_epsilons(draw: _Draw, floor: float) -> Sequence[float]:
    """Draw budgets from a normal distribution, a mixture of normals (each client draws its component), or uniform."""
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


_ANYWHERE: dict[str, Callable[..., list]] = {"uniform": _uniform, "choice": _choice, "normal": _normal}
_DISTS: dict[str, Callable[..., list]] = dict.fromkeys(sorted(EPSILONS), _budgets)
#: names that are valid for one option only
_ONLY_FOR: dict[str, dict[str, Callable[..., list]]] = {
    "clients.batch_size": {"published": _published_batch_sizes},
    "privacy.epsilon": _DISTS,
    "clients.reported_epsilon": _DISTS,
}
