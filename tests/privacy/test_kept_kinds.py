"""Kinds of objects that a model keeps: each change is noticed, and what cannot be read is refused by its name."""

import array
import collections
import contextvars
import itertools
import queue
import random
import re
import types
import weakref

import kept_lazily
import kept_module
import numpy as np
import pytest
import torch
from torch import nn

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.privacy.clipping.restored import tensors_restored
from dpfl_lightning.privacy.clipping.state import Kept

X, Y = torch.randn(21, 6, generator=torch.Generator().manual_seed(0)), torch.arange(21) % 3
COUNTS, HELD = [0], None


def reader():
    return HELD


class Last(list):
    """It iterates over its last three entries."""

    def __iter__(self):
        return iter(self[-3:])

    def __len__(self):
        return 0


class Pair(tuple):
    def __iter__(self):
        return iter(())


class Numbers(enumerate):
    seen = 0


class Tracked(torch.Tensor):
    seen = 0


class Cold:
    pass


class Warm(Cold):
    pass


class Named:
    seen = 0

    @classmethod
    def of(cls, name):
        return next(one for one in cls.__subclasses__() if one.__name__ == name)


class Below(Named):
    pass


class Slotted:
    __slots__ = ("value",)
    seen = 0


def counting():
    while True:
        COUNTS[0] += 1
        yield


async def awaiting():
    await waiting()
    COUNTS[0] += 1


@types.coroutine
def waiting():
    yield


def begun():
    """A coroutine that waits, so that none is dropped before it began."""
    one = awaiting()
    one.send(None)
    return one


async def averages():
    yield 0


def started():
    one = counting()
    next(one)
    return one


def more(one):
    one.seen += 1


def switch(one):
    one.__class__ = Warm if type(one) is Cold else Cold


def annotate(kind):
    kind.__annotations__[f"n{len(kind.__annotations__)}"] = 0


def add(entries):
    entries.append(0)


#: what is held, and how it changes
KINDS = {
    "list as it is stored": (lambda: Last([0] * 9), add),
    "tuple as it is stored": (lambda: Pair(([0],)), lambda one: add(tuple.__getitem__(one, 0))),
    "deque": (lambda: collections.deque([0]), add),
    "objects of an array": (lambda: np.array([[0], [1, 2]], dtype=object), lambda one: add(one[0])),
    "array of one object": (lambda: np.array({"a": 0}), lambda one: one[()].update(a=one[()]["a"] + 1)),
    "table of objects": (lambda: np.array([[{}, {}]], dtype=object), lambda one: one[0, 1].update({len(one[0, 1]): 0})),
    "objects of fields": (lambda: np.array([(1, [0])], [("n", int), ("o", object)]), lambda one: add(one["o"][0])),
    "numbers of fields": (lambda: np.array([(1, [0])], [("n", int), ("o", object)]), lambda one: add_one(one["n"])),
    "attribute of an iterator": (lambda: Numbers([0]), more),
    "class of a tensor": (lambda: torch.ones(1).as_subclass(Tracked), lambda one: more(Tracked)),
    "class of an object": (Cold, switch),
    "class of a class's slot": (lambda: Slotted.value, lambda one: more(Slotted)),
    "subclass that is looked up": (lambda: Named, lambda one: more(Below)),
    "names of fields": (
        lambda: np.zeros(1, [("a", int)]),
        lambda one: setattr(one.dtype, "names", ("b",)),
    ),
    "name of a class": (lambda: Named, lambda one: setattr(one, "__name__", one.__name__ + "n")),
    "qualified name of a class": (
        lambda: Named,
        lambda one: setattr(one, "__qualname__", one.__qualname__ + "n"),
    ),
    "annotations of a class": (
        lambda: Named,
        annotate,
    ),
    "abstract methods": (
        lambda: Named,
        lambda one: setattr(one, "__abstractmethods__", frozenset({f"{random.random()}"})),
    ),
    "value of an exception": (lambda: StopIteration(0), lambda one: setattr(one, "value", one.value + 1)),
    "name of an exception": (ImportError, lambda one: setattr(one, "name", "n")),
    "flag of an exception": (ValueError, lambda one: setattr(one, "__suppress_context__", True)),
    "view of a dictionary": (lambda: {"a": [0]}.values(), lambda one: add(next(iter(one)))),
    "context": (contextvars.copy_context, lambda one: one.run(CONTEXT.set, object())),
    "spawned generators": (lambda: np.random.default_rng(0), lambda one: one.spawn(1)),
    "generator": (started, lambda one: add_one(COUNTS)),
    "coroutine": (begun, lambda one: add_one(COUNTS)),
    "compiled expression": (lambda: compile("COUNTS", "formula", "eval"), lambda one: add_one(COUNTS)),
    "file": (lambda: kept_module, lambda one: one.step()),
    "file that makes attributes": (lambda: kept_lazily, lambda one: one.step()),
    "file in a dictionary": (lambda: {"a": kept_module}, lambda one: one["a"].step()),
    "new variable of a file": (lambda: kept_module, lambda one: vars(one).update({f"n{len(vars(one))}": 0})),
    "random": (lambda: random, lambda one: one.random()),
    "numpy.random": (lambda: [np.random], lambda one: one[0].random()),
}
CONTEXT = contextvars.ContextVar("kept")


def add_one(numbers):
    numbers[0] += 1


@pytest.mark.parametrize("where", ["attribute", "variable", "class"])
@pytest.mark.parametrize("way", KINDS)
def test_a_change_of_any_kind_is_noticed(way, where):
    global HELD
    make, change = KINDS[way]
    held = make()
    same_file = {"__module__": __name__}
    kind = type("Kind", (nn.Linear,), same_file | ({"held": held} if where == "class" else {}))
    net = kind(1, 1)
    net.helper = held if where == "attribute" else None
    HELD = held if where == "variable" else None
    kept = Kept([reader if where == "variable" else net])
    assert kept._walk.is_current() and not kept.changed()
    change(held)
    assert not kept._walk.is_current() and kept.changed()


def by_value():
    return kept_module


def by_name():
    return kept_lazily.step()


def by_import():
    import kept_module as other

    return getattr(other, "st" + "ep")


def by_default(backend=kept_module):
    return backend


@pytest.mark.parametrize("function", [by_value, by_name, by_import, by_default])
def test_all_variables_of_a_file_that_is_handled_as_a_value_are_read(function):
    kept = Kept([function])
    assert kept._walk.is_current()
    kept_module.step()
    kept_lazily.step()
    assert kept.changed()


def by_attribute():
    return kept_module.step


def test_other_variables_of_a_file_whose_attributes_are_named_do_not_count():
    kept = Kept([by_attribute])
    kept_module.OTHER = 1
    assert kept._walk.is_current()
    kept_module.step()
    assert kept.changed() == ["TOTAL of kept_module.py"]


def test_a_layer_of_another_class_is_a_change():
    net = nn.Sequential(nn.Tanh())
    kept = Kept([net])
    net[0].__class__ = nn.Sigmoid
    assert kept.changed() == ["0.its class"]


def test_a_class_with_other_bases_is_a_change():
    base, other = type("Base", (list,), {}), type("Other", (list,), {})
    kind = type("Kind", (base,), {})
    kept = Kept([kind()])
    kind.__bases__ = (other,)
    assert kept.changed()


def test_a_small_parameter_that_changes_past_its_version_is_a_change():
    net = nn.Linear(2, 2)
    kept = Kept([net])
    net.bias.data.add_(1)
    assert kept.changed() == ["bias"]
    assert kept.again() is kept and not kept.changed()


def as_buffer(tensor):
    net = nn.Linear(6, 3)
    net.register_buffer("table", tensor)
    return net


#: tensors that are steady, whatever their memory
TENSORS = {
    "column": lambda: torch.rand(8, 3)[:, 0],
    "every other": lambda: torch.rand(16)[::2],
    "diagonal": lambda: torch.eye(8).diagonal(),
    "expanded": lambda: torch.ones(1).expand(8),
    "negative": lambda: torch.randn(8, dtype=torch.cfloat).conj().imag,
    "real": lambda: torch.fft.fft(torch.rand(8)).real,
}


@pytest.mark.parametrize("way", TENSORS)
def test_a_tensor_of_any_memory_is_compared_by_its_numbers(way):
    net = as_buffer(TENSORS[way]().clone(memory_format=torch.preserve_format) if way == "expanded" else TENSORS[way]())
    net.held = [TENSORS[way]()]
    kept = Kept([net])
    assert kept._walk.is_current() and not kept.changed()
    net.table.data[0] = 5
    assert kept.changed() == ["table"]


class Strict(collections.abc.Mapping):
    def __init__(self, entries):
        self.entries = entries

    def __getitem__(self, key):
        if self.entries[key] is None:
            raise LookupError(f"{key} is not set")
        return self.entries[key]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


class NoText:
    def __repr__(self):
        raise ValueError("no text")


STEADY = {
    "many digits": lambda: (1 << 20000) - 1,
    "key of many digits": lambda: {1 << 20000: 1},
    "key without a text": lambda: {NoText(): 1},
    "memory of an array": lambda: array.array("d", [1]),
}


@pytest.mark.parametrize("way", STEADY)
def test_strange_values_stay_as_they_are(way):
    net = nn.Linear(6, 3)
    net.value = STEADY[way]()
    kept = Kept([net])
    assert kept._walk.is_current() and not kept.changed()


def dead():
    return weakref.proxy(Cold())


UNREADABLE = {
    "pairs": (lambda: itertools.pairwise(range(9)), "an object of pairwise, which exists to change and cannot be read"),
    "flat": (lambda: np.arange(9).flat, "an object of flatiter, which exists to change"),
    "matches": (lambda: re.finditer("a", "aa"), "an object of SRE_Scanner, which exists to change"),
    "queue": (queue.SimpleQueue, "an object of SimpleQueue, which exists to change"),
    "generator": (averages, "an object of async_generator, which exists to change"),
    "proxy": (lambda: [dead()], "weakly-referenced object no longer exists"),
    "mapping": (lambda: Strict({"a": None}), "a is not set"),
}


@pytest.mark.parametrize("way", UNREADABLE)
def test_what_cannot_be_read_is_refused_by_its_name(way):
    make, words = UNREADABLE[way]
    net = nn.Linear(6, 3)
    net.value = make()
    with pytest.raises(UserError, match=f"compared before and after a pass, got `value` with {words}"):
        Kept([net])


def test_a_tensor_of_inference_mode_is_refused_by_its_name():
    with torch.inference_mode():
        net = as_buffer(torch.ones(8))
        held = torch.ones(1 << 17)
    with pytest.raises(UserError, match=r"made in torch.inference_mode.*got 'table'"), tensors_restored(net):
        pass
    net = nn.Linear(6, 3)
    net.held = [held]
    assert not Kept([net]).changed()


class InLoop(nn.Module):
    """It changes a parameter by `.data`, once its weights are large."""

    def __init__(self):
        super().__init__()
        self.first, self.own = nn.Linear(6, 3), []
        self.own.append(self.first.bias)

    def forward(self, x):
        now, hidden = float(x.detach().numpy().std()), self.first(x)
        if self.first.weight.detach().abs().max() > 20:
            self.own[0].data[0] += now
            hidden = hidden * (1 + self.own[0].data[0])
        return hidden


def test_a_run_ends_that_changes_a_parameter_in_a_loop():
    clipped_sum, reason = clipped_sum_for(net := InLoop(), None, X[:0], Y[:0])
    assert reason.startswith("loop")
    with pytest.raises(UserError, match="must keep nothing of a pass for the next one, got `"):
        clipped_sum({name: 100 * p.detach() for name, p in net.named_parameters()}, X, Y, ClipRequest(1.0))
