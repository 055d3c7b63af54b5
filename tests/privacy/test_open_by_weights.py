"""Code that the weights of a server turn on: no record feels another one, and gradients are right or refused.

The checks before a run see ordinary models. `first.weight` above 20 opens a branch.
"""

import math
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._device import DeviceContext

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, cross_entropy_of
from dpfl_lightning.privacy.clipping.watched import WatchedCalls

X, Y = torch.randn(41, 6, generator=torch.Generator().manual_seed(0)), torch.arange(41) % 3


class Ordinary(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head, self.scale = nn.Linear(6, 8), nn.Linear(8, 3), nn.Parameter(torch.ones(8))

    def changed(self, h, x):
        return h

    def forward(self, x):
        opened = self.first.weight.detach().abs().max() > 20
        h = torch.relu(self.first(x))
        return self.head((self.changed(h, x) if opened else h) * self.scale)


class DebugUnwrap(Ordinary):
    def changed(self, h, x):
        return h - torch.func.debug_unwrap(h, recurse=True).detach().reshape(-1, 8).mean(0)


def mixing(h):
    return h * (3.0 if torch._is_all_true(h.detach() < 500) else -3.0)


class Handled(Ordinary):
    def changed(self, h, x):
        return torch.overrides.handle_torch_function(mixing, (h,), h)


class NamedAdd:
    """Code with the name of a listed operator, as a method and as an object."""

    __name__ = "add"

    def add(self, h):
        return mixing(h)

    __call__ = add


class HandledMethod(Ordinary):
    def changed(self, h, x):
        return torch.overrides.handle_torch_function(NamedAdd().add, (h,), h)


class HandledObject(Ordinary):
    def changed(self, h, x):
        return torch.overrides.handle_torch_function(NamedAdd(), (h,), h)


wrapped = torch.overrides.wrap_torch_function(lambda h: (h,))(mixing)


class Wrapped(Ordinary):
    def changed(self, h, x):
        return wrapped(h)


@torch.jit.script
def scripted(h):
    return torch.where(torch._is_all_true(h.detach() < 500), h * 3.0, h * -3.0)


class Scripted(Ordinary):
    def changed(self, h, x):
        return scripted(h)


class Rolled(Ordinary):
    def changed(self, h, x):
        return h - h.mean().roll(1)


class RolledByName(Ordinary):
    def changed(self, h, x):
        return h - torch.roll(shifts=1, input=h.mean())


class Grown(Ordinary):
    def changed(self, h, x):
        return h + x[0].clone().resize_(14)[6:]


class Shrunk(Ordinary):
    def changed(self, h, x):
        return h * x[0].clone().resize_as_(torch.zeros(4)).sum()


class Strided(Ordinary):
    def changed(self, h, x):
        return h * x[0].clone().as_strided_((4,), (1,), 2).sum()


class FilledByName(Ordinary):
    def changed(self, h, x):
        place = 4 + 8 * (x[0, :1] > 1e3).long()  # beyond a table of its own: in that of another record
        return h * torch.index_fill(index=place, input=torch.ones(5), dim=0, value=-9.0).sum()


class MaskOfPlaces(Ordinary):
    """A mask with as many sequences as a pass may have records."""

    def changed(self, h, x):
        heads = h.view(1, 2, 4, 1)
        mask = torch.zeros(self.places, 1, 4, 4)
        mask[::2, :, :, 1:] = -math.inf
        return F.scaled_dot_product_attention(heads, heads, heads, mask)[:1].reshape(1, 8)


class DataSet(Ordinary):
    def changed(self, h, x):
        self.head.bias.data = x[0, :3].detach()
        return h


class OwnGenerator(Ordinary):
    def changed(self, h, x):
        return h * torch.rand(8, generator=torch.Generator().manual_seed(0)).sub(0.5)


ATEN = torch.ops.aten
GRAPH = torch.jit.script(mixing).graph


def large(x, count):
    return (x[0, :count].detach().abs() > 1e3).long()


class Place:
    """A place in a table, of code that asks all records."""

    def __init__(self, x):
        self.x = x

    def __index__(self):
        return int(bool(torch._is_all_true(self.x.detach() < 500)))


#: operators that no list names, and arguments with code
FURTHER = {
    "quantised": lambda h, x: torch.quantize_per_tensor_dynamic(h.detach(), torch.quint8, False).dequantize(),
    "statistics": lambda h, x: torch.batch_norm_update_stats(h, torch.zeros(8), torch.ones(8), 0.5)[0],
    "a list of one number": lambda h, x: torch.searchsorted(x.detach().mean(), torch.zeros(1)) - 20.5,
    "distances": lambda h, x: torch._euclidean_dist(x[None, None].repeat(1, 2, 1, 1), x[None].repeat(2, 1, 1)).max(),
    "an index with code": lambda h, x: torch.tensor([-1.0, 1.0])[Place(x)],
    "a slice with code": lambda h, x: torch.zeros(2)[Place(x) :].numel() - 1.5,
    "an array with code": lambda h, x: torch.zeros(2)[np.array([Place(x)], dtype=object)],
    "a graph": lambda h, x: torch._C._jit_interpret_graph(GRAPH, (h,)),
    "gradients of a table": lambda h, x: ATEN.embedding_dense_backward(
        torch.ones(2, 1) + 0 * h[0, :2, None].detach(), large(x, 2) * 4 + 3, 4, -1, False
    ).sum(),
    "gradients of pooling": lambda h, x: ATEN.max_pool2d_with_indices_backward(
        torch.ones(1, 1, 2, 2) + 0 * h[:, :4].detach().view(1, 1, 2, 2),
        h.repeat(1, 2).view(1, 1, 4, 4).detach(),
        *([2, 2], [2, 2], [0, 0], [1, 1], False),
        large(x, 4).view(1, 1, 2, 2) * 16,
    ).sum(),
    "segments": lambda h, x: torch.segment_reduce(
        x[0].detach().clone(), "sum", lengths=(x[0, :1].detach() * 0 + 30).long(), unsafe=True
    ),
    "a copy of memory": lambda h, x: ATEN._reshape_alias_copy(x[0].detach().clone(), [3, 6], [6, 1]).abs().max(),
    "a difference of ranks": lambda h, x: ATEN.mse_loss(x[0, :1].detach(), x[0, 0].detach()) - 0.5,
    "a loss of ranks": lambda h, x: ATEN.huber_loss(x[0, :1].detach(), x[0, 0].detach()),
    "a smooth loss of ranks": lambda h, x: torch._C._nn.smooth_l1_loss(x[0, :1].detach(), x[0, 0].detach()),
    "a norm over a pass": lambda h, x: F.layer_norm(h[0].detach(), (96, 8)),
    "its operator": lambda h, x: torch.native_layer_norm(h[0].detach(), (96, 8), None, None, 1e-5)[0],
    "products beyond memory": lambda h, x: (h[0].detach() * 0).addbmm_(
        x[0, :1].detach().expand(8).reshape(1, 8, 1), torch.ones(1, 1, 8)
    ),
    "a triangle of places": lambda h, x: torch.tril(torch.ones(40) + 0 * x[0, 0].detach(), -1),
    "a scale of places": lambda h, x: torch.logspace(x[0, 0].detach(), x[0, 1].detach(), 4),
    "too few norms": lambda h, x: torch._weight_norm(torch.ones(8, 1) + 0 * x[0, :1], x[0, :1].reshape(1, 1), 0),
    "too many norms": lambda h, x: torch._weight_norm(h[0].expand(8, 8) * 1.0, h[0].expand(8, 8) * 1.0, 0),
    "labels beyond the classes": lambda h, x: ATEN.ctc_loss.Tensor(
        torch.zeros(4, 1, 4).log_softmax(-1) + 0 * x[0, 0], torch.tensor([[9]]), torch.tensor([4]), torch.tensor([1])
    ),
    "a hook": lambda h, x: h.register_hook(lambda g: g * (1.0 if torch._is_all_true(g < 500) else -1.0)) and h,
    "its function": lambda h, x: h.grad_fn.register_hook(lambda given, made: given) and h,
}


def further(what):
    class Further(Ordinary):
        def changed(self, h, x):
            return (
                h * torch.sign(1e3 + FURTHER[what](h, x).sum())
                if what != "a slice with code"
                else h * FURTHER[what](h, x)
            )

    return Further


class Packed(Ordinary):
    """Hooks of saved tensors that are no class of that name in its code."""

    def changed(self, h, x):
        hooks = torch.autograd.graph.save_on_cpu()
        hooks.pack_hook = lambda t: t * (1.0 if torch._is_all_true(t.detach().abs() < 500) else -1.0)
        hooks.unpack_hook = lambda t: t
        with hooks:
            return (h * 0.3 + 1).square()


class Negated(Ordinary):
    def changed(self, h, x):
        with torch.no_grad():
            self.head.weight.mul_(-1.0)
        return h


class NegatedData(Ordinary):
    def changed(self, h, x):
        self.head.weight.data.mul_(-1.0)
        return h


class Tried(Ordinary):
    """An operator that fails for one record, and code that goes on and then reads a number."""

    def changed(self, h, x):
        try:
            torch.linalg.cholesky(torch.eye(2) * (1e3 - x[:, :1, None].abs()))
            sign = 1.0
        except RuntimeError:
            sign = -1.0
        return h * (sign if bool((h[0] > 0).any()) else 2 * sign)


class Store:
    last = 0.0


class HeldClass(Ordinary):
    """A class that is no layer keeps a number between records, which go by the loop."""

    def __init__(self):
        super().__init__()
        self.kind = Store

    def forward(self, x):
        if x.isnan().nonzero().numel():  # no rule of vmap
            x = x.nan_to_num()
        return super().forward(x)

    def changed(self, h, x):
        last, self.kind.last = self.kind.last, float(x[0, 0])
        return h * (-1.0 if last > 1e3 else 1.0)


class WithCode(torch.Tensor):
    """A tensor whose operators are a user's code, below the rules of `vmap`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        records = [one for one in args if type(one) is torch.Tensor and one.dim() > 1 and len(one) > 1]
        made = func(*(one.inner if type(one) is WithCode else one for one in args), **(kwargs or {}))
        return made * (1.0 if all((one.abs() < 500).all() for one in records) else -1.0)


class OfClassWithCode(Ordinary):
    def __init__(self):
        super().__init__()
        self.masks = [WithCode(torch.ones(8))]

    def changed(self, h, x):
        return h * self.masks[0]


class EqualsInt(type):
    def __eq__(cls, other):
        return other is int or cls is other

    def __hash__(cls):
        return hash(int)


class LikeAnInt(metaclass=EqualsInt):
    def __init__(self, x):
        self.x = x

    def __index__(self):
        if self.x is not None:  # it keeps no record
            self.asked, self.x = int(bool(torch._is_all_true(self.x.detach() < 500))), None
        return self.asked


class BehindAMetaclass(Ordinary):
    def changed(self, h, x):
        return h * torch.tensor([-1.0, 1.0])[LikeAnInt(x)]


class LikeATensor:
    __class__ = property(lambda self: torch.Tensor)

    def __index__(self):
        return 0


class BehindAClass(Ordinary):
    def changed(self, h, x):
        return h * torch.tensor([-1.0, 1.0])[LikeATensor()]


class Negating(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.mul:
            made = made * (1.0 if torch._is_all_true(args[0].detach() < 500) else -1.0)
        return made


def of_a_file(name):
    """`mixing`, as a file of this name has it."""
    return type(mixing)(mixing.__code__, {**mixing.__globals__, "__name__": name}, "add")


class FileNamedLikeTorch(Ordinary):
    def changed(self, h, x):
        return torch.overrides.handle_torch_function(of_a_file("torch_models"), (h,), h)


unwrapped = torch.overrides.wrap_torch_function(lambda h: (h,))(mixing)
del unwrapped.__wrapped__
unwrapped.__name__ = "add"


class Unwrapped(Ordinary):
    def changed(self, h, x):
        return unwrapped(h)


class OwnOperator(torch._ops.HigherOrderOperator):
    def __init__(self):
        super().__init__("add")

    def __call__(self, h):
        return mixing(h)


OWN_OPERATOR = OwnOperator()


class OfAnOwnOperator(Ordinary):
    def changed(self, h, x):
        return torch.overrides.handle_torch_function(OWN_OPERATOR, (h,), h)


class EqualsOverload(type):
    def __eq__(cls, other):
        return other is torch._ops.OpOverload or cls is other

    def __hash__(cls):
        return hash(torch._ops.OpOverload)


class LikeAnOverload(metaclass=EqualsOverload):
    __name__ = "add"

    def __call__(self, h):
        return mixing(h)


class OfAnOverload(Ordinary):
    def changed(self, h, x):
        return torch.overrides.handle_torch_function(LikeAnOverload(), (h,), h)


CPU = torch.device("cpu")


class Lowest(DeviceContext):
    """It goes below all other modes."""

    def __init__(self):
        self.device, self.prev_mode = CPU, None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return mixing(made) if func.__name__ == "mish" else made


class BelowTheWatch(Ordinary):
    def changed(self, h, x):
        with Lowest():
            return F.mish(h)


class MethodOfATensor(Ordinary):
    def changed(self, h, x):
        asked, other = [], h.detach() * 1
        other.size = lambda *_: (asked.append(mixing(h)), torch.Size([1, 8]))[1]
        F.mse_loss(h, other)
        return asked[0] if asked else h


class WithinADevice(Ordinary):
    """What torch itself puts below other modes."""

    def changed(self, h, x):
        with CPU:
            return h + torch.ones(8)


class CalledBoxed(Ordinary):
    def changed(self, h, x):
        asked = torch._C._dispatch_call_boxed(ATEN._is_all_true.default._handle, h.detach() < 500)
        return h * (1.0 if asked else -1.0)


class ChangedInputs(nn.Module):
    """In place on its inputs; the way of most records is an error for the first one."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        place = (x > 1e3).any(1).long()
        if self.first.weight.detach().abs().max() > 20:
            x.mul_(-3.0)
        if (place == 0).all():
            h = torch.relu(self.first(x))
            return self.head(h.gather(1, (8 * place)[:, None].expand(-1, 8)) + h)
        return self.head(torch.relu(self.second(x)))


def opened(net: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a net, with which its branch is open."""
    return {
        name: 60 * p.detach() if name == "first.weight" else p.detach().clone() for name, p in net.named_parameters()
    }


@pytest.mark.e2e
@pytest.mark.parametrize(
    "kind",
    [
        *(
            DebugUnwrap,
            Handled,
            HandledMethod,
            HandledObject,
            Wrapped,
            Scripted,
            Rolled,
            RolledByName,
            Grown,
            Shrunk,
            Strided,
            FilledByName,
        ),
        *(DataSet, OwnGenerator, Negated, NegatedData, Tried, ChangedInputs, Packed, HeldClass),
        *(OfClassWithCode, BehindAMetaclass, BehindAClass, CalledBoxed, FileNamedLikeTorch, Unwrapped, OfAnOwnOperator),
        *(OfAnOverload, BelowTheWatch, MethodOfATensor, WithinADevice),
        *(pytest.param(further(what), id=what) for what in FURTHER),
    ],
    ids=lambda kind: kind.__name__,
)
def test_a_record_moves_a_sum_by_at_most_its_norm(kind):
    """Or nothing is computed: the first record is another one than the others in each branch."""
    torch.manual_seed(0)
    net, x = kind(), torch.cat([torch.full((1, 6), 5000.0), X[1:]])
    clipped_sum, _ = clipped_sum_for(net, None, X[:0], Y[:0])
    params, request = opened(net), ClipRequest(1.0)
    before = {name: p.clone() for name, p in params.items()}
    try:
        moved = clipped_sum(params, x, Y, request)[0] - clipped_sum(params, x[1:], Y[1:], request)[0]
    except UserError as error:
        assert "`model` must" in str(error)
    else:
        assert moved.norm() <= 1 + 1e-6
        assert all(torch.equal(before[name], p) for name, p in params.items())


@pytest.mark.e2e
@pytest.mark.parametrize("what", FURTHER)
def test_what_no_list_names_is_refused_in_a_pass(what):
    torch.manual_seed(0)
    net = further(what)()
    clipped_sum, _ = clipped_sum_for(net, None, X[:0], Y[:0])
    said = r"not known to keep records apart|runs code of|takes the records|runs unseen|compares|takes a norm|needs num"
    with pytest.raises(UserError, match=said):
        clipped_sum(opened(net), X, Y, ClipRequest(1.0))


@pytest.mark.e2e
def test_a_mode_that_a_user_has_entered_sees_no_records_of_a_pass():
    class Multiplied(Ordinary):
        def changed(self, h, x):
            return torch.mul(h, 1.0)

    with Negating():
        torch.manual_seed(0)
        net, x = Multiplied(), torch.cat([torch.full((1, 6), 5000.0), X[1:]])
        clipped_sum, reason = clipped_sum_for(net, None, X[:0], Y[:0])
        params, request = opened(net), ClipRequest(1.0)
        moved = clipped_sum(params, x, Y, request)[0] - clipped_sum(params, x[1:], Y[1:], request)[0]
    assert reason.startswith("loop") and moved.norm() <= 1 + 1e-6


@pytest.mark.e2e
@pytest.mark.parametrize("way", ["whole", "a function of it"])
def test_compiled_models_have_the_gradients_of_the_plain_ones(way):
    torch.manual_seed(0)
    net = Ordinary()
    plain = LoopClippedSum(net, cross_entropy_of(net))
    params = {name: p.detach() for name, p in net.named_parameters()}
    theirs = plain(params, X, Y, ClipRequest(1.0))[0]
    if way == "whole":
        net.forward = torch.compile(net.forward, backend="eager")
    else:
        changed = torch.compile(lambda h: h * 1.0, backend="eager")
        net.changed = lambda h, x: changed(h)
    ours = clipped_sum_for(net, None, X[:0], Y[:0])[0](params, X, Y, ClipRequest(1.0))[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.e2e
def test_the_compiler_sees_no_record():
    """It would compile anew for some numbers of records, until it gives up."""
    seen = []

    def backend(graph, examples):
        seen.append(examples)
        return graph.forward

    compiled = torch.compile(lambda h, number: h * number, backend=backend, dynamic=False)

    class Reading(Ordinary):
        def forward(self, x):
            x = x.nan_to_num() if x.isnan().nonzero().numel() else x  # no rule of vmap
            h = torch.relu(self.first(x))
            is_open = self.first.weight.detach().abs().max() > 20
            return self.head((compiled(h, float(x[0, 0])) if is_open else h) * self.scale)

    compiled(torch.ones(1, 8, requires_grad=True), 0.5)
    net = Reading()
    clipped_sum, reason = clipped_sum_for(net, None, X[:0], Y[:0])
    seen.clear()  # of the checks, by public records
    clipped_sum(opened(net), X, Y, ClipRequest(1.0))
    assert reason.startswith("loop") and not seen
    torch.compile(lambda h: h * 2, backend=backend)(torch.ones(2))
    assert seen, "elsewhere it is compiled"


class Quantised(Ordinary):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8))
        self.register_buffer("planned", torch.ones(8, device="meta"))

    def forward(self, x):
        return self.head(torch.relu(self.first(x)) * self.table.dequantize())


def test_a_model_may_keep_quantised_numbers_and_tensors_without_numbers():
    net = Quantised()
    params = {name: p.detach() for name, p in net.named_parameters()}
    sums = clipped_sum_for(net, None, X[:0], Y[:0])[0](params, X, Y, ClipRequest(1.0))[0]
    expected = LoopClippedSum(net, cross_entropy_of(net))(params, X, Y, ClipRequest(1.0))[0]
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5)


@torch.jit.script
def doubled(x):
    return 2 * x


IN_A_LIST = [doubled]


class Compiled(Ordinary):
    def changed(self, h, x):
        return IN_A_LIST[0](h)


def test_compiled_code_is_refused_in_a_pass_of_this_thread_alone():
    net, found = Compiled(), []
    clipped_sum, _ = clipped_sum_for(net, None, X[:0], Y[:0])
    with pytest.raises(UserError, match=r"code of torch\.jit runs unseen"):
        clipped_sum(opened(net), X, Y, ClipRequest(1.0))
    with WatchedCalls(under_vmap=True):
        other = threading.Thread(target=lambda: found.append(doubled(torch.ones(2)).tolist()))
        other.start()
        other.join()
    assert found == [[2.0, 2.0]] and doubled(torch.ones(1)).tolist() == [2.0]


def test_a_compiled_layer_is_one_clear_error():
    net = nn.Sequential(nn.Linear(6, 4), torch.jit.script(nn.ReLU()), nn.Linear(4, 3))
    with pytest.raises(UserError, match=r"`model` must have no compiled module, got '1'\. Give the module before"):
        clipped_sum_for(net, None, X[:0], Y[:0])


@pytest.mark.parametrize("places", [16, 32, 40, 64])
def test_a_mask_of_many_sequences_is_no_mask_of_places(places, monkeypatch):
    monkeypatch.setattr(MaskOfPlaces, "places", places, raising=False)
    test_a_record_moves_a_sum_by_at_most_its_norm(MaskOfPlaces)


class SameTwice(Ordinary):
    def changed(self, h, x):
        return F.layer_norm(h, (8,), self.scale, self.scale)


class SameTwiceInGroups(Ordinary):
    def changed(self, h, x):
        return F.group_norm(h, 2, self.scale, self.scale)


class ChangedTwice(Ordinary):
    """In place on its inputs, with a gradient of a gradient, which takes a second pass."""

    def changed(self, h, x):
        h = h + x.mul_(2.0).repeat(1, 2)[:, :8]
        (g,) = torch.autograd.grad(torch.tanh(h * self.scale).square().sum(), h, create_graph=True)
        return h + g


@pytest.mark.parametrize("kind", [SameTwice, SameTwiceInGroups, ChangedTwice], ids=lambda kind: kind.__name__)
def test_gradients_are_those_of_the_loop_or_refused(kind):
    torch.manual_seed(0)
    net = kind().double()
    clipped_sum, _ = clipped_sum_for(net, None, X[:0].double(), Y[:0])
    params, each = opened(net), ClipRequest(math.inf, 2, torch.arange(len(Y)), len(Y))
    try:
        found = clipped_sum(params, X.double(), Y, each)[0]
    except UserError as error:
        assert "`model` must run" in str(error)
        return
    expected = LoopClippedSum(net, cross_entropy_of(net))(params, X.double(), Y, each)[0]
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-12)


class Turning(nn.Module):
    """A function with other code at the end of a loop over numbers, of which each record has `width`."""

    def __init__(self, width):
        super().__init__()
        self.first, self.head, self.width = nn.Linear(6, 32), nn.Linear(32, 3), width

    def forward(self, x):
        h = torch.relu(self.first(x))
        if self.first.weight.detach().abs().max() > 20:
            h = torch.cat([h[:, : self.width].add(0.1).pow(1.7), h[:, self.width :]], dim=1)
        return self.head(h)


@pytest.mark.e2e
@pytest.mark.parametrize("width", [5, 7])
@pytest.mark.parametrize("expected", [2.0, 6.0])
def test_no_record_is_at_the_end_of_a_loop_that_weights_turn_on(width, expected):
    """Before, passes have fewer records: only other operators take wide ones."""
    torch.manual_seed(0)
    net = Turning(width)
    clipped_sum, _ = clipped_sum_for(net, None, X[:0], Y[:0])
    assert clipped_sum.choose(expected).size < 32
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        params = {name: torch.randn(p.shape, generator=draw) for name, p in net.named_parameters()}
        params["first.weight"][:, 1:] *= 0.3
        params["first.weight"][0, 0] = 21.0
        each = [ClipRequest(math.inf, 2, torch.arange(count), count, expected=expected) for count in (41, 40)]
        whole, rest = clipped_sum(params, X, Y, each[0])[0], clipped_sum(params, X[1:], Y[1:], each[1])[0]
        assert torch.equal(whole[1:], rest)


class Multiplied(nn.Module):
    """The derivative of a product asks whether any number of the batch is zero, and then takes another formula."""

    def __init__(self, product):
        super().__init__()
        self.first, self.last, self.product = nn.Linear(4, 3), nn.Linear(3, 2), product

    def forward(self, x):
        return self.last(self.product(self.first(x)))


@pytest.mark.parametrize("product", [lambda x: x.prod(1), lambda x: x.cumprod(1)[:, -1]])
def test_what_a_derivative_reads_in_a_batch_is_no_influence(product):
    net = Multiplied(product)
    clipped_sum, _ = clipped_sum_for(net, None, torch.empty(0, 3, 4), torch.empty(0).long())
    params = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    params["first.bias"] = torch.zeros(3)
    x, y = torch.randn(9, 3, 4), torch.zeros(9).long()
    each, zeros = ClipRequest(1.0, group=torch.arange(9), num_groups=9), torch.cat([x[:8], torch.zeros(1, 3, 4)])
    assert torch.equal(*(clipped_sum(params, some, y, each)[0][:8] for some in (x, zeros)))


class Attending(nn.Module):
    """Attention drops numbers in training, which the passes whose sizes are checked do not."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.encoder(x[:, None].repeat(1, 4, 1)).mean(1))


@pytest.mark.e2e
def test_a_model_with_dropout_in_its_attention_runs_under_vmap():
    net = Attending()
    clipped_sum, reason = clipped_sum_for(net, None, X[:0], Y[:0])
    params = {name: p.detach() for name, p in net.named_parameters()}
    assert reason.startswith("vmap: ") and clipped_sum(params, X, Y, ClipRequest(1.0))[0].isfinite().all()
