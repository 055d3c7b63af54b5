"""The loops of `float64_sums.Products`, compiled by numba."""

from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from dpfl_lightning.privacy.clipping.compiled import compiled

COLUMNS = 512  # columns of a sum at a time: 4 KiB in float64 stay in the L1 cache


@intrinsic
def at(typing: Any, address: Any) -> Any:
    """Convert an address to a pointer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


def _add_powers(table, order, powers):  # type: ignore[no-untyped-def]
    """Add squares, or absolute values for `order` 1, to `powers` `[B]`; `table` `[K, 4]` holds left, p, right, d."""
    records = len(powers)
    for k in range(len(table)):
        left = carray(at(table[k, 0]), (records, table[k, 1]), np.float32)
        right = carray(at(table[k, 2]), (records, table[k, 3]), np.float32)
        for j in range(records):
            lefts, rights = 0.0, 0.0
            if order == 1:
                for i in range(left.shape[1]):
                    lefts += abs(np.float64(left[j, i]))
                for i in range(right.shape[1]):
                    rights += abs(np.float64(right[j, i]))
            else:
                for i in range(left.shape[1]):
                    lefts += np.float64(left[j, i]) * np.float64(left[j, i])
                for i in range(right.shape[1]):
                    rights += np.float64(right[j, i]) * np.float64(right[j, i])
            powers[j] += lefts * rights


def _add_products(table, totals, num_groups, factors, groups):  # type: ignore[no-untyped-def]
    """Loops of `Products.add`: four records at a time without groups. A record with factor 0 counts as zeros.

    `totals` `[K, 2]` holds the address of each parameter's total and the distance between its rows.
    """
    records, zeros = len(factors), np.zeros(COLUMNS, np.float32)
    fours = 0 if len(groups) else records // 4 * 4
    for k in range(len(table)):
        p, d = table[k, 1], table[k, 3]
        left = carray(at(table[k, 0]), (records, p), np.float32)
        right = carray(at(table[k, 2]), (records, d), np.float32)
        total = carray(at(totals[k, 0]), (num_groups - 1) * totals[k, 1] + p * d, np.float64)
        for begin in range(0, d, COLUMNS):
            width = min(COLUMNS, d - begin)
            for o in range(p):
                start = o * d + begin
                out = total[start : start + width]
                for j in range(0, fours, 4):
                    f0, f1, f2, f3 = factors[j], factors[j + 1], factors[j + 2], factors[j + 3]
                    r0 = right[j, begin : begin + width] if f0 else zeros[:width]
                    r1 = right[j + 1, begin : begin + width] if f1 else zeros[:width]
                    r2 = right[j + 2, begin : begin + width] if f2 else zeros[:width]
                    r3 = right[j + 3, begin : begin + width] if f3 else zeros[:width]
                    f0 = f0 * left[j, o] if f0 else 0.0
                    f1 = f1 * left[j + 1, o] if f1 else 0.0
                    f2 = f2 * left[j + 2, o] if f2 else 0.0
                    f3 = f3 * left[j + 3, o] if f3 else 0.0
                    for i in range(width):
                        out[i] += (f0 * r0[i] + f1 * r1[i]) + (f2 * r2[i] + f3 * r3[i])
                for j in range(fours, records):
                    factor = factors[j]
                    row = right[j, begin : begin + width] if factor else zeros[:width]
                    factor = factor * left[j, o] if factor else 0.0
                    if len(groups):
                        here = groups[j] * totals[k, 1] + start
                        out = total[here : here + width]
                    for i in range(width):
                        out[i] += factor * row[i]


add_powers = compiled(_add_powers, fastmath={"reassoc", "contract"})
add_products = compiled(_add_products, fastmath={"contract"})
