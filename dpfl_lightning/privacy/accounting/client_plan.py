"""What one client will release, what noise that takes, and what it guarantees: arithmetic before anyone trains."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpfl_lightning.errors import UserError, UserNotice, nearest, require
from dpfl_lightning.privacy.accounting.accountant import Accountant, finite_or_none, get_accountant
from dpfl_lightning.privacy.accounting.calibration_cache import CalibrationCache
from dpfl_lightning.privacy.accounting.events import (
    Caveat,
    Event,
    GaussianEvent,
    LaplaceEvent,
    NoisedEvent,
    NonPrivateEvent,
    SelectionEvent,
)
from dpfl_lightning.privacy.accounting.guarantee import Guarantee, guarantee
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate
from dpfl_lightning.runtime.folders import cache_folder
from dpfl_lightning.runtime.notice import slow_notice


@dataclass(frozen=True)
class ClientPlan:
    """What one client will release, and what that guarantees.

    Args:
        schedule: every release, its noise solved.
        guarantee: of the whole schedule.
        accountant: name of the accountant.
        num_records: training records.
        batch_size: expected records of a step.
        epsilon_alone: what each line of the schedule would cost without the others.
    """

    schedule: ClientSchedule
    guarantee: Guarantee
    accountant: str
    num_records: int
    batch_size: int
    epsilon_alone: tuple[float, ...]

    @property
    def noise_multiplier(self) -> float:
        """Noise std (of Laplace noise: scale) / clip norm of the most frequent release."""
        return self.schedule.main.noise_multiplier or 0.0

    @property
    def sample_rate(self) -> float:
        """Poisson probability of a record in a step of the most frequent release."""
        return self.schedule.main.sample_rate

    @property
    def steps(self) -> int:
        """Noised steps of the whole run."""
        return sum(event.steps for event in self.schedule.events() if isinstance(event, NoisedEvent))

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; an infinite epsilon is None."""
        promise = self.guarantee.as_dict()
        lines = zip(self.schedule.planned, self.epsilon_alone, strict=True)
        return {
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
            "steps": self.steps,
            "epsilon": promise["epsilon"],
            "accountant": self.accountant,
            "delta": self.guarantee.delta,
            "guarantee": promise["words"],
            "planned": [
                {
                    "purpose": line.purpose,
                    "count": line.count,
                    "event": asdict(line.event),
                    "epsilon_alone": finite_or_none(alone),
                }
                for line, alone in lines
            ],
        }


def client_plans(
    schedules: Sequence[ClientSchedule],
    accountant: Accountant,
    sizes: Sequence[tuple[int, int]],
    sampling: str | None = None,
    caveats: Sequence[str] = (),
    unprotected: Sequence[str] = (),
) -> list[ClientPlan]:
    """The plans of solved schedules.

    Args:
        schedules: one a client, every noise set.
        accountant: that solved them.
        sizes: (num_records, batch_size) of each client.
        sampling: in words, where the sample rates do not say it.
        caveats: what no guarantee covers, in words.
        unprotected: what the run will show without noise, in words.
    """
    besides: list[Event] = [*map(Caveat, caveats), *map(NonPrivateEvent, unprotected)]
    promises = [
        guarantee([*own.events(), *besides], own.delta, accountant, sampling, own.releases) for own in schedules
    ]
    lines = [(line.events(), own.delta) for own in schedules for line in own.planned]
    alone = iter(accountant.search(lines).tolist())
    return [
        ClientPlan(own, promise, accountant.name, *size, tuple(next(alone) for _ in own.planned))
        for own, promise, size in zip(schedules, promises, sizes, strict=True)
    ]


def plan(
    num_records: int,
    batch_size: int,
    rounds: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    local_epochs: int = 1,
    mechanism: str = "gaussian",
    accountant: str = "rdp",
    adjacency: str = "add_remove",
    steps: int | None = None,
    participations: int | None = None,
    first_round: str | None = None,
    first_round_noise_multiplier: float | None = None,
    selections: int = 0,
    selection_epsilon: float | None = None,
) -> ClientPlan:
    """Epsilon to noise, or noise to epsilon, of a client that trains by DPSGD.

    A round takes local_epochs * ceil(num_records / batch_size) steps at sample rate batch_size / num_records, as the
    Poisson sampler of a run really takes them. A batch of all records is a full batch, without amplification.

    Args:
        num_records: training records of the client, >= 1.
        batch_size: expected records of a step, in 1..num_records.
        rounds: rounds of the run, >= 1.
        delta: slack of the guarantee, in (0, 1); usually below 1 / num_records; 0 is possible with Laplace noise.
        epsilon: budget to find the noise for, > 0; give this or noise_multiplier.
        noise_multiplier: noise std / clip norm on the sum, to find epsilon for, >= 0; give this or epsilon.
        local_epochs: passes over the own records in a round, >= 1.
        mechanism: gaussian, or laplace (gradients clipped in L1, full batches).
        accountant: rdp, prv (tighter, slower), gdp (exact, full batches only) or paper_ma (the noise-aware paper's).
        adjacency: in what neighbouring data sets differ: add_remove (one record more or less) or replace_one (one
            record is another).
        steps: noised steps of a round, >= 1, in place of local_epochs * ceil(num_records / batch_size).
        participations: rounds that the client takes part in, in 1..rounds; null is all of them.
        first_round: full is a first round of local_epochs steps with all records; null is a round like the others.
        first_round_noise_multiplier: noise of a full first round, >= 0; null is that of the other rounds.
        selections: choices by the exponential mechanism beside training, >= 0.
        selection_epsilon: bounded range of one selection, in (0, 1e6].
    Returns:
        The plan, its noise and its epsilon rounded up.

    **Privacy** Arithmetic on public facts.

    Raises:
        UserError: a value out of range, values that contradict each other, or an epsilon below what the accountant can
            certify.

    >>> planned = plan(num_records=2400, batch_size=64, rounds=30, delta=1e-4, epsilon=2.0)
    >>> planned.steps, round(planned.noise_multiplier, 3), planned.guarantee.epsilon <= 2.0
    (1140, 1.887, True)
    >>> full = plan(num_records=2400, batch_size=64, rounds=30, delta=1e-4, epsilon=2.0, first_round="full")
    >>> round(full.noise_multiplier, 3), [f"{line:.2f}" for line in full.epsilon_alone]  # the first round, the others
    (2.589, ['1.41', '1.31'])
    """
    _check_sizes(num_records, batch_size, rounds, local_epochs, steps, participations)
    _check_privacy(epsilon, noise_multiplier, delta, num_records, mechanism)
    fits = mechanism == "gaussian" or batch_size == num_records
    require(fits, "batch_size", f"be {num_records} (num_records) with Laplace noise", batch_size)
    takes_part = rounds if participations is None else participations
    solvable = takes_part > 1 or first_round_noise_multiplier is None or epsilon is None
    _check_first_round(first_round, first_round_noise_multiplier, solvable, steps, local_epochs)
    _check_selections(selections, selection_epsilon)
    judge = get_accountant(accountant, adjacency)
    lines, full = [], first_round is not None
    if full:
        first_noise = noise_multiplier if first_round_noise_multiplier is None else first_round_noise_multiplier
        lines.append(Planned("first_round", _event(mechanism, 1.0, first_noise, local_epochs), 1))
    if selection_epsilon is not None:
        lines.append(Planned("select", SelectionEvent(selection_epsilon), selections))
    if takes_part > full:
        steps = local_epochs * math.ceil(num_records / batch_size) if steps is None else steps
        event = _event(mechanism, batch_size / num_records, noise_multiplier, steps)
        lines.append(Planned("train", event, takes_part - full))
    schedule = ClientSchedule(math.inf if epsilon is None else epsilon, delta, tuple(lines))
    if epsilon is not None:
        cache = CalibrationCache(cache_folder("calibration"))
        schedule = calibrate([schedule], judge, slow_notice("solving the noise multiplier"), cache)[0]
    return client_plans([schedule], judge, [(num_records, batch_size)])[0]


def _event(mechanism: str, sample_rate: float, noise_multiplier: float | None, steps: int) -> NoisedEvent:
    if mechanism == "laplace":
        return LaplaceEvent(noise_multiplier, steps)
    return GaussianEvent(sample_rate, noise_multiplier, steps)


def _check_sizes(
    num_records: int, batch_size: int, rounds: int, local_epochs: int, steps: int | None, participations: int | None
) -> None:
    for key, value in (
        ("num_records", num_records),
        ("rounds", rounds),
        ("local_epochs", local_epochs),
        ("steps", 1 if steps is None else steps),
    ):
        require(value >= 1, key, "be at least 1", value)
    way_out = f"A batch of {num_records} is the full batch."
    fits = 1 <= batch_size <= num_records
    require(fits, "batch_size", f"be in 1..{num_records} (num_records)", batch_size, way_out)
    in_range = participations is None or 1 <= participations <= rounds
    require(in_range, "participations", f"be in 1..{rounds} (rounds)", participations)


def _check_privacy(
    epsilon: float | None, noise_multiplier: float | None, delta: float, num_records: int, mechanism: str
) -> None:
    known = ("gaussian", "laplace")
    require(mechanism in known, "mechanism", f"be {' or '.join(known)}", mechanism, nearest(mechanism, known))
    if (epsilon is None) == (noise_multiplier is None):
        must = "must be a number" if epsilon is None else "must be left out beside noise_multiplier"
        raise UserError(
            f"`epsilon` {must}, got {epsilon}. Give epsilon to find the noise, or noise_multiplier to find epsilon."
        )
    if epsilon is not None:
        require(0 < epsilon < math.inf, "epsilon", "be above 0 and finite", epsilon, "Smaller is more private.")
    if noise_multiplier is not None:
        require(0 <= noise_multiplier < math.inf, "noise_multiplier", "be at least 0 and finite", noise_multiplier)
    usual = f"Usual is below 1 / num_records = {1 / num_records:.2g}."
    in_range = 0 < delta < 1 or (delta == 0 and mechanism == "laplace")
    require(in_range, "delta", "be in (0, 1)", delta, usual)
    if delta > 1 / num_records:
        warnings.warn(
            f"`delta` should be below 1 / num_records = {1 / num_records:.2g}, got {delta:g}: publishing one "
            "record at random would satisfy it.",
            UserNotice,
            stacklevel=3,
        )


def _check_first_round(
    first_round: str | None, noise: float | None, solvable: bool, steps: int | None, local_epochs: int
) -> None:
    require(first_round in (None, "full"), "first_round", "be full or left out", first_round)
    key = "first_round_noise_multiplier"
    if noise is not None:
        require(first_round is not None, key, "be left out without first_round", noise, "Add --first_round full.")
        require(0 <= noise < math.inf, key, "be at least 0 and finite", noise)
    must = "be left out for a client of one participation and a budget"
    require(solvable, key, must, noise, "Its noise is what the budget solves.")
    must = "be left out beside steps, unless the first round is full"
    alone = steps is None or local_epochs == 1 or first_round is not None
    require(alone, "local_epochs", must, local_epochs, "Steps are those of a whole round.")


def _check_selections(selections: int, selection_epsilon: float | None) -> None:
    require(selections >= 0, "selections", "be at least 0", selections)
    if selection_epsilon is None:
        way_out = "For example 0.03 times the budget."
        require(selections == 0, "selection_epsilon", "be a number beside selections", None, way_out)
    else:
        require(selections >= 1, "selections", "be at least 1 beside selection_epsilon", selections)
        require(0 < selection_epsilon <= 1e6, "selection_epsilon", "be above 0 and at most 1e6", selection_epsilon)
