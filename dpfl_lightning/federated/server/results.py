"""What a run reports: its description, its rounds and its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dpfl_lightning.federated.messages.diagnostics import Diagnostics

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class ClientEmbedding:
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
    strategy_notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundReport:
    """One finished round for the watchers. Accuracies are None in rounds that were not evaluated.

    Args:
        records: records processed in the round (expected number: the observed one is private).
        epsilon_spent: length N, live values from the schedule.
        weights: `[K, C]` of `clients`.
        diagnostics: with `privacy.diagnostics` only, which voids the guarantee.
        metrics: of the round, see `summary.round_metrics`: numbers, and `[N]` with NaN for absent clients.
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
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)


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
        metrics: what strategies metrics of the last round, ready for JSON: numbers, and lists of one value a client.
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
    metrics: Mapping[str, float | list[float | None] | None] = field(default_factory=dict)
    client_embedding: ClientEmbedding | None = None

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)
