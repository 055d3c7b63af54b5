"""Clients that a user's class or function makes, as `data.class_path` of a configuration names it."""

from collections.abc import Mapping, Sequence
from typing import Any

from dpfl_lightning.config.registry import made_by, users_code
from dpfl_lightning.data.modules import is_datamodule
from dpfl_lightning.data.population import Population
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.accounting.units import ID_KEY

_OF_DATASETS = ("held_out", "seed", "num_classes", "classes", "lazy", f"{ID_KEY}s")


def own_population(
    class_path: str,
    init_args: Mapping[str, Any],
    arguments: Mapping[str, Any],
    num_clients: int | None,
) -> Population:
    """Return the population that `class_path` makes; `arguments` are of `from_datasets` or `from_datamodule`.

    Raises UserError if it makes something else, or another number of clients than `num_clients` (None: any).
    """
    made = made_by("data", class_path, init_args)
    with users_code("data.class_path", class_path):  # its data sets and loaders are read
        population = _population(made, arguments)
    advice = "Leave it out: the data decide it."
    fits = num_clients in (None, population.num_clients)
    require(fits, "clients.count", f"be {population.num_clients}, the clients of {class_path}", num_clients, advice)
    return population


def _population(made: Any, arguments: Mapping[str, Any]) -> Population:
    if isinstance(made, Population):
        require(not arguments, "data.population_args", "be left out if class_path makes a Population", dict(arguments))
        return made
    if is_datamodule(made):
        _check_names(arguments, (*_OF_DATASETS[:-1], "client", ID_KEY))
        return Population.from_datamodule(made, **arguments)
    if isinstance(made, Mapping | Sequence) and not isinstance(made, str):
        _check_names(arguments, _OF_DATASETS)
        return Population.from_datasets(made, **arguments)
    kinds = "a Population, a list or mapping of data sets, or a LightningDataModule"
    raise UserError(f"`data.class_path` must return {kinds}, got {type(made).__name__}.")


def _check_names(arguments: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(set(arguments) - set(known))
    require(not unknown, "data.population_args", f"be arguments of a population ({', '.join(known)})", unknown)
