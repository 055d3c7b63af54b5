"""Clipped sums of many clients at once, in static shapes: a few large kernels replace many small ones."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap

from dpfl_lightning.kernels.float64_sums import summing_dtype
from dpfl_lightning.privacy.clipping.reference import Params, SampleLoss, clip_factors, record_gradients

StackedSums = Callable[..., tuple[Tensor, Tensor]]  # the function `sums` of `stacked_clipped_sums`


def stacked_clipped_sums(sample_loss: SampleLoss) -> StackedSums:
    """Return a function for `ClippedSum` of S clients, by `vmap` over clients and records; it can be compiled.

    Every row has the guarantees of `ClippedSum`, and is as private. `sample_loss` is called with one record.

    >>> sums = stacked_clipped_sums(lambda params, x, y: ((x @ params["w"] - y) ** 2).sum(1, keepdim=True)[:, 0])
    >>> x, y = torch.ones(2, 2, 3), torch.zeros(2, 2, 1)
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> sums({"w": torch.ones(2, 3, 1)}, x, y, mask, torch.tensor([3.0, 100.0]))[0][:, 0]
    tensor([3.4641, 6.0000], dtype=torch.float64)
    """
    gradients = vmap(record_gradients(sample_loss), in_dims=(0, 0, 0), randomness="different")

    def sums(
        params: Params, x: Tensor, y: Tensor, mask: Tensor, clip_norm: Tensor, order: int = 2
    ) -> tuple[Tensor, Tensor]:
        """Return `[S, P]` in float64, and the norms of the gradients before clipping, `[S, B]`, -1 for padding.

        `params` are `[S, *shape]` by name, records `x` `[S, B, *X]`, labels `y` `[S, B]`; `mask` `[S, B]` is False for
        padding, which may be NaN and contributes exactly zero; `clip_norm` `[S]`, float64, is > 0 and may be infinite.
        """
        by_name = gradients(params, x, y)
        grads = [by_name[name].reshape(*mask.shape, -1) for name in params]  # each [S, B, size of the parameter]
        dtype = summing_dtype(grads[0])
        parts = torch.stack([torch.linalg.vector_norm(g.to(dtype), ord=order, dim=2) for g in grads])
        norms = torch.linalg.vector_norm(parts, ord=order, dim=0)
        contributes = (mask & torch.isfinite(norms))[..., None]
        factors = clip_factors(norms, clip_norm[:, None].to(dtype))[:, None]  # [S, 1, B]
        # 0 * NaN is NaN, so excluded records are replaced instead of multiplied by 0
        clipped = torch.cat([factors @ torch.where(contributes, g, 0.0).to(dtype) for g in grads], dim=2)[:, 0]
        return clipped, torch.where(mask, norms, -1.0)

    return sums
