"""Dummy records. The output of an audit is shown, so it must not depend on private records."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.engines.engine import Batch

SCALES = (1.0, 1.0, 10.0, 1000.0)  # large inputs give gradients that must be clipped


def made_up(
    like: Population, count: int, seed: int, device: torch.device, dtype: torch.dtype, scales: Sequence[float] = SCALES
) -> Batch:
    """Draw normal inputs `[count, *X]`, cycling through the scales, and random labels `[count]`."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor(scales)[torch.arange(count) % len(scales)].view(-1, *[1] * len(like.input_shape))
    x = scale * torch.randn(count, *like.input_shape, generator=generator)
    if like.y.is_floating_point():
        y = scale.flatten() * torch.randn(count, generator=generator)
    else:
        y = torch.randint(like.num_classes, (count,), generator=generator)
    return x.to(device, dtype), y.to(device, dtype if like.y.is_floating_point() else like.y.dtype)


def most_opposed(gradients: Tensor) -> tuple[int, int]:
    """Find the record with about the largest gradient, and the one whose gradient is most opposed to it, of `[n, P]`, n
    >= 2.

    With copies of the second around it, the first also reveals a divisor that counts the records of a batch.

    >>> most_opposed(torch.tensor([[1.0, 0.0], [0.1, 0.0], [-0.6, 0.8]]))
    (0, 2)
    """
    norms = torch.linalg.vector_norm(gradients, dim=1)
    products = gradients @ gradients.T
    strong = norms >= 0.999 * norms.max()
    cosines = products / norms.clamp_min(1e-30)[:, None] / norms.clamp_min(1e-30)
    cosines = torch.where(strong[:, None] & (norms > 0), cosines, torch.inf).fill_diagonal_(torch.inf)
    canary, other = divmod(int(cosines.argmin()), len(gradients))
    return canary, other
