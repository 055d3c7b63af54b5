"""Single records under `vmap` with taps give the gradients of the loop, however a model uses its parameters."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, cross_entropy_of
from dpfl_lightning.privacy.clipping.taps import TappedSum

RECORDS, SIZE = 10, 4


def numbers(*shape):
    return torch.randn(RECORDS, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Small(nn.Module):
    """Layers that models use in unusual ways: `hidden` gets `[B, 6]` and returns `[B, 6]`."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)

    def hidden(self, x):
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(x)))


class Tied(Small):
    def __init__(self):
        super().__init__()
        self.second.weight = self.first.weight


class Twice(Small):
    def hidden(self, x):
        return self.first(torch.tanh(self.first(x)))


class ByFunction(Small):
    def hidden(self, x):
        return self.second(x) + F.linear(torch.tanh(x), self.second.weight)


class Transposed(Small):
    def hidden(self, x):
        return F.linear(torch.tanh(self.first(x)), self.first.weight.T)


class Scaled(Small):
    def hidden(self, x):
        return F.linear(x, self.first.weight * self.scale, self.first.bias)


class BySigns(Small):
    def hidden(self, x):
        return self.first(x) @ self.second.weight + torch.addmm(self.first.bias, x, self.second.weight)


class InPlace(Small):
    def hidden(self, x):
        return F.relu(self.first(x).add_(self.second(x).mul_(2)), inplace=True)


class OnViews(Small):
    def hidden(self, x):
        deep = self.first(x[:, None])
        deep[:, 0].mul_(3)
        return self.second(F.relu(deep, inplace=True)).squeeze(1)


class WithoutGradient(Small):
    def hidden(self, x):
        with torch.no_grad():
            fixed = self.first(x)
        return self.second(x) * fixed + self.first(x).detach()


class Regularised(Small):
    """The derivative of a layer's result depends on its weight, too."""

    def hidden(self, x):
        start = x * self.scale
        out = torch.tanh(self.first(start)).square().sum()
        (slope,) = torch.autograd.grad(out, start, create_graph=True)
        return self.second(slope)


class Nested(Small):
    def hidden(self, x):
        return torch.func.grad(lambda x: torch.tanh(self.first(x)).square().sum())(x)


class ForwardMode(Small):
    def hidden(self, x):
        return torch.func.jvp(lambda x: torch.tanh(self.first(x)), (x,), (torch.ones_like(x),))[1]


class NestedVmap(Small):
    def hidden(self, x):
        return torch.vmap(lambda column: self.first(column))(x)


class Functional(Small):
    def hidden(self, x):
        own = {"weight": self.first.weight * self.scale, "bias": self.first.bias}
        return torch.func.functional_call(self.second, own, (x,))


class Parametrized(Small):
    def __init__(self):
        super().__init__()
        parametrizations.weight_norm(self.first)


class WithPenalty(Small):
    def hidden(self, x):
        return self.first(x) * self.first.weight.square().sum() + self.second.bias


class Unused(Small):
    def hidden(self, x):
        self.second(x)
        return self.first(x)


class Attending(nn.Module):
    def __init__(self, need_weights=False):
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head, self.need_weights = nn.Linear(6, 3), need_weights

    def forward(self, x):
        out = self.attend(x, x, x, need_weights=self.need_weights)[0]
        return self.head(out + F.linear(out, self.attend.out_proj.weight)).mean(1)


class Crossing(Attending):
    def forward(self, x):
        return self.head(self.attend(x[:, :2], x, x + 1, need_weights=self.need_weights)[0]).mean(1)


class Encoding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layer(self.layer(x)).mean(1))


class Words(nn.Module):
    """Positions are no record's; the table of words is the head, too."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(9, 6, padding_idx=1), nn.Embedding(5, 6)
        self.norm, self.rms = nn.LayerNorm(6), nn.RMSNorm(6)

    def forward(self, ids):
        hidden = self.norm(self.words(ids) + self.places(torch.arange(5)))
        return F.linear(self.rms(hidden).mean(1), self.words.weight)


class Recurrent(nn.Module):
    """The last output, and the states, of a recurrent layer of which a weight is used elsewhere, too."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer, self.first = kind(6, 4, **options), nn.Linear(6, 6)
        self.wide = 8 if options.get("bidirectional") else 4
        self.head = nn.Linear(self.wide + 4, 3)

    def forward(self, x):
        hidden = self.first(x) if self.layer.batch_first else self.first(x).transpose(0, 1)
        out, states = self.layer(hidden)
        last = (states[0] * states[1].cos() if isinstance(states, tuple) else states).sum(0)
        out = out[:, -1] if self.layer.batch_first else out[-1]
        return self.head(torch.cat([out, last], 1)) + self.layer.weight_hh_l0.square().mean()


class Images(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, **{"padding": 1, **options})
        self.second, self.norm = nn.Conv2d(8, 8, 3, groups=2, stride=2), nn.GroupNorm(2, 8)
        self.turned, self.head = nn.ConvTranspose2d(8, 4, 2), nn.Linear(4, 3)
        self.slopes = nn.PReLU(8)

    def forward(self, x):
        hidden = self.norm(F.relu(self.first(x), inplace=True))
        hidden = self.slopes(self.second(hidden))
        hidden = hidden + F.conv2d(hidden, self.second.weight, padding=1, groups=2)
        return self.head(self.turned(hidden).mean((2, 3)))


class Series(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 6, 3, dilation=2), nn.Conv1d(6, 6, 3, groups=3, padding=1)
        self.third, self.head = nn.Conv1d(6, 6, 3, padding="same"), nn.Linear(6, 3)

    def forward(self, x):
        first = torch.tanh(self.first(x))
        parts = torch.stack([first, first.flip(-1)], dim=1).flatten(0, 1)  # two of each record
        return self.head(torch.tanh(self.third(self.second(parts))).unflatten(0, (-1, 2)).sum(1).mean(-1))


class Volumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv3d(1, 4, 2), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.first(x).square().mean((2, 3, 4)))


def generated(seed):
    """A model of random calls: of layers, some of them twice, of operators with their weights, and in place."""
    gen = torch.Generator().manual_seed(seed)

    def choose(count):
        return int(torch.randint(count, (), generator=gen))

    plan = [(choose(9), choose(3), choose(4)) for _ in range(6)]

    class Generated(nn.Module):
        def __init__(self):
            super().__init__()
            self.maps = nn.ModuleList(nn.Linear(6, 6, bias=bias) for bias in (True, False, True))
            self.norms = nn.ModuleList([nn.LayerNorm(6), nn.RMSNorm(6), nn.GroupNorm(3, 6)])
            self.conv, self.head = nn.Conv1d(1, 6, 3, padding=1), nn.Linear(6, 3)
            if seed % 3 == 0:
                self.maps[2].weight = self.maps[0].weight

        def forward(self, x):
            known = [x]
            for kind, which, back in plan:
                x, layer = known[-1 - back % len(known)], self.maps[which]
                known.append(
                    [
                        lambda x, layer: layer(x),
                        lambda x, layer: torch.tanh(layer(x)),
                        lambda x, layer: F.relu(layer(x), inplace=True),
                        lambda x, layer: x + F.linear(x, layer.weight),
                        lambda x, layer: x @ layer.weight / 3,
                        lambda x, layer: self.norms[[*self.maps].index(layer)](x),
                        lambda x, layer: self.conv(x[:, None]).mean(2) + x,
                        lambda x, layer: F.gelu(layer(x.view(-1, 2, 3).flatten(1)[:, None])).squeeze(1),
                        lambda x, layer: x * layer.weight.diagonal() + layer.weight.sum(),
                    ][kind](x, layer)
                )
            return self.head(known[-1] + known[-2])

    return Generated()


MODELS = {
    **{
        kind.__name__: (kind, numbers(6))
        for kind in (Small, Tied, Twice, ByFunction, Transposed, Scaled, BySigns, InPlace, OnViews, WithoutGradient)
    },
    **{kind.__name__: (kind, numbers(6)) for kind in (Regularised, Nested, ForwardMode, NestedVmap, Functional)},
    **{kind.__name__: (kind, numbers(6)) for kind in (Parametrized, WithPenalty, Unused)},
    "attention": (Attending, numbers(4, 6)),
    "attention with weights": (lambda: Attending(True), numbers(4, 6)),
    "attention to others": (Crossing, numbers(4, 6)),
    "encoder": (Encoding, numbers(4, 6)),
    "words": (Words, torch.randint(9, (RECORDS, 5), generator=torch.Generator().manual_seed(2))),
    "images": (Images, numbers(2, 8, 8)),
    "an LSTM": (lambda: Recurrent(nn.LSTM, batch_first=True), numbers(5, 6)),
    "LSTMs": (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, bias=False), numbers(5, 6)),
    "GRUs": (lambda: Recurrent(nn.GRU, num_layers=2, batch_first=True, bidirectional=True), numbers(5, 6)),
    "an RNN": (lambda: Recurrent(nn.RNN, batch_first=True), numbers(5, 6)),
    "an RNN with ReLU": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), numbers(5, 6)),
    "images with reflections": (lambda: Images(padding_mode="reflect", dilation=2, bias=False), numbers(2, 8, 8)),
    "series": (Series, numbers(2, 9)),
    "volumes": (Volumes, numbers(1, 4, 4, 4)),
    **{f"generated {seed}": (lambda seed=seed: generated(seed), numbers(6)) for seed in range(16)},
}


@pytest.mark.e2e
@pytest.mark.parametrize("build, x", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("order", [2, 1])
def test_taps_give_the_gradients_of_the_loop(build, x, order):
    torch.manual_seed(0)
    net, y = build().double(), torch.arange(RECORDS) % 3
    params = {name: p.detach() for name, p in net.named_parameters()}
    loss, groups = cross_entropy_of(net), torch.arange(RECORDS)
    expected, norms = LoopClippedSum(net, loss)(params, x, y, ClipRequest(math.inf, order, groups, RECORDS))
    for size in (SIZE, RECORDS):
        request = ClipRequest(math.inf, order, groups, RECORDS)
        actual, found = TappedSum(net, loss, size)(params, x, y, request)
        assert (actual - expected).norm(dim=1).le(1e-6 * expected.norm(dim=1)).all()
        torch.testing.assert_close(found, norms, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind, tapped", [(Small, True), (Regularised, False), (Nested, False), (Scaled, True)])
def test_only_the_uses_of_a_parameter_that_a_rule_covers_are_tapped(kind, tapped):
    torch.manual_seed(0)
    net = kind().double()
    clipped_sum, x = TappedSum(net, cross_entropy_of(net), SIZE), numbers(6)
    clipped_sum(dict(net.named_parameters()), x, torch.arange(RECORDS) % 3, ClipRequest(1.0))
    assert ("first.bias" in clipped_sum.tapped) == (tapped and kind is not Scaled)
    assert ("first.weight" in clipped_sum.direct) == (kind in (Regularised, Nested, Scaled))


class Writing(Small):
    """Each way in which code writes a record's numbers, or draws, into a new tensor."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def hidden(self, x):
        hidden = self.first(x)
        if self.way == "rows":
            made = torch.zeros(len(x), 6, dtype=x.dtype)
            made[:, 1:] = hidden[:, 1:]
            return made
        if self.way == "places":
            made = torch.ones(len(x), 6, dtype=x.dtype)
            made[torch.arange(len(x)), (x[:, 0] > 0).long()] = 0.5
            return hidden * made
        if self.way == "mask":
            hidden[x > 0.3] = 0.0
            return hidden
        if self.way == "mask of rows":
            hidden = hidden.clone()
            hidden[x[:, 0] > 0.3] = 2
            return hidden
        if self.way == "a row where a mask is":
            hidden = hidden.clone()
            hidden[x[:, 0] > 0.3] = self.scale * torch.ones(6, dtype=x.dtype)
            return hidden
        if self.way == "one row where a mask is":
            hidden = hidden.clone()
            hidden[x[:, 0] > 0.3] = self.scale[None].to(x.dtype)
            return hidden * x.new_tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0])
        if self.way == "new of a weight":
            made = self.scale.new_zeros(len(x), 6)
            made[:, 1:] = hidden[:, 1:]
            return made
        if self.way == "numbers":
            made = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]], dtype=x.dtype)
            made *= hidden
            return made
        if self.way == "like":
            made = torch.zeros_like(self.scale.expand(len(x), 6))
            made += hidden
            return made
        made = torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(1.0)
        return hidden / made


WAYS = [
    "rows",
    "places",
    "mask",
    "mask of rows",
    "a row where a mask is",
    "new of a weight",
    "numbers",
    "like",
    "draws",
]


@pytest.mark.e2e
@pytest.mark.parametrize("way", WAYS)
def test_records_write_into_constants_of_their_own(way):
    torch.manual_seed(0)
    net, y, x = Writing(way).double(), torch.arange(RECORDS) % 3, numbers(6)
    params = {name: p.detach() for name, p in net.named_parameters()}
    request = ClipRequest(math.inf, 2, torch.arange(RECORDS), RECORDS)
    expected, _ = LoopClippedSum(net, cross_entropy_of(net))(params, x, y, request)
    actual, _ = TappedSum(net, cross_entropy_of(net), SIZE, own_constants=True)(params, x, y, request)
    assert (actual - expected).norm(dim=1).le(1e-6 * expected.norm(dim=1)).all()
    assert clipped_sum_for(net.float(), None, x.float(), y)[1].startswith("vmap")


def test_a_mask_of_another_length_fills_nothing():
    class Masking(Small):
        def hidden(self, x):
            hidden = self.first(x).clone()
            hidden.view(6)[x[0, :1] > 0] = 0.0  # six numbers, of which the mask tells one
            return hidden

    net, (x, y) = Masking().double(), (numbers(6), torch.arange(RECORDS) % 3)
    for kind in (LoopClippedSum(net, cross_entropy_of(net)), TappedSum(net, cross_entropy_of(net), SIZE)):
        with pytest.raises((RuntimeError, IndexError)):
            kind({name: p.detach() for name, p in net.named_parameters()}, x, y, ClipRequest(1.0))


def test_draws_into_a_constant_are_those_of_each_record():
    class Dropping(Small):
        def hidden(self, x):
            return self.first(x) * torch.zeros(len(x), 1).bernoulli_(0.5)

    torch.manual_seed(0)
    net = Dropping()
    params, x = {name: p.detach() for name, p in net.named_parameters()}, torch.ones(64, 6)
    request = ClipRequest(math.inf, 2, torch.arange(64), 64)
    sums, _ = TappedSum(net, cross_entropy_of(net), 32, own_constants=True)(params, x, torch.zeros(64).long(), request)
    dropped = int((sums == sums[sums.norm(dim=1).argmin()]).all(dim=1).sum())
    assert 16 < dropped < 48
