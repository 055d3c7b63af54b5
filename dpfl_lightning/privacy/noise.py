"""Where randomness that protects someone comes from: the noise key, or in secure mode the operating system; never the
logged seed."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from ssl import RAND_bytes

import numpy as np
import torch
from torch import Tensor

_BLOCK = 8192  # normals that are made at once: their uniforms stay in the caches


def new_noise_key() -> int:
    """128 fresh bits from the operating system."""
    return secrets.randbits(128)


class SecureGenerator:
    """Fresh cryptographic randomness, by those methods of numpy's `Generator` that are used here and no other.

    When to use it: for noise that nobody can compute again, at seven times the price of a keyed draw. The bytes are
    OpenSSL's, whose generator the operating system seeds: many times as fast as asking the system for each.

    Args:
        random_bytes: `count -> bytes`, independent and uniform.

    **Guarantees** Uniform numbers are odd multiples of 2^-53: never 0 or 1. A normal number is the sum of four, each
    of a uniform number of its own, divided by 2, in float64. Which values a single rounded normal can take would tell
    what it was added to; to look through the sums of four takes 2^156 trials.

    Reference: Holohan and Braghin (2021), https://arxiv.org/abs/2107.10138, section 5, as Opacus' secure mode.

    >>> generator = SecureGenerator()
    >>> generator.standard_normal((2, 3)).shape, bool(generator.standard_normal(1) == generator.standard_normal(1))
    ((2, 3), False)
    """

    def __init__(self, random_bytes: Callable[[int], bytes] = RAND_bytes) -> None:
        self._random_bytes = random_bytes

    def standard_normal(self, size: int | Sequence[int], dtype: type = np.float64) -> np.ndarray:
        """Standard normal numbers of that shape; float32 is rounded once, at the end."""
        shape = (size,) if isinstance(size, int) else tuple(size)
        noise: np.ndarray = np.empty(math.prod(shape), dtype)
        for start in range(0, len(noise), _BLOCK):
            block = noise[start : start + _BLOCK]
            four = torch.special.ndtri(torch.from_numpy(self._uniform(4 * len(block)))).view(4, -1)
            block[:] = four.sum(dim=0).div_(2).numpy()
        return noise.reshape(shape)

    def binomial(self, n: int, p: float) -> int:
        """Heads of n coins with probability p in [0, 1), exact to 2^-64 for each coin."""
        return int((self._words(n) < np.uint64(int(p * 2.0**64))).sum())

    def choice(self, a: int, size: int, *, replace: bool, shuffle: bool) -> np.ndarray:
        """`size` different numbers below `a`, every set equally likely (but for a^2 / 2^65), in no order."""
        if replace or shuffle:
            raise NotImplementedError("a set of different numbers only")
        return np.argpartition(self._words(a), size - 1)[:size] if size else np.empty(0, dtype=np.int64)

    def permutation(self, x: int) -> np.ndarray:
        """The numbers below `x`, every order equally likely (but for x^2 / 2^65)."""
        return np.argsort(self._words(x))

    def gumbel(self, loc: float, scale: float, size: int) -> np.ndarray:
        """`loc - scale * log(-log(uniform))`."""
        return loc - scale * np.log(-np.log(self._uniform(size)))

    def laplace(self, loc: float, scale: float, size: int) -> np.ndarray:
        """From four uniform numbers each, as `standard_normal`: a sum of two products of two normals is Laplace."""
        first, second, third, fourth = self._uniform(4 * size).reshape(4, size)
        return loc + scale * (np.log(first) * np.cos(np.pi * second) + np.log(third) * np.cos(np.pi * fourth))

    def _words(self, count: int) -> np.ndarray:
        """Uniform 64-bit numbers."""
        return np.frombuffer(self._random_bytes(8 * count), np.uint64)

    def _uniform(self, count: int) -> np.ndarray:
        """(k + 1/2) / 2^52 for a uniform 52-bit k: the bits of a float64 in [1, 2), moved down without rounding."""
        bits = self._words(count) >> np.uint64(12) | np.uint64(0x3FF0000000000000)
        return bits.view(np.float64) - (1 - 2.0**-53)


RandomGenerator = np.random.Generator | SecureGenerator


class Streams:
    """Independent generators, one for each (purpose, round, client, attempt), all keyed by the noise key.

    Args:
        key: 128-bit integer. Whoever knows it can subtract the noise: it is never logged. None is secure mode: every
            call gives fresh `SecureGenerator` randomness, which no key repeats.

    **Guarantees** The same arguments give the same stream in any process and for any number of workers; other
    arguments give an independent one (`numpy.random.SeedSequence` into a full 128-bit PCG64DXSM state; a torch CPU
    generator would keep only 32 bits of a manual seed). `attempt` counts the releases of one (round, client) that were
    not replays of each other, so that no noise ever protects two different values.

    >>> a, b = (Streams(7).generator("noise", round=1, client=0) for _ in range(2))
    >>> bool(a.standard_normal() == b.standard_normal())
    True
    """

    #: what a report says of noise and sampling
    KEYED = "keyed, not cryptographic (PCG64DXSM, a stream for each release, by a secret key of 128 bits)"
    SECURE = "cryptographic (OpenSSL's generator, fresh for every draw; each normal number is a sum of four)"

    def __init__(self, key: int | None) -> None:
        self.key = key

    def generator(self, purpose: str, round: int, client: int, attempt: int = 0) -> RandomGenerator:
        if self.key is None:
            return SecureGenerator()
        words = stream_words(purpose, round, client, attempt)
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(self.key, spawn_key=words)))


def stream_words(purpose: str, *numbers: int) -> list[int]:
    """The 32-bit words that name a stream: two a number, so that no two lists of numbers below 2^64 have the same."""
    name = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big")
    return [word for number in (name, *numbers) for word in (number >> 32, number & 0xFFFFFFFF)]


def standard_normal_like(value: Tensor, generator: RandomGenerator) -> Tensor:
    """Standard normal noise with the shape, dtype (float32 or float64) and device of `value`."""
    dtype = np.float64 if value.dtype == torch.float64 else np.float32
    noise = torch.from_numpy(generator.standard_normal(tuple(value.shape), dtype=dtype))
    return noise.to(value.device, value.dtype, non_blocking=True)


def standard_laplace_like(value: Tensor, generator: RandomGenerator) -> Tensor:
    """Laplace noise of scale 1 (variance 2), drawn in float64, with the shape, dtype and device of `value`."""
    noise = torch.from_numpy(generator.laplace(0.0, 1.0, value.numel())).view(value.shape)
    return noise.to(value.dtype).to(value.device, non_blocking=True)


def noise_rows(
    value: Tensor,
    generators: Sequence[RandomGenerator | None],
    unit_noise: Callable[[Tensor, RandomGenerator], Tensor],
) -> Tensor:
    """The noise of several clients in one copy: row i is `unit_noise(value[i], generators[i])`.

    Args:
        value: `[S, ...]`, only looked at for shape, dtype (float32 or float64) and device.
        generators: length S; None gives a row of zeros and draws nothing.
        unit_noise: `standard_normal_like` or `standard_laplace_like`.
    """
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    noise = torch.zeros(value.shape, dtype=dtype, pin_memory=value.is_cuda)  # pinned: the copy does not wait
    for row, generator in zip(noise, generators, strict=True):
        if generator is not None:
            row.copy_(unit_noise(row, generator))
    return noise.to(value.device, value.dtype, non_blocking=True)
