"""Nets that a server trains by itself, on a set that may be shown to anyone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.models.augmentation import augmented
from dpfl_lightning.models.fast_loss import FastLoss
from dpfl_lightning.models.model import Model
from dpfl_lightning.privacy.noise import stream_words


def public_generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """The run's generator for a public choice: the same arguments, the same stream; never for noise or sampling.

    >>> bool(public_generator(0, "participants", 3).random() == public_generator(0, "participants", 3).random())
    True
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream_words(purpose, *numbers)))


def torch_seed(generator: np.random.Generator) -> int:
    """A seed for torch's generators."""
    return int(generator.integers(2**32))


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's global generators begin at `seed` inside, and are afterwards as before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class Training:
    """How a net is trained on a set: SGD on shuffled batches.

    Args:
        epochs: passes over the set, >= 0.
        learning_rate: > 0.
        momentum: in [0, 1).
        weight_decay: >= 0.
        decayed: whether the second half of the epochs has a tenth of the learning rate.
        batch_size: >= 1.
        augmentations: names of operations, one of which changes each batch, every image in its own way; may be empty.
    """

    epochs: int
    learning_rate: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    decayed: bool = False
    batch_size: int = 256
    augmentations: tuple[str, ...] = ()


def trained_on(module: Model, start: Tensor, records: tuple[Tensor, Tensor], how: Training, seed: int) -> Tensor:
    """The parameters `[P]` after training from `start` `[P]` on `records`: the mean loss, no clipping, no noise.

    Args:
        module: whose loss; its own parameters are neither read nor changed.
        records: x `[n, *X]`, y `[n]`, on the module's device: a synthetic or a public set.
        seed: of order, augmentation and dropout, in [0, 2^32).

    **Privacy** None: for what may be shown to anyone.
    """
    theta = start.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([theta], how.learning_rate, how.momentum, weight_decay=how.weight_decay)
    x, y = records
    sample_loss = FastLoss(module, x[:0], y[:0], second_order=False)
    with _seeded(seed, x.device), torch.enable_grad():
        for epoch in range(how.epochs):
            if how.decayed and epoch == (how.epochs + 1) // 2:
                optimizer.param_groups[0]["lr"] = 0.1 * how.learning_rate
            for rows in torch.randperm(len(x)).to(x.device).split(how.batch_size):
                loss = sample_loss(module.unflatten(theta), _changed(x[rows], how.augmentations), y[rows]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return theta.detach()


def _changed(x: Tensor, augmentations: Sequence[str]) -> Tensor:
    if not augmentations:
        return x
    return augmented(x, augmentations[int(torch.randint(len(augmentations), ()))])
