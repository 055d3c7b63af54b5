"""Checks without randomness in the result: how far one record moves a release, and records drawn twice in a step."""

import copy
import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.auditing.bounds import rate_interval
from dpfl_lightning.auditing.harness import (
    NOBODY,
    POOL,
    Harness,
    OneNoise,
    Scene,
    candidates,
    has_classes,
    made_up,
    most_opposed,
)
from dpfl_lightning.auditing.report import Finding
from dpfl_lightning.auditing.target import AuditTarget
from dpfl_lightning.build import build_engine
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.jobs import ClassGradients, Job, LocalTraining
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.clipping.passes import SIZES as PASS_SIZES
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.noise import Streams

TOLERANCE = 1e-5  # relative, above the clip norm: for rounding in float64
#: numbers of other records: none, few, as many as the engines process in a pass, and more
SIZES = (0, 1, 5, 64, PASS_SIZES[-1], 130)


def sensitivity(subject: AuditTarget, engine: str, module: ClientModule, like: Population, seed: int) -> Finding:
    """Measure how far one added record moves a release of an engine, in clip norms, with and without equal noise.

    It covers training and class gradients, clients alone and in one batch, huge inputs, and a record without a finite
    gradient. Removing a record gives the same pairs of data sets. Raises UserError if the engine cannot run the module.
    """
    module = copy.deepcopy(module).to(torch.float64)
    x, y = made_up(like, POOL, seed, module.flat.device, torch.float64)
    records = torch.cat([x, torch.full_like(x[:1], math.nan)]), torch.cat([y, y[:1]])  # the last record is broken
    choosing = Harness(build_engine("serial"), module, like, records, {}, Streams())
    pool = candidates(like)
    canary, other = (int(pool[one]) for one in most_opposed(choosing.gradients(pool, subject.planned)))
    draw = np.random.default_rng(seed)
    crowds = {f"{size} records": torch.from_numpy(draw.integers(POOL, size=size)) for size in SIZES}
    crowds["5 opposed records"] = torch.tensor([other] * 5)
    watched = {"a canary": canary, "a broken record": POOL}
    if like.unit.is_group:
        watched |= {"a canary of different rows": POOL - 1}
    datasets, pairs = with_one_more(crowds, watched)
    harness = Harness(build_engine(engine), module, like, records, datasets, OneNoise(secrets.token_bytes(32)))
    noisy_mechanism = dataclasses.replace(subject.mechanism, sample_rate=1.0)
    noiseless = dataclasses.replace(noisy_mechanism, noise_multiplier=0.0)
    unit = subject.planned.expected_batch_size / subject.planned.clip_norm  # learning rate for releases in clip norms
    jobs: list[Job] = [LocalTraining()]
    if has_classes(like):
        matrices = tuple(name for name, p in module.named_trainable.items() if p.dim() >= 2)
        jobs += [ClassGradients(like.num_classes), ClassGradients(like.num_classes, parameters=matrices)]
    ratios = {
        f"{label} noise": max(moved(harness, mechanism, unit, pairs, job, side) for job in jobs for side in (0, 1))
        for label, mechanism in (("without", noiseless), ("with", noisy_mechanism))
    }
    on_grid = noisy_mechanism.sensitivity(module.num_params) / noisy_mechanism.clip_norm
    claimed = {"without noise": 1.0, "with noise": on_grid}
    return Finding(
        check="sensitivity",
        what=f"{engine}: one {subject.unit} moves a release by",
        measured=f"{max(ratios.values()):.6f} x clip norm",
        claimed=f"1; {on_grid:.6f} on the grid",
        refuted=not all(ratios[label] <= most + TOLERANCE for label, most in claimed.items()),
        figures={
            "engine": engine,
            "sums": getattr(harness.engine, "description", ""),
            "data_sets": len(pairs),
            **{f"most_{label.replace(' ', '_')}": finite_or_none(value) for label, value in ratios.items()},
        },
    )


def with_one_more(
    crowds: Mapping[str, Tensor], watched: Mapping[str, int]
) -> tuple[dict[str, Tensor], list[tuple[str, str]]]:
    """Return crowds of records, each also with one watched row more, by name, and the pairs of names."""
    datasets, pairs = {name: rows for name, rows in crowds.items() if len(rows)}, []
    for crowd, rows in crowds.items():
        for name, row in watched.items():
            datasets[f"{crowd} and {name}"] = torch.cat([rows, torch.tensor([row])])
            pairs.append((crowd if len(rows) else NOBODY, f"{crowd} and {name}"))
    return datasets, pairs


def moved(
    harness: Harness,
    mechanism: Mechanism,
    unit: float,
    pairs: Sequence[tuple[str, str]],
    job: Job,
    together: bool | int,
    start: Tensor | None = None,
) -> float:
    """Return the largest distance between two releases of a pair, in clip norms."""
    at_once, most = max(1, harness.at_once // (2 * job.blocks)), 0.0
    for first in range(0, len(pairs), at_once):
        chosen_pairs = pairs[first : first + at_once]
        without = list(dict.fromkeys(name for name, _ in chosen_pairs))
        names = [*without, *(larger for _, larger in chosen_pairs)]
        releases = harness.releases(names, mechanism, 1, unit, start, together=bool(together), job=job).flatten(1)
        if not job.trains:
            releases = releases * unit
        smaller = releases[[without.index(name) for name, _ in chosen_pairs]]
        order = mechanism.accounted.clip_order  # the norm that the accountant assumes
        difference = torch.linalg.vector_norm(releases[len(without) :] - smaller, ord=order, dim=1)
        most = max(most, float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max()))
    return most


def sampling(subject: AuditTarget, scene: Scene, steps: int = 200) -> Finding:
    """Check that no step holds a record twice, and that the sampling rate is at most the accountant's."""
    claimed, records = subject.planned.sample_rate, subject.settings.num_records
    rows_of_steps, hits = scene.drawing.draws("everybody", subject.mechanism, steps)
    duplicates = sum(len(rows) - len(np.unique(rows)) for rows in rows_of_steps)
    low, high = (float(end) for end in rate_interval(hits, steps * records, scene.significance))
    return Finding(
        check="sampling",
        what=f"{subject.unit}s twice in a step; rate in {steps} steps",
        measured=f"{duplicates}; {low:.4g} to {high:.4g}",
        claimed=f"0; at most {claimed:.4g}",
        refuted=duplicates > 0 or low > claimed,
        confidence=1 - scene.significance,
        figures={"twice": duplicates, "rate_low": low, "rate_high": high, "rate_claimed": claimed},
    )
