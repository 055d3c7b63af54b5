"""Attacks on a build: bits of noisy sums, repeated noise, hostile records and weights, tiny gradients, free answers."""

import copy
import dataclasses
import itertools
import math
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.auditing.bounds import threshold_epsilon
from dpfl_lightning.auditing.company import differences, hostile
from dpfl_lightning.auditing.exact import moved, with_one_more
from dpfl_lightning.auditing.harness import NOBODY, POOL, Harness, has_classes, made_up
from dpfl_lightning.auditing.noisy import as_planned, spread_over_planned
from dpfl_lightning.auditing.report import Finding
from dpfl_lightning.auditing.target import AuditTarget
from dpfl_lightning.build import build_engine
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.jobs import ClassGradients, Job, LocalTraining
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import LowestLoss, MeanLoss, NoMechanism
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.results import read_guarantees
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.loop import FederatedLoop
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.events import GaussianEvent, NonPrivateEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.runtime.text import at_least, at_most

BITS = 200  # releases with a record, and as many without, whose bits are read
_NUMBERS = 1 << 24  # largest number of noisy values for that
CROWD = 300  # hostile records around the watched one
TINY = 1e-23  # factor of the loss
#: hostile models (the products of cancelling weights), each with a number of records that are compared in all companies
MODELS = ((1e7, 7), (1e10, 31))
SIZES = (7, 31, 103, 127, 255)  # numbers of records to which one more is added
SEARCHED = 10  # hostile models, of which the one that tells most is asked for releases
WATCHED = 16  # records whose clipped gradients are compared
_RATE = 3e3  # learning rate: a step is not lost beside large weights, and no release exceeds what a server accepts


def grid(
    subject: AuditTarget, engine: str, module: ClientModule, like: Population, seed: int, significance: float
) -> Finding:
    """Check that every noisy sum is a multiple of the mechanism's public grid, and what the bits of a release reveal.

    The sums come from the real engine, in float64: one step and two, clients alone and in one batch, class gradients.
    The bits are those of the mechanism's float32 releases of a zero sum, and of one record's clipped gradient.
    """
    wide = copy.deepcopy(module).to(torch.float64)
    mechanism = dataclasses.replace(subject.mechanism, sample_rate=1.0, expected_batch_size=1.0)
    start = wide.flat
    records = made_up(like, POOL, seed, start.device, torch.float64)
    harness = Harness(build_engine(engine), wide, like, records, {"records": torch.arange(POOL)}, Streams(), copies=2)
    if float(start.abs().max()) > mechanism.grid(len(start)) * 2.0**40:  # the steps' sum would hide the grid
        start = torch.zeros_like(start)
    jobs: list[tuple[Job, int]] = [(LocalTraining(), 1), (LocalTraining(), 2)]
    if has_classes(like):
        jobs.append((ClassGradients(like.num_classes), 1))
    off_grid, numbers = 0, 0
    for (job, steps), together in itertools.product(jobs, (False, True)):
        sums = harness.releases([NOBODY, "records"] * 2, mechanism, steps, 1.0, start, together=together, job=job)
        multiples = sums / mechanism.grid(sums[0].numel())
        off_grid += int((~((multiples - multiples.round()).abs() < 1e-2)).sum())
        numbers += multiples.numel()
    gradients = harness.gradients(torch.arange(POOL), mechanism, start)
    gradient = gradients[int(gradients.norm(dim=1).argmax())][None]
    count = max(20, min(BITS, _NUMBERS // len(start)))
    inside, outside = (_finest_bits(mechanism, value, count) for value in (gradient, torch.zeros_like(gradient)))
    delta = subject.settings.delta
    bound = max(threshold_epsilon(*pair, significance / 2, delta) for pair in ((inside, outside), (outside, inside)))
    claim = subject.accountant.epsilon([subject.planned.event(1)], delta)
    return Finding(
        check="grid",
        what=f"{engine}: numbers off the public grid; bits of {count} releases with a {subject.unit}, {count} without",
        measured=f"{off_grid} of {numbers}; epsilon >= {at_least(bound)}",
        claimed=f"0; epsilon {at_most(claim)}",
        refuted=off_grid > 0 or bound > claim,
        confidence=1 - significance,
        figures={"off": off_grid, "numbers": numbers, "epsilon_low": bound, "epsilon_claimed": claim},
    )


def _finest_bits(mechanism: Mechanism, clipped_sum: Tensor, count: int) -> np.ndarray:
    """Return the exponent of the lowest set bit in each of `count` releases, `[count]`."""
    generator = Streams().generator("noise", 1, 0)
    lowest_bits = []
    for _ in range(count):
        fraction, exponent = np.frexp(mechanism.privatise(clipped_sum, generator).double().cpu().numpy())
        mantissa = np.abs(fraction * 2.0**53).astype(np.int64)
        bits = np.log2(np.maximum(mantissa & -mantissa, 1).astype(np.float64)) + exponent
        lowest_bits.append(bits[mantissa != 0].min(initial=np.inf))
    return np.array(lowest_bits)


def fresh_noise(loop: FederatedLoop, subject: AuditTarget, significance: float) -> Finding:
    """Check that releases have independent noise: the spread of their differences / the planned spread.

    The pairs are releases of the same records by two starts of the run, repeated with the same number, made another
    time, and made by two clients; and simulations with other seeds and configurations.
    """
    module = copy.deepcopy(loop.module)
    start, copies = module.flat, max(2, min(32, math.ceil(4000 / module.num_params)))
    mechanism, rate = dataclasses.replace(subject.mechanism, sample_rate=1.0), subject.settings.learning_rate
    records = made_up(loop.population, POOL, loop.config.seed, start.device, start.dtype)

    def harness(streams: Streams) -> Harness:
        engine, eight = (
            build_engine(loop.local_clients.engine.name, loop.local_clients.engine.workers),
            {"eight": torch.arange(8)},
        )
        return Harness(engine, copy.deepcopy(module), loop.population, records, eight, streams, copies)

    def released(audit_harness: Harness, again: bool = False) -> Tensor:
        return audit_harness.releases(["eight"] * audit_harness.copies, mechanism, 1, rate, again=again).double()

    first, second = (harness(loop.local_clients.streams(loop.run_plan())) for _ in range(2))
    first_releases = released(first)
    others = ((0, "a run"), (1, "a run"), (0, "another run"))
    repeating = [released(harness(Streams.of_key("0" * 32, *other))) for other in others]
    pairs = {
        "two starts": (first_releases, released(second)),
        "made again": (first_releases, released(first, again=True)),
        "another release": (first_releases, released(first)),
        "two clients": (first_releases[:-1], first_releases[1:]),
        "two seeds of a simulation": (repeating[0], repeating[1]),
        "two configurations of a simulation": (repeating[0], repeating[2]),
    }
    ratios = {}
    for name, (left, right) in pairs.items():
        difference = (left - right)[:: 2 if name == "two clients" else 1]  # each release in one difference
        std = math.sqrt(float(difference.square().mean()) / 2)
        ratios[name] = spread_over_planned(subject, std, difference.numel(), 1, significance / len(pairs))
    what = f"spread of the difference of two releases, {len(pairs)} kinds of pairs"
    return as_planned("fresh noise", what, "spread_over_planned", ratios, significance)


def isolation(subject: AuditTarget, engine: str, module: ClientModule, like: Population, seed: int) -> Finding:
    """Measure how far one record moves a sum over hundreds of others, in clip norms, without noise.

    The others are ordinary, or some of them are huge, constant, infinite or NaN. In a model that mixes records, the one
    record changes the gradients of the others. Raises UserError if the engine cannot run the module.
    """
    module = copy.deepcopy(module).to(torch.float64)
    x, y = made_up(like, CROWD, seed, module.flat.device, torch.float64, scales=(1e-3, 1.0, 1.0, 1.0))
    strange = (1e4 * x[0], torch.full_like(x[0], 8.5), torch.full_like(x[0], math.nan), torch.full_like(x[0], 1e30))
    for number, value in enumerate((*strange, torch.full_like(x[0], math.inf), torch.zeros_like(x[0]))):
        x[number::30] = value
    ordinary = torch.arange(CROWD)[torch.arange(CROWD) % 30 >= 5]
    watched = {"huge": 0, "constant": 1, "broken": 2, "gigantic": 3, "ordinary": 7}
    datasets, pairs = with_one_more({"ordinary": ordinary, "hostile": torch.arange(30, CROWD)}, watched)
    harness = Harness(build_engine(engine), module, like, (x, y), datasets, Streams())
    what = f"{engine}: one {subject.unit} among {len(ordinary)} or more"
    return _most_moved("isolation", what, harness, subject, pairs, [subject.planned.clip_norm], [None], 1e-5)


def tiny_norms(subject: AuditTarget, engine: str, module: ClientModule, like: Population, seed: int) -> Finding:
    """Measure how far one record with huge features and a tiny loss moves a sum, in clip norms, in float32.

    The squares of its gradient, or of the factors of its gradient, leave the range of float32. Raises UserError if the
    engine cannot run the module.
    """
    scaled = copy.deepcopy(module)
    scaled.loss_factor = TINY
    x, y = made_up(like, 12, seed, scaled.flat.device, scaled.flat.dtype, scales=(1.0,))
    draw = np.random.default_rng(seed)
    for number, scale in enumerate((1e16, 1e17, 1e18, 1e19) * 3):
        rows = x[number].view(-1, math.prod(like.input_shape))
        rows.zero_()[:, int(draw.integers(rows.shape[1]))] = scale
    datasets = {str(row): torch.tensor([row]) for row in range(len(x))}
    harness = Harness(build_engine(engine, 1), scaled, like, (x, y), datasets, Streams())
    pairs, starts = [(NOBODY, name) for name in datasets], [scaled.flat, torch.zeros_like(scaled.flat)]
    what = f"{engine}: one {subject.unit} of huge features and tiny loss"
    return _most_moved("tiny norms", what, harness, subject, pairs, [1e-5, 1e-8], starts, 1e-3)


def company(subject: AuditTarget, engine: str, module: ClientModule, like: Population, seed: int) -> Finding:
    """Measure what the company of records changes in their clipped gradients under hostile weights, without noise.

    It counts the records with other bits beside more, fewer and broken records, in other places and in views, and
    measures how far one record more moves a release, and the release of another client in the same pass, in clip norms.
    Raises UserError if the engine cannot run the module.
    """
    module = copy.deepcopy(module)
    x, y = made_up(like, max(SIZES) + 1, seed, module.flat.device, module.flat.dtype, scales=(1.0,))
    crowds = {f"{size} records": torch.arange(size) for size in SIZES}
    datasets, pairs = with_one_more(crowds, {"one more": max(SIZES)})
    datasets["others"] = torch.arange(9)
    harness = Harness(build_engine(engine, 1), module, like, (x, y), datasets, Streams())
    silent = dataclasses.replace(subject.mechanism, noise_multiplier=0.0, sample_rate=1.0, expected_batch_size=1.0)
    request = ClipRequest(silent.clip_norm, silent.clip_order, expected=subject.planned.expected_batch_size)
    rate = _RATE / silent.clip_norm
    sums, changed = harness.engine.clipped_sum, 0
    for number, (large, size) in enumerate(MODELS):
        params, watched = hostile(module.named_trainable, seed + number, large), min(WATCHED, harness.at_once)
        batch, others = harness.batch(torch.arange(size)), harness.batch(torch.arange(len(y))[-9:])
        changed += sum(one.records for one in differences(sums, params, batch, others, request, seed, watched))

    def one_more(number: int) -> float:
        params, size = hostile(module.named_trainable, seed + number), SIZES[number % len(SIZES)]
        batches = (harness.batch(torch.arange(count)) for count in (size, size + 1))
        smaller, larger = (sums(params, *batch, request)[0].clone() for batch in batches)
        return float(torch.linalg.vector_norm(larger - smaller, ord=request.order))

    worst, most = max(range(SEARCHED), key=one_more), 0.0
    start = torch.cat([value.flatten() for value in hostile(module.named_trainable, seed + worst).values()])
    pair = pairs[worst % len(SIZES)]
    for together in (False, True):
        most = max(most, moved(harness, silent, rate, [pair], LocalTraining(), together, start) / _RATE)
    smaller, larger = (harness.releases(["others", name], silent, 1, rate, start, together=True)[0] for name in pair)
    apart = torch.linalg.vector_norm(larger - smaller, ord=silent.clip_order)
    most = max(most, 1 + float(apart) / _RATE)  # what a client releases may not depend on another one
    return Finding(
        check="company",
        what=f"{engine}: {subject.unit}s with other bits in other company; one {subject.unit} more moves a release by",
        measured=f"{changed}; {most:.6f} x clip norm",
        claimed="0; at most 1",
        refuted=changed > 0 or not most <= 1 + 1e-3,
        figures={
            "engine": engine,
            "sums": harness.engine.description,
            "changed": changed,
            "most": finite_or_none(most),
        },
    )


def _most_moved(
    check: str,
    what: str,
    harness: Harness,
    subject: AuditTarget,
    pairs: Sequence[tuple[str, str]],
    clip_norms: Sequence[float],
    starts: Sequence[Tensor | None],
    tolerance: float,
) -> Finding:
    """Judge the largest difference of releases of a pair of data sets, in clip norms, without noise."""
    full = dataclasses.replace(subject.mechanism, noise_multiplier=0.0, sample_rate=1.0, expected_batch_size=1.0)
    most = max(
        moved(harness, dataclasses.replace(full, clip_norm=norm), 1 / norm, pairs, LocalTraining(), together, start)
        for norm, start, together in itertools.product(clip_norms, starts, (False, True))
    )
    return Finding(
        check=check,
        what=f"{what} moves a release by",
        measured=f"{most:.6f} x clip norm",
        claimed="at most 1",
        refuted=not most <= 1 + tolerance,
        figures={"engine": harness.engine.name, "sums": harness.engine.description, "most": finite_or_none(most)},
    )


class _Asks(Strategy):
    """Asks every client for its mean loss twice, and client 1 for an answer without a mechanism."""

    counts_persons = True

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        def replanned(client: int, client_schedule: ClientSchedule) -> ClientSchedule:
            lines = [Planned("loss", GaussianEvent(1.0, 1.0, 1), 2)]
            lines += [Planned("select", NonPrivateEvent("which model was chosen"), 1)] * (client == 1)
            return dataclasses.replace(client_schedule, planned=(*client_schedule.planned, *lines))

        return schedule.replan(replanned)

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        models, mechanisms = view.state.models, {client: view.mechanism(client, "loss") for client in plan.clients}
        question = MeanLoss(mechanism_of=mechanisms, models=models, row_of=dict.fromkeys(mechanisms, 0), loss_bound=2.0)
        self._answers = [dict(view.ask(question)) for _ in range(2)]
        view.ask(LowestLoss(mechanism_of={1: NoMechanism("which model was chosen")}, models=models))
        return plan


def answers(loop: FederatedLoop, subject: AuditTarget) -> Finding:
    """Check that every answer is paid for, by its mechanism or by an infinite epsilon.

    It reads the client's plan; a small run on dummy records then asks two equal questions and one without a mechanism.
    """
    problems, schedule = [], loop.schedule.clients[subject.client]
    lines = [line for line in schedule.planned if line.count]
    unprotected = [line for line in lines if not line.event.private]
    epsilon = loop.config.accountant.epsilon([line.event for line in lines], schedule.delta) if unprotected else 0.0
    if unprotected and epsilon < math.inf:
        free = ", ".join(line.purpose for line in unprotected)
        problems.append(f"epsilon {at_most(epsilon)}, but {free} without noise")
    strategy = _Asks()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserNotice)
        cpu, dtype = torch.device("cpu"), loop.population.empty_batch[0].dtype
        pairs = [made_up(loop.population, 8, loop.config.seed + client, cpu, dtype) for client in range(2)]
        unit, ids = loop.population.unit, None
        if unit.is_group:
            pairs = [(x.flatten(0, 1), y.flatten(0, 1)) for x, y in pairs]
            ids = [np.repeat(np.arange(8), unit.rows or 1)] * 2
        result = FederatedLoop(
            Population.from_datasets(pairs, held_out=0.0, num_classes=loop.population.num_classes, persons=ids),
            copy.deepcopy(loop.module),
            rounds=1,
            clients=ClientOptions(count=2, batch_size=None),
            privacy=PrivacyOptions(noise_multiplier=1.0, delta=0.01, clip_norm=1.0, account=None, **unit.options()),
            strategies=[strategy],
            engine=build_engine(loop.local_clients.engine.name),
            output_dir=Path(folder) / "run",
            device=loop.clients.device.type,
        ).run()
        charges = [charge.purpose for charge in read_ledger(Path(folder) / "run" / "ledger.jsonl")]
        promises = read_guarantees(Path(folder) / "run")
    first, second = strategy._answers
    if charges.count("loss") != 4:
        problems.append(f"two equal questions to two clients cause {charges.count('loss')} charges")
    if any(first[client] == second[client] for client in first):
        problems.append("two equal questions have the same answer")
    for source, rows, key in (("result", result.clients, "epsilon_spent"), ("guarantees", promises, "epsilon")):
        if [row[key] is None for row in rows] != [False, True]:
            problems.append(f"an answer without a mechanism has epsilon {rows[1][key]} in the {source}")
    return Finding(
        check="answers",
        what=f"{len(schedule.planned)} planned kinds of releases; two equal questions, one without a mechanism",
        measured="; ".join(problems) or "all are paid for",
        claimed="all are paid for",
        refuted=bool(problems),
        figures={"wrong": problems},
    )
