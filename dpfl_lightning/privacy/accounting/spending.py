"""Epsilons of a running federation: each curve is computed once from the schedule and then looked up."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dpfl_lightning.privacy.accounting.accountant import Accountant
from dpfl_lightning.privacy.accounting.events import NonPrivateEvent, repeated
from dpfl_lightning.privacy.accounting.planned import ClientSchedule


class SpentEpsilon:
    """Computes what a client has spent after a number of releases of each purpose, for progress and curves.

    The values never exceed the epsilon of the whole schedule and are infinite from the first `NonPrivateEvent` release
    on. The final values come from composing the ledger again.
    """

    def __init__(self, accountant: Accountant) -> None:
        self.accountant = accountant
        self._curves: dict[tuple, np.ndarray] = {}
        self._whole: dict[ClientSchedule, float] = {}

    def __call__(self, schedule: ClientSchedule, used: Callable[[str], int]) -> float:
        """Return epsilon at `schedule.delta`, rounded up; `used(purpose)` is the ledger's counter."""
        counts = {line.purpose: min(used(line.purpose), line.count) for line in schedule.planned}
        if any(isinstance(line.event, NonPrivateEvent) and counts[line.purpose] for line in schedule.planned):
            return math.inf
        schedule = schedule.protected  # no unprotected release has been made yet
        if not any(counts[line.purpose] for line in schedule.planned):
            return 0.0
        main = max(schedule.planned, key=lambda line: line.count)
        before = tuple(repeated(line.event, counts[line.purpose]) for line in schedule.planned if line is not main)
        key = (main, schedule.delta, before)
        if key not in self._curves:
            self._curves[key] = self.accountant.curve(main.event, range(main.count + 1), schedule.delta, before)
        if schedule not in self._whole:
            self._whole[schedule] = float(self.accountant.search([(schedule.events(), schedule.delta)])[0])
        return min(float(self._curves[key][counts[main.purpose]]), self._whole[schedule])
