"""Where randomness that protects someone comes from: streams keyed by the noise key, never by the logged seed."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def new_noise_key() -> int:
    """128 fresh bits from the operating system."""
    return secrets.randbits(128)


class Streams:
    """Independent generators, one for each (purpose, round, client, attempt), all keyed by the noise key.

    Args:
        key: 128-bit integer. Whoever knows it can subtract the noise: it is never logged.

    **Guarantees** The same arguments give the same stream in any process and for any number of workers; other
    arguments give an independent one (`numpy.random.SeedSequence` into a full 128-bit PCG64DXSM state; a torch CPU
    generator would keep only 32 bits of a manual seed). `attempt` counts the releases of one (purpose, round, client)
    that were not replays of each other, so that no noise ever protects two different values.

    >>> a, b = (Streams(7).generator("noise", round=1, client=0) for _ in range(2))
    >>> bool(a.standard_normal() == b.standard_normal())
    True
    """

    def __init__(self, key: int) -> None:
        self.key = key

    def generator(self, purpose: str, round: int, client: int, attempt: int = 0) -> np.random.Generator:
        name = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big")
        # Every number takes two 32-bit words, so no two argument lists flatten to the same words.
        words = [word for number in (name, round, client, attempt) for word in (number >> 32, number & 0xFFFFFFFF)]
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(self.key, spawn_key=words)))


def standard_normal_like(value: Tensor, generator: np.random.Generator) -> Tensor:
    """Standard normal noise with the shape, dtype (float32 or float64) and device of `value`."""
    dtype = np.float64 if value.dtype == torch.float64 else np.float32
    noise = torch.from_numpy(generator.standard_normal(tuple(value.shape), dtype=dtype))
    return noise.to(value.device, value.dtype, non_blocking=True)


def standard_normal_rows(value: Tensor, generators: Sequence[np.random.Generator | None]) -> Tensor:
    """The noise of several clients in one copy: row i is `standard_normal_like(value[i], generators[i])`.

    Args:
        value: `[S, ...]`, only looked at for shape, dtype (float32 or float64) and device.
        generators: length S; None gives a row of zeros and draws nothing.
    """
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    noise = torch.zeros(value.shape, dtype=dtype, pin_memory=value.is_cuda)  # pinned: the copy does not wait
    for row, generator in zip(noise.numpy(), generators, strict=True):
        if generator is not None:
            row[...] = generator.standard_normal(row.shape, dtype=row.dtype.type)
    return noise.to(value.device, value.dtype, non_blocking=True)
