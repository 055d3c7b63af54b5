"""Passes in which the bits of a record's gradient depend on nothing but the record and the model."""

import math
import os
import subprocess
import sys

import pytest
import torch
from reference import summed
from torch import nn
from torch.nn import functional as F

from dpfl_lightning import Population, models
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client import answers
from dpfl_lightning.federated.client.checks import check_fits
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.query import ChargedQuery, MeanLoss
from dpfl_lightning.kernels import dense_conv
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.passes import FixedPasses, is_private
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, VmapClippedSum, cross_entropy_of
from dpfl_lightning.privacy.clipping.vector_loops import multiple_of
from dpfl_lightning.privacy.mechanism import Gaussian

pytestmark = pytest.mark.usefixtures("code_was_read")  # of rules, and of trials of code

SIZES = (8, 16, 32)
EXAMPLES = torch.randn(40, 3), torch.arange(40) % 3


#: what makes the numbers of a record depend on something else than the record
INFLUENCES = {
    "the number of records": lambda x, y, count: x * count,
    "the last place": lambda x, y, count: x * (1 + (torch.arange(len(x)) == len(x) - 1))[:, None],
    "the record before": lambda x, y, count: x + x.roll(1, 0).nan_to_num(0, 0, 0),
    "not a number in the pass": lambda x, y, count: x * (1 + x.isnan().any()),
    "denormal numbers in the pass": lambda x, y, count: x * (1 + (x.abs() < 1e-38).any()),
    "the sign of zero": lambda x, y, count: x * 0 * (1 - 2 * (count % 2)),
}


@pytest.mark.parametrize("name", INFLUENCES)
@pytest.mark.parametrize("size", [8, 32])
def test_a_size_with_any_other_influence_fails(name, size):
    rows_of = INFLUENCES[name]
    assert not is_private(lambda x, y, count: [rows_of(x, y, count)[:count]], EXAMPLES, size)
    assert is_private(lambda x, y, count: [(x.cos() * len(x))[:count]], EXAMPLES, size)


def test_neighbours_of_two_bytes_are_hostile_too():
    examples = EXAMPLES[0].half(), EXAMPLES[1]
    assert not is_private(lambda x, y, count: [(x * (1 + (x == 0).any()))[:count]], examples, 32)


@pytest.mark.e2e
def test_loops_that_are_checked_on_first_use_are_no_part_of_a_pass():
    """Several threads do not use them, so that the first use is in a pass that is watched, which has one thread."""
    net, threads = models.build("cnn_small", (1, 28, 28), 10), torch.get_num_threads()
    dense_conv._block_loops.cache_clear()
    torch.set_num_threads(2)
    try:
        how = clipped_sum_for(net, None, torch.zeros(1, 1, 28, 28), torch.zeros(1, dtype=torch.long))[1]
    finally:
        torch.set_num_threads(threads)
    assert how == "fast: exact rules for all layers"


@pytest.mark.parametrize(("factor", "private"), [(lambda count: 1, True), (lambda count: count, False)])
def test_who_refuses_hostile_neighbours_is_checked_without_them(factor, private):
    def rows_of(x, y, count):
        if not x.isfinite().all():
            raise ValueError("such records are refused")
        return [x[:count] * factor(count)]

    assert is_private(rows_of, EXAMPLES, 32) == private


def test_the_cheapest_size_that_passes_is_used():
    """It follows from the expected number of records alone, never from the drawn one."""
    fixed = FixedPasses(EXAMPLES, SIZES)
    assert [fixed.size("all", lambda x, y, count: [x.relu()[:count]], e) for e in (4.0, 12.0, 100.0, None)] == [
        8,
        16,
        32,
        32,
    ]
    assert fixed.size("odd", lambda x, y, count: [x[:count] * (1 + (len(x) == 32) * count)], 100.0) == 16
    assert fixed.size("none", lambda x, y, count: [x[:count] * count], 100.0) == 1


#: what is computed for n records `[n, 21]`, and what the size of its passes has to be a multiple of on a CPU
ENDS = {
    "relu": (torch.relu, 1),
    "product": (lambda x: x @ x.T @ x, 1),
    "silu": (F.silu, 32),
    "silu of 24 numbers": (lambda x: F.silu(x[:, :20].repeat(1, 6)[:, :24]), 4),
    "silu of 64 numbers": (lambda x: F.silu(x.repeat(1, 4)[:, :64]), 1),
    "silu in float64": (lambda x: F.silu(x.double()), 16),
    "silu in bfloat16": (lambda x: F.silu(x.bfloat16()).float(), 64),
    "silu, records last in memory": (lambda x: F.silu(x.repeat(1, 4)[:, :64].T.contiguous().T), 32),
    "under vmap": (torch.vmap(F.silu), 32),
    "gradient": (torch.vmap(torch.func.grad(lambda x: F.softplus(x).sum())), 32),
    "square": (torch.square, 1),
    "sum with a factor": (lambda x: torch.add(x, x, alpha=0.3), 32),
    "complex": (lambda x: torch.fft.fft(x).real, 16),
    "hardtanh": (F.hardtanh, 1),
    "its derivative": (torch.vmap(torch.func.grad(lambda x: F.hardtanh(x).sum())), 32),
    "minus a multiple": (lambda x: torch.rsub(x, 3.1, alpha=0.7), 32),
    "squares by a tensor": (lambda x: x.pow(torch.tensor([2.0])), 32),
    "powers by a tensor": (lambda x: x.pow(torch.full((21,), 2.0)), 32),
    "sum over the last dimension": (lambda x: x.sum(1), 1),
    "sum over the inner first dimension": (lambda x: x[:, :, None].repeat(1, 1, 5).sum(1), 1),
    "sum over a dimension of one": (lambda x: x[:, None].sum(1), 1),
    "sum over an outer dimension": (lambda x: x.repeat(3, 1, 1).sum(0), 64),
    "mean over it": (lambda x: x.repeat(3, 1, 1).mean((0,)), 64),
    "softmax over it": (lambda x: x.repeat(3, 1, 1).softmax(0), 64),
    "softmax over the first dimension of a view": (lambda x: x.t().softmax(0), 64),
    "log-softmax of time first": (lambda x: x[:, :, None].repeat(1, 1, 5).transpose(0, 1).log_softmax(0), 64),
    "a pass that cannot be watched": (lambda x: [][len(x)], None),
    "softmax over the last dimension": (lambda x: x.softmax(1), 1),
    "sum over 31 outer ones": (lambda x: x.repeat(31, 1, 1).sum(0), 64),
    "sum over repeated ones": (lambda x: x.expand(9, *x.shape).sum(0), 64),
    "parts of a pass": (lambda x: torch.cat([F.silu(part) for part in x.split(5)]), None),
    "parts of which a small pass has one": (lambda x: torch.cat([F.silu(part) for part in x.split(30)]), None),
    "each record alone": (lambda x: torch.cat([F.silu(part) for part in x.split(1)]), 1),
    "all but one record": (lambda x: F.silu(x[1:]), None),
    "limits by a tensor": (lambda x: x.clamp(min=torch.zeros(21)), 32),
    "the larger number": (lambda x: torch.maximum(x, -x), 32),
    "one output": (torch.vmap(torch.func.grad(lambda x: x[0])), 1),
    "variances over an outer dimension": (lambda x: x.repeat(3, 1, 1).var(0), 64),
}


@pytest.mark.parametrize("name", ENDS)
def test_sizes_end_where_vectorised_loops_do(name):
    compute, multiple = ENDS[name]
    x = torch.randn(37, 21)
    assert multiple_of(lambda records: compute(x[:records]), 32) == multiple


class Short(nn.Module):
    """Computes in numbers of two bytes between layers of float32."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.last, self.dtype = nn.Linear(7, 33), nn.Linear(33, 1), dtype

    def forward(self, x):
        return self.last(F.gelu(self.first(x).to(self.dtype), approximate="tanh").float())


def test_numbers_of_two_bytes_inside_a_net_count():
    """For one of them, -5.0625, the last numbers of a pass differ on some processors."""
    net = Short(torch.bfloat16)
    clipped_sum, _ = clipped_sum_for(net, squares(net), torch.empty(0, 7), torch.empty(0))
    params = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    params["first.weight"][[0, 32], 0] = 1.0
    params["last.weight"][0, 0], params["last.weight"][0, 32], params["last.bias"][0] = 1e10, -1e10, 1.0
    record = torch.tensor([[-5.0625, 0, 0, 0, 0, 0, 0]])
    one, more = (clipped_sum(params, record.repeat(n, 1), torch.zeros(n), ClipRequest(1.0))[0] for n in (1, 96))
    torch.testing.assert_close(more, 96 * one, rtol=1e-9, atol=1e-9)
    assert clipped_sum.choose(8.0).size == 64


class TimeFirst(nn.Module):
    """Sums over time in front of the records."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 13), nn.Linear(13, 2)

    def forward(self, x):
        return self.last(self.first(x).transpose(0, 1).contiguous().sum(0))


@pytest.mark.e2e
@pytest.mark.parametrize("net", [nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 2)), TimeFirst()])
def test_the_order_of_sums_tells_nothing(net):
    """Large numbers that cancel inside a record show it, even where numbers of two bytes hide it otherwise."""
    net = net.to(torch.bfloat16)
    shape = (9, 7) if isinstance(net, TimeFirst) else (7,)
    clipped_sum, reason = clipped_sum_for(net, None, torch.empty(0, *shape).bfloat16(), torch.empty(0).long())
    params = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    first, last = (p for p in params.values() if p.dim() == 2)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        large = torch.tensor([1e8, -1e8] + [0] * 5)[torch.randperm(7, generator=generator)]
        first[:] = torch.randn(first.shape, generator=generator) + large
        last[:] = torch.where(torch.rand(last.shape, generator=generator) < 0.5, -1.0, 1.0)
        record = torch.randn(1, *shape, generator=generator).masked_fill(large != 0, 1.0).bfloat16()
        rows = {}
        for n in (1, 8, 9, 40, 97):
            each = ClipRequest(1.0, group=torch.arange(n), num_groups=n, expected=9.0)
            rows[n] = clipped_sum(params, record.repeat(n, *[1] * len(shape)), torch.zeros(n).long(), each)[0]
        assert all(torch.equal(some, rows[1].expand_as(some)) for some in rows.values())
        assert reason.startswith(("fast", "loop: on this machine"))


@pytest.mark.parametrize("act", [nn.Hardtanh, nn.ReLU6])
def test_numbers_out_of_range_tell_nothing(act):
    """A gradient passes or not where the weights give NaN: as the last numbers of a loop decide, or the rest."""
    net = nn.Sequential(nn.Linear(7, 13), act(), nn.Linear(13, 2))
    clipped_sum, _ = clipped_sum_for(net, None, torch.empty(0, 7), torch.empty(0).long())
    params = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    params["0.weight"][:, 0], params["2.weight"][0] = math.nan, 1.0
    each = ClipRequest(1.0, group=torch.arange(9), num_groups=9, expected=9.0)
    rows = clipped_sum(params, torch.ones(9, 7), torch.zeros(9).long(), each)[0]
    assert torch.equal(rows, rows[:1].expand_as(rows))


class Parted(nn.Module):
    """Computes few records at a time, each of whose parts has last numbers; of all passes or of those of even size."""

    def __init__(self, every):
        super().__init__()
        self.first, self.last, self.every = nn.Linear(7, 13), nn.Linear(13, 2), every

    def forward(self, x):
        parts = self.first(x).split(len(x) if len(x) % self.every else 5)
        return self.last(torch.cat([torch.sigmoid(part) for part in parts]))


@pytest.mark.parametrize("every", [1, 2, 8])
def test_parts_of_a_pass_go_by_vmap(every):
    clipped_sum, reason = clipped_sum_for(Parted(every), None, torch.empty(0, 7), torch.empty(0).long())
    assert reason.startswith("vmap: ") and "by rules" in reason and isinstance(clipped_sum.choose(), VmapClippedSum)


def test_the_check_of_a_further_size_draws_nothing():
    net = nn.Sequential(nn.Linear(32, 32), Drawing(), nn.Linear(32, 2))
    clipped_sum, _ = clipped_sum_for(net, None, torch.empty(0, 32), torch.empty(0).long())
    before = torch.get_rng_state()
    assert clipped_sum.choose(3.0).size < clipped_sum.choose().size and clipped_sum.passes.draws
    assert torch.equal(before, torch.get_rng_state())


def test_a_record_in_thirty_whose_bits_depend_on_its_place_is_seen():
    x = torch.zeros(97, 3)
    x[30] = 1.0

    def rows_of(x, y, count):
        return [x[:count] * torch.arange(1.0, count + 1)[:, None]]

    passes = FixedPasses((x, torch.zeros(97, dtype=torch.long)), [4])
    assert passes.size("moved", rows_of) == 1 and passes.size("as it is", lambda x, y, count: [x[:count]]) == 4


class Drawing(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


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


class Counting(nn.Module):
    """A buffer grows with every pass, and changes the outputs."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.head(x.mean(1)) * self.count


LOOPED = [Packed(), Counting(), nn.Sequential(nn.Flatten(), nn.utils.spectral_norm(nn.Linear(12, 3)))]


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
    alone = summed(FastClippedSum(net, loss, 5), params, x, y, 0.5)
    torch.testing.assert_close(summed(FastClippedSum(net, loss, 8, padding=zeros), params, x, y, 0.5), alone)


def mirrored(act, width, seed):
    """A net whose first and last unit cancel, so that the sign of a record's gradient is that of their rounding."""
    generator = torch.Generator().manual_seed(seed)
    net, direction = nn.Sequential(nn.Linear(7, width), act(), nn.Linear(width, 1)), torch.randn(7, generator=generator)
    params = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    params["0.weight"][[0, width - 1]] = direction
    params["2.weight"][0, 0], params["2.weight"][0, width - 1], params["2.bias"][0] = 1e10, -1e10, 1.0
    return net, params, torch.randn(1, 7, generator=generator)


def squares(net):
    return lambda params, x, y: (torch.func.functional_call(net, params, (x,)).squeeze(1) - y) ** 2


@pytest.mark.parametrize(
    ("act", "width"), [(nn.SiLU, 13), (nn.ELU, 33), (nn.Sigmoid, 9), (nn.Softplus, 9), (nn.Mish, 11)]
)
def test_the_last_numbers_of_a_pass_tell_nothing(act, width):
    """Elementwise functions compute them by other code: copies of a record may not differ by their place."""
    net, params, record = mirrored(act, width, 0)
    clipped_sum, _ = clipped_sum_for(net, squares(net), torch.empty(0, 7), torch.empty(0))
    for seed in range(4):
        params, record = mirrored(act, width, seed)[1:]
        sums = [
            clipped_sum(params, record.repeat(n, 1), torch.zeros(n), ClipRequest(1.0))[0] for n in (39, 40, 41, 57, 97)
        ]
        alone = clipped_sum(params, record, torch.zeros(1), ClipRequest(1.0))[0]
        for n, total in zip((39, 40, 41, 57, 97), sums, strict=True):
            torch.testing.assert_close(total, n * alone, rtol=1e-9, atol=1e-9)


def test_the_share_of_a_thread_tells_nothing():
    """An operator that two threads share ends twice, the first time in the middle of a pass."""
    net, params, record = mirrored(nn.SiLU, 1001, 1)
    clipped_sum, _ = clipped_sum_for(net, squares(net), torch.empty(0, 7), torch.empty(0))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        each = ClipRequest(1.0, group=torch.arange(96), num_groups=96)
        rows = clipped_sum(params, record.repeat(96, 1), torch.zeros(96), each)[0]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rows, rows[:1].expand_as(rows))


class Careless(nn.Module):
    """Does in a pass what one may not do."""

    def __init__(self, deed):
        super().__init__()
        self.head, self.calls, self.deed = nn.Linear(3, 3), 0, deed

    def forward(self, x):
        self.deed(self, x)
        return self.head(x)


def counting(net, x):
    net.calls += 1


def shrinking(net, x):
    with torch.no_grad():
        net.head.weight.mul_(0.9)


@pytest.mark.parametrize(
    "deed, words",
    [(counting, "keep nothing of a pass .* got `calls`"), (shrinking, "its parameters .* got 'head.weight'")],
)
def test_a_pass_may_change_neither_parameters_nor_numbers(deed, words):
    with pytest.raises(UserError, match=words):
        clipped_sum_for(Careless(deed), None, torch.randn(2, 3), torch.tensor([0, 1]))


def answered(module, model, x, examples):
    query = MeanLoss(mechanism_of={0: Gaussian(0.5, 0.0, 1.0, 1.0)}, models=model[None], row_of={0: 0}, loss_bound=1.0)
    y = torch.zeros(len(x), dtype=torch.long)
    passes = clipped_sum_for(module.net, module.sample_loss, *examples)[0].passes
    return float(answers.answer(ChargedQuery.of(query), 0, module, x, y, None, passes)[0])


@pytest.mark.e2e
def test_a_servers_model_moves_no_answer_by_more_than_a_record():
    """Rows of the model that a server asks with are bounded, so that they hide on what they depend."""
    module = ClientModule(nn.Sequential(nn.Linear(7, 13), nn.SiLU(), nn.Linear(13, 2)), task="multiclass")
    module.task = module.infer_task(torch.zeros(1, 2), torch.tensor([0]), 2)
    for seed in range(6):
        _, params, record = mirrored(nn.SiLU, 13, seed)
        params |= {"2.weight": torch.cat([params["2.weight"], torch.zeros(1, 13)]), "2.bias": torch.tensor([1.0, 0.0])}
        model = torch.cat([p.flatten() for p in params.values()])
        examples = torch.randn(2, 7), torch.tensor([0, 1])
        ours = [answered(module, model, record.repeat(n, 1), examples) for n in (8, 9, 40, 41)]
        assert abs(ours[1] - ours[0]) <= 0.5 + 1e-9 and abs(ours[3] - ours[2]) <= 0.5 + 1e-9


def test_a_model_that_vmap_cannot_run_answers_queries():
    module = ClientModule(Packed(), task="multiclass")
    module.task = module.infer_task(torch.zeros(1, 3), torch.tensor([0]), 3)
    x, examples = torch.randn(5, 4, 3), (torch.randn(2, 4, 3), torch.tensor([0, 1]))
    with torch.no_grad():
        losses = [
            float(module.sample_loss(module.named_trainable, x[[row]], torch.zeros(1).long())) for row in range(5)
        ]
    expected = sum(min(max(loss, 0.0), 1.0) - 0.5 for loss in losses)
    assert answered(module, module.flat, x, examples) == pytest.approx(expected, rel=1e-5)


MKL_FIRST = """
import sys, torch
from torch import nn
if "first" in sys.argv:
    torch.randn(64, 64) @ torch.randn(64, 64)
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.runtime.devices import products_vary

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.last, self.gate = nn.Linear(16, 200), nn.Linear(16, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        more = 0.0
        if self.gate > 5:
            table = self.wide(x)[0, :198].reshape(6, 33).tanh()
            more = (table @ table.mT).sum() * 0.01
        return self.last(x) * (1 + more) + self.gate * 0

torch.manual_seed(0)
net, x, y = Gated(), torch.randn(200, 16), torch.randint(0, 3, (200,))
clipped_sum = clipped_sum_for(net, None, x[:1], y[:1])[0]
params = {name: p.detach().clone() for name, p in net.named_parameters()}
params["gate"].fill_(6.0)

def each(x, y):
    request = ClipRequest(1.0, 2, group=torch.arange(len(y)), num_groups=len(y))
    return clipped_sum(params, x, y, request)[0].clone()

print(products_vary(), int((each(x, y)[1:] != each(x[1:], y[1:])).any(1).sum()))
"""


@pytest.mark.e2e
@pytest.mark.parametrize("order", ["first", "after"])
def test_products_before_the_import_change_no_bits(order):
    """MKL reads its mode before its first product; afterwards code that weights turn on goes one record at a time."""
    command = [sys.executable, "-W", "ignore", "-c", MKL_FIRST, order]
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    varies, changed = done.stdout.split()
    assert changed == "0"
    assert varies == str(order == "first" and torch.backends.mkl.is_available())
