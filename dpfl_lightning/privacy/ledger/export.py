"""A client's events in the terms of the library dp_accounting, which composes them without this package."""

from collections.abc import Sequence
from typing import Any

from dpfl_lightning.privacy.accounting.events import SENSITIVITY, Event, composed, library_event

ABOUT = (
    "Each `event` is a dp_accounting.dp_event.DpEvent with the fields that its `to_named_tuple` has. Compose it under "
    "`neighboring_relation` at `delta`; `epsilon` is what dpfl_lightning computed (null: infinite). "
    "Where one record is replaced and no batch is sampled, a record moves a sum by twice its bound. This costs as much "
    "as adding a record to a sum with half the noise: noise multipliers are halved, under ADD_OR_REMOVE_ONE. "
    "A choice by the exponential mechanism whose privacy losses have range r is a ZCDpEvent with rho = r^2 / 8. "
    "Where one record is replaced and batches are sampled, dp_accounting composes Gaussian events only. There such a "
    "choice is a Gaussian mechanism with mu = 2 Phi^-1(1 / (1 + e^(-r / 2))), which reveals at least as much. So is "
    "noise for the L1 norm, whose privacy losses have range 4 / noise multiplier."
)


def as_dp_event(events: Sequence[Event], delta: float, adjacency: str) -> tuple[str, dict[str, Any]]:
    """Return the neighbouring relation of dp_accounting, and the composed event ready for JSON.

    Any bound that dp_accounting computes for it holds for `events` under `adjacency`.
    """
    merged, sensitivity = composed(events, delta), SENSITIVITY[adjacency]
    if merged.noiseless:
        return "ADD_OR_REMOVE_ONE", library_event("NonPrivateDpEvent")
    replaced = sensitivity == 2 and any(release.is_sampled for release in merged.releases)
    parts = [
        (release.replaced_dp_event() if replaced else release.dp_event(sensitivity), release.total)
        for release in sorted(merged.releases, key=lambda release: release.kind)
    ]
    repeated = [library_event("SelfComposedDpEvent", event=event, count=count) for event, count in parts]
    relation = "REPLACE_ONE" if replaced else "ADD_OR_REMOVE_ONE"
    return relation, library_event("ComposedDpEvent", events=repeated)
