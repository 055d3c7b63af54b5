"""Public facts about the clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """What the server may know of the clients: public by assumption; strategies see it, and releases.

    Args:
        num_records: [N] training records of each client.
        num_classes: number of classes; 1 for a regression.
        input_shape: shape X of one record.
        batch_size: [N] expected batch sizes.
        reported_epsilon: [N] budgets as the clients report them: claims, which may be false.
        truth: what only a simulation knows: `groups`, [N] true group of each client; None where there is nothing of
            the kind. For reports, and for strategies whose `caveats` say that the run is a simulation.
    """

    num_records: tuple[int, ...]
    num_classes: int
    input_shape: tuple[int, ...]
    batch_size: tuple[int, ...] = ()
    reported_epsilon: tuple[float, ...] = ()
    truth: Mapping[str, object] | None = None

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.num_records)
