"""Harness of an audit: a real engine over dummy records, in place of a run's clients.

The output of an audit is shown, so it must not depend on private records.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.channel import send_round
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.dummy_data import dummy_labels
from dpfl_lightning.federated.client.engines.engine import Batch
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.jobs import Job, LocalTraining
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.requests import train_requests
from dpfl_lightning.federated.transport.threads import Threads
from dpfl_lightning.privacy.accounting.units import Group
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.noise import RandomGenerator, Streams

POOL = 32  # dummy records from which the canary is chosen
NOBODY = "nobody"  # a data set whose Poisson samples are all empty
_ALL = "all records"
_NEVER = 1e-12  # its sampling rate
SCALES = (1.0, 1.0, 10.0, 1000.0)  # large inputs give gradients that must be clipped
_NUMBERS = 1 << 25  # numbers of gradients or releases that are held at once


def made_up(
    like: Population, count: int, seed: int, device: torch.device, dtype: torch.dtype, scales: Sequence[float] = SCALES
) -> Batch:
    """Draw normal inputs `[count, *X]`, cycling through the scales, and random labels `[count]`.

    If `like` counts units of up to R rows, they are `[count, R, *X]` and `[count, R]`, every second one of equal rows.
    """
    generator = torch.Generator().manual_seed(seed)
    units = (count, like.unit.rows) if like.unit.is_group and like.unit.rows else (count,)
    scale = torch.tensor(scales)[torch.arange(count) % len(scales)].view(-1, *[1] * (len(units) - 1))
    x = torch.randn(*units, *like.input_shape, generator=generator)
    x *= scale.view(*scale.shape, *[1] * len(like.input_shape))
    y = dummy_labels(like, math.prod(units), generator).unflatten(0, units)
    if like.y.is_floating_point():
        y *= scale.view(*scale.shape, *[1] * (like.y.dim() - 1))
    if like.unit.is_group:
        x[::2], y[::2] = x[::2, :1], y[::2, :1]
    return x.to(device, dtype), y.to(device, dtype if like.y.is_floating_point() else like.y.dtype)


def has_classes(like: Population) -> bool:
    """Return whether clients may release class gradients."""
    return not like.unit.is_group and like.y.dim() == 1 and not like.y.is_floating_point()


def candidates(like: Population) -> Tensor:
    """Return the numbers of a pool of `POOL` of which the canary is one: of units with rows, those of equal ones.

    Their rows have one gradient, so that a build that adds up what it clips adds up in one direction.
    """
    return torch.arange(0, POOL, 2 if like.unit.is_group else 1)


def most_opposed(gradients: Tensor) -> tuple[int, int]:
    """Find the record of about the largest gradient, and the one most opposed to it, of `[n, P]`, n >= 2.

    With copies of the second around it, the first also reveals a divisor that counts the records of a batch.

    >>> most_opposed(torch.tensor([[1.0, 0.0], [0.1, 0.0], [-0.6, 0.8]]))
    (0, 2)
    """
    norms = torch.linalg.vector_norm(gradients, dim=1)
    products = gradients @ gradients.T
    strong = norms >= 0.999 * norms.max()
    cosines = products / norms.clamp_min(1e-30)[:, None] / norms.clamp_min(1e-30)
    cosines = torch.where(strong[:, None] & (norms > 0), cosines, torch.inf).fill_diagonal_(torch.inf)
    canary, other = divmod(int(cosines.argmin()), len(gradients))
    return canary, other


class OneNoise(Streams):
    """Streams that give all clients the same noise, so that it cancels in the difference of two releases."""

    def generator(self, purpose: str, round: int, client: int, charge_number: int = 0) -> RandomGenerator:
        return super().generator(purpose, round, 0, charge_number)


class Harness:
    """One engine that releases as in a run: sampling, clipping, noise, divisor, learning rate.

    The parameters of `module` are the default start of releases. `like` defines shape, classes and dtype of the records
    (its records are not read); `datasets` are rows `[b]`, b >= 1, of `records` (x, y), each held by `copies` clients.
    Where `like` counts units of several rows, `records` are such as in `made_up`, and `datasets` are numbers of units.
    """

    def __init__(
        self,
        engine: SerialEngine,
        module: ClientModule,
        like: Population,
        records: Batch,
        datasets: Mapping[str, Tensor],
        streams: Streams,
        copies: int = 1,
        sampling: str = "poisson",
    ) -> None:
        self.at_once, self.start = max(1, _NUMBERS // module.num_params), module.flat
        copies = min(copies, self.at_once)
        datasets = {NOBODY: torch.zeros(1, dtype=torch.long), **datasets, _ALL: torch.arange(len(records[1]))}
        self._first = {name: number * copies for number, name in enumerate(datasets)}
        self._attempt, self.engine, self.copies = 0, engine, copies
        blocks, rows_of = None, [rows for rows in datasets.values() for _ in range(copies)]
        if isinstance(like.unit, Group):
            records = records[0].flatten(0, 1), records[1].flatten(0, 1)
            each = [_blocks_of(one, like.unit) for one in datasets.values()]
            blocks = [rows.to(module.device) for rows in each for _ in range(copies)]
            rows_of = [rows[rows >= 0] for rows in blocks]
        self.population = dataclasses.replace(
            like,
            x=records[0],
            y=records[1],
            train_of=[rows.to(module.device) for rows in rows_of],
            blocks_of=blocks,
            unit_ids=None,
            held_out_of=[torch.zeros(0, dtype=torch.long, device=module.device)] * (copies * len(datasets)),
            test=None,
            public=None,
            caveats=(),
            names=(),
        )
        self._channel = Threads(engine)
        self._channel.setup(module, HeldClients(self.population), streams, sampling)

    def batch(self, rows: Tensor) -> Batch:
        """Return these records, or a block of these units."""
        return self.population.records(self._first[_ALL], rows)

    def gradients(self, rows: Tensor, mechanism: Mechanism, start: Tensor | None = None) -> Tensor:
        """Return each record's gradient at `start` `[P]`, clipped by the mechanism: `[len(rows), P]`."""
        start = self.start if start is None else start
        params, parts = self.engine.module.unflatten(start), []
        for some in rows.to(start.device).split(min(32, self.at_once)):
            (x, y), groups = self.batch(some), torch.arange(len(some)).to(start.device)
            expected = mechanism.expected_batch_size
            request = ClipRequest(mechanism.clip_norm, mechanism.clip_order, groups, len(some), expected=expected)
            parts.append(self.engine.clipped_sum(params, x, y, request)[0])
        return torch.cat(parts).to(start.dtype)

    def releases(
        self,
        names: Sequence[str],
        mechanism: Mechanism,
        steps: int,
        learning_rate: float,
        start: Tensor | None = None,
        *,
        together: bool = False,
        job: Job | None = None,
        round: int = 1,
        again: bool = False,
    ) -> Tensor:
        """Return releases of clients with these data sets from `start` `[P]`, each with separate noise and sampling.

        Each data set may be named `copies` times. `together` puts clients that take one step into one batch, as in a
        run; `again` repeats the last charge numbers. Returns `[len(names), P]`, or `[len(names), G, p]` for class
        gradients; infinite for a release that is not finite.
        """
        start = self.start if start is None else start
        self._attempt += not again
        plan = self._plan(names, mechanism, steps, learning_rate, together, job or LocalTraining(), round)
        count = len(names)
        inbox = send_round(self._channel, plan, start.expand(count, -1), [self._attempt] * count)
        for error in inbox.failed.values():
            raise error
        updates = inbox.updates()
        shape = start.shape if updates.deltas is None else updates.deltas.shape[1:]
        releases = start.new_full((count, *shape), torch.inf)
        if updates.deltas is not None:
            successful = [row for row, client in enumerate(plan.clients) if client not in updates.lost]
            releases[successful] = updates.deltas
        return releases

    def draws(self, name: str, mechanism: Mechanism, steps: int) -> tuple[list[np.ndarray], int]:
        """Return the rows that the engine draws for each step of one client, and how many all its batches hold."""
        self._attempt += 1
        plan = self._plan([name], mechanism, steps, 1.0, False, LocalTraining(), 1)
        client, request = self.engine.clients.client(plan.clients[0]), train_requests(plan, self.start.expand(1, -1))[0]
        batches = self.engine.local_task(client, request, self._attempt)[2]
        return list(batches.draws), sum(len(y) for _, y in batches)

    def _plan(
        self,
        names: Sequence[str],
        mechanism: Mechanism,
        steps: int,
        learning_rate: float,
        together: bool,
        job: Job,
        round: int,
    ) -> RoundPlan:
        taken, count = Counter(names), len(names)
        if max(taken.values()) > self.copies:
            raise ValueError(f"at most {self.copies} releases of a data set at once")
        next_client = {name: itertools.count(self._first[name]) for name in taken}
        empty = dataclasses.replace(mechanism, sample_rate=_NEVER)
        return RoundPlan(
            round=round,
            clients=tuple(next(next_client[name]) for name in names),
            model_of=(0,) * count if together else tuple(range(count)),
            mechanism_of=tuple(empty if name == NOBODY else mechanism for name in names),
            steps=(steps,) * count,
            learning_rate_of=(learning_rate,) * count,
            job=job,
        )


def _blocks_of(numbers: Tensor, unit: Group) -> Tensor:
    """Return the rows `[len(numbers), unit.rows]` that training uses of a client's units, as of a run.

    Of units with equal rows there is one row too many, and of others one is missing.
    """
    assert unit.rows is not None, "`Unit.check` was not called"
    rows = [np.arange(unit.rows) + unit.rows * int(number) for number in numbers]
    rows = [np.append(own, own[:1]) if own[0] // unit.rows % 2 == 0 else own[: max(1, unit.rows - 1)] for own in rows]
    ids = np.repeat(np.arange(len(rows)), [len(own) for own in rows])
    return torch.from_numpy(unit.blocks(np.concatenate(rows), ids, key=b""))


@dataclass(frozen=True)
class Scene:
    """Objects that the noisy checks of one client share."""

    harness: Harness  # the run's engine with all data sets, for full and empty batches
    drawing: Harness  # the same engine, with batches drawn as in the run
    gradients: tuple[Tensor, Tensor]  # clipped gradients of the canary and of the records around it, [P]
    canaries: tuple[Tensor, Tensor | None]  # rows of the one-run check [m], and rows that replace excluded ones
    included: np.ndarray  # results of the coins, [m] bool
    significance: float  # probability that a sound build fails one check
    most: int  # largest number of releases with the canary, and of those without
