"""The loops of `pooling.py`, compiled by numba."""

import functools
from typing import Any

import numpy as np

from dpfl_lightning.kernels.compiled import compiled

LOSER = 4  # the number of a winner that passes no gradient on


@functools.cache
def max_relu(channels: int) -> Any:
    """Return the loops for maps with this number of channels, which is a constant so that they become vectors.

    They take flat arrays y `[B, H, W, channels]` and fill pooled and winners `[B, H // 2, W // 2, channels]`. The other
    arguments are B, H, W.
    """

    def loops(y, pooled, winners, records, height, width):  # type: ignore[no-untyped-def]
        line, to = width * channels, 0
        for record in range(records):
            for h in range(0, height - 1, 2):
                for w in range(0, width - 1, 2):
                    at = (record * height + h) * line + w * channels
                    first, second = y[at : at + channels], y[at + channels : at + 2 * channels]
                    third, fourth = (
                        y[at + line : at + line + channels],
                        y[at + line + channels : at + line + 2 * channels],
                    )
                    values, places = pooled[to : to + channels], winners[to : to + channels]
                    for o in range(channels):
                        most, place = first[o], 0
                        for value, other in ((second[o], 1), (third[o], 2), (fourth[o], 3)):
                            larger = (value > most) | (value != value)
                            most, place = (value if larger else most), (other if larger else place)
                        dead = most <= 0
                        values[o], places[o] = (np.float32(0) if dead else most), (LOSER if dead else place)
                    to += channels

    loops.__qualname__ += f"_{channels}"  # separate cache files, because numba's index files cannot be shared
    return compiled(loops)
