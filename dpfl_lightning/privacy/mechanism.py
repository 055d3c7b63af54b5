"""The mechanism of one client's step: what bounds a record, how much noise, which divisor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.privacy.events import GaussianEvent, LaplaceEvent, NoisedEvent
from dpfl_lightning.privacy.noise import RandomGenerator, noise_rows, standard_laplace_like, standard_normal_like


@dataclass(frozen=True)
class Mechanism:
    """Independent noise on every coordinate of a sum of clipped gradients: what `Gaussian` and `Laplace` share.

    Args:
        clip_norm: bound on one record's contribution, in the norm `clip_order`, > 0; infinity only without noise.
        noise_multiplier: scale of the noise / clip_norm, on the SUM, >= 0.
        sample_rate: Poisson probability of one record per step, in (0, 1]; 1.0 is the full batch.
        expected_batch_size: the divisor, > 0; never the observed batch size, which would be a release of its own.

    Attributes:
        clip_order: of the norm that bounds a record, 1 or 2.
        unit_std: standard deviation of noise of scale 1.
    """

    clip_order: ClassVar[int]
    unit_std: ClassVar[float]

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
        """`(clipped_sum + clip_norm * noise_multiplier * noise) / expected_batch_size`, shape kept, `[G, P]`.

        An empty batch is a zero sum and gets the same noise.
        """
        if self.noise_multiplier == 0:
            return clipped_sum / self.expected_batch_size
        noise = self.unit_noise(clipped_sum, generator)
        return noise.mul_(self.clip_norm * self.noise_multiplier).add_(clipped_sum).div_(self.expected_batch_size)

    @staticmethod
    def unit_noise(value: Tensor, generator: RandomGenerator) -> Tensor:
        """Noise of scale 1 in the shape, dtype and device of `value`."""
        raise NotImplementedError

    def event(self, steps: int) -> NoisedEvent:
        """What `steps` calls of `privatise` release."""
        raise NotImplementedError

    def noise_std(self, steps: int, learning_rate: float) -> float:
        """Per-coordinate standard deviation of the noise in `steps` plain SGD steps (their feedback neglected)."""
        if self.noise_multiplier == 0:  # also where the clip norm is infinite
            return 0.0
        scale = self.clip_norm * self.noise_multiplier / self.expected_batch_size
        return learning_rate * scale * self.unit_std * steps**0.5


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """The Poisson-sampled Gaussian mechanism on a sum of gradients clipped in L2.

    Args: those of `Mechanism`; `noise_multiplier` is the noise's standard deviation / clip_norm.

    **Guarantees** Adding or removing one record moves the clipped sum by at most `clip_norm` in L2; the noise has
    standard deviation `noise_multiplier * clip_norm` in every coordinate and is added once per logical batch.

    **Privacy** One call of `privatise` is one step of `event(steps)`.
    """

    clip_order: ClassVar[int] = 2
    unit_std: ClassVar[float] = 1.0
    unit_noise = staticmethod(standard_normal_like)

    def event(self, steps: int) -> GaussianEvent:
        return GaussianEvent(self.sample_rate, self.noise_multiplier, steps)


@dataclass(frozen=True)
class Laplace(Mechanism):
    """The Laplace mechanism on a sum of gradients clipped in L1: pure differential privacy, delta 0.

    When to use it: to compare with. An L1 bound is far tighter than an L2 bound of the same size, and the noise's
    variance grows with the square of the releases that share a budget.

    Args: those of `Mechanism`; `noise_multiplier` is the scale b / clip_norm of noise with the density
        exp(-|x| / b) / (2 b); `sample_rate` is usually 1, for the event counts no sampling.

    **Guarantees** Adding or removing one record moves the clipped sum by at most `clip_norm` in L1.

    **Privacy** One call of `privatise` is (1 / noise_multiplier)-private, one step of `event(steps)`.

    >>> Laplace(clip_norm=1.0, noise_multiplier=2.0, sample_rate=1.0, expected_batch_size=10.0).event(steps=3)
    LaplaceEvent(noise_multiplier=2.0, steps=3)
    """

    clip_order: ClassVar[int] = 1
    unit_std: ClassVar[float] = math.sqrt(2)
    unit_noise = staticmethod(standard_laplace_like)

    def event(self, steps: int) -> LaplaceEvent:
        return LaplaceEvent(self.noise_multiplier, steps)


def mechanism_of(event: NoisedEvent, clip_norm: float, num_records: int) -> Mechanism:
    """The mechanism whose steps a planned event is, for a client with so many records; its noise is solved.

    >>> mechanism_of(GaussianEvent(0.5, 2.0, steps=4), clip_norm=1.0, num_records=10)
    Gaussian(clip_norm=1.0, noise_multiplier=2.0, sample_rate=0.5, expected_batch_size=5.0)
    """
    if event.noise_multiplier is None:
        raise KeyError("its noise is not solved yet")
    kind = Laplace if isinstance(event, LaplaceEvent) else Gaussian
    return kind(clip_norm, event.noise_multiplier, event.sample_rate, event.sample_rate * num_records)


class MechanismRows:
    """`Mechanism.privatise` of many clients in a few operations: the same noise, row by row.

    Args:
        mechanisms: length S >= 1, one a client, all of one kind.
        generators: length S, each client's own.
        like: any tensor of the dtype and device of the sums to come.

    **Privacy** One call of `privatise` is one step of each client whose row it is given.

    >>> import numpy as np
    >>> import torch
    >>> row = Gaussian(clip_norm=1.0, noise_multiplier=2.0, sample_rate=0.5, expected_batch_size=4.0)
    >>> alone = row.privatise(torch.ones(1, 3), np.random.default_rng(0))
    >>> rows = MechanismRows([row], [np.random.default_rng(0)], like=torch.empty(0))
    >>> bool((rows.privatise(torch.ones(1, 1, 3))[0] == alone).all())
    True
    """

    def __init__(self, mechanisms: Sequence[Mechanism], generators: Sequence[RandomGenerator], like: Tensor) -> None:
        self._unit_noise = mechanisms[0].unit_noise
        silent = [m.noise_multiplier == 0 for m in mechanisms]  # such a one draws nothing, here as in `privatise`
        scales = [0.0 if mute else m.clip_norm * m.noise_multiplier for m, mute in zip(mechanisms, silent, strict=True)]
        self._generators = [None if mute else own for own, mute in zip(generators, silent, strict=True)]
        # on their device once, not in every step
        self._scale = like.new_tensor(scales)[:, None, None]
        self._divisor = like.new_tensor([m.expected_batch_size for m in mechanisms])[:, None, None]

    def privatise(self, clipped_sums: Tensor) -> Tensor:
        """`[k, G, P]` sums of the first k <= S clients to what they release, shape kept; the others draw no noise."""
        active = len(clipped_sums)
        noise = noise_rows(clipped_sums, self._generators[:active], self._unit_noise)
        return noise.mul_(self._scale[:active]).add_(clipped_sums).div_(self._divisor[:active])
