"""Partitions: functions `(labels [n], num_clients, rng, **options) -> one array of indices into labels per client`."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval

from dpfl_lightning.config.registry import call
from dpfl_lightning.data import unit_ids
from dpfl_lightning.errors import UserError, require

Parts = list[np.ndarray]

#: partitions in which clients have the same distribution: any random part of a test set matches their records
IID = ("iid", "sizes", "overlapping")


def partition(name: str, labels: np.ndarray, num_clients: int, rng: np.random.Generator, /, **options: Any) -> Parts:
    """Divide records among clients by the partition called `name`, a key of `PARTITIONS`; no client gets none.

    It reads labels, and is outside any guarantee. All but `overlapping` give every record to at most one client. The
    option `records_per_client` (not for `sizes`) first draws as many records as all clients need; it is the exact size
    in equal parts, otherwise the mean.

    >>> labels, rng = np.zeros(10), np.random.default_rng(0)
    >>> [part.size for part in partition("iid", labels, 3, rng)]
    [4, 3, 3]
    >>> [part.size for part in partition("iid", labels, 3, rng, records_per_client=2)]
    [2, 2, 2]
    """
    if name in ("overlapping", "sizes") or "records_per_client" not in options:
        chosen = np.arange(len(labels))
    else:
        each, most = options.pop("records_per_client"), len(labels) // max(num_clients, 1)
        must = f"be a whole number from 1 to {most}: {num_clients} clients share {len(labels)} records"
        advice = "The partition `overlapping` lets clients share records."
        require(isinstance(each, int) and 1 <= each <= most, "data.records_per_client", must, each, advice)
        chosen = rng.permutation(len(labels))[: num_clients * each]
    enough = 1 <= num_clients <= len(chosen) or (name == "overlapping" and num_clients >= 1)
    require(enough, "num_clients", f"be from 1 to the number of records, {len(chosen)}", num_clients)
    parts = call("data.partition", PARTITIONS, name, labels[chosen], num_clients, rng, **options)
    return [chosen[part] for part in parts]


def iid(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
    """Random equal parts; sizes differ by at most one."""
    return np.array_split(rng.permutation(len(labels)), num_clients)


def stratified(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
    """Equal parts with equal shares of every class: records are sorted by class and assigned to clients in turn.

    Sizes differ by at most one, and so do the clients' counts of any class.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return [order[client::num_clients] for client in range(num_clients)]


def dirichlet(
    labels: np.ndarray,
    num_clients: int,
    rng: np.random.Generator,
    alpha: Annotated[float, Interval(gt=0, lt=np.inf)] = 1.0,
    min_records: int = 128,
    max_draws: int = 10_000,
) -> Parts:
    """Cut every class in proportions drawn from Dir(alpha, ..., alpha) over the clients.

    The draw is repeated until every client has `min_records`, so that no batch size exceeds a client's records.

    Args:
        alpha: concentration; with a smaller value a client has fewer classes.
        min_records: smallest number of records of a client, >= 1.
        max_draws: largest number of draws.

    Reference: class-wise as in the public code of the papers, which state no minimum.
    """
    mean = len(labels) // num_clients
    must = f"be from 1 to {mean}, the mean number of records of a client"
    require(1 <= min_records <= mean, "data.partition.min_records", must, min_records)
    classes, sizes = np.unique(labels, return_counts=True)
    for _ in range(max_draws):
        shares = rng.dirichlet(np.full(num_clients, alpha), size=len(classes))
        # the last end is set, not rounded, so that every record belongs to a client
        ends = np.floor(np.cumsum(shares, axis=1) * sizes[:, None] + 1e-9).astype(int)
        ends[:, -1] = sizes
        if np.diff(ends, axis=1, prepend=0).sum(axis=0).min() >= min_records:
            break
    else:
        raise UserError(
            f"`data.partition.min_records` must be reachable, got {min_records}: in none of {max_draws} draws at "
            f"alpha {alpha} did each of {num_clients} clients get that many records. Lower it, or raise alpha."
        )
    pieces = [np.split(_shuffled(labels, label, rng), cuts) for label, cuts in zip(classes, ends[:, :-1], strict=True)]
    return [np.concatenate(part) for part in zip(*pieces, strict=True)]


def shards(labels: np.ndarray, num_clients: int, rng: np.random.Generator, max_classes: int = 8) -> Parts:
    """Each client gets `max_classes` random shards of one class each, and so has at most that many classes.

    Unlike in the papers' code, no shard contains two classes.

    Args:
        max_classes: number of shards of a client; large enough that every class has a shard, and small enough that
            every shard has a record.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    total = num_clients * max_classes
    must = f"give every one of {len(classes)} classes a shard among {num_clients} clients"
    require(max_classes >= 1 and total >= len(classes), "data.partition.max_classes", must, max_classes)
    shards_of = [len(part) for part in np.array_split(np.arange(total), len(classes))]
    must = f"leave a record for each of {total} shards, the smallest class having {sizes.min()}"
    require(bool(np.all(sizes >= shards_of)), "data.partition.max_classes", must, max_classes)
    pieces = [
        piece
        for label, count in zip(classes, shards_of, strict=True)
        for piece in np.array_split(_shuffled(labels, label, rng), count)
    ]
    hands = rng.permutation(total).reshape(num_clients, max_classes)
    return [np.concatenate([pieces[shard] for shard in hand]) for hand in hands]


def sizes(labels: np.ndarray, num_clients: int, rng: np.random.Generator, sizes: Sequence[int]) -> Parts:
    """Random parts of the given sizes; records beyond their sum belong to no client."""
    key = "data.partition.sizes"
    require(len(sizes) == num_clients, key, f"have one size for each of {num_clients} clients", len(sizes))
    require(min(sizes) >= 1, key, "be at least 1 each", min(sizes))
    require(sum(sizes) <= len(labels), key, f"sum to at most the {len(labels)} records", sum(sizes))
    return np.split(rng.permutation(len(labels)), np.cumsum(sizes))[:num_clients]


def overlapping(labels: np.ndarray, num_clients: int, rng: np.random.Generator, records_per_client: int) -> Parts:
    """Each client draws records from all of them, without repetition.

    It is for simulations of more clients than there are records for. A record may be at several clients; the guarantee
    of a client then covers only that client's releases, which `Population.caveats` states.
    """
    must = f"be from 1 to the {len(labels)} records"
    require(1 <= records_per_client <= len(labels), "data.records_per_client", must, records_per_client)
    return [rng.choice(len(labels), records_per_client, replace=False) for _ in range(num_clients)]


PARTITIONS: dict[str, Callable[..., Parts]] = {
    "iid": iid,
    "stratified": stratified,
    "dirichlet": dirichlet,
    "shards": shards,
    "sizes": sizes,
    "overlapping": overlapping,
}


def as_classes(targets: np.ndarray, bins: int = 10) -> np.ndarray:
    """Return the classes that partitions use: labels unchanged, targets of a regression as `bins` equal classes.

    The bins depend on all clients' targets: like the division itself they are outside any guarantee.

    >>> as_classes(np.array([5.0, 1.0, 3.0, 9.0]), bins=2).tolist(), as_classes(np.array([2, 7])).tolist()
    ([1, 0, 0, 1], [2, 7])
    """
    if np.issubdtype(targets.dtype, np.integer):
        return targets
    return np.argsort(np.argsort(targets, kind="stable"), kind="stable") * bins // len(targets)


def with_held_out(rows_of: Parts, held_out: int | float, rng: np.random.Generator, each: int) -> tuple[Parts, Parts]:
    """Split each client's rows at random into training and held-out rows: a count, or a share of its records.

    Rows of one unit, `each` that follow each other, stay together.
    """
    train, held_out_rows = [], []
    for client, rows in enumerate(rows_of):
        count = int(held_out) if held_out >= 1 else round(held_out * len(rows))
        must = f"leave a training record of the {len(rows)} of client {client}"
        parts = unit_ids.cut(rows, count, rng, each)
        advice = "Hold out less, or have fewer clients."
        require(count < len(rows) and len(parts[0]) > 0, "data.held_out_per_client", must, held_out, advice)
        train.append(parts[0])
        held_out_rows.append(parts[1])
    return train, held_out_rows


def matching_test_rows(
    name: str, test_labels: np.ndarray, labels_of: Parts, num_classes: int, rng: np.random.Generator, each: int | None
) -> Parts:
    """Return test rows for each client that match its records: a disjoint share, or `each` rows drawn independently."""

    def shares(labels_of: Parts) -> Parts:
        if name in IID:
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


def matched_shares(test_labels: np.ndarray, class_counts: np.ndarray, rng: np.random.Generator) -> Parts:
    """Return disjoint shares of a test set in which client i has classes in the proportions of `class_counts[i]`.

    `class_counts` `[num_clients, num_classes]` are training records. One rate (test records per training record) holds
    for all: the largest for which no class runs out. Counts are rounded at random (systematic sampling).
    """
    num_clients, num_classes = class_counts.shape
    needed, available = class_counts.sum(axis=0), np.bincount(test_labels, minlength=num_classes)[:num_classes]
    both = (needed > 0) & (available > 0)
    if not both.any():
        return [np.empty(0, dtype=np.int64) for _ in range(num_clients)]
    rate = (available[both] / needed[both]).min()
    pieces = []
    for label in np.flatnonzero(both):
        ends = np.floor(rate * np.cumsum(class_counts[:, label]) + rng.uniform()).astype(int)
        pieces.append(np.split(_shuffled(test_labels, label, rng), ends)[:num_clients])
    return [np.concatenate(share) for share in zip(*pieces, strict=True)]


def _shuffled(labels: np.ndarray, label: np.integer, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(np.flatnonzero(labels == label))
