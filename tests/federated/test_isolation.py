"""Nets that mix or remember records are refused, even where only many records, or strange ones, show it."""

import copy
import math
import random
from collections import deque

import pytest
import torch
from conftest import small_net
from torch import nn

from dpfl_lightning.build import ENGINES
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.dummy_data import _check_alone
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.privacy.clipping.fast import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import VmapClippedSum
from dpfl_lightning.privacy.clipping.state import tensors_restored


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
    """Keeps something of the records, in the way of its subclass; `after` says from which pass on."""

    def __init__(self, training=True, after=0):
        super().__init__()
        self.when, self.after, self.calls = training, after, 0
        self.register_buffer("seen", torch.zeros(4))
        self.kept = {"list": [], "queue": deque(maxlen=2), "sum": 0.0}

    def mixed(self, x):
        self.calls += 1
        if self.training == self.when and self.calls > self.after and x.numel():
            self.keep(x.detach().mean(dim=0))
        return x - self.seen.detach()

    def keep(self, mean):
        self.seen = 0.9 * self.seen + 0.1 * mean


class InPlace(Remembering):
    def keep(self, mean):
        self.seen.mul_(0.9).add_(0.1 * mean)


class InData(Remembering):
    def keep(self, mean):
        self.seen.data.add_(mean)


class InAttribute(Remembering):
    def keep(self, mean):
        self.mean = mean


class InList(Remembering):
    def keep(self, mean):
        self.kept["list"].append(mean)


class InQueue(Remembering):
    def keep(self, mean):
        self.kept["queue"].append(mean)


class InNumber(Remembering):
    def keep(self, mean):
        self.kept["sum"] += float(mean[0])


REMEMBERING = [Remembering, InPlace, InData, InAttribute, InList, InQueue, InNumber]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", REMEMBERING)
def test_nets_that_remember_records_are_refused(kind, training):
    with pytest.raises(UserError, match=r"must not remember records, got `net\.(seen|mean|kept)`"):
        check(kind(training))


@pytest.mark.parametrize("kind", [InPlace, InList])
def test_a_run_refuses_a_net_that_remembers_records(kind, make_loop, tmp_path):
    with pytest.raises(UserError, match=r"^`model` must not remember records, got `net\.1\.(seen|kept)`"):
        make_loop(module=ClientModule(nn.Sequential(nn.Linear(6, 4), kind())))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_gradients_that_a_hook_keeps_are_noticed():
    net = Small()
    net.layer.register_full_backward_hook(lambda layer, inner, outer: setattr(layer, "slope", outer[0].detach()))
    with pytest.raises(UserError, match=r"`net\.layer\.slope`"):
        check(net)


@pytest.mark.parametrize("engine", ["serial", "fast"])
def test_what_begins_to_remember_after_the_check_leaves_nothing_in_the_trained_model(engine, make_loop):
    net = nn.Sequential(nn.Linear(6, 4), InAttribute(after=math.inf))
    loop = make_loop(module=ClientModule(net), engine=ENGINES[engine](), rounds=1)
    net[1].after, before = 0, list(vars(net[1]))
    loop.run()
    assert list(vars(net[1])) == before


@pytest.mark.parametrize("kind", [Remembering, InPlace, InData, InAttribute])
def test_tensors_that_a_pass_changes_are_restored(kind):
    net = kind()
    before, attributes = net.seen, list(vars(net))
    with pytest.raises(KeyError), tensors_restored(net):
        net(torch.randn(4, 4))
        assert net.seen.any() or net.mean.any()
        raise KeyError
    assert net.seen is before and not net.seen.any() and list(vars(net)) == attributes


def test_a_loss_that_fails_for_one_record_is_refused(make_loop):
    loss = {"loss": lambda self, output, y: nn.functional.cross_entropy(output.squeeze(), y, reduction="none")}
    with pytest.raises(UserError, match="`model` must take one record, and many, got"):
        make_loop(module=type("Squeezed", (ClientModule,), loss)(small_net()))


class Counting(Small):
    def mixed(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x


def test_other_nets_are_let_through():
    layers = [nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.GroupNorm(2, 8), nn.Linear(8, 3)]
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    for net in (Small(), Dropping(), Refusing(), Counting(), nn.Sequential(*layers), spectral):
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
