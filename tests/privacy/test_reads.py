"""Code that reads numbers of records has the gradients of the loop, whatever the others of a pass are."""

import pytest
import torch
from reference import summed
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
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


def computed_again(net, x, mask):
    """In the backward pass with the same parameters, or once under `vmap`."""
    return checkpoint(net.inner, x, use_reentrant=False)


def by_largest(net, x, mask):
    return x / x.detach().abs().max().item()


def skipping(net, x, mask):
    return x if net.training and torch.rand([]) < 0.3 else 2 * x


def routed(net, x, mask):
    rows = mask[:, 0].nonzero().flatten()
    return x.index_add(0, rows, x[rows])


def in_spite_of_errors(net, x, mask):
    """Code that goes on after any error, such as that of a record that reads another number first."""
    try:
        seen = x if mask.all() else 2 * x
        return seen if x.detach().sum() > 0 else 3 * x
    except Exception:
        return 5 * x


def never_true(net, x, mask):
    return x if (x < 2).all() else 2 * x


def by_numpy(net, x, mask):
    return x * float(x.detach().numpy().mean() > 0)


def by_mask(net, x, mask):
    return x + x[mask].sum()


def below_100(net, x, mask):
    return x if x.detach().square().mean().item() < 100 else 2 * x


def clamped(net, x, mask):
    return Clamp.apply(x)


def one_by_one(net, x, mask):
    return torch.stack([one * (1 if float(one.sum().detach()) < 1e9 else 2) for one in x])


UNDER_VMAP = [skipping_the_mask, scaling, drawing, never_true, dropping_records, computed_again, in_spite_of_errors]
BY_LOOP = [by_largest, skipping, routed, by_numpy, by_mask, clamped, logging, below_100, one_by_one]


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


@pytest.mark.e2e
@pytest.mark.parametrize("between", [*UNDER_VMAP, *BY_LOOP])
def test_gradients_are_those_of_the_loop(between):
    net = Reading(between)
    clipped_sum, reason = clipped_sum_for(net, None, torch.empty(0, 5, 3), torch.empty(0).long())
    assert reason.startswith("vmap: " if between in UNDER_VMAP else "loop: "), reason
    right(net, clipped_sum)


class TrimmedToTheLongest(nn.Module):
    """Tokens [B, T] and a mask of ones and zeros; the mean over the rest depends on the longest record."""

    def __init__(self, tokens=50):
        super().__init__()
        self.embedding, self.head = nn.Embedding(tokens, 8), nn.Linear(8, 3)

    def mean(self, hidden, mask):
        return hidden.mean(1)

    def end(self, mask):
        return mask.sum(1)

    def forward(self, tokens, mask):
        longest = int(self.end(mask).max())
        return self.head(self.mean(self.embedding(tokens)[:, :longest], mask[:, :longest]))


class TrimmedForSpeed(TrimmedToTheLongest):
    def end(self, mask):
        return ((mask != 0) * torch.arange(1, 1 + mask.shape[1])).amax(1)

    def mean(self, hidden, mask):
        mask = (mask != 0).to(hidden)[..., None]
        return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)


class FarFromTheFirst(TrimmedForSpeed):
    """Scales by where the first token of any record is: masks are padded on the left."""

    def forward(self, tokens, mask):
        first = (mask != 0).int().argmax(1).min()
        return self.head(self.mean(self.embedding(tokens), mask) / (1 + first))


class AnyEmpty(TrimmedForSpeed):
    def forward(self, tokens, mask):
        some_empty = (mask == 0).all(1).any()
        return self.head(self.mean(self.embedding(tokens), mask) * torch.where(some_empty, 0.5, 1.0))


class NeverEmpty(TrimmedForSpeed):
    """An empty mask has no finite loss."""

    def forward(self, tokens, mask):
        hidden = self.embedding(tokens) * mask.ne(0)[..., None]
        return self.head(hidden.sum(1) / mask.ne(0).sum(1, keepdim=True))


class AnyEmptyOfNone(NeverEmpty):
    def forward(self, tokens, mask):
        return super().forward(tokens, mask) * torch.where((mask == 0).all(1).any(), -1.0, 1.0)


class MostlyLeft(TrimmedForSpeed):
    def forward(self, tokens, mask):
        far = ((mask != 0).int().argmax(1) > 10).any()
        return super().forward(tokens, mask) * torch.where(far, -1.0, 1.0)


class Refusing(TrimmedForSpeed):
    def forward(self, tokens, mask):
        torch._assert((mask != 0).any(1).all(), "a mask must not be empty")
        torch._assert(mask.is_floating_point() or (mask <= 1).all(), "a mask is of 0 and 1")
        return super().forward(tokens, mask)


MASKED = [FarFromTheFirst, AnyEmpty, AnyEmptyOfNone, MostlyLeft, NeverEmpty, TrimmedForSpeed, Refusing]
MASKED += [TrimmedToTheLongest]


@pytest.mark.e2e
@pytest.mark.parametrize("form", ["long", "float", "wide"])
@pytest.mark.parametrize("kind", MASKED)
def test_masks_of_other_records_decide_nothing(kind, form):
    mask = (torch.arange(16) >= torch.randint(2, 13, (9, 1))).long()
    mask[:4, 3:] = 1 - mask[:4, 3:].flip(1)
    mask[0], mask[1] = 1, 0
    if kind in (NeverEmpty, Refusing):
        mask[:, 5] = 1
    mask = {"long": mask, "float": mask.float(), "wide": mask[:, None]}[form]
    x, y, each, net = (torch.randint(1000, (9, 16)), mask), torch.arange(9) % 3, torch.arange(9), kind(1000)

    def loss(params, x, y):
        inputs = x[0], x[1].squeeze(1) if form == "wide" else x[1]
        return F.cross_entropy(functional_call(net, params, inputs), y, reduction="none")

    clipped_sum, _ = clipped_sum_for(net, loss, tuple(part[:0] for part in x), y[:0])
    params = dict(net.named_parameters())
    torch.testing.assert_close(
        *(summed(one, params, x, y, 0.3, each, 9) for one in (clipped_sum, LoopClippedSum(net, loss)))
    )


class OfLengths(nn.Module):
    """Series [B, 12, 5] and their lengths [B]; a length of 0 has no finite loss, and changes others."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x, lengths):
        mask = (torch.arange(12) < lengths[:, None])[..., None]
        mean = (self.inner(x).tanh() * mask).sum(1) / lengths[:, None]
        return self.head(mean * torch.where((lengths == 0).any(), -1.0, 1.0))


def test_a_length_of_zero_without_a_finite_loss_changes_no_other_record():
    net, x, y = OfLengths(), (torch.randn(9, 12, 5), torch.arange(9) + 3), torch.arange(9) % 3

    def loss(params, x, y):
        return F.cross_entropy(functional_call(net, params, x), y, reduction="none")

    clipped_sum, _ = clipped_sum_for(net, loss, tuple(part[:0] for part in x), y[:0])
    params, request = dict(net.named_parameters()), ClipRequest(1.0, 2, torch.arange(9), 9)
    before = clipped_sum(params, x, y, request)[0]
    x[1][4] = 0
    after = clipped_sum(params, x, y, request)[0]
    rows = torch.arange(9) != 4
    assert torch.equal(before[rows], after[rows]) and not after[4].any()


@pytest.mark.e2e
@pytest.mark.parametrize("between", [*UNDER_VMAP, *BY_LOOP])
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
