"""Calibration: the noise, or the number of releases, that a client's budget allows for a whole run.

All of it is arithmetic on public facts.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from scipy.optimize import elementwise

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.accounting.accountant import Accountant, rounded_up
from dpfl_lightning.privacy.accounting.events import NoisedEvent, Release, noised_steps
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, once_each
from dpfl_lightning.runtime.text import at_most

_TOLERANCE = 1e-6  # relative tolerance of the solved noise
_DIGITS = 7  # digits of the solved noise
_MOST_NOISE = 1e9  # a schedule that does not fit with this noise never fits


def calibrate(
    schedules: Sequence[ClientSchedule],
    accountant: Accountant,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[ClientSchedule]:
    """Solve each client's free noise multiplier: the smallest z with epsilon(all its releases) <= target.

    Releases with noise_multiplier None share the client's free noise, which is 0 if the target is infinite. The noise
    is on the safe side and within 0.1 % of the smallest that the accountant accepts: it is rounded up, and so is the
    epsilon of `accountant`, with which it is composed again. `on_progress` gets (solved, all) distinct schedules.

    `NonPrivateEvent` releases are left out, because no noise makes their epsilon finite: the others alone fit the
    target, but the whole schedule costs an infinite epsilon. Raises UserError if epsilon <= 0, delta is outside (0, 1),
    or the target is at or below what the accountant can certify with the given noise; the message names that floor.
    """
    once_each(_check, schedules)
    protected = dict.fromkeys(once_each(lambda schedule: schedule.protected, schedules))
    distinct = [schedule for schedule in protected if any(line.unsolved for line in schedule.planned)]
    solved: dict[ClientSchedule, float] = {}
    for start in range(0, len(distinct), accountant.chunk_size):
        chunk = distinct[start : start + accountant.chunk_size]

        def report(done: int = len(solved)) -> None:
            if on_progress is not None:
                on_progress(done, len(distinct))

        noises = _certified(chunk, _smallest_noise(chunk, accountant, report), accountant)
        for schedule, noise in zip(chunk, noises, strict=True):
            solved[schedule] = noise
            report(len(solved))

    def with_solved(schedule: ClientSchedule) -> ClientSchedule:
        key = schedule.protected
        return schedule.with_noise(solved[key]) if key in solved else schedule

    return once_each(with_solved, schedules)


def cut_to_budgets(
    schedules: Sequence[ClientSchedule], accountant: Accountant, on_progress: Callable[[int, int], None] | None = None
) -> list[ClientSchedule]:
    """Reduce the count of the most frequent noisy sum to what the budget allows together with all other releases.

    This applies to schedules whose noise is given. Those with free noise or an infinite target are returned unchanged.
    `NonPrivateEvent` releases are left out, and `on_progress` is called, as in `calibrate`. Raises UserError if the
    other releases alone exceed the budget.
    """
    cut = {schedule: schedule for schedule in schedules}
    fixed = [one for one in cut if math.isfinite(one.target_epsilon) and not any(line.unsolved for line in one.planned)]
    for start in range(0, len(fixed), accountant.chunk_size):
        chunk = fixed[start : start + accountant.chunk_size]
        for schedule, count in zip(chunk, _largest_counts(chunk, accountant), strict=True):
            while (cost := accountant.epsilon(*_query(schedule, count))) > schedule.target_epsilon:
                if count == 0:
                    raise _below_floor(schedule.with_main_count(0).protected, cost, accountant)
                count -= 1  # `search` is approximate, `epsilon` is authoritative
            cut[schedule] = schedule.with_main_count(count)
        if on_progress is not None:
            on_progress(start + len(chunk), len(fixed))
    return once_each(cut.__getitem__, schedules)


def _query(schedule: ClientSchedule, count: int) -> tuple[list[Release], float]:
    """Return the releases that have noise, with another count of `main_line`, and delta."""
    return schedule.with_main_count(count).protected.events(), schedule.delta


def _largest_counts(schedules: Sequence[ClientSchedule], accountant: Accountant) -> list[int]:
    """Bisect the counts of all `main_line`s together. Most clients can afford everything, which is asked first."""
    asked = [schedule.main_line.count for schedule in schedules]
    fitting, too_many = [0] * len(asked), [most + 1 for most in asked]
    while undecided := [i for i in range(len(asked)) if too_many[i] - fitting[i] > 1]:
        epsilons = accountant.search([_query(schedules[i], asked[i]) for i in undecided])
        for i, epsilon in zip(undecided, epsilons, strict=True):
            if epsilon <= schedules[i].target_epsilon:
                fitting[i] = asked[i]
            else:
                too_many[i] = asked[i]
            asked[i] = (fitting[i] + too_many[i]) // 2
    return fitting


def _check(schedule: ClientSchedule) -> None:
    if any(line.unsolved for line in schedule.planned):
        require(schedule.target_epsilon > 0, "epsilon", "be above 0", schedule.target_epsilon, "null means no budget.")
        pure = schedule.delta == 0 and not any(line.event.needs_delta for line in schedule.planned)
        if math.isfinite(schedule.target_epsilon) and not pure:
            advice = "It is usually below 1 / number of records."
            require(0 < schedule.delta < 1, "delta", "be in (0, 1)", schedule.delta, advice)
    for line in schedule.planned:
        require(line.count >= 0, "count", f"be at least 0 for {line.purpose}", line.count)


def _certified(schedules: Sequence[ClientSchedule], noises: Iterable[float], accountant: Accountant) -> list[float]:
    """Round the noises up, and increase them until the accountant's epsilon is within the target."""
    certified, step, pending = list(map(float, noises)), _TOLERANCE, list(range(len(schedules)))
    while pending:
        digits = [_DIGITS - 1 - math.floor(math.log10(noise)) if noise > 0 else 0 for noise in certified]
        certified = list(map(rounded_up, certified, digits))
        queries = [(schedules[i].with_noise(certified[i]).events(), schedules[i].delta) for i in pending]
        bounds = zip(pending, accountant.bounds(queries), strict=True)
        pending = [i for i, (epsilon, _) in bounds if not epsilon <= schedules[i].target_epsilon]
        for i in pending:
            if not 0 < certified[i] < _MOST_NOISE:
                raise RuntimeError(f"no noise could be certified for {schedules[i]}")
            certified[i] *= 1 + step
        step *= 2
    return certified


def _smallest_noise(
    schedules: Sequence[ClientSchedule], accountant: Accountant, report: Callable[[], None]
) -> np.ndarray:
    """Return noise multipliers just above the smallest that fit, [clients]; 0 if any noise fits."""
    target = np.array([schedule.target_epsilon for schedule in schedules])

    def excess(log_noise: np.ndarray, client: np.ndarray) -> np.ndarray:
        """log(epsilon / target): decreasing, nearly linear in the logarithm of the noise."""
        noised = [schedules[i].with_noise(math.exp(x)) for i, x in zip(client, log_noise, strict=True)]
        epsilon = accountant.search([(schedule.events(), schedule.delta) for schedule in noised])
        report()
        return np.log(np.clip(epsilon, 1e-9, 1e300) / target[client])

    noise = np.zeros(len(schedules))
    bounded = [i for i, schedule in enumerate(schedules) if math.isfinite(schedule.target_epsilon)]
    larger = None if accountant.faster is None else _rough_noise([schedules[i] for i in bounded], accountant.faster)
    if larger is None:
        least = excess(np.full(len(bounded), math.log(_MOST_NOISE)), np.array(bounded, dtype=int))
        for i, too_much in zip(bounded, least, strict=True):
            if too_much > 0:
                raise _below_floor(schedules[i], target[i] * math.exp(too_much), accountant)
    unsolved = [
        (place, i)
        for place, i in enumerate(bounded)
        if any(line.unsolved and line.count * line.event.total for line in schedules[i].planned)
    ]
    if not unsolved:
        return noise
    places, clients = np.array(unsolved).T
    guess = np.array([_guess(schedules[i]) for i in clients])
    ends = (guess - 0.2, guess + 0.2) if larger is None else (np.log(larger[places]) - 0.1, np.log(larger[places]))
    bracket = elementwise.bracket_root(excess, *ends, args=(clients,)).bracket
    tolerances = {"xatol": _TOLERANCE, "xrtol": 0.0, "fatol": 0.0, "frtol": 0.0}
    root = elementwise.find_root(excess, bracket, args=(clients,), tolerances=tolerances)
    if not root.success.all():
        raise RuntimeError(f"calibration found no root for {schedules[clients[int(np.argmin(root.success))]]}")
    above = np.where(root.f_bracket[1] <= 0, root.bracket[1], root.bracket[0])  # the end of the bracket that fits
    noise[clients] = np.exp(np.where(root.f_x <= 0, root.x, above))
    return noise


def _rough_noise(schedules: Sequence[ClientSchedule], accountant: Accountant) -> np.ndarray | None:
    """Return noise that a faster accountant certifies, [clients]; None if a budget is below what it can certify."""
    with contextlib.suppress(UserError):
        return _smallest_noise(schedules, accountant, lambda: None)
    return None


def _guess(schedule: ClientSchedule) -> float:
    """Return the log of the noise by the central limit theorem; it is accurate to about a third."""
    events = schedule.events()
    if not any(event.needs_delta for event in events):  # pure epsilons add up
        steps = noised_steps(events)
        return math.log(min(max(steps / schedule.target_epsilon, 1e-3), 1e6))
    free = [event for event in events if isinstance(event, NoisedEvent) and event.noise_multiplier is None]
    square = sum(event.steps * event.sample_rate**2 for event in free)
    noise = math.sqrt(square * -2 * math.log(schedule.delta)) / schedule.target_epsilon
    return math.log(min(max(noise, 0.4), 1e6))


def _below_floor(schedule: ClientSchedule, floor: float, accountant: Accountant) -> UserError:
    given = ", ".join(line.purpose for line in schedule.planned if not line.unsolved and line.count)
    cause = f"the cost of {given} with the given noise" if given else f"the least that {accountant.name} can certify"
    above = f"{at_most(floor)}, {cause}" if floor < 1e299 else f"{cause}, which is unbounded,"
    return UserError(
        f"`epsilon` must be above {above} at delta {at_most(schedule.delta)}, "
        f"got {at_most(schedule.target_epsilon)}. Raise it{', or the given noise' if given else ', or delta'}."
    )
