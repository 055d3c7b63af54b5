"""Builds that break their promise, by patching the real code: what an audit must catch."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from pytest import MonkeyPatch

from dpfl_lightning.federated import engine, stacked
from dpfl_lightning.privacy import clipping, fast_clipping, sampling, stacked_clipping
from dpfl_lightning.privacy.mechanism import Laplace, Mechanism, MechanismRows
from dpfl_lightning.privacy.noise import RandomGenerator

Mutate = Callable[[MonkeyPatch], None]
SUMS = (clipping.VmapClippedSum, fast_clipping.FastClippedSum)


def half_the_noise(patch: MonkeyPatch) -> None:
    def halved(mechanism: Mechanism) -> Mechanism:
        return dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 2)

    alone, rows = Mechanism.privatise, MechanismRows.__init__

    def set_up(self: MechanismRows, mechanisms: Sequence[Mechanism], *args: Any, **more: Any) -> None:
        rows(self, [halved(one) for one in mechanisms], *args, **more)

    patch.setattr(Mechanism, "privatise", lambda self, *args: alone(halved(self), *args))
    patch.setattr(MechanismRows, "__init__", set_up)


def no_clipping(patch: MonkeyPatch) -> None:
    def ones(norms, clip_norm):
        return torch.isfinite(norms).to(norms.dtype)

    for module in (clipping, fast_clipping, stacked_clipping):
        patch.setattr(module, "clip_factors", ones)


def clipped_in_l2(patch: MonkeyPatch) -> None:
    """Whatever norm the mechanism stands on."""
    patch.setattr(Laplace, "clip_order", 2)


def gaussian_in_place_of_laplace(patch: MonkeyPatch) -> None:
    """Normal noise of the same scale: it has half the variance, and no pure epsilon."""
    normals = RandomGenerator.integer_normals
    patch.setattr(RandomGenerator, "integer_laplace", lambda self, count, scale: normals(self, count, scale))


def realised_divisor(patch: MonkeyPatch) -> None:
    """The noised sum is divided by the batch that was drawn."""
    _divide_by_the_batch(patch, noise_too=True)


def realised_mean(patch: MonkeyPatch) -> None:
    """The gradient is the mean over the batch that was drawn; its noise is as planned."""
    _divide_by_the_batch(patch, noise_too=False)


def counted_twice(patch: MonkeyPatch) -> None:
    """The sampler hands out every record twice."""
    draw = engine.draw_steps
    patch.setattr(engine, "draw_steps", lambda *args: (np.concatenate([rows, rows]) for rows in draw(*args)))


def last_counted_twice(patch: MonkeyPatch) -> None:
    """The sampler hands out one record of a batch twice."""
    draw = engine.draw_steps
    patch.setattr(engine, "draw_steps", lambda *args: (np.concatenate([rows, rows[-1:]]) for rows in draw(*args)))


def overlapping_chunks(patch: MonkeyPatch) -> None:
    """The record between two chunks is in both sums, but counted once."""
    chunks = clipping.chunks_of
    for kind in SUMS:
        patch.setattr(kind, "__call__", _counted_once(kind.__call__))
    for module in (clipping, fast_clipping):
        patch.setattr(
            module, "chunks_of", lambda *args: (slice(piece.start, piece.stop + 1) for piece in chunks(*args))
        )


def one_noise_for_all_steps(patch: MonkeyPatch) -> None:
    """Every step of a round adds the same noise."""
    begin = RandomGenerator.__init__

    def keep(self, key):
        begin(self, key)
        self.key = key

    draw = RandomGenerator.integer_normals
    patch.setattr(RandomGenerator, "__init__", keep)
    patch.setattr(
        RandomGenerator, "integer_normals", lambda self, *args: draw(RandomGenerator(self.key), *args)
    )


def twice_the_rate(patch: MonkeyPatch) -> None:
    """Records are drawn more often than the accountant was told."""
    draw = sampling.poisson_rows
    patch.setattr(
        sampling, "poisson_rows", lambda records, rate, generator: draw(records, min(1.0, 2 * rate), generator)
    )


#: the four that every audit must catch, and by which checks
MUTANTS: dict[str, tuple[Mutate, set[str]]] = {
    "half the noise": (half_the_noise, {"noise"}),
    "no clipping": (no_clipping, {"sensitivity", "canary"}),
    "realised batch as divisor": (realised_divisor, {"sensitivity", "noise"}),
    "a record counted twice": (counted_twice, {"sensitivity", "sampling"}),
}
#: others, that some engines have no place for
VARIANTS: dict[str, tuple[Mutate, set[str]]] = {
    "mean over the realised batch": (realised_mean, {"sensitivity"}),
    "one record of a batch twice": (last_counted_twice, {"sensitivity", "sampling"}),
    "a record in two chunks": (overlapping_chunks, {"sensitivity"}),
    "one noise for all steps": (one_noise_for_all_steps, {"noise"}),
    "twice the sampling rate": (twice_the_rate, {"sampling"}),
}


class _Drawn(threading.local):
    """What the last sum of this thread held: its place in memory, bytes a row, and records of each row."""

    place, row_bytes, sizes = 0, 1, torch.zeros(1)


def _divide_by_the_batch(patch: MonkeyPatch, noise_too: bool) -> None:
    drawn = _Drawn()
    for kind in SUMS:
        patch.setattr(kind, "__call__", _remembering(kind.__call__, drawn))
    alone, rows, sums = Mechanism.privatise, MechanismRows.privatise, stacked.Stack.clipped_sums

    def privatise(self, clipped, *args):
        first = (clipped.data_ptr() - drawn.place) // drawn.row_bytes
        factor = self.expected_batch_size / max(1.0, float(drawn.sizes[first : first + len(clipped)].sum()))
        return alone(self, clipped, *args) * factor if noise_too else alone(self, clipped * factor, *args)

    def clipped_sums(self, theta, draws):
        drawn.sizes = torch.tensor([max(1.0, len(own)) for own in draws])[:, None, None]
        return sums(self, theta, draws)

    def privatise_rows(self, clipped):
        planned = torch.tensor([one.expected_batch_size for one in self._mechanisms[: len(clipped)]])[:, None, None]
        factor = (planned / drawn.sizes).to(clipped.dtype)
        return (rows(self, clipped) * factor).to(self._like.dtype) if noise_too else rows(self, clipped * factor)

    patch.setattr(Mechanism, "privatise", privatise)
    patch.setattr(stacked.Stack, "clipped_sums", clipped_sums)
    patch.setattr(MechanismRows, "privatise", privatise_rows)


def _remembering(call, drawn):
    def summed(self, params, x, y, clip_norm, group=None, num_groups=1, norms=None, order=2, only=None):
        found = call(self, params, x, y, clip_norm, group, num_groups, norms, order, only)
        own = torch.zeros(len(y), dtype=torch.long) if group is None else group
        drawn.place, drawn.row_bytes = found.data_ptr(), found[0].nbytes
        drawn.sizes = torch.bincount(own, minlength=num_groups)
        return found

    return summed


def _counted_once(call):
    def summed(self, params, x, y, clip_norm, group=None, num_groups=1, norms=None, order=2, only=None):
        if norms is not None:
            norms.append(torch.zeros(len(y)))
        return call(self, params, x, y, clip_norm, group, num_groups, order=order, only=only)

    return summed
