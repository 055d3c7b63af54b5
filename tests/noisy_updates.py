"""Updates of a round with known noise: the published budgets and batch sizes, one shared direction, Gaussian noise."""

import functools

import torch
from reference import paper_noise_multipliers
from torch import Tensor

from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS
from dpfl_lightning.papers.robust_hdp.noise_weights import weights

CLIP_NORM = 3.0
NUM_PARAMS = 28_938  # of the paper's CNN


def update_noise_var(noise_multiplier, batch_size, steps, learning_rate, clip_norm, num_params) -> Tensor:
    """`[C]`: `steps lr^2 P clip^2 z^2 / b^2` (Malekmohammadi et al. 2024, Eqs. 5 and 7), without feedback."""
    z, b, count = (torch.as_tensor(values, dtype=torch.float64) for values in (noise_multiplier, batch_size, steps))
    return count * learning_rate**2 * (num_params * (clip_norm * z / b) ** 2)


@functools.cache
def true_noise_var(
    dist: str, learning_rate: float, num_params: int = NUM_PARAMS, clients: int = 20, records: int = 2400
) -> Tensor:
    """`[C]` of the clients of a published list, one local epoch a round, 200 rounds."""
    batch_sizes = BATCH_SIZES[clients]
    noise = paper_noise_multipliers(EPSILONS[dist][clients], batch_sizes, records)
    steps = [-(-records // batch) for batch in batch_sizes]
    return update_noise_var(noise.tolist(), batch_sizes, steps, learning_rate, CLIP_NORM, num_params)


@functools.cache
def noisy_updates(
    dist: str,
    learning_rate: float,
    signal: float | None = None,
    own_share: float = 0.1,
    seed: int = 0,
    num_params: int = NUM_PARAMS,
) -> tuple[Tensor, Tensor]:
    """`deltas [20, P]` float64 and their true noise variances `[20]`.

    Args:
        signal: length of every client's step along the shared direction; None is 1.5 * learning rate * local steps.
        own_share: of that length, in a random direction for each client.
    """
    truth = true_noise_var(dist, learning_rate, num_params)
    steps = torch.tensor([-(-2400 // batch) for batch in BATCH_SIZES[20]], dtype=torch.float64)
    lengths = 1.5 * learning_rate * steps if signal is None else torch.full_like(steps, signal)
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, num_params, generator=generator, dtype=torch.float64)
    shared = torch.nn.functional.normalize(draw(), dim=0)
    each = torch.stack([torch.nn.functional.normalize(draw(), dim=0) for _ in steps])
    noise = torch.stack([draw() for _ in steps]) * (truth / num_params).sqrt()[:, None]
    return lengths[:, None] * (shared + own_share * each) + noise, truth


def excess(noise_var: Tensor, truth: Tensor) -> float:
    """Noise of the sum under the weights of an estimate / least noise possible, >= 1."""
    return float((weights(noise_var) ** 2 * truth).sum() * (1 / truth).sum())


def total_variation(one: Tensor, other: Tensor) -> float:
    """Of the two variances' weights."""
    return float((weights(one) - weights(other)).abs().sum()) / 2
