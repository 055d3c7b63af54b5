"""All clients of a run: one shared storage of records, and the rows of each client."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_lightning.config.names import check_columns, check_names
from dpfl_lightning.data import unit_ids as units
from dpfl_lightning.data.columns import Columns, require_filled
from dpfl_lightning.data.frames import (
    NO_IDS,
    by_client,
    cells_of,
    require_ids_stated,
    table_of,
    tables_of,
    warn_of_equal_tables,
)
from dpfl_lightning.data.given import Classes, Source, check_range, check_rows, check_same_form
from dpfl_lightning.data.ids import ids_of
from dpfl_lightning.data.images import image_folders
from dpfl_lightning.data.lazy import LazyInputs, coins, scanned
from dpfl_lightning.data.loaders import warn_of_batch_sizes
from dpfl_lightning.data.modules import datasets_of
from dpfl_lightning.data.raw_rows import RawRows, numbers_of_ids
from dpfl_lightning.errors import nearest, require, warn_user
from dpfl_lightning.privacy.accounting.units import ID_KEY, RECORD, Group, Unit
from dpfl_lightning.privacy.clipping.inputs import PAIR, BatchForm, Block, Inputs, joined, record_shape, take
from dpfl_lightning.privacy.ledger.evidence import Evidence

if TYPE_CHECKING:
    from dpfl_lightning.data.datasets import Dataset
    from dpfl_lightning.data.groups import Groups
    from dpfl_lightning.data.partition import Parts

_LARGE = 1000  # typical size of inputs at which training fails
_SHARED = (
    "clients drew their records from one pool, so a record may live at several clients: a client's epsilon "
    "covers what this client released, not what others released of the same record"
)


@dataclass(frozen=True, eq=False, repr=False)
class Population:
    """The private records of N clients, who hold row numbers, never copies. Guarantees do not cover held-out records.

    Args:
        x, y: [n, *X] inputs (a tensor, or a tuple or dictionary of tensors, or `LazyInputs`) and [n, ...] int64 labels,
            or float32 targets of a regression, of all clients.
        train_of, held_out_of: [N] rows of each client's training and held-out records, disjoint.
        test: [m] rows of the test set of the run, or None.
        num_classes: 1 for a regression; the number of labels (multilabel) or tokens (language modelling).
        public: rows of records that were declared public and belong to no client, or None.
        caveats: sentences about the data for every guarantee of the run.
        groups: [N] true group of each client in a simulation with groups, else None; records are stored as shifted.
        names: [N] different names of the clients for reports, or empty.
        features: how columns of a table became inputs, see `from_dataframe`: the public `names` of the inputs, `scale`
            and `categories`, ready for JSON; None for other records.
        origin: of a public data set: `Dataset.origin`; otherwise empty.
        form: what a `training_step` gets as a batch.
        schema: what sites must agree on beside `features`, ready for JSON: classes, and of a table columns, label,
            fill, dates and units.
        unit_ids: [n] int64 code of the person, or of another unit of several rows, of each stored row; one code at two
            clients is two units; None if unknown.
        unit: what training draws and counts, see `counting`.
        blocks_of, held_out_blocks_of: [N] rows of each client's units `[units, unit.rows]`, -1 where there is none; see
            `chosen`.
        raw: digests of the records as they were given, beside x and y.
    """

    x: Inputs
    y: Tensor
    train_of: list[Tensor]
    held_out_of: list[Tensor]
    test: Tensor | None
    num_classes: int
    public: Tensor | None = None
    caveats: tuple[str, ...] = ()
    groups: tuple[int, ...] | None = None
    names: tuple[str, ...] = ()
    features: Mapping[str, Any] | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    form: BatchForm = PAIR
    schema: Mapping[str, Any] = field(default_factory=dict)
    unit_ids: Tensor | None = None
    unit: Unit = RECORD
    blocks_of: list[Tensor] | None = None
    held_out_blocks_of: list[Tensor] | None = None
    raw: RawRows = field(default_factory=RawRows)

    def __post_init__(self) -> None:
        if self.names:
            fits = len(set(self.names)) == len(self.names) == len(self.train_of)
            require(fits, "names", f"be {len(self.train_of)} different names, one per client", self.names)
            check_names("names", self.names)
            advice = "In options per client this key selects a distribution."
            require("name" not in self.names, "names", "not contain `name`", "name", advice)
        check_columns("features", self.features)

    def __repr__(self) -> str:
        """Return sizes only: a notebook or a log that shows a population must show no record."""
        clients = [f"{self.name_of(client)} {size}" for client, size in enumerate(self.num_records)]
        listed = ", ".join([*clients[:8], "..."] if len(clients) > 8 else clients)
        test = "no test set" if self.test is None else f"{len(self.test)} test records"
        labels = "" if self.y.is_floating_point() else f", {self.num_classes} classes"
        return (
            f"Population({self.num_clients} clients with {sum(self.num_records)} records: {listed}; "
            f"{sum(self.num_held_out)} held out, {test}; inputs {self.input_shape}{labels})"
        )

    def checked(self) -> Population:
        """Return this population, with a caveat if clients share training records.

        Raises UserError if a client has a row twice, the test set has a training record or unit, or labels or rows
        are out of range: guarantees are for one record or other unit, and scores are released without noise.
        """
        check_range("Population: y", self.y, self.num_classes)
        if self.unit_ids is not None:
            units.check_ids(self.unit_ids, len(self.y), self.train_of, self.held_out_of, self.test)
        shared = check_rows(len(self.y), self.train_of, self.held_out_of, self.test)
        new = shared and _SHARED not in self.caveats
        return dataclasses.replace(self, caveats=(*self.caveats, _SHARED)) if new else self

    @property
    def num_clients(self) -> int:
        return len(self.train_of)

    @functools.cached_property  # counted once for a hundred thousand clients, not in every round
    def num_records(self) -> tuple[int, ...]:
        """What training counts of each client: its training records, or units of several of them."""
        if self.blocks_of is not None:
            return tuple(map(len, self.blocks_of))
        if self.unit.is_group and self.num_ids is not None:
            return self.num_ids
        return tuple(map(len, self.train_of))

    @functools.cached_property
    def num_held_out(self) -> tuple[int, ...]:
        return tuple(map(len, self.held_out_of))

    @functools.cached_property
    def num_ids(self) -> tuple[int, ...] | None:
        """[N] number of different ids in each client's training records; None if there are none."""
        ids = self.unit_ids
        return None if ids is None else tuple(len(ids[rows].unique()) for rows in self.train_of)

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """The names of a record's inputs in their order, such as "age (scaled)" and "sex=f"; None without a table."""
        return None if self.features is None else tuple(self.features["names"])

    @property
    def input_shape(self) -> Any:
        """The sizes of a record's tensor; of a tuple or dictionary of tensors, a tuple or dictionary of such."""
        return record_shape(self.empty_batch[0])

    @functools.cached_property
    def empty_batch(self) -> tuple[Inputs, Tensor]:
        """A batch of no records, x [0, *X] and y [0], which has the shapes and types of all batches."""
        return self._rows(self.y.new_zeros(0, dtype=torch.long))

    def name_of(self, client: int) -> str:
        """Return the name of a client for reports; its number if it has none."""
        return self.names[client] if self.names else str(client)

    def counting(self, unit: Unit) -> Population:
        """Return the population in which training counts this unit. Raises UserError as `Unit.check`."""
        unit.check(self.unit_ids is not None)
        return dataclasses.replace(self, unit=unit) if unit.is_group else self

    def chosen(self, key: bytes) -> Population:
        """Return the population with the rows of each unit that releases use, chosen by the secret `key`."""
        if not isinstance(unit := self.unit, Group) or self.unit_ids is None:
            return self
        ids = self.unit_ids.cpu().numpy()
        blocks, held_out = (
            [
                torch.from_numpy(unit.blocks(rows, ids[rows], key)).to(self.y.device)
                for rows in (one.cpu().numpy() for one in each)
            ]
            for each in (self.train_of, self.held_out_of)
        )
        return dataclasses.replace(self, blocks_of=blocks, held_out_blocks_of=held_out)

    def records(self, client: int, rows: Tensor) -> tuple[Inputs, Tensor]:
        """Return training records of a client: `rows` [b] index its training rows; x [b, *X] and y [b].

        If training counts units of several rows, they index these: x is a `Block`, and y [b, unit.rows].
        """
        if self.unit.is_group:
            assert self.blocks_of is not None, "`chosen` was not called"
            return self._blocks(self.blocks_of[client][rows.to(self.y.device)])
        return self._rows(self.train_of[client][rows.to(self.y.device)])

    def held_out(self, client: int) -> tuple[Inputs, Tensor]:
        """Return all held-out records of a client, or units as `records` does: x [h, *X] and y [h]; h may be 0."""
        if self.unit.is_group:
            assert self.held_out_blocks_of is not None, "`chosen` was not called"
            return self._blocks(self.held_out_blocks_of[client])
        return self._rows(self.held_out_of[client])

    def evidence(self, key: bytes) -> tuple[Evidence, ...]:
        """Return evidence of the records of each client who has some, training and held-out ones, keyed by a secret."""
        pairs = zip(self.train_of, self.held_out_of, strict=True)
        rows_of = [rows.cpu().numpy() for rows in map(torch.cat, pairs) if len(rows)]
        ids = None if self.unit_ids is None else self.unit_ids.cpu().numpy().astype(np.uint64)
        inputs = lambda rows: take(self.x, torch.from_numpy(rows).to(self.y.device))  # noqa: E731
        return self.raw.evidence(rows_of, inputs, ids, key)

    def test_records(self) -> tuple[Inputs, Tensor] | None:
        """Return the test set, x [m, *X] and y [m], or None."""
        return None if self.test is None else self._rows(self.test)

    def public_records(self) -> tuple[Inputs, Tensor]:
        """Return the records that were declared public: x [p, *X] and y [p]; p may be 0."""
        return self._rows(self.y.new_zeros(0, dtype=torch.long) if self.public is None else self.public)

    def _blocks(self, blocks: Tensor) -> tuple[Block, Tensor]:
        rows, present = blocks.where(blocks >= 0, blocks[:, :1]), blocks >= 0
        return Block.of(take(self.x, rows.flatten()), present), self.y[rows]

    def _rows(self, rows: Tensor) -> tuple[Inputs, Tensor]:
        return take(self.x, rows), self.y[rows]

    def to(self, device: torch.device | str) -> Population:
        """Return the same population on a device: records move once, and the rows of all clients together."""
        moved: dict[str, Any] = {
            name: None if (value := getattr(self, name)) is None else value.to(device)
            for name in ("y", "test", "public", "unit_ids")
        }
        moved["x"] = tree_map(lambda part: part.to(device), self.x)
        for name in ("train_of", "held_out_of"):
            rows = getattr(self, name)
            together = torch.cat([self.y.new_zeros(0, dtype=torch.long), *rows])
            moved[name] = list(together.to(device).split([len(client_rows) for client_rows in rows]))
        for name in ("blocks_of", "held_out_blocks_of"):
            blocks_of = getattr(self, name)
            moved[name] = None if blocks_of is None else [rows.to(device) for rows in blocks_of]
        return dataclasses.replace(self, **moved)

    @classmethod
    def partitioned(
        cls,
        dataset: Dataset,
        *,
        num_clients: int,
        partition: tuple[str, Mapping[str, Any]] = ("iid", {}),
        records_per_client: int | None = None,
        records_per_person: int | None = None,
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
        from dpfl_lightning.data.groups import grouped, with_wrong_labels
        from dpfl_lightning.data.partition import IID, as_classes, matching_test_rows, with_held_out
        from dpfl_lightning.data.partition import partition as divide

        must, advice = f"be null with data.held_out_per_client {held_out_per_client}", "Leave out one of the two."
        require(not (test_per_client and held_out_per_client), "data.test_per_client", must, test_per_client, advice)
        shape, rng, client_groups = dataset.input_shape, np.random.default_rng(seed), None
        if groups is not None:
            client_groups = grouped(groups[0], num_clients, shape, dataset.num_classes, **groups[1])
        name, options = partition[0], dict(partition[1])
        if records_per_client is not None:
            once = "records_per_client" not in options
            require(once, "data.records_per_client", "be given once", [records_per_client, partition[1]])
            with_share = round(records_per_client / (1 - held_out_per_client % 1))  # a share is below 1
            options["records_per_client"] = with_share + int(held_out_per_client)
        x, y, pool, test, public = dataset.stored(public_records, use_public)
        must = f"be {', '.join(IID)} if a record has several labels"
        require(y.ndim == 1 or name in IID, "data.partition.name", must, name)
        labels = as_classes(y.numpy()) if y.ndim == 1 else np.zeros(len(y), dtype=np.int64)
        kinds = max(dataset.num_classes, int(labels.max()) + 1)
        parts = [pool.start + part for part in divide(name, labels[pool], num_clients, rng, **options)]
        ids, each = None, records_per_person or 1
        if records_per_person is not None:
            once = name != "overlapping"
            require(once, "data.records_per_person", "be null if clients share records", records_per_person)
            parts = [rng.permutation(part) for part in parts]
            ids = units.in_groups(len(y), parts, each)
        train, held_out = with_held_out(parts, held_out_per_client, rng, each)
        if not held_out_per_client:
            labels_of = [labels[rows] for rows in train]
            shares = matching_test_rows(name, labels[test], labels_of, kinds, rng, test_per_client)
            held_out = [test.start + share for share in shares]
        test_rows, caveats = torch.arange(test.start, test.stop), (_SHARED,) if name == "overlapping" else ()
        rows = _tensors(train), _tensors(held_out), test_rows
        population = cls(x, y, *rows, dataset.num_classes, public, caveats, origin=dataset.origin, unit_ids=ids)
        population = population if client_groups is None else population._shifted(client_groups)
        if label_noise is None:
            return population
        kind, kind_options = label_noise
        y = with_wrong_labels(kind, population.y, population.train_of, population.num_classes, rng, **kind_options)
        return dataclasses.replace(population, y=y)

    def _shifted(self, groups: Groups) -> Population:
        from dpfl_lightning.data.groups import stored

        public = [] if self.public is None else [self.public]
        rows_of = [*self.train_of, *self.held_out_of, *public]
        before = torch.cat(rows_of)
        x, y, rows_of = stored(self.x, self.y, rows_of, [*groups.of, *groups.of, *(0 for _ in public)], groups.shift)
        ids = None
        if self.unit_ids is not None:
            ids = units.with_nobody(self.unit_ids[:0], len(y))
            ids[torch.cat(rows_of)] = self.unit_ids[before]
        train_of, held_out_of = rows_of[: self.num_clients], rows_of[self.num_clients : 2 * self.num_clients]
        shifted = dataclasses.replace(
            self, x=x, y=y, train_of=train_of, held_out_of=held_out_of, test=None, unit_ids=ids
        )
        return dataclasses.replace(shifted, public=rows_of[-1] if public else None, groups=groups.of)

    @classmethod
    def from_datasets(
        cls,
        clients: Sequence[Any] | Mapping[str, Any],
        test: Any = None,
        held_out: float = 0.2,
        seed: int = 0,
        num_classes: int | None = None,
        classes: Classes = None,
        lazy: bool = False,
        label: str | None = None,
        persons: Any = None,
        test_persons: Any = None,
    ) -> Population:
        """Create a population from your data, on the CPU. Raises a UserError that names the client if they do not fit.

        Args:
            clients: a list of the clients' records, or a mapping from the clients' names to them. The records of a
                client are a pair of tensors or arrays, x [n, *X] and y [n, ...] (integers: classes, -100 for a pixel or
                token to ignore; floating: a regression), or a map-style torch Dataset of such (x, y). x may be floating
                or whole numbers, an image of PIL (scaled to [0, 1]), a tuple of tensors (the model's arguments) or a
                dictionary (its keywords). Longer tuples end with y; dictionaries may contain y, as `labels` or so.
            test: the test set of the run in the same form, or None.
            held_out: probability in [0, 1) with which each record is held out. Each record and `seed` decide alone, so
                that equal records stay together.
            num_classes: number of classes (of labels if each is 0 or 1, of tokens in language modelling), a public
                fact that no label may decide; None for a regression.
            classes: names of the classes if labels are names, in the order of their numbers; public, as `num_classes`.
            lazy: read inputs whenever a batch is drawn, instead of keeping all in memory. All records are read once
                now. A query to a client reads all its records at once.
            label: key of y in records that are dictionaries; None takes labels, label, targets, target or y. Of other
                records, the name of y in messages.
            persons: ids of the persons, one for each record: a list or mapping of them, as `clients`, or the name of an
                attribute of each client's records. All records of a person are held out, or none. No id is kept.
            test_persons: ids of the persons of the test set, none of whom may have training records.

        **Guarantees** One raw record more or less changes the training records by at most this record. A torch Dataset
        has to return each record independently of the others, and the same one every time: up to eight records are read
        again to see this. Of a DataLoader the `collate_fn` is applied to single samples; other samplers are refused.

        >>> sizes = {"berlin": 50, "rome": 80}
        >>> hospitals = {name: (torch.randn(n, 4), torch.randint(3, (n,))) for name, n in sizes.items()}
        >>> population = Population.from_datasets(hospitals, num_classes=3)
        >>> population.num_clients, population.input_shape, population.names
        (2, (4,), ('berlin', 'rome'))
        """
        listed, advice = isinstance(clients, Sequence | Mapping) and not isinstance(clients, str), "Call list(...)."
        require(listed, "clients", "be a list or a mapping of the clients' records", type(clients).__name__, advice)
        require(len(clients) >= 1, "clients", "name at least one client's records", len(clients))
        require(0 <= held_out < 1, "held_out", "be a probability in [0, 1)", held_out)
        if classes is not None:
            fits = len(set(classes)) == len(classes) and num_classes in (None, len(classes))
            require(fits, "classes", "be different names, as many as num_classes", list(classes))
            num_classes = len(classes)
        names = tuple(map(str, clients)) if isinstance(clients, Mapping) else ()
        check_names("names", names)  # before errors name a client
        given = clients.values() if isinstance(clients, Mapping) else clients
        warn_of_batch_sizes(given)
        whose = [f"client {name}" for name in names or range(len(clients))]
        sources = [Source.of(records, where, classes, label) for where, records in zip(whose, given, strict=True)]
        sources += [] if test is None else [Source.of(test, "test", classes, label)]
        for source in sources:
            same = source.form == sources[0].form
            require(same, source.where, f"be in the form of {whose[0]}, {sources[0].form}", str(source.form))
            source.check_constant()
        if lazy:
            xs, ys, draws_of, digests, cells = zip(*(scanned(source, seed) for source in sources), strict=True)
        else:
            xs, ys = zip(*(source.read() for source in sources), strict=True)
        pairs = [(source.where, x, y) for source, x, y in zip(sources, xs, ys, strict=True)]
        num_classes = check_same_form(pairs, num_classes, sources[0].label)
        parts = [part for x in xs for part in tree_leaves(x) if part.is_floating_point() and part.numel()]
        if any(float(part.square().mean()) > _LARGE**2 for part in parts):
            warn_user(
                f"inputs have numbers above {_LARGE:,}: divide them by a public constant, so that they are near 1"
            )
        x, y, raw = joined(xs), torch.cat(ys), RawRows()
        ends = np.cumsum([len(labels) for labels in ys])[: len(clients)]
        if lazy:
            x, draws = LazyInputs(sources, x, torch.from_numpy(np.concatenate(digests))), np.concatenate(draws_of)
            raw = RawRows(np.concatenate(cells))
        elif held_out:
            draws = coins(take(x, slice(ends[-1])), y[: ends[-1]], seed)
        ids = None
        if persons is not None:
            ids = units.ids_of_clients(persons, clients, list(map(len, ys[: len(clients)])), names)
            draws = units.coins([one for part in ids for one in part], seed)
        is_held_out = draws < round(held_out * 2**64) if held_out else np.zeros(ends[-1], dtype=bool)
        train, held_out_rows = [], []
        for source, rows in zip(sources, np.split(np.arange(ends[-1]), ends[:-1]), strict=False):
            train.append(rows[~is_held_out[rows]])
            held_out_rows.append(rows[is_held_out[rows]])
            must = f"leave a training record of the {len(rows)} of {source.where}"
            require(len(train[-1]) > 0, "held_out", must, held_out, "Hold out less, or change the seed.")
        constant = [whose[client] for client, rows in enumerate(train) if _is_constant(y[rows])]
        if constant:  # a private fact, for the owner of the records: the server is not told
            more = f" and {len(constant) - 8} more" if len(constant) > 8 else ""
            told = "all training records have the same label, so that nothing can be learnt there"
            warn_user(f"{', '.join(constant[:8])}{more}: {told}")
        test_rows = None if test is None else torch.arange(ends[-1], len(y))
        rows_of = _tensors(train), _tensors(held_out_rows), test_rows
        schema = {"classes": [] if classes is None else list(map(str, classes))}
        population = cls(x, y, *rows_of, num_classes, names=names, form=sources[0].form, schema=schema, raw=raw)
        if ids is None:
            return population
        if test is not None:
            of_test = units.attribute(test, persons) if isinstance(persons, str) else test_persons
            of_test = None if of_test is None else ids_of(of_test, len(ys[-1]), "test_persons")
            units.check_test_ids(of_test, ids, is_held_out)
        codes = units.with_nobody(torch.cat([units.codes(one) for one in ids]), len(y))
        numbers = numbers_of_ids([one for part in ids for one in part])
        raw = dataclasses.replace(raw, id_numbers=np.pad(numbers, (0, len(y) - len(numbers))))
        return dataclasses.replace(population, unit_ids=codes, schema={**schema, ID_KEY: True}, raw=raw)

    @classmethod
    def from_dataframe(
        cls,
        df: Any,
        *,
        client: str | None = None,
        person: str | None = None,
        label: str | Sequence[str],
        features: Sequence[str] | None = None,
        drop: Sequence[str] = (),
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        replace: Mapping[str, Mapping[Any, Any]] | None = None,
        rename: Mapping[str, str] | None = None,
        test: Any = None,
        held_out: float = 0.2,
        classes: Classes = None,
        **options: Any,
    ) -> Population:
        """Create a population from tables with one row for each record. Raises a UserError that names the column.

        Clients are in the order of their names. Constants must be public: one computed from the records, such as their
        mean, would reveal them, so nothing is normalised unless a `scale` says by what.

        Args:
            df: a pandas DataFrame, or the path of a CSV or Parquet file, with the rows of all clients; a table for each
                client, as a folder with CLIENT.csv or a mapping {client: table}. A table may also be {file, read,
                replace, rename}.
            client: name of the column with each record's client; None if all records of a table are of one client.
            person: name of the column with the id of each record's person, which is no input; see `persons` of
                `from_datasets`. If the test table has it, too, no person may be in both. "none": each row is another
                person, although a column looks like ids that repeat.
            label: name of the column with the labels: classes, or floating values (a regression); or of several
                columns, of 0 and 1 (multilabel) or floating.
            features: names of the input columns, in the order of the inputs; None takes all others, by name.
            drop: names of columns that are no inputs.
            columns: what is public of columns, {"age": {"scale": (50, 20), "unit": "years"}, "sex": {"categories":
                ["f", "m"]}}, see `Column`. Numbers without an entry become inputs as they are.
            read: sep, decimal, thousands, encoding, na_values, keep_default_na, skiprows, skipfooter of CSV files as in
                `pandas.read_csv`, and date_format, for all columns or by column. Columns without a name are left out.
            replace: {column: {value: other}}, where a table writes something else for a class or category.
            rename: {column: other name}, where a table calls a column something else; before `replace`.
            test: the test set in the same form, whose column `client` is ignored, or None.
            held_out, classes: as in `from_datasets`; `classes` also names the classes of labels that are no text.
            options: seed, num_classes, as in `from_datasets`.

        >>> import pandas
        >>> df = pandas.DataFrame({"hospital": ["rome", "berlin"] * 20, "age": range(40), "ill": [False, True] * 20})
        >>> Population.from_dataframe(
        ...     df, client="hospital", label="ill", columns={"age": {"scale": (50, 20)}}, num_classes=2
        ... ).feature_names
        ('age (scaled)',)
        """
        of_datasets = [*inspect.signature(cls.from_datasets).parameters][2:]  # without the records
        known = [*inspect.signature(cls.from_dataframe).parameters, *of_datasets]
        unknown = next((name for name in options if name not in known), None)
        must = "be arguments of from_dataframe; scale, categories and others of a column are in columns"
        require(unknown is None, "options", must, unknown, nearest(str(unknown), known))
        require_filled(label, classes, columns)
        usual: dict[str, Any] = {"read": read or {}, "replace": replace or {}, "rename": rename or {}}
        stated, person = person is not None, None if person == NO_IDS else person
        public = Columns.given(label, features, drop, columns or {}, person)
        usual["texts"] = [one for one in (client, person, *public.dates) if isinstance(one, str)]
        given = tables_of(df, **usual)
        one = given.get("")
        must = "be left out if each client has a table"
        require(one is not None or client is None, "client", must, client)
        public = public.of(given, client)
        for table in given.values() if not stated else ():
            require_ids_stated(table.frame, table.key)
        tables = given if one is None else by_client(one, client)
        parts = [public.records(table) for table in tables.values()]
        named = one is None or client is not None
        records = dict(zip(tables, parts, strict=True)) if named else parts
        test = None if test is None else table_of(test, "test", **usual)
        tested = None if test is None else public.records(test)
        inputs = {table.key: part[0] for table, part in zip(tables.values(), parts, strict=True)}
        warn_of_equal_tables(inputs if tested is None else {**inputs, "test": tested[0]})
        if person is not None:
            ids = [units.ids_in(table, person) for table in tables.values()]
            options["persons"] = dict(zip(tables, ids, strict=True)) if named else ids
            options["test_persons"] = None if test is None or person not in test.frame else units.ids_in(test, person)
        options["label"] = ", ".join(public.labels)
        population = cls.from_datasets(records, tested, held_out=held_out, classes=classes, **options)
        schema = {**population.schema, **public.schema()}
        raw = dataclasses.replace(population.raw, cells=cells_of([*tables.values(), *([] if test is None else [test])]))
        return dataclasses.replace(population, features=public.features_facts(), schema=schema, raw=raw)

    @classmethod
    def from_datamodule(cls, datamodule: Any, *, client: Any = None, person: Any = None, **options: Any) -> Population:
        """Create a population from the data sets of a LightningDataModule.

        `prepare_data`, `setup("fit")` and `train_dataloader` are called. Loaders are used as in `from_datasets`, and
        their batch size is ignored (with a warning if it is not the usual one), because batches are drawn by Poisson
        sampling. The test set is that of `test_dataloader` (after `setup("test")`), else of `val_dataloader`.

        Args:
            datamodule: its `train_dataloader` returns one loader for each client, in a list, a dictionary by the
                clients' names or a CombinedLoader; or one loader for all.
            client: for one loader: the client of each record, [n] names or numbers, or the name of an attribute of the
                training set or of the datamodule that holds them.
            person: the person of each record, [n] ids or the name of an attribute, as `client`; with several loaders
                `persons` of `from_datasets`.
            options: held_out, seed, num_classes, classes, lazy, as in `from_datasets`.
        """
        train, test, persons = datasets_of(datamodule, client, person)
        if isinstance(person, str) and test is not None:
            options.setdefault("test_persons", units.attribute(test, person))
        return cls.from_datasets(train, test, persons=persons, **options)

    @classmethod
    def from_image_folder(
        cls,
        path: str | Path,
        *,
        classes: Sequence[str] | None = None,
        size: Sequence[int] | None = None,
        channels: int = 3,
        lazy: bool = True,
        person: str | None = None,
        **options: Any,
    ) -> Population:
        """Create a population from images in PATH/CLIENT/CLASS/*.png (or jpg), and PATH/test/CLASS/*.png as test set.

        Args:
            path: folder with one folder for each client.
            classes: names of the classes, a public fact; None takes the folders, which all clients must then have.
            size: (height, width) to which images are resized; None: all images have one size.
            channels: 3 (RGB) or 1 (grey). Inputs [channels, height, width] are in [0, 1].
            lazy: read images when a batch is drawn, instead of keeping all in memory.
            person: the sign after the id of a person at the start of each file's name, as "_" in P17_2.png.
            options: held_out, seed, as in `from_datasets`.
        """
        clients, test, num_classes = image_folders(path, classes, size, channels)
        if person is not None:
            options["persons"] = {name: images.ids(person) for name, images in clients.items()}
            options["test_persons"] = None if test is None else test.ids(person)
        return cls.from_datasets(clients, test, num_classes=num_classes, lazy=lazy, **options)


def _is_constant(y: Tensor) -> bool:
    """Whether several records have one class."""
    return y.ndim == 1 and len(y) > 1 and not y.is_floating_point() and bool((y == y[0]).all())


def _tensors(parts: Parts) -> list[Tensor]:
    return [torch.from_numpy(part.astype(np.int64)) for part in parts]
