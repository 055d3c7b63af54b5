"""Updates of full batches: long ones are limited."""

import dataclasses

import torch

from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.papers.clustered.first_round import limited


def test_first_updates_are_at_most_twice_as_long_as_the_median_one():
    deltas = torch.ones(6, 4)
    deltas[4:] *= 1000
    plain = ClientUpdates(tuple(range(6)), (1,) * 6, (1.0,) * 6, deltas)
    assert limited(plain).released[:, 0].tolist() == [1, 1, 1, 1, 2, 2]
    assert torch.equal(limited(dataclasses.replace(plain, deltas=deltas[:4])).released, deltas[:4])
