"""Nets that a server trains on a set: seeded, by plain SGD."""

from __future__ import annotations

import torch
from conftest import small_net
from torch import nn
from torch.nn import functional as F

from dpfl_lightning.algorithms.server_training import (
    Training,
    public_generator,
    torch_seed,
    trained_on,
)
from dpfl_lightning.federated.client.module import ClientModule


def some_records(shape=(6,), count=40):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *shape, generator=generator), torch.randint(3, (count,), generator=generator)


def test_training_leaves_torchs_own_generator_alone():
    module = ClientModule(small_net())
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    trained_on(module, module.flat, some_records(), Training(epochs=2), seed=1)
    assert torch.equal(torch.rand(4), expected)


def test_training_is_sgd_with_momentum_decay_and_a_smaller_rate_in_the_second_half():
    module, (x, y) = ClientModule(small_net()), some_records()
    how = Training(epochs=5, learning_rate=0.3, momentum=0.9, weight_decay=0.01, decayed=True, batch_size=16)
    start = module.flat
    ours = trained_on(module, start, (x, y), how, seed=11)
    assert torch.equal(module.flat, start), "the module's own parameters stay"

    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.3, momentum=0.9, weight_decay=0.01)
    torch.manual_seed(11)
    for epoch in range(5):
        optimizer.param_groups[0]["lr"] = 0.3 if epoch < 3 else 0.03
        for rows in torch.randperm(40).split(16):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    torch.testing.assert_close(ours, torch.nn.utils.parameters_to_vector(net.parameters()))


def test_the_seed_decides_order_augmentation_and_dropout():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, 3))
    module, records = ClientModule(net), some_records((1, 8, 8))
    how = Training(epochs=2, batch_size=8, augmentations=("crop", "rotate"))
    one, again, other = (trained_on(module, module.flat, records, how, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    plain = trained_on(module, module.flat, records, Training(epochs=2, batch_size=8), 1)
    assert not torch.equal(one, plain)


def test_public_streams_are_named():
    draws = {torch_seed(public_generator(seed, name, number)) for seed in (0, 1) for name in "ab" for number in (0, 1)}
    assert len(draws) == 8
