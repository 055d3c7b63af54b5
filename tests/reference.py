"""Slow and obviously right forms that the package is compared with."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dpfl_lightning.privacy.accounting.rdp import sampled_gaussian_rdp
from dpfl_lightning.privacy.clipping.passes import FixedPasses
from dpfl_lightning.privacy.clipping.reference import ClipRequest


class Net(nn.Module):
    """Named layers, and a forward pass `forward(net, x)` through them."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def clipped_sum(net, params: dict[str, Tensor], x: Tensor, y: Tensor, clip_norm: float, order: int = 2) -> Tensor:
    """One record at a time through plain autograd: `sum_j min(1, clip / |g_j|) g_j`, `[P]`, in the norm `order`."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    total = torch.zeros(sum(value.numel() for value in leaves.values()), dtype=next(iter(leaves.values())).dtype)
    for record, label in zip(x, y, strict=True):
        loss = F.cross_entropy(functional_call(net, leaves, (record[None],)), label[None])
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(leaves.values()))])
        total += gradient * min(1.0, clip_norm / max(float(gradient.norm(p=order)), 1e-30))
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


def principal_component_pursuit(
    matrix: np.ndarray, mu: float, iterations: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """L, S, Y after so many iterations of Algorithm 3 of the noise-aware paper on `[p, n]`, through full SVDs.

    The sign of Y in the step for L follows from the augmented Lagrangian; the paper prints the opposite one.
    """
    lam = 1 / math.sqrt(max(matrix.shape))
    shrink = lambda x, by: np.sign(x) * np.maximum(np.abs(x) - by, 0)  # noqa: E731
    sparse, dual = np.zeros_like(matrix), np.zeros_like(matrix)
    for _ in range(iterations):
        u, s, vt = np.linalg.svd(matrix - sparse + dual / mu, full_matrices=False)
        low = (u * shrink(s, 1 / mu)) @ vt
        sparse = shrink(matrix - low + dual / mu, lam / mu)
        dual = dual + mu * (matrix - low - sparse)
    return low, sparse, dual


def paper_noise_multipliers(epsilons, batch_sizes, records: int, rounds: int = 200, delta: float = 1e-4) -> np.ndarray:
    """Noise as the noise-aware paper's release solves it: orders to 64, the classic conversion, two decimals.

    One local epoch a round, its steps not rounded up. For its tables only: it may round down.
    """
    orders = (*(1 + x / 10 for x in range(1, 100)), *range(12, 65))
    rate = np.asarray(batch_sizes) / records
    low, high = np.full(len(rate), math.log(0.05)), np.full(len(rate), math.log(2000.0))
    for _ in range(45):
        middle = (low + high) / 2
        rdp = sampled_gaussian_rdp(rate, np.exp(middle), orders) * (rounds / rate)[:, None]
        spent = (rdp + math.log(1 / delta) / (np.asarray(orders) - 1)).min(axis=1)
        low, high = np.where(spent > epsilons, middle, low), np.where(spent > epsilons, high, middle)
    return np.exp(high).round(2)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Exact delta of one Gaussian mechanism with sensitivity / noise std = mu (Balle and Wang 2018)."""
    cdf = lambda t: 0.5 * math.erfc(-t / math.sqrt(2))  # noqa: E731
    return cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)


def layerwise_cosine(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
    """The condensation paper's distance of two gradients, parameter by parameter and output node by output node."""
    total = torch.zeros((), dtype=ours[0].dtype)
    for a, b in zip(ours, theirs, strict=True):
        if a.dim() >= 2:
            for one, other in zip(a.reshape(len(a), -1), b.reshape(len(b), -1), strict=True):
                total = total + 1 - (one @ other) / (one.norm() * other.norm() + 1e-6)
    return total


def class_gradient(net, params: dict[str, Tensor], x: Tensor, label: int, create_graph: bool = False) -> list[Tensor]:
    """The gradient of the mean cross entropy of records of one class, a tensor a parameter."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    loss = F.cross_entropy(functional_call(net, leaves, (x,)), torch.full((len(x),), label))
    return list(torch.autograd.grad(loss, list(leaves.values()), create_graph=create_graph))


def condensation_round(net, theta: Tensor, optimizers, images: list[Tensor], real: dict[int, Tensor]) -> None:
    """One round of dataset condensation, a class after the other: `images[c]`, a leaf, moves towards `real[c]`."""
    names = [name for name, _ in net.named_parameters()]
    shapes = [p.shape for p in net.parameters()]
    parts = theta.split([shape.numel() for shape in shapes])
    params = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
    for label, records in real.items():
        theirs = class_gradient(net, params, records, label)
        ours = class_gradient(net, params, images[label], label, create_graph=True)
        optimizers[label].zero_grad()
        layerwise_cosine(ours, theirs).backward()
        optimizers[label].step()


def sgd_epochs(net, theta: Tensor, x: Tensor, y: Tensor, epochs: int, learning_rate: float, seed: int) -> Tensor:
    """Plain SGD over the whole shuffled set as one batch, from `theta`; returns the parameters."""
    torch.nn.utils.vector_to_parameters(theta.clone(), net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), learning_rate)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for _ in range(epochs):
            order = torch.randperm(len(x))
            optimizer.zero_grad()
            F.cross_entropy(net(x[order]), y[order]).backward()
            optimizer.step()
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach()


def summed(clipped_sum, params, x, y, clip_norm, group=None, num_groups=1, norms=None, order=2, only=None) -> Tensor:
    """The sums of a `ClippedSum`; its norms are appended to `norms`."""
    sums, sizes = clipped_sum(params, x, y, ClipRequest(clip_norm, order, group, num_groups, only))
    if norms is not None:
        norms.append(sizes)
    return sums


def passes_like(x: torch.Tensor, y: torch.Tensor) -> FixedPasses:
    """Passes of 8 or 16 records of this shape, checked on random ones."""
    examples = torch.randn(40, *x.shape[1:], generator=torch.Generator().manual_seed(0)).to(x.dtype)
    return FixedPasses((examples, torch.zeros(40, *y.shape[1:], dtype=y.dtype)), sizes=(8, 16))


def noise_only(noise_factor, total: float, exponent: float = 1.0) -> np.ndarray:
    """Real quotas `[N]` of least noise, without bounds: `M noise_factor_n^(-1 / exponent) / sum of these`.

    Reference: Ma et al., "The Power of Bias", Proposition 1.
    """
    share = np.asarray(noise_factor, dtype=float) ** (-1 / exponent)
    return total * share / share.sum()


def cost_of_quotas(quota, noise_factor, exponent=1.0, bias_cost=0.0, anchor: float = 0.0) -> float:
    """The cost of quotas `[N]`, in the unit of `noise_factor`."""
    counts, factor = np.asarray(quota, dtype=float), np.asarray(noise_factor, dtype=float)
    takes_part = counts > 0  # avoids 0 * infinity for clients without a budget
    powers = np.broadcast_to(np.asarray(exponent, dtype=float), counts.shape)[takes_part] + 1
    noise = float((factor[takes_part] * counts[takes_part] ** powers).sum())
    return noise + float((np.asarray(bias_cost) * counts).sum()) + anchor * float(((counts - counts.mean()) ** 2).sum())
