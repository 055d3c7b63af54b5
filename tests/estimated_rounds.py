"""Updates for strategies that estimate something of them, and the rounds in which they did."""

import math

import torch

from dpfl_lightning.federated.messages.update import ClientUpdates


def kept(seen):
    """Rounds in which single updates were kept."""
    return [updates.deltas is not None for updates in seen.updates]


def updates_of(deltas, steps=None, noise_std=None, **more):
    count = len(deltas)
    std, model_of = noise_std or (math.nan,) * count, (0,) * count
    return ClientUpdates(tuple(range(count)), tuple(steps or [3] * count), std, deltas, model_of=model_of, **more)


def some_deltas(clients=4, params=83, seed=0):
    noise = torch.linspace(0.5, 3, clients)[:, None]
    draws = torch.randn(clients + 1, params, generator=torch.Generator().manual_seed(seed))
    return draws[0] + noise * draws[1:]
