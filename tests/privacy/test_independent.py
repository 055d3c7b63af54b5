"""No operator that may run in a pass lets a record feel another one; what runs code or is of no list may not."""

import functools
import json
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.independent import is_tried, keeps_records_apart, not_plain
from dpfl_lightning.privacy.clipping.watched import LeftVmap, WatchedCalls

SCRIPT = Path(__file__).parents[1] / "independent_operators.py"


@pytest.mark.e2e
def test_no_listed_operator_lets_a_record_feel_another_one():
    run = subprocess.run([sys.executable, SCRIPT, "12"], check=True, capture_output=True, text=True)
    found = json.loads(run.stdout)
    assert found["felt"] == []
    assert found["ran"] > 600


@pytest.mark.parametrize(
    ("func", "known"),
    [
        *((torch.add, True), (Tensor.add_, True), (torch.linalg.svd, True), (torch.special.erf, True)),
        *((Tensor.shape.__get__, True), (Tensor.grad_fn.__get__, False), (Tensor.data.__set__, False)),
        *((Tensor.requires_grad.__set__, True), (Tensor.as_strided_, False), (torch.as_strided, True)),
        *((Tensor.register_hook, False), (torch.quantize_per_tensor, False), (torch.segment_reduce, False)),
    ],
)
def test_functions_are_known_by_name(func, known):
    assert keeps_records_apart(func, func.__name__) == known


@pytest.mark.parametrize(
    ("operator", "tried"),
    [
        *((torch.ops.aten.relu.default, True), (torch.ops.aten.relu, True)),
        *((torch.ops.aten.scatter_.reduce, False), (torch.ops.aten.linspace, False)),
    ],
)
def test_operators_may_be_called_by_name_if_they_ran_when_all_were_tried(operator, tried):
    assert is_tried(operator) == tried


class Level(IntEnum):
    LOW = 1


def test_arguments_are_plain_or_told():
    plain = (1, 2.0, "mean", None, ..., slice(1, None), [torch.ones(1)], {"dim": (0, 1)}, np.float32(2), range(3))
    assert not_plain((*plain, torch.float32, np.zeros(2), torch.ones(2, 2).max(0), torch.FloatTensor, int)) is None
    for one in (Level.LOW, abs, functools.partial(abs), slice(Level.LOW), [{"a": object}], np.array([abs]), iter([1])):
        assert not_plain((1, one)) is not None


OF_OPTIONS = {
    "floats": lambda h: sum(F.interpolate(h[:, None], scale_factor=k).mean(2) for k in (2.0, 0.5)),
    "arrays": lambda h: h[:, np.array([0, 1])].sum(1, True) * h[:, np.array([1, 2, 3])],
    "ranges": lambda h: h[:, range(2)].sum(1, True) * h[:, range(3)],
    "numbers": lambda h: h.narrow(1, 0, np.int64(2)).sum(1, True) * h.narrow(1, 0, np.int64(3)),
    "slices": lambda h: h[:, slice(np.int64(2))].sum(1, True) * h[:, slice(np.int64(3))],
    "kinds": lambda h: h[True].sum(1) * h[:, 1],
}


class Optional(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.head, self.function = nn.Linear(6, 8), nn.Linear(8, 3), function

    def forward(self, x):
        hidden = self.first(x)
        return self.head(hidden + self.function(hidden).mean())


@pytest.mark.parametrize("way", OF_OPTIONS)
def test_shapes_are_compared_for_each_value_of_an_option(way):
    _, reason = clipped_sum_for(Optional(OF_OPTIONS[way]), None, torch.empty(0, 6), torch.empty(0, dtype=torch.long))
    assert reason.startswith("vmap"), reason


def test_another_shape_of_a_record_alone_is_named(monkeypatch):
    monkeypatch.setattr("dpfl_lightning.privacy.clipping.watched.shapes_alone", lambda *call: [torch.Size([1, 5])])
    with pytest.raises(LeftVmap, match=r"`cumsum` .* it gives a record shape \[4\], and one alone shape \[1, 5\]"):
        torch.func.vmap(lambda x: watched(x.cumsum, 0))(torch.ones(2, 4))


def watched(call, *args):
    with WatchedCalls(under_vmap=True):
        return call(*args)
