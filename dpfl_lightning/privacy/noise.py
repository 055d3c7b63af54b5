"""The one random number generator for noise and sampling: AES-256 in counter mode, keyed by the operating system."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

_ZEROS = bytes(1 << 16)  # plain text of the cipher: what it encrypts is its key stream, 64 KiB at a time


class RandomGenerator:
    """Cryptographic random numbers of one stream.

    The words are the key stream of AES-256 in counter mode (`cryptography`, OpenSSL). Normal numbers come from them by
    the ziggurat method with 256 layers, in float64: each takes 64 fresh bits, and its tail ends beyond 12 standard
    deviations, not at the few that 32 bits reach.

    Args:
        key: 32 bytes that belong to this stream alone.

    **Accuracy** `integer_normals` with scale s gives an integer within 3.6 s a probability that is within a factor
    1 +- 2^-50 s of that of a rounded normal number, and within a factor 1 +- 2^-43 s up to 8 s, beyond which 10^-15 of
    all numbers lie. The scales of ordinary runs are 2^18 to 2^22. That errors of 2^-30 have no common sign, so that in
    10^9 numbers they move a privacy loss by about 3e-5, is an estimate and no proof.

    Reference: Marsaglia and Tsang (2000), The ziggurat method for generating random variables.

    >>> first, again = RandomGenerator(bytes(32)), RandomGenerator(bytes(32))
    >>> bool((first.integer_normals(5, 1e6) == again.integer_normals(5, 1e6)).all())
    True
    """

    def __init__(self, key: bytes) -> None:
        self._on_device: torch.Generator | None = None
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> np.ndarray:
        """Uniform 64-bit numbers, `[count]` uint64."""
        size = 8 * count
        stream = bytearray(size + 15)  # the cipher asks for a block more
        for start in range(0, size, len(_ZEROS)):
            length = min(len(_ZEROS), size - start)
            self._encryptor.update_into(memoryview(_ZEROS)[:length], memoryview(stream)[start : start + length + 15])
        return np.frombuffer(stream, np.uint64, count)

    def uniform(self, count: int) -> np.ndarray:
        """Uniform numbers, `[count]` float64 in (0, 1]: multiples of 2^-64 and a half, each rounded once."""
        return (self.words(count).astype(np.float64) + 0.5) * 2.0**-64

    def integer_normals(self, count: int, scale: float) -> np.ndarray:
        """Normal numbers of mean 0 and standard deviation `scale` < 2^58, rounded to integers, `[count]` int64."""
        (first, others, layers), words = _ziggurat(), self.words(count)
        noise, left, settled = np.empty(count, np.int64), np.empty(count, np.int64), 0
        left = left[: first(words, *layers, scale, noise, left)]
        while settled < len(left):
            settled = others(words, left, self.words(4 * (len(left) - settled) + 2), *layers, scale, noise, settled)
        return noise

    def integer_laplace(self, count: int, scale: float) -> np.ndarray:
        """Laplace numbers of scale `scale`, each rounded to an integer, `[count]` int64."""
        sizes = np.rint(self.exponential(count) * scale).astype(np.int64)
        return np.where(self.words(count) >> np.uint64(63), sizes, -sizes)

    def exponential(self, count: int) -> np.ndarray:
        """Exponential numbers of mean 1, `[count]` float64, as fine in their tail as near 0, and without an end.

        The leading zero bits of a uniform number tell its halvings, each worth log 2; fresh bits tell where it lies
        within the last one.
        """
        halvings, left = np.zeros(count), np.arange(count)
        while len(left):
            mantissas, exponents = np.frexp((self.words(len(left)) >> np.uint64(11)).astype(np.float64))
            halvings[left] += 53 - exponents
            left = left[mantissas == 0]  # all 53 bits were zero: count on
        return halvings * np.log(2) - np.log1p(-0.5 * self.uniform(count))

    def gumbel(self, loc: float, scale: float, size: int) -> np.ndarray:
        """Gumbel numbers, `[size]` float64."""
        return loc - scale * np.log(-np.log1p(-self.uniform(size)))

    def coins(self, count: int, heads: float) -> np.ndarray:
        """Independent coins, `[count]` bool, each True with probability `heads` in [0, 1), exact to 2^-64."""
        return self.words(count) < np.uint64(int(heads * 2.0**64))

    def permutation(self, count: int) -> np.ndarray:
        """The numbers below `count`, every order equally likely (but for count^2 / 2^65)."""
        return np.argsort(self.words(count), kind="stable")

    def on(self, device: torch.device) -> torch.Generator:
        """The device's generator (Philox on CUDA), seeded once by 64 bits of this stream."""
        if self._on_device is None:
            seed = int(self.words(1).view(np.int64)[0])
            self._on_device = torch.Generator(device).manual_seed(seed)
        return self._on_device


class Streams:
    """Where the generators of a run come from.

    Args:
        simulation: None draws a fresh key from the operating system for every generator, so no noise is ever drawn
            twice: not after a crash, from a copied or restored folder, with edited code, in another run or by another
            process. A secret of 32 bytes makes a reproducible simulation instead, which protects nobody.

    >>> protected, simulated = Streams(), Streams(bytes(32))
    >>> [len({int(one.generator("noise", round=1, client=0).words(1)[0]) for _ in range(2)})
    ...  for one in (protected, simulated)]
    [2, 1]
    """

    def __init__(self, simulation: bytes | None = None) -> None:
        self.simulation = simulation

    @classmethod
    def simulated(cls, noise_key: str, seed: int, run: str) -> Streams:
        """The streams of a simulation: others for every key, seed and run (what distinguishes its configuration)."""
        return cls(_digest(b"dpfl simulation", noise_key, seed, run))

    def generator(self, purpose: str, round: int, client: int, number: int = 0) -> RandomGenerator:
        """The generator of one purpose of a client's release.

        Args:
            number: of the charge among those of the client in this round: each has noise of its own.
        """
        if self.simulation is None:
            return RandomGenerator(os.urandom(32))
        return RandomGenerator(_digest(self.simulation, purpose, round, client, number))

    def words(self, device: torch.device) -> str:
        """What reports say of noise and sampling."""
        if self.simulation is not None:
            return "simulated: it follows from privacy.noise_key"
        source = "AES-256 in counter mode, keyed afresh by the operating system for every release"
        if device.type == "cuda":
            return f"the GPU's generator (Philox), seeded for every release by {source}"
        return source


def _digest(key: bytes, *parts: str | int) -> bytes:
    """32 bytes; a JSON list separates the parts, so that no two lists of them give one text."""
    return hashlib.blake2b(json.dumps(parts).encode(), key=key, digest_size=32).digest()


def stream_words(purpose: str, *numbers: int) -> list[int]:
    """The 32-bit words that name a stream of PUBLIC random numbers: two for each number below 2^64."""
    name = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big")
    return [word for number in (name, *numbers) for word in (number >> 32, number & 0xFFFFFFFF)]


def integer_noise(generator: RandomGenerator, laplace: bool, scale: float, like: Tensor) -> Tensor:
    """Integer noise in the shape and on the device of `like`, int64: rounded normal or Laplace numbers."""
    if like.device.type == "cuda":
        return device_noise(generator.on(like.device), laplace, scale, like)
    draw = generator.integer_laplace if laplace else generator.integer_normals
    return torch.from_numpy(draw(like.numel(), scale)).view(like.shape)


def device_noise(generator: torch.Generator, laplace: bool, scale: float | Tensor, like: Tensor) -> Tensor:
    """The same from the generator of a device; `scale` may be a tensor that broadcasts to `like`."""
    noise = torch.empty(like.shape, dtype=torch.float64, device=like.device)
    if laplace:
        noise.exponential_(generator=generator).sub_(torch.empty_like(noise).exponential_(generator=generator))
    else:
        noise.normal_(generator=generator)
    return noise.mul_(scale).round_().long()


# ---- the ziggurat


def _layers() -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """The right ends of 256 layers of one area under exp(-x^2 / 2), widths first, and the heights at them.

    Returns:
        ends `[257]`, from the base (as wide as its area asks for, its tail included) up to 0; heights `[257]` at them;
        how many of 2^53 steps of each layer `[256]` lie under the next one and need no look at the curve; the tail's
        begin.
    """
    from scipy.special import erfc

    begin = 3.6541528853610088  # the tail's begin at which 256 layers fit
    height = np.exp(-0.5 * begin * begin)
    area = begin * height + np.sqrt(np.pi / 2) * erfc(begin / np.sqrt(2))
    ends, heights = np.zeros(257), np.ones(257)
    ends[:2], heights[:2] = (area / height, begin), (0.0, height)
    for i in range(2, 256):
        heights[i] = heights[i - 1] + area / ends[i - 1]
        ends[i] = np.sqrt(-2 * np.log(heights[i]))
    return ends, heights, np.floor(2.0**53 * ends[1:] / ends[:-1]) - 1, begin


@cache
def _ziggurat() -> tuple[Any, Any, tuple[np.ndarray, np.ndarray, np.ndarray, float]]:
    """Two compiled loops and their tables, of which the first loop needs some only."""
    from dpfl_lightning.kernels.compiled import compiled  # numba: half a second, for those who draw noise

    return compiled(_first_tries), compiled(_other_tries), _layers()


def _first_tries(words, ends, heights, inside, begin, scale, noise, left):  # type: ignore[no-untyped-def]
    """Fill `noise` from one of `words` each, where that is enough: 63 of 64. The other places fill `left`: how many.

    8 bits of a word choose the layer, the upper 54 the place in it, with its sign.
    """
    others = 0
    for i in range(len(words)):
        layer = words[i] & np.uint64(255)
        step = float(np.int64(words[i]) >> np.int64(10)) + 0.5  # of 2^53 on either side
        if abs(step) < inside[layer]:
            noise[i] = np.int64(np.rint(step * (ends[layer] * 2.0**-53) * scale))
        else:
            left[others] = i
            others += 1
    return others


def _other_tries(words, left, spare, ends, heights, inside, begin, scale, noise, settled):  # type: ignore[no-untyped-def]
    """Settle the numbers at `left[settled:]`, in their order; returns how many of `left` are settled then.

    Each takes spare words until one is accepted. A try takes at most two and begins only where two are left: to give up
    a try that has begun would favour those that take one. The word of a number that goes on waiting stays in `words`.
    """
    used, last = 0, len(spare) - 1
    while settled < len(left) and used < last:
        i = left[settled]
        layer = words[i] & np.uint64(255)
        step = float(np.int64(words[i]) >> np.int64(10)) + 0.5
        x, accepted = step * (ends[layer] * 2.0**-53), abs(step) < inside[layer]
        if not accepted and layer == 0:  # in the tail, or a pair more
            x = -np.log((float(spare[used]) + 0.5) * 2.0**-64) / begin
            accepted = -2 * np.log((float(spare[used + 1]) + 0.5) * 2.0**-64) > x * x
            x = begin + x if step > 0 else -begin - x
            used += 2
        elif not accepted:
            height = (float(spare[used]) + 0.5) * 2.0**-64
            accepted = heights[layer] + height * (heights[layer + 1] - heights[layer]) < np.exp(-0.5 * x * x)
            words[i] = spare[used + 1]
            used += 2
        if accepted:
            noise[i] = np.int64(np.rint(x * scale))
            settled += 1
    return settled
