"""Plans of one client before training: its releases, their noise, and the guarantee; arithmetic on public facts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpfl_lightning.errors import UserError, nearest, require, warn_user
from dpfl_lightning.privacy.accounting.accountant import Accountant, finite_or_none, get_accountant
from dpfl_lightning.privacy.accounting.events import (
    NOISED,
    Caveat,
    Event,
    NonPrivateEvent,
    SelectionEvent,
    noised_steps,
)
from dpfl_lightning.privacy.accounting.guarantee import Guarantee, guarantee
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate
from dpfl_lightning.privacy.accounting.units import RECORD, Unit
from dpfl_lightning.runtime.text import at_most, slow_notice


@dataclass(frozen=True)
class ClientPlan:
    """All releases of one client with solved noise, and the guarantee of the whole schedule."""

    schedule: ClientSchedule
    guarantee: Guarantee
    accountant: str
    num_records: int
    batch_size: int  # expected number of records in a step
    epsilon_alone: tuple[float, ...]  # of each line of the schedule

    @property
    def noise_multiplier(self) -> float:
        """Noise / clip norm of the most frequent release, in `NoisedEvent.noise_unit`."""
        return self.schedule.main.noise_multiplier or 0.0

    @property
    def sample_rate(self) -> float:
        """Poisson probability of a record in a step of the most frequent release."""
        return self.schedule.main.sample_rate

    @property
    def steps(self) -> int:
        """Noised steps of the whole run."""
        return noised_steps(self.schedule.events())

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON; an infinite epsilon is None."""
        statement = self.guarantee.as_dict()
        return {
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
            "steps": self.steps,
            "epsilon": statement["epsilon"],
            "accountant": self.accountant,
            "delta": self.guarantee.delta,
            "guarantee": statement["words"],
            "planned": [
                {
                    "purpose": line.purpose,
                    "count": line.count,
                    "event": dict(vars(line.event)),
                    "epsilon_alone": finite_or_none(alone),
                }
                for line, alone in zip(self.schedule.planned, self.epsilon_alone, strict=True)
            ],
        }


def client_plans(
    schedules: Sequence[ClientSchedule],
    accountant: Accountant,
    sizes: Sequence[tuple[int, int]],
    sampling: str | None = None,
    caveats: Sequence[str] = (),
    unprotected: Sequence[str] = (),
    unit: Unit = RECORD,
) -> list[ClientPlan]:
    """Return the plans of solved schedules, one for each client, with its (num_records, batch_size) in `sizes`.

    `sampling` describes it if it does not follow from the sample rates. `caveats` describe what no guarantee covers,
    `unprotected` what the run releases without noise.
    """
    extra_events: list[Event] = [*map(Caveat, caveats), *map(NonPrivateEvent, unprotected)]
    promises = [
        guarantee([*s.events(), *extra_events], s.delta, accountant, sampling, s.releases, unit=unit) for s in schedules
    ]
    lines = [(line.events(), schedule.delta) for schedule in schedules for line in schedule.planned]
    alone = iter(accountant.search(lines).tolist())
    return [
        ClientPlan(schedule, promise, accountant.name, *size, tuple(next(alone) for _ in schedule.planned))
        for schedule, promise, size in zip(schedules, promises, sizes, strict=True)
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
    accountant: str = "pld",
    adjacency: str = "add_remove",
    steps: int | None = None,
    participations: int | None = None,
    first_round: str | None = None,
    first_round_noise_multiplier: float | None = None,
    selections: int = 0,
    selection_epsilon: float | None = None,
) -> ClientPlan:
    """Compute the noise for an epsilon, or the epsilon for a noise multiplier, of a client that trains with DPSGD.

    A round takes local_epochs * ceil(num_records / batch_size) steps at sample rate batch_size / num_records, exactly
    as the Poisson sampler of a run. A batch of all records is a full batch, without amplification by sampling.

    Args:
        num_records: training records of the client, >= 1.
        batch_size: expected number of records in a step, in 1..num_records.
        rounds: rounds of the run, >= 1.
        delta: delta of the guarantee, in (0, 1); usually below 1 / num_records; 0 is allowed with pure mechanisms.
        epsilon: privacy budget for which the noise is solved, > 0; give either this or noise_multiplier.
        noise_multiplier: noise std / clip norm on the sum, >= 0, for which epsilon is computed.
        local_epochs: passes over the client's records in a round, >= 1.
        mechanism: as the option `privacy.mechanism`.
        accountant: pld (tight), rdp or paper_ma (noise-aware paper).
        adjacency: relation between neighbouring data sets: add_remove (add or remove one record) or replace_one
            (replace one record).
        steps: noised steps in a round, >= 1; replaces local_epochs * ceil(num_records / batch_size).
        participations: number of rounds in which the client takes part, in 1..rounds; null means all rounds.
        first_round: full means that the first round takes local_epochs steps with all records; null means that it is
            like the other rounds.
        first_round_noise_multiplier: noise of a full first round, >= 0; null means the noise of the other rounds.
        selections: number of choices by the exponential mechanism in addition to training, >= 0.
        selection_epsilon: bounded range of one selection, in (0, 1e6].

    Raises UserError if a value is out of range, values contradict each other, or epsilon cannot be certified.

    >>> planned = plan(num_records=2400, batch_size=64, rounds=30, delta=1e-4, epsilon=2.0)
    >>> planned.steps, round(planned.noise_multiplier, 3), planned.guarantee.epsilon <= 2.0
    (1140, 1.744, True)
    """
    sizes = {"num_records": num_records, "rounds": rounds, "local_epochs": local_epochs}
    for key, value in (sizes if steps is None else {**sizes, "steps": steps}).items():
        require(value >= 1, key, "be at least 1", value)
    fits = 1 <= batch_size <= num_records
    advice = f"A batch of {num_records} is the full batch."
    require(fits, "batch_size", f"be in 1..{num_records} (num_records)", batch_size, advice)
    takes_part = rounds if participations is None else participations
    require(1 <= takes_part <= rounds, "participations", f"be in 1..{rounds} (rounds)", participations)
    _check_privacy(epsilon, noise_multiplier, delta, num_records, mechanism)
    noised = NOISED[mechanism]
    fits = noised.amplified or batch_size == num_records
    require(fits, "batch_size", f"be {num_records} (num_records) with {noised.protection}", batch_size)
    solvable = takes_part > 1 or first_round_noise_multiplier is None or epsilon is None
    _check_first_round(first_round, first_round_noise_multiplier, solvable, steps, local_epochs)
    require(selections >= 0, "selections", "be at least 0", selections)
    if selection_epsilon is None:
        advice = "For example 0.03 times the budget."
        require(selections == 0, "selection_epsilon", "be a number if selections is above 0", None, advice)
    else:
        require(selections >= 1, "selections", "be at least 1 if selection_epsilon is given", selections)
        require(0 < selection_epsilon <= 1e6, "selection_epsilon", "be above 0 and at most 1e6", selection_epsilon)
    chosen_accountant = get_accountant(accountant, adjacency)

    lines, full = [], first_round is not None
    if full:
        first_noise = noise_multiplier if first_round_noise_multiplier is None else first_round_noise_multiplier
        lines.append(Planned("first_round", noised.of(1.0, first_noise, local_epochs), 1))
    if selection_epsilon is not None:
        lines.append(Planned("select", SelectionEvent(selection_epsilon), selections))
    if takes_part > full:
        steps = local_epochs * math.ceil(num_records / batch_size) if steps is None else steps
        event = noised.of(batch_size / num_records, noise_multiplier, steps)
        lines.append(Planned("train", event, takes_part - full))
    schedule = ClientSchedule(math.inf if epsilon is None else epsilon, delta, tuple(lines))
    if epsilon is not None:
        schedule = calibrate([schedule], chosen_accountant, slow_notice("solving the noise multiplier"))[0]
    return client_plans([schedule], chosen_accountant, [(num_records, batch_size)])[0]


def _check_privacy(
    epsilon: float | None, noise_multiplier: float | None, delta: float, num_records: int, mechanism: str
) -> None:
    must = f"be {' or '.join(NOISED)}"
    require(mechanism in NOISED, "mechanism", must, mechanism, nearest(mechanism, tuple(NOISED)))
    if (epsilon is None) == (noise_multiplier is None):
        must = "must be a number" if epsilon is None else "must be left out if noise_multiplier is given"
        raise UserError(
            f"`epsilon` {must}, got {epsilon}. Give epsilon to find the noise, or noise_multiplier to find epsilon."
        )
    if epsilon is not None:
        require(0 < epsilon < math.inf, "epsilon", "be above 0 and finite", epsilon, "Smaller is more private.")
    if noise_multiplier is not None:
        require(0 <= noise_multiplier < math.inf, "noise_multiplier", "be at least 0 and finite", noise_multiplier)
    expected = f"below 1 / num_records = {1 / num_records:.2g}"
    in_range = 0 < delta < 1 or (delta == 0 and not NOISED[mechanism].needs_delta)
    require(in_range, "delta", "be in (0, 1)", delta, f"It is usually {expected}.")
    if delta > 1 / num_records:
        why = "publishing one record at random would satisfy it"
        warn_user(f"`delta` should be {expected}, got {at_most(delta)}: {why}.")


def _check_first_round(
    first_round: str | None, noise: float | None, solvable: bool, steps: int | None, local_epochs: int
) -> None:
    require(first_round in (None, "full"), "first_round", "be full or left out", first_round)
    key = "first_round_noise_multiplier"
    if noise is not None:
        must = "be left out unless first_round is full"
        require(first_round is not None, key, must, noise, "Add --first_round full.")
        require(0 <= noise < math.inf, key, "be at least 0 and finite", noise)
    must = "be left out for a client with one participation and a budget"
    require(solvable, key, must, noise, "The budget determines its noise.")
    must = "be left out if steps is given, unless the first round is full"
    counts_epochs = steps is None or local_epochs == 1 or first_round is not None
    require(counts_epochs, "local_epochs", must, local_epochs, "`steps` counts the steps of a whole round.")
