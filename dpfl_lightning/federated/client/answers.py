"""How a client answers a query: its records' rows are bounded, summed and noised here, whatever the query does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from dpfl_lightning.federated.client.module import FORWARD_CHUNK, ClientModule
from dpfl_lightning.federated.messages.query import NoMechanism, Query
from dpfl_lightning.privacy.clipping.reference import clip_factors, evaluating, summing_dtype
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.noise import RandomGenerator
from dpfl_lightning.privacy.selection import ExponentialMechanism


def answer(query: Query, client: int, module: ClientModule, x: Tensor, y: Tensor, generator: RandomGenerator) -> Any:
    """What leaves the client: the noised sum `[k]`, the chosen index, or an answer that is charged as `Unprotected`.

    Args:
        x: all records of the client, `[n, *X]`, n >= 1.
        y: their labels, `[n]`.

    **Guarantees** One record changes one row only: rows are computed under `vmap`, one record at a time. The norm of a
    row is at most `clip_norm` for `Gaussian` and `Laplace`; scores are in [0, 1] for `ExponentialMechanism`.

    **Privacy** One `event(1)` of the client's mechanism, which the caller has charged.

    Raises:
        ValueError: `Query.rows` returns something other than one row for each record.
    """
    mechanism = query.mechanism_of[client]
    if isinstance(mechanism, NoMechanism):
        plain = query.answer(client, module, x, y)
        return plain if mechanism.noise is None else mechanism.noise.privatise(plain[None], generator, plain.dtype)[0]
    if isinstance(mechanism, ExponentialMechanism):
        return mechanism.choose(_bounded_sum(query, client, module, x, y, _scores), generator)
    total = _bounded_sum(query, client, module, x, y, lambda rows: _clipped(rows, mechanism))
    return mechanism.privatise(total[None], generator, total.dtype)[0]


@torch.no_grad()
def _bounded_sum(
    query: Query, client: int, module: ClientModule, x: Tensor, y: Tensor, bounded: Callable[[Tensor], Tensor]
) -> Tensor:
    """The sum of all records' rows after `bounded`, `[k]` float64 on the CPU."""

    def row(x: Tensor, y: Tensor) -> Tensor:
        own = query.rows(client, module, x[None], y[None])
        fits = isinstance(own, Tensor) and own.ndim == 2 and len(own) == 1 and not own.is_complex()
        if not fits:
            got = f"shape {tuple(own.shape)}" if isinstance(own, Tensor) else type(own).__name__
            raise ValueError(
                f"{type(query).__name__}.rows must return one row of real numbers for each record, shape (1, k) for "
                f"one record, got {got}"
            )
        return own[0].to(summing_dtype(own))

    total: Tensor | None = None
    with evaluating(module.net):
        for inputs, targets in zip(x.split(FORWARD_CHUNK), y.split(FORWARD_CHUNK), strict=True):
            rows = vmap(row, randomness="different")(inputs, targets)
            part = bounded(rows).sum(dim=0)
            if total is not None and part.shape != total.shape:
                got = f"{len(total)} and {len(part)}"
                raise ValueError(f"{type(query).__name__}.rows must return rows of one length, got {got}")
            total = part if total is None else total + part
    assert total is not None  # a mechanism's divisor is above 0: there are records
    return total.cpu().double()


def _scores(rows: Tensor) -> Tensor:
    """`rows` `[b, k]` with every score in [0, 1]; one that is not finite is 0."""
    return torch.where(rows.isfinite(), rows, 0.0).clamp(0.0, 1.0)


def _clipped(rows: Tensor, mechanism: Mechanism) -> Tensor:
    """`rows` `[b, k]` with every norm at most the mechanism's; a row whose norm is not finite is zero."""
    norms = torch.linalg.vector_norm(rows, ord=mechanism.clip_order, dim=1, keepdim=True)
    return torch.where(norms.isfinite(), rows, 0.0) * clip_factors(norms, mechanism.clip_norm)
