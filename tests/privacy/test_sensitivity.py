"""What one record adds never exceeds the clip norm, in float32 and on hostile values, by every rule and engine."""

import math

import pytest
import torch
from reference import Net, summed
from torch import Tensor, nn
from torch.func import functional_call

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.float64_sums import Products
from dpfl_lightning.privacy.clipping.layer_rules import RULES, Lookup, Outer, Unsupported, arranged
from dpfl_lightning.privacy.clipping.reference import (
    CANCELLING,
    SUM_ROUNDING,
    VmapClippedSum,
    clip_factors,
    cross_entropy_of,
    require_proved,
)
from dpfl_lightning.privacy.clipping.sequence_layers import TAPPED
from dpfl_lightning.privacy.clipping.taps import TappedSum

pytestmark = pytest.mark.usefixtures("code_was_read")  # of rules, and of trials of code

CLIP_NORMS = (1e-12, 0.003, 1e6)
MAGNITUDES = (0.0, 1e-44, 1e-38, 1e-30, 1e-19, 1e-5, 1.0, 1e5, 1e19, 1e30, 3e38)
BROKEN = (math.nan, math.inf)
#: of features and of the loss: squares of one underflow in float32, the product is large beside small clip norms
PAIRS = ((1e18, 1e-21), (1e18, 1e-22), (1e18, 1e-23), (1e17, 1e-25), (1e30, 1e-35), (1e-22, 1e18), (1e-25, 1e17))
RECORDS = 32


class Mean(nn.Module):
    """The mean over positions, and their differences, which cancel in the gradient of what comes before."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=1, keepdim=True)


def pooled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 16, 3), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.Flatten())


#: net and shape of a record; each rule, and each way of it
NETS = {
    "linear": (nn.Linear(5, 3), (5,)),
    "wide linear": (nn.Linear(100, 80), (100,)),
    "wide positions": (nn.Linear(100, 80), (3, 100)),
    "linear without bias": (nn.Linear(5, 3, bias=False), (5,)),
    "positions, never formed": (nn.Linear(20, 30), (3, 20)),
    "positions, formed": (nn.Linear(3, 2), (12, 3)),
    "positions that cancel": (nn.Sequential(nn.Linear(20, 30), Mean()), (4, 20)),
    "convolution over patches": (nn.Conv2d(2, 3, 2), (2, 7, 6)),
    "convolution with groups": (nn.Conv2d(4, 4, 2, groups=2), (4, 5, 4)),
    "convolution of many channels": (nn.Conv2d(8, 3, 2), (8, 9, 9)),
    "convolution, never formed": (nn.Conv2d(8, 24, 3), (8, 4, 4)),
    "pooled convolutions": (pooled(), (2, 12, 12)),
    "group norm": (nn.GroupNorm(2, 4), (4, 3)),
    "convolution of a sequence": (nn.Conv1d(3, 4, 2), (3, 7)),
    "rms norm": (nn.RMSNorm(6), (2, 6)),
    "instance norm": (nn.InstanceNorm1d(3, affine=True), (3, 6)),
    "instance norm of images": (nn.InstanceNorm2d(3, affine=True), (3, 3, 2)),
    "instance norm of volumes": (nn.InstanceNorm3d(2, affine=True), (2, 2, 2, 2)),
    "layer norm": (nn.LayerNorm(6), (2, 6)),
    "embedding": (nn.Embedding(7, 3), (5,)),
    "attention": (Net(lambda net, x: net.read(x, x, x)[0], read=nn.MultiheadAttention(4, 2, batch_first=True)), (3, 4)),
    "a module without a rule": (nn.ConvTranspose1d(2, 3, 2), (2, 5)),
}


def test_every_rule_has_a_net():
    assert {*RULES, *TAPPED} <= {type(layer) for net, _ in NETS.values() for layer in net.modules()}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in net.named_parameters()}


def loss_of(net: nn.Module):
    """The label of a record multiplies its loss: it sets how large the gradient of the output is."""

    def sample_loss(params, x, y):
        out = functional_call(net, params, (x,)).flatten(1)
        return (out * torch.linspace(-1, 1, out.shape[1])).sum(dim=1) * y

    return sample_loss


def hostile(net: nn.Module, shape: tuple[int, ...], seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Records and labels of all magnitudes, in half of the records mixed; the first record is broken."""
    generator = torch.Generator().manual_seed(seed)

    def magnitudes(*size: int) -> Tensor:
        return torch.tensor(MAGNITUDES)[torch.randint(len(MAGNITUDES), size, generator=generator)]

    if isinstance(net, nn.Embedding):
        x = torch.randint(net.num_embeddings, (RECORDS, *shape), generator=generator)
    else:
        each = magnitudes(RECORDS, *[1] * len(shape)).expand(RECORDS, *shape).clone()
        for row, (features, _) in enumerate(PAIRS):
            each[2 + row] = features
        each[RECORDS // 2 :] = magnitudes(RECORDS - RECORDS // 2, *shape)
        x = (torch.randn(RECORDS, *shape, generator=generator) * each).clamp(-3e38, 3e38)
        x[0] = BROKEN[seed % 2]
    y = magnitudes(RECORDS)
    y[2 : 2 + len(PAIRS)] = torch.tensor([loss for _, loss in PAIRS])
    y[1] = BROKEN[seed % 2]
    params = {name: torch.randn(p.shape, generator=generator) for name, p in net.named_parameters()}
    return params, x, y


def sums_of(engine: str, net: nn.Module, loss):
    if engine == "vmap":
        return VmapClippedSum(loss, 9)
    try:
        return FastClippedSum(net, loss, 9, sparse=["0", "2"])
    except Unsupported:  # of a module without a rule
        return TappedSum(net, loss, 9)


VMAP = [pytest.param(name, "vmap", marks=[pytest.mark.e2e] * (name != "linear")) for name in NETS]


@pytest.mark.e2e
@pytest.mark.parametrize("order", [2, 1])
@pytest.mark.parametrize(("name", "engine"), [*((name, "fast") for name in NETS), *VMAP])
def test_no_record_adds_more_than_the_clip_norm(name, order, engine):
    net, shape = NETS[name]
    clipped_sum, each, added_something = sums_of(engine, net, loss_of(net)), torch.arange(RECORDS), 0
    for seed in range(2):
        params, x, y = hostile(net, shape, seed)
        for clip_norm in CLIP_NORMS:
            rows = summed(clipped_sum, params, x, y, clip_norm, each, RECORDS, order=order).double()
            sizes = rows.norm(p=order, dim=1)
            assert (sizes <= clip_norm * (1 + 1e-9)).all()
            assert torch.equal(rows[1], torch.zeros_like(rows[1])), "a record without a finite gradient adds nothing"
            added_something += int((sizes > 0.99 * clip_norm).sum())
            # the sum is near the exact sum of what the records add, in groups and without
            owners = each % 3
            by_owner = summed(clipped_sum, params, x, y, clip_norm, owners, 3, order=order).double()
            together = summed(clipped_sum, params, x, y, clip_norm, order=order).double()
            exact = torch.stack([rows[owners == owner].sum(dim=0) for owner in range(3)])
            assert (by_owner - exact).norm(p=order) <= SUM_ROUNDING * clip_norm
            assert (together[0] - exact.sum(dim=0)).norm(p=order) <= SUM_ROUNDING * clip_norm
            # a record more moves the sum by the clip norm, and by rounding
            fewer = summed(clipped_sum, params, x[:-1], y[:-1], clip_norm, order=order).double()
            assert (together - fewer).norm(p=order) <= clip_norm * (1 + 1e-9 + 2 * SUM_ROUNDING)
    assert added_something > 20, "records were clipped at all"


@pytest.mark.parametrize("first", [math.nan, 0.0])
def test_what_a_record_is_does_not_move_the_others_by_a_bit(first):
    net = nn.Sequential(pooled(), nn.Linear(144, 4))
    clipped_sum, reason = clipped_sum_for(net, None, torch.empty(0, 2, 12, 12), torch.empty(0, dtype=torch.long))
    assert clipped_sum.by_rules and clipped_sum.choose().sparse == {"0.0"}, reason
    params = values(net)
    x, y, each = torch.randn(9, 2, 12, 12), torch.arange(9) % 4, torch.arange(9)
    rows = summed(clipped_sum, params, x, y, 0.1, each, 9)
    x[0] = first
    assert torch.equal(summed(clipped_sum, params, x, y, 0.1, each, 9)[1:], rows[1:])


@pytest.mark.parametrize("records", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("groups", [None, 3])
def test_compiled_sums_are_those_of_torch(records, groups):
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 1), (1, 511), (7, 1500), (3, 2), (40, 513)]
    pairs = [tuple(torch.randn(records, n, generator=generator) for n in pair) for pair in sizes]
    factors = torch.rand(records, generator=generator).double()
    formed = [torch.einsum("bp,bd->bpd", left.double(), right.double()).flatten(1) for left, right in pairs]
    for order in (1, 2):
        expected = torch.cat(formed, dim=1).abs().pow(order).sum(dim=1)
        torch.testing.assert_close(Products(pairs).powers(order), expected, rtol=1e-13, atol=0)
    factors[-1] = 0.0
    for one in (one for pair in pairs for one in pair):
        one[-1] = math.nan  # not read
    group = None if groups is None else torch.randint(groups, (records,), generator=generator)
    places = torch.ones(groups or 1, 3 + sum(own.shape[1] for own in formed), dtype=torch.float64)
    beginning, *totals = places.split([3, *(own.shape[1] for own in formed)], dim=1)
    rows = torch.zeros(records, dtype=torch.long) if group is None else group
    expected = [torch.ones_like(total) for total in totals]
    for j in range(records - 1):
        for own, total in zip(formed, expected, strict=True):
            total[rows[j]] += factors[j] * own[j]
    Products(pairs).add(totals, factors, group)
    for total, true in zip(totals, expected, strict=True):
        torch.testing.assert_close(total, true, rtol=1e-13, atol=1e-13)
    assert (beginning == 1).all() and not Products(pairs).powers(2)[-1].isfinite()


@pytest.mark.parametrize(
    "change",
    [
        lambda pairs, totals, factors, group: pairs.append((torch.ones(4, 1), torch.ones(4, 2))),
        lambda pairs, totals, factors, group: group.add_(2),
        lambda pairs, totals, factors, group: factors.resize_(4),
        lambda pairs, totals, factors, group: group.resize_(4),
        lambda pairs, totals, factors, group: totals.append(totals.pop().float()),
        lambda pairs, totals, factors, group: totals.append(totals.pop().mT.contiguous().mT),
    ],
)
def test_products_check_what_the_loops_do_not(change):
    pairs, totals = [(torch.ones(5, 1), torch.ones(5, 3))], [torch.zeros(2, 3).double()]
    factors, group = torch.ones(5).double(), torch.tensor([0, 1, 1, 0, 1])
    Products(pairs).add(totals, factors, group)
    change(pairs, totals, factors, group)
    with pytest.raises(ValueError):
        Products(pairs).add(totals, factors, group)


def meets_windows(net, x):
    """The first layer meets windows, not records."""
    windows = x.unfold(1, 16, 4).reshape(-1, 16)
    return net.last(net.first(windows).relu().view(len(x), -1, 32).mean(1))


def meets_a_question(net, x):
    """One of the layers meets one question, the same for all records."""
    return net.last(x * net.question(torch.ones(1, 4, dtype=x.dtype)))


@pytest.mark.parametrize(
    ("net", "width", "layer"),
    [
        (Net(meets_windows, first=nn.Linear(16, 32), last=nn.Linear(32, 3)), 64, "first"),
        (Net(meets_a_question, question=nn.Linear(4, 8), last=nn.Linear(8, 3)), 8, "question"),
    ],
    ids=["windows", "question"],
)
def test_layers_that_do_not_meet_records_one_by_one_have_no_rule(net, width, layer):
    with pytest.raises(Unsupported, match=layer):
        summed(FastClippedSum(net), values(net), torch.randn(5, width), torch.zeros(5, dtype=torch.long), 1.0)


def trimmed(net, x):
    """Cuts a batch after its longest record: a gradient is a sum over places in one chunk, a product in another."""
    places = max(1, int((x != 0).any(dim=2).sum(dim=1).max()))
    return net.last((net.first(x[:, :places]) * (x[:, :places] != 0).any(dim=2, keepdim=True)).sum(dim=1))


def test_chunks_of_other_forms_add_up():
    net = Net(trimmed, first=nn.Linear(6, 5), last=nn.Linear(5, 3))
    x, y, group = torch.randn(4, 3, 6), torch.arange(4) % 3, torch.tensor([0, 1, 0, 1])
    x[2:, 1:] = 0.0
    params = values(net)
    doubled = {name: p.double() for name, p in params.items()}
    expected = summed(FastClippedSum(net.double()), doubled, x.double(), y, 1.0, group, 2)
    ours = summed(FastClippedSum(net.float(), size=2), params, x, y, 1.0, group, 2)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_lazily_negated_has_its_sign():
    net = nn.Sequential(nn.Linear(4, 3))
    params = values(net)

    def loss(params, x, y):
        return cross_entropy_of(net)(params, torch._neg_view(x), y)

    x, y = torch.randn(5, 4), torch.arange(5) % 3
    expected = summed(VmapClippedSum(cross_entropy_of(net)), params, -x, y, 0.1)
    torch.testing.assert_close(summed(FastClippedSum(net, loss), params, x, y, 0.1), expected, rtol=1e-5, atol=1e-6)


def test_parameters_that_no_loss_depends_on_are_refused_alone():
    net = Net(lambda net, x: net.used(x), used=nn.Linear(4, 3), idle=nn.Linear(2, 2))
    args = values(net), torch.randn(5, 4), torch.zeros(5, dtype=torch.long), 1.0
    assert (summed(FastClippedSum(net), *args)[:, 15:] == 0).all()
    with pytest.raises(Unsupported, match=r"no loss depends on `idle\.weight`"):
        summed(FastClippedSum(net), *args, only=["idle.weight"])


def test_factors_stay_below_the_exact_ones():
    norms = torch.logspace(-30, 30, 1001, dtype=torch.float64)
    for clip_norm in CLIP_NORMS:
        assert (clip_factors(norms, clip_norm) * norms <= clip_norm * (1 - 1e-8)).logical_or(norms < clip_norm).all()


def test_batches_whose_sum_is_not_proved_are_refused():
    require_proved(records=100_000, size=128, terms=64)
    require_proved(records=10_000_000, size=128)
    words = "`batch` must have fewer records, so that the sum is exact enough, got 10000000"
    with pytest.raises(UserError, match=words):
        require_proved(records=10_000_000, size=128, terms=64)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("contrast", [1.0, 1e-3])
@pytest.mark.parametrize("offset", [0.0, 10.0, 1e3, 1e5])
def test_a_record_whose_positions_cancel_adds_no_more_than_the_clip_norm(offset, contrast, order):
    """The norm takes the mean over positions away, so that the gradients of its inputs add up to zero over them."""
    layers = {"first": nn.Linear(64, 64), "norm": nn.GroupNorm(64, 64), "last": nn.Linear(64, 10)}
    net = Net(lambda net, x: net.last(torch.relu(net.norm(net.first(x).mT)).mean(dim=2)), **layers)
    with torch.no_grad():
        net.first.weight.mul_(0.01)
    x, y, each = offset + contrast * torch.randn(20, 8, 64), torch.arange(20) % 10, torch.arange(20)
    added = summed(FastClippedSum(net), values(net), x, y, 1e-2, each, 20, order=order)
    assert torch.linalg.vector_norm(added.double(), ord=order, dim=1).max() <= 1e-2 * (1 + 1e-5)


def outer(positions, offset):
    left = torch.randn(9, positions, 12)
    return Outer(left - left.mean(dim=1, keepdim=True), offset + torch.randn(9, positions, 30) / 100)


def lookup(positions, offset):
    dy = offset * torch.randn(9, positions, 12)
    return Lookup.merged(torch.randint(2, (9, positions)), dy - dy.mean(dim=1, keepdim=True), rows=2)


def in_full(grads):
    """The nine gradients in full."""
    totals = torch.zeros(9, 24 if isinstance(grads, Lookup) else 360, dtype=torch.float64)
    grads.add(totals, torch.ones(9, dtype=torch.float64), torch.arange(9))
    return arranged(totals, grads.shape, grads.order).flatten(1)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("positions", [2, 7, 40])
@pytest.mark.parametrize("offset", [0.0, 10.0, 1e3, 1e5])
@pytest.mark.parametrize("make", [outer, lookup])
def test_norms_are_never_below_what_is_summed(make, offset, positions, order):
    grads = make(positions, offset).measurable(order)
    sizes = torch.linalg.vector_norm(in_full(grads), ord=order, dim=1)
    assert (grads.norms(order) >= sizes * (1 - 1e-12)).all()


def test_norms_are_hardly_larger_where_positions_are_unrelated():
    left, right, ids = torch.randn(9, 40, 12), torch.randn(9, 40, 30), torch.randint(2, (9, 40))
    for grads in (Outer(left, right), Lookup.merged(ids, left, rows=2)):
        assert torch.allclose(grads.norms(), in_full(grads).norm(dim=1), rtol=2e-4)


def test_the_terms_of_a_sum_exceed_its_norm_by_no_more_than_the_bound_on_rounding_allows():
    grads = outer(40, 1e5)
    terms = torch.linalg.vector_norm(grads.left, dim=2) * torch.linalg.vector_norm(grads.right, dim=2)
    assert (terms.double().sum(dim=1) <= CANCELLING * (1 + 1e-5) * grads.norms()).all()
