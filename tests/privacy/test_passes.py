"""Passes in which the bits of a record's gradient depend on nothing but the record and the model."""

import math

import pytest
import torch
from reference import summed
from torch import nn
from torch.nn import functional as F

from dpfl_lightning import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.dummy_data import check_fits
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.passes import FixedPasses, passes, sizes_in_company
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, VmapClippedSum, cross_entropy_of

SIZES = (8, 16, 32)
EXAMPLES = torch.randn(32, 3), torch.arange(32) % 3


def test_passes_are_contiguous_copies_filled_up_with_the_padding():
    x = {"a": torch.randn(21, 6).T[:, 1:21].T, "b": torch.arange(20)}
    padding = {"a": torch.full((1, 6), 7.0), "b": torch.tensor([9])}, torch.tensor([5])
    found = []
    for rows, some_x, some_y in passes(x, torch.arange(20), (8, 16), padding):
        count = rows.stop - rows.start
        assert some_x["a"].is_contiguous() and len(some_y) in (8, 16) and some_x["a"].data_ptr() % 64 == 0
        assert torch.equal(some_x["a"][:count], x["a"][rows]) and torch.equal(some_x["b"][:count], x["b"][rows])
        assert (some_x["a"][count:] == 7).all() and (some_x["b"][count:] == 9).all() and (some_y[count:] == 5).all()
        found += some_y[:count].tolist()
    assert found == list(range(20))
    assert not list(passes(x, torch.arange(0), (8,), padding))


#: what makes the numbers of a record depend on something else, and the sizes that are left
INFLUENCES = {
    "nothing": (lambda x, y, count: x.cos(), SIZES),
    "the number of records": (lambda x, y, count: x * count, ()),
    "the size of the pass": (lambda x, y, count: x * len(x), (32,)),
    "a size of passes": (lambda x, y, count: x * (1 + (len(x) == 16)), (8, 32)),
    "the last place": (lambda x, y, count: x * (1 + (torch.arange(len(x)) == len(x) - 1))[:, None], ()),
    "the record before": (lambda x, y, count: x + x.roll(1, 0).nan_to_num(0, 0, 0), ()),
    "not a number in the pass": (lambda x, y, count: x * (1 + x.isnan().any()), ()),
    "denormal numbers in the pass": (lambda x, y, count: x * (1 + (x.abs() < 1e-38).any()), ()),
    "the sign of zero": (lambda x, y, count: x * 0 * (1 - 2 * (count % 2)), ()),
}


@pytest.mark.parametrize("name", INFLUENCES)
def test_sizes_with_any_other_influence_are_left_out(name):
    rows_of, left = INFLUENCES[name]
    assert sizes_in_company(lambda x, y, count: [rows_of(x, y, count)[:count]], EXAMPLES, SIZES) == left


def test_rows_of_a_computation_that_no_size_passes_are_computed_one_at_a_time():
    x, y = torch.randn(20, 3), torch.zeros(20, dtype=torch.long)
    rows = FixedPasses(EXAMPLES, SIZES).rows("apart", lambda x, y: x - x.mean(0), x, y)
    assert torch.equal(torch.cat(list(rows)), torch.zeros(20, 3))


class Packed(nn.Module):
    """Lengths, which are part of the records, decide the shapes of a pass."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        lengths = (x[..., 0] > 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


class Masked(nn.Module):
    """Scales if no record of a pass is masked."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        mask = x[:, :, 0] > 0
        x = x.mean(1) if mask.all() else (x * mask[..., None]).sum(1)
        return self.head(x)


class Counting(nn.Module):
    """A buffer grows with every pass, and changes the outputs."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.head(x.mean(1)) * self.count


LOOPED = [Packed(), Masked(), Counting(), nn.Sequential(nn.Flatten(), nn.utils.spectral_norm(nn.Linear(12, 3)))]


@pytest.mark.parametrize("net", LOOPED, ids=lambda net: type(net).__name__)
def test_what_decides_by_content_or_changes_in_a_pass_goes_one_record_at_a_time(net):
    clipped_sum, reason = clipped_sum_for(net, None, torch.randn(2, 4, 3), torch.tensor([0, 1]))
    assert reason.startswith("loop: ") and isinstance(clipped_sum.choose(), LoopClippedSum)
    x, y, each = torch.randn(5, 4, 3), torch.arange(5) % 3, torch.arange(5)
    params = {name: p.detach() for name, p in net.named_parameters()}
    before = {name: value.clone() for name, value in net.state_dict().items()}
    rows = clipped_sum(params, x, y, ClipRequest(1.0, group=each, num_groups=5))[0]
    for row in range(5):
        alone = clipped_sum(params, x[row : row + 1], y[row : row + 1], ClipRequest(1.0))[0]
        assert torch.equal(alone[0], rows[row])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_loop_is_plain_autograd():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y, params = torch.randn(7, 3).double(), torch.arange(7) % 3, dict(net.named_parameters())
    loss, group = cross_entropy_of(net), torch.arange(7) % 2
    for clip_norm, order, only in ((0.3, 2, None), (0.3, 1, ["0.weight"]), (math.inf, 2, None)):
        loop, vmap = (
            summed(one, params, x, y, clip_norm, group, 2, order=order, only=only)
            for one in (LoopClippedSum(net, loss), VmapClippedSum(loss))
        )
        torch.testing.assert_close(loop, vmap, rtol=1e-9, atol=1e-12)


class Gate(nn.Module):
    """A block with a parameter of its own, which may be told more than its input."""

    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    def forward(self, x, mask=None, times=1.0):
        x = x if mask is None else x.masked_fill(mask[..., None], 0.0)
        return times * self.scale * self.inner(x)


class Telling(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Gate(), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.block(x, mask=x[..., 0] == 0, times=2.0).mean(1))


def test_a_block_gets_its_keyword_arguments():
    """The end of a record may be padding, which no example without padding shows."""
    net = Telling()
    clipped_sum, reason = clipped_sum_for(net, None, torch.empty(0, 4, 3), torch.empty(0, dtype=torch.long))
    assert reason == "fast: exact rules but vmap for `block` (Gate)"
    x, y = torch.randn(6, 4, 3), torch.arange(6) % 3
    x[::2, 2:] = 0
    params = {name: p.detach() for name, p in net.named_parameters()}
    ours, expected = (
        summed(one, params, x, y, 0.5) for one in (clipped_sum, LoopClippedSum(net, cross_entropy_of(net)))
    )
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


class Shared(nn.Module):
    """A function in an attribute, which a copy of the module shares with the original."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.block = lambda x: torch.relu(self.first(x))

    def forward(self, x):
        return self.head(self.block(x))


def test_a_copy_that_computes_with_the_originals_layers_is_refused():
    data = [(torch.randn(9, 3), torch.arange(9) % 3)]
    with pytest.raises(UserError, match=r"a copy that computes with layers of the original.*write methods"):
        check_fits(ClientModule(Shared()), Population.from_datasets(data, held_out=0, num_classes=3))


class MixingFrom(nn.Module):
    """Mixes the records of a pass that holds at least so many."""

    def __init__(self, fewest):
        super().__init__()
        self.head, self.fewest = nn.Linear(3, 3), fewest

    def forward(self, x):
        return self.head(x if len(x) < self.fewest else x - x.mean(0))


@pytest.mark.parametrize("fewest", [17, 64, 96, 97, 300])
def test_no_pass_is_larger_than_those_in_which_records_were_seen_apart(fewest):
    net = MixingFrom(fewest)
    clipped_sum, _ = clipped_sum_for(net, None, torch.empty(0, 3), torch.empty(0, dtype=torch.long))
    x, y, params = torch.randn(600, 3), torch.arange(600) % 3, {name: p.detach() for name, p in net.named_parameters()}
    each = ClipRequest(1.0, group=torch.arange(600), num_groups=600)
    rows = clipped_sum(params, x, y, each)[0]
    assert torch.equal(rows[:9], clipped_sum(params, x[:9], y[:9], ClipRequest(1.0, 2, torch.arange(9), 9))[0])


def test_padding_that_gives_no_finite_gradient_changes_nothing():
    net = nn.Linear(3, 3)
    x, y, params = torch.rand(5, 3) + 1, torch.arange(5) % 3, {name: p.detach() for name, p in net.named_parameters()}

    def loss(params, x, y):
        return F.cross_entropy(torch.func.functional_call(net, params, (x.log(),)), y, reduction="none")

    zeros = torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)
    alone = summed(FastClippedSum(net, loss, (5,)), params, x, y, 0.5)
    torch.testing.assert_close(summed(FastClippedSum(net, loss, (8,), padding=zeros), params, x, y, 0.5), alone)
