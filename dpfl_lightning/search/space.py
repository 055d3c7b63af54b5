"""Search spaces: dotted keys of a configuration, and the values that each may take."""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfl_lightning.config.mapping import with_values
from dpfl_lightning.config.options import OWN_DATA, Options
from dpfl_lightning.config.registry import call
from dpfl_lightning.config.yaml_text import inline
from dpfl_lightning.errors import nearest, require
from dpfl_lightning.privacy.accounting.units import ID_KEY

_SIMPLE = (bool, int, float, str, type(None))

#: objective -> keys that may be searched; a name includes all keys below it
SEARCHED = {
    "set": ("model", "clients.learning_rate", "clients.batch_size"),
    "public": ("rounds", "model", "clients", "privacy", "strategies"),
    "private": ("rounds", "model", "clients", "privacy.clip_norm", "strategies"),
}
#: keys that change neither number, sampling nor noise multiplier of a run's releases, with all keys below them
_SAME_RELEASES = ("clients.learning_rate", "clients.optimizer", "clients.schedule")
#: the same, but beside strategies that plan releases by the size of the model and the clip norm
_SAME_FOR_MOST = ("model", "privacy.clip_norm")
_PLAN_BY_NET = ("biased_selection", "clustered")
#: keys that must be the same in all runs
NEVER = ("clients.count", "clients.reported_epsilon", "privacy.noise_key")
_WHY = {
    "set": "Other keys do not affect models that the server trains on a set. Objective public searches the whole run.",
    "public": "A search cannot choose the data, nor how the run is executed and reported.",
    "private": "The cost of every trial must be known before the first one.",
}
PAID_FOR = "Or search on the clients' records, at a cost: --sweep.objective private."
#: options of `data` that determine which records are public; partition and seed do not
_PUBLIC = ("name", "folder", "public_records", "use_public", *OWN_DATA)


@dataclass(frozen=True)
class Dimension:
    """The values of one dotted key: choices, or a range whose ends are included."""

    key: str
    choices: Mapping[Any, Any] | None = None  # label -> value
    low: float = 0.0
    high: float = 0.0  # with a step, the last value that a step reaches
    step: float | None = None
    log: bool = False  # whether the logarithm is drawn uniformly
    when: Mapping[str, Any] = field(default_factory=dict)  # other key -> value (label) that it must have

    @property
    def whole(self) -> bool:
        """Whether the range has whole numbers: both ends are whole."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def ends(self) -> list[Any]:
        """Return every choice, or both ends of the range, as a trial draws them."""
        return list(self.choices) if self.choices is not None else [self.low, self.high]

    def grid(self) -> list[Any]:
        """Return all values.

        >>> Dimension("model.width", low=8, high=16, step=4).grid()
        [8, 12, 16]
        """
        if self.choices is not None:
            return list(self.choices)
        step = self.step or (1 if self.whole else None)
        must = "be choices or a range with a step for sampler grid"
        require(step is not None and not self.log, f"sweep.space.{self.key}", must, [self.low, self.high])
        return _stepped(self.low, self.high, step or 1)


def _stepped(low: float, high: float, step: float) -> list[Any]:
    """Return the values from `low` to `high` without rounding noise: 0.3, not 0.30000000000000004.

    >>> _stepped(0.1, 0.3, 0.1), _stepped(8, 18, 4)
    ([0.1, 0.2, 0.3], [8, 12, 16])
    """
    values = [low + number * step for number in range(int((high - low) / step + 1e-9) + 1)]
    return [value if isinstance(value, int) else round(value, 12) for value in values]


def parse(space: Mapping[str, Any], objective: str) -> dict[str, Dimension]:
    """Return the dimensions of `sweep.space` by key; raises UserError.

    >>> parse({"model.width": {"low": 8, "high": 32, "step": 8}}, "set")["model.width"].whole
    True
    """
    dimensions: dict[str, Dimension] = {}
    for key, raw in space.items():
        _check_key(key, objective)
        where = f"sweep.space.{key}"
        advice = "For example {choices: [16, 32]} or {low: 0.001, high: 0.1, log: true}."
        require(isinstance(raw, Mapping), where, "be a mapping", raw, advice)
        one_kind = ("choices" in raw) != ("low" in raw)
        require(one_kind, where, "have either choices, or low and high", dict(raw), advice)
        kind = "choices" if "choices" in raw else "range"
        kinds: dict[str, Callable[..., Dimension]] = {"choices": _choices, "range": _range}
        dimension = call(where, kinds, kind, key, **raw)
        _check_when(where, dimension.when, dimensions)
        _check_order(dimension, dict(raw), dimensions)
        dimensions[key] = dimension
    return dimensions


def changes_releases(keys: Iterable[str], strategies: Iterable[str]) -> bool:
    """Return whether one of these keys can change the releases that a run plans, and not only their content.

    Of a user's own `strategies` it is not known what they plan by.

    >>> changes_releases(["model.width"], ["uniform"]), changes_releases(["clients.batch_size"], ["uniform"])
    (False, True)
    >>> changes_releases(["model.width"], ["biased_selection"])
    True
    """
    by_net = any(name in _PLAN_BY_NET or "." in name for name in strategies)
    return not all(below(key, _SAME_RELEASES + (() if by_net else _SAME_FOR_MOST)) for key in keys)


def drawn(dimensions: Mapping[str, Dimension], draw: Callable[[Dimension], Any]) -> dict[str, Any]:
    """Return key -> `draw(dimension)` for the keys whose conditions hold."""
    values: dict[str, Any] = {}
    for key, dimension in dimensions.items():
        if all(other in values and values[other] == value for other, value in dimension.when.items()):
            values[key] = draw(dimension)
    return values


def options_of(
    options: Options,
    dimensions: Mapping[str, Dimension],
    found: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
) -> Options:
    """Return the run's options with `more` and then the drawn values set."""
    values = {key: one if (labels := dimensions[key].choices) is None else labels[one] for key, one in found.items()}
    return with_values(options, {**(more or {}), **values}, "by the sweep")


def probes(dimensions: Mapping[str, Dimension]) -> Iterable[tuple[Dimension, list[dict[str, Any]]]]:
    """Yield, for each key, every choice or both ends, together with only the values that its conditions need."""
    for dimension in dimensions.values():
        needed = _needed(dimension, dimensions)
        yield dimension, [{**needed, dimension.key: end} for end in dimension.ends()]


def _needed(dimension: Dimension, dimensions: Mapping[str, Dimension]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for other, value in dimension.when.items():
        values |= {**_needed(dimensions[other], dimensions), other: value}
    return values


def check_trials_with(options: Options, more: Mapping[str, Any], objective: str) -> None:
    """Raise UserError unless trials, which have the values `more`, have the same public records as the run.

    The user's own data have none: a public search names other data for its trials, which share no file with the run.

    **Privacy** Searching on public records is free only because no client of the later run holds them.
    """
    run_data, trial_data = options.data, options_of(options, {}, {}, more).data
    if run_data.class_path is not None and objective == "public":
        other = (trial_data.class_path, trial_data.init_args) != (run_data.class_path, run_data.init_args)
        must = "name public data of your own with objective public, such as {data.init_args.df: public.csv}"
        require(trial_data.class_path is not None and other, "sweep.trials_with", must, inline(dict(more)), PAID_FOR)
        shared = ", ".join(_shared(_places(trial_data.init_args), _places(run_data.init_args)))
        must = "replace each file of the run's data with objective public, such as {data.init_args.test: null}"
        require(not shared, "sweep.trials_with", must, shared, PAID_FOR)
        return
    for name in _PUBLIC:
        expected, got = getattr(run_data, name), getattr(trial_data, name)
        advice = f"Clients of the run hold records that would be public only in trials: set data.{name} for both."
        key, must = f"sweep.trials_with.data.{name}", f"be that of the run, {inline(expected)}"
        require(got == expected, key, must, inline(got), advice)


def _places(value: Any) -> set[Path]:
    """Return the files and folders that are named in arguments, at any depth."""
    if isinstance(value, str | os.PathLike):
        return {Path(value).resolve()} if os.path.exists(value) else set()
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = (one for name, one in value.items() if name not in _OF_COLUMNS)
    elif isinstance(value, list | tuple | set):
        parts = value
    return {place for part in parts for place in _places(part)}


def _shared(places: set[Path], others: set[Path]) -> list[str]:
    """Return which places are also others, or within them, or hold some of them."""
    return sorted(
        str(one)
        for one in places
        if any(one == other or one in other.parents or other in one.parents for other in others)
    )


#: arguments that name columns, which may be called like a folder
_OF_COLUMNS = frozenset({"label", "client", ID_KEY, "features", "drop", "columns", "classes"})


# ---- one key


def below(key: str, names: Iterable[str]) -> bool:
    """Return whether a dotted key is one of these names, or below one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _check_key(key: Any, objective: str) -> None:
    require(isinstance(key, str), "sweep.space", "have dotted keys of a run", key)
    known = SEARCHED[objective]
    must = f"be {', '.join(known)} or a key below, with objective {objective}"
    advice = f"{nearest(key, known) or nearest(key.partition('.')[0], known)} {_WHY[objective]}".strip()
    require(below(key, known) and not below(key, NEVER), f"sweep.space.{key}", must, key, advice)


def _choices(key: str, choices: Any, when: dict | None = None) -> Dimension:
    where = f"sweep.space.{key}.choices"
    if not isinstance(choices, Mapping):
        require(isinstance(choices, list), where, "be a list or mapping of values", choices)
        for value in choices:
            advice = "Name other values, for example {choices: {first: [1, 2], second: [3, 4]}}."
            require(isinstance(value, _SIMPLE), where, "be numbers, words, true, false or null", value, advice)
        require(len({(type(v), v) for v in choices}) == len(choices), where, "be different", choices)
        choices = {value: value for value in choices}
    require(bool(choices), where, "be a list or mapping of values", choices)
    _check_inside(key, where, choices.values())
    return Dimension(key, dict(choices), when=when or {})


def _range(
    key: str, low: float, high: float, step: float | None = None, log: bool = False, when: dict | None = None
) -> Dimension:
    where = f"sweep.space.{key}"
    require(low < high, f"{where}.low", f"be below high, {high}", low)
    require(not log or low > 0, f"{where}.low", "be above 0 with log: true", low)
    require(step is None or step > 0, f"{where}.step", "be above 0", step)
    require(step is None or not log, f"{where}.step", "be left out with log: true", step)
    doubtful = isinstance(low, int) != isinstance(high, int) and float(low).is_integer() and float(high).is_integer()
    advice = f"Write {math.floor(high)} for whole numbers, or {float(low)} and {float(high)} for real numbers."
    require(not doubtful, f"{where}.high", f"have the same type as low, {low}", high, advice)
    whole = isinstance(low, int) and isinstance(high, int)
    require(step is None or not whole or isinstance(step, int), f"{where}.step", "be whole in a whole range", step)
    return Dimension(key, None, low, high if step is None else _stepped(low, high, step)[-1], step, log, when or {})


def _check_when(where: str, when: Mapping[str, Any], above: Mapping[str, Dimension]) -> None:
    for other, value in when.items():
        require(other in above, f"{where}.when", f"name a key above it ({', '.join(above) or 'there is none'})", other)
        choices = above[other].choices
        must = f"be a choice of {other}" + ("" if choices is None else f" ({', '.join(map(str, choices))})")
        fits = choices is not None and value in list(choices)  # the value may be a list, which has no hash
        require(fits, f"{where}.when.{other}", must, value)


def _check_inside(key: str, where: str, choices: Iterable[Any]) -> None:
    """Raise UserError if a choice sets a key below `key` that must not be searched."""
    for value in choices:
        for name, inner in value.items() if isinstance(value, Mapping) else ():
            below = f"{key}.{name}"
            advice = "It must be the same in all trials; set it for the run."
            require(below not in NEVER, where, f"leave {below} out", value, advice)
            _check_inside(below, where, [inner])


def _check_order(dimension: Dimension, raw: Mapping[str, Any], above: Mapping[str, Dimension]) -> None:
    """Raise UserError if the value of one key would overwrite the value drawn for another."""
    key, where = dimension.key, f"sweep.space.{dimension.key}"
    later = [other for other in above if other.startswith(f"{key}.")]
    require(not later, where, "precede the keys below it, which it would replace", raw, f"Put it before {later}.")
    for other, parent in above.items():
        values = parent.choices or {}
        if key.startswith(f"{other}.") and None in values.values():
            must = f"have a `when` of {other} with a value that is not null, because a key below it would undo null"
            require(values.get(dimension.when.get(other)) is not None, where, must, raw.get("when"))
