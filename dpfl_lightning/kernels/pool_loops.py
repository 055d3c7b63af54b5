"""The loops of `pooling.py`, compiled by numba; the innermost one is written in LLVM instructions."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from dpfl_lightning.kernels import LOSER
from dpfl_lightning.kernels.compiled import compiled
from dpfl_lightning.kernels.windows import HALF, load, vector


def _max_relu(y, pooled, winners, records, height, width, channels):  # type: ignore[no-untyped-def]
    """Fill pooled and winners `[B, H // 2, W // 2, C]` from y `[B, H, W, C]`: flat arrays.

    Pooled and winners have room for `HALF` more numbers, because a window fills whole vectors; what is too much is
    written over by the next window.
    """
    line, to = width * channels, 0
    rest = np.zeros(line + 2 * channels + HALF, np.float32)
    for record in range(records):
        for h in range(0, height - 1, 2):
            for w in range(0, width - 1, 2):
                at = (record * height + h) * line + w * channels
                whole = at + line + 2 * channels + HALF <= len(y)
                if not whole:
                    rest[: min(len(rest), len(y) - at)] = y[at : at + len(rest)]
                for o in range(0, channels, HALF):
                    if whole:
                        max_relu_of_window(y, at + o, channels, line, pooled, winners, to + o)
                    else:
                        max_relu_of_window(rest, o, channels, line, pooled, winners, to + o)
                to += channels


@intrinsic
def max_relu_of_window(typing, y, at, right, down, pooled, winners, to):  # type: ignore[no-untyped-def]
    """Fill `HALF` numbers of `pooled` and `winners` from `to` on, for the window of `y` whose first corner is `at`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, at, right, down, _, _, to = args
        y, pooled, winners = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 4, 5))
        bytes_of = ir.VectorType(ir.IntType(8), HALF)

        def codes(code: int) -> Any:
            return ir.Constant(bytes_of, [code] * HALF)

        def number(place: Any) -> Any:
            return load(builder, builder.bitcast(builder.gep(y, [place]), vector(HALF).as_pointer()))

        below = builder.add(at, down)
        most, winner = number(at), codes(0)
        for code, place in ((1, builder.add(at, right)), (2, below), (3, builder.add(below, right))):
            value = number(place)
            nan, above = builder.fcmp_unordered("uno", value, value), builder.fcmp_ordered(">", value, most)
            wins = builder.or_(nan, above)
            most, winner = builder.select(wins, value, most), builder.select(wins, codes(code), winner)
        zeros = ir.Constant(most.type, None)
        dead = builder.fcmp_ordered("<=", most, zeros)
        for array, kind, result in (
            (pooled, most.type, builder.select(dead, zeros, most)),
            (winners, bytes_of, builder.select(dead, codes(LOSER), winner)),
        ):
            builder.store(result, builder.bitcast(builder.gep(array, [to]), kind.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(y, at, right, down, pooled, winners, to), generate


max_relu = compiled(_max_relu)
