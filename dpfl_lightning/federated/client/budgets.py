"""The budgets of all clients in a run: what is planned, charged and spent."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.messages.facts import ClientSettings
from dpfl_lightning.federated.messages.jobs import ClassGradients, Job, LocalTraining, ProximalTraining
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Query, event_of
from dpfl_lightning.federated.messages.requests import Ask, Train
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.models.augmentation import ClassAugmentation
from dpfl_lightning.privacy.accounting.accountant import Accountant
from dpfl_lightning.privacy.accounting.events import Caveat, NonPrivateEvent, Release
from dpfl_lightning.privacy.accounting.filters import counted_events
from dpfl_lightning.privacy.accounting.guarantee import FILTER, Guarantee, guarantee, sampling_words
from dpfl_lightning.privacy.accounting.planned import numbered, once_each
from dpfl_lightning.privacy.accounting.units import RECORD, Unit
from dpfl_lightning.privacy.ledger.account import PrivacyAccount
from dpfl_lightning.privacy.ledger.ledger import Charge, Ledger
from dpfl_lightning.privacy.mechanism import MECHANISMS
from dpfl_lightning.privacy.sampling import SAMPLERS
from dpfl_lightning.runtime.stopping import check_starter
from dpfl_lightning.runtime.text import at_most

_KNOWN = {RoundPlan, Train, LocalTraining, ProximalTraining, ClassGradients, ClassAugmentation, *MECHANISMS, type(None)}
NameOf = Callable[[int], str]  # the name of a client, for messages
_SHOWN = "shown"  # purpose of what is shown without noise, in the ledger
_FOREIGN = (
    "Lines were appended while the run was interrupted, or another version chose the noise. Restore the run's ledger, "
    "resume with the version that began the run, or start a new run."
)


def _require_known(job: Job, *others: object) -> None:
    """Raise TypeError unless these are the framework's classes.

    A subclass could state another event, or send another value.
    """
    kinds = {type(job), *map(type, others)}
    kinds |= {type(job.augmentation)} if isinstance(job, ClassGradients) else set()
    if not kinds <= _KNOWN:
        raise TypeError(f"a round plan must have the framework's jobs and mechanisms, got {kinds - _KNOWN}")


def check_budgets(schedule: RunSchedule, settings: Sequence[ClientSettings], name_of: NameOf = str) -> None:
    """Raise UserError if the schedule of a run plans more than the budget of a client: strategies may only lower it."""
    for client, (client_settings, planned) in enumerate(zip(settings, schedule.clients, strict=True)):
        budget, target = (client_settings.epsilon, client_settings.delta), (planned.target_epsilon, planned.delta)
        must = f"plan at most the budget of client {name_of(client)}, (epsilon, delta) = {budget}"
        within = target[0] <= budget[0] and target[1] <= budget[1]
        require(within, "plan_run", must, target, "A strategy may lower a budget, not raise it.")


class Budgets:
    """Limits all charges to the planned schedule.

    Args:
        sampling: how batches are drawn, by name.
        repeats: whether a release that a crash interrupted is repeated bit for bit, so that it is charged once.
        unit: what is protected.
        account: of all runs on the same records, to which the ledger is charged, too.
        unprotected: what every client shows without noise. It is charged first, so that every epsilon is infinite.
        filters: of each client, what counts instead of its releases, because results decide their noise, or None.

    **Guarantees** Only planned events are charged, and not more often than planned. Every release is charged, also one
    that is repeated with fresh noise after a crash. Lines that the plan would not charge are neither signed nor counted
    as paid: they raise UserError before the next charge, and before guarantees. Counters are integers. The epsilons of
    a copy of the run's folder, of which this ledger knows nothing, add to those of the run.
    """

    def __init__(
        self,
        schedule: RunSchedule,
        ledger: Ledger,
        accountant: Accountant,
        sampling: str,
        repeats: bool,
        caveats: Sequence[str],
        unprotected: Sequence[str],
        name_of: NameOf = str,
        unit: Unit = RECORD,
        account: PrivacyAccount | None = None,
        filters: Sequence[Release | None] = (),
    ) -> None:
        self.name_of, self._unit, self.account = name_of, unit, account
        self._filters = tuple(filters) or (None,) * len(schedule.clients)
        self.schedule, self.ledger, self.accountant = schedule, ledger, accountant
        self.sampling, self.caveats = sampling, [Caveat(words) for words in caveats]
        self._numbers: Counter[tuple[int, int]] | None = Counter() if repeats else None  # of this process's charges
        self._checked = False
        self._check_fits(schedule)
        clients = range(len(schedule.clients))
        self._spent = [0.0 for _ in clients]  # at the last call of `spent`
        self._shown = [NonPrivateEvent(words) for words in unprotected]
        paid = [ledger.paid(client).get(_SHOWN, ()) for client in clients if self._shown]
        missing = [Charge(i, 0, _SHOWN, event) for event in self._shown for i in clients if event not in paid[i]]
        if missing:
            self._check_ledger(schedule)
            ledger.charge(missing)
        self._paid = ledger.payers()  # since the last call of `spent`

    def charge_round(self, plan: RoundPlan) -> tuple[RoundPlan, list[int]]:
        """Charge the clients that can pay. Returns their part of the plan, and the number of each client's charge."""
        _require_known(plan.job, *plan.mechanism_of, plan)
        events = {client: plan.sampler(row, self.sampling).event for row, client in enumerate(plan.clients)}
        numbers = self._charge(plan.round, plan.purpose, events)
        return plan.only(numbers.__contains__), [*numbers.values()]

    def charge_query(self, query: Query, round: int) -> tuple[tuple[int, ...], list[int]]:
        """Charge the clients that can pay for their answer. Returns them, and the number of each client's charge."""
        events = {client: event_of(query, client) for client in query.clients}
        numbers = self._charge(round, query.purpose, events)
        return tuple(numbers), [*numbers.values()]

    def charge(self, client: int, request: Train | Ask) -> int | None:
        """Charge what one client is asked for. Returns the number of its charge in the round; None if it cannot pay."""
        if type(request) is Ask:
            if request.question.clients != (client,):
                raise ValueError(f"a question to client {client} must name it alone, got {request.question.clients}")
            _, numbers = self.charge_query(request.question, request.round)
            return next(iter(numbers), None)
        assert isinstance(request, Train)  # for mypy
        _require_known(request.job, request.mechanism, request)
        event = request.sampler(self.sampling).event
        return self._charge(request.round, request.purpose, {client: event}).get(client)

    def unrecorded(self, client: int, charges: Sequence[Charge]) -> list[Charge]:
        """Return what the ledger lacks of the charges that a client elsewhere says it has paid.

        Raises UserError if one of them is not planned, or is not the next one of its round.
        """
        planned = {line.purpose: line for line in self.schedule.clients[client].planned}
        new: list[Charge] = []
        for charge in charges:
            known = [*self.ledger.charges(client, charge.round), *(one for one in new if one.round == charge.round)]
            if charge in known:
                continue
            line = planned.get(charge.purpose)
            fits = line is not None and charge.event == line.event and charge.number == len(known)
            if fits and line is not None:
                used = self.ledger.used(client, charge.purpose) + sum(one.purpose == line.purpose for one in new)
                fits = used < line.count and 1 <= charge.round <= self.schedule.rounds + 1
            must = f"be planned releases of client {self.name_of(client)}, in order"
            require(fits, "paid", must, charge, "The client follows another plan, or its ledger was changed.")
            new.append(charge)
        return new

    def record(self, charges: Sequence[Charge]) -> None:
        """Write down charges that were paid elsewhere, see `unrecorded`."""
        self._check_ledger(self.schedule)
        self.ledger.charge(charges)
        self._paid.update(charge.client for charge in charges)

    def _next(self, client: int, round: int, purpose: str, event: Release) -> Charge:
        """The next charge of a client in a round. The ledger numbers it, in a simulation this process."""
        number = len(self.ledger.charges(client, round)) if self._numbers is None else self._numbers[client, round]
        return Charge(client, round, purpose, event, number)

    def _payable(self, charge: Charge) -> bool:
        planned = self.schedule.planned(charge.client, charge.purpose)
        if charge.event != planned.event:
            raise RuntimeError(
                f"client {self.name_of(charge.client)} was to release {charge.event} in round {charge.round}, but its "
                f"schedule plans {planned.event} for {charge.purpose!r}: a strategy that changes mechanisms declares "
                "it in `plan_run`"
            )
        return self._is_charged(charge) or self.ledger.used(charge.client, charge.purpose) < planned.count

    def _is_charged(self, charge: Charge) -> bool:
        """Whether a simulation repeats a release that was charged before an interruption. UserError if by another."""
        known = self.ledger.charges(charge.client, charge.round)
        if charge.number < len(known) and known[charge.number] != charge:
            client = self.name_of(charge.client)
            whose = f"charge {charge.number} of client {client} in round {charge.round} pays for, {charge.event}"
            raise UserError(f"`{self.ledger.path}` must hold what {whose}, got {known[charge.number]}. {_FOREIGN}")
        return charge.number < len(known)

    def _charge(self, round: int, purpose: str, events: Mapping[int, Release]) -> dict[int, int]:
        """Charge one release of each client that can pay. Returns client -> number of its charge in the round."""
        charges = [self._next(client, round, purpose, event) for client, event in events.items()]
        charges = [charge for charge in charges if self._payable(charge)]
        check_starter()
        self._check_ledger(self.schedule)
        self._paid.update(charge.client for charge in charges)
        if self._numbers is not None:
            self._numbers.update((charge.client, charge.round) for charge in charges)
        self.ledger.charge([charge for charge in charges if not self._is_charged(charge)])
        return {charge.client: charge.number for charge in charges}

    def change(self, schedule: RunSchedule) -> None:
        """Continue with another solved schedule, which may depend on what was released so far.

        **Guarantees** The new schedule contains what was paid for, and fits the budget. Guarantees then state the whole
        budget: full batches of Gaussian noise, and pure epsilons, are privacy filters (Feldman and Zrnic 2021, Koskela
        et al. 2023; Rogers et al. 2016). Other releases raise UserError.
        """
        self._checked = False
        self._check_ledger(schedule)
        for client, (before, after) in enumerate(zip(self.schedule.clients, schedule.clients, strict=True)):
            if after.target_epsilon != before.target_epsilon or after.delta != before.delta:
                raise RuntimeError(f"client {self.name_of(client)} has a budget, which its new schedule changes")
            after.check_filter()
        self._check_fits(schedule)
        self.schedule, self._paid = schedule, set(range(len(schedule.clients)))

    def _check_fits(self, schedule: RunSchedule) -> None:
        """Check that the releases of each client, those without protection apart, fit its budget."""
        protected = once_each(lambda client: client.protected, schedule.clients)
        plans = list(dict.fromkeys(protected))
        epsilons = self.accountant.search([(plan.events(), plan.delta) for plan in plans])
        costs = dict(zip(plans, epsilons.tolist(), strict=True))
        for client, (cost, plan) in enumerate(zip(once_each(costs.__getitem__, protected), protected, strict=True)):
            if not cost <= plan.target_epsilon * (1 + 1e-6) + 2e-6:  # the last digit is rounded
                budget = f"its budget {at_most(plan.target_epsilon)}"
                must = f"plan releases of client {self.name_of(client)} that cost at most {budget}"
                require(False, "plan_run", must, cost, "Solve the noise with `view.solve`.")

    def _check_ledger(self, schedule: RunSchedule) -> None:
        """Check that the schedule plans what every line of the ledger pays for. Only then is a resumed run signed."""
        if self._checked:
            return
        for client, planned in enumerate(schedule.clients):
            allowed: dict[str, tuple[Sequence[Release], int]] = {_SHOWN: (self._shown, len(self._shown))}
            allowed |= {line.purpose: ([line.event], line.count) for line in planned.planned}
            for purpose, events in self.ledger.paid(client).items():
                known, most = allowed.get(purpose, ((), 0))
                if len(events) > most or not {*events} <= {*known}:
                    raise UserError(
                        f"`{self.ledger.path}` must hold what the schedule of client {self.name_of(client)} "
                        f"plans now, got {len(events)} releases for {purpose!r} of other noise or number. {_FOREIGN}"
                    )
        self.ledger.accept()
        self._checked = True

    def can_pay(self) -> bool:
        return any(
            self.ledger.used(client, line.purpose) < line.count
            for client, schedule in enumerate(self.schedule.clients)
            for line in schedule.planned
        )

    def spent(self) -> tuple[float, ...]:
        """The current epsilon of each client, rounded up, and at most the budget, which the whole schedule keeps."""
        paid = sorted(self._paid)
        schedules = [self.schedule.clients[client] for client in paid]
        used = [functools.partial(self.ledger.used, client) for client in paid]
        released = [(schedule.released(count), schedule.delta) for schedule, count in zip(schedules, used, strict=True)]
        epsilons = self.accountant.search(released).tolist() if paid else []
        for client, schedule, epsilon in zip(paid, schedules, epsilons, strict=True):
            unprotected = math.isinf(epsilon) or self.ledger.used(client, _SHOWN)
            self._spent[client] = math.inf if unprotected else min(epsilon, schedule.target_epsilon)
        self._paid = set()
        return tuple(self._spent)

    def guarantees(self) -> tuple[Guarantee, ...]:
        """Each client's guarantee; clients with equal schedules that have released the same share one object."""
        self._check_ledger(self.schedule)
        schedules, place_of = numbered(self.schedule.clients)
        events_of = [tuple(self.ledger.events(client)) for client in range(len(place_of))]
        kinds, kind_of = numbered([*zip(place_of, events_of, self._filters, strict=True)])
        composed = [([*events, *self.caveats], schedules[place].delta) for place, events, _ in kinds]
        counted = [
            ([*counted_events(events, bound), *self.caveats], delta)
            for (_, events, bound), (_, delta) in zip(kinds, composed, strict=True)
        ]
        promises, drawn = [], SAMPLERS[self.sampling].words
        for (place, _, instead), (events, delta), (epsilon, method) in zip(
            kinds, composed, self.accountant.bounds(counted), strict=True
        ):
            planned = [line.event for line in schedules[place].planned]  # also before the first release
            words = sampling_words(planned, drawn)
            stated = epsilon, method if instead is None else f"{method}, {FILTER}"
            promises.append(guarantee(events, delta, self.accountant, words, (), stated, self._unit))
        together = {} if self.account is None else self.account.together()
        stated_with, place_of = numbered([(kind, together.get(client)) for client, kind in enumerate(kind_of)])
        different = [promises[kind].with_account(one) for kind, one in stated_with]
        return tuple(different[place] for place in place_of)
