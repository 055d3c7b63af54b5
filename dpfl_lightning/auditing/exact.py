"""Checks that no chance enters: what one record can move, and that no step holds a record twice."""

from __future__ import annotations

import copy
import dataclasses
import math
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.auditing.bounds import rate_interval
from dpfl_lightning.auditing.findings import Finding
from dpfl_lightning.auditing.harness import NOBODY, Harness, OneNoise
from dpfl_lightning.auditing.records import made_up, most_opposed
from dpfl_lightning.auditing.target import AuditTarget
from dpfl_lightning.build import ENGINES, build_engine
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.jobs import ClassGradients, Job, LocalTraining
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.mechanism import Laplace, Mechanism
from dpfl_lightning.privacy.noise import Streams

TOLERANCE = 1e-5  # above the clip norm, relative: in float64, so that no rounding is mistaken for a record
SIZES = (0, 1, 5, 40, 130)  # records beside the canary: none, few, and more than the engines take in a pass
_POOL = 32


def sensitivity(subject: AuditTarget, engine: str, module: ClientModule, like: Population, seed: int) -> Finding:
    """The most that one record more moves a release, in clip norms, by one engine; with the same noise, if any.

    Training and class gradients, clients alone and in one batch, huge inputs, a record without a finite gradient. A
    record less is the same pair of data sets.

    Raises:
        UserError: the engine cannot run the module.
    """
    module = copy.deepcopy(module).to(torch.float64)
    start = module.flat
    x, y = made_up(like, _POOL, seed, start.device, torch.float64)
    records = torch.cat([x, torch.full_like(x[:1], math.nan)]), torch.cat([y, y[:1]])  # the last one is broken
    datasets, pairs = _pairs(module, like, records, subject.planned, seed)
    streams = OneNoise(secrets.token_bytes(32))
    harness = Harness(build_engine(engine), module, like, records, datasets, streams)
    loud = dataclasses.replace(subject.mechanism, sample_rate=1.0)
    silent = dataclasses.replace(loud, noise_multiplier=0.0)
    unit = subject.planned.expected_batch_size / subject.planned.clip_norm  # as learning rate: releases in clip norms
    jobs: list[Job] = [LocalTraining()]
    if not like.y.is_floating_point():
        some = tuple(name for name, p in module.named_trainable.items() if p.dim() >= 2)
        jobs += [ClassGradients(like.num_classes), ClassGradients(like.num_classes, parameters=some)]
    ratios = {
        f"{words} noise": max(
            moved(harness, mechanism, unit, start, pairs, job, side) for job in jobs for side in (False, True)
        )
        for words, mechanism in (("without", silent), ("with", loud))
    }
    most = max(ratios.values())
    claimed = {"without noise": 1.0, "with noise": loud.sensitivity(len(start)) / loud.clip_norm}
    return Finding(
        check="sensitivity",
        what=f"{engine}: one record moves a release by",
        measured=f"{most:.6f} x clip norm",
        claimed=f"at most 1, and {claimed['with noise']:.6f} on the grid",
        refuted=not all(ratios[words] <= most + TOLERANCE for words, most in claimed.items()),
        figures={
            "engine": engine,
            "sums": getattr(harness.engine, "description", ""),
            "data_sets": len(pairs),
            **{f"most_{words.replace(' ', '_')}": finite_or_none(value) for words, value in ratios.items()},
        },
    )


def _pairs(
    module: ClientModule, like: Population, records: tuple[Tensor, Tensor], mechanism: Mechanism, seed: int
) -> tuple[dict[str, Tensor], list[tuple[str, str]]]:
    """Data sets by name, and the names of those that differ in one record."""
    harness = Harness(build_engine("serial"), module, like, records, {}, Streams())
    canary, other = most_opposed(harness.gradients(module.flat, torch.arange(_POOL), mechanism))
    draw = np.random.default_rng(seed)
    around = {f"{size} records": torch.from_numpy(draw.integers(_POOL, size=size)) for size in SIZES}
    around["5 opposed records"] = torch.tensor([other] * 5)
    datasets, pairs = {}, []
    for name, rows in around.items():
        for kind, row in (("a canary", canary), ("a broken record", _POOL)):
            datasets[f"{name} and {kind}"] = torch.cat([rows, torch.tensor([row])])
            pairs.append((name if len(rows) else NOBODY, f"{name} and {kind}"))
        if len(rows):
            datasets[name] = rows
    return datasets, pairs


def moved(
    harness: Harness,
    mechanism: Mechanism,
    unit: float,
    start: Tensor,
    pairs: Sequence[tuple[str, str]],
    job: Job,
    together: bool,
) -> float:
    """The largest distance between two releases of a pair, in clip norms."""
    blocks = job.num_classes if isinstance(job, ClassGradients) else 1
    at_once, most = max(1, harness.at_once // (2 * blocks)), 0.0
    for first in range(0, len(pairs), at_once):
        some = pairs[first : first + at_once]
        without = list(dict.fromkeys(name for name, _ in some))
        names = [*without, *(more for _, more in some)]
        found = harness.releases(names, mechanism, 1, unit, start, together=together, job=job).flatten(1)
        if isinstance(job, ClassGradients):
            found = found * unit
        before = found[[without.index(name) for name, _ in some]]
        order = 1 if isinstance(mechanism, Laplace) else 2  # what the accountant believes, whatever was clipped
        apart = torch.linalg.vector_norm(found[len(without) :] - before, ord=order, dim=1)
        most = max(most, float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max()))
    return most


def sampling(subject: AuditTarget, harness: Harness, start: Tensor, significance: float, steps: int = 200) -> Finding:
    """Whether a step holds no record twice, and records are drawn no more often than the accountant was told."""
    claimed, records = subject.planned.sample_rate, subject.settings.num_records
    drawn = harness.draws("everybody", subject.mechanism, steps, start)
    twice = sum(len(rows) - len(np.unique(rows)) for rows in drawn)
    hits = sum(map(len, drawn))
    low, high = (float(end) for end in rate_interval(hits, steps * records, significance))
    return Finding(
        check="sampling",
        what=f"records twice in a step; rate in {steps} steps",
        measured=f"{twice}; {low:.4g} to {high:.4g}",
        claimed=f"0; at most {claimed:.4g}",
        refuted=twice > 0 or low > claimed,
        confidence=1 - significance,
        figures={"twice": twice, "rate_low": low, "rate_high": high, "rate_claimed": claimed},
    )


def engines() -> list[str]:
    """All that a configuration can name."""
    return sorted(ENGINES)
