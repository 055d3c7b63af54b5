"""Attention under `vmap`: torch's kernel, once for all records, gives the gradients of the loop, record by record."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpfl_lightning.privacy.clipping.attention import _Attention
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, cross_entropy_of
from dpfl_lightning.privacy.clipping.taps import TappedSum


@pytest.fixture
def applied(monkeypatch):
    """The shapes of the queries for which the kernel was called."""
    found, really = [], _Attention.apply
    monkeypatch.setattr(_Attention, "apply", lambda *args: found.append(args[0].shape) or really(*args))
    return found


def masked(kind, x, steps, tables):
    """A mask `[1, 2, 3, steps]`, or one with fewer dimensions or heads, of the record x `[1, 3, 4]` or of none."""
    distances = (torch.arange(3)[:, None] - torch.arange(steps)).to(x)
    seen = x[0, 0, 0] + distances < 1.5
    return {
        "none": None,
        "of all": distances <= 1,
        "added": distances,
        "of a head": distances.expand(1, 1, 3, steps),
        "of heads": torch.stack([distances, -distances])[None],
        "of a record": seen,
        "of a record's heads": torch.stack([seen, distances <= 1])[None],
        "nothing is seen": (x[0, 0, 0] > 0) & (distances <= 1),
        "a row": (distances[:1] >= -1).expand(1, 1, 1, steps),
        "learned": tables[0] * distances,
    }[kind]


class Reader(nn.Module):
    """Two heads over x `[B, 3, 4]`, of which keys and values have `steps` positions in each of the `sequences`."""

    def __init__(self, kind, steps=3, sequences=1, by_name=False, **options):
        super().__init__()
        self.kind, self.steps, self.sequences, self.by_name, self.options = kind, steps, sequences, by_name, options
        self.maps = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.tables, self.head = nn.Parameter(torch.randn(2)), nn.Linear(4, 3)

    def forward(self, x):
        def of_heads(one):
            return one.unflatten(-1, (2, 2)).transpose(1, 2)

        own = torch.cat([x * number for number in range(1, 1 + self.sequences)]) if self.sequences > 1 else x
        query, key, value = (of_heads(one(own)) for one in self.maps)
        repeated = torch.arange(self.steps) % 3
        key, value = key[:, :, repeated], value[:, :, repeated]
        mask = masked(self.kind, x, self.steps, self.tables)
        if self.by_name:
            out = F.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=mask, **self.options)
        else:
            out = F.scaled_dot_product_attention(query, key, value, mask, **self.options)
        return self.head(out.transpose(1, 2).flatten(2).mean((0, 1)))[None]


def assert_equals_the_loop(net):
    net = net.double()
    x, y = torch.randn(7, 3, 4, dtype=torch.float64), torch.arange(7) % 3
    params = {name: p.detach() for name, p in net.named_parameters()}
    request = ClipRequest(math.inf, 2, torch.arange(7), 7)
    expected, norms = LoopClippedSum(net, cross_entropy_of(net))(params, x, y, request)
    actual, found = TappedSum(net, cross_entropy_of(net), 4)(params, x, y, request)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found, norms, rtol=1e-9, atol=1e-12)


KINDS = ["none", "of all", "added", "of a head", "of heads", "of a record", "of a record's heads", "nothing is seen"]


@pytest.mark.e2e
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_attention_equals_the_loop(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    kind = data.draw(st.sampled_from([*KINDS, "a row", "learned"]))
    options = {"steps": data.draw(st.integers(1, 5)), "by_name": data.draw(st.booleans())}
    options |= {"sequences": data.draw(st.integers(1, 2))}
    options |= {"is_causal": True} if kind == "none" and data.draw(st.booleans()) else {}
    options |= {"scale": 0.3} if data.draw(st.booleans()) else {}
    assert_equals_the_loop(Reader(kind, **options))


@pytest.mark.parametrize("kind", [*KINDS, "a row"])
@pytest.mark.parametrize("sequences", [1, 2])
def test_masks_of_one_sequence_are_those_of_all(kind, sequences, applied):
    assert_equals_the_loop(Reader(kind, sequences=sequences))
    assert len(applied) == 2


class Windows(nn.Module):
    """Attention in four windows of a record, each with a mask of its own, or with the record's."""

    def __init__(self, of_record):
        super().__init__()
        self.maps, self.head, self.of_record = nn.Linear(4, 12), nn.Linear(4, 3), of_record
        self.register_buffer("mask", torch.randn(4, 1, 3, 3))

    def forward(self, x):
        windows = torch.cat([x + number for number in range(4)])
        query, key, value = self.maps(windows).view(4, 3, 3, 2, 2).permute(2, 0, 3, 1, 4)
        mask = self.mask * x[0, 0, 0] if self.of_record else self.mask
        out = F.scaled_dot_product_attention(query, key, value, mask)
        return self.head(out.transpose(1, 2).flatten(2).mean((0, 1)))[None]


@pytest.mark.parametrize("of_record", [False, True])
def test_each_window_has_its_mask(of_record, applied):
    assert_equals_the_loop(Windows(of_record))
    assert len(applied) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_called_once_for_all_records_of_a_pass(kind, applied):
    assert_equals_the_loop(Reader(kind))
    assert [tuple(shape) for shape in applied] == [(1, 2, 3, 2)] * 2, "two passes of four records"


@pytest.mark.parametrize("kind, options", [("learned", {}), ("none", {"enable_gqa": True})])
def test_what_the_kernel_does_not_cover_goes_as_torch_computes_it(kind, options, applied):
    assert_equals_the_loop(Reader(kind, **options))
    assert not applied


def test_torch_calls_its_kernel_for_the_same_attention():
    """Otherwise values of a pass and of the loop could differ by more than rounding, where rows see nothing."""
    query = torch.randn(1, 2, 3, 2)
    for mask in (None, torch.zeros(3, 3), torch.full((3, 3), -math.inf)):
        expected = F.scaled_dot_product_attention(query, query, query, mask)
        found, _ = _Attention.forward(query, query, query, None if mask is None else mask[None, None], False, None)
        assert torch.equal(expected, found)


def test_a_derivative_of_a_derivative_goes_as_torch_computes_it():
    class Penalised(Reader):
        def forward(self, x):
            query = self.maps[0](x).unflatten(-1, (2, 2)).transpose(1, 2)
            with sdpa_kernel(SDPBackend.MATH):  # the other one has no second derivative
                out = F.scaled_dot_product_attention(query, query, query)
                (slope,) = torch.autograd.grad(out.sin().sum(), query, create_graph=True)
            return self.head((out + slope.square()).transpose(1, 2).flatten(2).mean(1))

    assert_equals_the_loop(Penalised("none"))
