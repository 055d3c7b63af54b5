"""Groups with shifted data: each client has the records of its group, stored once; and wrong labels."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpfl_lightning.data import Dataset, Population, load
from dpfl_lightning.data.groups import GROUPS, grouped, renamed, turned, with_wrong_labels
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.evaluation import evaluate
from dpfl_lightning.federated.client.identity import data_digests
from dpfl_lightning.federated.client.local_clients import facts_of
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.evaluation import ClientModels
from dpfl_lightning.privacy.noise import Streams

CLASSES = 5
SIZES = {"sizes": [1, 2, 2, 2]}
ROTATION, LABEL_SHIFT = ("rotation", SIZES), ("label_shift", SIZES)
GROUP_OF = (0, 1, 1, 2, 2, 3, 3)


def dataset(records: int = 420, test: int = 105) -> Dataset:
    """2 x 2 images, no two turns of them equal, whose first pixel is the record's number; test records from 10,000."""

    def images(numbers: torch.Tensor) -> torch.Tensor:
        return torch.stack([numbers, *(torch.full_like(numbers, -one) for one in (1, 2, 3))], dim=1).view(-1, 1, 2, 2)

    number, test_number = torch.arange(records), 10_000 + torch.arange(test)
    images_of = images(number.float()), images(test_number.float())
    return Dataset("numbers", images_of[0], number % CLASSES, images_of[1], test_number % CLASSES, CLASSES)


def made(groups=None, **options) -> Population:
    return Population.partitioned(dataset(), num_clients=7, groups=groups, **options)


def train(population: Population, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    return population.records(client, torch.arange(population.num_records[client]))


@pytest.mark.e2e
@settings(deadline=None)
@given(side=st.integers(1, 5), group=st.integers(0, 3), seed=st.integers(0, 2**32))
def test_four_quarter_turns_are_the_identity_and_one_is_counter_clockwise(side, group, seed):
    x, y = torch.randn(3, 2, side, side, generator=torch.Generator().manual_seed(seed)), torch.arange(3)
    image = x
    for _ in range(group):  # the top row is what was the right column
        corner = torch.arange(side)
        image = image[..., corner[None, :], side - 1 - corner[:, None]]
    assert torch.equal(turned(x, y, group)[0], image) and torch.equal(turned(x, y, group)[1], y)
    assert torch.equal(turned(turned(x, y, group)[0], y, 4 - group)[0], x)


@given(num_classes=st.integers(2, 100), group=st.integers(0, 99))
def test_renamed_labels_are_a_bijection_that_only_group_0_leaves_alone(num_classes, group):
    group %= num_classes
    y = torch.arange(num_classes)
    assert sorted(renamed(y, group, num_classes).tolist()) == y.tolist()
    assert bool((renamed(y, group, num_classes) == y).any()) == (group == 0)


@pytest.mark.e2e
@given(num_clients=st.integers(1, 100), count=st.integers(1, 9))
def test_a_count_alone_gives_sizes_as_equal_as_possible_in_order(num_clients, count):
    count = min(count, num_clients)
    of = grouped("label_shift", num_clients, (3,), 9, count=count).of
    sizes = np.bincount(of, minlength=count)
    assert list(of) == sorted(of) and len(of) == num_clients and len(sizes) == count
    assert list(sizes) == sorted(sizes) and sizes.max() - sizes.min() <= 1
    assert grouped("rotation", 9, (1, 2, 2), 10, sizes=[1, 3, 5]).of == (0,) * 1 + (1,) * 3 + (2,) * 5


PARTITIONS = {
    "iid": {},
    "stratified": {},
    "dirichlet": {"alpha": 0.5, "min_records": 10},
    "shards": {"max_classes": 2},
    "sizes": {"sizes": [4, 8, 12, 16, 12, 8, 4]},
    "overlapping": {"records_per_client": 50},
}
EVALUATED = ({}, {"held_out_per_client": 3}, {"held_out_per_client": 0.2}, {"test_per_client": 5})
PUBLIC = ({}, {"public_records": 210}, {"public_records": 210, "use_public": True})


@pytest.mark.e2e
@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(list(PARTITIONS)),
    kind=st.sampled_from([ROTATION, LABEL_SHIFT]),
    evaluated=st.sampled_from(EVALUATED),
    public=st.sampled_from(PUBLIC),
    seed=st.integers(0, 1000),
)
def test_every_client_has_the_records_of_a_run_without_groups_shifted_as_its_group(name, kind, evaluated, public, seed):
    options = {"partition": (name, PARTITIONS[name]), "seed": seed, **evaluated, **public}
    plain, population = made(**options), made(kind, **options)
    used = set()  # (group, record) as told by the plain run
    for client, group in enumerate(GROUP_OF):
        for part, rows in ((train, plain.train_of), (lambda who, client: who.held_out(client), plain.held_out_of)):
            (x, y), (new_x, new_y) = part(plain, client), part(population, client)
            if kind == ROTATION:
                assert torch.equal(new_x, turned(x, y, group)[0]) and torch.equal(new_y, y)
            else:
                assert torch.equal(new_x, x) and torch.equal(new_y, renamed(y, group, CLASSES))
            used |= {(group, row) for row in rows[client].tolist()}
        assert not set(population.train_of[client].tolist()) & set(population.held_out_of[client].tolist())
    for ours, theirs in zip(population.public_records(), plain.public_records(), strict=True):
        assert torch.equal(ours, theirs)  # belong to nobody, and are shifted for nobody
    used |= {(0, row) for row in ([] if plain.public is None else plain.public.tolist())}
    assert len(population.x) == len(population.y) == len(used), "a copy for each group that uses a record, no other"
    assert population.groups == population.to("meta").groups == GROUP_OF and plain.groups is None
    assert facts_of(population).truth == {"groups": GROUP_OF} and facts_of(plain).truth is None
    assert population.caveats == plain.caveats and (len(plain.caveats) == 1) == (name == "overlapping")


def test_there_is_no_common_test_set_and_each_client_is_tested_as_its_group():
    data = dataset()
    data = Dataset("zeros", data.x, data.y * 0, data.test_x, data.test_y * 0, CLASSES)
    population = Population.partitioned(data, num_clients=7, groups=LABEL_SHIFT)
    assert population.test_records() is None
    module, engine = ClientModule(nn.Sequential(nn.Flatten(), nn.Linear(4, CLASSES))), SerialEngine()
    engine.setup(module, HeldClients(population), Streams(), "poisson")
    models = torch.zeros(CLASSES, 5 * CLASSES)
    models[:, -CLASSES:] = torch.eye(CLASSES)  # model k says class k, whatever comes
    right = evaluate(module, population, ClientModels(models, GROUP_OF), engine)
    assert {one.accuracy for one in right.clients} == {1.0} and right.test.accuracy == 1.0
    first = evaluate(module, population, ClientModels(models, (0,) * 7), engine)
    assert [one.accuracy for one in first.clients] == [1.0] + [0.0] * 6
    assert first.test.accuracy == pytest.approx(1 / 7)  # the mean over clients


def test_other_groups_are_other_data_to_a_resumed_run():
    def digest(population):
        return tuple(data_digests(HeldClients(population), b"key"))

    kinds = [None, *((name, sizes) for name in GROUPS for sizes in ({"count": 2}, {"count": 3}, SIZES))]
    assert len({digest(made(kind)) for kind in kinds}) == len(kinds)
    assert digest(made(ROTATION)) == digest(made(ROTATION))


@pytest.mark.parametrize(
    "kind, message",
    [
        (("rotatoin", {"count": 2}), "`data.groups.name` must be one of .*Did you mean `rotation`"),
        (("rotation", {"size": [7]}), r"`data.groups.size` must be an option of rotation \(sizes, count\).*`sizes`\?"),
        (("rotation", {}), "`data.groups.sizes` must be given, or else data.groups.count.*Give sizes:"),
        (("rotation", {"count": 2, "sizes": [3, 4]}), "or else data.groups.count, not both"),
        (("rotation", {"count": 5}), "`data.groups.count` must be from 1 to 4: there are 4 quarter turns.*got 5"),
        (("label_shift", {"count": 6}), "from 1 to 5: there are 5 classes, 7 clients, got 6"),
        (("rotation", {"sizes": [1, 1, 1, 2, 2]}), r"have from 1 to 4 sizes, one a group.*got \[1, 1, 1, 2, 2\]"),
        (("rotation", {"sizes": [8, -1]}), "`data.groups.sizes` must be at least 1 each"),
        (("rotation", {"sizes": [3, 6]}), r"have the sum 7, clients.count, got \[3, 6\]. It is 9."),
    ],
)
def test_wrong_groups_are_named(kind, message):
    with pytest.raises(UserError, match=message):
        made(kind)


def test_data_that_cannot_be_shifted_is_named():
    data = dataset()
    flat = Dataset("flat", data.x.flatten(1), data.y, data.test_x.flatten(1), data.test_y, CLASSES)
    wide = Dataset("wide", data.x[..., :1], data.y, data.test_x[..., :1], data.test_y, CLASSES)
    regression = Dataset("regression", data.x, data.y.float(), data.test_x, data.test_y.float(), 1)
    for records, name, message in [
        (flat, "rotation", r"must be label_shift if records are not square images but have shape \(4,\)"),
        (wide, "rotation", r"not square images but have shape \(1, 2, 1\), got 'rotation'"),
        (regression, "label_shift", "`data.groups.name` must be rotation if there are no classes to rename"),
    ]:
        with pytest.raises(UserError, match=message):
            Population.partitioned(records, num_clients=2, groups=(name, {"count": 2}))
    turned_targets = Population.partitioned(regression, num_clients=2, groups=("rotation", {"count": 2}))
    assert turned_targets.y.dtype == torch.float32


@pytest.mark.parametrize("kind", [None, ROTATION])
def test_test_records_that_clients_draw_are_their_own_choice(kind):
    population, plain = made(kind, test_per_client=60), made(test_per_client=60)
    assert [len(set(rows.tolist())) for rows in population.held_out_of] == [60] * 7
    drawn = [set(rows.tolist()) for rows in plain.held_out_of]
    assert len(set.union(*drawn)) <= 105 < sum(map(len, drawn)) and drawn[0] != drawn[1]
    assert min(set.union(*drawn)) >= 420 and len(plain.test) == 105
    # nobody's training records depend on it
    assert all(torch.equal(*pair) for pair in zip(plain.train_of, made().train_of, strict=True))


def test_wrong_draws_are_named():
    one_class = ("shards", {"max_classes": 1})
    with_held_out = "must be null with data.held_out_per_client 2, got 5. Leave out one of the two"
    for options, message in [
        ({"test_per_client": 106}, "must be at most 105, the test records .* of client 0, got 106"),
        ({"test_per_client": 5, "held_out_per_client": 2}, with_held_out),
        ({"test_per_client": 80, "partition": one_class}, "at most 21, the test records with classes like those of"),
    ]:
        with pytest.raises(UserError, match=f"`data.test_per_client` .*{message}"):
            made(**options)


def digits(**changed) -> Population:
    options = {"num_clients": 5, "public_records": 100, "held_out_per_client": 20, **changed}
    return Population.partitioned(load("digits"), **options)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_each_clients_records(share):
    right, wrong = digits(), digits(label_noise=("records", {"share": share}))
    for rows, others in zip(right.train_of, wrong.train_of, strict=True):
        assert torch.equal(rows, others)
        changed = right.y[rows] != wrong.y[rows]
        assert int(changed.sum()) == int(share * len(rows) + 0.5)
        assert torch.equal(wrong.y[rows][changed], (right.y[rows][changed] + 1) % 10)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.4, 2), (0.5, 3), (1.0, 5)])
def test_a_share_of_the_clients(share, count):
    right, wrong = digits(), digits(label_noise=("clients", {"share": share}))
    changed = [(right.y[rows] != wrong.y[rows]).float().mean().item() for rows in right.train_of]
    assert sorted(changed) == [0.0] * (5 - count) + [1.0] * count


def test_labels_follow_from_the_seed_and_what_scores_a_model_keeps_its_own():
    right, wrong = digits(), digits(label_noise=("records", {"share": 1.0}))
    for rows in (right.test, right.public, *right.held_out_of):
        assert torch.equal(right.y[rows], wrong.y[rows])
    same, again, other = (digits(label_noise=("records", {"share": 0.5}), seed=seed).y for seed in (0, 0, 1))
    assert torch.equal(same, again) and not torch.equal(same, other)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"label_noise": ("records", {"share": 1.5})}, "`data.label_noise.share` must be a number in .0, 1., got 1.5"),
        ({"label_noise": ("record", {"share": 0.5})}, "Did you mean `records`"),
        (
            {"label_noise": ("records", {"share": 0.5}), "partition": ("overlapping", {}), "records_per_client": 500},
            "clients share records",
        ),
    ],
)
def test_a_mistake_is_named(changed, words):
    with pytest.raises(UserError, match=words):
        digits(**changed)


def test_a_regression_has_no_classes_to_mistake():
    with pytest.raises(UserError, match="no classes"):
        with_wrong_labels("records", torch.zeros(4), [torch.arange(4)], 1, np.random.default_rng(0), share=0.5)
