"""The loops of `gates.py`, compiled by numba for float32.

They activate and differentiate the gates of all records `[B, n H]` at one step. Each line of a body is a loop of its
own over one record's H numbers, because LLVM makes vectors only of loops over few arrays.
"""

import functools
import math

import numpy as np

from dpfl_lightning.kernels.compiled import compiled

_loops = functools.partial(compiled, fastmath={"contract"})
_inlined = functools.partial(_loops, forceinline=True)

f32 = np.float32
ONE, LARGEST = f32(1), f32(87)  # exp(-88) is no normal number
LOG2_E, LN2_HIGH, LN2_LOW = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
MAGIC = f32(12582912)  # 1.5 * 2^23: adding it rounds to the nearest integer, in the lowest bits
EXP = tuple(map(f32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)))
"""Coefficients of `(exp(r) - 1 - r) / r^2` for `|r| <= ln(2) / 2`, from Cephes, highest power first."""

TANH_END, TANH_IS_ONE = f32(7.90531110763549805), f32(8.5)
TANH_LOW = (1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)
TANH_HIGH = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08)
TANH_ABOVE = tuple(map(f32, TANH_HIGH + TANH_LOW))
TANH_BELOW = tuple(map(f32, (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)))
"""Coefficients in `x^2` of `tanh(x) / x`, a fraction, from Eigen, highest power first."""


@_inlined
def _clamped(x, end):  # type: ignore[no-untyped-def]
    """Keep what is not a number."""
    x = end if x > end else x
    return -end if x < -end else x


@_inlined
def _sigmoid(x):  # type: ignore[no-untyped-def]
    x = -_clamped(x, LARGEST)
    shifted = x * LOG2_E + MAGIC
    n = shifted - MAGIC
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    e5, e4, e3, e2, e1, e0 = EXP
    exp = ((((((e5 * r + e4) * r + e3) * r + e2) * r + e1) * r + e0) * r) * r + r + ONE
    power = np.int32((np.float32(shifted).view(np.int32) + 127) << 23).view(np.float32)
    return ONE / (ONE + exp * power)


@_inlined
def _tanh(x):  # type: ignore[no-untyped-def]
    given, x = x, _clamped(x, TANH_END)
    s = x * x
    a6, a5, a4, a3, a2, a1, a0 = TANH_ABOVE
    b3, b2, b1, b0 = TANH_BELOW
    above = x * ((((((a6 * s + a5) * s + a4) * s + a3) * s + a2) * s + a1) * s + a0)
    y = above / (((b3 * s + b2) * s + b1) * s + b0)
    return math.copysign(ONE, given) if abs(given) > TANH_IS_ONE else y  # 1 exactly: no gradient where saturated


@_inlined
def _to_sigmoids(x):  # type: ignore[no-untyped-def]
    for k in range(len(x)):
        x[k] = _sigmoid(x[k])


@_inlined
def _to_tanhs(x, y):  # type: ignore[no-untyped-def]
    for k in range(len(x)):
        y[k] = _tanh(x[k])


@_loops
def lstm_step(t, gates, cells, tanhs, hiddens):  # type: ignore[no-untyped-def]
    """Activate the gates i, f, g, o of step t, and fill the cells, their tangents and the hidden states after it."""
    size = cells.shape[2]
    for j in range(gates.shape[1]):
        row, c, new_c, tanh, new_h = gates[t, j], cells[t, j], cells[t + 1, j], tanhs[t, j], hiddens[t + 1, j]
        i, f, g, o = row[:size], row[size : 2 * size], row[2 * size : 3 * size], row[3 * size :]
        _to_sigmoids(row[: 2 * size])
        _to_tanhs(g, g)
        _to_sigmoids(o)
        for k in range(size):
            new_c[k] = f[k] * c[k] + i[k] * g[k]
        _to_tanhs(new_c, tanh)
        for k in range(size):
            new_h[k] = o[k] * tanh[k]


@_loops
def lstm_step_back(t, gates, cells, tanhs, doutput, dh, dc, dgates):  # type: ignore[no-untyped-def]
    """Fill `dgates[t]` from the gradients of the hidden states (`doutput[:, t] + dh`) and cells after step t.

    `dc` then holds the gradient of the cells before it.
    """
    size = cells.shape[2]
    for j in range(gates.shape[1]):
        row, to = gates[t, j], dgates[t, j]
        i, f, g, o = row[:size], row[size : 2 * size], row[2 * size : 3 * size], row[3 * size :]
        to_i, to_f, to_g, to_o = to[:size], to[size : 2 * size], to[2 * size : 3 * size], to[3 * size :]
        c, tanh, dc_j, dh_j, dout = cells[t, j], tanhs[t, j], dc[j], dh[j], doutput[j, t]
        for k in range(size):
            total = dh_j[k] + dout[k]
            dc_j[k] += total * (o[k] - o[k] * tanh[k] * tanh[k])
            to_o[k] = total * tanh[k] * (o[k] - o[k] * o[k])
        for k in range(size):
            to_i[k] = dc_j[k] * g[k] * (i[k] - i[k] * i[k])
            to_g[k] = dc_j[k] * (i[k] - i[k] * g[k] * g[k])
        for k in range(size):
            to_f[k] = dc_j[k] * c[k] * (f[k] - f[k] * f[k])
            dc_j[k] *= f[k]
