"""The one composition of releases of several runs or clients, and limits on it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dpfl_lightning.errors import require, require_one_of
from dpfl_lightning.privacy.accounting.accountant import (
    ADJACENCIES,
    Query,
    Rdp,
    exact_sum,
    get_accountant,
    rounded_up,
)
from dpfl_lightning.privacy.accounting.events import Composed, Event, NoisedEvent, NonPrivateEvent, Release, composed
from dpfl_lightning.privacy.accounting.guarantee import CHOSEN, FILTER, CumulativeGuarantee, Guarantee, guarantee
from dpfl_lightning.privacy.accounting.planned import numbered
from dpfl_lightning.privacy.accounting.rdp import ORDERS, converted
from dpfl_lightning.privacy.accounting.units import RECORD, ROWS_KEY, Relation, Unit, of_group
from dpfl_lightning.privacy.sampling import SAMPLERS, weakest
from dpfl_lightning.runtime.text import counted

Keys = frozenset[str]
#: for each run, the lines of which one may be the holder's: several only if clients cannot be told apart
History = Sequence[Sequence["Line"]]

#: the holder of lines without keys
ANYBODY: Keys = frozenset()
_MOST_TIGHT = 200  # mechanisms of several runs that are composed tightly: about three seconds
_WORST = "with the worst client of each run"


@dataclass(frozen=True)
class Line:
    """What one client of a run has released; clients of a run that share records are one line.

    Args:
        run: its name, which all of its lines have.
        client: the number of the first such client in the run.
        keys: what identifies the holder of the records, such as a name; none if it may be anybody.
        released: with the caveats of the run.
        delta, budget: of the client in this run; the budget is an epsilon.
        planned: what counts as well, because results decide the end of the run.
        filter: what counts instead, because results decide the noise of the run; see `whole_budgets`.
        chosen: whether results of other runs have chosen the releases. Then budget and delta count instead.
        unit: what the releases protect; of those of one holder, `rows` are the most that any run says.
    """

    run: str
    client: int
    keys: Keys
    released: tuple[Event, ...]
    delta: float
    adjacency: str
    sampling: str
    accountant: str
    budget: float = math.inf
    planned: tuple[Event, ...] | None = None
    filter: tuple[Event, ...] | None = None
    chosen: bool = False
    unit: Unit = RECORD

    @functools.cached_property
    def counts(self) -> tuple[Event, ...]:
        """The releases that are composed."""
        if self.chosen:
            return ()
        if self.filter is not None:
            return (*self.filter, *(event for event in self.released if not event.private))
        return self.released if self.planned is None else tuple(pointwise_maximum(self.released, self.planned))

    @property
    def relation(self) -> Relation:
        return Relation(self.adjacency, self.unit)

    @property
    def costs(self) -> bool:
        """Whether anything is released."""
        return self.chosen or any(isinstance(event, Release) for event in self.counts)

    @functools.cached_property
    def _merged(self) -> Composed:
        merged = composed(self.counts, 0.5)
        return replace(merged, releases=tuple(sorted(merged.releases, key=lambda one: (one.kind, one.parameters()))))

    def covers(self, other: Line) -> bool:
        """Whether this line costs at least as much, whatever else is composed: each release has one that it covers.

        A step at a lower sample rate is a mixture of a step at a higher one and of a step without the record, and more
        noise is less noise with independent noise added.
        """
        if (self.relation.key, self.sampling, self.chosen) != (other.relation.key, other.sampling, other.chosen):
            return False
        if self.chosen or not 0 < self.delta <= other.delta or self._merged.unprotected < other._merged.unprotected:
            return False
        ours, theirs = self._merged.releases, other._merged.releases
        return len(ours) >= len(theirs) and all(map(_covers, ours, theirs))

    @property
    def filtered(self) -> bool:
        """Whether more counts than was released."""
        if (self.planned is None and self.filter is None) or self.chosen:
            return False
        return {*composed(self.counts, 0.5).releases} != {*composed(self.released, 0.5).releases}


def _covers(one: Release, other: Release) -> bool:
    if type(one) is not type(other) or one.total < other.total:
        return False
    if isinstance(one, NoisedEvent) and isinstance(other, NoisedEvent):
        return one.sample_rate >= other.sample_rate and one.noise <= other.noise
    return one.parameters() == other.parameters()


@dataclass(frozen=True)
class Total:
    """What a holder's releases in all `runs` cost together, and everything on which this epsilon depends.

    `lines` are its own; of clients that cannot be told apart, that of the worst client of each run. `method` says how
    epsilon was computed, and `neighbours` what neighbouring data sets are: those of `adjacency` and `unit`.
    """

    keys: Keys
    lines: tuple[Line, ...]
    runs: Keys
    epsilon: float
    delta: float
    method: str
    accountant: str
    adjacency: str
    unit: Unit
    sampling: str
    neighbours: str

    @property
    def relation(self) -> Relation:
        return Relation(self.adjacency, self.unit)

    @property
    def name(self) -> str:
        return min(self.keys, default="any client")

    @property
    def released(self) -> tuple[Event, ...]:
        return tuple(event for line in self.lines for event in line.released)

    @property
    def budget(self) -> float:
        """The budget of its only run; none limits several ones together."""
        return self.lines[0].budget if len(self.lines) == 1 else math.inf

    @property
    def guarantee(self) -> Guarantee:
        accountant, words = get_accountant(self.accountant, self.adjacency), SAMPLERS[self.sampling].words
        stated = guarantee(self.released, self.delta, accountant, words, (), (self.epsilon, self.method), self.unit)
        return replace(stated, adjacency=self.neighbours)

    def beside(self, run: str | None, limit: Limit | None = None, used: float | None = None) -> CumulativeGuarantee:
        """Return what is stated beside the guarantee of a run; with a limit, of which the share `used` is used up."""
        return CumulativeGuarantee(
            runs=len(self.runs - {run}),
            epsilon=self.epsilon,
            delta=self.delta,
            accountant=self.method,
            adjacency=self.neighbours,
            sampling=SAMPLERS[self.sampling].words,
            used=used,
            limit=None if limit is None else limit.epsilon,
            limit_delta=None if limit is None else limit.delta,
            limit_adjacency=None if limit is None else limit.words,
        )


def compose(
    lines: Iterable[Line],
    delta: float | None = None,
    accountant: str | None = None,
    of: Collection[Keys] | None = None,
    relation: Relation | None = None,
) -> dict[Keys, Total]:
    """Return what each holder's releases in all runs cost together, composed as if one run had planned them.

    This alone decides which lines are of one holder (`histories`), at which delta (that of the question, else the
    smallest above 0), under which relation (`relation_of_all`, with that of the question) and sampling (the weakest),
    and with which accountant (that of the question, else that of all runs, else PLD). Several runs with many different
    mechanisms, or of clients that cannot be told apart, are composed by RDP. Budgets of `chosen` releases are added.

    Reference: Rogers et al. (2016), https://arxiv.org/abs/1605.08294, on releases that earlier results have chosen.
    """
    found = histories(lines, of)
    questions = [_Question(keys, each, delta, accountant, relation) for keys, each in found.items()]
    bounds: dict[Hashable, tuple[float, str]] = {}
    for kind in dict.fromkeys(one.kind for one in questions):
        queries, _ = numbered([query for one in questions if one.kind == kind for query in one.queries])
        size = get_accountant(*kind).chunk_size
        chunks = [queries[start : start + size] for start in range(0, len(queries), size)]
        estimates = itertools.chain(*map(get_accountant(*kind).estimates, chunks))
        bounds |= zip([(kind, query) for query in queries], estimates, strict=True)
    answers = [one.answer([bounds[one.kind, query] for query in one.queries]) for one in questions]
    return dict(zip(found, answers, strict=True))


def histories(lines: Iterable[Line], of: Collection[Keys] | None = None) -> dict[Keys, list[History]]:
    """Return what each holder may have released, or each of those asked for. Lines whose keys meet are of one holder.

    A line without keys may be of anybody, so it counts for each holder. Who has no keys may be each of the others, or
    none of them: it has several histories, of which the worst counts.

    >>> line = functools.partial(Line, "a", released=(), delta=0.0, adjacency="", sampling="", accountant="")
    >>> lines = [line(i, Keys(one)) for i, one in enumerate((["bergen"], ["Bergen"], ["oslo"], ["Bergen", "bergen"]))]
    >>> [[one.client for run in history for one in run] for ((history,)) in histories(lines).values()]
    [[0], [2]]
    """
    every, holder_of = list(lines), dict[str, Keys]()
    for keys in dict.fromkeys(line.keys for line in every):
        united = keys.union(*(holder_of[key] for key in keys if key in holder_of))
        holder_of |= dict.fromkeys(united, united)
    own: dict[Keys, list[Line]] = {}
    for line in every:
        own.setdefault(holder_of[min(line.keys)] if line.keys else ANYBODY, []).append(line)
    unknown = _by_run(own.pop(ANYBODY, []))
    anybody = list(itertools.chain(*unknown))
    each = {keys: _by_run([*some, *anybody]) for keys, some in own.items()}
    asked = [*own, *([ANYBODY] if anybody else [])] if of is None else of
    return {keys: [each.get(keys, unknown)] if keys else [unknown, *each.values()] for keys in asked}


def _by_run(lines: Sequence[Line]) -> History:
    """Return the lines of each run that cost something, or all if none does, without those that another one covers."""
    runs: dict[str, list[Line]] = {}
    for line in [one for one in lines if one.costs] or lines:
        runs.setdefault(line.run, []).append(line)
    return [run if len(run) == 1 else _uncovered(run) for run in runs.values()]


def _uncovered(run: Sequence[Line]) -> Sequence[Line]:
    found: list[Line] = []
    for line in {_cost(line): line for line in run[::-1]}.values():
        if not any(one.covers(line) for one in found):
            found = [*(one for one in found if not line.covers(one)), line]
        if len(found) > _MOST_TIGHT:  # too many choices in any case
            return run
    return found


def _cost(line: Line) -> Hashable:
    return line.counts, line.chosen, line.budget, line.delta, line.relation.key, line.sampling


class _Question:
    """What the releases of one holder cost. Its history is one of `each`."""

    def __init__(
        self,
        keys: Keys,
        each: Sequence[History],
        delta: float | None,
        accountant: str | None,
        relation: Relation | None,
    ) -> None:
        self.keys, self.each = keys, each
        self.lines = [line for history in each for run in history for line in run]
        deltas = [line.delta for line in self.lines if line.delta > 0 and not line.chosen]
        self.delta = min(deltas, default=0.0) if delta is None else delta
        relations = [line.relation for line in self.lines]
        self.adjacency, self.unit = relation_of_all(relations if relation is None else [relation, *relations])
        named = {line.accountant for line in self.lines}
        self.accountant = accountant or (named.pop() if len(named) == 1 else "pld")
        self.choices = list(itertools.chain(*(itertools.product(*history) for history in each))) if self._few else []

    @property
    def kind(self) -> tuple[str, str]:
        return self.accountant, self.adjacency

    @property
    def _few(self) -> bool:
        if all(len(history) <= 1 for history in self.each):
            return True
        count = sum(math.prod(map(len, history)) for history in self.each)
        if count > _MOST_TIGHT:
            return False
        firsts = [[event for run in history for event in run[0].counts] for history in self.each]
        return count * max(len(composed(events, 0.5).releases) for events in firsts) <= _MOST_TIGHT

    @functools.cached_property
    def queries(self) -> list[tuple[tuple[Event, ...], float]]:
        """The releases of each choice of clients, none if these are too many."""
        return [(tuple(event for line in choice for event in line.counts), self.delta) for choice in self.choices]

    def answer(self, bounds: Sequence[tuple[float, str]]) -> Total:
        """Return the total with the largest of these epsilons of `queries`."""
        if bounds:
            worst = max(range(len(bounds)), key=lambda place: bounds[place][0])
            (epsilon, method), lines = bounds[worst], self.choices[worst]
        else:
            (epsilon, method), lines = max((self._by_rdp(history) for history in self.each), key=lambda one: one[0])
        method += f", {FILTER}" if any(line.filtered for line in lines) else ""
        reserved = [max(sums) for sums in zip(*map(self._reserved, self.each), strict=True)]
        if chosen := len({line.run for line in self.lines if line.chosen}):
            words = f"addition of the budgets of {counted(chosen, 'run')} ({CHOSEN})"
            method = f"{method}, and {words}" if any(line.counts for line in self.lines) else words
        others = sorted({line.unit.name for line in self.lines if line.unit.is_group} - {self.unit.name})
        mixed = f" by another one of the same {' and '.join(others)}" if others else ""
        rows = [line.unit.rows for line in lines if line.unit.rows is not None and line.unit.group == self.unit.group]
        return Total(
            keys=self.keys,
            lines=lines,
            runs=frozenset(line.run for line in self.lines if line.costs),
            epsilon=exact_sum([epsilon, reserved[0]]),
            delta=exact_sum([self.delta, reserved[1]]),
            method=method,
            accountant=self.accountant,
            adjacency=self.adjacency,
            unit=replace(self.unit, rows=max(rows, default=None)),
            sampling=weakest([line.sampling for line in self.lines] or ["poisson"]),
            neighbours=self.unit.relation(self.adjacency) + mixed,
        )

    def _reserved(self, history: History) -> tuple[float, float]:
        """Return the epsilon and the delta of all runs whose releases were chosen: of each run, the largest."""
        replaces = self.adjacency == "replace_one"
        each = []
        for run in history:
            own = [(line.budget, line.delta) if line.chosen else (0.0, 0.0) for line in run]
            twice = [replaces and line.adjacency == "add_remove" for line in run]
            each.append([replaced(*bound) if both else bound for bound, both in zip(own, twice, strict=True)])
        epsilon, delta = (exact_sum(max(one[place] for one in run) for run in each) for place in (0, 1))
        return epsilon, delta

    def _by_rdp(self, history: History) -> tuple[tuple[float, str], tuple[Line, ...]]:
        """Return the bound in which the largest RDP of each run counts at each order, and the worst client of each."""
        rdp = _rdp(self.adjacency)
        pure = exact_sum(max(composed(line.counts, 0.5).pure(rdp.sensitivity) for line in run) for run in history)
        epsilon = min(float(converted(worst_curve(history, rdp), rdp.orders, self.delta).min()), pure)
        words = f"{rdp.description}, {_WORST}" if any(len(run) > 1 for run in history) else rdp.description
        worst = (max(run, key=lambda line: rdp.estimates([(line.counts, self.delta)])[0][0]) for run in history)
        return (rounded_up(epsilon, 6), words), tuple(worst)


def replaced(epsilon: float, delta: float) -> tuple[float, float]:
    """Return what holds for replacing a record, if this holds for adding or removing one: it is both in turn."""
    larger = rounded_up((1 + math.exp(min(epsilon, 700.0))) * delta, 15)
    return (2 * epsilon, larger) if larger < 1 else (math.inf, delta)


def relation_of_all(relations: Sequence[Relation]) -> Relation:
    """Return the relation between neighbouring data sets under which the runs compose.

    Different relations compose under replacement: it costs at least as much as adding or removing. A replaced record
    moves what a unit that holds it contributes by at most twice the clip norm, so a mixture of units holds for a record
    that is replaced within each of them.
    """
    units = {unit.name: unit for _, unit in relations}
    unit = next(iter(units.values())) if len(units) == 1 else RECORD
    different = {relation.key: relation.adjacency for relation in relations}
    return Relation("replace_one" if len(different) > 1 else next(iter(different.values()), "add_remove"), unit)


def pointwise_maximum(one: Sequence[Event], other: Sequence[Event]) -> list[Event]:
    """Return for each mechanism the releases of the side that has more of them."""
    most: dict[Hashable, Release] = {}
    for release in (*composed(one, 0.5).releases, *composed(other, 0.5).releases):  # costs come later, with a delta
        key = type(release), *release.parameters()
        if key not in most or most[key].total < release.total:
            most[key] = release
    leaks = dict.fromkeys(event for event in (*one, *other) if not event.private)
    return [*most.values(), *leaks]


def worst_curve(history: History, rdp: Rdp) -> np.ndarray:
    """Return an upper bound of the RDP of a holder at each order, `[orders]`: of each run, the client with most."""
    total = np.zeros(len(rdp.orders))
    for run in history:
        queries: list[Query] = [(line.counts, 0.5) for line in run]  # RDP has no delta
        total += rdp.curves(queries).max(axis=0)
    return total


@functools.cache
def _rdp(adjacency: str, orders: tuple[float, ...] = ORDERS) -> Rdp:
    return Rdp(adjacency, orders)


@dataclass(frozen=True)
class Limit:
    """Keeps all runs of a holder within (epsilon, delta), though later ones are chosen after results of earlier ones.

    It holds for `unit` under `adjacency`, whoever colludes: every release counts. One for a unit of several records
    counts releases about records by group privacy, with the most rows that the runs or the limit's unit say; without
    any they are unprotected. The RDP of all runs at one order stays within a budget: the order at which Gaussian noise
    on full batches may have the least variance. PLD gives a smaller epsilon, but assumes that all runs were planned
    beforehand. Raises UserError if no order can keep the limit.

    Reference: Feldman and Zrnic (2021), theorem 4.3.
    """

    epsilon: float
    delta: float
    adjacency: str = "add_remove"
    unit: Unit = RECORD

    def __post_init__(self) -> None:
        require_one_of(ADJACENCIES, "adjacency", self.adjacency)
        require(0 < self.delta < 1, "delta", "be in (0, 1)", self.delta, "It is usually below 1 / records.")
        floor = float(self._floors.min())
        must = f"be above {rounded_up(floor, 4)} at this delta, and finite"
        require(floor < self.epsilon < np.inf, "epsilon", must, self.epsilon)
        must, rows = f"be at least 1, and only with a limit for {self.unit.group}s", self.unit.rows
        require(rows is None or (self.unit.is_group and rows >= 1), ROWS_KEY, must, rows)

    @property
    def relation(self) -> Relation:
        return Relation(self.adjacency, self.unit)

    @property
    def words(self) -> str:
        """What neighbouring data sets are."""
        return self.relation.words

    def in_its_unit(self, line: Line) -> Line:
        """Return a line as this limit counts it."""
        if not self.unit.is_group or line.unit.name == self.unit.name:
            return line
        rows = self.unit.most_of(line.unit)

        def grouped(events: Sequence[Event]) -> tuple[Event, ...]:
            if rows is None:
                return (*events, NonPrivateEvent(self.unit.lacks(line.unit)[0])) if events else ()
            return tuple(of_group(event, rows) for event in events)

        planned, instead = (None if one is None else grouped(one) for one in (line.planned, line.filter))
        budget = line.budget if rows == 1 else math.inf
        unit = replace(self.unit, rows=rows)
        return replace(line, released=grouped(line.released), planned=planned, filter=instead, budget=budget, unit=unit)

    @property
    def _floors(self) -> np.ndarray:
        """The epsilon of nothing at each order."""
        return converted(np.zeros(len(ORDERS)), ORDERS, self.delta)

    @functools.cached_property
    def order(self) -> float:
        return ORDERS[int(np.argmax((self.epsilon - self._floors) / np.array(ORDERS)))]

    @property
    def budget(self) -> float:
        """The RDP at `order` that may be spent."""
        return self.epsilon - float(self._floors[ORDERS.index(self.order)])

    def used(self, each: Sequence[History]) -> float:
        """Return the share of the budget that a holder has used; 1 is the limit.

        Its history is one of `each`, with lines `in_its_unit`.
        """
        relations = [line.relation for history in each for run in history for line in run]
        adjacency, _ = relation_of_all([self.relation, *relations])
        rdp = _rdp(adjacency, (self.order,))
        return max(float(worst_curve(history, rdp)[0]) for history in each) / self.budget
