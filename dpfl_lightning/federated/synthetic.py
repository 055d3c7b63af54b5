"""Random data of a population's public shape: for checks and timing before anything private is touched."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from dpfl_lightning.client import ClientModule
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.engine import Engine


def synthetic_batch(population: Population, records: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random data of the population's public shape: for self-checks and timing, never private records."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(records, *population.input_shape, generator=generator)
    if population.y.is_floating_point():
        y = torch.randn(records, generator=generator)
    else:
        y = torch.randint(population.num_classes, (records,), generator=generator)
    return x.to(device, population.x.dtype), y.to(device, population.y.dtype)


@torch.no_grad()
def seconds_per_record(engine: Engine, module: ClientModule, population: Population, batch_size: int) -> float:
    """Seconds of one record's share of a step, from three steps on random data: an estimate for progress."""
    x, y = synthetic_batch(population, records=batch_size, device=module.device)
    params, times = module.unflatten(module.flat), []
    for _ in range(3):
        begun = time.perf_counter()
        float(engine.clipped_sum(params, x, y, 1.0).sum())
        times.append(time.perf_counter() - begun)
    return min(times) / len(x) / (engine.workers or 1)


def check_fits(module: ClientModule, population: Population) -> None:
    """Refuse a module that cannot take the population's records, before a run begins.

    Raises:
        UserError: its `sample_loss` raises, or does not give one loss a record; says what came.
    """
    x, y = synthetic_batch(population, records=2, device=module.device)
    if not y.is_floating_point():
        y = torch.full_like(y, population.num_classes - 1)  # as many outputs as classes, or this one is out of range
    try:
        with torch.no_grad():
            losses = module.sample_loss(module.named_trainable, x, y)
        problem = "" if losses.shape == (2,) else f"losses of shape {tuple(losses.shape)} for 2 records"
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        problem = str(error).strip().splitlines()[0]
    if problem:
        raise UserError(
            f"`model` must take records of shape {population.input_shape} and give {population.num_classes} outputs "
            f"for each, got: {problem}. Choose another model, or another shape of data."
        )
