"""Checks of noised releases: how much noise there is, and how well it hides one planted record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.auditing.bounds import releases_to_tell, shift_interval, std_interval, threshold_epsilon
from dpfl_lightning.auditing.findings import Finding, at_least, at_most
from dpfl_lightning.auditing.harness import NOBODY, Harness
from dpfl_lightning.auditing.target import AuditTarget
from dpfl_lightning.privacy.accounting.accountant import finite_or_none, gaussian_epsilon
from dpfl_lightning.privacy.mechanism import Mechanism

VALUES = 20_000  # noised numbers of each kind: their std is known to 0.5 %
RATIO = 1.5  # what the white-box canary can tell from the claim, if it is given releases enough
STEPS = 3000  # local steps that the rounds with and without the canary may take, in all

#: data sets of the rig: the canary with its neighbours, and the batch sizes that must not show in the noise
BATCHES = ("two", "eight")
WITHOUT, WITH = "without the canary", "with the canary"


def noise(subject: AuditTarget, harness: Harness, start: Tensor, significance: float) -> Finding:
    """The standard deviation of the noise, over batches of different sizes and a round of empty ones.

    Two releases of one data set differ in their noise alone; a round without records is the sum of its steps' noise.
    """
    full = dataclasses.replace(subject.mechanism, sample_rate=1.0)
    cases = [(name, full, 1, together) for name in (NOBODY, *BATCHES) for together in (False, True)]
    cases.append((NOBODY, subject.mechanism, subject.main.steps, False))
    each = max(3, 1 + math.ceil(VALUES / len(start)))
    found: dict[str, tuple[float, float]] = {}
    for name, mechanism, steps, together in cases:
        rate = subject.settings.learning_rate
        ours = _several(harness, [name], mechanism, steps, rate, start, each, together)[0].double()
        freedom = (each - 1) * len(start)
        std = float((ours - ours.mean(dim=0)).square().sum() / freedom) ** 0.5
        heavy = 1 + 1.5 / steps if subject.laplace else 1  # squares of Laplace noise spread so much more
        low, high = std_interval(std, int(freedom / heavy), significance / len(cases) / 2)
        claimed = subject.planned.noise_std(steps, rate)
        found[f"{name}, {steps} steps{', together' if together else ''}"] = (low / claimed, high / claimed)
    what = f"std over batches of 0, 2 and 8, {each} releases each"
    return as_planned("noise", what, "std_over_planned", found, significance)


def as_planned(
    check: str, what: str, figure: str, found: Mapping[str, tuple[float, float]], significance: float
) -> Finding:
    """Whether 1 lies in every interval of something measured over what was planned; `found` is name -> (low, high)."""
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


def canary(
    subject: AuditTarget,
    harness: Harness,
    start: Tensor,
    gradients: tuple[Tensor, Tensor],
    significance: float,
    most: int,
) -> Finding:
    """Full-batch releases with and without the canary, projected on where it shows: mu of one step.

    Args:
        gradients: clipped, of the canary and of its neighbours, `[P]`.
        most: releases of each kind; by default as many as tell `RATIO` x mu from mu.
    """
    if subject.laplace:
        return _laplace_canary(subject, harness, start, significance, most)
    mechanism = dataclasses.replace(subject.mechanism, sample_rate=1.0)
    own, other = gradients
    wanted = [own - other] if subject.replace_one else [own, own - other]  # a batch's mean moves along the second
    directions = torch.stack([one / torch.linalg.vector_norm(one).clamp_min(1e-30) for one in wanted])
    significance_each = significance / len(directions)
    count = min(most, needed := releases_to_tell(subject.mu, RATIO, significance_each))
    inside, outside = _scores(
        subject, harness, mechanism, 1, start, directions, count, together=subject.main.steps == 1
    )
    ends = [shift_interval(a, b, significance_each) for a, b in zip(inside.T, outside.T, strict=True)]
    low, high = max(ends)
    delta = subject.settings.delta
    bound, claim = (float(gaussian_epsilon(np.array([max(mu, 0.0)]), np.array([delta]))[0]) for mu in (low, subject.mu))
    return Finding(
        check="canary",
        what=f"one full-batch step, {count} releases with and {count} without",
        measured=f"mu {low:.3f} to {high:.3f}; epsilon >= {at_least(bound)}",
        claimed=f"mu {subject.mu:.3f}; epsilon {at_most(claim)}",
        refuted=low > subject.mu,
        confidence=1 - significance,
        figures={
            "releases": count,
            "tells_ratio": round(1 + (RATIO - 1) * math.sqrt(needed / count), 3),
            "canary_over_clip": float(torch.linalg.vector_norm(own)) / subject.planned.clip_norm,
            "mu_low": finite_or_none(low),
            "mu_high": finite_or_none(high),
            "mu_claimed": subject.mu,
            "epsilon_low": finite_or_none(bound),
            "epsilon_claimed": claim,
        },
    )


def _laplace_canary(subject: AuditTarget, harness: Harness, start: Tensor, significance: float, most: int) -> Finding:
    """The likelihood ratio of whole releases with and without the canary: the best test of Laplace noise there is.

    A gradient that is spread over many parameters shows in it far less than epsilon allows.
    """
    mechanism, rate = subject.mechanism, subject.settings.learning_rate
    silent = dataclasses.replace(mechanism, noise_multiplier=0.0)
    without, with_it = (_several(harness, [name], silent, 1, rate, start, 1, False)[0, 0] for name in (WITHOUT, WITH))
    scale, count = mechanism.noise_std(1, rate) / mechanism.unit_std, min(most, STEPS)

    def score(found: Tensor) -> Tensor:
        return ((found - without).abs() - (found - with_it).abs()).sum(dim=1, keepdim=True) / scale

    both = _several(harness, [WITH, WITHOUT], mechanism, 1, rate, start, count, subject.main.steps == 1, score)
    inside, outside = both.double().cpu().numpy()[..., 0]
    delta = subject.settings.delta
    bound = threshold_epsilon(inside, outside, significance, delta)
    claim = subject.accountant.epsilon([subject.planned.event(1)], delta)
    return Finding(
        check="canary",
        what=f"one full-batch step, {count} releases with and {count} without",
        measured=f"epsilon >= {at_least(bound)}",
        claimed=f"epsilon {at_most(claim)}",
        refuted=bound > claim,
        confidence=1 - significance,
        figures={"releases": count, "epsilon_low": bound, "epsilon_claimed": claim},
    )


def one_round(
    subject: AuditTarget,
    harness: Harness,
    start: Tensor,
    gradients: tuple[Tensor, Tensor],
    significance: float,
    most: int,
) -> Finding:
    """A whole round, its records sampled, with and without the canary: how well a threshold tells them apart."""
    own, other = gradients
    direction = (own - other if subject.replace_one else own)[None]
    count = min(most, max(100, min(1000, STEPS // (2 * subject.main.steps))))
    inside, outside = _scores(
        subject, harness, subject.mechanism, subject.main.steps, start, direction, count, together=True
    )
    delta = subject.settings.delta
    bound = threshold_epsilon(inside[:, 0], outside[:, 0], significance, delta)
    claim = subject.accountant.epsilon([subject.planned.event(subject.main.steps)], delta)
    return Finding(
        check="round",
        what=f"{subject.main.steps} sampled steps, {count} releases with and {count} without",
        measured=f"epsilon >= {at_least(bound)}",
        claimed=f"epsilon {at_most(claim)}",
        refuted=bound > claim,
        confidence=1 - significance,
        figures={"releases": count, "epsilon_low": bound, "epsilon_claimed": claim},
    )


def _scores(
    subject: AuditTarget,
    harness: Harness,
    mechanism: Mechanism,
    steps: int,
    start: Tensor,
    directions: Tensor,
    count: int,
    together: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Releases with and without the canary on each direction `[d, P]`, two of `[count, d]`: up is "with"."""
    rate = subject.settings.learning_rate
    names, on = [WITH, WITHOUT], directions.T
    both = _several(harness, names, mechanism, steps, rate, start, count, together, lambda one: one @ on)
    inside, outside = (-one.double().cpu().numpy() for one in both)
    return inside, outside


def _several(
    harness: Harness,
    names: Sequence[str],
    mechanism: Mechanism,
    steps: int,
    learning_rate: float,
    start: Tensor,
    count: int,
    together: bool,
    seen: Callable[[Tensor], Tensor] = lambda releases: releases,
) -> Tensor:
    """`count` releases of each data set, `[len(names), count, P]`, or what is `seen` of them, `[n, P] -> [n, d]`."""
    parts = []
    for first in range(0, count, harness.copies):
        now = min(harness.copies, count - first)
        every = [name for name in names for _ in range(now)]
        found = harness.releases(every, mechanism, steps, learning_rate, start, together=together)
        parts.append(seen(found).view(len(names), now, -1))
    return torch.cat(parts, dim=1)
