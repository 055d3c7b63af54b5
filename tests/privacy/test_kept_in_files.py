"""What code of users keeps beside the model is noticed wherever its functions lead, and what stays is none."""

import collections
import contextvars
import functools
import importlib
import itertools
import logging
import queue
import random
import sys
import types

import kept_elsewhere
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.privacy.clipping.state import Kept

X, Y = torch.randn(21, 6, generator=torch.Generator().manual_seed(0)), torch.arange(21) % 3
COUNTS, BOX = {"n": 0}, {}


class Late(nn.Module):
    """It calls `late`, which its attributes and variables lead to, once its weights are large."""

    def __init__(self, helper=None):
        super().__init__()
        self.first, self.head, self.helper = nn.Linear(6, 8), nn.Linear(8, 3), helper

    def late(self, hidden):
        return self.helper(hidden)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.head(self.late(hidden) if self.first.weight.detach().abs().max() > 20 else hidden)


def refused(net, loss=None):
    """Return the sentence that ends a run of a model with large weights."""
    clipped_sum, _ = clipped_sum_for(net, loss, X[:0], Y[:0])
    params = {name: 100 * p.detach() for name, p in net.named_parameters()}
    with pytest.raises(UserError, match="must keep nothing of a pass for the next one") as error:
        clipped_sum(params, X, Y, ClipRequest(1.0))
    return f"{error.value}"


def counted(hidden):
    COUNTS["n"] += 1
    return hidden


class Calling:
    def __call__(self, hidden):
        return counted(hidden)


class Entering:
    def __enter__(self):
        COUNTS["n"] += 1

    def __exit__(self, *error):
        pass

    def __call__(self, hidden):
        with self:
            return hidden


class Making:
    class Made:
        def __init__(self):
            COUNTS["n"] += 1

    def __call__(self, hidden):
        self.Made()
        return hidden


class Indexed:
    def __getitem__(self, key):
        COUNTS["n"] += 1
        return key

    def scale(self, hidden):
        return self[hidden]


class CallingLayer(nn.Linear):
    def __call__(self, hidden):
        return super().__call__(counted(hidden))


def wrapped(function):
    @functools.wraps(function)
    def inner(*args):
        return function(counted(*args))

    return inner


HELPERS = {
    "__call__": Calling,
    "__enter__": Entering,
    "__init__": Making,
    "__getitem__": lambda: Indexed().scale,
    "__call__ of a layer": lambda: CallingLayer(8, 8),
    "wraps": lambda: wrapped(F.relu),
}


@pytest.mark.parametrize("way", HELPERS)
def test_special_methods_and_wrappers_are_functions_like_others(way):
    assert "`COUNTS` of test_kept_in_files.py" in refused(Late(HELPERS[way]()))


def test_a_variable_with_a_wrapper_is_read():
    relu = wrapped(F.relu)
    BOX["relu"] = relu
    assert "`COUNTS` of test_kept_in_files.py" in refused(type("Kind", (Late,), {"late": in_box("relu")})())


def in_box(key):
    return lambda self, hidden: BOX[key](hidden)


class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, hidden):
        with torch.no_grad():
            self.mean.add_(1)
        return hidden


class OfClass:
    count = 0

    @classmethod
    def scale(cls, hidden):
        cls.count += 1
        return hidden


def once(change):
    def call(hidden):
        change()
        return hidden

    return call


def of(value, change):
    return value, lambda hidden: (change(value), hidden)[1]


class Hooked(collections.OrderedDict):
    pass


class WithSlot(nn.Linear):
    __slots__ = ("slot",)


def beside(way):
    net = Late(WithSlot(2, 2))
    net.helper.slot, net.first.weight.more = [[0]], [[0]]
    net.first._forward_hooks = Hooked()
    net.first._forward_hooks.more = [[0]]
    return net, {"slot": net.helper.slot, "parameter": net.first.weight.more, "hooks": net.first._forward_hooks.more}[
        way
    ]


@pytest.mark.parametrize("way", ["slot", "parameter", "hooks"])
def test_what_lies_beside_tables_of_a_module_is_read(way):
    net, held = beside(way)
    kept = Kept([net])
    assert kept._walk.is_current() and not kept.changed()
    held[0][0] = 1
    assert len(kept.changed()) == 1


class OfPart:
    scale = functools.partialmethod(counted)


CONTEXT = contextvars.ContextVar("kept", default=0)
TEACHER = nn.Linear(8, 8)


def taught():
    for p in TEACHER.parameters():
        p.data.mul_(0.9).add_(0.1)


#: what a variable holds, and how it changes
HELD = {
    "module": lambda: of(Averaging(), lambda one: one(torch.ones(2))),
    "module in a list": lambda: of([Averaging()], lambda one: one[0](torch.ones(2))),
    "class": lambda: of({"a": OfClass}, lambda one: one["a"].scale(0)),
    "function in a tuple": lambda: of([(counted, {})], lambda one: one[0][0](0)),
    "partial": lambda: of({"a": functools.partial(counted)}, lambda one: one["a"](0)),
    "in a namespace": lambda: of(types.SimpleNamespace(act=counted), lambda one: one.act(0)),
    "bound method": lambda: of(Indexed().scale, lambda one: one(0)),
    "count": lambda: of([itertools.count()], lambda one: next(one[0])),
    "random": lambda: of([random.Random(0)], lambda one: one[0].random()),
    "generator": lambda: of([(i for i in range(99))], lambda one: next(one[0])),
    "numpy": lambda: of({"a": np.random.default_rng(0)}, lambda one: one["a"].random()),
    "torch": lambda: of({"a": torch.Generator()}, lambda one: one["a"].manual_seed(int(one["a"].initial_seed()) + 1)),
    "context": lambda: of([CONTEXT], lambda one: one[0].set(one[0].get() + 1)),
    "cache": lambda: of([functools.cache(lambda one: one)], lambda one: one[0](one[0].cache_info().currsize)),
    "teacher": lambda: of([TEACHER], lambda one: taught()),
    "gradient": lambda: of([torch.ones(1, requires_grad=True)], lambda one: (one[0] * 2).sum().backward()),
    "deep": lambda: of({"a": [{"b": [{"c": [{"d": [0]}]}]}]}, lambda one: one["a"][0]["b"][0]["c"][0].update(d=[1])),
    "singledispatch": lambda: of(functools.singledispatch(counted), lambda one: one(0)),
    "method of a part": lambda: of(OfPart(), lambda one: one.scale()),
    "without gradients": lambda: of([torch.no_grad()(counted)], lambda one: one[0](0)),
    "vectorised": lambda: of([torch.vmap(counted)], lambda one: one[0](torch.ones(2))),
    "queue": lambda: of([queue.Queue()], lambda one: one[0].put(0)),
    "optimizer": lambda: of([torch.optim.SGD([torch.ones(1)], 0.1)], lambda one: one[0].param_groups[0].update(lr=2)),
}
HIDDEN = None


@pytest.mark.parametrize("way", HELD)
def test_what_is_seen_in_a_variable_is_seen_in_its_collections(way):
    held, change = HELD[way]()
    globals()["HIDDEN"] = held
    kept = Kept([lambda: HIDDEN])
    assert kept._walk.is_current() and not kept.changed()
    change(torch.ones(2))
    assert not kept._walk.is_current() and kept.changed()


class Importing(Late):
    def late(self, hidden):
        from kept_elsewhere import count

        count()
        return hidden


class ImportingWhole(Late):
    def late(self, hidden):
        import kept_elsewhere as other

        other.TOTAL += 1
        return hidden


@pytest.mark.parametrize("kind", [Importing, ImportingWhole])
def test_a_file_that_is_imported_in_a_function_is_one_of_the_model(kind):
    kept_elsewhere.TOTAL = 0.0
    assert "`TOTAL` of kept_elsewhere.py" in refused(kind())


def test_a_file_that_a_pass_imports_first_is_a_change(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("N = 0\ndef step():\n    global N\n    N += 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    def late():
        from imported_late import step

        step()

    kept = Kept([late])
    late()
    assert set(kept.changed()) >= {"N of imported_late.py", "step of imported_late.py"}
    kept = Kept([late])
    assert kept._walk.is_current()
    late()
    assert kept.changed() == ["N of imported_late.py"]
    sys.modules.pop("imported_late")


def test_a_hook_of_all_modules_takes_part():
    handle = nn.modules.module.register_module_forward_hook(lambda layer, given, out: counted(out))
    kept = Kept([Late()])
    handle.remove()
    assert kept.changed()
    handle = nn.modules.module.register_module_forward_hook(lambda layer, given, out: counted(out))
    kept = Kept([nn.Linear(1, 1)])
    COUNTS["n"] += 1
    handle.remove()
    assert "COUNTS of test_kept_in_files.py" in {*kept.changed()} | {*map(str, kept._before)}


@pytest.mark.parametrize("name", ["sched", "profile", "code"])
def test_a_file_of_a_user_is_known_by_its_path(name, tmp_path, monkeypatch):
    (tmp_path / f"{name}.py").write_text("N = 0\nclass Stats:\n    n = 0\ndef scale(h):\n    global N\n    N += 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    module = importlib.import_module(name)
    try:
        kept = Kept([module.scale, module.Stats()])
        module.scale(0)
        assert kept.changed() == [f"N of {name}.py"]
        kept = Kept([module.Stats()])
        module.Stats.n += 1
        assert kept.changed()
    finally:
        sys.modules.pop(name)


NOW = [1]


@functools.lru_cache(maxsize=1)
def cached():
    return NOW[0]


def test_a_cache_that_is_cleared_and_filled_again_has_changed():
    cached()
    kept = Kept([cached])
    cached()
    assert kept._walk.is_current()
    cached.cache_clear()
    NOW[:] = [2]
    cached()
    NOW[:] = [1]
    assert kept.changed() == ["cached"]


class Logging(Late):
    def __init__(self):
        super().__init__()
        self.log = logging.getLogger("kept.in.files")

    def late(self, hidden):
        self.log.debug("large weights")
        return twice(hidden)


@functools.singledispatch
def twice(hidden):
    return hidden


@twice.register
def _(hidden: torch.Tensor):
    return 2 * hidden


def test_caches_of_pythons_own_that_hold_no_number_may_be_filled():
    net = Logging()
    clipped_sum, _ = clipped_sum_for(net, None, X[:0], Y[:0])
    params = {name: 100 * p.detach() for name, p in net.named_parameters()}
    logging.getLogger("kept.in.files")._cache.clear()
    assert clipped_sum(params, X, Y, ClipRequest(1.0))[0].isfinite().all()


@functools.lru_cache
def table(size):
    return (1.0,) * size


class FilledLater(Late):
    @functools.cached_property
    def scale(self):
        return 2.0

    def late(self, hidden):
        return hidden * torch.tensor(table(hidden.shape[-1])) * self.scale


def test_a_cache_that_is_filled_later_is_named():
    table.cache_clear()
    text = refused(FilledLater())
    assert "`scale` (a cache)" in text and "`table` of test_kept_in_files.py (a cache)" in text
    assert "is called once in __init__" in text
    net = FilledLater()
    net.late(torch.ones(1, 8))
    clipped_sum, _ = clipped_sum_for(net, None, X[:0], Y[:0])
    clipped_sum({name: 100 * p.detach() for name, p in net.named_parameters()}, X, Y, ClipRequest(1.0))


class Drawing(Late):
    def late(self, hidden):
        random.random()
        return hidden


@pytest.mark.parametrize("name", ["random", "names", "slots", "attributes"])
def test_no_attribute_hides_another_thing_by_its_name(name):
    net = Drawing()
    setattr(net, name, [0])
    kept = Kept([net])
    getattr(net, name)[0] = 1
    assert kept.changed() == [name]
    kept = Kept([net])
    net.late(0)
    assert kept.changed() == ["state of random"]


class Node:
    def __init__(self, rest):
        self.rest = rest


def chain(levels):
    node = None
    for _ in range(levels):
        node = Node(node)
    return node


def nested(levels):
    found = []
    for _ in range(levels):
        found = [found]
    return found


STRANGE = {
    "eval": lambda: eval("lambda h: h * 2", {}),
    "list of many levels": lambda: nested(3000),
    "linked list": lambda: chain(3000),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.e2e
@pytest.mark.parametrize("way", STRANGE)
def test_strange_attributes_stay_as_they_are(way):
    net = Late(STRANGE[way]())
    _, reason = clipped_sum_for(net, None, X[:0], Y[:0])
    assert reason.startswith("vmap")
    kept = Kept([net])
    assert kept._walk.is_current()
    net.helper = STRANGE["eval"]()
    assert kept.changed()
