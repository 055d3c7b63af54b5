"""What the checks before a run cost for a large model, and that they stay as strict."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from federated.test_isolation import MIXING
from privacy.test_reads import BY_LOOP, Reading, right
from torch import nn

from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.batch_losses import check_batch_losses
from dpfl_lightning.federated.client.checks import check_fits
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.privacy.clipping import operations
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.operations import SMALL_CROWD, crowd_of, operations_of
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, cross_entropy_of
from dpfl_lightning.privacy.noise import Streams

pytestmark = pytest.mark.usefixtures("code_was_read", "counters_are_allowed")  # of rules, and of trials of code


@pytest.fixture
def counters_are_allowed(monkeypatch):
    """What a model counts in this file is not compared after its passes."""
    monkeypatch.setattr("dpfl_lightning.privacy.clipping.state._variables", lambda seen: ())


class Wide(nn.Module):
    """A frozen layer over many positions, adapters, and a head."""

    def __init__(self, frozen=True):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(512, 512), nn.Linear(512, 32), nn.Linear(32, 512)
        self.head = nn.Linear(512, 32)
        self.base.requires_grad_(not frozen)

    def forward(self, x):
        SEEN["forward"] += len(x)
        SEEN["dtypes"] |= {self.base.weight.dtype}
        hidden = torch.relu(self.base(x) + self.up(self.down(x)))
        if hidden.requires_grad:
            hidden.register_hook(_noted)
        return self.head(hidden).mean(1)


def _noted(dy):
    SEEN["backward"] += len(dy)


SEEN = {"forward": 0, "backward": 0, "dtypes": set()}


def people(records=24):
    data = torch.randn(records, 512, 512), torch.arange(records) % 32
    return Population.from_datasets([data, data], num_classes=32, held_out=0)


@pytest.mark.e2e
@pytest.mark.parametrize("frozen", [True, False])
def test_checks_of_a_large_model_cost_about_100_records_and_copy_nothing_frozen(frozen):
    module, population, engine = ClientModule(Wide(frozen)), people(), FastEngine(1)
    SEEN.update(forward=0, backward=0, dtypes=set())
    check_fits(module, population)
    engine.setup(module, HeldClients(population), Streams(), "poisson")
    assert 0 < (SEEN["forward"] + SEEN["backward"]) / 2 <= 106 and SEEN["dtypes"] == {torch.float32}
    assert isinstance(engine.checked.choose(), FastClippedSum)


@pytest.mark.e2e
def test_the_rules_of_a_large_model_are_those_of_the_loop():
    net = Wide()
    x, y = torch.randn(6, 512, 512), torch.arange(6)
    assert crowd_of(operations_of(lambda: net(x[:1]))) < SMALL_CROWD
    clipped_sum, reason = clipped_sum_for(net, None, x[:0], y[:0])
    assert reason == "fast: exact rules for all layers" and clipped_sum.choose().size in (4, 8)
    params = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    sums = [one(params, x, y, ClipRequest(0.1)) for one in (clipped_sum, LoopClippedSum(net, cross_entropy_of(net)))]
    for ours, theirs in zip(*sums, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("net", MIXING, ids=lambda net: type(net).__name__)
def test_large_models_that_mix_records_are_refused(net):
    with pytest.raises(UserError, match="must give a record the same loss whatever the other"):
        _check_large(net)


def _check_large(net):
    module = copy.deepcopy(ClientModule(net))
    module.large = True
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))[:2]
    check_batch_losses(module, x, torch.arange(2))


class Teacher(nn.Module):
    """Its large frozen layer follows the records, by what changes a version and by what does not."""

    def __init__(self, by_data):
        super().__init__()
        self.teacher, self.head, self.by_data = nn.Linear(512, 512).requires_grad_(False), nn.Linear(512, 4), by_data

    def forward(self, x):
        with torch.no_grad():
            weight = self.teacher.weight.data if self.by_data else self.teacher.weight
            weight += x.mean()
        return self.head(self.teacher(x))


@pytest.mark.parametrize("by_data", [True, False])
def test_what_a_large_frozen_tensor_keeps_of_records_is_noticed(by_data):
    net, x, y = Teacher(by_data), torch.randn(8, 512), torch.arange(8) % 4
    params = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    with pytest.raises((UserError, RuntimeError), match=r"teacher\.weight"):
        clipped_sum_for(net, None, x[:0], y[:0])[0](params, x, y, ClipRequest(1.0))


@pytest.mark.e2e
@pytest.mark.parametrize("between", BY_LOOP)
def test_a_large_model_that_depends_on_records_goes_one_record_at_a_time(between, monkeypatch):
    monkeypatch.setattr(operations, "_MOST_WORK", 1)
    net = Reading(between)
    clipped_sum, reason = clipped_sum_for(net, None, torch.empty(0, 5, 3), torch.empty(0).long())
    assert reason.startswith("loop: ")
    right(net, clipped_sum)


MEMORY = """
import json, resource, sys
import torch
from torch import nn
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.checks import check_fits
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.privacy.noise import Streams

def kib(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what))

width = int(sys.argv[1])
data = torch.randn(8, width), torch.arange(8) % 4
population = Population.from_datasets([data, data], num_classes=4, held_out=0)
layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
module = ClientModule(nn.Sequential(*layers, nn.Linear(width, 4)))
before = kib("VmRSS")
check_fits(module, population)
FastEngine(1).setup(module, HeldClients(population), Streams(), "poisson")
print(json.dumps({"parameters": module.num_params, "kib": kib("VmHWM") - before}))
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_checks_need_32_bytes_a_parameter():
    few, many = (
        json.loads(subprocess.run([sys.executable, "-c", MEMORY, width], check=True, stdout=subprocess.PIPE).stdout)
        for width in ("2304", "4096")
    )
    assert 1024 * (many["kib"] - few["kib"]) <= 28 * (many["parameters"] - few["parameters"])  # 4 more are the model
