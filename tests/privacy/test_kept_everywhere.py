"""No name, owner or class hides what a model keeps: each thing that changes is noticed, wherever it lies."""

import functools
from typing import ClassVar

import pytest
from torch import nn

from dpfl_lightning.privacy.clipping import state
from dpfl_lightning.privacy.clipping.state import Kept
from dpfl_lightning.privacy.clipping.walk import Found, Key

COUNTS = {"n": 0}


def count(*_):
    COUNTS["n"] += 1


class Base(nn.Module):
    count = 0

    def step(self):
        count()

    @property
    def factor(self):
        return count()


class Over(Base):
    count = 5

    def step(self):
        super().step()


class OverProperty(Base):
    def step(self):
        pass

    @property
    def factor(self):
        return super().factor


class Mixin:
    def step(self):
        count()


class WithMixin(Mixin, nn.Module):
    def step(self):
        super().step()


class Shadowed(nn.Module):
    running: ClassVar = [0]

    def __init__(self):
        super().__init__()
        self.running = [0]


class Special(nn.Module):
    __stats__: ClassVar = {"n": 0}


class Dispatching(nn.Module):
    @functools.singledispatchmethod
    def __getitem__(self, key):
        count()

    __matmul__ = functools.partialmethod(count)

    @property
    def __len_of__(self):
        return count()


def add_to(one):
    one[0] += 1


def loss_and_output():
    seen = [0]
    return [(lambda out, y: seen), (lambda out: out)], lambda owners: add_to(seen)


def net_and_loss():
    net, loss = nn.Linear(1, 1), nn.Linear(1, 1)
    net.running, loss.running = [0], [0]
    return [net, loss], lambda owners: add_to(net.running)


def running(out):
    return out


def net_and_function():
    net = nn.Linear(1, 1)
    net.running = [0]
    return [net, running], lambda owners: add_to(net.running)


def of(kind, change=lambda net: net.step()):
    return lambda: ([kind()], lambda owners: change(owners[0]))


HIDDEN = {
    "super": of(Over),
    "an attribute of a base": of(Over, lambda net: setattr(Base, "count", Base.count + 1)),
    "property of a base": of(OverProperty, lambda net: net.factor),
    "super of a mixin": of(WithMixin),
    "attribute of the class beside one of the object": of(Shadowed, lambda net: add_to(Shadowed.running)),
    "special attribute": of(Special, lambda net: Special.__stats__.update(n=Special.__stats__["n"] + 1)),
    "singledispatchmethod": of(Dispatching, lambda net: net[0]),
    "partialmethod": of(Dispatching, lambda net: net @ net),
    "special property": of(Dispatching, lambda net: net.__len_of__),
    "loss and output": loss_and_output,
    "model and loss": net_and_loss,
    "model and function": net_and_function,
    "buffer and attribute": lambda: buffer_and_attribute(),
}


def buffer_and_attribute():
    net = nn.BatchNorm1d(1)
    vars(net)["running_mean"] = 0
    return [net], lambda owners: net._buffers["running_mean"].add_(1)


@pytest.mark.parametrize("way", HIDDEN)
@pytest.mark.parametrize("inner", [False, True])
def test_nothing_hides_another_thing_of_its_name(way, inner):
    owners, change = HIDDEN[way]()
    if inner:
        held = nn.Linear(1, 1)
        held.helper = owners
        kept = Kept([held])
    else:
        kept = Kept(owners)
    assert kept._walk.is_current() and not kept.changed()
    change(owners)
    assert kept.changed()


def test_what_no_description_has_is_refused(monkeypatch):
    """If something that was read has changed, but no description shows what, a run ends."""
    net = nn.Linear(1, 1)
    net.value = {"a": 0}
    kept = Kept([net])
    monkeypatch.setattr(state, "names_of_changes", lambda before, after: [])
    net.value["b"] = 0
    assert kept.changed() == ["something that no name shows"]
    with pytest.raises(state.UserError, match="got something that no name shows"):
        kept.require_same()


def test_two_things_never_have_one_key():
    found = Found({Key(0, "attribute", "a"): 0})
    with pytest.raises(RuntimeError, match="have one key"):
        found[Key(0, "attribute", "a")] = 1


def test_a_refusal_names_three_things_at_most():
    net = nn.Linear(1, 1)
    for name in "abcde":
        setattr(net, name, 0)
    kept = Kept([net])
    for name in "abcde":
        setattr(net, name, 1)
    with pytest.raises(state.UserError, match="got `a`, `b`, `c` and 2 more"):
        kept.require_same()
