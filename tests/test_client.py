"""The client module alone: its seam, its parameters as a vector, and what it refuses."""

import lightning as L
import pytest
import torch
from conftest import small_net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpfl_lightning.build import ENGINES
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.module import ClientModule


def test_a_bare_trainer_is_refused_for_it_has_no_ledger(tmp_path):
    data = DataLoader(TensorDataset(torch.randn(8, 6), torch.randint(3, (8,))), batch_size=4)
    trainer = L.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu", default_root_dir=tmp_path
    )
    with pytest.raises(UserError, match="FederatedLoop, got a bare Trainer, which has no privacy ledger"):
        trainer.fit(ClientModule(small_net()), data)


def test_batch_norm_is_refused_with_what_to_use_instead():
    with pytest.raises(UserError, match=r"BatchNorm2d.*GroupNorm"):
        ClientModule(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)))


def test_an_unknown_personal_name_is_refused():
    with pytest.raises(UserError, match="personal"):
        type("Odd", (ClientModule,), {"personal": ("nope",)})(small_net())
    every = tuple(name for name, _ in small_net().named_parameters())
    with pytest.raises(UserError, match="`personal` must leave out a parameter of the net"):
        type("Odd", (ClientModule,), {"personal": every})(small_net())


def test_flat_and_named_views_are_one_memory():
    module = ClientModule(small_net())
    flat = module.flat
    assert flat.shape == (module.num_params,) and not flat.requires_grad
    views = module.unflatten(flat)
    assert list(views) == [name for name, _ in module.net.named_parameters()]
    assert all(torch.equal(views[name], p) for name, p in module.net.named_parameters())
    views["0.bias"].zero_()
    assert int((flat == 0).sum()) >= views["0.bias"].numel()


def test_frozen_parameters_are_neither_trained_nor_counted():
    net = small_net()
    net[0].weight.requires_grad_(False)
    module = ClientModule(net)
    assert module.num_params == sum(p.numel() for p in net.parameters()) - net[0].weight.numel()
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    torch.testing.assert_close(
        module.sample_loss(module.named_trainable, x, y), nn.functional.cross_entropy(net(x), y, reduction="none")
    )


def test_the_loss_of_a_subclass_is_what_every_engine_differentiates(make_loop):
    class Halved(ClientModule):
        def loss(self, output, y):
            return 0.5 * super().loss(output, y)

    def moved(kind, **options) -> float:
        loop = make_loop(module=kind(small_net()), rounds=1, privacy=None, **options)
        loop.run()
        return float((loop.state.models[0] - kind(small_net()).flat).norm())

    plain = moved(ClientModule)
    for name, engine in ENGINES.items():
        assert 0 < moved(Halved, engine=engine()) < 0.9 * plain, name
