"""What a run reports: its description, its rounds, its result, and the sums from which this is made."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpfl_lightning.config.reading import read_json
from dpfl_lightning.federated.messages.evaluation import Diagnostics, Score
from dpfl_lightning.federated.messages.facts import ClientSettings, Facts
from dpfl_lightning.federated.server import history
from dpfl_lightning.federated.server.scores import in_words, number
from dpfl_lightning.models.tasks import Measure
from dpfl_lightning.privacy.accounting.accountant import Accountant, finite_or_none, get_accountant
from dpfl_lightning.privacy.accounting.guarantee import RunGuarantee
from dpfl_lightning.privacy.accounting.noise_source import FRESH, SOURCES, NoiseSource
from dpfl_lightning.privacy.accounting.planned import ClientSchedule

FORMAT = 1  # of result.json and guarantees.json
RESULT, GUARANTEES = "result.json", "guarantees.json"


@dataclass(frozen=True)
class ClientEmbedding:
    """Some clients as points (x, y) of a plane for a figure, each in a cluster with a probability of `membership`.

    Of `num_clusters` some may be empty. `separation` is half the distance of the two nearest clusters / standard
    deviation of a client, None if it is not known; `confident` says that the clusters are probably right.
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
        if len({len(column) for column in (self.clients, self.points, self.cluster, self.membership)}) > 1:
            raise ValueError(f"an embedding needs one point (x, y), cluster and membership for each client: {self}")


@dataclass(frozen=True)
class PlannedClients:
    """What is planned for the N clients, as columns `[N]`.

    Args:
        budget: epsilon (inf: no budget), before strategies change it; `planned` is that for which noise was solved.
        steps: of the most frequent noisy sum, a round.
        noise_multiplier: of the most frequent noisy sum; None if no release is planned.
    """

    name: tuple[str, ...]
    num_records: tuple[int, ...]
    batch_size: tuple[int, ...]
    steps: tuple[int, ...]
    budget: tuple[float, ...]
    planned: tuple[float, ...]
    delta: tuple[float, ...]
    noise_multiplier: tuple[float | None, ...]

    @classmethod
    def of(
        cls, facts: Facts, settings: Sequence[ClientSettings], schedules: Sequence[ClientSchedule]
    ) -> PlannedClients:
        """The columns of a planned run."""
        sizes = facts.num_records
        return cls(
            name=tuple(map(facts.name_of, range(len(sizes)))),
            num_records=tuple(sizes),
            batch_size=tuple(one.batch_size(size) for one, size in zip(schedules, sizes, strict=True)),
            steps=tuple(one.main.steps for one in schedules),
            budget=tuple(one.epsilon for one in settings),
            planned=tuple(one.target_epsilon for one in schedules),
            delta=tuple(one.delta for one in schedules),
            noise_multiplier=tuple(one.main_noise for one in schedules),
        )

    def as_dict(self) -> dict[str, list[Any]]:
        """Return the columns for JSON; an infinite epsilon is None."""
        return {
            name: [finite_or_none(value) if isinstance(value, float) else value for value in column]
            for name, column in vars(self).items()
        }

    @classmethod
    def read(cls, content: Mapping[str, Sequence[Any]]) -> PlannedClients:
        """Return the columns that `as_dict` describes."""
        columns = {name: tuple(column) for name, column in content.items()}
        bounds = {name: tuple(map(number, columns[name])) for name in ("budget", "planned")}
        return cls(**{**columns, **bounds})


@dataclass(frozen=True)
class RunInfo:
    """The description of a run, fixed before the first round.

    Args:
        unit: what a guarantee protects.
        clients: what is planned for them; None until then.
        estimated_seconds: of all rounds, from a short measurement on random data.
        noise: where noise and sampling come from, in words.
        options: the resolved configuration; empty if the run was built in Python.
        strategies: their names.
        source: where noise comes from.
        exact_times: whether times are reported as measured.
        task: of the model, in words.
        replans: whether a strategy may change the schedule during the run.
        ends_by_results: whether a strategy may end the run earlier.
        assumptions: what every epsilon of the run assumes, by name; of a run without a bound `guarantee` alone.
        account: what the run will cost together with others on the same records, in words; empty without an account.
        measures: the scores of the model, the one that stands for it first.
    """

    output_dir: Path
    rounds: int
    first_round: int
    num_params: int
    estimated_seconds: float
    engine: str
    device: str
    sampling: str
    accountant: Accountant
    noise: str
    options: Mapping[str, Any]
    source: NoiseSource = FRESH
    exact_times: bool = False
    strategy_notes: tuple[str, ...] = ()
    task: str = ""
    strategies: tuple[str, ...] = ()
    replans: bool = False
    ends_by_results: bool = False
    account: str = ""
    unit: str = "record"
    clients: PlannedClients | None = None
    assumptions: Mapping[str, str] = field(default_factory=dict)
    measures: Mapping[str, Measure] = field(default_factory=dict)

    @property
    def has_noise(self) -> bool:
        """Whether a client adds noise."""
        return self.clients is not None and any(self.clients.noise_multiplier)

    def as_dict(self) -> dict[str, Any]:
        """Return what `run.json` has of it: all but the folder, and the options, which have a file of their own."""
        left_out = ("output_dir", "options", "accountant", "clients")
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        accountant = {"name": self.accountant.name, "adjacency": self.accountant.adjacency}
        clients = None if self.clients is None else self.clients.as_dict()
        seconds = finite_or_none(self.estimated_seconds)
        fields |= {"estimated_seconds": seconds, "source": self.source.name}
        measures = {name: dataclasses.asdict(one) for name, one in self.measures.items()}
        return {**fields, "accountant": accountant, "clients": clients, "measures": measures}

    @classmethod
    def read(cls, content: Mapping[str, Any], folder: Path, options: Mapping[str, Any]) -> RunInfo:
        """Return the description that `as_dict` has written, of a run in a folder."""
        clients, seconds = content["clients"], content["estimated_seconds"]
        known = {
            "estimated_seconds": math.nan if seconds is None else seconds,
            "accountant": get_accountant(**content["accountant"]),
            "source": SOURCES[content["source"]],
            "clients": None if clients is None else PlannedClients.read(clients),
            "measures": {name: Measure(**one) for name, one in content["measures"].items()},
            **{name: tuple(content[name]) for name in ("strategies", "strategy_notes")},
        }
        return cls(**{**content, **known, "output_dir": folder, "options": options})


@dataclass(frozen=True)
class RoundReport:
    """One finished round, for callbacks. Accuracies are None in rounds without evaluation.

    Args:
        records: expected number of records processed in the round; the observed number is private.
        weights: `[K, C]`, of `clients`.
        answered: clients that answered a query of the round.
        seconds: of the round, only if exact times are reported.
        epsilon_spent: of each of the N clients so far, rounded up.
        curves: the round as curves, by which it is shown.
        diagnostics: with `privacy.diagnostics` only, which gives up the guarantee.
        metrics: see `summary.round_metrics`; `fairness` are those of `evaluation.fairness`.
    """

    round: int
    rounds: int
    records: int
    clients: tuple[int, ...]
    weights: Tensor
    epsilon_spent: tuple[float, ...]
    seconds: float | None = None
    test_accuracy: float | None = None
    test_loss: float | None = None
    test_metrics: Mapping[str, float | None] = field(default_factory=dict)
    client_accuracy: tuple[float | None, ...] | None = None
    client_scores: tuple[Score, ...] = ()
    diagnostics: Diagnostics | None = None
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)
    answered: tuple[int, ...] = ()
    fairness: Mapping[str, float] = field(default_factory=dict)
    curves: history.Round = history.NO_ROUND

    @property
    def participants(self) -> tuple[int, ...]:
        """The clients that sent an update or, if nobody did, those that answered a query."""
        return self.clients or self.answered


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run, and the content of `result.json`. Scores are None without evaluation.

    Args:
        wall_seconds: time since the first round, without interruptions; `training_seconds` is the part in rounds, and
            `client_seconds` the part of that in which clients trained or answered. Each is rounded up to a power of
            two unless exact times are reported.
        records_per_second: expected records / seconds until the last checkpoint.
        reason: why the run ended; after an interruption also how to resume it.
        ledger: run, number of lines and end of the chain of the ledger. A ledger that ends otherwise was changed.
        clients: one mapping for each client. Infinite epsilons (no budget) and missing scores are None. Batch size and
            noise multiplier are those of its most frequent noisy sum, `noise_std` is that of each number in its last
            update, accuracy in [0, 1], mean loss and metrics are those of its final model on its held-out records.
        task: what was learnt, such as multiclass, and whether it was named or inferred.
        test_set: whether there is one; without it, test scores are the means over clients on their held-out records.
        at_sites: whether records are at the nodes of sites, so that models have no scores on held-out records.
        baseline: accuracy and metrics of the best constant prediction on the same records as the test scores.
        measures: of each score, which values are better, and what its baseline is.
        undefined: why a test metric is None, in words.
        test_tables: confusion and calibration on the test set, see `Score`, if clients share one classifier.
        test_metrics: metrics of the test set; `metrics_mean` is their mean over clients, on their held-out records.
        headline: the score that stands for clients on their held-out records: the first metric, the accuracy or the
            loss. Over clients it has a mean, a standard deviation, a worst value, and a gap from the best to the worst.
        accuracy_mean: of the accuracy alone.
        fairness: values of `evaluation.fairness`, in simulations alone.
        remarks: what strategies say of the finished run, in sentences.
        metrics: what strategies and the run report of the last round.
        interrupted: whether Ctrl-C or SIGTERM ended the run; not in `result.json`, which only finished runs have.
        model: the trained `nn.Module` in evaluation mode, as in `model.safetensors`, with initial personal parameters.
            It is a mean of models, which has no score, if each client has its own (see `FederatedLoop.client_model`).
            None if the run did not finish, or if models began differently, as those of clusters; not in `result.json`.
    """

    output_dir: str
    finished: bool
    rounds: int
    wall_seconds: float
    training_seconds: float
    client_seconds: float
    records_per_second: float
    reason: str
    guarantee: RunGuarantee
    ledger: dict[str, Any]
    noise: str
    clients: tuple[dict, ...]
    test_accuracy: float | None
    test_loss: float | None
    test_metrics: Mapping[str, float | None] = field(default_factory=dict)
    baseline: Mapping[str, float | None] = field(default_factory=dict)
    measures: Mapping[str, Measure] = field(default_factory=dict)
    undefined: Mapping[str, str] = field(default_factory=dict)
    test_tables: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    test_set: bool = True
    task: str = ""
    at_sites: bool = False
    headline: str = ""
    headline_mean: float | None = None
    headline_std: float | None = None
    headline_worst: float | None = None
    headline_gap: float | None = None
    accuracy_mean: float | None = None
    metrics_mean: Mapping[str, float | None] = field(default_factory=dict)
    accuracy_of_groups: Mapping[str, float] = field(default_factory=dict)
    fairness: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float | list[float | None] | None] = field(default_factory=dict)
    client_embedding: ClientEmbedding | None = None
    remarks: Sequence[str] = ()
    interrupted: bool = False
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "model": None}  # for other ranks: a user's model may not be picklable

    def history(self) -> list[dict[str, Any]]:
        """Return one mapping for each round: `round`, the curves by name, and `clients`: curve -> client -> value.

        Names are those of MLflow, such as `test_accuracy`, `test_auroc` and `train_epsilon_max`; values that were not
        measured are None. `pandas.DataFrame(result.history())` is a table. Empty if the folder of the run is not on
        this machine. More than 100 clients have no curves each.
        """
        rounds = history.read(Path(self.output_dir) / history.FILE)
        return [{"round": one.round, **one.values, "clients": one.clients} for one in rounds]

    def __repr__(self) -> str:
        ended = f"{'finished' if self.finished else 'not finished'} after {self.rounds} rounds"
        parts = filter(None, (ended, in_words(vars(self)), self.guarantee.words()))
        return f"RunResult({self.output_dir}: {'; '.join(parts)})"

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> RunResult:
        """Return the result that `as_dict` describes, without its `format`.

        Raises TypeError, ValueError or KeyError if it is none.
        """
        embedding, guarantee = content["client_embedding"], RunGuarantee.of(content["guarantee"])
        points = None if embedding is None else ClientEmbedding(**embedding)
        measures = {name: Measure(**one) for name, one in content["measures"].items()}
        return cls(**{**content, "guarantee": guarantee, "measures": measures, "client_embedding": points})

    def as_dict(self) -> dict:
        fields = {name: value for name, value in vars(self).items() if name not in ("interrupted", "model")}
        fields["guarantee"] = self.guarantee.as_dict()
        fields["measures"] = {name: dataclasses.asdict(one) for name, one in self.measures.items()}
        fields["test_loss"] = None if self.test_loss is None else finite_or_none(self.test_loss)
        embedding = self.client_embedding
        points = None if embedding is None else dataclasses.asdict(embedding)
        return {"format": FORMAT, **fields, "client_embedding": points}


@dataclass
class RunTotals:
    """Sums over rounds, metrics of the last round, and `noise_std` `[N]` of the last updates. Checkpoints contain them.

    `noise_std` is NaN for clients that have sent no update. `seconds` is the time of the run before this process,
    `records` the expected number of records of all releases.
    """

    noise_std: Tensor
    seconds: float = 0.0
    records: int = 0
    training_seconds: float = 0.0
    client_seconds: float = 0.0
    metrics: dict[str, float | Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = time.perf_counter() - self.seconds

    @classmethod
    def start(cls, num_clients: int) -> RunTotals:
        return cls(torch.full((num_clients,), math.nan, dtype=torch.float64))

    @property
    def wall_seconds(self) -> float:
        return time.perf_counter() - self._began

    def saved(self) -> dict[str, Any]:
        """Return a copy for a checkpoint."""
        return {**dataclasses.asdict(self), "seconds": self.wall_seconds}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> RunTotals:
        fields = copy.deepcopy({one.name: saved[one.name] for one in dataclasses.fields(cls)})
        return cls(**{**fields, "noise_std": fields["noise_std"].cpu()})


def read_guarantees(folder: Path) -> list[dict[str, Any]]:
    """Return each client's guarantee in the `guarantees.json` of a run, where equal ones are written once."""
    content = read_json(folder / GUARANTEES, format=FORMAT)
    return [content["guarantees"][place] for place in content["clients"]]
