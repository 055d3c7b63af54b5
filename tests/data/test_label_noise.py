"""Wrong labels: of so many records or clients, the same way everywhere, and never of what scores a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpfl_lightning.data import Population, load
from dpfl_lightning.errors import UserError


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


def test_what_scores_a_model_keeps_its_labels():
    right, wrong = digits(), digits(label_noise=("records", {"share": 1.0}))
    for rows in (right.test, right.public, *right.held_out_of):
        assert torch.equal(right.y[rows], wrong.y[rows])


def test_it_follows_from_the_seed():
    same, again, other = (digits(label_noise=("records", {"share": 0.5}), seed=seed).y for seed in (0, 0, 1))
    assert torch.equal(same, again) and not torch.equal(same, other)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"label_noise": ("records", {"share": 1.5})}, "`data.label_noise.share` must be in .0, 1., got 1.5"),
        ({"label_noise": ("record", {"share": 0.5})}, "Did you mean `records`"),
        ({"label_noise": ("records", {"part": 0.5})}, "part"),
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
    from dpfl_lightning.data.groups import with_wrong_labels

    with pytest.raises(UserError, match="no classes"):
        with_wrong_labels("records", torch.zeros(4), [torch.arange(4)], 1, np.random.default_rng(0), share=0.5)
