"""Whatever kind of object a model keeps, another value of it after a pass is noticed, and an equal one is none."""

import argparse
import array
import collections
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import io
import math
import operator
import threading
import types
import weakref
from dataclasses import dataclass

import kept_elsewhere
import numpy as np
import pytest
import torch
from kept_elsewhere import METER, count
from torch import nn

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.privacy.clipping.state import Kept

X, Y = torch.randn(21, 6, generator=torch.Generator().manual_seed(0)), torch.arange(21) % 3


class Color(enum.Enum):
    RED, BLUE = 0, 1


class Text(str):
    def __repr__(self):
        return "always the same"


class Number(np.float32):
    pass


@dataclass
class Box:
    value: object = 0


class Slotted:
    __slots__ = ("value",)


Pair = collections.namedtuple("Pair", "one two")
RECORD = np.dtype([("a", np.float32), ("b", np.int64)])
CONTEXT, LOCAL = contextvars.ContextVar("kept", default=0), threading.local()


BOXES = Box(0), Box(1)


def weak(number):
    return weakref.ref(BOXES[number])


#: what makes an object of a number, 0 or 1
OF_NUMBER = {
    **{
        kind.__name__: kind
        for kind in (np.float32, np.float16, np.int64, np.bool_, np.longdouble, np.complex64, Number)
    },
    **{kind.__name__: kind for kind in (decimal.Decimal, range, slice, fractions.Fraction, complex, Color)},
    "datetime64": lambda n: np.datetime64(n, "s"),
    "timedelta64": lambda n: np.timedelta64(n, "s"),
    "structured": lambda n: np.array((n, n), RECORD)[()],
    "array of one": lambda n: np.array(n),
    "text": lambda n: Text(n),
    "timedelta": lambda n: datetime.timedelta(n),
    "datetime": lambda n: datetime.datetime(2000, 1, 1, n),
    "date": lambda n: datetime.date(2000, 1, 1 + n),
    "device": lambda n: torch.device("cuda", n),
    "dtype": lambda n: (torch.float32, torch.float64)[n],
    "dtype of numpy": lambda n: np.dtype((np.float32, np.float64)[n]),
    "getter": operator.itemgetter,
    "memoryview": lambda n: memoryview(bytes([n])),
    "bytearray": lambda n: bytearray([n]),
    "array": lambda n: array.array("d", [n]),
    "frozenset": lambda n: frozenset([np.float32(n)]),
    "pair": lambda n: Pair(np.float32(n), 0),
    "proxy": lambda n: types.MappingProxyType({"a": np.float32(n)}),
    "user dict": lambda n: collections.UserDict(a=np.float32(n)),
    "user list": lambda n: collections.UserList([np.float32(n)]),
    "user string": lambda n: collections.UserString(str(n)),
    "partial": lambda n: functools.partial(print, n, end=np.float32(n)),
    "keywords": lambda n: functools.partial(print, end={"a": np.float32(n)}),
    "weak": weak,
    "bytes of a file": lambda n: io.BytesIO(bytes([n])),
    "namespace": lambda n: argparse.Namespace(a=np.float32(n)),
    "in a dictionary": lambda n: {"a": [np.float32(n)]},
    "in a box": lambda n: Box(np.float32(n)),
    "function": lambda n: (math.sin, math.cos)[n],
    "module": lambda n: (math, operator)[n],
    "class": lambda n: (Box, Slotted)[n],
    "key": lambda n: {np.float32(n): 0},
    "default": lambda n: collections.defaultdict((int, float)[n]),
}


class Keeping(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.first, self.value = nn.Linear(6, 3), value

    def forward(self, x):
        return self.first(x)


@pytest.mark.parametrize("way", OF_NUMBER)
@pytest.mark.parametrize("layer", [False, True])
def test_another_value_is_a_change_and_an_equal_one_is_none(way, layer):
    made = OF_NUMBER[way]
    net = Keeping(made(0))
    owner = net.first if layer else net
    owner.value = made(0)
    kept = Kept([net])
    owner.value = made(0)
    assert not kept.changed()
    owner.value = made(1)
    assert kept.changed()


CHANGES = {
    "structured": (np.array((0, 0), RECORD)[()], lambda one: one.__setitem__("a", 1)),
    "bytes of a file": (io.BytesIO(), lambda one: one.write(b"1")),
    "local": (LOCAL, lambda one: setattr(one, "value", 1)),
    "context": (CONTEXT, lambda one: one.set(1)),
    "weak": (weak(1), lambda one: setattr(one(), "value", 7)),
    "generator": (np.random.default_rng(0), lambda one: one.random()),
    "keywords": (functools.partial(print, end={"a": 0}), lambda one: one.keywords["end"].update(a=1)),
    "cache": (functools.cache(lambda one: one), lambda one: one(1)),
    "array of one": (np.array(0.0), lambda one: one.fill(1.0)),
    "box of slots": (Slotted(), lambda one: setattr(one, "value", np.float32(1))),
}


@pytest.mark.parametrize("way", CHANGES)
def test_a_change_in_place_is_noticed(way):
    value, change = CHANGES[way]
    kept = Kept([Keeping(value)])
    assert not kept.changed()
    change(value)
    assert kept.changed()


def test_which_of_several_objects_is_held_counts():
    net = Keeping(None)
    net.boxes, net.tensors = [Box(0), Box(1)], [torch.zeros(1), torch.zeros(1)]
    net.blocks = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    for values in (net.boxes, net.tensors, [*net.blocks], [*net.first.parameters(), torch.zeros(1)]):
        net.value = values[0]
        kept = Kept([net])
        net.value = values[1]
        assert kept.changed()
        del net.value
        net.value = [*values]
        kept = Kept([net])
        net.value = values[::-1]
        assert kept.changed()
        del net.value


class Averaging(Keeping):
    """It keeps the mean of the last record, once its weights are large."""

    def forward(self, x):
        h = self.first(x)
        if self.first.weight.detach().abs().max() > 20:
            last, self.value = float(self.value), np.float32(x.detach().numpy().mean())
            h = h * (1.0 if last <= 0 else -1.0)
        else:
            x.detach().numpy()
        return h


class Counting(Keeping):
    def forward(self, x):
        if self.first.weight.detach().abs().max() > 20:
            self.value = self.value + np.int64(1)
        return self.first(x) * min(1.0, float(self.value) / 100)


@pytest.mark.parametrize(("kind", "way"), [(Averaging, "loop"), (Counting, "vmap")])
def test_a_number_of_numpy_that_weights_turn_on_ends_the_run(kind, way):
    net = kind(np.float32(1))
    clipped_sum, reason = clipped_sum_for(net, None, X[:0], Y[:0])
    params = {name: 100 * p.detach() for name, p in net.named_parameters()}
    assert reason.startswith(way)
    with pytest.raises(UserError, match="must keep nothing of a pass for the next one, got `value`"):
        clipped_sum(params, X, Y, ClipRequest(1.0))


class Meter:
    def __init__(self):
        self.total, self.inner = 0.0, Box(0.0)


NAMESPACE, LISTED, SHARED = argparse.Namespace(a=0.0), collections.UserList([0.0]), Meter()
PART = functools.partial(print, d={"a": 0.0})
THREAD, SLOTS, FREE, TEACHER = threading.local(), Slotted(), Meter(), nn.BatchNorm1d(6, affine=False)
THREAD.value = SLOTS.value = 0.0


class InGlobals(Keeping):
    """Weights turn on code that keeps a number in variables of its own file and of others."""

    def forward(self, x):
        if self.first.weight.detach().abs().max() > 20:
            self.kept()
        return self.first(x)


def global_keepers():
    def in_namespace(self):
        NAMESPACE.a += 1

    def in_user_list(self):
        LISTED[0] += 1

    def in_thread(self):
        THREAD.value += 1

    def in_slots(self):
        SLOTS.value += 1

    def in_partial(self):
        PART.keywords["d"]["a"] += 1

    def in_inner_object(self):
        SHARED.inner.value += 1

    def in_model(self):
        TEACHER.running_mean = TEACHER.running_mean + 1

    def in_object_of_another_file(self):
        kept_elsewhere.METER.total += 1

    def in_imported_object(self):
        METER.update(1.0)

    def in_variable_of_another_file(self):
        kept_elsewhere.TOTAL += 1

    def by_function_of_another_file(self):
        count()

    return [one for one in locals().values()]


@pytest.mark.e2e
@pytest.mark.parametrize("keeper", global_keepers(), ids=lambda one: one.__name__)
def test_what_is_kept_in_variables_of_files_ends_the_run(keeper):
    kind = type("Kind", (InGlobals,), {"kept": keeper})
    net = kind(None)
    clipped_sum, reason = clipped_sum_for(net, None, X[:0], Y[:0])
    params = {name: 100 * p.detach() for name, p in net.named_parameters()}
    assert reason.startswith("vmap")
    with pytest.raises(UserError, match="must keep nothing of a pass for the next one"):
        clipped_sum(params, X, Y, ClipRequest(1.0))


def test_variables_of_a_file_that_stay_are_no_change():
    NAMESPACE.table = [*range(100)]
    net = type("Kind", (InGlobals,), {"kept": lambda self: (NAMESPACE, SHARED, TEACHER, kept_elsewhere, LISTED, PART)})(
        None
    )
    kept = Kept([net])
    assert kept._walk.is_current() and not kept.changed()


def test_what_stays_is_seen_to_stay_without_a_second_walk():
    """Annotations of types show the attributes of their class, which Python makes anew whenever they are read."""
    held = [tuple[int, str], dict[str, float], int | None, collections.OrderedDict[str, int], functools.partial(len)]
    kept = Kept([Keeping([*held, {"read": lambda one: type(one)}])])
    assert kept._walk.is_current()


def test_steps_of_training_need_no_second_walk():
    net = Keeping(0)
    net.register_buffer("table", torch.zeros(1 << 17))
    net.same = net.table
    kept = Kept([net])
    net.table += 1
    assert {*kept.changed()} == {"table", "same"} and kept.again() is kept and not kept.changed()
    net.value = 1
    assert kept.changed() == ["value"] and kept.again() is not kept
