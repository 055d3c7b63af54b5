"""Every release of a run, planned before the first round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class RunSchedule:
    """Every release of the whole run, planned before the first one: one `ClientSchedule` for each of the N clients.

    Args:
        rounds: of the run.
        reserve: of the count of each client's "train" line, for rounds that a resumed run must charge again.
    """

    clients: tuple[ClientSchedule, ...]
    rounds: int
    reserve: int = 0

    def replan(self, change: Callable[[int, ClientSchedule], ClientSchedule]) -> RunSchedule:
        """The schedule with every client's part passed through `change(client, schedule)`."""
        return dataclasses.replace(self, clients=tuple(change(i, c) for i, c in enumerate(self.clients)))

    def planned(self, client: int, purpose: str) -> Planned:
        """The client's line for `purpose`."""
        for line in self.clients[client].planned:
            if line.purpose == purpose:
                return line
        known = ", ".join(line.purpose for line in self.clients[client].planned)
        raise KeyError(f"client {client} has planned {known}, not {purpose!r}: declare it in `plan_run`")

    def noised(self, client: int, purpose: str) -> NoisedEvent:
        """One noised sum of that purpose."""
        event = self.planned(client, purpose).event
        if not isinstance(event, NoisedEvent):
            raise KeyError(f"client {client} has planned {event} for {purpose!r}, which is no noised sum")
        return event
