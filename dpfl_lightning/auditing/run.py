"""The audit of a run that has not happened: its clients' mechanisms, as planned, through its engine."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.auditing import attacks, exact, noisy, one_run
from dpfl_lightning.auditing.findings import Finding
from dpfl_lightning.auditing.records import made_up, most_opposed
from dpfl_lightning.auditing.rig import Rig
from dpfl_lightning.auditing.subject import Subject, subjects
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.loop import FederatedLoop
from dpfl_lightning.federated.setup import build_engine
from dpfl_lightning.privacy.noise import Streams

COPIES = 32  # releases of one data set at once
_POOL = 32  # records among which the canary is chosen
_STATISTICAL, _FINDINGS = 7, 9  # checks of a client that chance enters, and what is found once for all engines


def audit(
    loop: FederatedLoop,
    chosen: Sequence[int] | None = None,
    confidence: float = 0.99,
    most_releases: int = 20_000,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Every check of every chosen client, through the real engine, on made-up records.

    Args:
        loop: not run; records and coins follow its seed, noise is fresh.
        chosen: clients; None takes two, those with the smallest and the largest budget.
        confidence: with which a sound build passes every check, in (0, 1); shared by all that chance enters.
        most_releases: with a canary, and as many without, where a check would take more.
        tell: told (done, all) checks.

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
    total, done = len(found) * (3 * len(exact.engines()) + _FINDINGS), 0
    clients: list[dict[str, Any]] = []
    for subject in found:
        findings = []
        for finding in _checks(loop, subject, significance, most_releases, left_out):
            findings.append(dataclasses.asdict(finding))
            done += 1
            tell(done, total)
        clients.append({"client": subject.client, "claim": subject.as_dict(), "findings": findings})
    refuted = [
        f"client {one['client']}: {finding['check']}"
        for one in clients
        for finding in one["findings"]
        if finding["refuted"]
    ]
    return {
        "engine": loop.engine.name,
        "seed": loop.seed,
        "confidence": confidence,
        "clients": clients,
        "refuted": refuted,
        "not_audited": list(dict.fromkeys(left_out)),
    }


def _checks(
    loop: FederatedLoop,
    subject: Subject,
    significance: float,
    most_releases: int,
    left_out: list[str],
) -> Iterator[Finding]:
    for name in exact.engines():
        for check in (exact.sensitivity, attacks.isolation, attacks.tiny_norms):
            try:
                yield check(subject, name, loop.module, loop.population, loop.seed)
            except UserError as error:
                left_out.append(f"engine {name}: {error}")
    yield attacks.grid(subject, loop.engine.name, loop.module, loop.population, loop.seed, significance)
    if loop.simulated:
        left_out.append("fresh noise: a simulation with privacy.noise_key repeats its noise, and protects nobody")
    else:
        yield attacks.fresh_noise(loop, subject, loop.population, loop.seed, significance)
    yield attacks.answers(loop, subject, loop.seed)
    start = loop.module.flat
    scene = _scene(loop, subject)
    yield exact.sampling(subject, scene.drawing, start, significance)
    yield noisy.noise(subject, scene.rig, start, significance)
    yield noisy.canary(subject, scene.rig, start, scene.gradients, significance, most_releases)
    yield noisy.one_round(subject, scene.drawing, start, scene.gradients, significance, most_releases)
    yield from one_run.one_run(subject, scene.drawing, start, scene.canaries, scene.included, significance)


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

    rig: Rig
    drawing: Rig
    gradients: tuple[Tensor, Tensor]
    canaries: tuple[Tensor, Tensor | None]
    included: np.ndarray


def _scene(loop: FederatedLoop, subject: Subject) -> Scene:
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
    choose = Rig(build_engine("serial"), module, loop.population, (x, y), {}, Streams())
    canary, other = most_opposed(choose.gradients(start, torch.arange(_POOL), subject.planned))
    datasets = {
        "two": torch.arange(2),
        "eight": torch.arange(8),
        noisy.WITHOUT: torch.tensor([other] * 4),
        noisy.WITH: torch.tensor([other] * (3 if subject.replace_one else 4) + [canary]),
        "everybody": torch.arange(subject.settings.num_records) % len(y),
        one_run.MEMBERS: torch.where(here, own, others) if subject.replace_one else own[here],
    }

    def rig(sampling: str) -> Rig:
        engine = build_engine(loop.engine.name, loop.engine.workers)
        streams = Streams()
        return Rig(engine, module, loop.population, (x, y), datasets, streams, COPIES, sampling)

    plain = rig("poisson")
    shown, around = plain.gradients(start, torch.tensor([canary, other]), subject.planned)
    return Scene(
        rig=plain,
        drawing=plain if subject.sampling == "poisson" else rig(subject.sampling),
        gradients=(shown, around),
        canaries=(own, others if subject.replace_one else None),
        included=included,
    )
