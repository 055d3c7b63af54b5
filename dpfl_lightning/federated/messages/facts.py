"""Public facts about the clients, and the settings of each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpfl_lightning.privacy.accounting.units import RECORD, Unit


@dataclass(frozen=True)
class Facts:
    """What the server knows about the N clients. These facts are public by assumption.

    Args:
        num_records: of training, of each client.
        num_classes: 1 for a regression; the number of labels (multilabel) or tokens (language modelling).
        input_shape: of a record's tensor; a tuple or dictionary of shapes if records are such.
        batch_size: expected, of each client.
        reported_epsilon: budgets as the clients report them. These are claims, which may be false.
        truth: facts that only a simulation has, such as `groups`, the true group of each client; else None. For
            reports, and for strategies whose `caveats` say that the run is a simulation.
        names: of the clients, for reports; empty if they have only numbers.
        test_set: whether models are scored on a test set, and not on the clients' held-out records alone.
        features: names and preprocessing of the inputs of records from a table, see `Population`; else None.
        origin: of a public data set: its name, its licence, and how values were normalised; otherwise empty.
        at_sites: whether the records are at the nodes of sites, so that the section `data` names the test set only.
        unit: what `num_records` and batch sizes count.
        empty_x: records [0, *X], a tensor or a tuple or dictionary of tensors: their shapes and dtypes without values.
    """

    num_records: tuple[int, ...]
    num_classes: int
    input_shape: Any
    batch_size: tuple[int, ...] = ()
    reported_epsilon: tuple[float, ...] = ()
    truth: Mapping[str, object] | None = None
    names: tuple[str, ...] = ()
    test_set: bool = True
    features: Mapping[str, Any] | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    at_sites: bool = False
    unit: Unit = RECORD
    empty_x: Any = field(default=None, compare=False, repr=False)

    def name_of(self, client: int) -> str:
        """Return the name of a client for reports; its number if it has none."""
        return self.names[client] if self.names else str(client)

    @property
    def num_clients(self) -> int:
        return len(self.num_records)


@dataclass(frozen=True)
class ClientSettings:
    """The settings of one client. `epsilon` inf is no budget; `noise_multiplier` None is solved from the budget."""

    num_records: int
    batch_size: int
    local_epochs: int
    learning_rate: float
    epsilon: float
    delta: float
    clip_norm: float
    noise_multiplier: float | None

    @property
    def steps(self) -> int:
        """Local steps of a round."""
        return self.local_epochs * math.ceil(self.num_records / self.batch_size)

    @property
    def sample_rate(self) -> float:
        return self.batch_size / self.num_records
