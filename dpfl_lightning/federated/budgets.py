"""Every client's budget in a running federation: what it affords, what is charged for a round, what it has spent."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.fingerprints import memory_of
from dpfl_lightning.federated.query import Query, event_of
from dpfl_lightning.federated.state import LocalTraining, RoundPlan, RunSchedule
from dpfl_lightning.privacy.accountant import Accountant
from dpfl_lightning.privacy.events import Caveat, GaussianEvent, NoisedEvent, SelectionEvent, Unprotected
from dpfl_lightning.privacy.guarantee import Guarantee, guarantee, sampling_words
from dpfl_lightning.privacy.ledger import Charge, Ledger
from dpfl_lightning.privacy.schedule import ClientSchedule
from dpfl_lightning.privacy.spending import SpentEpsilon

_SHOWN = "shown"  # the purpose under which the ledger holds what is shown without noise


class Budgets:
    """Planned releases against paid ones.

    Args:
        schedule: calibrated.
        fingerprint: everything constant that decides a release: code, data, engine, device.
        secret: keys the digests of releases, at most 64 bytes. A plain digest of private records would itself be a
            release, for the ledger is shown to others. None: noise is fresh on every attempt, so each is another
            release, and its digest is a random number.
        caveats: travel into every guarantee.
        unprotected: what is shown of every client without noise: charged at once, so that every epsilon is infinite.

    **Guarantees** What is charged is what was planned: another event than the schedule's is refused. Counters are
    integers. A replay (same round, same start, same mechanism, same fingerprint) is not charged twice; any other second
    release is, and gets noise of its own.
    """

    def __init__(
        self,
        schedule: RunSchedule,
        ledger: Ledger,
        accountant: Accountant,
        sampling: str,
        fingerprint: str,
        secret: bytes | None,
        caveats: Sequence[Caveat] = (),
        unprotected: Sequence[Unprotected] = (),
    ) -> None:
        self.schedule, self.ledger, self.accountant = schedule, ledger, accountant
        self.sampling, self.fingerprint, self.secret, self.caveats = sampling, fingerprint, secret, tuple(caveats)
        self._spent, self._changed = SpentEpsilon(accountant), False
        self._live: list[float] = []  # epsilon of each client, as of the last time it was asked for
        self._paid = set(range(len(schedule.clients)))  # who has paid since then
        for one in unprotected:
            ledger.charge([Charge(client, 0, _SHOWN, one.words, one) for client in range(len(schedule.clients))])

    def charge_round(self, plan: RoundPlan, starts: Sequence[Tensor]) -> tuple[RoundPlan, list[int]]:
        """The plan without the clients that cannot pay, charged and synced, and each one's attempt number.

        Args:
            starts: `[P]` for each client of the plan: what its release begins from.
        """
        charges = {}
        known: dict[tuple[int, int], bytes] = {}  # most clients begin at one model: it is hashed once a round
        for row, (client, start) in enumerate(zip(plan.clients, starts, strict=True)):
            mechanism, steps = plan.mechanism_of[row], plan.steps[row]
            anchor = None if plan.anchors is None else plan.anchors[plan.anchor_of[row]]
            what = (start, mechanism, steps, plan.learning_rate_of[row], plan.job, anchor, plan.pull)
            event = mechanism.event(steps if isinstance(plan.job, LocalTraining) else 1)
            charges[client] = Charge(client, plan.round, plan.purpose, self._digest(what, known), event)
        plan = plan.only(lambda client: self._payable(charges[client]))
        self._paid.update(plan.clients)
        return plan, self.ledger.charge([charges[client] for client in plan.clients])

    def charge_query(self, query: Query, round: int) -> tuple[tuple[int, ...], list[int]]:
        """The clients that can pay for their answer, charged and synced, and each one's attempt number."""
        digest = self._digest([*vars(query).values()], {})
        charges = [Charge(client, round, query.purpose, digest, event_of(query, client)) for client in query.clients]
        charges = [charge for charge in charges if self._payable(charge)]
        self._paid.update(charge.client for charge in charges)
        return tuple(charge.client for charge in charges), self.ledger.charge(charges)

    def change(self, schedule: RunSchedule) -> None:
        """Go on with another schedule, its noise solved, chosen from what was released so far.

        **Guarantees** What was paid for is part of it, and the whole still fits the budget, which is then what
        guarantees state: full batches of Gaussian noise, and pure epsilons, are privacy filters (Feldman and Zrnic
        2021, Koskela et al. 2023; Rogers et al. 2016).

        Raises:
            UserError: other releases, of which this is not known.
        """
        for client, (before, after) in enumerate(zip(self.schedule.clients, schedule.clients, strict=True)):
            self._check_paid(client, after)
            if after.target_epsilon != before.target_epsilon or after.delta != before.delta:
                raise RuntimeError(f"client {client} has a budget, which its new schedule changes")
            _check_filter(after, self.accountant)
        self.schedule, self._changed, self._paid = schedule, True, set(range(len(schedule.clients)))

    def _check_paid(self, client: int, own: ClientSchedule) -> None:
        """Refuse a new schedule that is not what the client has paid for so far and something more."""
        planned = {line.purpose: line for line in own.planned}
        for purpose, events in self.ledger.paid(client).items():
            line = planned.get(purpose)
            if purpose != _SHOWN and (line is None or len(events) > line.count or {*events} != {line.event}):
                raise UserError(
                    f"`{self.ledger.path}` must hold what the schedule of client {client} plans now, got {len(events)} "
                    f"releases for {purpose!r} of other noise or number: an engine, a device or a version that the run "
                    "did not begin with has made anew what later noise is chosen from. Go on with what it began with, "
                    "or start a new run."
                )

    def anyone_affords(self) -> bool:
        """Whether any client has any planned release left."""
        return any(
            self.ledger.used(client, line.purpose) < line.count
            for client, own in enumerate(self.schedule.clients)
            for line in own.planned
        )

    def spent(self) -> tuple[float, ...]:
        """Live epsilon of each client, rounded up; of those who have paid since it was last asked for it is new."""
        live = self._live or [0.0] * len(self.schedule.clients)
        for client in self._paid:
            live[client] = self._spent_by(client)
        self._live, self._paid = live, set()
        return tuple(live)

    def _spent_by(self, client: int) -> float:
        if self.ledger.used(client, _SHOWN):
            return math.inf
        return self._spent(self.schedule.clients[client], lambda purpose: self.ledger.used(client, purpose))

    def noise_multiplier(self, client: int) -> float | None:
        """Of the client's most frequent noised sum; None for one that is planned for none."""
        own = self.schedule.clients[client]
        return (own.main.noise_multiplier or 0.0) if any(own.releases) else None

    def steps(self, client: int) -> int:
        """Noised steps the client has paid for."""
        return sum(event.steps for event in self.ledger.events(client) if isinstance(event, NoisedEvent))

    def releases(self, client: int) -> int:
        """Releases the client has paid for."""
        return len(self.ledger.events(client))

    def guarantees(self) -> tuple[Guarantee, ...]:
        """Each client's guarantee so far, composed again from the ledger."""
        schedules = self.schedule.clients
        queries = [([*self.ledger.events(client), *self.caveats], own.delta) for client, own in enumerate(schedules)]
        found = map(self._holds, schedules, self.accountant.bounds(queries))
        planned = [[line.event for line in own.planned] for own in schedules]  # before the first release, too
        return tuple(
            guarantee(events, delta, self.accountant, sampling=sampling_words(lines, self.sampling), found=own)
            for (events, delta), lines, own in zip(queries, planned, found, strict=True)
        )

    def _holds(self, own: ClientSchedule, composed: tuple[float, str]) -> tuple[float, str]:
        """The composed bound, or the budget where later noise was chosen from earlier releases."""
        epsilon, how = composed
        if self._changed and 0 < epsilon <= own.target_epsilon < math.inf:
            return own.target_epsilon, f"{how}, as a privacy filter: the whole budget is what holds"
        return composed

    def _payable(self, charge: Charge) -> bool:
        planned = self.schedule.planned(charge.client, charge.purpose)
        if charge.event != planned.event:
            raise RuntimeError(
                f"client {charge.client} was to release {charge.event} in round {charge.round}, but its schedule plans "
                f"{planned.event} for {charge.purpose!r}: a strategy that changes mechanisms declares it in `plan_run`"
            )
        return self.ledger.holds(charge) or self.ledger.used(charge.client, charge.purpose) < planned.count

    def _digest(self, values: Sequence[object], known: dict[tuple[int, int], bytes]) -> str:
        """Of all values; `known` keeps the tensors' own digests by the memory they lie in."""
        if self.secret is None:
            return secrets.token_hex(16)
        digest = hashlib.blake2b(self.fingerprint.encode(), digest_size=16, key=self.secret)
        for value in _pieces(values):
            if isinstance(value, Tensor):
                place = (value.data_ptr(), value.numel())
                if place not in known:
                    known[place] = hashlib.blake2b(memory_of(value), digest_size=32).digest()
                digest.update(known[place])
            else:
                digest.update(repr(value).encode())
        return digest.hexdigest()


def _check_filter(own: ClientSchedule, accountant: Accountant) -> None:
    """Refuse a schedule that follows from releases, unless its composition is known to hold then."""
    events = [line.event for line in own.planned if isinstance(line.event, NoisedEvent | SelectionEvent)]
    gaussian = all(isinstance(event, GaussianEvent) and event.sample_rate == 1 for event in events)
    pure = own.delta == 0 and not any(isinstance(event, GaussianEvent) for event in events)
    must = "be null (full batches), or noise pure (mechanism laplace, delta 0), where later noise follows from releases"
    require(gaussian or pure, "clients.batch_size", must, "sampled batches, or a mixture of releases")
    known = accountant.name in ("gdp", "rdp")
    require(known, "privacy.accountant", "be gdp or rdp where later noise follows from releases", accountant.name)


def _pieces(value: object) -> Iterator[object]:
    """All that a value holds, whole: `repr` of a tensor within it would round, and leave out."""
    if isinstance(value, Mapping):
        yield from _pieces(list(value.items()))
    elif isinstance(value, list | tuple):
        yield f"{type(value).__qualname__} of {len(value)}"
        for one in value:
            yield from _pieces(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _pieces([type(value).__qualname__, *vars(value).items()])
    else:
        yield torch.from_numpy(value) if isinstance(value, np.ndarray) else value
