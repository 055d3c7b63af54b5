"""The loops of `dense_conv.py`, compiled by numba.

The innermost ones are written in LLVM instructions, so that their sums stay in registers: with plain numba for the
products a convolution takes 6 to 9 times as long, for the transforms 3 to 14 times, and torch's are faster than both.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from dpfl_lightning.kernels.windows import HALF, copy_rows, load, multiply_add, vector
from dpfl_lightning.privacy.clipping.compiled import compiled
from dpfl_lightning.runtime.loops import LANES

TILE = 2  # rows and columns of the output that are computed together
BLOCK = 12  # tiles at a time, which stay in the caches
ROWS = 6  # rows of a product that are computed together, `LANES` columns each: their sums fill 12 registers of AVX2
QUADS = 4  # the same for weight gradients, whose rows are output channels
DEPTH = 49  # tiles at a time for weight gradients; odd, so that the points do not compete for the same cache lines

Matrix = Sequence[Sequence[float]]


def forward_loops(input_transform: Matrix, output_transform: Matrix) -> Any:
    """Return the loops of a convolution by the algorithm of these matrices, `[n, n]` and `[TILE, n]`.

    They take flat arrays: x `[B, H, W, C]`, the transformed weights `[n * n, panels, C, LANES]` (of O numbers, filled
    up with zeros), a bias of O numbers, and y `[B, H', W', O]`, which they fill; then the sizes B, H, W, C, H', W', O
    and the padding. C and O are multiples of `HALF`.
    """
    side = len(input_transform)
    points = side * side
    transform_in, transform_out = _transform(input_transform, False), _transform(output_transform, True)

    def convolve(x, weights, bias, y, records, height, width, channels, out_h, out_w, out, pad_h, pad_w):  # type: ignore[no-untyped-def]
        down, across, panels = (out_h + TILE - 1) // TILE, (out_w + TILE - 1) // TILE, (out + LANES - 1) // LANES
        line, tiles, wide = (TILE * across + side - TILE) * channels, down * across, panels * LANES
        padded = np.zeros((TILE * down + side - TILE) * line, np.float32)
        entered, products = np.empty(BLOCK * points * channels, np.float32), np.empty(BLOCK * points * wide, np.float32)
        edge = np.zeros(TILE * TILE * out, np.float32)
        for first in range(0, records * tiles, BLOCK):
            count = min(BLOCK, records * tiles - first)
            for t in range(count):
                record, place = (first + t) // tiles, (first + t) % tiles
                if place == 0:
                    corner, size = pad_h * line + pad_w * channels, width * channels
                    copy_rows(x, record * height * size, size, padded, corner, line, height, size)
                at = (place // across * line + place % across * channels) * TILE
                for c in range(0, channels, HALF):
                    to = t * points * channels + c
                    transform_in(padded, at + c, line, channels, entered, to, side * channels, channels, bias, 0)
            products[:] = 0
            for point in range(points):
                for panel in range(panels):
                    of = (point * panels + panel) * channels * LANES
                    for t in range(0, count, ROWS):
                        at, to = (t * points + point) * channels, (t * points + point) * wide + panel * LANES
                        step = points * channels
                        product_of_rows(entered, at, step, 1, weights, of, LANES, channels, products, to, points * wide)
            for t in range(count):
                record, place = (first + t) // tiles, (first + t) % tiles
                h, w, of = place // across * TILE, place % across * TILE, t * points * wide
                to = ((record * out_h + h) * out_w + w) * out
                if h + TILE <= out_h and w + TILE <= out_w:
                    for o in range(0, out, HALF):
                        transform_out(products, of + o, side * wide, wide, y, to + o, out_w * out, out, bias, o)
                else:
                    for o in range(0, out, HALF):
                        transform_out(products, of + o, side * wide, wide, edge, o, TILE * out, out, bias, o)
                    rows, numbers = min(TILE, out_h - h), min(TILE, out_w - w) * out
                    copy_rows(edge, 0, TILE * out, y, to, out_w * out, rows, numbers)

    convolve.__qualname__ += f"_{side}"  # separate cache files, because numba's index files cannot be shared
    return compiled(convolve)


def weight_loops(input_transform: Matrix, dy_transform: Matrix, dw_transform: Matrix) -> Any:
    """Return the loops of each record's weight gradient by these matrices, `[n, n]`, `[n, TILE]` and `[size, n]`.

    They take flat arrays: x `[B, H, W, C]`, dy `[B, H', W', O]` and dw `[B, O, size, size, C]`, which they fill; then
    the sizes B, H, W, C, H', W', O and the padding. C and O are multiples of `HALF`.
    """
    side, size = len(input_transform), len(dw_transform)
    points = side * side
    transform_x, transform_dy = _transform(input_transform, False), _transform(dy_transform, False)
    transform_out = _transform(dw_transform, False)

    def weights(x, dy, dw, records, height, width, channels, out_h, out_w, out, pad_h, pad_w):  # type: ignore[no-untyped-def]
        down, across, panels = (out_h + TILE - 1) // TILE, (out_w + TILE - 1) // TILE, (channels + LANES - 1) // LANES
        x_line, dy_line = (TILE * across + side - TILE) * channels, TILE * across * out
        wide, tiles = panels * LANES, down * across
        padded = np.zeros((TILE * down + side - TILE) * x_line, np.float32)
        padded_dy = np.zeros(TILE * down * dy_line, np.float32)
        left, right = np.zeros(points * DEPTH * out, np.float32), np.zeros(points * DEPTH * wide, np.float32)
        sums = np.zeros(points * out * wide, np.float32)
        for record in range(records):
            corner, numbers = pad_h * x_line + pad_w * channels, width * channels
            copy_rows(x, record * height * numbers, numbers, padded, corner, x_line, height, numbers)
            copy_rows(dy, record * out_h * out_w * out, out_w * out, padded_dy, 0, dy_line, out_h, out_w * out)
            sums[:] = 0
            for first in range(0, tiles, DEPTH):
                count = min(DEPTH, tiles - first)
                for t in range(count):
                    h, w = (first + t) // across * TILE, (first + t) % across * TILE
                    for c in range(0, channels, HALF):
                        at, to = h * x_line + w * channels + c, t * wide + c
                        step = DEPTH * wide
                        transform_x(padded, at, x_line, channels, right, to, side * step, step, padded, 0)
                    for o in range(0, out, HALF):
                        at, to, step = h * dy_line + w * out + o, t * out + o, DEPTH * out
                        transform_dy(padded_dy, at, dy_line, out, left, to, side * step, step, padded, 0)
                for point in range(points):
                    for panel in range(panels):
                        of = point * DEPTH * wide + panel * LANES
                        for o in range(0, out, QUADS):
                            at, to = point * DEPTH * out + o, (point * out + o) * wide + panel * LANES
                            product_of_quads(left, at, 1, out, right, of, wide, count, sums, to, wide)
            for o in range(out):
                to = (record * out + o) * size * size * channels
                for c in range(0, channels, HALF):
                    at, step = o * wide + c, out * wide
                    transform_out(sums, at, side * step, step, dw, to + c, size * channels, channels, padded, 0)

    weights.__qualname__ += f"_{side}"
    return compiled(weights)


def _transform(matrix: Matrix, biased: bool) -> Any:
    """Return an intrinsic: `matrix d matrix^T`, and a bias if it is `biased`, of a square d of half vectors.

    `d[r, s]` is at `at + r row + s column` in `source`, and the result goes to `to` in `target` in the same way.
    """
    side = len(matrix[0])

    @intrinsic
    def transform(typing, source, at, row, column, target, to, to_row, to_column, bias, begin):  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = [context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 4, 8)]
            _, at, row, column, _, to, to_row, to_column, _, begin = args

            def place(array: Any, start: Any, r: int, row: Any, s: int, column: Any) -> Any:
                moved = builder.add(start, builder.add(_times(builder, row, r), _times(builder, column, s)))
                return builder.bitcast(builder.gep(array, [moved]), vector(HALF).as_pointer())

            half_done = []  # [s][i]
            for s in range(side):
                column_of_d = [load(builder, place(data[0], at, r, row, s, column)) for r in range(side)]
                half_done.append([_combined(builder, factors, column_of_d) for factors in matrix])
            for i in range(len(matrix)):
                for j, factors in enumerate(matrix):
                    result = _combined(builder, factors, [of_column[i] for of_column in half_done])
                    if biased:
                        result = builder.fadd(result, load(builder, place(data[2], begin, 0, row, 0, row)))
                    builder.store(result, place(data[1], to, i, to_row, j, to_column)).align = 4
            return context.get_dummy_value()

        return types.void(source, at, row, column, target, to, to_row, to_column, bias, begin), generate

    # By default a random name, which would differ in every process, so that no process finds the loops in the cache.
    transform._set_uuid(f"{__name__} {matrix} {biased}")
    return transform


def _product(rows: int) -> Any:
    """Return an intrinsic that adds the product of a matrix of `rows` rows and one of `LANES` columns.

    It adds `sum_d left[at + i row + d column] right[of + d of_step + k]`, where d runs up to `depth` >= 1, to
    `target[to + i to_row + k]`.
    """

    @intrinsic
    def product(typing, left, at, row, column, right, of, of_step, depth, target, to, to_row):  # type: ignore[no-untyped-def]
        arguments = left, at, row, column, right, of, of_step, depth, target, to, to_row

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            left, right, target = (
                context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 4, 8)
            )
            _, at, row, column, _, of, of_step, depth, _, to, to_row = args
            index, kind = context.get_value_type(types.intp), vector(HALF)
            starts = [(i, k) for i in range(rows) for k in range(0, LANES, HALF)]

            def place(array: Any, start: Any, row: Any, i: int, k: int) -> Any:
                moved = builder.add(builder.add(start, _times(builder, row, i)), ir.Constant(index, k))
                return builder.bitcast(builder.gep(array, [moved]), kind.as_pointer())

            lefts = [builder.gep(left, [builder.add(at, _times(builder, row, i))]) for i in range(rows)]
            begins = [load(builder, place(target, to, to_row, i, k)) for i, k in starts]
            before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
            builder.branch(loop)

            builder.position_at_end(loop)
            d, d_left, d_right, *sums = [builder.phi(t) for t in (index, index, index, *[kind] * len(starts))]
            columns = {k: load(builder, place(right, d_right, row, 0, k)) for k in range(0, LANES, HALF)}
            values = [builder.load(builder.gep(pointer, [d_left])) for pointer in lefts]
            grown = [multiply_add(builder, values[i], columns[k], s) for (i, k), s in zip(starts, sums, strict=True)]
            following = builder.add(d, ir.Constant(index, 1))
            firsts = [ir.Constant(index, 0), ir.Constant(index, 0), of, *begins]
            later = [following, builder.add(d_left, column), builder.add(d_right, of_step), *grown]
            for phi, start, end in zip([d, d_left, d_right, *sums], firsts, later, strict=True):
                phi.add_incoming(start, before)
                phi.add_incoming(end, loop)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)

            builder.position_at_end(after)
            for (i, k), total in zip(starts, grown, strict=True):
                builder.store(total, place(target, to, to_row, i, k)).align = 4
            return context.get_dummy_value()

        return types.void(*arguments), generate

    return product


def _times(builder: Any, stride: Any, count: int) -> Any:
    return builder.mul(stride, ir.Constant(stride.type, count))


def _combined(builder: Any, factors: Sequence[float], vectors: Sequence[Any]) -> Any:
    """Return the sum of `vectors` with these factors, beginning with a factor of 1 if there is one."""
    total = None
    for factor, vector_of_numbers in sorted(zip(factors, vectors, strict=True), key=lambda pair: pair[0] != 1):
        if total is None and factor:
            scale = ir.Constant(vector_of_numbers.type, [factor] * HALF)
            total = vector_of_numbers if factor == 1 else builder.fmul(vector_of_numbers, scale)
        elif abs(factor) == 1:
            total = (builder.fadd if factor == 1 else builder.fsub)(total, vector_of_numbers)
        elif factor:
            total = multiply_add(builder, ir.Constant(ir.FloatType(), factor), vector_of_numbers, total)
    return total


product_of_rows, product_of_quads = _product(ROWS), _product(QUADS)
