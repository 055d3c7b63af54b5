"""What the attack tests share: a recorder of releases, power cuts, and judges of what releases give away.

The statistics here are written anew, independent of `dpfl_lightning.auditing.bounds`, so that one judges the other.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from conftest import PowerCut
from scipy.stats import beta

from dpfl_lightning.federated.messages.query import MeanLoss
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.loop import FederatedLoop
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.accounting.planned import Planned
from dpfl_lightning.privacy.ledger.ledger import read_ledger


class Releases(Strategy):
    """Keeps every update that reaches the server: `of_round[round]` is `[C, ...]` in the order of the clients.

    With `fixed` the server sends its first model in every round, as a server that attacks might.
    """

    def needs_updates(self, plan, view):
        return True

    def __init__(self, fixed: bool = False) -> None:
        self.of_round: dict[int, torch.Tensor] = {}
        self._fixed = fixed

    def step(self, state, combined, view):
        return state if self._fixed else None

    def after_step(self, state, updates, view):
        self.of_round[view.round] = updates.released.clone()
        return state


def cut_after_training(loop: FederatedLoop, round: int) -> dict[int, torch.Tensor]:
    """The power fails in `round` after every client has sent its update.

    The returned dictionary is filled during the run: round -> `[C, P]`, the updates that an onlooker may have seen.
    """
    train, seen = loop.clients.train, {}

    def failing(plan, *args, **more):
        updates = train(plan, *args, **more)
        if plan.round == round:
            if updates.deltas is not None:  # a strategy sees single updates
                seen[round] = updates.deltas.clone()
            raise PowerCut
        return updates

    loop.clients.train = failing
    return seen


class CutBetweenRounds(Callback):
    """The power fails when `round` is complete and before the next one is charged."""

    def __init__(self, round: int) -> None:
        self._round = round

    def on_round_end(self, view, report):
        if report.round == self._round:
            raise PowerCut


class Asks(Releases):
    """Asks in each round for the clients' mean losses, bounded by 2, once for each kind of question.

    Attributes:
        answers: for each question, client -> its answer.
    """

    def __init__(self, kinds: Sequence[type[MeanLoss]], noise: float, fixed: bool = False) -> None:
        super().__init__(fixed)
        self.answers: list[dict[int, float]] = []
        self._kinds, self._noise = kinds, noise

    def plan_run(self, schedule, view):
        line = Planned("loss", GaussianEvent(1.0, self._noise, 1), len(self._kinds) * view.run.rounds)
        return schedule.replan(lambda _, client: dataclasses.replace(client, planned=(*client.planned, line)))

    def plan_round(self, plan, view):
        mechanism_of = {client: view.mechanism(client, "loss") for client in plan.clients}
        for kind in self._kinds:
            fields = {"models": view.state.models, "row_of": dict.fromkeys(plan.clients, 0), "loss_bound": 2.0}
            self.answers.append(dict(view.ask(kind(mechanism_of=mechanism_of, **fields))))
        return plan


# ---- noise


def noise_apart(first: torch.Tensor, second: torch.Tensor, noise_std: float) -> float:
    """Root mean square of the difference of two releases, in the standard deviation of one release's noise.

    About sqrt(2) for independent noise, far below for one noise under two values: the clipped sums differ little.
    """
    difference = (first.double() - second.double()).flatten()
    return float(difference.square().mean().sqrt()) / noise_std


def independent(apart: float) -> bool:
    """Whether two releases of at least 80 numbers have independent noise; wrong once in 10^9, by `noise_apart`."""
    return 0.7 < apart < 2.2


# ---- bits


def lowest_bit(values: np.ndarray) -> np.ndarray:
    """The exponent e of the lowest set bit: each value is an odd multiple of 2^e; infinite for 0.

    >>> lowest_bit(np.array([0.75, 6.0, 0.0]))
    array([-2.,  1., inf])
    """
    fraction, exponent = np.frexp(np.asarray(values, np.float64))
    whole = np.abs(fraction * 2.0**53).astype(np.int64)
    lowest = np.log2(np.maximum(whole & -whole, 1).astype(np.float64)) - 53 + exponent
    return np.where(whole == 0, np.inf, lowest)


def finest_bit(releases: np.ndarray) -> np.ndarray:
    """For each release `[n, P]` its finest lowest bit, `[n]`: what an attacker reads off the precision alone."""
    return lowest_bit(releases).min(axis=1)


# ---- success


@dataclass(frozen=True)
class Attack:
    """Right guesses of an attack among `trials` releases with the record, and among as many without it."""

    with_hits: int
    without_hits: int
    trials: int

    def success_low(self, confidence: float = 0.99) -> float:
        """Lower end of the probability to guess right (Clopper and Pearson)."""
        return rate_low(self.with_hits + self.without_hits, 2 * self.trials, 1 - confidence)

    def epsilon_low(self, delta: float, confidence: float = 0.99) -> float:
        """Lower bound of epsilon: `P(guess | one) <= e^epsilon P(guess | other) + delta` for either guess."""
        each = (1 - confidence) / 4
        pairs = [(self.with_hits, self.without_hits), (self.without_hits, self.with_hits)]
        bounds = [
            (rate_low(hits, self.trials, each) - delta, rate_high(self.trials - others, self.trials, each))
            for hits, others in pairs
        ]
        return max(0.0, *(math.log(low / high) if low > 0 else 0.0 for low, high in bounds))


def rate_low(hits: int, trials: int, significance: float) -> float:
    return float(beta.ppf(significance, hits, trials - hits + 1)) if hits else 0.0


def rate_high(hits: int, trials: int, significance: float) -> float:
    return float(beta.ppf(1 - significance, hits + 1, trials - hits)) if hits < trials else 1.0


def attack(with_record: np.ndarray, without: np.ndarray, learn: int, sure: bool = False) -> Attack:
    """Guess from the scores `[n]` of releases with and without the record, by the best rule of the first `learn`.

    Those that teach the rule are not counted. With `sure` the rule is the one whose one guess is hardly ever wrong,
    however rare it is; else the one that is right most often.
    """
    known = np.unique(np.concatenate([with_record[:learn], without[:learn]]))
    rules = [(side, threshold) for side in (1, -1) for threshold in known]

    def hits_of(rule: tuple[int, float], inside: np.ndarray, outside: np.ndarray) -> tuple[int, int]:
        side, threshold = rule
        return int((side * inside >= side * threshold).sum()), int((side * outside < side * threshold).sum())

    def worth(rule: tuple[int, float]) -> float:
        hits = hits_of(rule, with_record[:learn], without[:learn])
        ratios = [(right + 0.5) / (learn - others + 0.5) for right, others in (hits, hits[::-1])]
        return max(ratios) if sure else sum(hits)

    return Attack(*hits_of(max(rules, key=worth), with_record[learn:], without[learn:]), len(without) - learn)


# ---- budgets


def overspent(ledger: Path, budgets: Sequence[float], delta: float, accountant: str = "pld") -> list[str]:
    """The clients whose charges, composed again from the ledger's events alone, exceed their budgets; in words."""
    charges = read_ledger(ledger)
    words = []
    for client, budget in enumerate(budgets):
        events = [charge.event for charge in charges if charge.client == client]
        spent = get_accountant(accountant).epsilon(events, delta) if events else 0.0
        if not spent <= budget * (1 + 1e-9):
            words.append(f"client {client} has spent {spent} of {budget}")
    return words
