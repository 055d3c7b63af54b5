"""What a model reads of records decides nothing: in a pass every read gives what it gave for public records."""

import math
from contextlib import nullcontext

import pytest
import torch
from reference import summed
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpfl_lightning.errors import UserNotice
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.layer_rules import Unsupported
from dpfl_lightning.privacy.clipping.reads import FixedReads, fixed, reads_of
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, cross_entropy_of


class Reading(nn.Module):
    """Two layers, and what `between(self, x, mask)` does with the first one's outputs."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(3, 4), nn.Linear(4, 3), between
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        return self.last(self.between(self, torch.tanh(self.first(x)), x[..., 0] != 0).mean(1))


def skipping_the_mask(net, x, mask):
    return x if mask.all() else x.masked_fill(~mask[..., None], 0.0)


def logging(net, x, mask):
    net.norm = x.detach().norm().item()
    del net.norm
    return x


def scaling(net, x, mask):
    return x * float(net.scale)


def drawing(net, x, mask):
    return F.dropout(x, 0.4, net.training)


def dropping_records(net, x, mask):
    kept = torch.empty(len(x), 1, 1).bernoulli_(0.7).div_(0.7)
    return x * kept if net.training else x


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, dy):
        return dy * (ctx.saved_tensors[0] > 0)


#: by rules, though `vmap` cannot run them
BY_RULES = [skipping_the_mask, logging, scaling, drawing, dropping_records, lambda net, x, mask: Clamp.apply(x)]


def by_largest(net, x, mask):
    return x / x.detach().abs().max().item()


def skipping(net, x, mask):
    return x if net.training and torch.rand([]) < 0.3 else 2 * x


def routed(net, x, mask):
    rows = mask[:, 0].nonzero().flatten()
    return x.index_add(0, rows, x[rows])


def never_true(net, x, mask):
    return x if (x < 2).all() else 2 * x


def by_numpy(net, x, mask):
    return x * float(x.detach().numpy().mean() > 0)


def by_mask(net, x, mask):
    return x + x[mask].sum()


#: by the loop: code that depends on records, or on draws
BY_LOOP = [
    (by_largest, "differs from"),
    (skipping, "random numbers"),
    (routed, "`nonzero` decides"),
    (never_true, r"random records have one value"),
    (by_numpy, "out of torch"),
    (by_mask, "`index` decides"),
    (lambda net, x, mask: checkpoint(net.inner, x, use_reentrant=False), ""),
]


def masked(records):
    x = torch.randn(records, 5, 3)
    x[::2, 3:] = 0
    return x, torch.arange(records) % 3


def right(net, clipped_sum):
    """Whether the sum is that of the loop, without random numbers."""
    x, y = masked(9)
    params = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    net.eval()
    ours, loop = (
        summed(one, params, x, y, 0.3, torch.arange(9), 9)
        for one in (clipped_sum, LoopClippedSum(net, cross_entropy_of(net)))
    )
    torch.testing.assert_close(ours, loop, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("between", BY_RULES)
def test_what_vmap_cannot_run_gets_rules_where_they_are_right(between):
    net = Reading(between)
    clipped_sum, reason = clipped_sum_for(net, None, torch.empty(0, 5, 3), torch.empty(0).long())
    assert reason == "fast: exact rules for all layers"
    right(net, clipped_sum)


def below_100(net, x, mask):
    return x if x.detach().square().mean().item() < 100 else 2 * x


def test_a_number_by_which_code_may_decide_is_said_to_be_public():
    with pytest.warns(
        UserNotice, match=r"code at test_reads\.py:\d+ reads numbers of records: it gets those of public"
    ):
        _, reason = clipped_sum_for(Reading(below_100), None, torch.empty(0, 5, 3), torch.empty(0).long())
    assert reason == "fast: exact rules for all layers"


class TrimmedToTheLongest(nn.Module):
    """Tokens [B, T] and a mask of ones and zeros; the mean over what is left depends on the longest record."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def mean(self, hidden, mask):
        return hidden.mean(1)

    def forward(self, tokens, mask):
        longest = int(mask.sum(1).max())
        return self.head(self.mean(self.embedding(tokens)[:, :longest], mask[:, :longest]))


class TrimmedForSpeed(TrimmedToTheLongest):
    def mean(self, hidden, mask):
        mask = (mask != 0).to(hidden)[..., None]
        return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)


@pytest.mark.parametrize("dtype", [torch.long, torch.int32])
def test_a_model_that_trims_to_the_longest_record_goes_by_rules_only_where_that_is_right(dtype):
    mask = (torch.arange(16) < torch.randint(2, 12, (9, 1))).to(dtype)
    x, y, each = (torch.randint(50, (9, 16)), mask), torch.arange(9) % 3, torch.arange(9)
    for net, words in (
        (TrimmedToTheLongest(), "loop: the gradient of `embedding.weight` differs"),
        (TrimmedForSpeed(), "fast: exact rules"),
    ):

        def loss(params, x, y):
            return F.cross_entropy(functional_call(net, params, x), y, reduction="none")  # noqa: B023

        with pytest.warns(UserNotice, match="reads numbers of records") if "fast" in words else nullcontext():
            clipped_sum, reason = clipped_sum_for(net, loss, tuple(part[:0] for part in x), y[:0])
        assert reason.startswith(words)
        params, loop = dict(net.named_parameters()), LoopClippedSum(net, loss)
        torch.testing.assert_close(*(summed(one, params, x, y, 0.3, each, 9) for one in (clipped_sum, loop)))


@pytest.mark.parametrize("between, words", BY_LOOP)
def test_code_that_depends_on_records_goes_one_record_at_a_time(between, words):
    net = Reading(between)
    clipped_sum, reason = clipped_sum_for(net, None, torch.empty(0, 5, 3), torch.empty(0).long())
    assert reason.startswith("loop: ") and words in reason
    right(net, clipped_sum)


@pytest.mark.parametrize("between", BY_RULES)
def test_no_neighbour_changes_what_a_record_contributes(between):
    """Masked or not, hidden units whose large outputs cancel would show another kernel."""
    net = Reading(between)
    clipped_sum, _ = clipped_sum_for(net, None, torch.empty(0, 5, 3), torch.empty(0).long())
    net.eval()
    params = {name: p.detach().clone() for name, p in net.named_parameters() if p.requires_grad}
    params["first.weight"][1], params["last.weight"][:, 0] = params["first.weight"][0], 1e10 * torch.randn(3)
    params["last.weight"][:, 1] = -params["last.weight"][:, 0]
    full, some = torch.randn(8, 5, 3), masked(8)[0]
    full[:3] = some[:3] = masked(3)[0]
    each = ClipRequest(1.0, group=torch.arange(8), num_groups=8, expected=8.0)
    y = torch.arange(8) % 3
    rows = [clipped_sum(params, x, y, each)[0][:3] for x in (full, some, some[:3].repeat(3, 1, 1)[:8])]
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])


def test_reads_of_records_are_fixed_and_those_of_the_model_are_not():
    net = Reading(lambda net, x, mask: scaling(net, skipping_the_mask(net, x, mask), mask))
    loss, (x, y) = cross_entropy_of(net), masked(6)
    params = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    reads = reads_of(loss, params, x, y)
    assert [(bool(read.depends), float(read.value)) for read in reads] == [(True, 0.0), (False, 1.0)]
    net.scale.fill_(2.0)
    unmasked, full = torch.randn(2, 5, 3), y[:2]
    torch.testing.assert_close(fixed(loss, reads)(params, unmasked, full), loss(params, unmasked, full))
    with pytest.raises(Unsupported, match="other numbers"), FixedReads(reads[:1]):
        loss(params, x, y)
    with pytest.raises(Unsupported, match="fewer numbers"), FixedReads(reads):
        bool(mask_of(x).all())


def mask_of(x):
    return x[..., 0] != 0


def test_reads_of_every_record_follow_the_size_of_a_pass():
    net = Reading(lambda net, x, mask: torch.stack([one * (1 if float(one.sum()) < math.inf else 2) for one in x]))
    _, reason = clipped_sum_for(net, None, torch.empty(0, 5, 3), torch.empty(0).long())
    assert reason.startswith("loop: ")
