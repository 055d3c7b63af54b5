"""Parameters that functions use outside of layers: each use counts, by the rule of an operator or directly."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, cross_entropy_of


class Tokens(nn.Module):
    """A class and a distillation token beside each record's own, as vision transformers have; one of them twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(1, 1, 4))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        tokens = (self.first.expand(len(x), -1, -1), self.second.expand(len(x), -1, -1), x)
        twice = self.first.expand(len(x), 2, -1)
        return self.head(torch.tanh(self.norm(torch.cat([*tokens, twice], dim=1))).mean(1))


@pytest.mark.e2e
def test_parameters_that_lie_in_one_vector_have_the_gradients_of_the_loop():
    net, x, y = Tokens(), torch.randn(9, 5, 4), torch.arange(9) % 3
    clipped_sum, reason = clipped_sum_for(net, None, x, y)
    assert reason.startswith("vmap")
    shapes = {name: p.shape for name, p in net.named_parameters()}
    flat = torch.randn(sum(shape.numel() for shape in shapes.values()))
    parts = flat.split([shape.numel() for shape in shapes.values()])
    params = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    each = ClipRequest(math.inf, group=torch.arange(9), num_groups=9)
    before = flat.clone()
    for _ in range(2):
        ours = clipped_sum(params, x, y, each)[0]
        loop = LoopClippedSum(net, cross_entropy_of(net))(params, x, y, each)[0].to(ours)
        torch.testing.assert_close(ours, loop, rtol=1e-5, atol=1e-6)
        assert torch.equal(flat, before) and not flat.requires_grad


class Using(nn.Module):
    """A function of parameters of some shapes, and of what a layer gives; records are `[B, *shape]`."""

    def __init__(self, function, shape, *parameters):
        super().__init__()
        self.shape, self.function, self.first = shape, function, nn.Linear(shape[-1], shape[-1])
        self.own = nn.ParameterList([torch.randn(one) for one in parameters])

    def forward(self, x):
        return torch.tanh(self.function(self.first(x), *self.own)).flatten(1)


def positions(x, table):
    return x + F.embedding(torch.arange(x.shape[1]), table)


def time_first(x, w):
    return F.linear(x.transpose(0, 1), w).transpose(0, 1)


def ids_of(x):
    return (x.detach().abs() * 3).long().clamp(max=4)


USES = {
    "scaled": Using(lambda x, w: w * x, (5, 4), 4),
    "scaled by one number": Using(lambda x, w: x * w, (5, 4), ()),
    "scaled channels": Using(lambda x, w: x * w, (5, 4), (5, 1)),
    "larger than the records": Using(lambda x, w: x[:, :1] * w, (5, 4), (1, 6, 4)),
    "added": Using(lambda x, w: (x * 1).add_(w), (5, 4), (1, 5, 4)),
    "added flat": Using(lambda x, w: (x.view(-1, 4) + w).view_as(x), (5, 4), 4),
    "positions": Using(positions, (5, 4), (7, 4)),
    "positions twice": Using(lambda x, w: x + F.embedding(torch.arange(5) // 2, w), (5, 4), (7, 4)),
    "expanded": Using(lambda x, w: torch.cat([w.expand(len(x), -1, -1), x], 1), (5, 4), (1, 2, 4)),
    "expanded as": Using(lambda x, w: torch.cat([w.expand_as(x), x], 1), (5, 4), 4),
    "repeated": Using(lambda x, w: torch.cat([w.repeat(len(x), 3, 1), x], 1), (5, 4), (1, 2, 4)),
    "linear": Using(lambda x, w, b: F.linear(x, w, b), (5, 4), (3, 4), 3),
    "linear twice": Using(lambda x, w: F.linear(F.linear(x, w), w), (5, 4), (4, 4)),
    "linear at many positions": Using(lambda x, w, b: F.linear(x, w, b), (40, 4), (3, 4), 3),
    "linear, time first": Using(time_first, (5, 4), (3, 4)),
    "addmm": Using(lambda x, w, b: torch.addmm(b, x.view(-1, 4), w).view(len(x), 5, 3), (5, 4), (4, 3), 3),
    "matmul": Using(lambda x, w: x @ w, (5, 4), (4, 3)),
    "matmul from the left": Using(lambda x, w: torch.matmul(w, x), (5, 4), (3, 5)),
    "embedding": Using(lambda x, w: F.embedding(ids_of(x), w, padding_idx=-1), (5, 4), (5, 3)),
    "tied": Using(lambda x, w: F.linear(x + F.embedding(ids_of(x)[..., 0], w), w), (5, 4), (5, 4)),
    "layer norm": Using(lambda x, w, b: F.layer_norm(x, (4,), w, b, 1e-3), (5, 4), 4, 4),
    "layer norm of two": Using(lambda x, w: F.layer_norm(x, (5, 4), weight=w), (5, 4), (5, 4)),
    "rms norm": Using(lambda x, w: F.rms_norm(x, (4,), w), (5, 4), 4),
    "group norm": Using(lambda x, w, b: F.group_norm(x, 2, w, b), (6, 4), 6, 6),
    "prelu": Using(F.prelu, (5, 4), 5),
    "prelu of one slope": Using(F.prelu, (5, 4), 1),
    "convolution of groups": Using(lambda x, w, b: F.conv1d(x, w, b, 2, 1, groups=2), (4, 9), (6, 2, 3), 6),
    "convolution in 3D": Using(lambda x, w: F.conv3d(x, w, stride=(1, 2, 1)), (2, 3, 4, 5), (3, 2, 2, 2, 2)),
    "transposed": Using(lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1), (3, 4, 4), (3, 2, 3, 3), 2),
    "parts of a record": Using(lambda x, w: F.conv1d(x.flatten(0, 1), w).view(len(x), -1), (2, 3, 6), (4, 3, 2)),
    "divided": Using(lambda x, w: x / w.exp(), (5, 4), 4),
    "computed": Using(lambda x, w: x * w.sigmoid(), (5, 4), 4),
    "double": Using(lambda x, w: torch.add(x, w, alpha=2), (5, 4), 4),
    "bilinear": Using(lambda x, w: F.bilinear(x, x, w), (5, 4), (3, 4, 4)),
    "same": Using(lambda x, w: F.conv1d(x, w, padding="same"), (2, 9), (3, 2, 3)),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", USES)
def test_a_use_has_the_gradients_of_the_loop(name):
    net = USES[name]
    torch.manual_seed(0)
    x, y = torch.randn(9, *net.shape), torch.arange(9) % 2
    clipped_sum, reason = clipped_sum_for(net, None, x[:0], y[:0])
    assert reason.startswith("vmap")
    params = {name: p.detach() for name, p in net.named_parameters()}
    each = ClipRequest(math.inf, group=torch.arange(9), num_groups=9)
    ours = clipped_sum(params, x, y, each)[0]
    torch.testing.assert_close(
        ours, LoopClippedSum(net, cross_entropy_of(net))(params, x, y, each)[0], rtol=1e-4, atol=1e-5
    )


class OwnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Parameter(torch.randn(24, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        x = x.transpose(0, 1)
        own = (self.project, None, None, None, False, 0.5, self.out, None)
        y = F.multi_head_attention_forward(x, x, x, 8, 2, *own, self.training, need_weights=False)[0]
        return y.mean(dim=0)


@pytest.mark.e2e
def test_attention_of_functions_may_draw_a_mask_of_dropout():
    net, x, y = OwnAttention(), torch.randn(5, 4, 8), torch.arange(5)
    clipped_sum, how = clipped_sum_for(net, None, x[:1], y[:1])
    assert how.startswith("vmap")
    params = {name: p.detach() for name, p in net.named_parameters()}
    assert clipped_sum(params, x, y, ClipRequest(1.0))[0].isfinite().all()
