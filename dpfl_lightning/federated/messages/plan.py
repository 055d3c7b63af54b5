"""The immutable values that pass between loop, engine and callbacks in one round."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpfl_lightning.data import Facts
from dpfl_lightning.federated.client.gradient_counts import Diagnostics
from dpfl_lightning.models.augmentation import ClassAugmentation
from dpfl_lightning.privacy.accounting.events import NoisedEvent, Unprotected
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.privacy.accounting.schedule import ClientSchedule, Planned
from dpfl_lightning.privacy.mechanism import Mechanism, mechanism_of

if TYPE_CHECKING:
    from dpfl_lightning.federated.client.module import ClientModule, LocalTask
    from dpfl_lightning.federated.messages.query import Answers, Query
    from dpfl_lightning.federated.server.aggregate import WeightedSum


@dataclass(frozen=True)
class RunSchedule:
    """Every release of the whole run, planned before the first one: one `ClientSchedule` for each of the N clients.

    Args:
        rounds: of the run.
        reserve: of the count of each client's "train" line, for rounds that a resumed run must charge again.
    """

    clients: tuple[ClientSchedule, ...]
    rounds: int
    reserve: int = 0

    def replan(self, change: Callable[[int, ClientSchedule], ClientSchedule]) -> RunSchedule:
        """The schedule with every client's part passed through `change(client, schedule)`."""
        return dataclasses.replace(self, clients=tuple(change(i, c) for i, c in enumerate(self.clients)))

    def planned(self, client: int, purpose: str) -> Planned:
        """The client's line for `purpose`."""
        for line in self.clients[client].planned:
            if line.purpose == purpose:
                return line
        known = ", ".join(line.purpose for line in self.clients[client].planned)
        raise KeyError(f"client {client} has planned {known}, not {purpose!r}: declare it in `plan_run`")

    def noised(self, client: int, purpose: str) -> NoisedEvent:
        """One noised sum of that purpose."""
        event = self.planned(client, purpose).event
        if not isinstance(event, NoisedEvent):
            raise KeyError(f"client {client} has planned {event} for {purpose!r}, which is no noised sum")
        return event


@dataclass(frozen=True)
class LocalTraining:
    """The job of a usual round: `steps` DPSGD steps; the release is the change of the parameters, `[P]`."""

    def clip_norm(self, mechanism: Mechanism) -> float:
        """Of one record's gradient."""
        return mechanism.clip_norm

    def expected_records(self, mechanism: Mechanism) -> float:
        """Of one step."""
        return mechanism.expected_batch_size


@dataclass(frozen=True)
class ClassGradients:
    """One noised sum of clipped gradients for each class, divided by the expected batch size, `[num_classes, p]`.

    Args:
        num_classes: blocks of the release; a class that the client lacks has one, too.
        parameters: names of those whose gradients are measured, clipped and sent, p numbers; None is all, p = P.
        augmentation: what every record becomes before its gradient is taken: public, the same for all clients.
        most_records: of each class, drawn without replacement in place of a Poisson draw.
        counts: whether two columns follow: how many records of each class were drawn and how many there are, divided
            as the sums are. They are exact, so only releases without noise may have them.

    **Privacy** A record has one label, so the whole stack has the sensitivity of one clipped gradient. Of
    `most_records` a record more may push another out: records are then clipped to half the mechanism's norm.
    """

    num_classes: int
    parameters: tuple[str, ...] | None = None
    augmentation: ClassAugmentation | None = None
    most_records: int | None = None
    counts: bool = False

    def clip_norm(self, mechanism: Mechanism) -> float:
        """Of one record's gradient, so that one record moves the stack by at most the mechanism's."""
        return mechanism.clip_norm if self.most_records is None else mechanism.clip_norm / 2

    def expected_records(self, mechanism: Mechanism) -> float:
        """At most: which classes a client lacks is private."""
        drawn = math.inf if self.most_records is None else self.num_classes * self.most_records
        return min(mechanism.expected_batch_size, drawn)

    def seen(self, x: Tensor, y: Tensor) -> Tensor:
        """What the records `x` `[B, *X]` of the classes `y` `[B]` become."""
        return x if self.augmentation is None else self.augmentation(x, y)

    def released(self, sums: Tensor, task: LocalTask, dtype: torch.dtype, drawn: Tensor, held: Tensor) -> Tensor:
        """What the client sends, in `dtype`.

        Args:
            sums: `[num_classes, p]`, clipped.
            task: the client's, with its mechanism and its generator.
            drawn: labels of the records in `sums`, `[B]`.
            held: labels of all its records, `[n]`.
        """
        noised = task.mechanism.privatise(sums, task.noise, dtype)
        if not self.counts:
            return noised
        numbers = torch.stack([labels.bincount(minlength=self.num_classes) for labels in (drawn, held)], dim=1)
        return torch.cat([noised, numbers.to(noised.dtype) / task.mechanism.expected_batch_size], dim=1)

    def size(self, sizes: Mapping[str, int]) -> int:
        """Numbers in a release, from those in each parameter."""
        width = sum(size for name, size in sizes.items() if self.parameters is None or name in self.parameters)
        return self.num_classes * (width + (2 if self.counts else 0))

    def problem(self, mechanism: Mechanism) -> str:
        """Why this job's releases would not be what the mechanism's event says; empty if they are."""
        if self.counts and mechanism.noise_multiplier > 0:
            return "exact counts beside noised sums are covered by no epsilon"
        if self.most_records is not None and mechanism.sample_rate < 1:
            return "draws of a fixed number of records are not amplified: their sample rate is 1"
        return ""


Job = LocalTraining | ClassGradients


@dataclass(frozen=True)
class RoundPlan:
    """Who takes part in a round, from which model, with which mechanism and job. Parallel tuples of length C.

    Args:
        purpose: the line of every client's schedule that pays for this round.
        model_of: row of `ServerState.models` each client starts from (and, unless a `route` says otherwise, adds to).
        anchors: `[A, P]` models that `anchor_of` points to; `pull` is the strength. Post-processing.
        fewest: clients, >= 1: where fewer are left, in the end or because the others cannot pay, nobody is asked.
    """

    round: int
    clients: tuple[int, ...]
    model_of: tuple[int, ...]
    mechanism_of: tuple[Mechanism, ...]
    steps: tuple[int, ...]
    learning_rate_of: tuple[float, ...]
    purpose: str = "train"
    job: Job = LocalTraining()
    anchors: Tensor | None = None
    anchor_of: tuple[int, ...] = ()
    pull: float = 0.0
    fewest: int = 1

    def __post_init__(self) -> None:
        columns = (self.model_of, self.mechanism_of, self.steps, self.learning_rate_of)
        if any(len(column) != len(self.clients) for column in columns) or len(set(self.clients)) < len(self.clients):
            raise ValueError(f"a plan has one entry a client in every column, and each client once: {self}")
        if isinstance(self.job, ClassGradients):
            for problem in filter(None, map(self.job.problem, self.mechanism_of)):
                raise ValueError(f"{problem}: {self.job}")

    @property
    def expected_records(self) -> tuple[float, ...]:
        """Records each client's steps process in expectation, `[C]`: the observed number is private."""
        pairs = zip(self.mechanism_of, self.steps, strict=True)
        return tuple(self.job.expected_records(mechanism) * steps for mechanism, steps in pairs)

    def clip_norm(self, row: int) -> float:
        """Of one record's gradient, at the client of a row."""
        return self.job.clip_norm(self.mechanism_of[row])

    def only(self, keep: Callable[[int], bool]) -> RoundPlan:
        """The plan of the clients for which `keep(client)` holds."""
        rows = [row for row, client in enumerate(self.clients) if keep(client)]
        columns = ("clients", "model_of", "mechanism_of", "steps", "learning_rate_of", "anchor_of")
        kept: dict[str, Any] = {
            name: tuple(getattr(self, name)[row] for row in rows) for name in columns if getattr(self, name)
        }
        return dataclasses.replace(self, **kept)


@dataclass(frozen=True)
class ClientUpdates:
    """What arrived at the server: released, noised, free to post-process.

    Args:
        clients: length C.
        steps: local steps behind each release.
        noise_std: per-coordinate standard deviation of the noise in each delta (public: mechanism and steps).
        deltas: `[C, P]` parameter changes, or `[C, G, P]` for class gradients. None for callbacks that do not see
            them in this round, and where updates were streamed.
        total: their weighted sum instead, if nobody sees single updates.
        lost: clients whose release was not finite; in none of the above.
        model_of: row of the server's models each client started from.
        mechanism_of: of each client's steps (public: planned).
    """

    clients: tuple[int, ...]
    steps: tuple[int, ...]
    noise_std: tuple[float, ...]
    deltas: Tensor | None = None
    total: WeightedSum | None = field(default=None, repr=False)
    lost: tuple[int, ...] = ()
    model_of: tuple[int, ...] = ()
    mechanism_of: tuple[Mechanism, ...] = ()

    @classmethod
    def announced(cls, plan: RoundPlan) -> ClientUpdates:
        """What is known of a plan's updates before they come."""
        rows = zip(plan.mechanism_of, plan.steps, plan.learning_rate_of, strict=True)
        sums = isinstance(plan.job, ClassGradients)  # of one step, and no learning rate
        noise_std = tuple(m.noise_std(1, 1.0) if sums else m.noise_std(steps, rate) for m, steps, rate in rows)
        return cls(plan.clients, plan.steps, noise_std, model_of=plan.model_of, mechanism_of=plan.mechanism_of)

    @property
    def released(self) -> Tensor:
        """`deltas`, for who sees them."""
        if self.deltas is None:
            raise RuntimeError('this callback reads updates: set `needs = "deltas"` on it, or let `sees` say when')
        return self.deltas


@dataclass(frozen=True)
class ServerState:
    """The server's models `[K, P]`, which client starts from which `[N]`, and the number of finished rounds."""

    models: Tensor
    model_of: tuple[int, ...]
    round: int = 0


@dataclass(frozen=True)
class Delivered:
    """What the run hands over: models `[K, P]` and the row of each of the N clients."""

    models: Tensor
    model_of: tuple[int, ...]


@dataclass(frozen=True)
class Sketch:
    """The clients as points of a plane, for a picture: where their updates lay, and where each was taken to belong.

    Args:
        title: what is drawn, such as "Updates of round 1, two principal components".
        clients: [n], those that are drawn.
        points: [n] pairs (x, y).
        cluster: [n] found cluster of each, from 0.
        membership: [n] how surely it belongs there, in [0, 1].
        num_clusters: found or given; some may be nobody's.
        separation: how far apart the two nearest clusters are, in units of the noise; None: not known.
        confident: whether that is more than noise alone would show.

    **Privacy** Post-processing of released updates.
    """

    title: str
    clients: tuple[int, ...]
    points: tuple[tuple[float, float], ...]
    cluster: tuple[int, ...]
    membership: tuple[float, ...]
    num_clusters: int
    separation: float | None
    confident: bool

    def __post_init__(self) -> None:
        columns = (self.points, self.cluster, self.membership)
        if any(len(column) != len(self.clients) for column in columns) or any(len(one) != 2 for one in self.points):
            raise ValueError(f"a sketch has one point (x, y), one cluster and one membership a client: {self}")


@dataclass(frozen=True)
class RunInfo:
    """What a run is, for watchers: fixed before the first round.

    Args:
        budgets: each client's own epsilon (inf: none), before strategies change it.
        estimated_seconds: for all rounds, from a short measurement on random data.
        first_round: 1, or the next round of a resumed run.
        noise: where noise and sampling come from, in words.
        simulated: whether they follow from a given key: no epsilon of the run protects anybody.
        options: the resolved configuration (empty when built in Python).
        outline: what strategies say of the plan.
    """

    output_dir: Path
    rounds: int
    first_round: int
    num_params: int
    budgets: tuple[float, ...]
    estimated_seconds: float
    engine: str
    device: str
    sampling: str
    accountant: str
    noise: str
    options: Mapping[str, Any]
    simulated: bool = False
    outline: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """What a callback may see: public facts and released values; never data, never the loop.

    Args:
        module: the server's own copy: architecture and loss for its work on public data. Its parameters mean nothing,
            and whoever works may overwrite them.
        ask: `ask(query)` charges the ledger first and returns noised answers.
        new_model: `new_model(seed)` gives the parameters `[P]` that the net is initialised with from that public seed.
        solve: `solve(schedule)` is the schedule with its free noise solved by the run's accountant: arithmetic on
            public facts, for strategies that compare plans.
    """

    round: int
    state: ServerState
    facts: Facts
    module: ClientModule = field(repr=False)
    schedule: RunSchedule
    run: RunInfo
    clip_norm: tuple[float, ...]
    learning_rate: tuple[float, ...]
    seed: int
    guarantees: Callable[[], tuple[Guarantee, ...]] = field(repr=False)
    ask: Callable[[Query], Answers] = field(repr=False)
    new_model: Callable[[int], Tensor] = field(repr=False)
    solve: Callable[[RunSchedule], RunSchedule] = field(repr=False)
    used: Callable[[int, str], int] = field(repr=False)

    def expected_guarantee(self) -> Guarantee:
        """The first client's guarantee, with an infinite epsilon if any client is planned `Unprotected` answers."""
        now, events = self.guarantees()[0], (event for own in self.schedule.clients for event in own.events())
        planned = [event.words for event in events if isinstance(event, Unprotected)]
        words = tuple(dict.fromkeys([*now.unprotected, *planned]))
        return dataclasses.replace(now, epsilon=math.inf, unprotected=words) if planned else now

    def mechanism(self, client: int, purpose: str = "train") -> Mechanism:
        """The client's calibrated mechanism for a purpose of its schedule."""
        event = self.schedule.noised(client, purpose)
        return mechanism_of(event, self.clip_norm[client], self.facts.num_records[client])

    def plan(self, purpose: str = "train", clients: Sequence[int] | None = None, job: Job | None = None) -> RoundPlan:
        """The plain plan of a round: `clients` (all), each from its model, paid by `purpose`."""
        cohort = tuple(range(self.facts.num_clients)) if clients is None else tuple(sorted(clients))
        return RoundPlan(
            round=self.round,
            clients=cohort,
            model_of=tuple(self.state.model_of[i] for i in cohort),
            mechanism_of=tuple(self.mechanism(i, purpose) for i in cohort),
            steps=tuple(self.schedule.noised(i, purpose).steps for i in cohort),
            learning_rate_of=tuple(self.learning_rate[i] for i in cohort),
            purpose=purpose,
            job=job or LocalTraining(),
        )


@dataclass(frozen=True)
class RoundReport:
    """One finished round for the watchers. Accuracies are None in rounds that were not evaluated.

    Args:
        records: records processed in the round (expected number: the observed one is private).
        epsilon_spent: length N, live values from the schedule.
        weights: `[K, C]` of `clients`.
        diagnostics: with `privacy.diagnostics` only, which voids the guarantee.
        told: what strategies told of the round, see `report.told`: numbers, and `[N]` with NaN for absent clients.
    """

    round: int
    rounds: int
    seconds: float
    records: int
    clients: tuple[int, ...]
    weights: Tensor
    epsilon_spent: tuple[float, ...]
    test_accuracy: float | None = None
    test_loss: float | None = None
    client_accuracy: tuple[float | None, ...] | None = None
    diagnostics: Diagnostics | None = None
    told: Mapping[str, float | Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RunResult:
    """A finished (or interrupted) run; `as_dict` is `result.json`.

    Args:
        reason: why it ended, in words; `finished` is False after Ctrl-C or an error.
        wall_seconds: from the first round's begin, with everything around training; interruptions not counted.
        training_seconds: of these, in the rounds themselves: plans, the ledger, local training, aggregation.
        client_seconds: of these, until all clients of a round had trained or answered; the rest is the server's work.
        records_per_second: expected records / seconds until the last round was kept.
        guarantee: what the run's epsilons mean and do not cover, in words.
        ledger: how far the run's ledger goes (run, lines, chain): a ledger that ends otherwise is not this run's.
        noise: where noise and sampling come from, in words.
        simulated: whether they follow from a given key: no epsilon of the run protects anybody.
        clients: for each client: client, epsilon_spent, epsilon_budget (None: none or unbounded), delta,
            noise_multiplier, noise_std (of each number in its last update; None: it sent none), batch_size,
            num_records, releases, steps, accuracy in [0, 1] and mean loss on its own held-out records, model (row of
            what was delivered), true_group (of a simulation, else None).
        accuracy_mean: over clients, each on its own held-out records; None if none was evaluated.
        accuracy_std: over clients (population standard deviation): how unequally the model serves them.
        accuracy_worst: of the client it serves worst.
        accuracy_gap: of the client it serves best, minus that.
        accuracy_of_groups: in a simulation with true groups: `majority`, `minority` and each group by its number ->
            mean over its clients.
        told: what strategies told of the last round, ready for JSON: numbers, and lists of one value a client.
        sketch: the clients as a strategy sees them, if one has a picture.
    """

    output_dir: str
    finished: bool
    rounds: int
    wall_seconds: float
    training_seconds: float
    client_seconds: float
    records_per_second: float
    reason: str
    guarantee: str
    ledger: dict[str, Any]
    noise: str
    clients: tuple[dict, ...]
    test_accuracy: float | None
    test_loss: float | None
    simulated: bool = False
    accuracy_mean: float | None = None
    accuracy_std: float | None = None
    accuracy_worst: float | None = None
    accuracy_gap: float | None = None
    accuracy_of_groups: Mapping[str, float] = field(default_factory=dict)
    told: Mapping[str, float | list[float | None] | None] = field(default_factory=dict)
    sketch: Sketch | None = None

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)
