"""The mechanism of one client's step: what bounds a record, how much noise, which divisor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.privacy.events import GaussianEvent
from dpfl_lightning.privacy.noise import RandomGenerator, standard_normal_like, standard_normal_rows


@dataclass(frozen=True)
class Gaussian:
    """The Poisson-sampled Gaussian mechanism on a sum of clipped gradients.

    Args:
        clip_norm: L2 bound on one record's contribution, > 0; infinity only without noise.
        noise_multiplier: noise standard deviation / clip_norm, on the SUM, >= 0.
        sample_rate: Poisson probability of one record per step, in (0, 1]; 1.0 is the full batch.
        expected_batch_size: the divisor, > 0; never the observed batch size, which would be a release of its own.

    **Guarantees** Adding or removing one record moves the clipped sum by at most `clip_norm`; the noise has standard
    deviation `noise_multiplier * clip_norm` in every coordinate and is added once per logical batch.

    **Privacy** One call of `privatise` is one step of `event(steps)`.
    """

    clip_norm: float
    noise_multiplier: float
    sample_rate: float
    expected_batch_size: float

    def __post_init__(self) -> None:
        require(self.clip_norm > 0, "clip_norm", "be above 0", self.clip_norm)
        require(0 <= self.noise_multiplier < float("inf"), "noise_multiplier", "be >= 0", self.noise_multiplier)
        advice = "A batch size? Divide by the number of records."
        require(0 < self.sample_rate <= 1, "sample_rate", "be in (0, 1]", self.sample_rate, advice)
        require(self.expected_batch_size > 0, "expected_batch_size", "be above 0", self.expected_batch_size)
        bounded = self.noise_multiplier == 0 or self.clip_norm < float("inf")
        require(bounded, "clip_norm", "be finite when noise is added", self.clip_norm)

    def privatise(self, clipped_sum: Tensor, generator: RandomGenerator) -> Tensor:
        """`(clipped_sum + N(0, (clip_norm * noise_multiplier)^2)) / expected_batch_size`, shape kept, `[G, P]`.

        An empty batch is a zero sum and gets the same noise.
        """
        if self.noise_multiplier == 0:
            return clipped_sum / self.expected_batch_size
        noise = standard_normal_like(clipped_sum, generator)
        return noise.mul_(self.clip_norm * self.noise_multiplier).add_(clipped_sum).div_(self.expected_batch_size)

    def event(self, steps: int) -> GaussianEvent:
        """What `steps` calls of `privatise` release."""
        return GaussianEvent(self.sample_rate, self.noise_multiplier, steps)

    def noise_std(self, steps: int, learning_rate: float) -> float:
        """Per-coordinate standard deviation of the noise in `steps` plain SGD steps (their feedback neglected)."""
        if self.noise_multiplier == 0:  # also where the clip norm is infinite
            return 0.0
        return learning_rate * self.clip_norm * self.noise_multiplier / self.expected_batch_size * steps**0.5


class GaussianRows:
    """`Gaussian.privatise` of many clients in a few operations: the same noise, row by row.

    Args:
        mechanisms: length S, one a client.
        generators: length S, each client's own.
        like: any tensor of the dtype and device of the sums to come.

    **Privacy** One call of `privatise` is one step of each client whose row it is given.

    >>> import numpy as np
    >>> import torch
    >>> row = Gaussian(clip_norm=1.0, noise_multiplier=2.0, sample_rate=0.5, expected_batch_size=4.0)
    >>> alone = row.privatise(torch.ones(1, 3), np.random.default_rng(0))
    >>> rows = GaussianRows([row], [np.random.default_rng(0)], like=torch.empty(0))
    >>> bool((rows.privatise(torch.ones(1, 1, 3))[0] == alone).all())
    True
    """

    def __init__(self, mechanisms: Sequence[Gaussian], generators: Sequence[RandomGenerator], like: Tensor) -> None:
        silent = [m.noise_multiplier == 0 for m in mechanisms]  # such a one draws nothing, here as in `privatise`
        noise_std = [
            0.0 if mute else m.clip_norm * m.noise_multiplier for m, mute in zip(mechanisms, silent, strict=True)
        ]
        self._generators = [None if mute else own for own, mute in zip(generators, silent, strict=True)]
        # on their device once, not in every step
        self._noise_std = like.new_tensor(noise_std)[:, None, None]
        self._divisor = like.new_tensor([m.expected_batch_size for m in mechanisms])[:, None, None]

    def privatise(self, clipped_sums: Tensor) -> Tensor:
        """`[k, G, P]` sums of the first k <= S clients to what they release, shape kept; the others draw no noise."""
        active = len(clipped_sums)
        noise = standard_normal_rows(clipped_sums, self._generators[:active])
        return noise.mul_(self._noise_std[:active]).add_(clipped_sums).div_(self._divisor[:active])
