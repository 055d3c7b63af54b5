"""Optuna's samplers, which choose the next trial, and pruners, which end a trial early, by name."""

from collections.abc import Callable, Mapping
from typing import Annotated

from annotated_types import Interval
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, GPSampler, GridSampler, NSGAIISampler, QMCSampler, RandomSampler, TPESampler

from dpfl_lightning.config.registry import call
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.search.options import SweepOptions
from dpfl_lightning.search.space import Dimension

Dimensions = Mapping[str, Dimension]
_Several = Annotated[int, Interval(ge=2)]

#: samplers whose draws do not depend on results
INDEPENDENT = ("random", "grid", "qmc")


# Each sampler gets the dimensions, the seed of this worker and the seed that all workers share; options follow.


def _tpe(
    _: Dimensions, seed: int | None, shared: int, startup_trials: int = 10, multivariate: bool = False
) -> TPESampler:
    return TPESampler(n_startup_trials=startup_trials, multivariate=multivariate, constant_liar=True, seed=seed)


def _random(_: Dimensions, seed: int | None, shared: int) -> BaseSampler:
    return RandomSampler(seed)


def _grid(dimensions: Dimensions, seed: int | None, shared: int) -> BaseSampler:
    conditional = [key for key, dimension in dimensions.items() if dimension.when]
    require(not conditional, "sweep.sampler.name", "not be grid if keys have a `when`", conditional)
    return GridSampler({key: dimension.grid() for key, dimension in dimensions.items()}, shared)


def _qmc(_: Dimensions, seed: int | None, shared: int) -> BaseSampler:
    return QMCSampler(seed=shared, scramble=True, independent_sampler=RandomSampler(seed))


def _gp(_: Dimensions, seed: int | None, shared: int, startup_trials: int = 10) -> BaseSampler:
    return GPSampler(seed=seed, n_startup_trials=startup_trials)


def _nsga2(_: Dimensions, seed: int | None, shared: int, population_size: _Several = 50) -> BaseSampler:
    return NSGAIISampler(population_size=population_size, seed=seed)


def _median(startup_trials: int = 5, warmup_steps: int = 0) -> BasePruner:
    return MedianPruner(startup_trials, warmup_steps)


def _halving(min_resource: int = 1, reduction_factor: int = 4) -> BasePruner:
    return SuccessiveHalvingPruner(min_resource, reduction_factor)


def _hyperband(min_resource: int = 1, reduction_factor: _Several = 3) -> BasePruner:
    return HyperbandPruner(min_resource, reduction_factor=reduction_factor)


SAMPLERS: dict[str, Callable[..., BaseSampler]] = {
    "tpe": _tpe,
    "random": _random,
    "grid": _grid,
    "qmc": _qmc,
    "gp": _gp,
    "nsga2": _nsga2,
}
PRUNERS: dict[str, Callable[..., BasePruner]] = {
    "none": NopPruner,
    "median": _median,
    "halving": _halving,
    "hyperband": _hyperband,
}


def sampler(sweep: SweepOptions, dimensions: Dimensions, seed: int | None, shared: int) -> BaseSampler:
    """Return the sampler that draws the values of the next trial.

    `seed` seeds this worker's draws; None draws it at random. `shared` seeds the order in which workers process a grid
    or a sequence: with different orders, they would omit some points and repeat others.
    """
    options = dict(sweep.sampler)
    name, given = str(options.pop("name")), options.pop("seed", None)
    whole = given is None or (isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 2**32)
    require(whole, "sweep.sampler.seed", "be a whole number in [0, 2^32)", given)
    return call("sweep.sampler", SAMPLERS, name, dimensions, seed, shared, **options)


def pruner(sweep: SweepOptions) -> BasePruner:
    """Return the pruner, which ends trials that are worse than others."""
    options = dict(sweep.pruner)
    try:
        return call("sweep.pruner", PRUNERS, str(options.pop("name")), **options)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"`sweep.pruner` must have options in range, got {sweep.pruner}: {error}") from None
