"""The guarantee of a client: its epsilon together with everything that the epsilon depends on."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from dpfl_lightning.privacy.accounting.accountant import Accountant, finite_or_none
from dpfl_lightning.privacy.accounting.events import Caveat, Event, NoisedEvent, NonPrivateEvent, Release
from dpfl_lightning.privacy.accounting.noise_source import NoiseSource, source_in
from dpfl_lightning.privacy.accounting.units import RECORD, Unit
from dpfl_lightning.runtime.text import at_most, counted

_NO_NOISE = "updates are sent without noise, and no epsilon bounds what they reveal"

#: what a set of noisy sums is
_OF_COUNTS = " of counts of held-out records, from which accuracy, AUROC and calibration follow,"

#: how an epsilon was computed whose events may change by the results of earlier runs
CHOSEN = "results of earlier runs chose its releases"

#: caveat of every guarantee of a run that reports exact times
EXACT_TIMES = "exact times of rounds are reported, and they can depend on records"

#: caveat of every guarantee of a run whose end follows from its results
ENDS_BY_RESULTS = "the run may end by its results, so what is guaranteed is the epsilon of all that was planned"

#: ends the description of an epsilon that is the whole budget, because later noise followed from earlier releases
NOISE_BY_RESULTS = "results choose the noise of the run, so what is guaranteed is its whole budget"
FILTER = "as a privacy filter: the whole budget is what holds"

#: not covered, without an account and with one
OTHER_RUNS = "other runs on the same records, copies of this run's folder included: their epsilons add up"
UNKNOWN_RUNS = (
    "runs on the same records that are not in the account: of other users and machines, or with privacy.account null"
)

#: not covered, without releases of held-out records and with them
SCORED_RECORDS = "test and held-out records, on which models are evaluated"
EXACT_SCORES = "test records, and exact scores on held-out records"


def public_facts(unit: Unit) -> str:
    return f"{unit.public_numbers}, batch sizes, budgets and all other options, which are treated as public"


#: what no epsilon of this package covers, whatever a run does
NOT_COVERED: tuple[str, ...] = (
    SCORED_RECORDS,
    public_facts(RECORD),
    "what was done to the records before the run received them, and how a public data set was scaled and divided among "
    "the clients of an experiment",
    "times, memory, sizes of files and errors of the computation, which can depend on records",
    OTHER_RUNS,
)


@dataclass(frozen=True)
class CumulativeGuarantee:
    """What all runs in the account of a data holder reveal together, composed as if one run had planned them.

    `runs` is the number of the others. `limit` is the epsilon that all may have at `limit_delta` if neighbouring data
    sets are as `limit_adjacency` says; the share `used` of it is used up. They are None without a limit.
    """

    runs: int
    epsilon: float
    delta: float
    accountant: str
    adjacency: str
    sampling: str
    limit: float | None = None
    limit_delta: float | None = None
    limit_adjacency: str | None = None
    used: float | None = None

    def words(self) -> str:
        """Return what the runs cost together, as one sentence."""
        runs = f"With {counted(self.runs, 'other run')}" if self.runs else "With no other run"
        return f"{runs} on the same records: {self.cost()}."

    def cost(self) -> str:
        """Return epsilon, a limit, delta, what neighbouring data sets are, sampling and accountant, in words.

        >>> print(CumulativeGuarantee(2, 5.5, 0.1, "PLD", "add or remove one record", "full batches").cost())
        epsilon 5.5, at delta 0.1 (add or remove one record; full batches; PLD)
        """
        cost = "no bound on epsilon" if math.isinf(self.epsilon) else f"epsilon {at_most(self.epsilon)}"
        if self.limit is not None and self.limit_delta is not None:
            at = "" if self.limit_delta == self.delta else f" at delta {at_most(self.limit_delta)}"
            unit = "" if self.limit_adjacency == self.adjacency else f" ({self.limit_adjacency})"
            used = "" if self.used is None else f", of which {self.used:.1%} is used"
            cost += f" of a limit of {at_most(self.limit)}{at}{unit}{used}"
        return f"{cost}, at delta {at_most(self.delta)} ({self.adjacency}; {self.sampling}; {self.accountant})"

    @property
    def urgency(self) -> tuple[float, float]:
        """What is nearest to its limit, or else has the largest epsilon, is the largest."""
        return -1.0 if self.used is None else self.used, self.epsilon

    def as_dict(self) -> dict[str, Any]:
        """Return all fields for JSON; an infinite epsilon is None."""
        return {**vars(self), "epsilon": finite_or_none(self.epsilon)}


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """The guarantee of a client. An epsilon is always shown together with it.

    `epsilon` is an upper bound, rounded up to 1e-6; inf means no guarantee. `sampling` says how batches are drawn,
    `accountant` how epsilon was computed. `covers` names the releases that epsilon covers, none if it is infinite;
    `not_covered` includes the caveats and `unprotected`, what is released without noise, so that epsilon is infinite.
    `together` is what the account of the data holder says about all runs; None without an account.
    """

    epsilon: float
    delta: float
    sampling: str
    accountant: str
    unit: str = "record"
    adjacency: str = "add or remove one record"
    covers: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = NOT_COVERED
    caveats: tuple[str, ...] = ()
    unprotected: tuple[str, ...] = ()
    together: CumulativeGuarantee | None = None

    @property
    def covers_scores(self) -> bool:
        """Whether epsilon covers noisy counts of held-out records."""
        return EXACT_SCORES in self.not_covered

    @property
    def source(self) -> NoiseSource:
        """Where the noise comes from."""
        return source_in(self.caveats)

    def words(self) -> str:
        """Return the guarantee as one sentence, followed by the caveats.

        >>> Guarantee(epsilon=1.9999991, delta=0.1, sampling="full batch", accountant="RDP").words()
        '(2, 0.1)-differential privacy per record (add or remove one record), full batch, accounted by RDP.'
        """
        if math.isinf(self.epsilon):
            leaks = "; ".join(self.unprotected) or _NO_NOISE
            sentence = f"No differential privacy per {self.unit}: {leaks.rstrip('.')}."
        else:
            sentence = (
                f"({at_most(self.epsilon)}, {at_most(self.delta)})-differential privacy per {self.unit} "
                f"({self.adjacency}), {self.sampling}, accounted by {self.accountant}."
            )
            sentence = f"{self.source.heading}{sentence}"
        said = [sentence, *self._of_all_runs()]
        return " ".join([*said, *(f"Caveat: {caveat.rstrip('.')}." for caveat in self.caveats)])

    def _of_all_runs(self) -> list[str]:
        one = self.together
        if one is None:
            return []
        alone = not one.runs and one.limit is None and one.epsilon <= self.epsilon * (1 + 1e-5)
        return ["No other run on the same records is in the account."] if alone else [one.words()]

    def with_account(self, together: CumulativeGuarantee | None) -> Self:
        """Return the guarantee beside that of all runs in the account, if there is one."""
        if together is None:
            return self
        gaps = tuple(UNKNOWN_RUNS if gap == OTHER_RUNS else gap for gap in self.not_covered)
        return replace(self, together=together, not_covered=gaps)

    def __str__(self) -> str:
        said = (*self.caveats, *self.unprotected)
        return f"{self.words()} Not covered: {'; '.join(one for one in self.not_covered if one not in said)}."

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and `words` for JSON; an infinite epsilon is None."""
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        if (one := self.together) is not None:
            fields["together"] = one.as_dict()
        return {**fields, "epsilon": finite_or_none(self.epsilon), "words": self.words()}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Return the guarantee that `as_dict` describes. Raises TypeError, ValueError or KeyError if it is none."""
        fields: dict[str, Any] = {name: value for name, value in content.items() if name != "words"}
        lists = {name: tuple(map(str, value)) for name, value in fields.items() if isinstance(value, list)}
        one = fields.get("together")
        together = None if one is None else CumulativeGuarantee(**{**one, "epsilon": _epsilon(one["epsilon"])})
        numbers = {"epsilon": _epsilon(fields["epsilon"]), "delta": float(fields["delta"])}
        return cls(**{**fields, **lists, **numbers, "together": together})


@dataclass(frozen=True, kw_only=True)
class RunGuarantee(Guarantee):
    """The guarantee of the client with the largest epsilon, for a run or for several `runs` on the same records.

    Of all `clients`, `unbounded` have an infinite epsilon.
    """

    clients: int
    unbounded: int
    runs: int = 1

    def words(self) -> str:
        """Return the guarantee of this client, and what holds for all clients."""
        if self.unbounded:
            whose = f"{self.unbounded} of {self.clients} clients" if self.clients > 1 else "the only client"
            return f"{super().words()} So it is for {whose}."
        whose = f"This is the largest epsilon; each of the {self.clients} clients has its own,"
        if self.clients == 1:
            whose = "This is the epsilon of the only client,"
        together = f" All {self.runs} runs are composed." if self.runs > 1 else ""
        return f"{super().words()} {whose} for its own {self.unit}s, against everyone who sees its updates.{together}"


def guarantee(
    events: Sequence[Event],
    delta: float,
    accountant: Accountant,
    sampling: str | None = None,
    releases: Sequence[int] = (),
    bound: tuple[float, str] | None = None,
    unit: Unit = RECORD,
) -> Guarantee:
    """Return the guarantee of everything that one client releases; each `Caveat` and `NonPrivateEvent` is listed once.

    `sampling` says how batches are drawn, if they are not all full (add a `Caveat` for shuffled batches). `releases`
    are the numbers of releases of the first events; 1 for the others, as in a ledger. `bound` is what the accountant
    returned, if known.
    """
    epsilon, method = accountant.bound(events, delta) if bound is None else bound
    caveats = tuple(dict.fromkeys(event.words for event in events if isinstance(event, Caveat)))
    unprotected, drawn = leaks_of(events), sampling_words(events, sampling)
    releasing = [event for event in events if isinstance(event, Release)]
    counts = any(event.scores for event in releasing)
    scores = EXACT_SCORES if counts and math.isfinite(epsilon) else SCORED_RECORDS
    not_covered = (scores, public_facts(unit), *NOT_COVERED[2:], *unit.not_covered)
    if releasing and math.isfinite(epsilon):
        chosen = FILTER in method or CHOSEN in method
        caveats = (*caveats, *unit.group_words(events, delta, accountant, chosen))
    releases_text, bounded = released_words(events, releases), math.isfinite(epsilon)
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        sampling=unit.drawn(drawn),
        accountant=method,
        unit=unit.name,
        adjacency=unit.relation(accountant.adjacency),
        covers=releases_text if bounded else (),
        not_covered=(*unprotected, *(() if bounded else releases_text), *not_covered, *caveats),
        caveats=caveats,
        unprotected=unprotected,
    )


def weakest(guarantees: Sequence[Guarantee]) -> RunGuarantee:
    """Return the guarantee of the client with the largest epsilon, which is that of the run."""
    one = max(guarantees, key=lambda guarantee: guarantee.epsilon)
    unbounded = sum(math.isinf(guarantee.epsilon) for guarantee in guarantees)
    accounts = [guarantee.together for guarantee in guarantees if guarantee.together is not None]
    together = max(accounts, key=lambda account: account.urgency, default=None)
    return RunGuarantee(**{**vars(one), "together": together}, clients=len(guarantees), unbounded=unbounded)


def _epsilon(value: Any) -> float:
    return math.inf if value is None else float(value)


def leaks_of(events: Iterable[Event]) -> tuple[str, ...]:
    """Return what is released without noise, in words, each once."""
    return tuple(dict.fromkeys(event.words for event in events if isinstance(event, NonPrivateEvent)))


def released_words(events: Sequence[Event], releases: Sequence[int] = ()) -> tuple[str, ...]:
    """Describe the events, counted by their words; see `guarantee` for `releases`."""
    times, steps, of_what = Counter[str](), Counter[str](), dict[str, str]()
    for event, count in itertools.zip_longest(events, releases, fillvalue=1):
        if isinstance(event, Release) and event.private:
            words = event.step_words()
            if isinstance(event, NoisedEvent):
                of_what[words] = f"{_OF_COUNTS if event.scores else ''} in {{}}"
            times[words] += count
            steps[words] += event.total
    return tuple(
        counted(steps[words], words) + of_what.get(words, "").format(counted(count, "release"))
        for words, count in times.items()
        if count
    )


def sampling_words(events: Sequence[Event], drawn: str | None = None) -> str:
    """Describe how batches are drawn; `drawn` describes batches that are not full."""
    full = {not event.is_sampled for event in events if isinstance(event, NoisedEvent) and event.steps}
    if full == {True}:
        return "full batches"
    if drawn is not None:
        return drawn
    if not full:
        return "no batches"
    return "full and Poisson-sampled batches" if True in full else "Poisson-sampled batches"
