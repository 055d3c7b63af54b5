"""All clients of a run: one shared storage of records, and the rows of each client."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.data.datasets import Dataset
from dpfl_lightning.data.given import check_alike, pair
from dpfl_lightning.data.groups import Groups, grouped, stored, with_wrong_labels
from dpfl_lightning.data.partition import Parts, as_classes, matched_shares
from dpfl_lightning.data.partition import partition as divide
from dpfl_lightning.errors import require

# In these partitions clients have the same distribution: any random part of a test set matches their records.
_ALIKE = ("iid", "sizes", "overlapping")
_SHARED = (
    "clients drew their records from one pool, so a record may live at several clients: a client's epsilon "
    "covers what this client released, not what others released of the same record"
)


@dataclass(frozen=True, eq=False)
class Population:
    """The private records of N clients, who hold row numbers, never copies. Guarantees do not cover held-out records.

    Args:
        x, y: [n, *X] inputs and [n, ...] int64 labels, or float32 targets of a regression, of all clients.
        train_of, held_out_of: [N] rows of each client's training and held-out records, disjoint.
        test: [m] rows of the test set of the run, or None.
        num_classes: 1 for a regression; the number of labels (multilabel) or tokens (language modelling).
        public: rows of records that were declared public and belong to no client, or None.
        caveats: sentences about the data for every guarantee of the run.
        groups: [N] true group of each client in a simulation with groups, else None; records are stored as shifted.
        names: [N] different names of the clients for reports, or empty.
    """

    x: Tensor
    y: Tensor
    train_of: list[Tensor]
    held_out_of: list[Tensor]
    test: Tensor | None
    num_classes: int
    public: Tensor | None = None
    caveats: tuple[str, ...] = ()
    groups: tuple[int, ...] | None = None
    names: tuple[str, ...] = ()

    @property
    def num_clients(self) -> int:
        return len(self.train_of)

    @functools.cached_property  # counted once for a hundred thousand clients, not in every round
    def num_records(self) -> tuple[int, ...]:
        return tuple(map(len, self.train_of))

    @functools.cached_property
    def num_held_out(self) -> tuple[int, ...]:
        return tuple(map(len, self.held_out_of))

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    def records(self, client: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return training records of a client: `rows` [b] index its training rows; x [b, *X] and y [b]."""
        return self._rows(self.train_of[client][rows.to(self.x.device)])

    def held_out(self, client: int) -> tuple[Tensor, Tensor]:
        """Return all held-out records of a client: x [h, *X] and y [h]; h may be 0."""
        return self._rows(self.held_out_of[client])

    def test_records(self) -> tuple[Tensor, Tensor] | None:
        """Return the test set, x [m, *X] and y [m], or None."""
        return None if self.test is None else self._rows(self.test)

    def public_records(self) -> tuple[Tensor, Tensor]:
        """Return the records that were declared public: x [p, *X] and y [p]; p may be 0."""
        return self._rows(self.y.new_zeros(0, dtype=torch.long) if self.public is None else self.public)

    def _rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[rows], self.y[rows]

    def to(self, device: torch.device | str) -> Population:
        """Return the same population on a device: records move once, and the rows of all clients together."""
        moved: dict[str, Any] = {
            name: None if (value := getattr(self, name)) is None else value.to(device)
            for name in ("x", "y", "test", "public")
        }
        for name in ("train_of", "held_out_of"):
            rows = getattr(self, name)
            moved[name] = list(torch.cat(rows).to(device).split([len(client_rows) for client_rows in rows]))
        return dataclasses.replace(self, **moved)

    @classmethod
    def partitioned(
        cls,
        dataset: Dataset,
        *,
        num_clients: int,
        partition: tuple[str, Mapping[str, Any]] = ("iid", {}),
        records_per_client: int | None = None,
        held_out_per_client: int | float = 0,
        test_per_client: int | None = None,
        public_records: int = 0,
        use_public: bool = False,
        groups: tuple[str, Mapping[str, Any]] | None = None,
        label_noise: tuple[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
    ) -> Population:
        """Divide a public data set among simulated clients, on the CPU. Raises UserError if an option does not fit.

        The arguments are the keys `data.*` of the configuration (`DataOptions`); partition, groups and label_noise are
        a name and its options. Test records match the classes of a client's training records. With groups there is no
        common test set, and public records are not shifted. Partitions use the labels before any shift or mistake.

        >>> from dpfl_lightning.data import load
        >>> population = Population.partitioned(load("digits"), num_clients=4, records_per_client=200)
        >>> population.num_records, [len(rows) for rows in population.held_out_of]
        ((200, 200, 200, 200), [90, 90, 90, 89])
        >>> Population.partitioned(load("digits"), num_clients=4, groups=("rotation", {"count": 2})).groups
        (0, 0, 1, 1)
        """
        _check_held_out(held_out_per_client, test_per_client)
        shape, rng, client_groups = dataset.input_shape, np.random.default_rng(seed), None
        if groups is not None:
            client_groups = grouped(groups[0], num_clients, shape, dataset.num_classes, **groups[1])
        name, options = partition[0], dict(partition[1])
        if records_per_client is not None:
            once = "records_per_client" not in options
            require(once, "data.records_per_client", "be given once", [records_per_client, partition[1]])
            with_share = round(records_per_client / (1 - held_out_per_client % 1))  # a share is below 1
            options["records_per_client"] = with_share + int(held_out_per_client)
        x, y, pool, test, public = _stored(dataset, public_records, use_public)
        must = f"be {', '.join(_ALIKE)} if a record has several labels"
        require(y.ndim == 1 or name in _ALIKE, "data.partition.name", must, name)
        labels = as_classes(y.numpy()) if y.ndim == 1 else np.zeros(len(y), dtype=np.int64)
        kinds = max(dataset.num_classes, int(labels.max()) + 1)
        parts = divide(name, labels[pool], num_clients, rng, **options)
        train, held_out = _cut([pool.start + part for part in parts], held_out_per_client, rng)
        if not held_out_per_client:
            labels_of = [labels[rows] for rows in train]
            shares = _test_rows(name, labels[test], labels_of, kinds, rng, test_per_client)
            held_out = [test.start + share for share in shares]
        test_rows, caveats = torch.arange(test.start, test.stop), (_SHARED,) if name == "overlapping" else ()
        population = cls(x, y, _tensors(train), _tensors(held_out), test_rows, dataset.num_classes, public, caveats)
        population = population if client_groups is None else population._shifted(client_groups)
        if label_noise is None:
            return population
        unit, unit_options = label_noise
        y = with_wrong_labels(unit, population.y, population.train_of, population.num_classes, rng, **unit_options)
        return dataclasses.replace(population, y=y)

    def _shifted(self, groups: Groups) -> Population:
        public = [] if self.public is None else [self.public]
        rows_of = [*self.train_of, *self.held_out_of, *public]
        x, y, rows_of = stored(self.x, self.y, rows_of, [*groups.of, *groups.of, *(0 for _ in public)], groups.shift)
        train_of, held_out_of = rows_of[: self.num_clients], rows_of[self.num_clients : 2 * self.num_clients]
        shifted = dataclasses.replace(self, x=x, y=y, train_of=train_of, held_out_of=held_out_of, test=None)
        return dataclasses.replace(shifted, public=rows_of[-1] if public else None, groups=groups.of)

    @classmethod
    def from_datasets(
        cls,
        clients: Sequence[Any],
        test: Any = None,
        held_out: float = 0.2,
        seed: int = 0,
        num_classes: int | None = None,
    ) -> Population:
        """Create a population from your data, on the CPU. Raises a UserError that names the client if they do not fit.

        Args:
            clients: for each client a pair of tensors or arrays, x [n, *X] (floating) and y [n, ...] (integers:
                classes, -100 for a pixel or token to ignore; floating: a regression), or a map-style torch Dataset of
                such (x, y).
            test: the test set of the run in the same form, or None.
            held_out: probability in [0, 1) with which each record is held out. Each record and `seed` decide alone, so
                that equal records stay together.
            num_classes: number of classes (of labels if each is 0 or 1, of tokens in language modelling), a public
                fact that no label may decide; None for a regression.

        **Guarantees** One raw record more or less changes the training records by at most this record. A torch Dataset
        has to return each record independently of the others, which random transformations do not.

        >>> hospitals = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (50, 80)]
        >>> population = Population.from_datasets(hospitals, num_classes=3)
        >>> population.num_clients, population.input_shape
        (2, (4,))
        """
        require(len(clients) >= 1, "clients", "name at least one client's records", len(clients))
        require(0 <= held_out < 1, "held_out", "be a probability in [0, 1)", held_out)
        sources = {f"client {client}": source for client, source in enumerate(clients)}
        sources |= {} if test is None else {"test": test}
        pairs = {where: pair(source, where) for where, source in sources.items()}
        num_classes = check_alike(pairs, num_classes)
        x, y = (torch.cat(parts) for parts in zip(*pairs.values(), strict=True))
        ends = np.cumsum([len(labels) for _, labels in pairs.values()])[: len(clients)]
        is_held_out = _coins(x[: ends[-1]], y[: ends[-1]], held_out, seed)
        train, held_out_rows = [], []
        for client, rows in enumerate(np.split(np.arange(ends[-1]), ends[:-1])):
            train.append(rows[~is_held_out[rows]])
            held_out_rows.append(rows[is_held_out[rows]])
            must = f"leave a training record of the {len(rows)} of client {client}"
            require(len(train[-1]) > 0, "held_out", must, held_out, "Hold out less, or change the seed.")
        test_rows = None if test is None else torch.arange(ends[-1], len(y))
        return cls(x, y, _tensors(train), _tensors(held_out_rows), test_rows, num_classes)


def _coins(x: Tensor, y: Tensor, probability: float, seed: int) -> np.ndarray:
    """Return one coin for each record `[n]` (bool), which is a digest of the record and `seed`, and of nothing else."""
    if probability == 0:
        return np.zeros(len(y), dtype=bool)
    key = hashlib.blake2b(str(seed).encode()).digest()
    records = zip((x + 0.0).contiguous().numpy(), y.numpy(), strict=True)  # -0.0 is 0.0
    digests = (hashlib.blake2b(one.tobytes() + label.tobytes(), digest_size=8, key=key) for one, label in records)
    numbers = np.array([int.from_bytes(digest.digest(), "big") for digest in digests], dtype=np.uint64)
    return numbers < round(probability * 2**64)


def _stored(
    dataset: Dataset, public_records: int, use_public: bool
) -> tuple[Tensor, Tensor, slice, slice, Tensor | None]:
    """Return one storage x, y of all records of the run; its rows to divide, of the test set, and public ones."""
    total = len(dataset.y)
    must = f"be at least 0 and below the {total} records"
    require(0 <= public_records < total, "data.public_records", must, public_records)
    private = total - public_records
    if use_public:
        advice = "Set it to the number of last training records that are public."
        require(public_records >= 6, "data.public_records", "be at least 6 for use_public", public_records, advice)
        test = slice(public_records - public_records // 6, public_records)
        return dataset.x[private:], dataset.y[private:], slice(0, test.start), test, None
    x, y = torch.cat([dataset.x, dataset.test_x]), torch.cat([dataset.y, dataset.test_y])
    public = torch.arange(private, total) if public_records else None
    return x, y, slice(0, private), slice(total, len(y)), public


def _check_held_out(held_out: int | float, test_each: int | None) -> None:
    is_valid = held_out < 1 or held_out == int(held_out)
    require(held_out >= 0 and is_valid, "data.held_out_per_client", "be a count, or a share in [0, 1)", held_out)
    not_both = test_each is None or not held_out
    advice = "Clients are evaluated on held-out records or on test records: leave out one of the two."
    require(not_both, "data.test_per_client", f"be null with data.held_out_per_client {held_out}", test_each, advice)
    require(test_each is None or test_each >= 1, "data.test_per_client", "be at least 1, or null", test_each)


def _cut(rows_of: Parts, held_out: int | float, rng: np.random.Generator) -> tuple[Parts, Parts]:
    """Split each client's rows at random into training and held-out rows: a count, or a share of its records."""
    train, held_out_rows = [], []
    for client, rows in enumerate(rows_of):
        count = int(held_out) if held_out >= 1 else round(held_out * len(rows))
        must = f"leave a training record of the {len(rows)} of client {client}"
        require(count < len(rows), "data.held_out_per_client", must, held_out, "Hold out less, or have fewer clients.")
        shuffled = rng.permutation(rows)
        train.append(shuffled[count:])
        held_out_rows.append(shuffled[:count])
    return train, held_out_rows


def _test_rows(
    name: str, test_labels: np.ndarray, labels_of: Parts, num_classes: int, rng: np.random.Generator, each: int | None
) -> Parts:
    """Return test rows for each client that match its records: a disjoint share, or `each` rows drawn independently."""

    def shares(labels_of: Parts) -> Parts:
        if name in _ALIKE:
            return np.array_split(rng.permutation(len(test_labels)), len(labels_of))
        counts = np.array([np.bincount(labels, minlength=num_classes) for labels in labels_of])
        return matched_shares(test_labels, counts, rng)

    if each is None:
        return shares(labels_of)
    draws = []
    for client, labels in enumerate(labels_of):
        (matching,) = shares([labels])  # as if it were the only client
        must = f"be at most {len(matching)}, the test records with classes like those of client {client}"
        require(each <= len(matching), "data.test_per_client", must, each)
        draws.append(rng.choice(matching, each, replace=False))
    return draws


def _tensors(parts: Parts) -> list[Tensor]:
    return [torch.from_numpy(part.astype(np.int64)) for part in parts]
