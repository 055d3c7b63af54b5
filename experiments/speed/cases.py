"""The rounds that are measured. It imports no torch, so that `--help` is fast."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

NUM_CLASSES = 10
CLIP_NORM = 3.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.01

#: libraries that nobody should wait for before they are needed
HEAVY = ("torch", "lightning", "mlflow", "optuna", "matplotlib")


@dataclass(frozen=True)
class Case:
    """One round: every client takes one local epoch on its records, and the mean is the new model.

    `unit` is what is counted a second, records or clients. `batch_sizes` has one for each client; if it is empty, all
    have `batch_size`. Records are sequences of that many `words`, or numbers. With `rows` above 1 ours protects persons
    with so many records, and draws as many records a batch; it is measured beside itself with records.
    """

    model: str
    input_shape: tuple[int, ...]
    clients: int
    records: int
    batch_size: int
    unit: str = "records"
    words: int = 0
    batch_sizes: tuple[int, ...] = ()
    rows: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch size of each client."""
        return self.batch_sizes or (self.batch_size,) * self.clients

    @property
    def work(self) -> int:
        return self.clients * (self.records if self.unit == "records" else 1)

    def scaled(self, scale: float) -> Case:
        """The case with `scale` times as many clients, at least one.

        >>> CASES["common"].scaled(0.1).clients
        2
        """
        return dataclasses.replace(self, clients=max(1, round(self.clients * scale)))


CASES = {
    "common": Case("cnn_small", (1, 28, 28), clients=20, records=2400, batch_size=64),
    "persons": Case("cnn_small", (1, 28, 28), clients=20, records=2400, batch_size=64, rows=4),
    "small_clients": Case("cnn_small", (1, 28, 28), clients=500, records=24, batch_size=24, unit="clients"),
    "batch_16": Case("cnn_small", (1, 28, 28), clients=4, records=1200, batch_size=16),
    "lenet5": Case("lenet5", (1, 28, 28), clients=4, records=1200, batch_size=64),
    "convnet": Case("convnet", (3, 32, 32), clients=4, records=64, batch_size=32),
    "resnet20": Case("resnet20", (3, 32, 32), clients=4, records=64, batch_size=32),
    "resnet18": Case("resnet18", (3, 32, 32), clients=4, records=64, batch_size=32),
    "lstm": Case("lstm", (32,), clients=4, records=256, batch_size=32, words=1000),
    "transformer": Case("transformer", (32,), clients=4, records=256, batch_size=32, words=1000),
}
