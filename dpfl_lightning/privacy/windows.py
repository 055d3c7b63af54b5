"""The loops of `sparse_conv.py`, compiled for this machine's vector registers (numba).

The innermost one, a weighted sum of windows, is written in LLVM's terms: its sums must stay in registers, which neither
a torch operator nor a loop in Python's words brings about.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16  # float32 numbers of a vector: one register of AVX-512, two of AVX2
PIECE = 6 * LANES  # numbers summed at once: enough to hide an addition's latency, few enough for 16 registers


@functools.cache
def convolution_backward(rows: int, run: int) -> Any:
    """The loops over records and places for windows of `rows` runs of `run` neighbouring float32 numbers.

    The compiled function takes flat arrays x `[B, H, W, C]`, dy `[B, H', W', O]` with O a multiple of `LANES`, w
    `[O, rows, run]`, and fills dw `[B, O, rows, run]` and, unless it is empty, dx `[B, H, W, C]`. Then follow the sizes
    B, H, W, C, H', W', O, the stride's two numbers and the padding's.
    """
    pieces, rest = run // PIECE, run % PIECE
    set_piece, add_piece = (_weighted_windows(PIECE, add) for add in (False, True))
    set_rest, add_rest = (_weighted_windows(max(rest, 1), add) for add in (False, True))

    @numba.njit(nogil=True, error_model="numpy")
    def backward(x, dy, w, dw, dx, records, height, width, channels, out_h, out_w, out, down, right, pad_h, pad_w):  # type: ignore[no-untyped-def]
        line, window, spots = (width + 2 * pad_w) * channels, rows * run, out_h * out_w
        corner, size = pad_h * line + pad_w * channels, (height + 2 * pad_h) * line
        padded, spread = np.zeros(size, np.float32), np.zeros(size, np.float32)
        # what is not zero in one record's dy: for each output channel, and for all channels at one spot
        values, places, ends = (
            np.empty(out * spots, np.float32),
            np.empty(out * spots, np.int64),
            np.empty(out, np.int64),
        )
        here, kernels = np.empty(out, np.float32), np.empty(out, np.int64)
        for record in range(records):
            begin = record * height * width * channels
            for h in range(height):
                for k in range(width * channels):
                    padded[corner + h * line + k] = x[begin + h * width * channels + k]
            for k in range(size if len(dx) else 0):
                spread[k] = np.float32(0)
            for o in range(out):
                ends[o] = o * spots
            for spot in range(spots):
                place, present = spot // out_w * down * line + spot % out_w * right * channels, 0
                for group in range(0, out, LANES):
                    first = (record * spots + spot) * out + group
                    mask = present_lanes(dy, first)
                    while mask:
                        lane = lowest_lane(mask)
                        mask &= mask - 1
                        o, value = group + lane, dy[first + lane]
                        values[ends[o]], places[ends[o]] = value, place
                        ends[o] += 1
                        here[present], kernels[present] = value, o * window
                        present += 1
                for r in range(rows if len(dx) else 0):
                    for k in range(0, pieces * PIECE, PIECE):
                        add_piece(spread, place + r * line + k, w, r * run + k, here, kernels, 0, present)
                    if rest:
                        k = pieces * PIECE
                        add_rest(spread, place + r * line + k, w, r * run + k, here, kernels, 0, present)
            for o in range(out):
                to = (record * out + o) * window
                for r in range(rows):
                    for k in range(0, pieces * PIECE, PIECE):
                        set_piece(dw, to + r * run + k, padded, r * line + k, values, places, o * spots, ends[o])
                    if rest:
                        k = pieces * PIECE
                        set_rest(dw, to + r * run + k, padded, r * line + k, values, places, o * spots, ends[o])
            for h in range(height if len(dx) else 0):
                for k in range(width * channels):
                    dx[begin + h * width * channels + k] = spread[corner + h * line + k]

    return backward


def _weighted_windows(length: int, add: bool) -> Any:
    """`target[at + k] (+)= sum_j values[j] source[places[j] + offset + k]`, j in [first, end), k < `length`."""
    starts = range(0, length, LANES)

    @intrinsic
    def weighted_windows(typing, target, at, source, offset, values, places, first, end):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            index = context.get_value_type(types.intp)
            _, at, _, offset, _, _, first, end = args
            target, source, values, places = (
                context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 2, 4, 5)
            )

            def vector_at(data, place, k):  # type: ignore[no-untyped-def]
                pointer = builder.gep(data, [builder.add(place, ir.Constant(index, k))])
                return builder.bitcast(pointer, _vector(min(LANES, length - k)).as_pointer())

            zeros = [ir.Constant(_vector(min(LANES, length - k)), None) for k in starts]
            before = builder.block
            loop, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
            builder.cbranch(builder.icmp_signed("<", first, end), loop, after)

            builder.position_at_end(loop)
            j = builder.phi(index)
            sums = [builder.phi(zero.type) for zero in zeros]
            value = builder.load(builder.gep(values, [j]))
            place = builder.add(builder.load(builder.gep(places, [j])), offset)
            windows = [_load(builder, vector_at(source, place, k)) for k in starts]
            grown = [_multiply_add(builder, value, *pair) for pair in zip(windows, sums, strict=True)]
            following = builder.add(j, ir.Constant(index, 1))
            for phi, begin, later in [(j, first, following), *zip(sums, zeros, grown, strict=True)]:
                phi.add_incoming(begin, before)
                phi.add_incoming(later, loop)
            builder.cbranch(builder.icmp_signed("<", following, end), loop, after)

            builder.position_at_end(after)
            for k, zero, later in zip(starts, zeros, grown, strict=True):
                total = builder.phi(zero.type)
                total.add_incoming(zero, before)
                total.add_incoming(later, loop)
                sums[k // LANES] = total
            for k, total in zip(starts, sums, strict=True):
                to = vector_at(target, at, k)
                builder.store(builder.fadd(_load(builder, to), total) if add else total, to).align = 4
            return context.get_dummy_value()

        return types.void(target, at, source, offset, values, places, first, end), generate

    return weighted_windows


@intrinsic
def present_lanes(typing, source, at):  # type: ignore[no-untyped-def]
    """Bit i tells whether `source[at + i]` is not zero (NaN is not), for i < LANES."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        loaded = _load(builder, builder.bitcast(builder.gep(data, [args[1]]), _vector(LANES).as_pointer()))
        bits = builder.fcmp_unordered("!=", loaded, ir.Constant(loaded.type, None))
        return builder.zext(builder.bitcast(bits, ir.IntType(LANES)), ir.IntType(64))

    return types.int64(source, at), generate


@intrinsic
def lowest_lane(typing, mask):  # type: ignore[no-untyped-def]
    """The number of the lowest bit that is set; one is."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(mask), generate


def _vector(lanes: int) -> Any:
    return ir.VectorType(ir.FloatType(), lanes)


def _load(builder: Any, pointer: Any) -> Any:
    loaded = builder.load(pointer)
    loaded.align = 4  # of float32: a window begins anywhere
    return loaded


def _multiply_add(builder: Any, factor: Any, window: Any, total: Any) -> Any:
    """`factor * window + total`, rounded once."""
    kind, lanes = window.type, window.type.count
    undefined = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(undefined, factor, ir.Constant(ir.IntType(32), 0))
    factors = builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(ir.IntType(32), lanes), None))
    name, signature = f"llvm.fma.v{lanes}f32", ir.FunctionType(kind, [kind] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), [factors, window, total])
