"""What makes a run this run: digests of module, strategies and records; `attacks/test_resume_changed.py` edits them."""

import dataclasses
import functools
import importlib.util
import json
import math
import sys
import types

import numpy as np
import pytest
import torch
from conftest import blobs
from torch import nn

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.identity import data_digests, module_digest
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.strategy import Strategy, strategy_digests
from dpfl_lightning.runtime.digests import object_digest


class Layer(nn.Module):
    """Frozen numbers, a buffer, settings and a function beside a trained layer."""

    def __init__(self, scale=1.0, fixed=0.0, remembered=0.0, act=torch.tanh, how=None):
        super().__init__()
        self.layer, self.scale, self.act, self.how = nn.Linear(6, 3), scale, act, how or {"power": 2}
        self.fixed = nn.Parameter(torch.full((3,), fixed), requires_grad=False)
        self.register_buffer("remembered", torch.full((3,), remembered))

    def forward(self, x):
        return self.act(self.layer(x)) * self.scale + self.fixed + self.remembered


def of(net):
    return module_digest(ClientModule(net))


def test_trained_parameters_do_not_count_and_all_else_does():
    torch.manual_seed(0)
    assert of(Layer()) == of(Layer())  # other random weights
    changed = [{"scale": 2.0}, {"fixed": 1.0}, {"remembered": 1.0}, {"act": torch.relu}, {"how": {"power": 3}}]
    plain = nn.Sequential(nn.Linear(6, 2), nn.Tanh())
    others = [plain, nn.Sequential(nn.Linear(6, 2), nn.ReLU()), nn.Sequential(nn.Linear(6, 2, bias=False), nn.Tanh())]
    found = {of(net) for net in (Layer(), *(Layer(**one) for one in changed), *others)}
    assert len(found) == 1 + len(changed) + len(others)


def load(path, name):
    """A file as the Python module of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    python = importlib.util.module_from_spec(spec)
    sys.modules[name] = python
    spec.loader.exec_module(python)
    return python


@pytest.mark.parametrize("changes", ["owners_helper", "owners_net", None])
def test_the_source_of_a_net_and_of_what_it_uses_counts(changes, tmp_path, monkeypatch):
    for name in ("owners_helper", "owners_net"):
        monkeypatch.setitem(sys.modules, name, None)
    helper, net = tmp_path / "owners_helper.py", tmp_path / "owners_net.py"
    helper.write_text("def act(x):\n    return x.relu()\n")
    net.write_text(
        "from torch import nn\nfrom owners_helper import act\n\n\nclass Net(nn.Linear):\n"
        "    def forward(self, x):\n        return act(super().forward(x))\n"
    )
    found = []
    for _ in range(2):
        load(helper, "owners_helper")
        found.append(of(load(net, "owners_net").Net(6, 2)))
        if changes:
            path = tmp_path / f"{changes}.py"
            path.write_text(path.read_text() + "\n# another version\n")
    assert (found[0] == found[1]) == (changes is None)


@pytest.mark.parametrize("key", ["loss", "output", "optimizer"])
def test_the_source_of_given_functions_counts(key, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "owners_functions", None)
    path, found = tmp_path / "owners_functions.py", []
    for factor in (1, 1, 2):
        path.write_text(f"def given(*of):\n    return {factor} * of[0]\n")
        function = functools.partial(load(path, "owners_functions").given)
        found.append(module_digest(ClientModule(nn.Linear(6, 2), **{key: function})))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_loss_that_holds_the_model_is_the_same_after_training(recurrent):
    def of_loss(weight):
        net = nn.LSTM(6, 2) if recurrent else nn.Linear(6, 2)
        return module_digest(ClientModule(net, loss=lambda output, y: weight * net(output)))

    assert of_loss(0.1) == of_loss(0.1) != of_loss(0.2)


class Setting:
    def __init__(self, value):
        self._value = value


def some_values():
    """All different, but the same in every call."""
    shared, looped = [1], Setting(None)
    looped._value = [looped]
    yield from (None, True, 1, 1.0, "1", b"1", "None", (), [], {}, set(), (1,), [1], {1}, {1: 1}, {"1": 1}, looped)
    yield from (["ab", "c"], ["a", "bc"], [["a"], "b"], [["a", "b"]], {"a": {"b": 1}}, {"a": 1, "b": 1})
    yield from (torch.zeros(0), torch.zeros(2), torch.ones(2), torch.ones(2, 1), torch.ones(2).double())
    yield from (np.zeros(0, np.int64), np.int64(3), np.int64(4), np.float32(3), np.arange(4), torch.relu, torch.tanh)
    yield from (Setting(3), Setting(4), Setting(Setting(3)), [shared, shared], ([1], [2]), frozenset({"a", "b", "c"}))
    yield from (math, sys, types.FunctionType, types.MethodType)


def test_settings_count_wherever_they_hide():
    first, again = ([object_digest(Setting(value)) for value in some_values()] for _ in range(2))
    assert first == again and len(set(first)) == len(first)


class Rule(Strategy):
    def __init__(self, strength=1.0):
        self._strength = strength

    def plan_round(self, plan, view):
        return plan


def test_strategies_count_with_their_settings_and_callbacks_do_not():
    watching = type("Watching", (Strategy,), {})()
    digests = strategy_digests([watching, Rule(), Rule()])
    assert list(digests) == ["0 Rule", "1 Rule"] and len(set(digests.values())) == 1
    assert strategy_digests([Rule()]) == strategy_digests([Rule(), watching])
    assert strategy_digests([Rule(2.0)]) != strategy_digests([Rule()])


# ---- records


def digests(population, key=b"k" * 32):
    return list(data_digests(HeldClients(population), key))


def test_digests_of_records_are_keyed_and_each_clients_own():
    population = blobs()
    plain, again, other = digests(population), digests(blobs()), digests(population, b"o" * 32)
    assert plain == again and len(set(plain)) == 4 and not set(plain) & set(other)
    for name in ("x", "y"):
        values = getattr(population, name).clone()
        row = int(population.train_of[2][5])
        values[row] = values[row] + 1 if name == "x" else (values[row] + 1) % 3
        changed = digests(dataclasses.replace(population, **{name: values}))
        assert [one == before for one, before in zip(changed, plain, strict=True)] == [True, True, False, True]
    held_out = population.x.clone()
    held_out[population.held_out_of[1]] += 1
    assert digests(dataclasses.replace(population, x=held_out)) == plain, "held-out records are not trained on"


def test_records_of_other_shapes_and_types_are_other_records():
    x, y = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)
    shapes = [x, x.view(4, 2, 3), x.view(4, 3, 2), torch.zeros(4, 7), x.double(), x.half()]
    population = Population.from_datasets([(x, y)], held_out=0.0, num_classes=2)
    found = [digests(dataclasses.replace(population, x=one))[0] for one in shapes]
    assert len(set(found)) == len(found)
    shorter = digests(Population.from_datasets([(x[:3], y[:3])], held_out=0.0, num_classes=2))[0]
    assert shorter not in found


# ---- in a run


@pytest.mark.e2e
def test_the_identity_of_a_run_lies_in_the_ledgers_header_without_any_record(make_loop):
    options = {"privacy": PrivacyOptions(epsilon=8.0, delta=1e-3), "module": ClientModule(Layer())}
    loop, other = make_loop(**options), make_loop(**options)
    loop.run(), other.run()
    header = json.loads(loop.clients.folder.ledger_file.read_bytes().splitlines()[0])
    found = header["identity"]
    assert found["rounds"] == 3 and found["privacy.epsilon"] == 8.0 and found["seed"] == 0
    assert len(found["records"]) == len(set(found["records"])) == 4
    assert found["records"] != [one.hex() for one in digests(loop.population, b"")], "a plain digest could be guessed"
    assert set(other.clients.folder.header().identity["records"]).isdisjoint(found["records"]), (
        "each run has a key of its own"
    )
