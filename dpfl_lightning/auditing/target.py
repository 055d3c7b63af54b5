"""Targets of an audit: what a client plans to release, and the claims about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.facts import ClientSettings
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.loop import FederatedLoop
from dpfl_lightning.privacy.accounting.accountant import Accountant
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule
from dpfl_lightning.privacy.mechanism import Mechanism, mechanism_of


@dataclass(frozen=True)
class Release:
    """`count` releases of one purpose, each of `steps` steps.

    The claim is based on `planned`, the accounted mechanism; clients will run `mechanism`.
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
    """One client: its noisy sums, and the claims about them.

    `replace_one` means that neighbours differ in a record's value instead of its presence; `sampling` is "poisson" or
    "shuffle".
    """

    client: int
    releases: tuple[Release, ...]
    settings: ClientSettings
    accountant: Accountant
    replace_one: bool
    sampling: str
    unit: str

    @property
    def claims(self) -> bool:
        """Whether there is a claim: something is released, and nothing without noise."""
        return bool(self.releases) and all(release.planned.noise_multiplier > 0 for release in self.releases)

    @property
    def main(self) -> Release:
        """The most frequent release."""
        return max(self.releases, key=lambda release: release.count)

    @property
    def mechanism(self) -> Mechanism:
        return self.main.mechanism

    @property
    def planned(self) -> Mechanism:
        return self.main.planned

    @property
    def mu(self) -> float:
        """Claimed mu of one full-batch step: how far a record moves the sum / scale of the noise."""
        return (2.0 if self.replace_one else 1.0) / self.planned.noise_multiplier

    def events(self) -> list[NoisedEvent]:
        return [release.planned.event(release.all_steps) for release in self.releases]

    @cached_property
    def epsilon(self) -> float:
        """Claimed epsilon of the whole run, at the client's delta."""
        return self.accountant.epsilon(self.events(), self.settings.delta)

    def as_dict(self) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon,
            "delta": self.settings.delta,
            "mechanism": self.planned.accounted.kind,
            "noise_multiplier": self.planned.noise_multiplier,
            "clip_norm": self.planned.clip_norm,
            "sample_rate": self.planned.sample_rate,
            "expected_batch_size": self.planned.expected_batch_size,
            "steps": sum(release.all_steps for release in self.releases),
            "accountant": self.accountant.name,
            "adjacency": f"{'replace' if self.replace_one else 'add or remove'} one {self.unit}",
            "sampling": self.sampling,
            "unit": self.unit,
        }


def subjects(loop: FederatedLoop, chosen: Sequence[int] | None) -> tuple[list[AuditTarget], list[str]]:
    """Return the clients to audit, and descriptions of what is not audited. The schedule of the loop is planned here.

    None of `chosen` takes the clients with the smallest and the largest budget. Raises UserError for an unknown client.
    """
    schedule, count, facts = loop.plan_schedule(), loop.population.num_clients, loop.config.facts
    for client in chosen or ():
        require(0 <= client < count, "clients", f"be in 0..{count - 1}", client)
    view = loop.view(ServerState(loop.module.flat[None], (0,) * count))
    clients = range(count) if chosen is None else chosen
    targets = [_subject(loop, view, client, schedule.clients[client]) for client in clients]
    silent = [target.client for target in targets if not target.claims]
    targets = [target for target in targets if target.claims]
    if chosen is None:  # without budgets: the most noise and the least
        targets.sort(key=lambda target: (target.settings.epsilon, -target.planned.noise_multiplier))
        targets = targets[:1] + targets[1:][-1:]
    no_claim = "it claims no epsilon, because it releases nothing, or releases without noise"
    left_out = [f"client {facts.name_of(client)}: {no_claim}" for client in silent]
    for target in targets:
        audited, planned = {release.purpose for release in target.releases}, schedule.clients[target.client].planned
        others = [line for line in planned if line.count and line.purpose not in audited]
        left_out += [
            f"client {facts.name_of(target.client)}: {line.count} releases of {line.purpose}" for line in others
        ]
    return targets, left_out


def _subject(loop: FederatedLoop, view: View, client: int, client_schedule: ClientSchedule) -> AuditTarget:
    settings, releases = loop.config.settings[client], []
    for line in client_schedule.planned:
        event = line.event
        if not isinstance(event, NoisedEvent) or event.steps * line.count == 0:
            continue
        planned = mechanism_of(event, settings.clip_norm, settings.num_records)
        mechanism = view.mechanism(client, line.purpose)
        releases.append(Release(line.purpose, planned, mechanism, event.steps, line.count))
    return AuditTarget(
        client=client,
        releases=tuple(releases),
        settings=settings,
        accountant=loop.config.accountant,
        replace_one=loop.config.privacy is not None and loop.config.privacy.adjacency == "replace_one",
        sampling=loop.clients.sampling,
        unit=loop.population.unit.name,
    )
