"""The loops of `fused_planes.py` (numba): a plane of an image stays in the L1 cache for all operations on it.

With x the normalised plane (mean m, r = 1 / sqrt(variance + eps), x = (y - m) r), a = scale x + shift and n numbers:

    z    = mean over 2x2 of max(a, 0)
    da   = dz / 4 where a > 0, else 0;   dscale = sum da x;   dshift = sum da
    dy   = r (h - mean(h) - x mean(h x)),   h = scale da

and the slope of u . dy + p dscale + q dshift, whose terms `second_order` names. The last row or column of an odd plane
is normalised but not pooled.
"""

import functools

import numpy as np

from dpfl_lightning.kernels.compiled import compiled

_loops = functools.partial(compiled, fastmath={"reassoc", "nsz", "contract"})


@_loops
def _normalise(y, constants, x):  # type: ignore[no-untyped-def]
    """Fill x, and return r."""
    zero, one, _, inverse, eps = constants
    total, squares = zero, zero
    for k in range(len(y)):
        total += y[k]
    mean = total * inverse
    for k in range(len(y)):
        x[k] = y[k] - mean
        squares += x[k] * x[k]
    r = one / np.sqrt(squares * inverse + eps)
    for k in range(len(y)):
        x[k] *= r
    return r


@_loops
def _passed_on(dz, x, scale, shift, width, constants, da):  # type: ignore[no-untyped-def]
    """Fill da."""
    zero, _, quarter, _, _ = constants
    for k in range(len(da)):
        da[k] = zero
    for i in range(dz.shape[0]):
        for j in range(dz.shape[1]):
            k, value = 2 * i * width + 2 * j, dz[i, j] * quarter
            da[k], da[k + 1], da[k + width], da[k + width + 1] = value, value, value, value
    for k in range(len(da)):
        da[k] = da[k] if scale * x[k] + shift > zero else zero


@_loops
def _pooled(values, width, quarter, z):  # type: ignore[no-untyped-def]
    for i in range(z.shape[0]):
        for j in range(z.shape[1]):
            k = 2 * i * width + 2 * j
            z[i, j] = quarter * (values[k] + values[k + 1] + values[k + width] + values[k + width + 1])


@_loops
def forward(y, scale, shift, constants, width, z, planes):  # type: ignore[no-untyped-def]
    zero, _, quarter, _, _ = constants
    x = np.empty_like(y[0])
    for plane in range(planes):
        _normalise(y[plane], constants, x)
        for k in range(len(x)):
            x[k] = max(scale[plane] * x[k] + shift[plane], zero)
        _pooled(x, width, quarter, z[plane])


@_loops
def first_order(y, scale, shift, dz, constants, width, dy, dscale, dshift, planes):  # type: ignore[no-untyped-def]
    zero, _, _, inverse, _ = constants
    x, da = np.empty_like(y[0]), np.empty_like(y[0])
    for plane in range(planes):
        r = _normalise(y[plane], constants, x)
        _passed_on(dz[plane], x, scale[plane], shift[plane], width, constants, da)
        sum_da, sum_da_x = zero, zero
        for k in range(len(x)):
            sum_da += da[k]
            sum_da_x += da[k] * x[k]
        dshift[plane], dscale[plane] = sum_da, sum_da_x
        factor, mean, slope = r * scale[plane], sum_da * inverse, sum_da_x * inverse
        for k in range(len(x)):
            dy[plane, k] = factor * (da[k] - mean - x[k] * slope)


@_loops
def second_order(y, scale, shift, dz, u, p, q, constants, width, to_y, to_scale, to_dz, planes):  # type: ignore[no-untyped-def]
    zero, _, quarter, inverse, _ = constants
    x, da, to_da = np.empty_like(y[0]), np.empty_like(y[0]), np.empty_like(y[0])
    for plane in range(planes):
        s, t = scale[plane], shift[plane]
        r = _normalise(y[plane], constants, x)
        _passed_on(dz[plane], x, s, t, width, constants, da)
        sum_da, sum_da_x, sum_u, sum_u_x, sum_u_da = zero, zero, zero, zero, zero
        for k in range(len(x)):
            sum_da += da[k]
            sum_da_x += da[k] * x[k]
            sum_u += u[plane, k]
            sum_u_x += u[plane, k] * x[k]
            sum_u_da += u[plane, k] * da[k]
        mean_h, mean_h_x = s * sum_da * inverse, s * sum_da_x * inverse
        mean_u, mean_u_x = sum_u * inverse, sum_u_x * inverse
        apart = sum_u_da - mean_u * sum_da - mean_u_x * sum_da_x  # u . dy / (r scale)
        to_scale[plane] = r * apart
        # the mean of the slope along x, and its mean product with x
        mean_to_x = -r * (mean_u * mean_h_x + mean_h * mean_u_x) + p[plane] * sum_da * inverse
        mean_to_x_x = -(r + r) * mean_u_x * mean_h_x + p[plane] * sum_da_x * inverse
        for k in range(len(x)):
            to_x = -r * (u[plane, k] * mean_h_x + s * da[k] * mean_u_x) + p[plane] * da[k]
            to_y[plane, k] = r * (to_x - mean_to_x - x[k] * mean_to_x_x) - s * apart * r * r * x[k] * inverse
        for k in range(len(x)):
            value = s * r * (u[plane, k] - mean_u - x[k] * mean_u_x) + p[plane] * x[k] + q[plane]
            to_da[k] = value if s * x[k] + t > zero else zero
        _pooled(to_da, width, quarter, to_dz[plane])
