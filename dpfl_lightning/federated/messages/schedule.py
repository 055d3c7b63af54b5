"""Every release of a run, planned before the first round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned


@dataclass(frozen=True)
class RunSchedule:
    """One schedule for each of the N clients.

    `reserve` releases of each client's "train" line are kept for rounds that a resumed run charges again.
    """

    clients: tuple[ClientSchedule, ...]
    rounds: int
    reserve: int = 0

    @property
    def has_noise(self) -> bool:
        """Whether any planned release has noise; a run without it is one without privacy."""
        return any(one.noise_multiplier for client in self.clients for one in client.noised)

    def replan(self, change: Callable[[int, ClientSchedule], ClientSchedule]) -> RunSchedule:
        """The schedule in which `change(client, schedule)` replaces every client's schedule."""
        return dataclasses.replace(self, clients=tuple(change(i, c) for i, c in enumerate(self.clients)))

    def planned(self, client: int, purpose: str) -> Planned:
        """The line of the client's schedule for `purpose`; KeyError if there is none."""
        for line in self.clients[client].planned:
            if line.purpose == purpose:
                return line
        known = ", ".join(line.purpose for line in self.clients[client].planned)
        raise KeyError(f"client {client} has planned {known}, not {purpose!r}: declare it in `plan_run`")

    def noised(self, client: int, purpose: str) -> NoisedEvent:
        """The event of one release of that purpose; KeyError if it is not a noisy sum."""
        event = self.planned(client, purpose).event
        if not isinstance(event, NoisedEvent):
            raise KeyError(f"client {client} has planned {event} for {purpose!r}, which is no noisy sum")
        return event
