"""Records of a sum computed again: what code keeps of others, wherever that is, shows in their gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.reference import ClipRequest, clip_factors

SumOf = Callable[[Inputs, Tensor, ClipRequest], tuple[Tensor, Tensor]]
ALWAYS = 2  # first sums of a thread, each of which has a pass of records that are computed again
SHARE = 1 / 48  # of the passes of later sums, on average; each takes two computations
_FEWEST = 2  # records: a single one, computed twice, may see itself as the one before
_SAME = 1e-5  # relative, of norms and sums; kernels of a GPU add in any order
_NOTHING = 1e-6  # clip norms of a record; a gradient of rounding errors alone may have another norm

_CHOICE = random.SystemRandom()  # a user's code cannot foresee it, and no other draw depends on it


class Repeated:
    """Computes some records of sums that are released twice: once together, then in another order and in two parts.

    Their clipped sum and norms must be equal. Both computations are within `still`, where all
    records draw the same numbers.
    """

    def __init__(self, still: Callable[[], AbstractContextManager[Any]]) -> None:
        self._still, self._sums = still, 0

    def check(self, sum_of: SumOf, x: Inputs, y: Tensor, request: ClipRequest, size: int) -> None:
        """Compare records of a sum that `sum_of` computes in passes of `size` records.

        Raises UserError if they have another gradient when they are computed again.
        """
        self._sums += 1
        passes = int(SHARE * -(-len(y) // size) + _CHOICE.random())
        if self._sums <= ALWAYS:
            passes = max(passes, 1)
        count = min(len(y), passes * max(size, _FEWEST))
        if not count or math.isinf(request.clip_norm):  # without clipping nothing is promised
            return
        rows = _CHOICE.sample(range(len(y)), count)
        request = replace(request, group=None, num_groups=1, into=None, released=False)
        order = _CHOICE.sample(range(count), count)
        cut = _CHOICE.randrange(count)
        with self._still():
            once, norms = sum_of(take(x, rows), y[rows], request)
            again, others = torch.zeros_like(once), torch.zeros_like(norms)
            for places in filter(None, (order[:cut], order[cut:])):
                part = [rows[place] for place in places]
                sums, others[places] = sum_of(take(x, part), y[part], request)
                again += sums
        if not _are_same(once, again, norms, others, request):
            raise UserError(
                "`model` must give a record the same gradient whenever it is computed, got another one later. "
                "Something of a pass stays for the next one: look for counters, averages and caches in attributes, "
                "variables and files, and for random numbers that are not drawn by torch. Nothing of it is released."
            )


def _are_same(once: Tensor, again: Tensor, norms: Tensor, others: Tensor, request: ClipRequest) -> bool:
    """Return whether sums and norms are equal but for rounding; norms that are not finite contribute nothing."""
    nothing = _NOTHING * request.clip_norm
    finite = norms.isfinite() == others.isfinite()
    close = torch.isclose(norms, others, rtol=_SAME, atol=nothing) | ~norms.isfinite()
    clipped = norms.where(norms.isfinite(), 0) * clip_factors(norms, request.clip_norm)
    allowed = _SAME * float(clipped.sum()) + nothing * len(norms)
    moved = (once - again).nan_to_num(posinf=0.0, neginf=0.0)  # a correct build has finite sums; audits try others
    return bool((finite & close).all()) and float(moved.norm()) <= allowed
