"""The audit of a run that has not happened: its clients' mechanisms, as planned, through its engine."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.auditing import attacks, exact, noisy, one_run
from dpfl_lightning.auditing.findings import Finding
from dpfl_lightning.auditing.harness import Harness
from dpfl_lightning.auditing.records import made_up, most_opposed
from dpfl_lightning.auditing.target import AuditTarget, subjects
from dpfl_lightning.build import FederatedLoop, build_engine
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.noise import Streams

COPIES = 32  # releases of one data set at once
_POOL = 32  # records among which the canary is chosen
_STATISTICAL = 7  # checks of a client that chance enters


def audit(
    loop: FederatedLoop,
    chosen: Sequence[int] | None = None,
    confidence: float = 0.99,
    most_releases: int = 20_000,
    tell: Callable[[int, int], None] = lambda done, total: None,
    only: Collection[str] | None = None,
) -> dict[str, Any]:
    """Every check of every chosen client, through the real engine, on made-up records.

    Args:
        loop: not run; records and coins follow its seed, noise is fresh.
        chosen: clients; None takes two, those with the smallest and the largest budget.
        confidence: with which a sound build passes every check, in (0, 1); shared by all that chance enters.
        most_releases: with a canary, and as many without, where a check would take more.
        tell: told (done, all) checks.
        only: names of the checks to make; None makes all.

    Returns:
        Ready for JSON: `clients` (for each `client`, `claim`, and as `findings` the fields of `Finding`), `refuted` and
        `not_audited` (in words), `confidence`, `engine`, `seed`.

    **Privacy** Reads no private record: of the population only shape, classes and sizes.

    Raises:
        UserError: there is no mechanism to audit, or no such client.
    """
    advice = "A run without privacy claims nothing."
    require(loop.privacy is not None, "privacy", "be a mechanism to audit", None, advice)
    require(0 < confidence < 1, "--confidence", "be in (0, 1)", confidence)
    require(most_releases >= 2, "--releases", "be at least 2", most_releases)
    found, left_out = subjects(loop, chosen)
    significance = (1 - confidence) / (_STATISTICAL * max(1, len(found)))
    plans = [
        [run for name, run in _checks(loop, subject, significance, most_releases, left_out) if not only or name in only]
        for subject in found
    ]
    clients: list[dict[str, Any]] = []
    total, done = sum(map(len, plans)), 0
    for subject, checks in zip(found, plans, strict=True):
        findings = []
        for check in checks:
            findings += [dataclasses.asdict(finding) for finding in check()]
            done += 1
            tell(done, total)
        clients.append({"client": subject.client, "claim": subject.as_dict(), "findings": findings})
    refuted = dict.fromkeys(
        f"client {one['client']}: {finding['check']}"
        for one in clients
        for finding in one["findings"]
        if finding["refuted"]
    )
    return {
        "engine": loop.clients.engine.name,
        "seed": loop.seed,
        "confidence": confidence,
        "clients": clients,
        "refuted": list(refuted),
        "not_audited": list(dict.fromkeys(left_out)),
    }


def _checks(
    loop: FederatedLoop, subject: AuditTarget, significance: float, most: int, left_out: list[str]
) -> Iterator[tuple[str, Callable[[], Iterable[Finding]]]]:
    """Every check of a client: its name, and what runs it."""
    given = loop.module, loop.population, loop.seed
    by_engine = {"sensitivity": exact.sensitivity, "isolation": attacks.isolation, "tiny norms": attacks.tiny_norms}
    for engine in exact.engines():
        for name, check in by_engine.items():
            yield name, partial(_unless_refused, check, subject, engine, given, left_out)
    if loop.clients.simulated:
        left_out.append("fresh noise: a simulation with privacy.noise_key repeats its noise, and protects nobody")
    else:
        yield "fresh noise", lambda: [attacks.fresh_noise(loop, subject, significance)]
    yield "grid", lambda: [attacks.grid(subject, loop.clients.engine.name, *given, significance)]
    yield "answers", lambda: [attacks.answers(loop, subject)]
    start, scene = loop.module.flat, cache(lambda: _scene(loop, subject))
    yield "sampling", lambda: [exact.sampling(subject, scene().drawing, start, significance)]
    yield "noise", lambda: [noisy.noise(subject, scene().harness, start, significance)]
    yield "canary", lambda: [noisy.canary(subject, scene().harness, start, scene().gradients, significance, most)]
    yield "round", lambda: [noisy.one_round(subject, scene().drawing, start, scene().gradients, significance, most)]
    yield (
        "one run",
        lambda: one_run.one_run(subject, scene().drawing, start, scene().canaries, scene().included, significance),
    )


def _unless_refused(
    check: Callable[..., Finding], subject: AuditTarget, engine: str, given: tuple, left_out: list[str]
) -> list[Finding]:
    """The finding by one engine, unless the engine cannot run the module."""
    try:
        return [check(subject, engine, *given)]
    except UserError as error:
        left_out.append(f"engine {engine}: {error}")
        return []


@dataclass(frozen=True)
class Scene:
    """What the noisy checks of one client share.

    Args:
        rig: the run's engine with every data set of theirs, for full and empty batches.
        drawing: the same, its batches drawn as in the run.
        gradients: clipped, of the canary and of the records around it, `[P]`.
        canaries: rows of the one run's `[m]`, and of who stands in for those left out, if somebody does.
        included: `[m]` bool, how the coins fell.
    """

    harness: Harness
    drawing: Harness
    gradients: tuple[Tensor, Tensor]
    canaries: tuple[Tensor, Tensor | None]
    included: np.ndarray


def _scene(loop: FederatedLoop, subject: AuditTarget) -> Scene:
    module, seed = copy.deepcopy(loop.module), loop.seed + subject.client
    start, count = module.flat, one_run.number_of_canaries(module.num_params)
    parts = [
        made_up(loop.population, _POOL, seed, start.device, start.dtype),
        made_up(loop.population, 2 * count, seed + 1, start.device, start.dtype, scales=(1.0,)),
    ]
    x, y = (torch.cat(both) for both in zip(*parts, strict=True))
    included = np.random.default_rng(seed).random(count) < 0.5
    own, others = _POOL + torch.arange(count), _POOL + count + torch.arange(count)
    here = torch.from_numpy(included)
    choose = Harness(build_engine("serial"), module, loop.population, (x, y), {}, Streams())
    canary, other = most_opposed(choose.gradients(start, torch.arange(_POOL), subject.planned))
    datasets = {
        "two": torch.arange(2),
        "eight": torch.arange(8),
        noisy.WITHOUT: torch.tensor([other] * 4),
        noisy.WITH: torch.tensor([other] * (3 if subject.replace_one else 4) + [canary]),
        "everybody": torch.arange(subject.settings.num_records) % len(y),
        one_run.MEMBERS: torch.where(here, own, others) if subject.replace_one else own[here],
    }

    def harness(sampling: str) -> Harness:
        engine = build_engine(loop.clients.engine.name, loop.clients.engine.workers)
        streams = Streams()
        return Harness(engine, module, loop.population, (x, y), datasets, streams, COPIES, sampling)

    plain = harness("poisson")
    shown, around = plain.gradients(start, torch.tensor([canary, other]), subject.planned)
    return Scene(
        harness=plain,
        drawing=plain if subject.sampling == "poisson" else harness(subject.sampling),
        gradients=(shown, around),
        canaries=(own, others if subject.replace_one else None),
        included=included,
    )
