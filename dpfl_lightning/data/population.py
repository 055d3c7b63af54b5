"""All clients of a run: one shared storage of records, and for each client the rows that are its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.data.datasets import Dataset
from dpfl_lightning.data.given import check_alike, pair
from dpfl_lightning.data.groups import Groups, grouped, stored
from dpfl_lightning.data.label_noise import mislabelled as with_wrong_labels
from dpfl_lightning.data.partition import Parts, as_classes, matched_shares
from dpfl_lightning.data.partition import partition as divide
from dpfl_lightning.errors import require

# Clients of these partitions are alike: any random part of a test set is like their own records.
_ALIKE = ("iid", "sizes", "overlapping")
_SHARED = (
    "clients drew their records from one pool, so a record may live at several clients: a client's epsilon "
    "covers what this client released, not what others released of the same record"
)


@dataclass(frozen=True, eq=False)
class Population:
    """The private records of N clients. Clients hold row numbers, never copies.

    Args:
        x: [n, *X] inputs of every record, whoever it belongs to.
        y: [n] int64 labels, or float32 targets of a regression.
        train_of: [N] rows of each client's training records.
        held_out_of: [N] rows of each client's held-out records, none of them a training row; may be empty.
        test: [m] rows of the test set of the run, or None.
        num_classes: number of classes; 1 for a regression.
        public: rows of records that were declared public and belong to no client, or None.
        caveats: what a guarantee of this run must say of the data, in words.
        groups: [N] true group of each client of a simulation with groups, else None; `x` and `y` hold the records as
            the groups have them.

    Privacy:
        Engines read records; strategies get `Facts`. Held-out records only ever score a released model:
        guarantees cover training records, and reports say that held-out records are not covered.
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

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.train_of)

    @functools.cached_property  # of a hundred thousand clients it is counted once, not once for each of a round
    def num_records(self) -> tuple[int, ...]:
        """[N] training records of each client."""
        return tuple(map(len, self.train_of))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape X of one record."""
        return tuple(self.x.shape[1:])

    def records(self, client: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Training records of a client: `rows` [b] count within its own; returns x [b, *X] and y [b]."""
        return self._rows(self.train_of[client][rows.to(self.x.device)])

    def held_out(self, client: int) -> tuple[Tensor, Tensor]:
        """All held-out records of a client: x [h, *X] and y [h]; h may be 0."""
        return self._rows(self.held_out_of[client])

    def test_records(self) -> tuple[Tensor, Tensor] | None:
        """The test set: x [m, *X] and y [m]; None where there is none."""
        return None if self.test is None else self._rows(self.test)

    def public_records(self) -> tuple[Tensor, Tensor]:
        """The records that were declared public: x [p, *X] and y [p]; p is 0 where none were."""
        return self._rows(self.y.new_zeros(0, dtype=torch.long) if self.public is None else self.public)

    def _rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[rows], self.y[rows]

    def to(self, device: torch.device | str) -> Population:
        """The same population on a device: records move once, the rows of all clients in one go."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name in ("x", "y", "test", "public")
            if (value := getattr(self, name)) is not None
        }
        for name in ("train_of", "held_out_of"):
            rows = getattr(self, name)
            moved[name] = list(torch.cat(rows).to(device).split([len(one) for one in rows]))
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
        mislabelled: tuple[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
    ) -> Population:
        """A public data set dealt out to simulated clients.

        Args:
            dataset: from `load`; its test set stays the test set of the run.
            num_clients: N.
            partition: a partition of `dpfl_lightning.data.partition` and its options.
            records_per_client: *training* records of each client (their mean, where the partition makes
                unequal parts); None deals out all records.
            held_out_per_client: how many of its own records a client holds out, beside its training records:
                a count, or a share in (0, 1). With 0 each client gets a disjoint share of the test set
                instead, whose classes are like those of its training records.
            test_per_client: instead of such a share each client draws so many of the test records whose classes are
                like those of its training records, without repetition and whatever the others draw.
            public_records: the last so many training records belong to no client and are declared public.
            use_public: deal out the public records instead, the last sixth of which is the test set: for
                choosing settings without a look at private records.
            groups: groups of `dpfl_lightning.data.groups` and their options: all records of a client, whether to train
                or to test, are as its group has them. Then there is no common test set (a test record looks different
                in every group), and the mean over clients on their own held-out records stands in for it. Public
                records stay as they are. Partitions and test shares go by the labels before the shift.
            mislabelled: units of `dpfl_lightning.data.label_noise` and their options: which training records have
                wrong labels. Partitions and test shares go by the right ones.
            seed: of the division (public).

        Returns:
            The population, on the CPU.

        Raises:
            UserError: more clients, records or held-out records than there are; an unknown partition; groups that do
                not fit.

        >>> from dpfl_lightning.data import load
        >>> population = Population.partitioned(load("digits"), num_clients=4, records_per_client=200)
        >>> population.num_records, [len(rows) for rows in population.held_out_of]
        ((200, 200, 200, 200), [90, 90, 90, 89])
        >>> Population.partitioned(load("digits"), num_clients=4, groups=("rotation", {"count": 2})).groups
        (0, 0, 1, 1)
        """
        _check_held_out(held_out_per_client, test_per_client)
        shifts = None
        if groups is not None:
            shifts = grouped(groups[0], num_clients, dataset.input_shape, dataset.num_classes, **groups[1])
        rng = np.random.default_rng(seed)
        name, options = partition[0], dict(partition[1])
        if records_per_client is not None:
            once = "records_per_client" not in options
            require(once, "data.records_per_client", "be given once", [records_per_client, partition[1]])
            options["records_per_client"] = _with_held_out(records_per_client, held_out_per_client)
        x, y, pool, test, public = _stored(dataset, public_records, use_public)
        labels = as_classes(y.numpy())
        kinds = max(dataset.num_classes, int(labels.max()) + 1)
        parts = divide(name, labels[pool], num_clients, rng, **options)
        train, held_out = _cut([pool.start + part for part in parts], held_out_per_client, rng)
        if not held_out_per_client:
            told = (name, labels[test], [labels[rows] for rows in train], kinds, rng)
            shares = _test_shares(*told) if test_per_client is None else _test_draws(*told, test_per_client)
            held_out = [test.start + share for share in shares]
        made = cls(
            x=x,
            y=y,
            train_of=_tensors(train),
            held_out_of=_tensors(held_out),
            test=torch.arange(test.start, test.stop),
            num_classes=dataset.num_classes,
            public=public,
            caveats=(_SHARED,) if name == "overlapping" else (),
        )
        made = made if shifts is None else made._shifted(shifts)
        if mislabelled is None:
            return made
        y = with_wrong_labels(mislabelled[0], made.y, made.train_of, made.num_classes, rng, **mislabelled[1])
        return dataclasses.replace(made, y=y)

    def _shifted(self, groups: Groups) -> Population:
        """The same clients with their records as their groups have them, and no common test set."""
        public = [] if self.public is None else [self.public]
        rows_of, group_of = [*self.train_of, *self.held_out_of, *public], [*groups.of, *groups.of, *(0 for _ in public)]
        x, y, rows_of = stored(self.x, self.y, rows_of, group_of, groups.shift)
        clients = self.num_clients
        return dataclasses.replace(
            self,
            x=x,
            y=y,
            train_of=rows_of[:clients],
            held_out_of=rows_of[clients : 2 * clients],
            test=None,
            public=rows_of[-1] if public else None,
            groups=groups.of,
        )

    @classmethod
    def from_datasets(
        cls,
        clients: Sequence[Any],
        test: Any = None,
        held_out: float = 0.2,
        seed: int = 0,
        num_classes: int | None = None,
    ) -> Population:
        """Your own data, one source a client.

        Args:
            clients: for each client a pair of tensors or arrays, x [n, *X] (floating) and y [n] (whole
                numbers: classes; floating: a regression), or a map-style torch Dataset of such (x, y).
            test: the test set of the run in the same form, or None.
            held_out: share in [0, 1) of each client's records, chosen at random, that it holds out.
            seed: of that choice.
            num_classes: number of classes; None: the largest label + 1, which tells the server that this
                label exists.

        Returns:
            The population, on the CPU.

        Raises:
            UserError: shapes, types or labels that do not fit, naming the client.

        >>> hospitals = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (50, 80)]
        >>> population = Population.from_datasets(hospitals, num_classes=3)
        >>> population.num_records, population.input_shape
        ((40, 64), (4,))
        """
        require(len(clients) >= 1, "clients", "name at least one client's records", len(clients))
        require(0 <= held_out < 1, "held_out", "be a share in [0, 1)", held_out)
        pairs = {f"client {client}": source for client, source in enumerate(clients)}
        if test is not None:
            pairs["test"] = test
        pairs = {where: pair(source, where) for where, source in pairs.items()}
        num_classes = check_alike(pairs, num_classes)
        x, y = (torch.cat(parts) for parts in zip(*pairs.values(), strict=True))
        ends = np.cumsum([len(labels) for _, labels in pairs.values()])[: len(clients)]
        rows = np.split(np.arange(ends[-1]), ends[:-1])
        train, held = _cut(rows, held_out, np.random.default_rng(seed))
        test_rows = None if test is None else torch.arange(ends[-1], len(y))
        return cls(x, y, _tensors(train), _tensors(held), test_rows, num_classes)


def _stored(
    dataset: Dataset, public_records: int, use_public: bool
) -> tuple[Tensor, Tensor, slice, slice, Tensor | None]:
    """One storage x, y of all that the run may see; the rows of it to deal out, of the test set, and public."""
    total = len(dataset.y)
    must = f"be at least 0 and below the {total} records"
    require(0 <= public_records < total, "data.public_records", must, public_records)
    private = total - public_records
    if use_public:
        advice = "Set it to how many of the last training records are public."
        require(public_records >= 6, "data.public_records", "be at least 6 for use_public", public_records, advice)
        test = slice(public_records - public_records // 6, public_records)
        return dataset.x[private:], dataset.y[private:], slice(0, test.start), test, None
    x, y = torch.cat([dataset.x, dataset.test_x]), torch.cat([dataset.y, dataset.test_y])
    public = torch.arange(private, total) if public_records else None
    return x, y, slice(0, private), slice(total, len(y)), public


def _check_held_out(held_out: int | float, test_each: int | None) -> None:
    whole = held_out < 1 or held_out == int(held_out)
    require(held_out >= 0 and whole, "data.held_out_per_client", "be a count, or a share in [0, 1)", held_out)
    alone = test_each is None or not held_out
    advice = "Clients are evaluated on records of their own, or on test records: leave out one of the two."
    require(alone, "data.test_per_client", f"be null with data.held_out_per_client {held_out}", test_each, advice)
    require(test_each is None or test_each >= 1, "data.test_per_client", "be at least 1, or null", test_each)


def _with_held_out(records: int, held_out: int | float) -> int:
    """How many records a client needs to have so many for training."""
    return records + int(held_out) if held_out >= 1 else round(records / (1 - held_out))


def _cut(rows_of: Parts, held_out: int | float, rng: np.random.Generator) -> tuple[Parts, Parts]:
    """Each client's training rows and held-out rows, at random: a count of its records, or a share of them."""
    train, held = [], []
    for client, rows in enumerate(rows_of):
        count = int(held_out) if held_out >= 1 else round(held_out * len(rows))
        must = f"leave a training record of the {len(rows)} of client {client}"
        require(count < len(rows), "data.held_out_per_client", must, held_out, "Hold out less, or have fewer clients.")
        mixed = rng.permutation(rows)
        train.append(mixed[count:])
        held.append(mixed[:count])
    return train, held


def _test_shares(
    name: str, test_labels: np.ndarray, labels_of: Parts, num_classes: int, rng: np.random.Generator
) -> Parts:
    """A disjoint share of the test set for each client, like its own records."""
    if name in _ALIKE:
        return np.array_split(rng.permutation(len(test_labels)), len(labels_of))
    counts = np.array([np.bincount(labels, minlength=num_classes) for labels in labels_of])
    return matched_shares(test_labels, counts, rng)


def _test_draws(
    name: str, test_labels: np.ndarray, labels_of: Parts, num_classes: int, rng: np.random.Generator, each: int
) -> Parts:
    """`each` test records for each client, like its own records, whatever the others draw."""
    draws = []
    for client, labels in enumerate(labels_of):
        (like,) = _test_shares(name, test_labels, [labels], num_classes, rng)  # as if it were the only client
        must = f"be at most {len(like)}, the test records with classes like those of client {client}"
        require(each <= len(like), "data.test_per_client", must, each)
        draws.append(rng.choice(like, each, replace=False))
    return draws


def _tensors(parts: Parts) -> list[Tensor]:
    return [torch.from_numpy(part.astype(np.int64)) for part in parts]
