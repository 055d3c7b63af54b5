"""Nets that mix or remember records are refused, even where only many records, or strange ones, show it."""

import copy
import random

import pytest
import torch
from conftest import small_net
from torch import nn

from dpfl_lightning.build import ENGINES
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.dummy_data import _check_alone
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.privacy.clipping.fast import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import VmapClippedSum
from dpfl_lightning.privacy.ledger.ledger import read_ledger


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(self.mixed(x))

    def mixed(self, x):
        return x


class Rescaling(Small):
    def mixed(self, x):
        return torch.where(x.abs().max() > 8, x / 8, x)


class Routing(Small):
    """An expert takes the first 32 records that choose it; the others are left out."""

    def mixed(self, x):
        chosen = x[:, 0] > 0
        return torch.where((chosen.cumsum(0) <= 32)[:, None], x, torch.zeros_like(x))


class Spreading(Small):
    """What is not a number reaches the others, and nothing else does."""

    def mixed(self, x):
        return x + 0 * x.sum()


class MixingInTraining(Small):
    def mixed(self, x):
        return x - x.mean(dim=0) if self.training else x


class MixingBehindDropout(Small):
    def mixed(self, x):
        return nn.functional.dropout(x, 0.5, training=True) / (1 + x.abs().max())


class MixingByAnotherGenerator(Small):
    def mixed(self, x):
        return x / (1 + x.abs().max() * random.random())


class Dropping(Small):
    def mixed(self, x):
        return nn.functional.dropout(x, 0.5, training=True)


class Refusing(Small):
    """Some records end in an error, which no check should take for a mixture."""

    def mixed(self, x):
        if not x.isfinite().all():
            raise ValueError("records must be finite")
        return x


class LeakyBackward(torch.autograd.Function):
    """The identity; but the gradient of every record holds something of the others when there are many."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy):
        return dy + dy.mean(dim=0) if len(dy) > 10 else dy


class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(LeakyBackward.apply(self.first(x)))


def check(net: nn.Module) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    _check_alone(copy.deepcopy(ClientModule(net)), x, torch.arange(4) % 3)


MIXING = [Rescaling(), Routing(), Spreading(), MixingInTraining(), MixingBehindDropout(), MixingByAnotherGenerator()]


def test_nets_that_mix_records_are_refused(make_loop):
    for net in MIXING:
        with pytest.raises(UserError, match="must see one record at a time, got losses that change"):
            check(net)
    mixing = nn.Sequential(nn.Linear(6, 4), Rescaling())
    with pytest.raises(UserError, match="must see one record at a time, got losses that change"):
        make_loop(module=ClientModule(mixing))


class Remembering(Small):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def mixed(self, x):
        if len(x) > 1:
            self.seen += x.detach().mean(dim=0)
        return x


def test_a_net_that_remembers_records_is_refused(make_loop):
    with pytest.raises(UserError, match=r"a buffer `1\.seen`"):
        make_loop(module=ClientModule(nn.Sequential(nn.Linear(6, 4), Remembering())))


def test_other_nets_are_let_through():
    layers = [nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.GroupNorm(2, 8), nn.Linear(8, 3)]
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    for net in (Small(), Dropping(), Refusing(), nn.Sequential(*layers), spectral):
        before, drawn = torch.get_rng_state(), random.getstate()
        check(net)
        assert torch.equal(torch.get_rng_state(), before) and random.getstate() == drawn, net


@pytest.mark.parametrize("engine", ["serial", "fast"])
def test_evaluation_does_not_drop_out(engine, make_loop):
    net = nn.Sequential(small_net(), nn.Dropout(0.5))
    loop = make_loop(module=ClientModule(net), engine=ENGINES[engine](), rounds=1)
    loop.run()
    rows = torch.arange(8)
    one, other = (loop.clients.engine.outputs(loop.state.models[0], rows) for _ in range(2))
    assert torch.equal(one, other) and net[1].training


def test_whole_numbers_stay_rows_of_their_table():
    net = nn.Sequential(nn.Embedding(2, 3), nn.Flatten(), nn.Linear(12, 3))
    _check_alone(ClientModule(net), torch.randint(2, (4, 4)), torch.arange(4) % 3)


def test_a_backward_that_mixes_is_left_to_the_reference():
    net = Leaky()
    clipped_sum, reason = clipped_sum_for(net, None, torch.empty(0, 4), torch.empty(0, dtype=torch.long))
    assert isinstance(clipped_sum, VmapClippedSum)
    assert reason == "vmap: the inputs or gradients of `first` depend on the other records of a batch"


def with_batch_norm(**changes) -> nn.Module:
    """Return a pretrained net whose BatchNorm keeps its statistics."""
    torch.manual_seed(0)
    net = nn.Sequential(
        small_net()[0], nn.BatchNorm1d(small_net()[0].out_features, **changes), nn.ReLU(), small_net()[2]
    )
    net(torch.randn(50, small_net()[0].in_features))
    net[1].eval()
    return net


@pytest.mark.parametrize("trainable", [False, True])
def test_batch_norm_with_fixed_statistics_is_trained_equally_by_every_engine(trainable, make_loop):
    expected = None
    for name, engine in ENGINES.items():
        net = with_batch_norm()
        net[1].requires_grad_(trainable)
        before = net[1].running_mean.clone()
        loop = make_loop(module=ClientModule(net), engine=engine(), rounds=1)
        loop.run()
        assert torch.equal(loop.module.net[1].running_mean, before) and not loop.module.net[1].training
        expected = loop.module.flat if expected is None else expected
        torch.testing.assert_close(loop.module.flat, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_batch_norm_that_mixes_after_all_is_refused(make_loop):
    with pytest.raises(
        UserError, match=r"got BatchNorm1d, which mixes the records of a batch. Use nn.GroupNorm.* instead\.$"
    ):
        ClientModule(with_batch_norm(track_running_stats=False))
    with pytest.raises(UserError, match=r"instead, or freeze its statistics by .eval\(\)"):
        ClientModule(with_batch_norm().train())
    module = ClientModule(with_batch_norm())
    module.net.eval()
    module.net[1].train()  # alone
    with pytest.raises(UserError, match=r"`net\.1` must see one record at a time, got BatchNorm1d"):
        make_loop(module=module)


def test_batch_norm_that_a_callback_switches_to_training_ends_the_run_uncharged(make_loop):
    class Trains(Callback):
        def on_round_end(self, view, report):
            loop.module.net.train()

    loop = make_loop(module=ClientModule(with_batch_norm()), parts=[Trains()])
    with pytest.raises(UserError, match="got BatchNorm1d, which mixes"):
        loop.run()
    assert {charge.round for charge in read_ledger(loop.output_dir / "ledger.jsonl")} == {1}
