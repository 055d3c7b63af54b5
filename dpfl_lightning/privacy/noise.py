"""Random numbers for noise and sampling: AES-256 in counter mode, keyed by the operating system."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

_ZEROS = bytes(1 << 16)  # plain text of the cipher: its encryption is the key stream, 64 KiB at a time
PIECE = 1 << 15  # numbers of a sum that get their noise at once on a CPU: they stay in the caches


class RandomGenerator:
    """Cryptographic random numbers of one stream; no other stream may use its `key` of 32 bytes.

    The numbers are the key stream of AES-256 in counter mode (`cryptography`, OpenSSL). Normal numbers come from the
    ziggurat method with 256 layers, in float64 (Marsaglia and Tsang, 2000), from 64 fresh bits each, so that the tail
    ends beyond 12 standard deviations.

    **Accuracy** `integer_normals` with scale s (2^18 to 2^22 in ordinary runs) gives each integer within 3.6 s a
    probability that is within a factor 1 +- 2^-50 s of that of a rounded normal number, and within a factor
    1 +- 2^-43 s up to 8 s, beyond which 10^-15 of all numbers lie. It is an estimate, not a proof, that errors of 2^-30
    have no common sign and therefore move a privacy loss by about 3e-5 in 10^9 numbers.
    """

    def __init__(self, key: bytes) -> None:
        self._on_device: torch.Generator | None = None
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> np.ndarray:
        """Return uniform 64-bit numbers, `[count]` uint64."""
        size = 8 * count
        stream = bytearray(size + 15)  # the cipher needs space for one more block
        for start in range(0, size, len(_ZEROS)):
            length = min(len(_ZEROS), size - start)
            self._encryptor.update_into(memoryview(_ZEROS)[:length], memoryview(stream)[start : start + length + 15])
        return np.frombuffer(stream, np.uint64, count)

    def uniform(self, count: int) -> np.ndarray:
        """Return uniform numbers, `[count]` float64 in (0, 1]: multiples of 2^-64 plus a half, each rounded once."""
        return (self.words(count).astype(np.float64) + 0.5) * 2.0**-64

    def integer_normals(self, count: int, scale: float) -> np.ndarray:
        """Return normal numbers of mean 0 and std `scale`, rounded to integers, `[count]` float64."""
        (try_first, retry, layers), words = _ziggurat(), self.words(count)
        noise, rejected, settled = np.empty(count), np.empty(count, np.int64), 0
        rejected = rejected[: try_first(words, *layers, scale, noise, rejected)]
        while settled < len(rejected):
            spare = self.words(4 * (len(rejected) - settled) + 2)
            settled = retry(words, rejected, spare, *layers, scale, noise, settled)
        return noise

    def integer_laplace(self, count: int, scale: float) -> np.ndarray:
        """Return Laplace numbers of scale `scale`, rounded to integers, `[count]` float64."""
        sizes = np.rint(self.exponential(count) * scale)
        return np.where(self.words(count) >> np.uint64(63), sizes, -sizes)

    def exponential(self, count: int) -> np.ndarray:
        """Return exponential numbers of mean 1, `[count]` float64, as fine in their unbounded tail as near 0.

        The leading zero bits of a uniform number count its halvings, each worth log 2; fresh bits say where in the last
        it is.
        """
        halvings, unfinished = np.zeros(count), np.arange(count)
        while len(unfinished):
            mantissas, exponents = np.frexp((self.words(len(unfinished)) >> np.uint64(11)).astype(np.float64))
            halvings[unfinished] += 53 - exponents
            unfinished = unfinished[mantissas == 0]  # all 53 bits are zero: continue with the next word
        return halvings * np.log(2) - np.log1p(-0.5 * self.uniform(count))

    def gumbel(self, loc: float, scale: float, size: int) -> np.ndarray:
        """Return Gumbel numbers, `[size]` float64."""
        return loc - scale * np.log(-np.log1p(-self.uniform(size)))

    def coins(self, count: int, heads: float) -> np.ndarray:
        """Return independent coins, `[count]` bool: each True with probability `heads` in [0, 1), exact to 2^-64."""
        return self.words(count) < np.uint64(int(heads * 2.0**64))

    def permutation(self, count: int) -> np.ndarray:
        """Return the numbers below `count` in uniformly random order (up to a bias of count^2 / 2^65)."""
        return np.argsort(self.words(count), kind="stable")

    def on(self, device: torch.device) -> torch.Generator:
        """Return the device's generator (Philox on CUDA), seeded once by 64 bits of this stream."""
        if self._on_device is None:
            seed = int(self.words(1).view(np.int64)[0])
            self._on_device = torch.Generator(device).manual_seed(seed)
        return self._on_device


class Streams:
    """Creates the random generators of a run.

    Without `secret`, every generator has a fresh key from the operating system, so no noise is ever drawn twice: not
    after a crash, not from a copied folder, not with edited code and not in another run or process. A secret of 32
    bytes makes noise that repeats, which protects nobody.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self.secret = secret

    @classmethod
    def of_key(cls, key: str, seed: int, run: str) -> Streams:
        """Return streams that repeat; they differ for every key, seed and run (its configuration)."""
        return cls(_digest(b"dpfl simulation", key, seed, run))

    def generator(self, purpose: str, round: int, client: int, number: int = 0) -> RandomGenerator:
        """Return the generator of one charge: `number` counts those of the client in this round."""
        if self.secret is None:
            return RandomGenerator(os.urandom(32))
        return RandomGenerator(_digest(self.secret, purpose, round, client, number))


def _digest(key: bytes, *parts: str | int) -> bytes:
    """Return 32 bytes; a JSON list separates the parts, so that different lists never give the same text."""
    return hashlib.blake2b(json.dumps(parts).encode(), key=key, digest_size=32).digest()


def stream_words(purpose: str, *numbers: int) -> list[int]:
    """Return the 32-bit words that name a stream of PUBLIC random numbers: two for each number below 2^64."""
    name = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big")
    return [word for number in (name, *numbers) for word in (number >> 32, number & 0xFFFFFFFF)]


@dataclass(frozen=True)
class Distribution:
    """How integer noise is drawn, and its density, from which audits and tests compute what a release reveals.

    `draw` returns `[count]` numbers of a scale from a stream. `fill` fills a tensor with noise of scale 1 from the
    generator of a GPU, and is None for noise that is always drawn on the CPU. `log_density` is that of noise of scale
    1, symmetric about 0; `kurtosis` is the fourth moment / squared variance.
    """

    draw: Callable[[RandomGenerator, int, float], np.ndarray]
    log_density: Callable[[np.ndarray], np.ndarray]
    kurtosis: float
    fill: Callable[[Tensor, torch.Generator], object] | None = None


def _fill_laplace(noise: Tensor, generator: torch.Generator) -> None:
    noise.exponential_(generator=generator).sub_(torch.empty_like(noise).exponential_(generator=generator))


NORMAL = Distribution(
    draw=lambda stream, count, scale: stream.integer_normals(count, scale),
    log_density=lambda x: -0.5 * x**2 - 0.5 * np.log(2 * np.pi),
    kurtosis=3.0,
    fill=lambda noise, generator: noise.normal_(generator=generator),
)
LAPLACE = Distribution(
    draw=lambda stream, count, scale: stream.integer_laplace(count, scale),
    log_density=lambda x: -np.abs(x) - np.log(2),
    kurtosis=6.0,
    fill=_fill_laplace,
)


def integer_noise(generator: RandomGenerator, distribution: Distribution, scale: float, like: Tensor) -> Tensor:
    """Return integer noise, float64, with the shape and the device of `like`.

    On a CPU it is drawn in pieces, so that it is the same whether a caller asks for it in pieces or at once.
    """
    if like.device.type == "cuda" and distribution.fill is not None:
        return device_noise(generator.on(like.device), distribution.fill, scale, like)
    numbers = like.numel()
    lengths = [min(PIECE, numbers - start) for start in range(0, max(1, numbers), PIECE)]
    pieces = [distribution.draw(generator, length, scale) for length in lengths]
    noise = torch.from_numpy(pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).view(like.shape)
    return noise.to(like.device) if like.device.type == "cuda" else noise


def device_noise(
    generator: torch.Generator, fill: Callable[[Tensor, torch.Generator], object], scale: float, like: Tensor
) -> Tensor:
    """Return rounded noise from the generator of a device."""
    noise = torch.empty(like.shape, dtype=torch.float64, device=like.device)
    fill(noise, generator)
    return noise.mul_(scale).round_()


def noised_on_grid(sums: Tensor, noise: Tensor, step: float, unit: float, released: Tensor) -> None:
    """Fill `released` with `(round(sums / step) + noise) * unit`, in one pass over vectors of float64 on a CPU.

    `step` is a power of two, and `released` may be float32.
    """
    _compiled(_add_on_grid)(sums.numpy(), noise.numpy(), 1 / step, unit, released.numpy())


def _layers() -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Return 256 layers of equal area under exp(-x^2 / 2): right ends `[257]`, heights there `[257]`, inside, begin.

    The ends are widest first, from the base (whose area includes the tail, which begins at `begin`) to 0. `inside`
    `[256]` is how many of 2^53 steps of a layer lie under the next layer, where the curve need not be evaluated.
    """
    from scipy.special import erfc

    begin = 3.6541528853610088  # begin of the tail for 256 layers
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
    """Return the two compiled loops and their tables."""
    return _compiled(_first_tries), _compiled(_other_tries), _layers()


@cache
def _compiled(loop: Callable[..., Any]) -> Any:
    from dpfl_lightning.privacy.clipping.compiled import compiled  # importing numba takes half a second

    return compiled(loop)


def _add_on_grid(sums, noise, steps, unit, released):  # type: ignore[no-untyped-def]
    for i in range(len(sums)):
        released[i] = (np.rint(sums[i] * steps) + noise[i]) * unit


def _first_tries(words, ends, heights, inside, begin, scale, noise, left):  # type: ignore[no-untyped-def]
    """Fill `noise` from one word each; store those that need more (one of 64) in `left` and return their count.

    8 bits of a word choose the layer, the upper 54 the signed position in it.
    """
    rejected = 0
    for i in range(len(words)):  # without a branch, which the processor could not predict
        layer = words[i] & np.uint64(255)
        step = float(np.int64(words[i]) >> np.int64(10)) + 0.5  # of 2^53 on either side
        noise[i] = np.rint(step * (ends[layer] * 2.0**-53) * scale)
        left[rejected] = i
        rejected += abs(step) >= inside[layer]
    return rejected


def _other_tries(words, left, spare, ends, heights, inside, begin, scale, noise, settled):  # type: ignore[no-untyped-def]
    """Settle the numbers at `left[settled:]`, in order, and return how many of `left` are settled then.

    Each number takes spare words until one is accepted. A try takes at most two words and begins only if two are left:
    giving up a started try would favour tries that take one word. The word of an unsettled number stays in `words`.
    """
    used, last = 0, len(spare) - 1
    while settled < len(left) and used < last:
        i = left[settled]
        layer = words[i] & np.uint64(255)
        step = float(np.int64(words[i]) >> np.int64(10)) + 0.5
        x, accepted = step * (ends[layer] * 2.0**-53), abs(step) < inside[layer]
        if not accepted and layer == 0:  # in the tail
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
            noise[i] = np.rint(x * scale)
            settled += 1
    return settled
