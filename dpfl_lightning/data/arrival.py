"""How the records of a configuration arrive: of a public data set, from a user's class or function, or in tables.

A way is a class, registered with the function that `data.class_path` names:

>>> from dpfl_lightning.config.options import DataOptions
>>> arrival_of(DataOptions(name=None, class_path="dpfl_lightning.Population.from_dataframe")).__class__.__name__
'OfTables'
>>> arrival_of(DataOptions()).__class__.__name__
'Distributed'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dpfl_lightning import data
from dpfl_lightning.config.options import OWN_DATA, DataOptions
from dpfl_lightning.config.registry import function_of
from dpfl_lightning.data.columns import Columns
from dpfl_lightning.data.frames import NO_IDS, OF_A_TABLE, table_of
from dpfl_lightning.data.own import own_population
from dpfl_lightning.data.population import Population
from dpfl_lightning.privacy.accounting.units import ID_KEY


class Arrival:
    """How the records of `options` arrive. A subclass is registered by `arrives_by`."""

    def __init__(self, options: DataOptions) -> None:
        self.options = options

    def population(self, clients: int | None, seed: int) -> Population:
        """Return the clients, of which there are so many (None: any), with their records."""
        raise NotImplementedError

    def test_set(self, clients: int | None, seed: int) -> Population | None:
        """Return a population with the test set of a run over sites, which has no records of theirs; None without."""
        return self.population(clients, seed)

    def ordered(self, columns: Sequence[str]) -> DataOptions:
        """Return options that give inputs in the order of these columns of the sites, if they say nothing else."""
        return self.options


class Distributed(Arrival):
    """A public data set, distributed to simulated clients."""

    def population(self, clients: int | None, seed: int) -> Population:
        values = dataclasses.asdict(self.options)
        for key in OWN_DATA:
            del values[key]
        dataset = data.load(values.pop("name"), values.pop("folder"), values.pop("download"))
        for key in ("partition", "groups", "label_noise"):
            if (named := values[key]) is not None:
                values[key] = named.pop("name"), named
        assert clients is not None  # for mypy: `config.options.check` requires it
        return Population.partitioned(dataset, num_clients=clients, seed=seed, **values)


class OfUser(Arrival):
    """Clients that a class or function of a user makes."""

    def population(self, clients: int | None, seed: int) -> Population:
        return self._made(clients, self.options.init_args)

    def test_set(self, clients: int | None, seed: int) -> Population | None:
        return self._made(None, self.options.init_args)  # whose number the sites decide

    def _made(self, clients: int | None, init_args: dict[str, Any]) -> Population:
        assert self.options.class_path is not None  # for mypy
        return own_population(self.options.class_path, init_args, self.options.population_args, clients)


#: the function or method that `data.class_path` names -> how the records arrive, if in another way than `OfUser`
ARRIVALS: dict[Callable[..., Any], type[Arrival]] = {}
Kind = TypeVar("Kind", bound=type[Arrival])


def arrives_by(function: Callable[..., Any]) -> Callable[[Kind], Kind]:
    """Register a class for configurations whose `data.class_path` names this function, or method of a class."""

    def register(kind: Kind) -> Kind:
        ARRIVALS[getattr(function, "__func__", function)] = kind
        return kind

    return register


def arrival_of(options: DataOptions) -> Arrival:
    """Return how the records of a configuration arrive. Raises UserError if the class path cannot be imported."""
    if options.class_path is None:
        return Distributed(options)
    function = function_of("data.class_path", options.class_path)
    return ARRIVALS.get(getattr(function, "__func__", function), OfUser)(options)


@arrives_by(Population.from_dataframe)
class OfTables(OfUser):
    """Tables, of which a server without the sites' records needs the test table alone."""

    def test_set(self, clients: int | None, seed: int) -> Population | None:
        given = self.options.init_args
        if (test := given.get("test")) is None:
            return None
        ids = given.get(ID_KEY)  # the sites have theirs; a test set may do without
        ids = None if ids == NO_IDS else ids
        usual = {name: given.get(name) or {} for name in OF_A_TABLE}
        public = Columns.given(given.get("label"), None, (), given.get("columns") or {}, None)
        table = table_of(test, "test", public.dates, **usual)
        dropped = [*(given.get("drop") or ()), *(one for one in table.frame.columns if one == ids)]
        own = {"df": {"test": table}, "test": table, "drop": dropped, "client": None, ID_KEY: NO_IDS}
        population = self._made(None, {**given, **own})
        return dataclasses.replace(population, schema={**population.schema, ID_KEY: ids})

    def ordered(self, columns: Sequence[str]) -> DataOptions:
        given = self.options.init_args
        if sorted(given.get("features") or columns) != sorted(columns):
            return self.options
        return dataclasses.replace(self.options, init_args={**given, "features": list(columns)})
