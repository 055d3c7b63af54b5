"""Audit with many canaries in one training run: how much the whole schedule of a client reveals."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.auditing import bounds
from dpfl_lightning.auditing.harness import NOBODY, Scene
from dpfl_lightning.auditing.report import Finding
from dpfl_lightning.auditing.target import AuditTarget
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.runtime.text import at_least, at_most

MOST, FEWEST = 400, 20  # limits of the number of canaries
_NUMBERS = 1 << 26  # numbers of their gradients that are held at once
DELTAS = np.concatenate([np.logspace(-9, -2, 15), np.linspace(0.02, 0.98, 49)])  # where the claimed curve is evaluated
USUAL = 0.05  # significance at which audits are usually compared
MEMBERS = "included canaries"


def number_of_canaries(num_params: int) -> int:
    """Return a number of canaries that have separate directions in the model's parameters, within bounds.

    >>> number_of_canaries(650), number_of_canaries(28_938)
    (162, 400)
    """
    return max(FEWEST, min(MOST, num_params // 4, _NUMBERS // num_params))


def one_run(subject: AuditTarget, scene: Scene) -> list[Finding]:
    """Train a client through all its rounds on the canaries that a coin included, and guess which they were.

    Returns the bound for the claimed (epsilon, delta), and that for the whole claimed curve (the claim for the
    correspondingly reduced noise), each at half the significance.
    """
    scores, included = _scores(subject, scene), scene.included
    tallies, m = bounds.guesses(scores, included, bounds.numbers_of_guesses(len(scores))), len(scores)
    delta, claim, events = subject.settings.delta, subject.epsilon, subject.events()
    levels = (scene.significance / 2, USUAL)
    epsilons = [bounds.one_run_epsilon(m, tallies, level, delta) for level in levels]
    claimed = partial(_claimed_curve, subject, events)
    weakness = [bounds.one_run_weakness(m, tallies, level, claimed) for level in levels]
    of_curve = [subject.accountant.epsilon(_weaker(events, divisor), delta) if divisor else 0.0 for divisor in weakness]
    best, steps = max(tallies, key=lambda tally: tally[1] / tally[0]), sum(event.steps for event in events)
    figures = {"canaries": m, "tallies": [list(tally) for tally in tallies], "epsilon_claimed": claim}

    def finding(name: str, what: str, lower: list[float], refuted: bool, **extra_figures: float | None) -> Finding:
        return Finding(
            check=name,
            what=what,
            measured=f"epsilon >= {at_least(lower[0])} (at 95 %: {at_least(lower[1])})",
            claimed=f"epsilon {at_most(claim)}",
            refuted=refuted,
            confidence=1 - levels[0],
            figures={**figures, "epsilon_low": lower[0], "epsilon_low_95": lower[1], **extra_figures},
        )

    description = f"{m} canaries, {steps} steps; {best[1]} of {best[0]} guesses right"
    factor = 1 / weakness[0] if weakness[0] else None
    return [
        finding("one run", description, epsilons, epsilons[0] > claim),
        finding("one run's curve", "the same guesses, the whole claim", of_curve, weakness[0] > 1, most_noise=factor),
    ]


def _claimed_curve(subject: AuditTarget, events: Sequence[NoisedEvent], weakness: float) -> bounds.Curve:
    """Return a lower bound of the privacy curve of the events if their noise is divided by `weakness` >= 0."""
    accountant = get_accountant("rdp", "replace_one" if subject.replace_one else "add_remove")  # fast for a whole curve
    queries = [(_weaker(events, max(weakness, 1e-6)), float(delta)) for delta in DELTAS]
    return bounds.curve_of_points(accountant.search(queries), DELTAS)


def _weaker(events: Sequence[NoisedEvent], weakness: float) -> list[NoisedEvent]:
    return [event.with_noise((event.noise_multiplier or 0.0) / weakness) for event in events]


def _scores(subject: AuditTarget, scene: Scene) -> np.ndarray:
    """Return how much of each canary is in the releases of all rounds, `[m]`, corrected for the other canaries."""
    harness, members = scene.drawing, MEMBERS if scene.included.any() else NOBODY
    scores, round_number, now = np.zeros(len(scene.included)), 0, harness.start
    for release in subject.releases:
        mechanism, steps, rate = release.mechanism, release.steps, subject.settings.learning_rate
        for _ in range(release.count):
            round_number += 1
            update = harness.releases([members], mechanism, steps, rate, now, round=round_number)[0]
            if not bool(update.isfinite().all()):  # the server would not accept it either
                continue
            summed = -update * mechanism.expected_batch_size / rate  # sum of gradients and noise over all steps
            scores += _counts(scene, now, summed, mechanism, steps)
            now = now + update
    return scores


def _counts(scene: Scene, now: Tensor, summed: Tensor, mechanism: Mechanism, steps: int) -> np.ndarray:
    """Estimate how often each canary is in a sum of noisy gradients `[P]`, `[m]`, by ridge regression on gradients.

    Given the prior of the coins and the sampling, and the planned noise, this is the best linear estimate.
    """
    (canaries, replacements), harness = scene.canaries, scene.drawing
    gradients = harness.gradients(canaries, mechanism, now)
    others = torch.zeros_like(gradients) if replacements is None else harness.gradients(replacements, mechanism, now)
    mean = steps * mechanism.sample_rate / 2  # expected count of each record
    contrasts, residual = gradients - others, summed - mean * (gradients + others).sum(dim=0)
    prior = mean**2 + mean * (1 - mechanism.sample_rate)
    noise = steps * (mechanism.clip_norm * mechanism.noise_multiplier * mechanism.accounted.unit_std) ** 2
    gram = (contrasts @ contrasts.T).double().cpu()
    gram.diagonal().add_(noise / prior)
    return torch.linalg.solve(gram, (contrasts @ residual).double().cpu()).numpy()
