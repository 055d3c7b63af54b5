"""LSTM and GRU under `vmap`: all steps of all records at once give the gradients of the loop, record by record."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from dpfl_lightning.privacy.clipping.recurrent import STEPS
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, cross_entropy_of
from dpfl_lightning.privacy.clipping.taps import TappedSum

KINDS = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def applied(monkeypatch):
    """The functions of all steps that were called."""
    found, really = [], {func: steps.apply for func, steps in STEPS.items()}
    for func, steps in STEPS.items():
        monkeypatch.setattr(steps, "apply", lambda *args, func=func: found.append(func) or really[func](*args))
    return found


class Reader(nn.Module):
    """A recurrent layer over x `[B, T, I]`, the state that it gets and all that it returns, and a linear layer."""

    def __init__(self, kind, inputs=3, size=4, state=None, **options):
        super().__init__()
        self.layer, self.state = kind(inputs, size, **options), state
        directions = 1 + self.layer.bidirectional
        self.head = nn.Linear(size * directions * (1 + self.layer.num_layers * (1 + (kind is nn.LSTM))), 3)

    def given(self, x):
        """A state that depends on the record, or on the parameters alone."""
        states = self.layer.num_layers * (1 + self.layer.bidirectional)
        one = x.mean((1, 2)) if self.state == "of record" else self.head.bias[:1].expand(len(x))
        state = one[None, :, None].expand(states, len(x), self.layer.hidden_size).contiguous()
        return (state, state.sin()) if isinstance(self.layer, nn.LSTM) else state

    def read(self, x):
        x = x if self.layer.batch_first else x.transpose(0, 1)
        out, last = self.layer(
            x, self.given(x if self.layer.batch_first else x.transpose(0, 1)) if self.state else None
        )
        states = last if isinstance(last, tuple) else (last,)
        out = (out if self.layer.batch_first else out.transpose(0, 1)).cos().mean(1)
        return torch.cat([out, *(one.transpose(0, 1).flatten(1) for one in states)], dim=1)

    def forward(self, x):
        return self.head(self.read(x))


def assert_equals_the_loop(net, x, order=2, size=4):
    net = net.double()
    y, params = torch.arange(len(x)) % 3, {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    request = ClipRequest(math.inf, order, torch.arange(len(x)), len(x))
    expected, norms = LoopClippedSum(net, cross_entropy_of(net))(params, x.double(), y, request)
    actual, found = TappedSum(net, cross_entropy_of(net), size)(params, x.double(), y, request)
    assert (actual - expected).norm(dim=1).le(1e-9 * expected.norm(dim=1)).all()
    torch.testing.assert_close(found, norms, rtol=1e-9, atol=0)


@pytest.mark.e2e
@KINDS
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_all_steps_equal_the_loop(kind, data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    options = {
        "num_layers": data.draw(st.integers(1, 2)),
        **{name: data.draw(st.booleans()) for name in ("bidirectional", "bias", "batch_first")},
        "state": data.draw(st.sampled_from([None, "of record", "of parameters"])),
    }
    inputs, records, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    assert_equals_the_loop(
        Reader(kind, inputs, **options), torch.randn(records, steps, inputs), data.draw(st.sampled_from([1, 2]))
    )


@KINDS
def test_all_steps_are_taken_at_once(kind, applied):
    assert_equals_the_loop(Reader(kind, batch_first=True), torch.randn(3, 5, 3))
    assert len(applied) == 1


class Several(Reader):
    """Each record has four sequences, and one of three is read twice."""

    def forward(self, x):
        first = self.read(x.reshape(-1, 5, 3)).reshape(len(x), 4, -1).sum(1)
        return self.head(first + self.read(x[:, 0].sin()))


class Penalised(Reader):
    """The weights are used in another way, too."""

    def forward(self, x):
        return super().forward(x) + self.layer.weight_hh_l0.square().mean() + self.layer.bias_ih_l0[:3]


class Derived(Reader):
    """The derivative of an output by the inputs takes part: steps have one derivative, so they are taken singly."""

    def forward(self, x):
        x = x + self.head.bias[:1]
        out = self.head(self.read(x))
        (found,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        return out + found.flatten(1)[:, :3]


@KINDS
@pytest.mark.parametrize("kind_of_model, shape, at_once", [(Several, (4, 5, 3), 2), (Penalised, (5, 3), 1)])
def test_other_uses_are_added(kind, kind_of_model, shape, at_once, applied):
    assert_equals_the_loop(kind_of_model(kind, batch_first=True), torch.randn(3, *shape), size=3)
    assert len(applied) == at_once


@KINDS
def test_derivatives_of_derivatives_take_single_steps(kind):
    assert_equals_the_loop(Derived(kind, batch_first=True), torch.randn(3, 5, 3), size=3)


@KINDS
def test_computed_and_frozen_weights_take_single_steps(kind, applied):
    net = Reader(kind, batch_first=True)
    parametrizations.spectral_norm(net.layer, "weight_hh_l0").eval()
    assert_equals_the_loop(net, torch.randn(3, 5, 3))
    for name in ("weight_hh_l0", "bias_ih_l0", "weight_ih_l0"):
        net = Reader(kind, batch_first=True)
        net.layer.get_parameter(name).requires_grad_(False)
        assert_equals_the_loop(net, torch.randn(3, 5, 3))
    assert len(applied) == 2  # of a frozen part that inputs have


@KINDS
def test_a_sequence_that_is_not_finite_changes_no_other(kind):
    net, y = Reader(kind, batch_first=True), torch.tensor([0, 1, 0, 1])
    params = {name: p.detach() for name, p in net.named_parameters()}
    clipped_sum, x = TappedSum(net, cross_entropy_of(net), 4), torch.randn(4, 6, 3)
    request = ClipRequest(1.0, group=torch.arange(4), num_groups=4)
    before = clipped_sum(params, x, y, request)[0].clone()
    for bad in (math.nan, math.inf):
        x[1] = bad
        after, norms = clipped_sum(params, x, y, request)
        assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
        assert bad == math.inf or (not norms[1].isfinite() and not after[1].any())


@KINDS
def test_a_record_has_the_same_bits_in_every_place_and_company(kind):
    net, x = Reader(kind, batch_first=True), torch.randn(8, 6, 3)
    params = {name: p.detach() for name, p in net.named_parameters()}
    clipped_sum = TappedSum(net, cross_entropy_of(net), 8)
    request, y = ClipRequest(1.0, group=torch.arange(8), num_groups=8), torch.arange(8) % 3
    before = clipped_sum(params, x, y, request)[0].clone()
    for places in (torch.arange(8).roll(3), torch.full((8,), 5)):
        assert torch.equal(clipped_sum(params, x[places], y[places], request)[0], before[places])
