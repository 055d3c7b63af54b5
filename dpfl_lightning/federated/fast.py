"""The default engine: exact per-record gradients by layer rules, plain SGD on one flat vector."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from dpfl_lightning.client import ClientModule, LocalTask
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.engine import DrawnBatches, Engine, SerialEngine
from dpfl_lightning.privacy.clipping import ClippedSum
from dpfl_lightning.privacy.fast_clipping import clipped_sum_for, keep_freed_memory


class FastEngine(SerialEngine):
    """`SerialEngine` without its costs: no optimiser objects, no summed gradient, views into one vector `[P]`.

    On a CPU the process keeps freed memory for the next step (at most 512 MiB more).

    Layer rules are used when they reproduce `vmap(grad)` for this very net on random data, else `vmap(grad)` itself;
    `description` says which.

    Raises:
        UserError: the module overrides `training_step` or `configure_optimizers`, which this engine would not run.
    """

    name = "fast"
    description = ""

    def choose_clipped_sum(self) -> ClippedSum:
        for hook in ("training_step", "configure_optimizers"):
            if getattr(type(self.module), hook) is not getattr(ClientModule, hook):
                raise UserError(
                    f"`engine.name` must be serial or trainer for a module with its own `{hook}`, got 'fast', "
                    f"which never calls it. Use `engine: {{name: serial}}`."
                )
        if self.module.device.type == "cpu":
            keep_freed_memory()
        x, y = synthetic_batch(self.population, records=4, device=self.module.device)
        clipped_sum, self.description = clipped_sum_for(self.module.net, self.module.sample_loss, x, y)
        return clipped_sum

    def local_training(self, task: LocalTask, start: Tensor, batches: DrawnBatches) -> Tensor:
        theta = start.clone()
        params = self.module.unflatten(theta)  # views: they follow theta
        mechanism, learning_rate = task.mechanism, task.learning_rate
        for x, y in batches:
            clipped = task.clipped_sum(params, x, y, mechanism.clip_norm)
            step = mechanism.privatise(clipped, task.noise)[0]
            if task.anchor is not None:
                step.add_(theta - task.anchor, alpha=task.pull)
            theta.add_(step, alpha=-learning_rate)
        return theta


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
def seconds_per_record(engine: Engine, module: ClientModule, population: Population) -> float:
    """Seconds of one record's share of a step, from three steps on random data: an estimate for progress."""
    x, y = synthetic_batch(population, records=64, device=module.device)
    params, times = module.unflatten(module.flat), []
    for _ in range(3):
        begun = time.perf_counter()
        float(engine.clipped_sum(params, x, y, 1.0).sum())
        times.append(time.perf_counter() - begun)
    return min(times) / len(x)
