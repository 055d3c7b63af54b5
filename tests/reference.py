"""Slow and obviously right forms that the package is held to."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F


def clipped_sum(net, params: dict[str, Tensor], x: Tensor, y: Tensor, clip_norm: float) -> Tensor:
    """One record at a time through plain autograd: `sum_j min(1, clip / |g_j|) g_j`, `[P]`."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    total = torch.zeros(sum(value.numel() for value in leaves.values()), dtype=next(iter(leaves.values())).dtype)
    for record, label in zip(x, y, strict=True):
        loss = F.cross_entropy(functional_call(net, leaves, (record[None],)), label[None])
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(leaves.values()))])
        total += gradient * min(1.0, clip_norm / max(float(gradient.norm()), 1e-30))
    return total


def fedavg_round(
    net, start: Tensor, clients: list[list[tuple[Tensor, Tensor]]], learning_rates, divisors, weights
) -> Tensor:
    """Plain FedAvg: SGD steps on each client's batches (sum of gradients / divisor), weighted mean of changes."""
    deltas = []
    for batches, learning_rate, divisor in zip(clients, learning_rates, divisors, strict=True):
        torch.nn.utils.vector_to_parameters(start.clone(), net.parameters())
        for x, y in batches:
            net.zero_grad()
            if len(y):
                F.cross_entropy(net(x), y, reduction="sum").backward()
                with torch.no_grad():
                    for p in net.parameters():
                        p -= learning_rate * p.grad / divisor
        deltas.append(torch.nn.utils.parameters_to_vector(net.parameters()).detach() - start)
    return start + sum(w * d for w, d in zip(weights, deltas, strict=True)) / sum(weights)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Exact delta of one Gaussian mechanism with sensitivity / noise std = mu (Balle and Wang 2018)."""
    cdf = lambda t: 0.5 * math.erfc(-t / math.sqrt(2))  # noqa: E731
    return cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)


class TableNoise:
    """A stand-in for a generator whose normal draws come from a fixed table, so engines can be compared."""

    def __init__(self, size: int = 100_000, seed: int = 0) -> None:
        self.table = np.random.default_rng(seed).standard_normal(size)
        self.position = 0

    def standard_normal(self, shape, dtype=np.float64):
        count = int(np.prod(shape))
        rows = (self.position + np.arange(count)) % len(self.table)
        self.position += count
        return self.table[rows].reshape(shape).astype(dtype)
