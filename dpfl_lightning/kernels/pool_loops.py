"""The loop of `pooling.max_relu`, compiled by numba."""

import numpy as np

from dpfl_lightning.privacy.clipping.compiled import compiled
from dpfl_lightning.privacy.clipping.convolutions import LOSER


def _max_relu(y, pooled, winners, records, height, width, channels):  # type: ignore[no-untyped-def]
    """Fill pooled and winners `[B, H // 2, W // 2, C]` from y `[B, H, W, C]`: flat arrays."""
    line, to = width * channels, 0
    for record in range(records):
        for h in range(0, height - 1, 2):
            for w in range(0, width - 1, 2):
                at = (record * height + h) * line + w * channels
                first, right = y[at : at + channels], y[at + channels : at + 2 * channels]
                below = y[at + line : at + line + channels]
                opposite = y[at + line + channels : at + line + 2 * channels]
                most, winner = pooled[to : to + channels], winners[to : to + channels]
                for c in range(channels):
                    value, code = first[c], 0
                    if right[c] > value or right[c] != right[c]:  # what is not a number wins
                        value, code = right[c], 1
                    if below[c] > value or below[c] != below[c]:
                        value, code = below[c], 2
                    if opposite[c] > value or opposite[c] != opposite[c]:
                        value, code = opposite[c], 3
                    if value <= 0:
                        value, code = np.float32(0), LOSER
                    most[c], winner[c] = value, code
                to += channels


max_relu = compiled(_max_relu)
