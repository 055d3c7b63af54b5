"""The configuration of a site: which records its node serves, and the limits on what they may spend."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_map

from dpfl_lightning.build import build_population
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.config.options import Options, changed_options
from dpfl_lightning.config.per_client import resolve
from dpfl_lightning.data import Population
from dpfl_lightning.errors import require, require_one_of
from dpfl_lightning.federated.client.identity import deciding_options
from dpfl_lightning.privacy.accounting.units import RECORD, Relation
from dpfl_lightning.sites.node.state import Settings

#: keys of a configuration that a site decides; the plan decides all others
_OF_A_SITE = {"seed", "clients.count", "model.class_path", "model.init_args"} | {
    f"privacy.{name}" for name in ("epsilon", "delta", "adjacency", "noise_key", *RECORD.options())
}


def settings_of(options: Options, name: str, client: str | None = None) -> Settings:
    """Return the settings of the site `name` from its configuration; `client` (default: the name) has its records.

    Raises UserError for a key that the site does not decide, or limits that are no numbers.
    """
    changed = changed_options(options)
    changed.pop("data", None)
    for section, value in changed.items():
        given = {f"{section}.{one}": value[one] for one in value} if isinstance(value, Mapping) else {section: value}
        for key in given.keys() - _OF_A_SITE:
            advice = "The plan that the site accepts decides it."
            require(False, key, "be left out of the configuration of a site", given[key], advice)
    privacy = options.privacy
    assert privacy is not None  # for mypy: null is refused above
    given = {f"privacy.{key}": getattr(privacy, key) for key in ("epsilon", "delta")}
    epsilon, delta = (resolve(key, limit, 1, options.seed, names=(name,))[0] for key, limit in given.items())
    require(math.isfinite(epsilon), "privacy.epsilon", "be finite, as it limits what this site spends", epsilon)
    data = dataclasses.asdict(options.data)
    data |= {name: tree_map(_absolute, data[name]) for name in ("folder", "init_args")}
    config = {"seed": options.seed, "data": data, "clients": {"count": options.clients.count}, "privacy": None}
    model = deciding_options({"model": options.model})["model"]  # as a plan states it
    fixed = model.get("class_path"), model.get("init_args") or {}
    relation = Relation.of(privacy)
    return Settings(name, client or name, config, epsilon, delta, *relation, *fixed, privacy.noise_key)


def _absolute(value: Any) -> Any:
    """Return a path of a file, or one with a slash, as it is from any folder in which the node is served."""
    is_path = isinstance(value, str) and (os.path.isfile(value) or (os.sep in value and os.path.exists(value)))
    return str(Path(value).absolute()) if is_path else value


def site_population(settings: Settings) -> tuple[Population, int]:
    """Return the population that a site's configuration names, and which of its clients the site is.

    Raises UserError if there is none, or it has several clients and none of the site's name.
    """
    population = build_population(from_mapping(settings.config)).counting(settings.unit)
    names = [population.name_of(client) for client in range(population.num_clients)]
    if len(names) == 1:
        return population, 0
    require_one_of(names, "--client", settings.client)
    return population, names.index(settings.client)


def only(population: Population, client: int, names: tuple[str, ...]) -> Population:
    """Return the records of one client alone; `names` has its name in the plan, or is empty."""
    train, held_out = [population.train_of[client]], [population.held_out_of[client]]
    parts: dict[str, Any] = {"train_of": train, "held_out_of": held_out, "names": names}
    return dataclasses.replace(population, **parts, test=None, public=None, groups=None)
