"""A client's events in the terms of the library dp_accounting, which composes them without this package."""

import math
from collections.abc import Sequence
from typing import Any

from scipy.special import expit, ndtri

from dpfl_lightning.privacy.accounting.events import Event, composed

ABOUT = (
    "Each `event` is a dp_accounting.dp_event.DpEvent with the fields that its `to_named_tuple` has. Compose it under "
    "`neighboring_relation` at `delta`; `epsilon` is what dpfl_lightning computed (null: infinite). "
    "Where one record is replaced and no batch is sampled, a record moves a sum by twice its bound. This costs as much "
    "as adding a record to a sum with half the noise: noise multipliers are halved, under ADD_OR_REMOVE_ONE. "
    "A choice by the exponential mechanism whose privacy losses have range r is a ZCDpEvent with rho = r^2 / 8. "
    "Where one record is replaced and batches are sampled, dp_accounting composes Gaussian events only. There such a "
    "choice is a Gaussian mechanism with mu = 2 Phi^-1(1 / (1 + e^(-r / 2))), which reveals at least as much. So is "
    "Laplace noise, whose privacy losses have range 4 / noise multiplier."
)


def as_dp_event(events: Sequence[Event], delta: float, adjacency: str) -> tuple[str, dict[str, Any]]:
    """Return the neighbouring relation of dp_accounting, and the composed event ready for JSON.

    Any bound that dp_accounting computes for it holds for `events` under `adjacency`.
    """
    releases = composed(events, delta)
    sensitivity = 2 if adjacency == "replace_one" else 1
    if releases.noiseless:
        return "ADD_OR_REMOVE_ONE", _event("NonPrivateDpEvent")
    if sensitivity == 2 and any(rate < 1 for rate, _, _ in releases.gaussian):
        relation = "REPLACE_ONE"  # dp_accounting doubles the sensitivity
        parts = [(_gaussian(rate, noise), steps) for rate, noise, steps in releases.gaussian]
        parts += [(_dominating_gaussian(4 / noise), steps) for noise, steps in releases.laplace]
        parts += [(_dominating_gaussian(2 * epsilon), count) for epsilon, count in releases.selection]
    else:
        relation = "ADD_OR_REMOVE_ONE"
        parts = [(_gaussian(rate, noise / sensitivity), steps) for rate, noise, steps in releases.gaussian]
        parts += [(_laplace(noise / sensitivity), steps) for noise, steps in releases.laplace]
        parts += [(_zcdp(epsilon * sensitivity), count) for epsilon, count in releases.selection]
    repeated = [_event("SelfComposedDpEvent", event=event, count=count) for event, count in parts]
    return relation, _event("ComposedDpEvent", events=repeated)


def _gaussian(rate: float, noise: float) -> dict[str, Any]:
    event = _event("GaussianDpEvent", noise_multiplier=noise)
    return event if rate == 1 else _event("PoissonSampledDpEvent", sampling_probability=rate, event=event)


def _laplace(noise: float) -> dict[str, Any]:
    return _event("LaplaceDpEvent", noise_multiplier=noise)


def _zcdp(loss_range: float) -> dict[str, Any]:
    return _event("ZCDpEvent", rho=loss_range**2 / 8)


def _dominating_gaussian(loss_range: float) -> dict[str, Any]:
    """Return a Gaussian mechanism under REPLACE_ONE that dominates mechanisms with this range of privacy losses.

    A mechanism with losses in [t - range, t] is post-processing of a binary one with these two losses. The trade-off
    function of the latter has one corner. A Gaussian trade-off function through that corner lies below it, because it
    is convex (Dong, Roth and Su, 2022). The largest mu of all t is that of t = range / 2.
    """
    mu = -2 * float(ndtri(expit(-loss_range / 2)))
    return _event("GaussianDpEvent", noise_multiplier=2 / mu if math.isfinite(mu) else 0.0)


def _event(class_name: str, **fields: Any) -> dict[str, Any]:
    return {"module_name": "dp_accounting.dp_event", "class_name": class_name, **fields}
