"""Dense convolutions against torch's in float64, record by record, and what they leave to torch."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dpfl_lightning.kernels import dense_conv
from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.gradient_sums import ChunkGradients, Totals
from dpfl_lightning.privacy.clipping.layer_rules import Dense
from dpfl_lightning.privacy.clipping.reference import ClipRequest, VmapClippedSum, cross_entropy_of

ONE = (1, 1)
FENCE = 64  # numbers beside each array of the compiled loops
FORMATS = [torch.channels_last, torch.contiguous_format]
LOOPS = (dense_conv._block_loops, dense_conv._weight_loops)
BAD = [float("nan"), float("inf"), 1e38]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def fenced(loops, calls):
    """The same loops, on copies between numbers that are NaN, which they may neither change nor read."""

    def run(*args):
        calls.append(1)
        arrays = [a for a in args if isinstance(a, np.ndarray) and a.dtype == np.float32]
        wide = [np.full(len(a) + 2 * FENCE, np.nan, np.float32) for a in arrays]
        for a, buffer in zip(arrays, wide, strict=True):
            buffer[FENCE:-FENCE] = a
        inside = iter([buffer[FENCE:-FENCE] for buffer in wide])
        loops(*(next(inside) if any(a is b for b in arrays) else a for a in args))
        for a, buffer in zip(arrays, wide, strict=True):
            assert np.isnan(buffer[:FENCE]).all() and np.isnan(buffer[-FENCE:]).all(), "written outside of an array"
            a[:] = buffer[FENCE:-FENCE]

    return run


@pytest.fixture(scope="module")
def by_loops():
    """All shapes that the loops can compute are computed by them, between fences; returns the list of their calls."""
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        blocks, weights = LOOPS
        patch.setattr(dense_conv, "FEWEST_PRODUCTS", 0)
        patch.setattr(dense_conv, "_block_loops", lambda size: (fenced(blocks(size)[0], calls), blocks(size)[1]))
        patch.setattr(dense_conv, "_weight_loops", lambda size: fenced(weights(size), calls))
        yield calls


def assert_close(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    assert float((actual.double() - expected).abs().max()) <= 1e-5 * float(expected.abs().max()) + 1e-6


def true_gradients(x, weight, dy, form):
    """In float64, one record after the other: of the input and of the weight."""
    both = [
        torch.ops.aten.convolution_backward(
            one_dy[None].double(), one_x[None].double(), weight.double(), None, *form, False, [0, 0], 1,
            [True, True, False],
        )
        for one_x, one_dy in zip(x, dy, strict=True)
    ]  # fmt: skip
    return torch.cat([dx for dx, _, _ in both]), torch.stack([dw for _, dw, _ in both])


def strided(x, way):
    """The same numbers, in another place in memory."""
    if way == "sliced":
        wide = torch.full((len(x) + 2, x.shape[1], x.shape[2] + 1, x.shape[3] + 3), float("nan"))
        part = wide[1:-1, :, 1:, 2:-1]
        return part.copy_(x)
    if way == "every second":
        wide = torch.full((len(x), 2 * x.shape[1], *x.shape[2:]), float("nan"))
        return wide[:, ::2].copy_(x)
    return x.contiguous(memory_format=way)


@given(
    size=st.sampled_from([3, 5]),
    records=st.integers(1, 4),
    channels=st.sampled_from([8, 16, 24, 40]),
    outputs=st.sampled_from([8, 16, 24, 40]),
    height=st.integers(4, 11),
    width=st.integers(4, 20),
    padding=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    bias=st.booleans(),
    way=st.sampled_from([*FORMATS, "sliced", "every second"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_blocks_are_torchs(by_loops, size, records, channels, outputs, height, width, padding, bias, way, seed):
    torch.manual_seed(seed)
    x = strided(torch.randn(records, channels, height, width), way)
    weight, shift = strided(torch.randn(outputs, channels, size, size), way), torch.randn(outputs) if bias else None
    form = (ONE, padding, ONE)
    if min(height + 2 * padding[0], width + 2 * padding[1]) < size:
        with pytest.raises(RuntimeError, match="Kernel size"):
            dense_conv.conv2d(x, weight, shift, *form, 1)
        return
    by_loops.clear()
    y = dense_conv.conv2d(x, weight, shift, *form, 1)
    assert_close(y, F.conv2d(x.double(), weight.double(), shift if shift is None else shift.double(), *form))
    assert by_loops and (y.stride(1) == 1 or x.stride(1) != 1)
    dy = strided(torch.randn_like(y), way)
    dx, dw = true_gradients(x, weight, dy, form)
    assert_close(dense_conv.weight_gradients(x, weight, dy, *form, 1).permute(0, 1, 4, 2, 3), dw)
    assert_close(dense_conv.input_gradient(x, weight, dy, *form, 1), dx)
    assert len(by_loops) == 2 + (max(padding) < size and min(dy.shape[2:]) >= dense_conv.SMALLEST_MAP)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("channels, size", [(24, 3), (24, 5)])
@pytest.mark.parametrize("way", FORMATS, ids=str)
def test_a_record_has_the_same_bits_alone_and_in_any_company(by_loops, channels, size, way, bad):
    """15 and 35 blocks of a record: the loops compute 12 at a time, of several records."""
    x = torch.randn(6, channels, 6, 10).contiguous(memory_format=way)
    weight, bias, form = torch.randn(16, channels, size, size), torch.randn(16), (ONE, ONE, ONE, 1)
    dy = torch.randn_like(dense_conv.conv2d(x, weight, bias, *form)).contiguous(memory_format=way)

    def results(x, dy):
        return (
            dense_conv.conv2d(x, weight, bias, *form),
            dense_conv.weight_gradients(x, weight, dy, *form),
            dense_conv.input_gradient(x, weight, dy, *form),
        )

    whole = results(x, dy)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    bad_x, bad_dy = x.clone(), dy.clone()
    bad_x[[0, 3]], bad_dy[[0, 3]] = bad, bad
    for rows, some in (
        *((torch.tensor([row]), results(x[row : row + 1], dy[row : row + 1])) for row in range(6)),
        (order, results(x[order], dy[order])),
    ):
        assert all(torch.equal(part, one[rows]) for part, one in zip(some, whole, strict=True))
    for part, one in zip(results(bad_x, bad_dy), whole, strict=True):
        good = torch.tensor([1, 2, 4, 5])
        assert torch.equal(part[good], one[good]) and not torch.equal(part[0], one[0])


def test_what_the_loops_cannot_compute_is_left_to_torch(by_loops):
    x, weight, bias = torch.randn(2, 16, 8, 8), torch.randn(16, 16, 3, 3), torch.randn(16)
    wide = torch.randn(16, 8, 3, 3)
    others = {
        "an empty batch": (x[:0], weight, bias),
        "float64": (x.double(), weight.double(), bias.double()),
        "bfloat16": (x.bfloat16(), weight.bfloat16(), bias.bfloat16()),
        "a small map": (x[:, :, :3], weight, bias),
        "an odd number of channels": (x[:, :15], weight[:, :15], None),
        "strides": (x, weight, bias, (2, 1)),
        "dilation": (x, weight, bias, ONE, ONE, (1, 2)),
        "groups": (x, wide, bias, ONE, ONE, ONE, 2),
        "a kernel of 3 x 5": (x, torch.randn(16, 16, 3, 5), None),
        "one record without a batch": (x[0], weight, bias),
    }
    by_loops.clear()
    for why, (images, kernel, shift, *form) in others.items():
        form = (*form, *(ONE, ONE, ONE, 1)[len(form) :])
        y, expected = (f(images, kernel, shift, *form) for f in (dense_conv.conv2d, F.conv2d))
        assert torch.equal(y, expected), why
        if images.dim() == 4:
            assert dense_conv.weight_gradients(images, kernel, y, *form) is None, why
            dx = torch.nn.grad.conv2d_input(images.shape, kernel, y, *form)
            torch.testing.assert_close(dense_conv.input_gradient(images, kernel, y, *form), dx)
    torch.set_num_threads(2)
    torch.testing.assert_close(dense_conv.conv2d(x, weight, bias, ONE, ONE, ONE, 1), F.conv2d(x, weight, bias, 1, 1))
    torch.set_num_threads(1)
    assert not by_loops
    with torch.autocast("cpu", torch.bfloat16):
        assert dense_conv.conv2d(x, weight, bias, ONE, ONE, ONE, 1).dtype == torch.bfloat16


def test_what_torch_refuses_is_refused(by_loops):
    """The loops check nothing: they would write outside of their arrays."""
    x, weight, bias = torch.randn(2, 16, 8, 8), torch.randn(16, 16, 3, 3), torch.randn(16)
    for images, kernel, shift, *form in (
        (x, weight, bias, ONE, (-1, 0)),
        (x, weight, bias[:8], ONE, ONE),
        (x, weight, bias.double(), ONE, ONE),
        (x[:, :8], weight, bias, ONE, ONE),
        (x[:, :, :4], torch.randn(16, 16, 5, 5), None, ONE, (0, 0)),
    ):
        with pytest.raises(RuntimeError):
            dense_conv.conv2d(images, kernel, shift, *form, ONE, 1)
    for rows in (7, 9):  # of a forward pass that a user replaced
        assert dense_conv.weight_gradients(x, weight, torch.randn(2, 16, rows, 8), ONE, ONE, ONE, 1) is None
    assert dense_conv.weight_gradients(x, weight, torch.randn(2, 16, 8, 8).half(), ONE, ONE, ONE, 1) is None


def test_weights_and_inputs_may_lie_anywhere(by_loops):
    x, weight, bias = torch.randn(2, 16, 8, 8), torch.randn(16, 16, 3, 3), torch.randn(16, 2)[:, 0]
    y = F.conv2d(x.double(), weight.double(), bias.double(), 1, 1)
    ways = (
        weight.contiguous(memory_format=torch.channels_last),
        weight.transpose(2, 3).contiguous().transpose(2, 3),
        weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        nn.Parameter(weight),
    )
    for other in ways:
        result = dense_conv.conv2d(x, other, bias, ONE, ONE, ONE, 1)
        assert_close(result, y)
        assert not result.requires_grad
        dx = dense_conv.input_gradient(x, other.detach(), y.float(), ONE, ONE, ONE, 1)
        torch.testing.assert_close(dx, torch.nn.grad.conv2d_input(x.shape, weight, y.float(), 1, 1), atol=1e-3, rtol=0)
    negative = torch._neg_view(x)  # as the imaginary part of a conjugate
    assert_close(
        dense_conv.conv2d(negative, weight, None, ONE, ONE, ONE, 1),
        F.conv2d(-x.double(), weight.double(), None, 1, 1),
    )
    one = torch.randn(2, 1, 1, 1).expand(2, 16, 8, 8)
    assert_close(
        dense_conv.conv2d(one, weight, None, ONE, ONE, ONE, 1), F.conv2d(one.double(), weight.double(), None, 1, 1)
    )


def test_loops_that_go_wrong_are_refused(monkeypatch):
    from dpfl_lightning.kernels import dense_loops

    def nothing(*args):
        for a in args:
            if isinstance(a, np.ndarray) and a.dtype == np.float32:
                a.fill(0.0)

    monkeypatch.setattr(dense_loops, "forward_loops", lambda *matrices: nothing)
    monkeypatch.setattr(dense_loops, "weight_loops", lambda *matrices: nothing)
    for make, size in zip(LOOPS, (3, 5), strict=True):
        with pytest.raises(RuntimeError, match="wrong numbers on this processor"):
            make.__wrapped__(size)


def body(channels, size):
    conv = {"kernel_size": size, "padding": size // 2}
    return nn.Sequential(
        *(nn.Conv2d(3, channels, **conv), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(channels, channels, **conv), nn.GroupNorm(2, channels), nn.ReLU()),
        *(nn.Conv2d(channels, 2 * channels, **conv), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(18 * channels, 4)),
    )


def batch(net, records=5):
    params = {name: p.detach() for name, p in net.named_parameters()}
    return params, torch.randn(records, 3, 12, 12), torch.arange(records) % 4


@pytest.mark.parametrize(
    "groups, only", [(1, None), (3, None), (1, ["3.weight"]), (3, ["3.weight"]), (3, ["10.weight"])]
)
def test_a_kept_vector_has_the_bits_of_a_new_one(groups, only):
    net = body(16, 3)
    params, x, y = batch(net)
    group = torch.arange(5) % groups if groups > 1 else None
    for clipped_sum in (FastClippedSum(net, size=2), VmapClippedSum(cross_entropy_of(net))):
        new, norms = clipped_sum(params, x, y, ClipRequest(0.5, 2, group, groups, only))
        into = torch.full_like(new, float("nan"))
        for _ in range(2):
            kept, other_norms = clipped_sum(params, x, y, ClipRequest(0.5, 2, group, groups, only, into))
            assert kept.data_ptr() == into.data_ptr() and torch.equal(kept, new) and torch.equal(norms, other_norms)
        nothing, _ = clipped_sum(
            params, x[:0], y[:0], ClipRequest(0.5, 2, group if group is None else group[:0], groups, only, into)
        )
        assert torch.equal(nothing, torch.zeros_like(new))


@pytest.mark.e2e
@pytest.mark.parametrize("channels, size", [(16, 3), (40, 3), (24, 5)])
@pytest.mark.parametrize("pool", [nn.AvgPool2d, nn.MaxPool2d])
def test_clipped_sums_are_the_references(by_loops, channels, size, pool):
    """With max-pooling, the net has channels last in memory."""
    conv = {"kernel_size": size, "padding": size // 2}
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, **conv), nn.InstanceNorm2d(16), nn.ReLU(), nn.Conv2d(16, channels, **conv), pool(2)),
        *(nn.Tanh(), nn.Conv2d(channels, 16, size, padding=(1, 3)), nn.Flatten(), nn.LazyLinear(4)),
    )
    net(torch.zeros(1, 3, 13, 10))
    params, _, y = batch(net)
    x, each = torch.randn(5, 3, 13, 10), torch.arange(5)
    by_loops.clear()
    rows, norms = FastClippedSum(net, size=3)(params, x, y, ClipRequest(0.1, 2, each, 5))
    # in each of two chunks 2 forward passes, 2 gradients of inputs, 1 or 2 of weights (none is formed on a small map)
    assert len(by_loops) == 2 * (5 + (size == 5))
    wide = {name: p.double() for name, p in params.items()}
    expected, true_norms = VmapClippedSum(cross_entropy_of(net))(wide, x.double(), y, ClipRequest(0.1, 2, each, 5))
    assert ((rows - expected).norm(dim=1) <= 1e-5 * expected.norm(dim=1)).all() and (rows.norm(dim=1) <= 0.1).all()
    torch.testing.assert_close(norms, true_norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # float32 is summed by compiled loops
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("beside", [True, False])
def test_gradients_of_one_parameter_are_summed_in_any_orders(dtype, groups, beside):
    grads = torch.randn(6, 4, 3, 2, 5).to(dtype)  # [B, O, C, height, width]
    params = {"w": grads[0], "b": torch.zeros(7)} if beside else {"w": grads[0]}
    group, factors = torch.arange(6) % groups, torch.rand(6).double()
    expected = torch.zeros(groups, sum(p.numel() for p in params.values())).double()
    orders = [(0, 1, 4, 2, 3), (0, 4, 3, 1, 2), ()]  # of [B, O, height, width, C], [B, height, width, C, O]
    forms = [grads.permute(0, 1, 3, 4, 2), grads.permute(0, 3, 4, 2, 1), grads]
    for first in range(3):
        totals = Totals(params, torch.zeros_like(expected))
        for i in range(4):
            form = Dense(forms[(first + i) % 3].contiguous(), orders[(first + i) % 3])
            totals.add(ChunkGradients({"w": form}, 2), factors, group)
        once = torch.zeros(groups, grads[0].numel()).double()
        once.index_add_(0, group, factors[:, None] * grads.flatten(1).double())
        expected[:, : once.shape[1]] = 4 * once
        torch.testing.assert_close(totals.result(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.e2e
def test_no_index_leaves_its_array(tmp_path):
    """Compiled with checks of bounds, which cover all but the innermost loops; the tests above put fences there."""
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    test = f"{__file__}::test_blocks_are_torchs"
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-n0", test], env=environment, check=True)
