"""What clients have agreed to and what they have paid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.settings import ClientSettings


@dataclass(frozen=True)
class RunPlan:
    """A whole run as the server proposes it to the clients before the first round.

    Args:
        rounds: of the run.
        seed: of everything but noise and sampling.
        settings: each client's settings.
        schedule: every release of the run, its noise solved.
        accountant: name of the accountant with which noise was solved.
        caveats: sentences that every guarantee of the run must contain.
        strategies: class of each deciding strategy -> digest of its settings and source.
        options: the resolved configuration, if there is one.
    """

    rounds: int
    seed: int
    settings: tuple[ClientSettings, ...]
    schedule: RunSchedule
    accountant: str
    caveats: tuple[str, ...]
    strategies: Mapping[str, str]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ClientAccount:
    """What one client has paid for so far.

    Args:
        releases: number of releases.
        steps: number of noised steps.
    """

    releases: int
    steps: int
