"""What bounds all releases of a client whose later noise follows from earlier releases: a privacy filter."""

from collections.abc import Sequence

import numpy as np

from dpfl_lightning.privacy.accounting.accountant import Accountant
from dpfl_lightning.privacy.accounting.events import PURE, Event, GaussianEvent, Release
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, numbered

_HALVINGS = 60


def counted_events(events: Sequence[Event], bound: Release | None) -> Sequence[Event]:
    """Return the events, or if there are any what bounds all of them that have noise, and the others."""
    return events if bound is None or not events else [bound, *(event for event in events if not event.private)]


def whole_budgets(schedules: Sequence[ClientSchedule], accountant: Accountant) -> list[Release | None]:
    """Return for each client one release that costs its whole budget; None without a budget, or without noise.

    Whatever noise is chosen later, all releases that a filter lets pass compose with those of other runs at most as
    this one: one step of Gaussian noise on a full batch, or of `PURE` noise for delta 0.

    Reference: Feldman and Zrnic (2021); Koskela et al. (2023); Rogers et al. (2016).
    """
    schedules, places = numbered(schedules)
    bounded = [one.adds_noise and 0 < one.target_epsilon < np.inf for one in schedules]
    kinds = [GaussianEvent if one.delta else PURE for one in schedules]
    wanted = np.array([one.target_epsilon if fits else 1.0 for one, fits in zip(schedules, bounded, strict=True)])

    def costs(noise: np.ndarray) -> np.ndarray:
        steps = [kind.of(1.0, float(one), 1) for kind, one in zip(kinds, noise, strict=True)]
        return accountant.search([([step], own.delta) for step, own in zip(steps, schedules, strict=True)])

    low, high = np.full(len(schedules), 1e-6), np.ones(len(schedules))
    while (dear := costs(high) > wanted).any():
        high = np.where(dear, 2 * high, high)
    for _ in range(_HALVINGS):
        middle = np.sqrt(low * high)
        fits = costs(middle) <= wanted
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    found = zip(kinds, high.tolist(), bounded, strict=True)
    bounds = [kind.of(1.0, noise, 1) if fits else None for kind, noise, fits in found]
    return [bounds[place] for place in places]
