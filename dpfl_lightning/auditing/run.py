"""Audit of a run before it happens: its clients' planned mechanisms, through its engine."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from dpfl_lightning.auditing import attacks, exact, noisy, one_run
from dpfl_lightning.auditing.harness import POOL, Harness, Scene, candidates, made_up, most_opposed
from dpfl_lightning.auditing.report import Finding
from dpfl_lightning.auditing.target import AuditTarget, subjects
from dpfl_lightning.build import ENGINES, build_engine
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.loop import FederatedLoop
from dpfl_lightning.privacy.noise import Streams

COPIES = 32  # releases of one data set at once
_STATISTICAL = 7  # number of checks of a client whose results are random


def audit(
    loop: FederatedLoop,
    chosen: Sequence[int] | None = None,
    confidence: float = 0.99,
    most_releases: int = 20_000,
    tell: Callable[[int, int], None] = lambda done, total: None,
    only: Collection[str] | None = None,
) -> dict[str, Any]:
    """Run every check (or `only` those with these names) of every chosen client, through the real engine.

    The loop has not run; dummy records and coins follow from its seed, noise is fresh. No private record is read, only
    shape, classes and sizes of the population. Plain SGD replaces other optimisers. None of `chosen` takes the clients
    with the smallest and the largest budget; `confidence` is the probability that a sound build passes every check;
    `tell` gets (done, all) checks.

    Returns a dictionary for JSON: `clients` (each with `client`, `claim`, and `findings`), `refuted` and `not_audited`
    (texts), `confidence`, `engine`, `seed`. Raises UserError if there is no mechanism, or no such client.
    """
    privacy = loop.config.privacy
    require(privacy is not None, "privacy", "be a mechanism to audit", None, "It would claim no epsilon.")
    x = loop.population.empty_batch[0]
    must = "be one floating tensor a record to audit, because an audit scales its artificial records"
    require(isinstance(x, torch.Tensor) and x.is_floating_point(), "data", must, loop.population.input_shape)
    require(0 < confidence < 1, "--confidence", "be in (0, 1)", confidence)
    require(most_releases >= 2, "--releases", "be at least 2", most_releases)
    targets, left_out = subjects(loop, chosen)
    loop = _with_plain_sgd(loop, left_out)
    significance = (1 - confidence) / (_STATISTICAL * max(1, len(targets)))
    plans = [
        [run for name, run in _checks(loop, subject, significance, most_releases, left_out) if not only or name in only]
        for subject in targets
    ]
    clients: list[dict[str, Any]] = []
    total, done = sum(map(len, plans)), 0
    for subject, checks in zip(targets, plans, strict=True):
        findings = []
        for check in checks:
            findings += [dataclasses.asdict(finding) for finding in check()]
            done += 1
            tell(done, total)
        name = loop.config.facts.name_of(subject.client)
        clients.append({"client": subject.client, "name": name, "claim": subject.as_dict(), "findings": findings})
    all_findings = [(client["name"], finding) for client in clients for finding in client["findings"]]
    refuted = [f"client {client}: {finding['check']}" for client, finding in all_findings if finding["refuted"]]
    return {
        "engine": loop.local_clients.engine.name,
        "seed": loop.config.seed,
        "confidence": confidence,
        "clients": clients,
        "refuted": list(dict.fromkeys(refuted)),
        "not_audited": list(dict.fromkeys(left_out)),
    }


def _with_plain_sgd(loop: FederatedLoop, left_out: list[str]) -> FederatedLoop:
    """Return the loop with a module that takes plain SGD steps, from which the checks know the noise in a release."""
    module = loop.module
    if not module.plain_sgd(loop.config.optimizer):
        left_out.append(
            "the optimiser: the audit uses plain SGD in its place, because every optimiser sees noisy gradients only"
        )
    if module.optimizer_from:
        module = copy.deepcopy(module)
        module.optimizer_from = ""
        loop = copy.copy(loop)
        loop.module = module
    return loop


def _checks(
    loop: FederatedLoop, subject: AuditTarget, significance: float, most: int, left_out: list[str]
) -> Iterator[tuple[str, Callable[[], Iterable[Finding]]]]:
    """Yield the name of every check of a client, and a function that runs it."""
    context = loop.module, loop.population, loop.config.seed
    by_engine = {
        "sensitivity": exact.sensitivity,
        "isolation": attacks.isolation,
        "tiny norms": attacks.tiny_norms,
        "company": attacks.company,
    }
    for engine, (name, check) in itertools.product(sorted(ENGINES), by_engine.items()):
        yield name, partial(_unless_refused, partial(check, subject, engine, *context), engine, left_out)
    if loop.clients.source.repeats:
        left_out.extend(f"fresh noise: {words}" for words in loop.clients.source.caveats)
    else:
        yield "fresh noise", lambda: [attacks.fresh_noise(loop, subject, significance)]
    yield "grid", lambda: [attacks.grid(subject, loop.local_clients.engine.name, *context, significance)]
    yield "answers", lambda: [attacks.answers(loop, subject)]
    scene = cache(lambda: _scene(loop, subject, significance, most))
    yield "sampling", lambda: [exact.sampling(subject, scene())]
    yield "noise", lambda: [noisy.noise(subject, scene())]
    yield "canary", lambda: [noisy.canary(subject, scene())]
    yield "round", lambda: [noisy.one_round(subject, scene())]
    yield "one run", lambda: one_run.one_run(subject, scene())


def _unless_refused(check: Callable[[], Finding], engine: str, left_out: list[str]) -> list[Finding]:
    """Return the finding for one engine, or nothing if the engine cannot run the module."""
    try:
        return [check()]
    except UserError as error:
        left_out.append(f"engine {engine}: {error}")
        return []


def _scene(loop: FederatedLoop, subject: AuditTarget, significance: float, most: int) -> Scene:
    module, seed = copy.deepcopy(loop.module), loop.config.seed + subject.client
    start, count = module.flat, one_run.number_of_canaries(module.num_params)
    parts = [
        made_up(loop.population, POOL, seed, start.device, start.dtype),
        made_up(loop.population, 2 * count, seed + 1, start.device, start.dtype, scales=(1.0,)),
    ]
    x, y = (torch.cat(both) for both in zip(*parts, strict=True))
    included = np.random.default_rng(seed).random(count) < 0.5
    canaries, others, mask = POOL + torch.arange(count), POOL + count + torch.arange(count), torch.from_numpy(included)
    choosing_harness = Harness(build_engine("serial"), module, loop.population, (x, y), {}, Streams())
    pool = candidates(loop.population)
    canary, other = (int(pool[one]) for one in most_opposed(choosing_harness.gradients(pool, subject.planned)))
    datasets = {
        "two": torch.arange(2),
        "eight": torch.arange(8),
        noisy.WITHOUT: torch.tensor([other] * 4),
        noisy.WITH: torch.tensor([other] * (3 if subject.replace_one else 4) + [canary]),
        "everybody": torch.arange(subject.settings.num_records) % len(y),
        one_run.MEMBERS: torch.where(mask, canaries, others) if subject.replace_one else canaries[mask],
    }

    def harness(sampling: str) -> Harness:
        engine = build_engine(loop.local_clients.engine.name, loop.local_clients.engine.workers)
        return Harness(engine, module, loop.population, (x, y), datasets, Streams(), COPIES, sampling)

    poisson_harness = harness("poisson")
    canary_gradient, other_gradient = poisson_harness.gradients(torch.tensor([canary, other]), subject.planned)
    return Scene(
        harness=poisson_harness,
        drawing=poisson_harness if subject.sampling == "poisson" else harness(subject.sampling),
        gradients=(canary_gradient, other_gradient),
        canaries=(canaries, others if subject.replace_one else None),
        included=included,
        significance=significance,
        most=most,
    )
