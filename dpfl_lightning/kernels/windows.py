"""The loops of `sparse_conv.py` (numba).

The innermost loop, a weighted sum of windows, is written in LLVM instructions, so that its sums stay in registers: by
plain numba a training step takes 1.25 times as long (the papers' CNN, batch 64), 1.18 (batch 16) and 1.23 (LeNet-5).
"""

import functools
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from dpfl_lightning.privacy.clipping.compiled import compiled
from dpfl_lightning.runtime.loops import LANES

HALF = LANES // 2  # a vector may be half full: one register of AVX2
HALVES = 12  # half vectors summed at once: enough to hide the latency of an addition, few enough for 16 registers
PIECE = HALVES // 2 * LANES  # numbers of a run that are summed at once
POOL = 4  # positions of the convolution for each number of the pooled map


@functools.cache
def convolution_backward(rows: int, run: int) -> Any:
    """Return the loops over records and positions for windows of `rows` runs of `run` contiguous float32 numbers.

    They take flat arrays x `[B, H, W, C]`, dy `[B, H', W', O]`, w `[O, rows, run]`, and fill dw `[B, O, rows, run]`,
    db `[B, O]` and, unless it is empty, dx `[B, H, W, C]`. The other arguments are the sizes B, H, W, C, H', W', O, and
    two numbers each for stride and padding. If `winners` `[B, H' // 2, W' // 2, O]` (`pooling.max_relu`) is not empty,
    dy has its shape, and is the gradient behind max-pooling.
    """
    whole, rest, full = run // PIECE * PIECE, run % PIECE, -(-run // HALF) * HALF  # `full`: of half vectors
    halves = min(full, PIECE) // HALF
    some = max(r for r in range(1, rows + 1) if rows % r == 0 and (r == 1 or r * halves <= HALVES))  # rows at once

    def backward(  # type: ignore[no-untyped-def]
        x, dy, winners, w, dw, db, dx, records, height, width, channels, out_h, out_w, out, down, right, pad_h, pad_w
    ):
        pooled, need_dx = len(winners) > 0, len(dx) > 0
        line, window = (width + 2 * pad_w) * channels, rows * run
        corner, size = pad_h * line + pad_w * channels, (height + 2 * pad_h) * line
        # loads and additions of zeros may reach over the end of a run
        padded, spread = np.zeros(size + LANES, np.float32), np.zeros(size + LANES if need_dx else 0, np.float32)
        kernel = np.zeros((out * rows if need_dx else 0, full), np.float32)
        copy_rows(w, 0, run, kernel.reshape(-1), 0, full, len(kernel), run)
        spots = POOL * (out_h // 2) * (out_w // 2) if pooled else out_h * out_w
        most = spots // POOL if pooled else spots  # non-zero numbers of a channel
        # the non-zero numbers of one record's dy, stored twice: by channel and by spot
        values, places = np.empty(out * most, np.float32), np.empty(out * most, np.int64)
        weights, kernels = np.empty(out * most, np.float32), np.empty(out * most, np.int64)
        ends, begins = np.empty(out, np.int64), np.zeros(spots + 1, np.int64)
        lists = (values, places, ends, weights, kernels, begins)
        corners = np.empty(spots, np.int64)  # where each spot's window begins
        for spot in range(spots):
            h, v = spot // out_w, spot % out_w
            if pooled:
                block, code = spot // POOL, spot % POOL
                h, v = block // (out_w // 2) * 2 + code // 2, block % (out_w // 2) * 2 + code % 2
            corners[spot] = h * down * line + v * right * channels
        for record in range(records):
            numbers = width * channels
            begin = record * height * numbers
            copy_rows(x, begin, numbers, padded, corner, line, height, numbers)
            for o in range(out):
                ends[o] = o * most
            if pooled:
                pooled_map = slice(record * most * out, (record + 1) * most * out)
                list_winners(dy[pooled_map], winners[pooled_map], corners, full * rows, need_dx, lists)
            else:
                list_present(dy, record * spots * out, corners, full * rows, lists)
            spread[:] = 0
            for r in range(0, rows if need_dx else 0, some):  # one row of all kernels stays in the L1 cache
                for spot in range(spots):
                    to, first, end = corners[spot] + r * line, begins[spot], begins[spot + 1]
                    for k in range(0, whole, PIECE):
                        at = r * full + k
                        weighted_windows(
                            spread, to + k, line, kernel, at, full, weights, kernels, first, end, some, PIECE, True
                        )
                    if rest:
                        at, to = r * full + whole, to + whole
                        weighted_windows(
                            spread, to, line, kernel, at, full, weights, kernels, first, end, some, rest, True
                        )
            for o in range(out):
                to, first, end = (record * out + o) * window, o * most, ends[o]
                for r in range(0, rows, some):
                    at, line_at = to + r * run, r * line
                    for k in range(0, whole, PIECE):
                        weighted_windows(
                            dw, at + k, run, padded, line_at + k, line, values, places, first, end, some, PIECE, False
                        )
                    if rest:
                        at, line_at = at + whole, line_at + whole
                        weighted_windows(
                            dw, at, run, padded, line_at, line, values, places, first, end, some, rest, False
                        )
                total = np.float32(0)
                for j in range(first, end):
                    total += values[j]
                db[record * out + o] = total
            if need_dx:
                copy_rows(spread, corner, line, dx, begin, numbers, height, numbers)

    backward.__qualname__ += f"_{rows}_{run}"  # separate cache files, because numba's index files cannot be shared
    return compiled(backward)


@numba.njit(error_model="numpy")
def copy_rows(source, start, apart, target, to, to_apart, rows, numbers):  # type: ignore[no-untyped-def]
    """Copy `rows` rows of this many numbers, which begin `apart` and `to_apart` numbers after each other."""
    for row in range(rows):
        old = source[start + row * apart : start + row * apart + numbers]  # slices make the loop several times as fast
        new = target[to + row * to_apart : to + row * to_apart + numbers]
        for k in range(numbers):
            new[k] = old[k]


@numba.njit(error_model="numpy")
def list_present(dy, start, corners, window, lists):  # type: ignore[no-untyped-def]
    """List the non-zero numbers of `dy[start:]`: by channel (up to `ends`) and by spot (from `begins`)."""
    values, places, ends, weights, kernels, begins = lists
    out, present = len(ends), 0
    for spot in range(len(corners)):
        first = start + spot * out
        for o, value in enumerate(dy[first : first + out]):
            if value != 0:
                values[ends[o]], places[ends[o]] = value, corners[spot]
                ends[o] += 1
                weights[present], kernels[present] = value, o * window
                present += 1
        begins[spot + 1] = present


@numba.njit(error_model="numpy")
def list_winners(dy, winners, corners, window, by_spot, lists):  # type: ignore[no-untyped-def]
    """List the gradients `dy` of winners in the same form. No branch depends on them: others are written over."""
    values, places, ends, weights, kernels, begins = lists
    out, blocks, nexts = len(ends), len(corners) // POOL, np.zeros(POOL + 1, np.int64)
    for o in range(out):
        end = ends[o]
        for block in range(blocks):
            winner = winners[block * out + o]
            values[end], places[end] = dy[block * out + o], corners[POOL * block + (winner & (POOL - 1))]
            end += winner < POOL
        ends[o] = end
    for block in range(blocks if by_spot else 0):
        gradients, codes = dy[block * out : block * out + out], winners[block * out : block * out + out]
        nexts[:] = 0
        for o in range(out):
            nexts[codes[o]] += 1
        present = begins[POOL * block]
        for code in range(POOL):
            nexts[code], present = present, present + nexts[code]
            begins[POOL * block + code + 1] = present
        nexts[POOL] = present
        for o in range(out):
            at = nexts[codes[o]]
            weights[at], kernels[at] = gradients[o], o * window
            nexts[codes[o]] = at + 1


@intrinsic(prefer_literal=True)
def weighted_windows(  # type: ignore[no-untyped-def]
    typing, target, at, target_row, source, offset, source_row, values, places, first, end, rows, length, add
):
    """`target[at + r target_row + k] (+)= sum_j values[j] source[places[j] + offset + r source_row + k]`.

    The loop runs over all j in [first, end), r < `rows`, k < `length`; the sums stay in registers. `rows`, `length` and
    `add` are compile-time constants. It may read `source` up to the next multiple of `HALF` numbers, and with `add` add
    these to `target`, too.
    """
    of = (target, at, target_row, source, offset, source_row, values, places, first, end, rows, length, add)
    rows, length, add = (known.literal_value for known in (rows, length, add))
    starts = [(r, k) for r in range(rows) for k in range(0, length, LANES)]

    def lanes(k):  # type: ignore[no-untyped-def]
        return min(LANES, -(-(length - k) // HALF) * HALF)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        index = context.get_value_type(types.intp)
        _, at, target_row, _, offset, source_row, _, _, first, end, *_ = args
        target, source, values, places = (
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 3, 6, 7)
        )

        def vector_at(data, place, row, r, k):  # type: ignore[no-untyped-def]
            moved = builder.add(place, builder.mul(row, ir.Constant(index, r)))
            pointer = builder.gep(data, [builder.add(moved, ir.Constant(index, k))])
            return builder.bitcast(pointer, vector(lanes(k)).as_pointer())

        zeros = [ir.Constant(vector(lanes(k)), None) for _, k in starts]
        before = builder.block
        loop, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed("<", first, end), loop, after)

        builder.position_at_end(loop)
        j = builder.phi(index)
        sums = [builder.phi(zero.type) for zero in zeros]
        value = builder.load(builder.gep(values, [j]))
        place = builder.add(builder.load(builder.gep(places, [j])), offset)
        windows = [load(builder, vector_at(source, place, source_row, r, k)) for r, k in starts]
        grown = [multiply_add(builder, value, *pair) for pair in zip(windows, sums, strict=True)]
        following = builder.add(j, ir.Constant(index, 1))
        for phi, begin, later in [(j, first, following), *zip(sums, zeros, grown, strict=True)]:
            phi.add_incoming(begin, before)
            phi.add_incoming(later, loop)
        builder.cbranch(builder.icmp_signed("<", following, end), loop, after)

        builder.position_at_end(after)
        totals = [builder.phi(zero.type) for zero in zeros]
        for total, zero, later in zip(totals, zeros, grown, strict=True):
            total.add_incoming(zero, before)
            total.add_incoming(later, loop)
        for (r, k), total in zip(starts, totals, strict=True):
            to = vector_at(target, at, target_row, r, k)
            if add:
                total = builder.fadd(load(builder, to), total)
            elif lanes(k) > length - k:
                kept = ir.Constant(ir.VectorType(ir.IntType(32), length - k), list(range(length - k)))
                total = builder.shuffle_vector(total, total, kept)
                to = builder.bitcast(to, vector(length - k).as_pointer())
            builder.store(total, to).align = 4
        return context.get_dummy_value()

    return types.void(*of), generate


def vector(lanes: int) -> Any:
    return ir.VectorType(ir.FloatType(), lanes)


def load(builder: Any, pointer: Any) -> Any:
    loaded = builder.load(pointer)
    loaded.align = 4  # bytes of a float32: a window may begin anywhere
    return loaded


def multiply_add(builder: Any, factor: Any, window: Any, total: Any) -> Any:
    """Return `factor * window + total`, rounded once."""
    kind, lanes = window.type, window.type.count
    undefined = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(undefined, factor, ir.Constant(ir.IntType(32), 0))
    factors = builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(ir.IntType(32), lanes), None))
    name, signature = f"llvm.fma.v{lanes}f32", ir.FunctionType(kind, [kind] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), [factors, window, total])
