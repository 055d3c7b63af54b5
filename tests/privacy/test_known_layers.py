"""Every layer whose code is known keeps records apart: its values and derivatives for one do not follow the others."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.autograd import profiler_legacy

from dpfl_lightning.privacy.clipping.structure import _CONTAINERS, LAYERS, beside_records, code_of_users
from dpfl_lightning.privacy.clipping.trial_records import own_parameters

ELEMENTWISE = """
    CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU ReLU ReLU6 RReLU SELU SiLU
    Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Dropout AlphaDropout FeatureAlphaDropout Identity Flatten
"""
#: records of one to three dimensions with channels, on which layers of names with 1d, 2d and 3d work
SHAPES = {"1d": (4, 8), "2d": (4, 8, 8), "3d": (4, 4, 4, 4)}
ARGUMENTS = {
    "Conv": (4, 3, 3),
    "ConvTranspose": (4, 3, 3),
    "InstanceNorm": (4,),
    "BatchNorm": (4,),
    "Dropout": (),
    "MaxPool": (2,),
    "AvgPool": (2,),
    "LPPool": (2, 2),
    "AdaptiveMaxPool": (2,),
    "AdaptiveAvgPool": (2,),
    "ConstantPad": (1, 0.5),
    "ZeroPad": (1,),
    "ReflectionPad": (1,),
    "ReplicationPad": (1,),
    "CircularPad": (1,),
}
CASES: dict = {name: (getattr(nn, name)(), (6,)) for name in ELEMENTWISE.split()}
CASES |= {
    f"{kind}{dims}": (getattr(nn, f"{kind}{dims}")(*given), shape)
    for kind, given in ARGUMENTS.items()
    for dims, shape in SHAPES.items()
}
CASES |= {
    "Unflatten": (nn.Unflatten(1, (2, 3)), (6,)),
    "Linear": (nn.Linear(6, 3), (2, 6)),
    "Embedding": (nn.Embedding(5, 3), None),
    "LayerNorm": (nn.LayerNorm(6), (2, 6)),
    "RMSNorm": (nn.RMSNorm(6), (2, 6)),
    "GroupNorm": (nn.GroupNorm(2, 4), (4, 5)),
    "LocalResponseNorm": (nn.LocalResponseNorm(3), (4, 8)),
    "GLU": (nn.GLU(1), (6,)),
    "LogSoftmax": (nn.LogSoftmax(1), (6,)),
    "Softmax": (nn.Softmax(1), (6,)),
    "Softmin": (nn.Softmin(1), (6,)),
    "Softmax2d": (nn.Softmax2d(), (4, 8, 8)),
    "Threshold": (nn.Threshold(0.1, 0.2), (6,)),
    "Upsample": (nn.Upsample(scale_factor=2), (4, 8)),
    "UpsamplingNearest2d": (nn.UpsamplingNearest2d(scale_factor=2), (4, 8, 8)),
    "UpsamplingBilinear2d": (nn.UpsamplingBilinear2d(scale_factor=2), (4, 8, 8)),
    "PixelShuffle": (nn.PixelShuffle(2), (4, 8, 8)),
    "PixelUnshuffle": (nn.PixelUnshuffle(2), (4, 8, 8)),
    "ChannelShuffle": (nn.ChannelShuffle(2), (4, 8, 8)),
    "Fold": (nn.Fold((4, 4), 2), (8, 9)),
    "Unfold": (nn.Unfold(2), (4, 8, 8)),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (5, 4)),
    "TransformerEncoder": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False),
        (5, 4),
    ),
}


class Called(nn.Module):
    """A layer that gets or returns more than one tensor."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x):
        return self.call(self.layer, x)


OF_STATES = {kind.__name__: kind(4, 3, batch_first=True) for kind in (nn.RNN, nn.GRU, nn.LSTM)}
CASES |= {name: (Called(layer, lambda layer, x: layer(x)[0]), (5, 4)) for name, layer in OF_STATES.items()}
CASES["Bilinear"] = Called(nn.Bilinear(6, 6, 3), lambda layer, x: layer(x, x.tanh())), (6,)
CASES["MultiheadAttention"] = (
    Called(nn.MultiheadAttention(4, 2, batch_first=True), lambda layer, x: layer(x, x, x)[0]),
    (5, 4),
)
for _layer, _ in CASES.values():
    _layer.eval()  # random numbers are those of places, and statistics of batches are no part of a private model
READING = {"item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}


def records(shape, count=8):
    generator = torch.Generator().manual_seed(0)
    if shape is None:
        return torch.randint(5, (count, 4), generator=generator)
    return torch.randn(count, *shape, generator=generator)


def passed(layer, x):
    """Return outputs, gradients of records that are no whole numbers, and what operators read."""
    leaf = x.clone().requires_grad_() if x.is_floating_point() else x

    def watched():
        with profiler_legacy.profile() as seen:
            outputs = layer(leaf)
            outputs.tanh().sum().backward()
        return outputs.detach(), {one.name.removeprefix("aten::") for one in seen.function_events} & READING

    with warnings.catch_warnings(), ThreadPoolExecutor(1) as thread:
        warnings.simplefilter("ignore")
        outputs, read = thread.submit(watched).result()
    return outputs, leaf.grad if leaf.is_floating_point() else outputs, read


def test_there_is_a_case_for_every_layer():
    tried = {type(one.layer if isinstance(one, Called) else one) for one, _ in CASES.values()}
    assert tried == LAYERS - _CONTAINERS


@pytest.mark.parametrize("name", CASES)
def test_a_known_layer_keeps_records_apart(name):
    layer, shape = CASES[name]
    x = records(shape)
    others = x.clone()
    others[1::2] = (
        4 if shape is None else torch.tensor([float("nan"), float("inf"), 1e30, 0.0]).view(-1, *[1] * len(shape))
    )
    first, second = passed(layer, x), passed(layer, others)
    assert not first[2] | second[2] or name == "RReLU", "an operator reads numbers, and not only of a layer's limits"
    for ours, theirs in zip(first[:2], second[:2], strict=True):
        assert torch.equal(ours[::2], theirs[::2])


@pytest.mark.parametrize("name", CASES)
def test_shapes_show_that_a_known_layer_has_the_records_first(name):
    layer, shape = CASES[name]
    known = layer.layer if isinstance(layer, Called) else layer
    examples, params = (records(shape), torch.zeros(8)), own_parameters(layer)
    loss = lambda params, x, y: layer(x).flatten(1).sum(1)  # noqa: E731
    assert not code_of_users(known, None) and not beside_records(layer, loss, params, examples)
