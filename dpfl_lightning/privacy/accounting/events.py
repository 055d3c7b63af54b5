"""Accounting events: what a client releases, without anything about data, and everything that follows from it.

An event knows its costs (Renyi divergence, privacy losses, pure epsilon), its form in dp_accounting and its words.
Nothing else asks for its class: a new mechanism is one class here, in `NOISED`. The accountant defines which data
sets are neighbours; a noise multiplier never includes that relation.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, ndtri

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.accounting import losses, rdp
from dpfl_lightning.privacy.accounting.losses import Loss, NoPld

Numbers = NDArray[np.float64]
Losses = list[tuple[tuple[Loss, Loss], int]]

#: relation between neighbouring data sets -> by how many bounds one record moves a sum without sampling
SENSITIVITY = {"add_remove": 1, "replace_one": 2}

_TOGETHER = 100  # selections whose worst adaptive composition is computed; such groups add up, 0.5 % above it


class Event:
    """What a client releases, or a caveat. Subclasses are frozen dataclasses.

    Attributes:
        kind: name in ledgers.
        private: whether epsilon may be finite.
    """

    kind: ClassVar[str]
    private: ClassVar[bool] = True

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **vars(self)}


@dataclass(frozen=True)
class Caveat(Event):
    """A limitation that costs nothing and protects nothing. Every guarantee that composes it includes `words`."""

    kind: ClassVar = "caveat"

    words: str


class Release(Event):
    """A release of some steps, whose costs are those of all steps together.

    The defaults are those of a release without noise: what a mechanism does not define makes its epsilon infinite.

    Attributes:
        protection: in words.
        needs_delta: whether no epsilon holds at delta 0.
        scores: whether it is of counts of held-out records.
    """

    protection: ClassVar[str] = "no noise"
    needs_delta: ClassVar[bool] = False
    scores: ClassVar[bool] = False

    @property
    def noiseless(self) -> bool:
        """Whether epsilon is infinite."""
        return True

    @property
    def free(self) -> bool:
        """Whether epsilon is 0."""
        return False

    @property
    def total(self) -> int:
        """Number of steps."""
        return 1

    @property
    def is_sampled(self) -> bool:
        """Whether steps draw some of the records."""
        return False

    @property
    def is_gaussian(self) -> bool:
        """Whether it is exactly a Gaussian mechanism: such releases together are another one."""
        return False

    def repeated(self, times: int) -> Self:
        """Return the event of `times` adaptive repetitions."""
        return self

    def parameters(self) -> tuple[float, ...]:
        """Return the fields before the number of steps, on the safe side. UserError if a field is out of range."""
        return ()

    @classmethod
    def rdp(cls, parameters: Numbers, orders: tuple[float, ...], adjacency: str) -> Numbers:
        """Return the RDP of one step for each row of `parameters` [n, k], in nats, [n, orders]."""
        return np.full((len(parameters), len(orders)), math.inf)

    def library_rdp(self, order: float, adjacency: str) -> float:
        """Return the RDP at one order, by an independent library if there is one."""
        return float(self.total * self.rdp(np.array([self.parameters()]), (order,), adjacency)[0, 0])

    def pure(self, sensitivity: int) -> float:
        """Return the epsilon that holds at delta 0."""
        return math.inf

    def squared_mu(self) -> float:
        """Return mu^2 of a Gaussian mechanism that costs at least as much, for sensitivity 1."""
        return math.inf

    def loss_range(self, sensitivity: int) -> float:
        """Return the largest difference of two privacy losses of one step."""
        return math.inf

    def variance(self, sensitivity: int) -> float:
        """Return an estimate of the variance of the privacy loss."""
        return self.total * self.loss_range(sensitivity) ** 2 / 4

    def reach(self, sensitivity: int, tail: float) -> float:
        """Return a privacy loss that a step exceeds with a probability of about e^tail; 0 if losses are bounded."""
        return 0.0

    def losses(self, adjacency: str, mesh: float, tail: float) -> Losses:
        """Return rounded privacy losses, with the record in the first or the second data set, and their numbers."""
        raise NoPld(f"no tight bound is known for {self.protection}")

    def dp_event(self, sensitivity: int) -> dict[str, Any]:
        """Return one step as an event of dp_accounting under ADD_OR_REMOVE_ONE."""
        return library_event("NonPrivateDpEvent")

    def replaced_dp_event(self) -> dict[str, Any]:
        """Return a step as an event that reveals at least as much under REPLACE_ONE: there only Gaussians compose."""
        return dominating_gaussian(self.loss_range(SENSITIVITY["replace_one"]))

    def step_words(self) -> str:
        """Describe one step in a guarantee, which states what has no noise by itself."""
        return ""

    def cells(self) -> list[str]:
        """Return sample rate, noise and steps of one release, for tables."""
        return ["1", "none", "-"]


class NoisedEvent(Release):
    """`steps` adaptive releases of a clipped sum with noise.

    `noise_multiplier` is the noise's scale / clip norm, on the sum, >= 0 (0: no privacy; None: to be solved), and
    `sample_rate` the Poisson probability of a record in one step; 1.0 is the full batch.

    Attributes:
        clip_order: order of the norm that bounds a record, 1 or 2.
        unit_std: standard deviation of noise of scale 1.
        noise_unit: the scale of the noise, in words.
        noised: what its noise makes of a step, in words.
        noise_name: follows the noise in tables.
        amplified: whether the accountants know an amplification by sampling; otherwise batches are full.
        of_counts: kind of the event of the same noise on counts of held-out records.
    """

    clip_order: ClassVar[int] = 2
    unit_std: ClassVar[float] = 1.0
    noise_unit: ClassVar[str] = "noise std"
    noised: ClassVar[str] = "noised"
    noise_name: ClassVar[str] = ""
    amplified: ClassVar[bool] = False
    of_counts: ClassVar[str]

    noise_multiplier: float | None
    sample_rate: float
    steps: int

    @classmethod
    def of(cls, sample_rate: float, noise_multiplier: float | None, steps: int) -> Self:
        raise NotImplementedError

    def growth(self, delta: float) -> float | None:
        """Return the power with which the noise's variance grows with the releases of a budget; None for no power."""
        return None

    def with_noise(self, noise_multiplier: float | None, steps: int | None = None) -> Self:
        """Return the event with other noise, and other steps if they are given."""
        return self.of(self.sample_rate, noise_multiplier, self.steps if steps is None else steps)

    def of_held_out(self) -> "NoisedEvent":
        """Return the event of the same noise on counts of held-out records, of which a record adds 1 to one."""
        return COUNTS[self.of_counts].of(self.sample_rate, self.noise_multiplier, self.steps)

    def repeated(self, times: int) -> Self:
        return self.with_noise(self.noise_multiplier, self.steps * times)

    @property
    def total(self) -> int:
        return self.steps

    @property
    def is_sampled(self) -> bool:
        return self.sample_rate < 1

    @property
    def noiseless(self) -> bool:
        return self.noise_multiplier == 0

    @property
    def free(self) -> bool:
        return self.steps == 0 or self.noise_multiplier == math.inf

    def parameters(self) -> tuple[float, ...]:
        noise = self.noise_multiplier
        if noise is None:
            raise UserError("`noise_multiplier` must be a number, got None. Solve it first with `calibrate`.")
        require(noise >= 0, "noise_multiplier", "be at least 0", noise, "0 means no privacy.")
        require(self.steps >= 0, "steps", "be at least 0", self.steps)
        if 1e100 < noise < math.inf:
            return (1e100,)  # its square would overflow; less noise gives a valid upper bound
        return (float(noise) if noise >= 1e-6 else 0.0,)  # the rounding of float32 sums would hide smaller noise

    @property
    def noise(self) -> float:
        """The noise multiplier, which is solved."""
        assert self.noise_multiplier is not None
        return self.noise_multiplier

    def step_words(self) -> str:
        noised = self.noised if self.noise_multiplier else "un-noised"
        step = "gradient step" if self.is_sampled else "full-batch step"
        return f"{noised} {'set' if self.scores else step}"

    def cells(self) -> list[str]:
        noise = f"{self.noise_multiplier or 0.0:.6g}{self.noise_name}"
        return [f"{self.sample_rate:.6g}", noise, str(self.steps)]


@dataclass(frozen=True)
class GaussianEvent(NoisedEvent):
    """Gaussian noise of standard deviation `noise_multiplier` clip norms, over Poisson-sampled records.

    `sample_rate` is in (0, 1]. RDP: Mironov, Talwar and Zhang (2019). Full batches are composed exactly.
    """

    kind: ClassVar = "gaussian"
    protection: ClassVar = "Gaussian noise"
    needs_delta: ClassVar = True
    amplified: ClassVar = True
    of_counts: ClassVar = "gaussian_counts"

    sample_rate: float
    noise_multiplier: float | None
    steps: int = 1

    @classmethod
    def of(cls, sample_rate: float, noise_multiplier: float | None, steps: int) -> Self:
        return cls(sample_rate, noise_multiplier, steps)

    @property
    def is_gaussian(self) -> bool:
        return self.sample_rate == 1

    def growth(self, delta: float) -> float | None:
        return 1.0 if self.is_gaussian else None

    def parameters(self) -> tuple[float, ...]:
        rate, way_out = self.sample_rate, "Divide a batch size by the number of records."
        require(0 < rate <= 1, "sample_rate", "be in (0, 1]", rate, way_out)
        return (float(rate), *super().parameters())

    @classmethod
    def rdp(cls, parameters: Numbers, orders: tuple[float, ...], adjacency: str) -> Numbers:
        rate, noise = parameters.T
        return rdp.sampled_gaussian_rdp(rate, noise, orders, adjacency)

    def library_rdp(self, order: float, adjacency: str) -> float:
        """Return what Opacus computes, which does not know replaced records of sampled batches."""
        from opacus.accountants.analysis.rdp import compute_rdp

        if adjacency == "replace_one" and not self.is_gaussian:
            return super().library_rdp(order, adjacency)
        noise = self.noise / SENSITIVITY[adjacency]
        return float(compute_rdp(q=self.sample_rate, noise_multiplier=noise, steps=self.steps, orders=[order])[0])

    def squared_mu(self) -> float:
        return self.steps / self.noise**2

    def variance(self, sensitivity: int) -> float:
        return self.steps * self.sample_rate**2 * math.expm1(min((self.noise / sensitivity) ** -2, 100))

    def reach(self, sensitivity: int, tail: float) -> float:
        return losses.gaussian_reach(self.sample_rate, sensitivity / self.noise, tail)

    def losses(self, adjacency: str, mesh: float, tail: float) -> Losses:
        return [(losses.gaussian_losses(self.sample_rate, self.noise, adjacency, mesh, tail), self.steps)]

    def dp_event(self, sensitivity: int) -> dict[str, Any]:
        event = library_event("GaussianDpEvent", noise_multiplier=self.noise / sensitivity)
        if self.sample_rate == 1:
            return event
        return library_event("PoissonSampledDpEvent", sampling_probability=self.sample_rate, event=event)

    def replaced_dp_event(self) -> dict[str, Any]:
        return self.dp_event(1)  # dp_accounting doubles the sensitivity


@dataclass(frozen=True)
class LaplaceEvent(NoisedEvent):
    """Laplace noise on sums of full batches that are clipped in L1: each step is 1 / noise_multiplier-DP."""

    kind: ClassVar = "laplace"
    protection: ClassVar = "Laplace noise"
    clip_order: ClassVar = 1
    unit_std: ClassVar = math.sqrt(2)
    noise_unit: ClassVar = "Laplace scale"
    noised: ClassVar = "Laplace-noised"
    noise_name: ClassVar = " (Laplace)"
    of_counts: ClassVar = "laplace_counts"
    sample_rate: ClassVar = 1.0  # type: ignore[misc]

    noise_multiplier: float | None
    steps: int = 1

    @classmethod
    def of(cls, sample_rate: float, noise_multiplier: float | None, steps: int) -> Self:
        return cls(noise_multiplier, steps)

    def growth(self, delta: float) -> float | None:
        return 2.0 if delta == 0 else None

    @classmethod
    def rdp(cls, parameters: Numbers, orders: tuple[float, ...], adjacency: str) -> Numbers:
        return rdp.laplace_rdp(parameters / SENSITIVITY[adjacency], orders)

    def pure(self, sensitivity: int) -> float:
        return sensitivity * self.steps / self.noise

    def loss_range(self, sensitivity: int) -> float:
        return 2 * sensitivity / self.noise

    def losses(self, adjacency: str, mesh: float, tail: float) -> Losses:
        return [((losses.laplace_loss(SENSITIVITY[adjacency] / self.noise, mesh),) * 2, self.steps)]

    def dp_event(self, sensitivity: int) -> dict[str, Any]:
        return library_event("LaplaceDpEvent", noise_multiplier=self.noise / sensitivity)


@dataclass(frozen=True)
class GaussianCounts(GaussianEvent):
    """Gaussian noise on counts of held-out records."""

    kind: ClassVar = "gaussian_counts"
    scores: ClassVar = True


@dataclass(frozen=True)
class LaplaceCounts(LaplaceEvent):
    """Laplace noise on counts of held-out records."""

    kind: ClassVar = "laplace_counts"
    scores: ClassVar = True


#: privacy.mechanism -> event of its noisy sums
NOISED: dict[str, type[NoisedEvent]] = {"gaussian": GaussianEvent, "laplace": LaplaceEvent}
PURE: type[NoisedEvent] = LaplaceEvent  # of pure differential privacy, delta 0
#: kind -> event of counts of held-out records
COUNTS: dict[str, type[NoisedEvent]] = {"gaussian_counts": GaussianCounts, "laplace_counts": LaplaceCounts}


@dataclass(frozen=True)
class SelectionEvent(Release):
    """`count` choices by the exponential mechanism with a monotone utility (Gumbel noise of scale 1 / epsilon).

    Adding or removing one record moves all utilities in the same direction by at most 1, which bounds the range by
    `epsilon`: the RDP of each choice is alpha * epsilon^2 / 8 (Cesar and Rogers, 2021). Replacing one record moves
    utilities in both directions, which bounds the range by 2 * epsilon.
    """

    kind: ClassVar = "selection"
    protection: ClassVar = "choice of a model"

    epsilon: float
    count: int = 1

    def repeated(self, times: int) -> Self:
        return dataclasses.replace(self, count=self.count * times)

    @property
    def total(self) -> int:
        return self.count

    @property
    def noiseless(self) -> bool:
        return math.isinf(self.epsilon)

    @property
    def free(self) -> bool:
        return self.count == 0 or self.epsilon == 0

    def parameters(self) -> tuple[float, ...]:
        require(self.epsilon >= 0, "selection epsilon", "be at least 0", self.epsilon)
        require(self.count >= 0, "count", "be at least 0", self.count)
        return (float(self.epsilon),)

    @classmethod
    def rdp(cls, parameters: Numbers, orders: tuple[float, ...], adjacency: str) -> Numbers:
        with np.errstate(over="ignore"):
            return np.array(orders) * (parameters * SENSITIVITY[adjacency]) ** 2 / 8

    def pure(self, sensitivity: int) -> float:
        return sensitivity * self.count * self.epsilon

    def loss_range(self, sensitivity: int) -> float:
        return sensitivity * self.epsilon

    def losses(self, adjacency: str, mesh: float, tail: float) -> Losses:
        whole, rest = divmod(self.count, _TOGETHER)
        groups = [(size, times) for size, times in ((_TOGETHER, whole), (rest, 1)) if size * times]
        epsilon = SENSITIVITY[adjacency] * self.epsilon
        return [((losses.selections_loss(epsilon, size, mesh, tail),) * 2, times) for size, times in groups]

    def dp_event(self, sensitivity: int) -> dict[str, Any]:
        return library_event("ZCDpEvent", rho=self.loss_range(sensitivity) ** 2 / 8)

    def step_words(self) -> str:
        return "selection"

    def cells(self) -> list[str]:
        scale = 1 / self.epsilon if self.epsilon else math.inf
        return ["1", f"{scale:.6g} (Gumbel)", str(self.count)]


@dataclass(frozen=True)
class NonPrivateEvent(Release):
    """A release of private information without noise: epsilon is infinite. `words`, one line, describe what it is."""

    kind: ClassVar = "unprotected"
    private: ClassVar = False

    words: str

    def __post_init__(self) -> None:
        if not self.words.isprintable():  # guarantees and ledgers state them
            raise ValueError(f"what is released must be described in one line of text, got {self.words!r}")


#: what a client can release; a ledger records each by its `kind`
RELEASES: tuple[type[Release], ...] = (*NOISED.values(), *COUNTS.values(), SelectionEvent, NonPrivateEvent)

_KINDS: dict[str, type[Event]] = {Caveat.kind: Caveat, **{one.kind: one for one in RELEASES}}


def noised_steps(events: Iterable[Event]) -> int:
    """Return the number of steps that release a noisy sum."""
    return sum(event.steps for event in events if isinstance(event, NoisedEvent))


def event_of(fields: Mapping[str, Any]) -> Event:
    """Return the event whose `as_dict` gave these fields. Raises KeyError, TypeError or ValueError for others."""
    return _KINDS[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


@dataclass(frozen=True)
class Composed:
    """Merged releases, without those that cost nothing; `unprotected` means that something else has no noise."""

    releases: tuple[Release, ...] = ()
    unprotected: bool = False

    @property
    def noiseless(self) -> bool:
        """Whether epsilon is infinite."""
        return self.unprotected or any(release.noiseless for release in self.releases)

    @property
    def free(self) -> bool:
        """Whether epsilon is 0."""
        return not (self.releases or self.unprotected)

    @property
    def full_batches(self) -> bool:
        """Whether all of it is Gaussian noise on full batches, some of which may have none."""
        return not (self.free or self.unprotected) and all(release.is_gaussian for release in self.releases)

    def mu(self, sensitivity: int) -> float:
        """Return the mu of all full batches of Gaussian noise together, as one Gaussian mechanism."""
        if self.noiseless:
            return math.inf
        return sensitivity * math.sqrt(sum(one.squared_mu() for one in self.releases if one.is_gaussian))

    def pure(self, sensitivity: int) -> float:
        """Return the epsilon that holds at delta 0, by addition; infinite with Gaussian noise or without noise."""
        return math.inf if self.noiseless else sum(release.pure(sensitivity) for release in self.releases)


def composed(events: Sequence[Event], delta: float) -> Composed:
    """Check events and delta, and merge equal releases, in the reverse order of their kinds.

    Raises UserError if a sampling rate is outside (0, 1], noise is negative or unsolved, a count is negative, or delta
    is outside (0, 1) (or negative, if no release needs it).
    """
    counts: Counter[tuple[Any, ...]] = Counter()  # of steps, by class and parameters
    for event, times in Counter(events).items():
        if isinstance(event, Release) and event.private:
            counts[type(event), *event.parameters()] += times * event.total
        elif not isinstance(event, Event):
            raise TypeError(f"not an event: {event!r}")
    merged: list[Release] = [kind(*parameters, count) for (kind, *parameters), count in counts.items()]
    paid = sorted((one for one in merged if not one.free), key=lambda one: one.kind, reverse=True)
    releases = Composed(tuple(paid), any(not event.private for event in events))
    if not (releases.free or releases.noiseless):  # epsilon 0 and infinity hold at any delta
        in_range = delta > 0 if any(release.needs_delta for release in paid) else delta >= 0
        require(in_range and delta < 1, "delta", "be in (0, 1)", delta, "It is usually at most 1 / number of records.")
    return releases


def dominating_gaussian(loss_range: float) -> dict[str, Any]:
    """Return a Gaussian mechanism under REPLACE_ONE that dominates mechanisms with this range of privacy losses.

    A mechanism with losses in [t - range, t] is post-processing of a binary one with these two losses. The trade-off
    function of the latter has one corner. A Gaussian trade-off function through that corner lies below it, because it
    is convex (Dong, Roth and Su, 2022). The largest mu of all t is that of t = range / 2.
    """
    mu = -2 * float(ndtri(expit(-loss_range / 2)))
    return library_event("GaussianDpEvent", noise_multiplier=2 / mu if math.isfinite(mu) else 0.0)


def library_event(class_name: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of an event of dp_accounting."""
    return {"module_name": "dp_accounting.dp_event", "class_name": class_name, **fields}
