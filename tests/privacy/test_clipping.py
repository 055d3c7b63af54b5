"""Every rule and engine of clipped sums is held to per-record gradients by `vmap`, in float64."""

import copy
import functools
import itertools
import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Net, summed
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from dpfl_lightning.errors import UserError
from dpfl_lightning.kernels import pooling, sparse_conv
from dpfl_lightning.privacy.clipping import layer_rules
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for, vmap_or_loop
from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.layer_rules import RULES, Dense, Unsupported
from dpfl_lightning.privacy.clipping.reference import (
    ClipRequest,
    LoopClippedSum,
    VmapClippedSum,
    cross_entropy_of,
    evaluating,
)
from dpfl_lightning.privacy.clipping.sequence_layers import TAPPED
from dpfl_lightning.privacy.clipping.structure import code_of_users
from dpfl_lightning.privacy.clipping.taps import TappedSum
from dpfl_lightning.privacy.clipping.trial_records import Reference, TrialRecords
from dpfl_lightning.runtime.memory import keep_freed_memory

pytestmark = pytest.mark.usefixtures("code_was_read")  # of rules, and of trials of code

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}  # norms hold what rounding may have taken


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def squares_of(net):
    """A loss that reaches every output with its own weight, whatever the output's shape."""

    def sample_loss(params, x, y):
        out = functional_call(net, params, (x,)).flatten(1)
        return ((out - torch.linspace(-1, 1, out.shape[1], dtype=out.dtype)) ** 2).sum(1)

    return sample_loss


def params_of(net, dtype=torch.float64):
    """Random values for the trainable parameters: nothing stays at the ones and zeros that hide mistakes."""
    gen = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(p.shape, generator=gen, dtype=torch.float32).to(dtype) * 0.3
        for name, p in net.named_parameters()
        if p.requires_grad
    }


def cast(values, dtype):
    return {name: p.to(dtype) for name, p in values.items()}


def assert_equals_reference(net, x, dtype=torch.float64, channels_last=True, sparse=()):
    """Record by record (each its own group), clipped and not, then summed over two groups in small chunks."""
    mine, true = copy.deepcopy(net).to(dtype), copy.deepcopy(net).double()
    fast = FastClippedSum(mine, squares_of(mine), 3, channels_last, sparse)
    reference = VmapClippedSum(squares_of(true))
    params, y = params_of(net, dtype), torch.zeros(len(x), dtype=torch.long)
    wide = {name: p.double() for name, p in params.items()}
    x, wide_x = (x.to(dtype), x.to(dtype).double()) if x.is_floating_point() else (x, x)
    each, pairs, count = torch.arange(len(x)), torch.arange(len(x)) % 2, max(len(x), 1)
    cases = [(math.inf, 2, each, count), (0.1, 2, each, count), (0.1, 1, each, count), (1.0, 2, pairs, 2)]
    for clip_norm, order, group, num_groups in cases:
        ours = summed(fast, params, x, y, clip_norm, group, num_groups, order=order).double()
        expected = summed(reference, wide, wide_x, y, clip_norm, group, num_groups, order=order)
        scale = expected.norm(dim=1) if group is each else torch.tensor(float(count))
        # A gradient of one number can cancel to nothing: 0.1 is small beside the terms of its sum.
        assert ((ours - expected).norm(dim=1) <= TOLERANCE[dtype] * scale.clamp(min=0.1)).all()


@st.composite
def linears(draw, batch):
    inner = draw(st.sampled_from([(), (1,), (3,), (2, 20)]))
    wide, deep = draw(st.sampled_from([1, 4, 17])), draw(st.sampled_from([1, 5]))
    return nn.Linear(deep, wide, bias=draw(st.booleans())), torch.randn(batch, *inner, deep)


@st.composite
def convolutions(draw, batch):
    groups = draw(st.sampled_from([1, 1, 1, 2]))
    layer = nn.Conv2d(
        groups * draw(st.sampled_from([1, 2, 8])),
        groups * draw(st.sampled_from([1, 5, 16])),
        kernel_size=draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        stride=(stride := draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))),
        padding=draw(st.sampled_from([0, 1, (1, 0), "same"] if stride == (1, 1) else [0, 1])),
        dilation=draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "zeros", "reflect", "circular"])),
    )
    height, width = draw(st.integers(5, 13)), draw(st.integers(5, 13))
    return layer, torch.randn(batch, layer.in_channels, height, width)


@st.composite
def behind_another(draw, batch):
    """The second convolution's backward pass hands the first one a gradient of its output."""
    layer, x = draw(convolutions(batch))
    return nn.Sequential(nn.Conv2d(layer.in_channels, layer.in_channels, 3, padding=1), nn.Tanh(), layer), x


@st.composite
def group_norms(draw, batch):
    groups = draw(st.integers(1, 3))
    inner = draw(st.sampled_from([(7,), (2, 3), (1, 5, 2)]))
    channels = groups * draw(st.integers(1, 3))
    return nn.GroupNorm(groups, channels), torch.randn(batch, channels, *inner)


@st.composite
def convolutions_of_sequences(draw, batch):
    stride = draw(st.integers(1, 3))
    layer = nn.Conv1d(
        draw(st.sampled_from([1, 2, 8])),
        draw(st.sampled_from([1, 5])),
        draw(st.integers(1, 4)),
        stride=stride,
        padding=draw(st.sampled_from([0, 2, "same"] if stride == 1 else [0, 2])),
        dilation=draw(st.integers(1, 2)),
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "circular"])),
    )
    return layer, torch.randn(batch, layer.in_channels, draw(st.integers(8, 19)))


@st.composite
def rms_norms(draw, batch):
    shape, inner = draw(st.sampled_from([(4,), (2, 3)])), draw(st.sampled_from([(), (1,), (3, 2)]))
    return nn.RMSNorm(shape, eps=draw(st.sampled_from([None, 1e-5]))), torch.randn(batch, *inner, *shape)


def instance_norms(kind, dims):
    @st.composite
    def layers(draw, batch):
        return kind(3, affine=True), torch.randn(batch, 3, *(draw(st.integers(2, 4)) for _ in range(dims)))

    return layers


@st.composite
def layer_norms(draw, batch):
    shape, inner = draw(st.sampled_from([(4,), (2, 3)])), draw(st.sampled_from([(), (1,), (3, 2)]))
    return nn.LayerNorm(shape, bias=draw(st.booleans())), torch.randn(batch, *inner, *shape)


@st.composite
def embeddings(draw, batch):
    padding = draw(st.sampled_from([None, 1]))
    tokens = torch.randint(0, 4, (batch, *draw(st.sampled_from([(), (1,), (6,), (2, 3)]))))
    return nn.Embedding(4, 3, padding_idx=padding), tokens


@st.composite
def attentions(draw, batch):
    """Self-attention behind a layer; the first place may always be read, so that no score is undefined."""
    heads, places = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    weights, causal, padded = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    boolean = draw(st.booleans())

    def forward(net, x):
        mask = nn.Transformer.generate_square_subsequent_mask(places).to(x.dtype) if causal else None
        padding = (x[:, :, 0] > 0.5).index_fill(1, torch.tensor([0]), False) if padded else None
        if padded and not boolean:
            padding = torch.zeros_like(x[:, :, 0]).masked_fill(padding, -math.inf)
        y = net.first(x)
        out, scores = net.layer(y, y, y, key_padding_mask=padding, need_weights=weights, attn_mask=mask)
        return torch.cat([out.flatten(1), scores.flatten(1)], dim=1) if weights else out

    layer = nn.MultiheadAttention(4, heads, bias=draw(st.booleans()), batch_first=True)
    return Net(forward, first=nn.Linear(4, 4), layer=layer), torch.randn(batch, places, 4)


CASES = {
    nn.MultiheadAttention: attentions,
    nn.Linear: linears,
    nn.Conv2d: convolutions,
    nn.Conv1d: convolutions_of_sequences,
    nn.GroupNorm: group_norms,
    nn.RMSNorm: rms_norms,
    nn.InstanceNorm1d: instance_norms(nn.InstanceNorm1d, 1),
    nn.InstanceNorm2d: instance_norms(nn.InstanceNorm2d, 2),
    nn.InstanceNorm3d: instance_norms(nn.InstanceNorm3d, 3),
    nn.LayerNorm: layer_norms,
    nn.Embedding: embeddings,
    "convolution behind another": behind_another,
}


def test_every_rule_has_a_case():
    assert set(CASES) == {*RULES, *TAPPED, "convolution behind another"}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "layer_type", [kind for kind in CASES if kind not in TAPPED], ids=lambda t: getattr(t, "__name__", t)
)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_rule_equals_reference(layer_type, dtype, data):
    equals_reference(layer_type, dtype, data)


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layer_type", TAPPED, ids=lambda t: t.__name__)
@settings(max_examples=12, deadline=None, derandomize=True)  # the reference is slow
@given(data=st.data())
def test_tapped_layer_equals_reference(layer_type, dtype, data):
    equals_reference(layer_type, dtype, data)


def equals_reference(layer_type, dtype, data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))  # what hypothesis draws decides the tensors, too
    layer, x = data.draw(CASES[layer_type](data.draw(st.sampled_from([0, 1, 2, 5]))))
    assert_equals_reference(layer, x, dtype=dtype)


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pooled_convolutions_equal_reference(dtype, monkeypatch):
    """In float32 the gradient behind max-pooling takes the way that skips its zeros."""
    torch.manual_seed(0)
    calls, really = [], sparse_conv.sparse_backward
    monkeypatch.setattr(sparse_conv, "sparse_backward", lambda *args: calls.append(1) or really(*args))
    body = [nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=1), nn.MaxPool2d(2)]
    net = nn.Sequential(*body, nn.Flatten(), nn.Linear(128, 5))
    assert_equals_reference(net, torch.randn(5, 3, 12, 12), dtype, sparse=["0", "3"])
    assert bool(calls) == (dtype is torch.float32)


CONV = {"kernel_size": 3, "padding": 1}
#: bodies of nets, and how many of their convolutions are computed together with ReLU and max-pooling
STAGES = [
    ([nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)], 1),
    ([nn.Conv2d(1, 16, 5, stride=2, bias=False), nn.MaxPool2d((2, 2), 2), nn.ReLU(inplace=True)], 1),
    (
        [
            *(nn.Conv2d(3, 16, **CONV), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(16, 16, 3, stride=(1, 2), padding=(0, 1)), nn.MaxPool2d(2), nn.ReLU()),
        ],
        2,
    ),
    ([nn.Conv2d(3, 16, **CONV), nn.GroupNorm(2, 16), nn.ReLU(), nn.MaxPool2d(2)], 0),
    ([nn.Conv2d(3, 16, **CONV), nn.ReLU(), nn.AvgPool2d(2), nn.AvgPool2d((2, 2), 2, count_include_pad=False)], 0),
    ([nn.Conv2d(3, 4, **CONV), nn.AvgPool2d(2, divisor_override=3), nn.AvgPool2d(2, ceil_mode=True)], 0),
    ([nn.Conv2d(3, 16, **CONV), nn.ReLU(), nn.MaxPool2d(3, stride=2)], 0),
    ([nn.Conv2d(3, 16, **CONV), nn.MaxPool2d(2), nn.Tanh()], 0),
    ([nn.Conv2d(3, 16, 3, dilation=2), nn.ReLU(), nn.MaxPool2d(2)], 0),
    ([nn.Conv2d(3, 16, **CONV, padding_mode="reflect"), nn.ReLU(), nn.MaxPool2d(2)], 0),
]


@pytest.fixture
def stage_channels(monkeypatch):
    """The output channels of the stages that were computed as one layer."""
    channels, really = [], pooling.max_relu
    monkeypatch.setattr(pooling, "max_relu", lambda y, count: channels.append(y.shape[1]) or really(y, count))
    return channels


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("body, stages", STAGES, ids=lambda x: None if isinstance(x, int) else repr(x)[:60])
def test_stages_equal_reference(body, stages, dtype, stage_channels):
    """A convolution with ReLU and max-pooling, in either order and for odd sizes, in a batch of some, one and none."""
    x = torch.randn(5, body[0].in_channels, 11, 12)
    net = nn.Sequential(*body, nn.Flatten(), nn.LazyLinear(5))
    net(x)
    before = len(stage_channels)
    for records in (5, 1, 0):
        assert_equals_reference(net, x[:records], dtype)
    assert len(set(stage_channels[before:])) == min(stages, 1) and len(stage_channels) % max(stages, 1) == 0
    if stages and dtype is torch.float64:
        reason = clipped_sum_for(net, squares_of(net), x[:0], LABELS[:0])[1]
        assert reason == "fast: exact rules for all layers"


seen_by_hooks = set[type]()


def test_stages_of_users_remain_theirs(stage_channels):
    """Hooks run, and modules that are called outside of their sequence do what they always do."""
    body = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
    seen_by_hooks.clear()
    watched = copy.deepcopy(body)
    for module in watched:
        module.register_forward_hook(lambda module, inputs, output: seen_by_hooks.add(type(module)))
    parts = Net(lambda net, x: net.head((net.body[1](net.body[0](x))).flatten(1)), body=body, head=nn.Linear(512, 3))
    assert_equals_reference(nn.Sequential(watched, nn.Flatten(), nn.Linear(128, 3)), IMAGES, torch.float32)
    assert_equals_reference(parts, IMAGES, torch.float32)
    assert len(seen_by_hooks) == 3 and not stage_channels
    assert not any("forward" in vars(module) for module in parts.modules())


@pytest.mark.parametrize("narrow", [0, 1000])
@pytest.mark.parametrize("never", [False, True])
@pytest.mark.parametrize("out", [3, 16])
def test_every_way_of_a_convolution_equals_reference(narrow, never, out, monkeypatch):
    monkeypatch.setattr(layer_rules, "NARROW", narrow)
    monkeypatch.setattr(layer_rules, "_never_form", lambda steps, p, d: never)
    layer = nn.Conv2d(3, out, 3, stride=2, padding=1, dilation=(1, 2))
    for channels_last in (True, False):
        assert_equals_reference(layer, torch.randn(4, 3, 8, 9), channels_last=channels_last)


def test_a_convolution_of_many_groups_may_be_split():
    """As CUDA limits grids; the convolution of all records at once is held to the reference above."""
    layer, x, dy = nn.Conv2d(4, 6, 3, groups=2), torch.randn(5, 4, 8, 9), torch.randn(5, 6, 6, 7)
    with torch.no_grad():
        whole, split = (layer_rules._grouped_weight_grads(layer, x, dy, at_once) for at_once in (5, 2))
    assert whole.shape == (5, *layer.weight.shape)
    torch.testing.assert_close(split, whole)


#: convolutions and maps that are smaller than their kernels
SMALL_MAPS = [
    (nn.Conv2d(8, 16, 3, padding=1), (1, 1)),
    (nn.Conv2d(3, 16, (5, 3), stride=(2, 1), padding=(2, 1)), (2, 6)),
    (nn.Conv2d(4, 6, 3, padding=(3, 2), dilation=(3, 2), groups=2), (2, 1)),
    (nn.Conv2d(8, 8, 7, padding=3, groups=8, bias=False), (2, 3)),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layer, size", SMALL_MAPS, ids=repr)
def test_kernels_on_small_maps_equal_reference(layer, size, dtype):
    """Alone, and behind another layer, to which it hands the gradient of its input."""
    assert_equals_reference(layer, torch.randn(4, layer.in_channels, *size), dtype)
    behind = nn.Sequential(nn.Conv2d(2, layer.in_channels, 1), nn.Tanh(), layer)
    assert_equals_reference(behind, torch.randn(3, 2, *size), dtype)
    assert_equals_reference(behind, torch.randn(0, 2, *size), dtype)


def test_frozen_parts_chosen_parts_and_bad_records_of_kernels_on_small_maps():
    """One layer sees maps of several sizes in different calls."""
    net = nn.Sequential(
        nn.Conv2d(2, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    fast, reference = FastClippedSum(net, squares_of(net), 3), VmapClippedSum(squares_of(net))
    params, group, y = params_of(net, torch.float32), torch.tensor([2, 0, 1, 0, 2]), torch.zeros(5, dtype=torch.long)
    frozen = {name: p for name, p in params.items() if name != "2.weight"}
    for size in ((1, 1), (6, 6), (2, 1), (1, 3), (1, 1)):
        x = torch.randn(5, 2, *size)
        x[1], x[3, 0] = math.nan, math.inf
        for values, only in ((params, None), (params, ["2.weight"]), (params, ["2.bias", "0.weight"]), (frozen, None)):
            for order, num_groups in itertools.product((1, 2), (1, 3)):
                request = ClipRequest(0.1, order, group if num_groups > 1 else None, num_groups, only)
                (sums, norms), (expected, true_norms) = (f(values, x, y, request) for f in (fast, reference))
                torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-6)
                assert not torch.isfinite(norms[[1, 3]]).any() and not (num_groups > 1 and sums[0].any())
                torch.testing.assert_close(norms[[0, 2, 4]], true_norms[[0, 2, 4]], rtol=1e-5, atol=0)


class Slope(nn.Module):
    """A layer of a project: no rule of the package is for it."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x):
        return torch.where(x > 0, x, self.slope * x)


@pytest.mark.parametrize("module", [nn.Conv1d(2, 4, 3, groups=2), Slope(), nn.ConvTranspose1d(2, 2, 2)], ids=repr)
def test_a_model_with_a_layer_without_a_rule_goes_under_vmap(module):
    net, x = nn.Sequential(nn.Linear(6, 6), module, nn.Flatten()), torch.randn(3, 2, 6)
    with pytest.raises(Unsupported, match=r"`1` .* has no rule for all of its parameters"):
        FastClippedSum(net)
    clipped_sum, reason = clipped_sum_for(net, squares_of(net), x[:0], torch.zeros(0, dtype=torch.long))
    assert reason.startswith("vmap: `1`")
    params, request = params_of(net, torch.float32), ClipRequest(0.1)
    y = torch.zeros(3, dtype=torch.long)
    expected = LoopClippedSum(net, squares_of(net))(params, x, y, request)
    torch.testing.assert_close(clipped_sum(params, x, y, request), expected, rtol=1e-4, atol=1e-6)


WRONG = "the gradient of `1.slope` differs from what the layers' rules give"


@pytest.mark.parametrize("times", [1, 2])
def test_a_project_adds_a_rule_and_a_wrong_one_is_found(times, monkeypatch):
    def slope_rule(layer, params, inputs, dy):
        return {"slope": Dense(times * (dy * inputs[0].clamp(max=0)).flatten(1).sum(dim=1, keepdim=True))}

    monkeypatch.setitem(RULES, Slope, slope_rule)
    net = nn.Sequential(nn.Linear(6, 6), Slope())
    reason = clipped_sum_for(net, None, torch.randn(4, 6), torch.arange(4))[1]
    assert reason == ("fast: exact rules for all layers" if times == 1 else f"vmap: {WRONG}")
    if times == 1:
        assert_equals_reference(net, torch.randn(3, 6))


def residual(net, x):
    x = F.relu_(net.stem(x))
    out = net.one(x)
    out += x
    return net.head(F.adaptive_avg_pool2d(out, 1).flatten(1))


def viewing(net, x):
    return net.head(net.pool(net.conv(x)).view(len(x), -1))


def tokens(net, x):
    x = net.embed(x)
    return net.head((x + torch.tanh(net.mix(net.norm(x)))).mean(1))


def cnn():
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 4, 3, padding="same"), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3)),
    )


def reading(layer):
    return Net(lambda net, x: net.read(x[:, :, None])[0].sum(1), read=layer)


IMAGES, LABELS = torch.randn(7, 1, 8, 8), torch.arange(7) % 3
ONE = nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1))


def sentences():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(7, 8), encoder, nn.Flatten(), nn.Linear(32, 3))


MODELS = {
    "cnn": cnn(),
    "residual": Net(residual, stem=nn.Conv2d(1, 8, 3, padding=1, bias=False), one=ONE, head=nn.Linear(8, 3)),
    "viewing": Net(viewing, conv=nn.Conv2d(1, 4, 3), pool=nn.MaxPool2d(2), head=nn.Linear(4 * 9, 3)),
    "tokens": Net(tokens, embed=nn.Embedding(7, 8), norm=nn.LayerNorm(8), mix=nn.Linear(8, 8), head=nn.Linear(8, 3)),
    "sentences": sentences(),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_model_equals_reference(name, dtype):
    net = copy.deepcopy(MODELS[name]).eval()  # dropout draws differ between two passes
    x = torch.randint(0, 7, (5, 4)) if name in ("tokens", "sentences") else IMAGES
    assert_equals_reference(net, x, channels_last=name != "viewing", dtype=dtype)


class Adapted(nn.Module):
    """A frozen linear layer, and a trainable product of low rank."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_adapters_of_low_rank_equal_reference():
    net = nn.Sequential(Adapted(), nn.Tanh(), Adapted(), nn.Flatten())
    for dtype in TOLERANCE:
        assert_equals_reference(net, torch.randn(5, 3, 4), dtype)


def test_frozen_parameters_of_attention_are_left_out():
    net = sentences().eval()
    for name in ("1.layers.0.self_attn.in_proj_weight", "1.layers.1.self_attn.out_proj.bias"):
        net.get_parameter(name).requires_grad_(False)
    assert_equals_reference(net, torch.randint(7, (3, 4)))


def test_layer_norm_in_low_precision_keeps_the_normalised_input():
    """On a CPU the moments of the forward pass are rounded to bfloat16, which is too coarse for a large mean."""
    layer, x = nn.LayerNorm(32), 10 + torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    x = x.bfloat16()
    _, *moments = torch.native_layer_norm(x, (32,), None, None, layer.eps)
    weight = layer_rules.layer_norm_rule(layer, {"weight": layer.weight}, (x, *moments), torch.ones_like(x))["weight"]
    assert torch.equal(weight.grads, nn.functional.layer_norm(x, (32,)))


@pytest.mark.e2e
def test_recurrent_layers_are_checked_without_dropout_in_training_mode():  # else cuDNN has no derivative
    modes = set()

    def read(net, x):
        modes.add((net.training, net.read.training))
        return net.read(x)[0]

    net = Net(read, read=nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)).eval()
    net.read.train()
    x = torch.randn(5, 7, 3)
    with evaluating(net):
        assert torch.equal(net(x), net(x))
    for sums in (clipped_sum_for, vmap_or_loop):
        sums(net, lambda params, x, y: functional_call(net, dict(params), (x,)).flatten(1).sum(1), x, LABELS[:5])
    assert modes == {(False, True)}
    assert net.read.dropout == 0.5


@pytest.mark.parametrize("name", ["cnn", "residual"])
def test_fast_is_chosen_and_leaves_no_trace(name):
    net = MODELS[name]
    before, state = torch.get_rng_state(), copy.deepcopy(net.state_dict())
    with torch.set_grad_enabled(name != "residual"):
        clipped_sum, reason = clipped_sum_for(net, None, IMAGES, LABELS)
    assert clipped_sum.by_rules, reason
    assert clipped_sum.choose().channels_last == (name == "cnn")  # pooled, and without .view
    assert reason == "fast: exact rules for all layers"
    assert torch.equal(torch.get_rng_state(), before)
    assert all(m.training for m in net.modules())
    assert not any(m._forward_hooks for m in net.modules())
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


RULES_FOR_ALL = "fast: exact rules for all layers"


def tied():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    return net


def reasons():
    """Models of known layers, and why their engine is chosen."""
    layer = nn.Linear(3, 3)
    return [
        (nn.Sequential(layer, nn.Tanh()), RULES_FOR_ALL),
        (nn.Sequential(layer, nn.Tanh(), layer), "vmap: `0` is used twice in one forward pass"),
        (tied(), "vmap: `0` (Linear) has no rule for all of its parameters"),
        (nn.Sequential(layer, nn.Softmax(0)), "vmap: `1` (Softmax) acts on other dimensions than those of a record"),
        (nn.Sequential(layer, Slope()), "vmap: `1` (Slope) has a forward pass of its own"),
    ]


@pytest.mark.e2e
def test_engine_is_chosen_with_its_reason(monkeypatch):
    monkeypatch.setattr("dpfl_lightning.privacy.clipping.checked.code_of_users", code_of_users)
    for net, words in reasons():
        clipped_sum, reason = clipped_sum_for(net, None, torch.randn(1, 3), LABELS)
        assert reason == words
        assert isinstance(clipped_sum.choose(), FastClippedSum if words.startswith("fast") else TappedSum)


class Triplet(nn.Module):
    """An anchor beside its positive and negative: of a constant record the gradient is zero up to rounding."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x):
        anchor, *others = F.normalize(self.encoder(x), dim=-1).unbind(1)
        return torch.stack([(anchor * one).sum(1) for one in others], dim=1) / 0.1


class Standardising(nn.Module):
    """It changes its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        return self.layer(x.sub_(0.5).div_(2.0))


def test_rules_are_right_where_a_gradient_is_zero_and_where_the_input_changes():
    for net, shape in ((Triplet(), (3, 8)), (Standardising(), (8,))):
        x, y = torch.randn(9, *shape), torch.arange(9) % 2
        clipped_sum, reason = clipped_sum_for(net, None, x[:0], y[:0])
        assert reason.startswith(("fast", "vmap"))
        params, loop = dict(net.named_parameters()), LoopClippedSum(net, cross_entropy_of(net))
        ours, expected = (summed(one, params, x.clone(), y, 0.3, None, 1) for one in (clipped_sum, loop))
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_wrong_gradient_of_a_small_record_is_seen_beside_large_ones():
    torch.manual_seed(1)
    net, trials = nn.Linear(3, 3), TrialRecords((torch.empty(0, 3), LABELS[:0]), (2,))
    checks = Reference(net, cross_entropy_of(net), trials, [*range(7)], torch.float64)
    rows = [torch.cat(checks.row(number))[None] for number in range(7)]
    assert max(checks.total(number) for number in range(7)) > 100 * min(checks.total(number) for number in range(7))
    for number, row in enumerate(rows):
        for relative, wrong in ((1e-10, None), (1e-6, "weight")):
            assert checks.wrong_parameter([*rows[:number], row * (1 + relative), *rows[number + 1 :]]) == wrong


def test_records_of_no_positions_have_gradients_of_zero():
    net, x = nn.Embedding(5, 3), torch.zeros(4, 0, dtype=torch.long)

    def loss(params, x, y):
        return functional_call(net, dict(params), (x,)).flatten(1).sum(1)

    clipped_sum, reason = clipped_sum_for(net, loss, x[:0], LABELS[:0])
    assert reason.startswith("fast")
    assert not summed(clipped_sum, dict(net.named_parameters()), x, LABELS[:4], 1.0, None, 1)[0].any()


class Queries(nn.Module):
    """Learned queries, as of a decoder, with dropout before a record has a part in them."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.queries, self.decoder = nn.Embedding(3, 4), nn.TransformerDecoder(layer, 1)

    def forward(self, x):
        return self.decoder(self.queries.weight.unsqueeze(0).expand(len(x), -1, -1), x).mean(2)


@pytest.mark.e2e
def test_what_vmap_cannot_draw_goes_one_record_at_a_time():
    net, x = Queries(), torch.randn(8, 5, 4)
    state = torch.get_rng_state()
    fast, reason = clipped_sum_for(net, None, x[:0], LABELS[:0])
    serial = vmap_or_loop(net, cross_entropy_of(net), x[:0], LABELS[:0])
    assert torch.equal(torch.get_rng_state(), state) and reason.startswith("loop: vmap: Cannot ask for different")
    for one in (fast, serial):
        assert one(dict(net.named_parameters()), x, LABELS[:8], ClipRequest(1.0))[0].norm() > 0


def test_a_loss_that_leaves_others_in_the_places_of_parameters_is_refused():
    """torch's `tie_weights` swaps those of a module with two names twice."""
    block = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    net = nn.Sequential(block, block, nn.Linear(3, 3))
    before = dict(net.named_parameters())

    def loss(params, x, y, **options):
        return F.cross_entropy(functional_call(net, dict(params), (x,), **options), y, reduction="none")

    with pytest.raises(UserError, match=r"others for 0\.0\.weight, 0\.0\.bias'\. .* tie_weights=False"):
        clipped_sum_for(net, loss, torch.empty(0, 3), LABELS[:0])
    assert all(before[name] is one for name, one in net.named_parameters())
    untied = functools.partial(loss, tie_weights=False)
    assert clipped_sum_for(net, untied, torch.empty(0, 3), LABELS[:0])[1].startswith("vmap: `0.0` is used twice")


def test_losses_in_float32_and_losses_that_read_parameters_are_checked():
    net = nn.Sequential(nn.Linear(3, 3))
    plain = cross_entropy_of(net)

    def with_decay(params, x, y):
        return plain(params, x, y) + params["0.weight"].square().sum()

    _, reason = clipped_sum_for(net, lambda p, x, y: plain(p, x.float(), y), torch.empty(0, 3), LABELS)
    assert reason == "fast: exact rules for all layers"
    _, reason = clipped_sum_for(net, with_decay, torch.randn(1, 3), LABELS)
    assert reason == "vmap: the gradient of `0.weight` differs from what the layers' rules give"


def test_embedding_that_scales_by_frequency_has_no_rule():
    net = nn.Sequential(nn.Embedding(3, 3, scale_grad_by_freq=True), nn.Flatten())
    with pytest.raises(Unsupported, match="scale_grad_by_freq"):
        summed(FastClippedSum(net), params_of(net), torch.ones(2, 1, dtype=torch.long), LABELS[:2], 1.0)


@pytest.fixture(params=["vmap", "fast"])
def engine(request):
    def build(net, size=3):
        loss = cross_entropy_of(net)
        return VmapClippedSum(loss, size) if request.param == "vmap" else FastClippedSum(net, loss, size)

    return build


@pytest.fixture
def net():
    torch.manual_seed(0)
    return cnn().eval()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sizes_of_passes_change_rounding_only_and_sums_are_float64(engine, net, dtype):
    params, x = params_of(net, dtype), IMAGES.to(dtype)
    sums = [summed(engine(net, size), params, x, LABELS, 0.5) for size in (1, 4, 100)]
    for total in sums:
        assert total.dtype == torch.float64 and not total.requires_grad
        torch.testing.assert_close(total, sums[0], rtol=0, atol=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("order", [1, 2])
def test_sums_are_those_of_plain_autograd(engine, net, order):
    params = params_of(net)
    for clip_norm in (0.05, 1.0, math.inf):
        ours = summed(engine(net), params, IMAGES.double(), LABELS, clip_norm, order=order)[0]
        expected = reference.clipped_sum(net, params, IMAGES.double(), LABELS, clip_norm, order)
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("only", [("3.bias",), ("0.weight", "3.weight", "8.weight"), None])
@pytest.mark.parametrize("order", [2, 1])
def test_wanted_gradients_are_measured_clipped_and_summed(engine, net, only, order):
    """Each keeps its direction, and its norm or the clip norm; an L1 norm needs every number of a gradient."""
    params, x, each = {name: p + 0.1 for name, p in params_of(net).items()}, IMAGES.double(), torch.arange(7)
    sizes = [p.numel() for p in params.values()]
    everything = summed(engine(net), params, x, LABELS, math.inf, each, 7).split(sizes, dim=1)
    parts = zip(params, everything, strict=True)
    free = torch.cat([part for name, part in parts if only is None or name in only], dim=1)
    true = free.norm(order, dim=1)
    for clip_norm, clipped_records in ((0.9 * float(true.min()), 7), (float(true.median()), 3), (1e3, 0)):
        norms: list[torch.Tensor] = []
        clipped = summed(engine(net), params, x, LABELS, clip_norm, each, 7, norms, order, only)
        assert int((true > clip_norm).sum()) == clipped_records
        torch.testing.assert_close(torch.cat(norms), true, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(clipped, free * (clip_norm / true).clamp_max(1)[:, None], rtol=1e-6, atol=1e-9)
    nothing = summed(engine(net), params, x[:0], LABELS[:0], 1.0, only=only)
    assert torch.equal(nothing, torch.zeros(1, free.shape[1]).double())


def test_dropout_draws_for_each_record(engine):
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(40, 3))
    x, y = torch.ones(6, 40), torch.zeros(6, dtype=torch.long)
    rows = summed(engine(net), params_of(net, torch.float32), x, y, math.inf, torch.arange(6), 6)
    assert len({tuple(row.eq(0).tolist()) for row in rows}) == 6


def test_user_errors(net):
    loss = cross_entropy_of(net)
    args = (params_of(net, torch.float32), IMAGES, LABELS)
    for attempt, message in [
        (lambda: summed(FastClippedSum(net), *args, 0), "`clip_norm` must be positive, got 0"),
        (lambda: summed(VmapClippedSum(loss), *args, -1), "`clip_norm` must be positive, got -1"),
        (lambda: FastClippedSum(net, size=0), "`size` must be at least 1 record"),
        (
            lambda: clipped_sum_for(net, lambda *batch: loss(*batch).mean(), IMAGES, LABELS),
            "`sample_loss` must return one loss for each record",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            attempt()
    assert keep_freed_memory() in (True, False)


@pytest.mark.parametrize("kind", ["fast", "vmap"])
def test_a_copy_sums_its_own_net_and_leaves_the_first_alone(kind: str) -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4))
    first = FastClippedSum(net, size=5) if kind == "fast" else VmapClippedSum(cross_entropy_of(net), 5)
    twin = copy.deepcopy(net)
    second = first.copy_for(twin, cross_entropy_of(twin))
    params = {name: p.detach() for name, p in net.named_parameters()}
    x, y = torch.randn(7, 1, 8, 8), torch.randint(4, (7,))
    calls: list[int] = []
    net.register_forward_hook(lambda *_: calls.append(1))
    ours = summed(second, params, x, y, 1.0)
    assert second.size == 5 and not calls, "only the twin was run"
    assert torch.equal(ours, summed(first, params, x, y, 1.0)) and calls


class Autocast(nn.Module):
    def __init__(self, *body):
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x).float()


def test_a_net_under_autocast_is_run_in_its_dtypes_before_it_is_called_fast():
    body = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)
    for net, x in ((Autocast(*body), torch.randn(2, 1, 6, 6)), (Autocast(nn.Linear(4, 3)), torch.randn(2, 4))):
        y = torch.tensor([0, 1])
        chosen, reason = clipped_sum_for(net, None, x[:0], y[:0])
        params = {name: p.detach() for name, p in net.named_parameters()}
        assert reason.startswith(("vmap: ", "fast: ")) and chosen(params, x, y, ClipRequest(1.0))[1].isfinite().all()
