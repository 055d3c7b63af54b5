"""Who is audited: what a client would release as planned, and what is claimed of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dpfl_lightning.build import FederatedLoop
from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.settings import ClientSettings
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.privacy.accounting.accountant import Accountant
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule
from dpfl_lightning.privacy.mechanism import Laplace, Mechanism, mechanism_of


@dataclass(frozen=True)
class Release:
    """`count` releases of one purpose, each of `steps` steps.

    Args:
        planned: the mechanism that was accounted for: what the claim stands on.
        mechanism: the one that clients will be told to run.
    """

    purpose: str
    planned: Mechanism
    mechanism: Mechanism
    steps: int
    count: int

    @property
    def all_steps(self) -> int:
        return self.steps * self.count


@dataclass(frozen=True)
class AuditTarget:
    """One client: its noised sums, and what is claimed of them.

    Args:
        client: its number.
        releases: in the order in which they are planned.
        settings: its own.
        accountant: the run's.
        replace_one: whether neighbours differ in a record's value instead of its presence.
        sampling: "poisson" or "shuffle".
    """

    client: int
    releases: tuple[Release, ...]
    settings: ClientSettings
    accountant: Accountant
    replace_one: bool
    sampling: str

    @property
    def claims(self) -> bool:
        """Whether anything is claimed: something is released, and nothing without noise."""
        return bool(self.releases) and all(one.planned.noise_multiplier > 0 for one in self.releases)

    @property
    def main(self) -> Release:
        """The most frequent one."""
        return max(self.releases, key=lambda one: one.count)

    @property
    def mechanism(self) -> Mechanism:
        return self.main.mechanism

    @property
    def planned(self) -> Mechanism:
        return self.main.planned

    @property
    def laplace(self) -> bool:
        """Whether the noise is Laplace noise, not Gaussian."""
        return isinstance(self.planned, Laplace)

    @property
    def mu(self) -> float:
        """Claimed of one full-batch step: the most that a record moves the sum, over the noise's scale."""
        return (2.0 if self.replace_one else 1.0) / self.planned.noise_multiplier

    def events(self) -> list[NoisedEvent]:
        """Of the whole run."""
        return [one.planned.event(one.all_steps) for one in self.releases]

    @cached_property
    def epsilon(self) -> float:
        """Claimed of the whole run, at the client's delta."""
        return self.accountant.epsilon(self.events(), self.settings.delta)

    def as_dict(self) -> dict[str, Any]:
        """The claim, ready for JSON."""
        return {
            "epsilon": self.epsilon,
            "delta": self.settings.delta,
            "mechanism": type(self.planned).__name__.lower(),
            "noise_multiplier": self.planned.noise_multiplier,
            "clip_norm": self.planned.clip_norm,
            "sample_rate": self.planned.sample_rate,
            "expected_batch_size": self.planned.expected_batch_size,
            "steps": sum(one.all_steps for one in self.releases),
            "accountant": self.accountant.name,
            "adjacency": "replace one record" if self.replace_one else "add or remove one record",
            "sampling": self.sampling,
        }


def subjects(loop: FederatedLoop, chosen: Sequence[int] | None) -> tuple[list[AuditTarget], list[str]]:
    """The clients to audit, and in words what is not audited.

    Args:
        loop: its schedule is planned here.
        chosen: clients; None takes the one with the smallest budget and the one with the largest.

    Raises:
        UserError: no such client.
    """
    schedule, count = loop.plan_schedule(), loop.population.num_clients
    for client in chosen or ():
        require(0 <= client < count, "--for_clients", f"name clients in 0..{count - 1}, or all", client)
    view = loop.view(ServerState(loop.module.flat[None], (0,) * count))
    clients = range(count) if chosen is None else chosen
    found = [_subject(loop, view, client, schedule.clients[client]) for client in clients]
    silent = [one.client for one in found if not one.claims]
    found = [one for one in found if one.claims]
    if chosen is None:  # without budgets: most noise and least
        found.sort(key=lambda one: (one.settings.epsilon, -one.planned.noise_multiplier))
        found = found[:1] + found[1:][-1:]
    words = [f"client {client}: nothing is claimed, for it releases without noise, or nothing" for client in silent]
    for one in found:
        audited = {release.purpose for release in one.releases}
        others = [line for line in schedule.clients[one.client].planned if line.count and line.purpose not in audited]
        words += [f"client {one.client}: {line.count} releases of {line.purpose}" for line in others]
    return found, words


def _subject(loop: FederatedLoop, view: View, client: int, own: ClientSchedule) -> AuditTarget:
    settings, releases = loop.settings[client], []
    for line in own.planned:
        event = line.event
        if not isinstance(event, NoisedEvent) or event.steps * line.count == 0:
            continue
        planned = mechanism_of(event, settings.clip_norm, settings.num_records)
        told = view.mechanism(client, line.purpose)
        releases.append(Release(line.purpose, planned, told, event.steps, line.count))
    return AuditTarget(
        client=client,
        releases=tuple(releases),
        settings=settings,
        accountant=loop.accountant,
        replace_one=loop.privacy is not None and loop.privacy.adjacency == "replace_one",
        sampling=loop.sampling,
    )
