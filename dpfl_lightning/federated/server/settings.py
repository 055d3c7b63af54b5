"""What is fixed before the first round: settings of each client, the default schedule of releases, `RunConfig`."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from dpfl_lightning.config.options import ClientOptions, NetworkOptions, PrivacyOptions
from dpfl_lightning.config.per_client import resolve
from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.federated.messages.facts import ClientSettings, Facts
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import Strategy, overrides
from dpfl_lightning.models.learning_rates import Constant
from dpfl_lightning.models.optimizers import LocalOptimizer
from dpfl_lightning.privacy.accounting.accountant import Accountant, get_accountant
from dpfl_lightning.privacy.accounting.events import NOISED
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned, once_each
from dpfl_lightning.privacy.accounting.schedule import calibrate, cut_to_budgets
from dpfl_lightning.runtime.text import slow_notice

_LEAST_CLIP_NORM = 1e-12
_ANY_DELTA = 1e-4  # of a run without privacy, where every epsilon is infinite at any delta


def client_settings(
    num_records: Sequence[int],
    clients: ClientOptions,
    privacy: PrivacyOptions | None,
    seed: int,
    names: Sequence[str] = (),
) -> tuple[ClientSettings, ...]:
    """The settings of all clients; `privacy` None is a run without clipping, noise or guarantee.

    `names` of the clients are for messages and options by name; empty if they have only numbers.

    Raises UserError for a value out of range, or a batch larger than the client's data.
    """
    count = len(num_records)
    if privacy is not None and privacy.noise_multiplier is None:
        advice = "Give an epsilon or a noise multiplier; `privacy=None` is a run without privacy."
        require(privacy.epsilon is not None, "privacy.epsilon", "be a budget to solve the noise from", None, advice)
    columns: dict[str, Sequence[Any]] = {
        "num_records": num_records,
        "batch_size": num_records,
        "epsilon": [math.inf] * count,
        "delta": [_ANY_DELTA] * count,
        "clip_norm": [math.inf] * count,
        "noise_multiplier": [0.0 if privacy is None else None] * count,
    }
    given = {f"clients.{name}": getattr(clients, name) for name in ("batch_size", "local_epochs", "learning_rate")}
    if privacy is not None:
        noised = ("epsilon", "delta", "clip_norm", "noise_multiplier")
        given |= {f"privacy.{name}": getattr(privacy, name) for name in noised}
    for key, value in given.items():
        name = key.partition(".")[2]
        if value is not None or name not in columns:
            columns[name] = resolve(key, value, count, seed, names)
    rows = list(zip(*columns.values(), strict=True))
    settings = tuple(once_each(lambda row: ClientSettings(**dict(zip(columns, row, strict=True))), rows))
    _check(settings, privacy, names or range(count))
    return settings


def reported_epsilons(
    clients: ClientOptions, settings: Sequence[ClientSettings], seed: int, names: Sequence[str] = ()
) -> tuple[float, ...]:
    """The budget that each client reports: the true one, unless `clients.reported_epsilon` is set."""
    if clients.reported_epsilon is None:
        return tuple(client.epsilon for client in settings)
    return resolve("clients.reported_epsilon", clients.reported_epsilon, len(settings), seed, names=names)


def _check(settings: Sequence[ClientSettings], privacy: PrivacyOptions | None, names: Sequence[str | int]) -> None:
    """Check values against the client's number of records and against the mechanism."""
    given = privacy or PrivacyOptions()
    noised, units = NOISED[given.mechanism], f"{given.unit}s"
    first_with: dict[ClientSettings, int] = {}  # equal clients are checked once
    for i, client in enumerate(settings):
        first_with.setdefault(client, i)
    for client, i in first_with.items():
        batch, size, name = client.batch_size, client.num_records, names[i]
        by_name = f"{{{name}: {min(batch, size)}, ...}}" if isinstance(name, str) else "a list"
        advice = (
            f"Client {name} has {size} {units}. Give {by_name} with a value for each client, or null (full batches)."
        )
        require(batch <= size, "clients.batch_size", f"be at most the {units}", batch, advice)
        must = f"be at least {_LEAST_CLIP_NORM}: of shorter gradients the squares may vanish, and they look like zeros"
        require(client.clip_norm >= _LEAST_CLIP_NORM, "privacy.clip_norm", must, client.clip_norm)
        must = f"be null (all {size} of client {name}'s {units}) with {noised.protection}"
        full = noised.amplified or batch == size
        require(full, "clients.batch_size", must, batch, "Its accountant needs full batches.")
        must, pure = f"be in (0, 1) with {noised.protection}", [name for name in NOISED if not NOISED[name].needs_delta]
        advice = f"privacy.mechanism {' or '.join(pure)} can have 0."
        require(client.delta > 0 or not noised.needs_delta, "privacy.delta", must, client.delta, advice)
    loose = [i for i, client in enumerate(settings) if client.delta > 1 / client.num_records]
    if loose and privacy is not None:
        client = settings[loose[0]]
        warn_user(
            f"`privacy.delta` should be below 1 / {units}, got {client.delta} for client {names[loose[0]]} with "
            f"{client.num_records} {units} ({len(loose)} clients): publishing one of them at random would satisfy it."
        )


def default_schedule(settings: Sequence[ClientSettings], privacy: PrivacyOptions | None, rounds: int) -> RunSchedule:
    """All clients train in all rounds, reserved ones included. Noise that is not given remains to be solved."""
    reserve = privacy.reserve_rounds if privacy is not None else 0
    mechanism = privacy.mechanism if privacy is not None else "gaussian"

    def schedule(client: ClientSettings) -> ClientSchedule:
        event = NOISED[mechanism].of(client.sample_rate, client.noise_multiplier, client.steps)
        return ClientSchedule(client.epsilon, client.delta, (Planned("train", event, rounds + reserve),))

    return RunSchedule(tuple(once_each(schedule, settings)), rounds, reserve)


def solved(schedule: RunSchedule, accountant: Accountant) -> RunSchedule:
    """The schedule with the free noise of all clients solved. UserError if no noise fits.

    If both noise and a budget are given, the budget limits the number of rounds.
    """
    clients = cut_to_budgets(schedule.clients, accountant, slow_notice("counting the rounds that budgets pay"))
    clients = calibrate(clients, accountant, slow_notice("solving noise multipliers"))
    return dataclasses.replace(schedule, clients=tuple(clients))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What is fixed before the first round. Raises UserError if its parts do not fit together.

    `privacy` lacks its secrets, and None is a run without privacy; `optimizer` None is that of the model.
    `caveats` are sentences that every guarantee of the run must contain, `exact_times` says that times are reported as
    measured. For the other fields see `FederatedLoop`.
    """

    facts: Facts
    settings: tuple[ClientSettings, ...]
    privacy: PrivacyOptions | None
    strategies: Sequence[Strategy]
    callbacks: Sequence[Callback]
    rounds: int
    optimizer: LocalOptimizer | None
    rates: Constant
    network: NetworkOptions
    seed: int
    output_dir: Path
    evaluate_every: int
    caveats: tuple[str, ...]
    exact_times: bool
    options: Mapping[str, Any]
    new_net: Callable[[int], nn.Module] | None
    resume_command: str

    def __post_init__(self) -> None:
        fewest, most = self.network.min_participants, len(self.settings)
        require(fewest <= most, "network.min_participants", f"be at most the {most} clients of the run", fewest)
        known = self.optimizer is not None and math.isfinite(self.optimizer.independent_steps(1))
        for strategy in self.strategies:
            name = strategy.config_name
            advice = f"{name} must know the noise in every update. noise_aware with `noise: estimated` need not."
            got = "the optimizer of the model" if self.optimizer is None else type(self.optimizer).__name__
            require(known or not strategy.needs_noise_std, "clients.optimizer", f"be SGD with {name}", got, advice)

    @cached_property
    def accountant(self) -> Accountant:
        """That of the options; RDP for a run without privacy, where every epsilon is infinite."""
        privacy = self.privacy
        return get_accountant("rdp") if privacy is None else get_accountant(privacy.accountant, privacy.adjacency)

    @cached_property
    def clip_norm(self) -> tuple[float, ...]:
        return tuple(client.clip_norm for client in self.settings)

    @property
    def replans(self) -> bool:
        """Whether a strategy may change the schedule during the run."""
        return any(overrides(strategy, "replan") for strategy in self.strategies)

    @property
    def ends_by_results(self) -> bool:
        """Whether a strategy may end the run by its releases."""
        return any(overrides(strategy, "stop") for strategy in self.strategies)

    @property
    def watching(self) -> list[Callback]:
        """The strategies that watch, and the callbacks."""
        return [part for part in (*self.strategies, *self.callbacks) if isinstance(part, Callback)]

    @cached_property
    def _learning_rate(self) -> tuple[float, ...]:
        return tuple(client.learning_rate for client in self.settings)

    def learning_rates(self, round: int) -> tuple[float, ...]:
        """The learning rate of each client in a round."""
        factor = self.rates.factor(round, self.rounds)
        return self._learning_rate if factor == 1 else tuple(factor * rate for rate in self._learning_rate)
