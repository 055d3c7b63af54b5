"""Updates of full batches: impossible ones are left out, and long ones are limited."""

import contextlib
import dataclasses

import pytest
import torch
from conftest import blobs, private

from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.errors import UserNotice
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted
from dpfl_lightning.strategies.clustering.clustered import Clustered
from dpfl_lightning.strategies.clustering.first_round import limited, without_impossible

COUNT = 9


def first_updates(make_loop, num_params=20_000):
    """A view, and the updates of nine full batches whose signals are 0.4 clip norms long, in one direction."""
    loop = make_loop(
        parts=[SizeWeighted(), Clustered()],
        population=blobs(COUNT, 200),
        privacy=private(),
        clients=ClientOptions(count=COUNT, batch_size=40, learning_rate=0.5),
    )
    loop.plan_schedule()
    view = loop.view(ServerState(torch.zeros(1, num_params), (0,) * COUNT))
    std = 0.002
    deltas = std * torch.randn(COUNT, num_params, generator=torch.Generator().manual_seed(0))
    deltas[:, 0] += 0.2
    announced = ClientUpdates.announced(view.plan())
    return dataclasses.replace(announced, steps=(1,) * COUNT, noise_std=(std,) * COUNT, deltas=deltas), view


@pytest.mark.parametrize(
    "change, left",
    [
        (lambda deltas: deltas, []),
        (lambda deltas: deltas[4].zero_(), [4]),
        (lambda deltas: deltas[4].mul_(0.3), [4]),
        (lambda deltas: deltas[4].mul_(20), [4]),
        (lambda deltas: deltas[4].copy_(deltas[1]), [4]),
        (lambda deltas: deltas[2:5].copy_(deltas[1].clone()), [2, 3, 4]),
        (lambda deltas: deltas[4].copy_(-deltas[1]), [4]),
        (lambda deltas: deltas[1].copy_(-deltas[4]), [1]),
        (lambda deltas: deltas[4].neg_(), []),
        (lambda deltas: deltas[4].zero_()[:1].fill_(0.3), [4]),
        (lambda deltas: (deltas[1:5:3, 1].add_(0.3), deltas[1].zero_()[:2].copy_(torch.tensor([0.25, 0.35]))), [1]),
    ],
    ids=[
        "honest",
        "zero",
        "short",
        "long",
        "copy",
        "copies",
        "opposite",
        "first opposite",
        "own opposite",
        "bare",
        "two",
    ],
)
def test_first_updates_that_clipping_and_noise_rule_out(change, left, make_loop):
    updates, view = first_updates(make_loop)
    change(updates.deltas)
    with contextlib.nullcontext() if not left else pytest.warns(UserNotice, match="left out of the search for groups"):
        kept = without_impossible(updates, view)
    assert [client for client in range(COUNT) if client not in kept.clients] == left


def test_first_updates_are_at_most_twice_as_long_as_the_median_one():
    deltas = torch.ones(6, 4)
    deltas[4:] *= 1000
    plain = ClientUpdates(tuple(range(6)), (1,) * 6, (1.0,) * 6, deltas)
    assert limited(plain).released[:, 0].tolist() == [1, 1, 1, 1, 2, 2]
    assert torch.equal(limited(dataclasses.replace(plain, deltas=deltas[:4])).released, deltas[:4])
