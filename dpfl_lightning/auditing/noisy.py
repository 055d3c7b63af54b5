"""Checks of noisy releases: the size of the noise, and how well it hides one added record."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.auditing.bounds import releases_to_tell, shift_interval, std_interval, threshold_epsilon
from dpfl_lightning.auditing.harness import NOBODY, Harness, Scene
from dpfl_lightning.auditing.report import Finding
from dpfl_lightning.auditing.target import AuditTarget
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.gaussian import gaussian_epsilon
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.noise import NORMAL
from dpfl_lightning.runtime.text import at_least, at_most

VALUES = 20_000  # noised numbers of each kind, so that their std is known to 0.5 %
RATIO = 1.5  # deviation from the claim that the white-box canary can detect with enough releases
STEPS = 3000  # total local steps of the rounds with and without the canary

#: data sets of the harness: the canary with its neighbours, and batch sizes that must not influence the noise
BATCHES = ("two", "eight")
WITHOUT, WITH = "without the canary", "with the canary"


def noise(subject: AuditTarget, scene: Scene) -> Finding:
    """Check the standard deviation of the noise, over batches of different sizes and a round of empty ones.

    Two releases of one data set differ only in their noise; a round without records is the sum of its steps' noise.
    """
    full = dataclasses.replace(subject.mechanism, sample_rate=1.0)
    cases = [(name, full, 1, together) for name in (NOBODY, *BATCHES) for together in (False, True)]
    cases.append((NOBODY, subject.mechanism, subject.main.steps, False))
    repeats = max(3, 1 + math.ceil(VALUES / len(scene.harness.start)))
    ratios: dict[str, tuple[float, float]] = {}
    for name, mechanism, steps, together in cases:
        releases = _several(subject, scene.harness, [name], mechanism, steps, repeats, together)[0].double()
        freedom = (repeats - 1) * releases.shape[1]
        std = float((releases - releases.mean(dim=0)).square().sum() / freedom) ** 0.5
        spread = spread_over_planned(subject, std, freedom, steps, scene.significance / len(cases))
        ratios[f"{name}, {steps} steps{', together' if together else ''}"] = spread
    what = f"std over batches of 0, 2 and 8, {repeats} releases each"
    return as_planned("noise", what, "std_over_planned", ratios, scene.significance)


def spread_over_planned(
    subject: AuditTarget, std: float, freedom: int, steps: int, significance: float
) -> tuple[float, float]:
    """Return an interval for the true std of the noise of `steps` steps / the planned one."""
    excess = (subject.planned.distribution.kurtosis - 3) / steps
    tail_factor = 1 + excess / 2  # squares spread so much more than those of normal numbers
    low, high = std_interval(std, int(freedom / tail_factor), significance / 2)
    claimed = subject.planned.noise_std(steps, subject.settings.learning_rate)
    return low / claimed, high / claimed


def as_planned(
    check: str, what: str, figure: str, found: Mapping[str, tuple[float, float]], significance: float
) -> Finding:
    """Check whether 1 lies in every interval `found[name] = (low, high)` of a measured / planned value."""
    lowest, highest = min(low for low, _ in found.values()), max(high for _, high in found.values())
    return Finding(
        check=check,
        what=what,
        measured=f"{lowest:.3f} to {highest:.3f} x planned",
        claimed="1",
        refuted=not all(low <= 1 <= high for low, high in found.values()),
        confidence=1 - significance,
        figures={figure: {name: [finite_or_none(end) for end in ends] for name, ends in found.items()}},
    )


def canary(subject: AuditTarget, scene: Scene) -> Finding:
    """Estimate mu of one step from full-batch releases with and without the canary, projected on its direction.

    Noise that is not normal: the likelihood ratio instead, the best test. With noise for the L1 norm, a
    gradient that is spread over many parameters shows far less than epsilon allows.
    """
    if subject.planned.distribution is not NORMAL:
        return _likelihood_canary(subject, scene)
    mechanism = dataclasses.replace(subject.mechanism, sample_rate=1.0)
    gradient, other = scene.gradients
    # a batch's mean moves along the second one
    contrasts = [gradient - other] if subject.replace_one else [gradient, gradient - other]
    directions = torch.stack([contrast / torch.linalg.vector_norm(contrast).clamp_min(1e-30) for contrast in contrasts])
    significance_each = scene.significance / len(directions)
    count = min(scene.most, needed := releases_to_tell(subject.mu, RATIO, significance_each))
    names, together = [WITH, WITHOUT], subject.main.steps == 1
    scores = _several(subject, scene.harness, names, mechanism, 1, count, together, lambda d: -(d @ directions.T))
    pairs = scores.double().cpu().numpy().transpose(2, 0, 1)
    ends = [shift_interval(inside, outside, significance_each) for inside, outside in pairs]
    low, high = max(ends)
    delta = subject.settings.delta
    bound, claim = (float(gaussian_epsilon(np.array([max(mu, 0.0)]), np.array([delta]))[0]) for mu in (low, subject.mu))
    return Finding(
        check="canary",
        what=f"one full-batch step, {count} releases with and {count} without",
        measured=f"mu {low:.3f} to {high:.3f}; epsilon >= {at_least(bound, 4)}",
        claimed=f"mu {subject.mu:.3f}; epsilon {at_most(claim, 4)}",
        refuted=low > subject.mu,
        confidence=1 - scene.significance,
        figures={
            "releases": count,
            "tells_ratio": round(1 + (RATIO - 1) * math.sqrt(needed / count), 3),
            "canary_over_clip": float(torch.linalg.vector_norm(gradient)) / subject.planned.clip_norm,
            "mu_low": finite_or_none(low),
            "mu_high": finite_or_none(high),
            "mu_claimed": subject.mu,
            "epsilon_low": finite_or_none(bound),
            "epsilon_claimed": claim,
        },
    )


def _likelihood_canary(subject: AuditTarget, scene: Scene) -> Finding:
    mechanism, harness, log_density = subject.mechanism, scene.harness, subject.planned.distribution.log_density
    silent = dataclasses.replace(mechanism, noise_multiplier=0.0)
    without, with_it = (_several(subject, harness, [name], silent, 1, 1, False)[0, 0] for name in (WITHOUT, WITH))
    scale = mechanism.noise_std(1, subject.settings.learning_rate) / mechanism.accounted.unit_std

    def score(releases: Tensor) -> Tensor:
        noises = [((releases - silent_release) / scale).double().cpu().numpy() for silent_release in (with_it, without)]
        present, absent = map(log_density, noises)
        return torch.from_numpy((present - absent).sum(axis=1, keepdims=True))

    count = min(scene.most, STEPS)
    scores = _several(subject, harness, [WITH, WITHOUT], mechanism, 1, count, subject.main.steps == 1, score)
    return _by_threshold("canary", "one full-batch step", subject, 1, scores, scene.significance)


def one_round(subject: AuditTarget, scene: Scene) -> Finding:
    """Check a whole round with sampled records, with and without the canary, by a threshold on the releases."""
    canary_gradient, other = scene.gradients
    direction = (canary_gradient - other if subject.replace_one else canary_gradient)[:, None]
    steps = subject.main.steps
    count = min(scene.most, max(100, min(1000, STEPS // (2 * steps))))
    names, mechanism = [WITH, WITHOUT], subject.mechanism
    scores = _several(subject, scene.drawing, names, mechanism, steps, count, True, lambda d: -(d @ direction))
    return _by_threshold("round", f"{steps} sampled steps", subject, steps, scores, scene.significance)


def _by_threshold(
    check: str, what: str, subject: AuditTarget, steps: int, scores: Tensor, significance: float
) -> Finding:
    """Compare the epsilon that scores `[2, n, 1]` with and without the canary prove with the claim for these steps."""
    delta, count = subject.settings.delta, scores.shape[1]
    inside, outside = scores.double().cpu().numpy()[..., 0]
    bound = threshold_epsilon(inside, outside, significance, delta)
    claim = subject.accountant.epsilon([subject.planned.event(steps)], delta)
    return Finding(
        check=check,
        what=f"{what}, {count} releases with and {count} without",
        measured=f"epsilon >= {at_least(bound)}",
        claimed=f"epsilon {at_most(claim)}",
        refuted=bound > claim,
        confidence=1 - significance,
        figures={"releases": count, "epsilon_low": bound, "epsilon_claimed": claim},
    )


def _several(
    subject: AuditTarget,
    harness: Harness,
    names: Sequence[str],
    mechanism: Mechanism,
    steps: int,
    count: int,
    together: bool,
    seen: Callable[[Tensor], Tensor] = lambda releases: releases,
) -> Tensor:
    """Return `count` releases of each data set, `[len(names), count, P]`, mapped by `seen`, `[n, P] -> [n, d]`."""
    parts, rate = [], subject.settings.learning_rate
    for first in range(0, count, harness.copies):
        repeats = min(harness.copies, count - first)
        repeated_names = [name for name in names for _ in range(repeats)]
        releases = harness.releases(repeated_names, mechanism, steps, rate, together=together)
        parts.append(seen(releases).view(len(names), repeats, -1))
    return torch.cat(parts, dim=1)
