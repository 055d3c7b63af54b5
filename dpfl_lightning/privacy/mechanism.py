"""The mechanisms of one client: noise on a clipped sum, with its bound and divisor, and a private choice."""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent, NoisedEvent, SelectionEvent
from dpfl_lightning.privacy.clipping.reference import SUM_ROUNDING
from dpfl_lightning.privacy.noise import (
    LAPLACE,
    NORMAL,
    PIECE,
    Distribution,
    RandomGenerator,
    integer_noise,
    noised_on_grid,
)

#: the noise covers `clip_norm` times this: it adds twice the rounding of the sum, and the grid (at most 1/400)
ENLARGED = 1 + 2 * SUM_ROUNDING + 1 / 400
_EXTREME = 1e100  # clip norms and noise multipliers beyond it, or below 1 / it, would leave the range of float64
_FINEST, _COARSEST = 2.0**-18, 2.0**-40  # grid steps, relative to the scale of the noise


@dataclass(frozen=True)
class Mechanism:
    """Noise on every coordinate of a sum of clipped gradients, on a grid. `Gaussian` and `Laplace` are subclasses.

    Args:
        clip_norm: bound on one record's contribution, in the norm `clip_order`, > 0; infinity only without noise.
        noise_multiplier: scale of the noise / sensitivity of the SUM, >= 0.
        sample_rate: Poisson probability of one record per step, in (0, 1]; 1.0 is the full batch.
        expected_batch_size: the divisor, > 0; never the observed batch size, which would be another release.

    **Guarantees** The client releases integers: `round(sum / g) + round(noise / g)`, with a public grid step g that is
    a power of two. Everything after that (times g, the divisor, learning rate, momentum, float32) is post-processing,
    so no trailing bit reveals where the exact sum was zero. This is the mechanism that the accountant composes, with
    noise of scale `noise_multiplier * sensitivity`; docs/proof.md has the proof. It needs gradients of records with the
    same bits whatever is computed with them, as `privacy/clipping/passes.py` computes them.

    Reference: Haney et al. (2022), Precision-based attacks and interval refining, https://arxiv.org/abs/2207.13793.
    """

    accounted: ClassVar[type[NoisedEvent]]  # the event of its steps, with the norm and the std of its noise
    distribution: ClassVar[Distribution]  # of the noise
    clip_order: ClassVar[int]

    clip_norm: float
    noise_multiplier: float
    sample_rate: float
    expected_batch_size: float

    def __post_init__(self) -> None:
        require(self.clip_norm > 0, "clip_norm", "be above 0", self.clip_norm)
        require(0 <= self.noise_multiplier < math.inf, "noise_multiplier", "be >= 0", self.noise_multiplier)
        advice = "Divide a batch size by the number of records."
        require(0 < self.sample_rate <= 1, "sample_rate", "be in (0, 1]", self.sample_rate, advice)
        require(self.expected_batch_size > 0, "expected_batch_size", "be above 0", self.expected_batch_size)
        require(self.expected_batch_size < math.inf, "expected_batch_size", "be finite", self.expected_batch_size)
        for key in ("clip_norm", "noise_multiplier") if self.noise_multiplier > 0 else ():
            value, must = getattr(self, key), f"be in [{1 / _EXTREME:g}, {_EXTREME:g}] when noise is added"
            require(1 / _EXTREME <= value <= _EXTREME, key, must, value)

    def grid(self, numbers: int) -> float:
        """Return the grid step g for a sum of P numbers: a power of two, at most 2^-18 of the noise's scale.

        It adds at most 1/400 to the sensitivity, unless `noise_multiplier` times the norm of P ones is above
        2.7 * 10^9: then the grid is coarser, so that float64 holds the noise, which covers the added sensitivity.
        """
        scale = self.noise_multiplier * self.clip_norm
        finest = min(scale * _FINEST, self.clip_norm / (400 * self._spread(numbers)))
        return 2.0 ** math.floor(math.log2(max(finest, scale * _COARSEST)))

    def sensitivity(self, numbers: int) -> float:
        """Return how far one record can move a sum of P numbers on the grid, in the norm `clip_order`."""
        return self.clip_norm * (1 + 2 * SUM_ROUNDING) + self.grid(numbers) * self._spread(numbers)

    def noise_scale(self, numbers: int = 1) -> float:
        """Return the scale of the noise on a sum of P numbers: usually `noise_multiplier * ENLARGED * clip_norm`."""
        if self.noise_multiplier == 0:  # the clip norm may be infinite
            return 0.0
        return self.noise_multiplier * max(self.clip_norm * ENLARGED, self.sensitivity(numbers))

    def privatise(
        self,
        clipped_sum: Tensor,
        generator: RandomGenerator,
        dtype: torch.dtype = torch.float32,
        into: Tensor | None = None,
        kept: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Return `(clipped_sum + noise) / expected_batch_size` in `dtype`, shape `[G, P]` kept.

        An empty batch is a zero sum and gets the same noise. Without noise the sum is only divided. A CPU may overwrite
        `into`, of that shape and dtype and contiguous, and return it. `kept` is what stays with the client between its
        steps and rounds: a mechanism with state, such as correlated noise, reads and writes it there.
        """
        if self.noise_multiplier == 0:
            return (clipped_sum / self.expected_batch_size).to(dtype)
        numbers = clipped_sum.numel()
        step, draw = self.grid(numbers), self.distribution
        scale, unit = self.noise_scale(numbers) / step, step / self.expected_batch_size
        if clipped_sum.device.type != "cpu":
            integers = on_grid(clipped_sum, step)
            integers.add_(integer_noise(generator, draw, scale, integers))
            return integers.mul_(unit).to(clipped_sum.device, dtype)
        exact = clipped_sum.double().contiguous()
        computed = dtype if dtype == torch.float32 else torch.float64
        fits = into is not None and into.dtype == computed and into.shape == exact.shape
        released = into if into is not None and fits else torch.empty_like(exact, dtype=computed)
        for sums, out in zip(exact.view(-1).split(PIECE), released.view(-1).split(PIECE), strict=True):
            noised_on_grid(sums, integer_noise(generator, draw, scale, sums), step, unit, out)
        return released.to(dtype)

    def event(self, steps: int) -> NoisedEvent:
        """Return the accounting event of `steps` calls of `privatise`."""
        return self.accounted.of(self.sample_rate, self.noise_multiplier, steps)

    def noise_std(self, steps: float, learning_rate: float) -> float:
        """Return the per-coordinate standard deviation of the noise in `steps` plain SGD steps, without feedback."""
        return learning_rate * self.noise_scale() / self.expected_batch_size * self.accounted.unit_std * steps**0.5

    def _spread(self, numbers: int) -> float:
        """Return the norm of a vector of P ones."""
        return float(numbers) if self.clip_order == 1 else math.sqrt(numbers)


def on_grid(clipped_sum: Tensor, step: float) -> Tensor:
    """Return `round(clipped_sum / step)`, float64, on a device that has it."""
    values = clipped_sum.cpu() if clipped_sum.device.type == "mps" else clipped_sum
    return (values.double() / step).round_()


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """The Poisson-sampled Gaussian mechanism on a sum of gradients clipped in L2; the noise's scale is its std.

    Adding or removing one record moves the clipped sum by at most `clip_norm` in L2. The noise is added once per
    logical batch. One call of `privatise` is one step of `event`.
    """

    accounted: ClassVar = GaussianEvent
    distribution: ClassVar = NORMAL
    clip_order: ClassVar = GaussianEvent.clip_order


@dataclass(frozen=True)
class Laplace(Mechanism):
    """The Laplace mechanism on a sum of gradients clipped in L1: pure differential privacy, delta 0.

    Use it for comparison: an L1 bound is far tighter than an L2 bound of the same size, and the noise's variance grows
    with the square of the number of releases that share a budget. The scale is b of the density exp(-|x| / b) / (2 b).
    One call of `privatise` is (1 / noise_multiplier)-private; the event ignores sampling: `sample_rate` is usually 1.
    """

    accounted: ClassVar = LaplaceEvent
    distribution: ClassVar = LAPLACE
    clip_order: ClassVar = LaplaceEvent.clip_order


#: mechanisms of noisy sums
MECHANISMS: tuple[type[Mechanism], ...] = (Gaussian, Laplace)


@functools.lru_cache(maxsize=4096)
def mechanism_of(event: NoisedEvent, clip_norm: float, num_records: int) -> Mechanism:
    """Return the mechanism of a planned event with solved noise, for a client with this number of records.

    Equal clients share one object, so that a plan of many clients is small and quickly made.
    """
    if event.noise_multiplier is None:
        raise KeyError("its noise is not solved yet")
    (kind,) = (one for one in MECHANISMS if isinstance(event, one.accounted))
    return kind(clip_norm, event.noise_multiplier, event.sample_rate, event.sample_rate * num_records)


@dataclass(frozen=True)
class ExponentialMechanism:
    """A private choice of one of M candidates by the sums of the scores that the records give them.

    `epsilon`, > 0 and finite, is the bounded range of one choice: a record gives each candidate a score in [0, 1], so
    adding a record moves all sums in the same direction by at most 1. Replacing a record moves the sums in both
    directions, and the accountant charges twice the range. One call of `choose` is `event(1)`.
    """

    epsilon: float

    def __post_init__(self) -> None:
        require(0 < self.epsilon < math.inf, "epsilon", "be above 0 and finite for a selection", self.epsilon)

    def choose(self, scores: Tensor, generator: RandomGenerator) -> int:
        """Return the index of the largest score of `[M]` (sums over records) plus Gumbel noise of scale 1 / epsilon."""
        noise = generator.gumbel(0.0, 1.0 / self.epsilon, len(scores))
        return int((scores.cpu().double() + torch.from_numpy(noise)).argmax())

    def event(self, count: int) -> SelectionEvent:
        """Return the accounting event of `count` calls of `choose`."""
        return SelectionEvent(self.epsilon, count)
