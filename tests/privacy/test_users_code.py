"""Code of a user sees one record at a time and keeps nothing of it, whatever the weights are: a server chooses them."""

import functools
import math
import os
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpfl_lightning.build import ENGINES
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.batch_losses import check_batch_losses
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.models.nets import BasicBlock
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for, vmap_or_loop
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, cross_entropy_of
from dpfl_lightning.privacy.clipping.state import Kept
from dpfl_lightning.privacy.clipping.structure import code_of_users

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
LARGEST, GATE = 60.0, 21.5  # what a hostile server sends


class Ordinary(nn.Module):
    """`changed` gets the hidden numbers `[B, 8]`, if the server's weights are large."""

    def __init__(self):
        super().__init__()
        self.first, self.head, self.gate = nn.Linear(6, 8), nn.Linear(8, 3), nn.Parameter(torch.zeros(()))

    @property
    def attacked(self):
        return self.first.weight.detach().abs().max() > 20

    def changed(self, hidden):
        return hidden

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.head(self.changed(hidden) if self.attacked else hidden) + 0 * self.gate


class Branch(Ordinary):
    def changed(self, hidden):
        return hidden - hidden.mean(0)


class Where(Ordinary):
    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.head(torch.where(self.attacked, hidden - hidden.mean(0), hidden)) + 0 * self.gate


class Gate(Ordinary):
    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.head(hidden - torch.relu(self.gate - 20).clamp(max=1) * hidden.mean(0))


class Mixing(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x - x.mean(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy):
        return dy - dy.mean(0)


class OwnRuleForVmap(Mixing):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def vmap(info, in_dims, x):
        return Mixing.apply(x), 0


class ByFunction(Ordinary):
    def changed(self, hidden):
        return OwnRuleForVmap.apply(hidden)


def unwrapped(x):
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


@pytest.fixture
def operator_with_a_rule():
    """An operator of a library; while it is there, code of users goes by the loop."""
    library = torch.library.Library("users_code", "DEF")
    library.define("mix(Tensor x) -> Tensor")
    library.impl("mix", torch.clone, "CompositeExplicitAutograd")
    library.impl("mix", lambda x: x - unwrapped(x).mean(0), "FuncTorchBatched")
    yield torch.ops.users_code.mix
    library._destroy()


class ByUnwrapping(Ordinary):
    def changed(self, hidden):
        return hidden - unwrapped(hidden).mean(0)


class Listing(Ordinary):
    def changed(self, hidden):
        return hidden - torch.tensor(hidden.detach().mean(0).tolist())


MIXING = [Branch, Where, Gate, ByUnwrapping, Listing]


def attacked_sums(net):
    """The clipped sums of all records, and of all but the first, with the server's weights."""
    clipped_sum, _ = clipped_sum_for(net, None, X[:0], Y[:0])
    factors = {"first.weight": LARGEST}
    params = {name: factors.get(name, 1.0) * p.detach() + GATE * (name == "gate") for name, p in net.named_parameters()}
    x = torch.cat([50 * X[:1], X[1:]])
    return (clipped_sum(params, x[rows:], Y[rows:], ClipRequest(1.0))[0] for rows in (0, 1))


@pytest.mark.parametrize("kind", MIXING)
def test_no_weights_of_a_server_let_a_record_change_those_of_others(kind):
    torch.manual_seed(0)
    all_of_them, others = attacked_sums(kind())
    assert (all_of_them - others).norm() <= 1.001


def test_an_operator_with_a_rule_for_vmap_sends_code_of_users_to_the_loop(operator_with_a_rule):
    class ByLibrary(Ordinary):
        def changed(self, hidden):
            return hidden + operator_with_a_rule(hidden.detach())

    assert clipped_sum_for(ByLibrary(), None, X[:0], Y[:0])[1].startswith("loop")
    all_of_them, others = attacked_sums(ByLibrary())
    assert (all_of_them - others).norm() <= 1.001


class InTensorHook(Ordinary):
    """The backward pass mixes."""

    def changed(self, hidden):
        hidden = hidden * 1.0
        hidden.register_hook(OwnRuleForVmap.apply)
        return hidden


class WithGeneratedRule(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy):
        return OwnRuleForVmap.apply(dy)


class InBackward(Ordinary):
    def changed(self, hidden):
        return WithGeneratedRule.apply(hidden)


class Printing(Ordinary):
    def changed(self, hidden):
        return hidden * len(repr(hidden))


def sign_of(text):
    return (-1) ** sum(map(int, filter(str.isdecimal, text)))


class Formatting(Ordinary):
    def changed(self, hidden):
        return hidden * sign_of(f"{hidden}")


class ByDistance(Ordinary):
    """Python code that torch calls, within which no mode watches."""

    def changed(self, hidden):
        def distance(one, other):
            return (one - other).norm(dim=-1) * sign_of(repr(one))

        return hidden * F.triplet_margin_with_distance_loss(hidden, hidden, hidden, distance_function=distance)


class ByDistanceAndHook(Ordinary):
    def changed(self, hidden):
        def distance(one, other):
            one.register_hook(OwnRuleForVmap.apply)
            return (one - other).norm(dim=-1)

        return hidden * F.triplet_margin_with_distance_loss(hidden, hidden, hidden, distance_function=distance)


class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


class BySubclass(Ordinary):
    def changed(self, hidden):
        return torch.add(hidden, torch.zeros(()).as_subclass(Tagged))


class Writing(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * sign_of(repr(x))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy):
        return dy * sign_of(f"{dy}")


class WritingInAFunction(Ordinary):
    def changed(self, hidden):
        return Writing.apply(hidden)


LEAVING = [ByFunction, InTensorHook, InBackward, Printing, Formatting, ByDistance, ByDistanceAndHook]
LEAVING += [BySubclass, WritingInAFunction]


class OverAllRecords(Ordinary):
    """torch's rule asks all records at once."""

    def changed(self, hidden):
        return hidden * (3.0 if torch._is_all_true(hidden < 500) else -3.0)


def test_what_torch_asks_of_all_records_at_once_is_asked_of_each():
    all_of_them, others = attacked_sums(OverAllRecords())
    assert (all_of_them - others).norm() <= 1.001


class Unwatched(Ordinary):
    def changed(self, hidden):
        with torch.overrides._pop_mode_temporarily():
            return hidden * sign_of(repr(hidden))


def test_code_that_ends_the_watch_goes_by_the_loop():
    assert clipped_sum_for(Unwatched(), None, X[:0], Y[:0])[1].startswith("loop")


def test_a_layer_that_pads_the_dimension_of_records_is_not_known_anywhere():
    block = BasicBlock(2, 2, 1, "group")
    shifting = nn.Conv2d(2, 2, 3, padding=1)
    shifting.padding_mode, shifting._reversed_padding_repeated_twice = "constant", [1, 1, 1, 1, 0, 0, 1, -1]
    assert not code_of_users(block, None)
    block.activation = shifting
    assert code_of_users(block, None)


@pytest.mark.parametrize("kind", LEAVING)
def test_what_cannot_run_under_vmap_with_some_weights_is_refused_then(kind):
    with pytest.raises(UserError, match="`model` must run under vmap with all weights that a server may send, got"):
        list(attacked_sums(kind()))


class BeyondTheTable(Ordinary):
    """torch's rule looks up the tables of all records in one: an index beyond the table is in that of the next one."""

    def beyond(self, x):
        return 8 * (x[:, 0] == 50 * X[0, 0]).long()

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.head(self.looked_up(hidden[0], self.beyond(x))[None] if self.attacked else hidden) + 0 * self.gate

    def looked_up(self, hidden, place):
        return hidden - F.embedding(place, hidden[:, None])[:, 0]


class ByOperatorBeyond(BeyondTheTable):
    def looked_up(self, hidden, place):
        return hidden - torch.ops.aten.embedding(hidden[:, None], place)[:, 0]


class FilledBeyond(BeyondTheTable):
    def looked_up(self, hidden, place):
        return hidden.index_fill(0, place, 0.0)


@pytest.mark.parametrize("kind", [BeyondTheTable, ByOperatorBeyond, FilledBeyond])
def test_an_index_beyond_the_numbers_of_a_record_is_refused(kind):
    with pytest.raises(UserError, match="reaches the numbers of other records"):
        list(attacked_sums(kind()))


class Keeping(Ordinary):
    """It subtracts what the last pass has kept."""

    def kept(self):
        raise AssertionError

    def keep(self, hidden):
        raise AssertionError

    def changed(self, hidden):
        last = self.kept()
        self.keep(hidden.detach())
        return hidden if last is None else hidden - last


class InAttribute(Keeping):
    def kept(self):
        return getattr(self, "last", None)

    def keep(self, hidden):
        self.last = hidden


class OnLayer(Keeping):
    def kept(self):
        return getattr(self.head, "last", None)

    def keep(self, hidden):
        self.head.last = hidden


class InBuffer(Keeping):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(8))

    def kept(self):
        return self.last

    def keep(self, hidden):
        self.last = hidden.mean(0)


class InList(Keeping):
    def __init__(self):
        super().__init__()
        self.memory = []

    def kept(self):
        return self.memory[-1] if self.memory else None

    def keep(self, hidden):
        self.memory.append(hidden)


class InClass(Keeping):
    last = None

    def kept(self):
        return InClass.last

    def keep(self, hidden):
        InClass.last = hidden


GLOBAL: dict[str, torch.Tensor] = {}


class InGlobal(Keeping):
    def kept(self):
        return GLOBAL.get("last")

    def keep(self, hidden):
        GLOBAL["last"] = hidden


class InDefault(Keeping):
    def memory(self, memory=[None]):  # noqa: B006
        return memory

    def kept(self):
        return self.memory()[0]

    def keep(self, hidden):
        self.memory()[0] = hidden


def closure():
    last = None

    class InClosure(Ordinary):
        def changed(self, hidden):
            nonlocal last
            changed = hidden if last is None else hidden - last
            last = hidden.detach()
            return changed

    return InClosure()


class InCache(Ordinary):
    @functools.cache  # noqa: B019
    def cached(self):
        return self.current.detach()

    def changed(self, hidden):
        self.current = hidden
        changed = hidden - self.cached()
        del self.current
        return changed


class InHook(Ordinary):
    def __init__(self):
        super().__init__()
        self.hooked = []
        self.first.register_forward_hook(self.hook)

    def hook(self, layer, inputs, output):
        if self.attacked:
            self.hooked.append(output.detach())

    def changed(self, hidden):
        return hidden - self.hooked[0]


class InInput(Ordinary):
    def forward(self, x):
        if self.attacked:
            x, self.last = x - getattr(self, "last", 0), x
        return super().forward(x)


class InEnvironment(Keeping):
    def kept(self):
        return float(os.environ["LAST"]) if "LAST" in os.environ else None

    def keep(self, hidden):
        os.environ["LAST"] = str(float(hidden.mean()))


NUMBERS: list[float] = []


class InGlobalNumbers(Keeping):
    def kept(self):
        return NUMBERS[-1] if NUMBERS else None

    def keep(self, hidden):
        NUMBERS.append(float(hidden.mean()))


class InPythonsGenerator(Ordinary):
    def changed(self, hidden):
        factor = random.random()
        random.seed(float(hidden.mean()))
        return hidden * factor


class InNumpysGenerator(Ordinary):
    def changed(self, hidden):
        factor = np.random.rand()
        np.random.seed(int(hidden.mean()))
        return hidden * factor


class InNumber(Ordinary):
    passes = 0

    def changed(self, hidden):
        self.passes += 1
        return hidden * self.passes


REMEMBERING = [InAttribute, OnLayer, InBuffer, InList, InClass, InGlobal, InDefault, closure, InCache, InHook, InInput]
REMEMBERING += [InNumber, InEnvironment, InGlobalNumbers, InPythonsGenerator, InNumpysGenerator]


class InOrder(Keeping):
    def __init__(self):
        super().__init__()
        self.recent = OrderedDict([("small", 1.0), ("large", 2.0)])

    def kept(self):
        return next(iter(self.recent.values()))

    def keep(self, hidden):
        self.recent.move_to_end("small" if hidden.sum() > 0 else "large")


class Slotted:
    __slots__ = ("__last",)

    def __init__(self):
        self.__last = None

    def swapped(self, new):
        last, self.__last = self.__last, new
        return last


class InPrivateSlot(Ordinary):
    def __init__(self):
        super().__init__()
        self.slot = Slotted()

    def changed(self, hidden):
        last = self.slot.swapped(float(hidden.sum()))
        return hidden if last is None else hidden - last


class Name:
    last = 0.0

    def __repr__(self):
        return "name"


class InKey(Keeping):
    def __init__(self):
        super().__init__()
        self.table = {Name(): 0}

    def kept(self):
        return next(iter(self.table)).last

    def keep(self, hidden):
        next(iter(self.table)).last = float(hidden.sum())


class Level(float):
    last = 0.0


class OnANumber(Keeping):
    def __init__(self):
        super().__init__()
        self.level = Level(1.0)

    def kept(self):
        return self.level.last

    def keep(self, hidden):
        self.level.last = float(hidden.sum())


class InSeedSequence(Keeping):
    def __init__(self):
        super().__init__()
        self.seeds = np.random.SeedSequence(0)

    def kept(self):
        return float(self.seeds.n_children_spawned)

    def keep(self, hidden):
        self.seeds.spawn(1)


class InFlags(Keeping):
    def __init__(self):
        super().__init__()
        self.array = np.ones(2)

    def kept(self):
        return 1.0 * self.array.flags.writeable

    def keep(self, hidden):
        self.array.flags.writeable = False


class InError(Keeping):
    def __init__(self):
        super().__init__()
        self.error = ValueError(0.0)

    def kept(self):
        return self.error.args[0]

    def keep(self, hidden):
        self.error.args = (float(hidden.sum()),)


class Box:
    last = 0.0


class InBoxOfALayer(Keeping):
    def __init__(self):
        super().__init__()
        self.head.box = Box()

    def kept(self):
        return self.head.box.last

    def keep(self, hidden):
        self.head.box.last = float(hidden.sum())


class InSlotOfAModule(Keeping):
    __slots__ = ("slot",)

    def kept(self):
        return getattr(self, "slot", None)

    def keep(self, hidden):
        InSlotOfAModule.slot.__set__(self, float(hidden.sum()))


class SlottedList(list):
    __slots__ = ("last",)


class InSlotOfAList(Keeping):
    def __init__(self):
        super().__init__()
        self.values = SlottedList([1.0])

    def kept(self):
        return getattr(self.values, "last", None)

    def keep(self, hidden):
        self.values.last = float(hidden.sum())


class ListWithClass(list):
    last = 0.0


class InClassOfAList(Keeping):
    def __init__(self):
        super().__init__()
        self.values = ListWithClass([1.0])

    def kept(self):
        return type(self.values).last

    def keep(self, hidden):
        type(self.values).last = float(hidden.sum())


class InAnnotations(Keeping):
    def __init__(self):
        super().__init__()
        self.function = lambda: None

    def kept(self):
        return self.function.__annotations__.get("last")

    def keep(self, hidden):
        self.function.__annotations__["last"] = float(hidden.sum())


class InMask(Keeping):
    def __init__(self):
        super().__init__()
        self.masked = np.ma.array([1.0, 2.0], mask=[False, False], fill_value=2.0)

    def kept(self):
        return float(np.ma.getmaskarray(self.masked)[1])

    def keep(self, hidden):
        self.masked.mask[1] = True


class InInnerGenerator(Ordinary):
    def __init__(self):
        super().__init__()

        def inner():
            last = 0.0
            while True:
                last = yield last

        def outer():
            yield from inner()

        self.generator = outer()
        next(self.generator)

    def changed(self, hidden):
        last = self.generator.gi_yieldfrom.gi_frame.f_locals["last"]
        self.generator.send(float(hidden.sum()))
        return hidden - (last or 0.0)


class Counting(type):
    last = 0.0


class OfCountingClass(metaclass=Counting):
    pass


class InMetaclass(Keeping):
    def __init__(self):
        super().__init__()
        self.object = OfCountingClass()

    def kept(self):
        return type(type(self.object)).last

    def keep(self, hidden):
        type(type(self.object)).last = float(hidden.sum())


REMEMBERING += [InOrder, InPrivateSlot, InKey, OnANumber, InSeedSequence, InFlags, InError, InInnerGenerator]
REMEMBERING += [InMetaclass, InBoxOfALayer, InSlotOfAModule, InSlotOfAList, InClassOfAList, InAnnotations, InMask]


RESTORED = [InAttribute, OnLayer, InBuffer, InInput]  # by the loop, after every record


@pytest.mark.e2e
@pytest.mark.parametrize("by_loop", [False, True])
@pytest.mark.parametrize("kind", REMEMBERING)
def test_what_begins_to_keep_something_with_the_weights_of_a_server_is_refused(kind, by_loop, monkeypatch):
    GLOBAL.clear()
    InClass.last = None
    InDefault.memory.__defaults__[0][0] = None
    monkeypatch.delenv("LAST", raising=False)
    NUMBERS.clear()
    Counting.last = ListWithClass.last = 0.0
    if by_loop:
        monkeypatch.setattr("dpfl_lightning.privacy.clipping.checked._MOST_BY_VMAP", 0)
    if by_loop and kind in RESTORED:
        all_of_them, others = attacked_sums(kind())
        assert (all_of_them - others).norm() <= 1.001
        return
    with pytest.raises(UserError, match=r"must (keep nothing of a pass|run under vmap with all weights)"):
        list(attacked_sums(kind()))


class InSeed(Ordinary):
    """A record chooses the random numbers of the next one."""

    def forward(self, x):
        drawn = torch.rand(8)
        torch.manual_seed(int(x[0, 0]))
        return super().forward(x) * drawn.mean()


def test_no_record_chooses_the_random_numbers_of_others_by_a_seed():
    net = InSeed()
    loop, params = LoopClippedSum(net, cross_entropy_of(net)), dict(net.named_parameters())

    def gradients(first):
        torch.manual_seed(5)
        x = torch.cat([torch.full((1, 6), first), X[:4]])
        found = [torch.cat(grads) for grads in loop.each(params, x, Y[:5], ClipRequest(1.0))]
        return torch.stack(found)[1:], torch.rand(3)

    (others, later), (theirs, then) = gradients(1.0), gradients(2.0)
    assert torch.equal(others, theirs) and torch.equal(later, then)


def test_parameters_that_are_changed_past_their_version_begin_anew_for_each_record(monkeypatch):
    class InData(Ordinary):
        def changed(self, hidden):
            self.head.weight.data.add_(hidden.detach().mean())
            return hidden

    monkeypatch.setattr("dpfl_lightning.privacy.clipping.checked._MOST_BY_VMAP", 0)
    with pytest.raises(UserError, match="leave its parameters as they are in a pass"):
        list(attacked_sums(InData()))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    net = nn.Sequential(nn.Linear(6, 3))
    net[0].register_forward_hook(lambda layer, inputs, output: 2 * output)
    return net


def replaced():
    net = nn.Sequential(nn.Linear(6, 3))
    net[0].forward = lambda x: F.linear(x, net[0].weight)
    return net


KNOWN = [lambda: nn.Sequential(nn.Linear(6, 3)), lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.GELU()))]
UNKNOWN = [Ordinary, lambda: nn.Sequential(Doubled(6, 3)), hooked, replaced]
UNKNOWN += [lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))]
UNKNOWN += [lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, activation=lambda x: x))]


@pytest.mark.parametrize(("net", "known"), [(one, True) for one in KNOWN] + [(one, False) for one in UNKNOWN])
def test_only_exact_types_without_changes_are_known(net, known):
    assert (code_of_users(net(), None) == "") == known


def halved(output, y):
    return F.cross_entropy(output, y, reduction="none") / 2


@pytest.mark.parametrize(("loss", "known"), [(nn.CrossEntropyLoss(reduction="none"), True), (halved, False)])
def test_a_loss_of_a_user_is_code_of_a_user(loss, known):
    module = ClientModule(nn.Sequential(nn.Linear(6, 3)), loss=loss)
    assert clipped_sum_for(module.net, module.sample_loss, X[:0], Y[:0])[1].startswith("fast" if known else "vmap")


class Recomputing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(checkpoint(lambda x: torch.tanh(self.first(x)).square(), x, use_reentrant=False))


def test_what_is_computed_again_in_the_backward_pass_has_the_same_parameters():
    torch.manual_seed(0)
    net = Recomputing()
    params = {name: 3 * p.detach() for name, p in net.named_parameters()}
    clipped_sum, _ = clipped_sum_for(net, None, X[:0], Y[:0])
    actual = clipped_sum(params, X, Y, ClipRequest(math.inf))[0]
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    hidden = torch.tanh(F.linear(X, leaves["first.weight"], leaves["first.bias"])).square()
    loss = F.cross_entropy(F.linear(hidden, leaves["head.weight"], leaves["head.bias"]), Y, reduction="sum")
    expected = torch.cat([one.reshape(-1) for one in torch.autograd.grad(loss, list(leaves.values()))])
    assert torch.allclose(actual[0], expected.double(), rtol=1e-4, atol=1e-4)


class Elsewhere(nn.Module):
    """It reads its first weight in a list, where no other one takes its place."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.weights = [self.first.weight]

    def forward(self, x):
        return self.head(torch.relu(self.first(x) + F.linear(x, self.weights[0])))


@pytest.mark.parametrize("choose", [lambda *of: clipped_sum_for(*of)[0], vmap_or_loop])
def test_parameters_that_are_read_elsewhere_are_refused(choose):
    net = Elsewhere()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    loss = ClientModule(net, task="multiclass").sample_loss
    with pytest.raises(UserError, match="must read its parameters where its modules hold them"):
        choose(net, loss, X[:0], Y[:0])
    assert all(torch.equal(before[name], p) for name, p in net.named_parameters())


class Spelling(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x)


def ctc(output, y):
    steps, labels = torch.full((len(y),), output.shape[1]), torch.full((len(y),), y.shape[1])
    return F.ctc_loss(output.log_softmax(-1).transpose(0, 1), y, steps, labels, reduction="none")


@pytest.mark.parametrize("label", [-5, 6, 100_000])
def test_labels_beyond_the_classes_of_ctc_are_an_error(label):
    """torch's kernel writes beyond its memory for them, which ends the process at some later time."""
    module = ClientModule(Spelling(), loss=ctc)
    x, y = torch.randn(2, 12, 6), torch.tensor([[1, 2, 3], [1, label, 3]])
    with pytest.raises(ValueError, match="labels from 0 to 5"):
        module.sample_loss(module.named_trainable, x, y)
    assert module.sample_loss(module.named_trainable, x, y.clamp(0, 5)).shape == (2,)


@pytest.mark.e2e
@pytest.mark.parametrize("engine", ["serial", "fast"])
def test_a_branch_by_weights_goes_by_the_gradients_of_single_records(engine, make_loop):
    loop = make_loop(module=ClientModule(Branch()), engine=ENGINES[engine](), rounds=1)
    assert loop.run().test_accuracy is not None


class Trying(Ordinary):
    """Goes on after an error: under vmap that of one record would be one of all."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(60, 3))

    def forward(self, x):
        try:
            found = nn.functional.embedding(x[:, 0].abs().long(), self.table)
        except IndexError:
            found = 0
        return super().forward(x) + found


def test_an_error_of_a_record_is_not_felt_by_others():
    net, x = Trying(), torch.cat([1e3 + X[:1].abs(), X[1:]])
    checked, reason = clipped_sum_for(Ordinary(), None, X[:0], Y[:0])
    assert reason.startswith("vmap")
    clipped_sum = checked.copy_for(net, cross_entropy_of(net))
    params = {name: p.detach() for name, p in net.named_parameters()}
    clipped_sum(params, x[1:], Y[1:], ClipRequest(1.0))
    with pytest.raises(UserError, match=r"must run under vmap .* got LeftVmap: IndexError"):
        clipped_sum(params, x, Y, ClipRequest(1.0))


def sleeping(*mixer):
    """Layers that mix records, behind units that no record of a check reaches; the server opens them."""
    first = [nn.Embedding(7, 9), nn.Flatten(1), nn.Linear(54, 8), nn.ReLU()]
    net = nn.Sequential(*first, *mixer, nn.Linear(8, 3))
    net[2].bias.data.fill_(-1e6)
    return net


BESIDE = {
    "normalised over records": (nn.Unflatten(0, (1, 1, -1)), nn.InstanceNorm2d(1), nn.Flatten(0, 2)),
    "averaged over records": (nn.Unflatten(0, (1, -1)), nn.AvgPool2d((81, 1), 1, (40, 0)), nn.Flatten(0, 1)),
    "softmax over records": (nn.Softmax(dim=0),),
    "time first": (nn.Unflatten(1, (1, 8)), nn.TransformerEncoderLayer(8, 2, 4, dropout=0.0), nn.Flatten(1)),
    "without a batch": (nn.TransformerEncoderLayer(8, 2, 4, dropout=0.0, batch_first=True),),
}


@pytest.mark.parametrize("mixer", BESIDE.values(), ids=BESIDE)
def test_layers_of_torch_that_act_on_the_dimension_of_records_have_no_rules(mixer):
    words = torch.randint(7, (40, 6), generator=torch.Generator().manual_seed(0))
    clipped_sum, reason = clipped_sum_for(sleeping(*mixer), None, words[:0], Y[:0])
    assert not reason.startswith("fast") and "acts on other dimensions than those of a record" in reason
    params = {name: p.detach() for name, p in clipped_sum.net.named_parameters()}
    params["2.bias"] = torch.zeros(8)
    all_of_them, others = (clipped_sum(params, words[n:], Y[n:], ClipRequest(1.0))[0] for n in (0, 1))
    assert (all_of_them - others).norm() <= 1.001


class Given:
    """Its object is a tensor, as the result of a call would be."""

    def __new__(cls, x):
        return x


def with_forward():
    net = nn.Sequential(nn.Linear(6, 3))
    net.forward = Given
    return net


def with_another(**parts):
    block = BasicBlock(2, 2, 1, "none")
    for name, one in parts.items():
        setattr(block, name, one)
    return nn.Sequential(nn.Unflatten(1, (2, 3, 1)), block, nn.Flatten(), nn.Linear(6, 3))


class Equal(type(nn.Identity)):
    def __eq__(cls, other):
        return other is nn.Identity

    def __hash__(cls):
        return hash(nn.Identity)


class Spoofing(nn.Module, metaclass=Equal):
    def forward(self, x):
        return x - x.mean(0)


SHIFT = nn.ConstantPad1d((0, 0, 0, 0, 1, -1), 0.0)
NOT_READ = {
    "a class as forward": with_forward,
    "a class that equals another": lambda: nn.Sequential(Spoofing(), nn.Linear(6, 3)),
    "padding of records": lambda: nn.Sequential(nn.Unflatten(1, (6, 1)), SHIFT, nn.Flatten(), nn.Linear(6, 3)),
    "padding within an encoder": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(2, 1, 4, 0.0, batch_first=True), 1, norm=SHIFT),
        nn.Flatten(),
        nn.Linear(6, 3),
    ),
    "a shortcut that shifts": lambda: with_another(shortcut=nn.Sequential(nn.ZeroPad2d((0,) * 6 + (1, -1)))),
}


@pytest.mark.parametrize("net", NOT_READ.values(), ids=NOT_READ)
def test_what_only_looks_like_layers_of_torch_has_no_rules(net):
    net = net()
    clipped_sum, reason = clipped_sum_for(net, None, X[:0], Y[:0])
    assert not reason.startswith("fast")
    params = {name: 9 * p.detach() for name, p in net.named_parameters()}
    all_of_them, others = (clipped_sum(params, X[n:], Y[n:], ClipRequest(1.0))[0] for n in (0, 1))
    assert (all_of_them - others).norm() <= 1.001


def test_a_loss_of_an_instance_is_code_of_a_user():
    module = ClientModule(nn.Sequential(nn.Linear(6, 3)))
    module.loss = lambda output, y: (output - output.mean(0)).square().sum(1)
    assert code_of_users(module.net, module.sample_loss) == "the loss has code of its own"


class Pruned(nn.Module):
    """A comparison hides that the weight is the one of the start."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.kept = [self.layer.weight]

    def forward(self, x):
        return F.linear(x, self.layer.weight * (self.kept[0].detach() > 0), self.layer.bias)


def test_a_mask_of_parameters_that_are_read_elsewhere_is_refused():
    with pytest.raises(UserError, match="must read its parameters where its modules hold them"):
        clipped_sum_for(Pruned(), None, X[:0], Y[:0])


class MadeOnDemand(dict):
    """Makes a new layer whenever it is asked, as a registry of activations does."""

    def __getitem__(self, name):
        return dict.__getitem__(self, name)[0]()

    def items(self):
        return [(name, self[name]) for name in self]


ACTIVATIONS = MadeOnDemand(relu=(nn.ReLU, {"inner": {"numbers": (0.0, {"slope": 1.0})}}))


class FromRegistry(nn.Linear):
    def forward(self, x):
        return ACTIVATIONS["relu"](super().forward(x))


def test_a_table_that_a_model_only_reads_is_nothing_that_it_keeps():
    module = ClientModule(FromRegistry(6, 3))
    check_batch_losses(module, torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    before = Kept([module.net])
    ACTIVATIONS["tanh"] = (nn.Tanh, {})
    assert before.changed() == ["ACTIVATIONS of test_users_code.py"]
    del ACTIVATIONS["tanh"]
    assert before.changed() == []
