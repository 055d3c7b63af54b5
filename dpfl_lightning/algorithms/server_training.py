"""Training of models by the server on public or synthetic data."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.models.augmentation import NUMBERS, OPERATIONS
from dpfl_lightning.models.model import Model
from dpfl_lightning.models.thread_safe_loss import ThreadSafeLoss
from dpfl_lightning.privacy.noise import stream_words


def public_generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return the run's generator for a public choice, fixed by the arguments; never use it for noise or sampling."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream_words(purpose, *numbers)))


def torch_seed(generator: np.random.Generator) -> int:
    """Draw a seed for torch's generators."""
    return int(generator.integers(2**32))


@dataclass(frozen=True)
class Training:
    """Settings of training a model on a set: SGD on shuffled batches.

    Args:
        decayed: whether the learning rate is divided by ten in the second half of the epochs.
        augmentations: names of operations, may be empty. Each batch is augmented by one of them, each image separately.
    """

    epochs: int
    learning_rate: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    decayed: bool = False
    batch_size: int = 256
    augmentations: tuple[str, ...] = ()


def trained_on(module: Model, start: Tensor, records: tuple[Tensor, Tensor], how: Training, seed: int) -> Tensor:
    """Return the parameters `[P]` after training from `start` `[P]` on `records`: mean loss, no clipping, no noise.

    The records are x `[n, *X]` and y `[n]` on the module's device; the module defines the loss and is not changed.
    `seed` in [0, 2^32) determines order, augmentation and dropout.

    **Privacy** None: use it only on public or synthetic data.
    """
    theta = start.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([theta], how.learning_rate, how.momentum, weight_decay=how.weight_decay)
    x, y = records
    sample_loss = ThreadSafeLoss(module)
    with torch.random.fork_rng([x.device] if x.device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(seed)
        for epoch in range(how.epochs):
            if how.decayed and epoch == (how.epochs + 1) // 2:
                optimizer.param_groups[0]["lr"] = 0.1 * how.learning_rate
            for rows in torch.randperm(len(x)).to(x.device).split(how.batch_size):
                batch = x[rows]
                if how.augmentations:
                    operation = how.augmentations[int(torch.randint(len(how.augmentations), ()))]
                    numbers = torch.rand(len(batch), NUMBERS, dtype=torch.float64)
                    batch = OPERATIONS[operation](batch, numbers.to(batch.device, batch.dtype))
                loss = sample_loss(module.unflatten(theta), batch, y[rows]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return theta.detach()
