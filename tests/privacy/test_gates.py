"""The compiled steps of an LSTM, beside torch's."""

import math

import pytest
import torch
from torch import nn

from dpfl_lightning.kernels import gate_loops, gates
from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.reference import ClipRequest


def activated(values):
    """The first gate of an LSTM (a sigmoid) and the third (a tanh) for numbers `[N]`."""
    size, none = len(values), torch.zeros(2, 1, len(values))
    row = values.repeat(4)[None, None].clone()
    gate_loops.lstm_step(0, *gates.arrays(row, none, none[:1].clone(), none.clone()))
    return row[0, 0, :size], row[0, 0, 2 * size : 3 * size]


@pytest.mark.parametrize("place, exact", [(0, torch.sigmoid), (1, torch.tanh)], ids=["sigmoid", "tanh"])
def test_activations_are_off_by_a_few_units_in_the_last_place(place, exact):
    values = torch.cat([torch.linspace(-85, 85, 40_001), torch.logspace(-30, 2, 1000), -torch.logspace(-30, 1, 1000)])
    expected = exact(values.double())
    assert ((activated(values)[place] - expected).abs() <= 5 * 2**-24 * expected.abs()).all()
    ends = torch.tensor([20.0, 88.0, math.inf, -math.inf, math.nan])  # exactly 1 leaves no gradient
    torch.testing.assert_close(activated(ends)[place], exact(ends), equal_nan=True, rtol=0.0, atol=1e-37)


@pytest.mark.parametrize("name", ["lstm_step", "lstm_step_back"])
def test_wrong_loops_are_refused(name, monkeypatch):
    monkeypatch.setattr(gate_loops, name, lambda t, *arrays: arrays[-1].fill(0.0))
    with pytest.raises(RuntimeError, match="wrong steps of an LSTM on this processor"):
        gates.loops.__wrapped__()


class Last(nn.Module):
    """The last output of a recurrent layer, and a linear layer."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.last = kind(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_record_that_is_not_finite_changes_no_other(kind):
    torch.manual_seed(0)
    net, x, y = Last(kind), torch.randn(4, 6, 3), torch.tensor([0, 1, 0, 1])
    params = {name: p.detach() for name, p in net.named_parameters()}
    each = ClipRequest(1.0, group=torch.arange(4), num_groups=4)
    clipped_sum = FastClippedSum(net)
    before, _ = clipped_sum(params, x, y, each)
    for bad in (math.nan, math.inf):
        x[1] = bad
        after, norms = clipped_sum(params, x, y, each)
        assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
        assert bad == math.inf or (not norms[1].isfinite() and not after[1].any())
