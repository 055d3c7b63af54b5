"""What is fixed before the first round of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from dpfl_lightning.config.options import NetworkOptions, PrivacyOptions
from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.facts import ClientSettings, Facts
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.settings import accountant_of
from dpfl_lightning.federated.server.strategy import Strategy, overrides
from dpfl_lightning.models.learning_rates import Constant
from dpfl_lightning.models.optimizers import LocalOptimizer
from dpfl_lightning.privacy.accounting.accountant import Accountant


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What is fixed before the first round. Raises UserError if its parts do not fit together.

    `privacy` lacks the key of a simulation, and None is a run without privacy; `optimizer` None is that of the model.
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
            name = type(strategy).__name__
            advice = f"{name} must know the noise in every update. noise_aware with `noise: estimated` need not."
            got = "the optimizer of the model" if self.optimizer is None else type(self.optimizer).__name__
            require(known or not strategy.needs_noise_std, "clients.optimizer", f"be SGD with {name}", got, advice)

    @cached_property
    def accountant(self) -> Accountant:
        return accountant_of(self.privacy)

    @cached_property
    def clip_norm(self) -> tuple[float, ...]:
        return tuple(client.clip_norm for client in self.settings)

    @property
    def replans(self) -> bool:
        """Whether a strategy may change the schedule during the run."""
        return any(overrides(strategy, "replan") for strategy in self.strategies)

    @property
    def watching(self) -> list[Callback]:
        """The strategies that watch, and the callbacks."""
        return [part for part in (*self.strategies, *self.callbacks) if isinstance(part, Callback)]

    def learning_rates(self, round: int) -> tuple[float, ...]:
        """The learning rate of each client in a round."""
        factor = self.rates.factor(round, self.rounds)
        return tuple(factor * client.learning_rate for client in self.settings)
