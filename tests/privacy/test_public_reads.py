"""What code reads of a record under `vmap` is that of a public record; the result is that of the record alone."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, cross_entropy_of
from dpfl_lightning.privacy.clipping.taps import TappedSum

GEN = torch.Generator().manual_seed(0)
X, Y = torch.randn(40, 6, generator=GEN), torch.arange(40) % 3
X[::4] = X[::4].abs()  # a fourth of the records is positive
WORDS = torch.randint(1, 7, (40, 5), generator=GEN)
WORDS[torch.arange(5) >= 1 + torch.arange(40)[:, None] % 5] = 0  # of 1 to 5 words


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def hidden(self, x):
        return self.first(x)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(x)))


class Branch(Small):
    def hidden(self, x):
        return self.first(x) if (x > 0).all() else self.second(x)


class Branches(Small):
    def hidden(self, x):
        found = self.first(x) if bool(x[0, 0] > 0) else self.second(x)
        return found * 2 if not (x[0, 2] > 0) or (x > 0).all() else found


class Asserting(Small):
    def hidden(self, x):
        assert not torch.isnan(x).any()
        if torch.allclose(x, torch.zeros(())) or torch.equal(x, torch.zeros(6)) or 7.5 in x:
            raise ValueError("no record is zero")
        return self.first(x)


class Distribution(Small):
    """torch checks the arguments of a distribution."""

    def hidden(self, x):
        return torch.distributions.Normal(self.first(x), F.softplus(self.second(x))).log_prob(torch.zeros(8))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head, self.odd = nn.Embedding(7, 8), nn.Linear(8, 3), nn.Linear(8, 8)

    def forward(self, ids):
        hidden = self.table(ids)
        if not (ids > 0).all():
            hidden = hidden * (ids > 0)[..., None]
        if int((ids > 0).sum()) % 2:
            hidden = self.odd(hidden)
        return self.head(hidden.sum(1))


class Lengths(Words):
    def forward(self, ids):
        length = int((ids > 0).sum())
        return self.head(self.table(ids[:, :length]).mean(1))


class Encoded(Words):
    def forward(self, ids):
        return self.head(F.one_hot(ids, 7).float() @ self.table.weight).mean(1) + F.one_hot(ids)[..., :1].float().mean()


class Picking(Words):
    """What the way of the first records does with the others is an error."""

    def forward(self, ids):
        hidden, last = self.table(ids), (ids > 0).sum(1)
        if (ids > 0).all():
            return self.head(hidden.gather(1, last[:, None, None].expand(-1, 1, 8) - 1).squeeze(1))
        return self.head(hidden.gather(1, last[:, None, None].expand(-1, 1, 8)).squeeze(1))


MODELS = {
    "a branch": (Branch, X, "vmap"),
    "branches": (Branches, X, "vmap"),
    "assertions": (Asserting, X, "vmap"),
    "a distribution": (Distribution, X, "vmap"),
    "padding": (Words, WORDS, "vmap"),
    "lengths": (Lengths, WORDS, "vmap"),
    "one-hot codes": (Encoded, WORDS, "vmap"),
    "an error for others": (Picking, WORDS, "vmap"),
}


def gradients(clipped_sum, params, x, y):
    each = ClipRequest(math.inf, 2, torch.arange(len(y)), len(y))
    return clipped_sum(params, x, y, each)[0]


@pytest.mark.e2e
@pytest.mark.parametrize("build, x, way", MODELS.values(), ids=MODELS)
def test_each_record_has_the_gradient_that_it_has_alone_bit_for_bit(build, x, way):
    torch.manual_seed(0)
    net = build()
    clipped_sum, reason = clipped_sum_for(net, None, x[:0], Y[:0])
    assert reason.startswith(way), reason
    params = {name: 1.5 * p.detach() for name, p in net.named_parameters()}
    expected = gradients(LoopClippedSum(net, cross_entropy_of(net)), params, x, Y)
    together = gradients(clipped_sum, params, x, Y)
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-6)
    back, few = torch.arange(39, -1, -1), torch.arange(3, 40, 7)
    assert torch.equal(gradients(clipped_sum, params, x[back], Y[back])[back], together)
    assert torch.equal(gradients(clipped_sum, params, x[few], Y[few]), together[few])
    assert torch.equal(gradients(clipped_sum, params, x[5:6], Y[5:6]), together[5:6])


SEEN = SimpleNamespace()


def seen():
    """The namespace, by a text that no watch reads."""
    return globals()["SEEN"]


class Telling(Small):
    """Tells what it reads to the test, past every watch."""

    def hidden(self, x):
        seen().values.append((x.sum().item(), x[0].tolist(), float(x[0, 0]), bool(x[0, 1] > 0), x[0, 2].item() in x))
        return self.first(x)


def test_code_reads_only_public_numbers_but_in_the_loop():
    seen().values = []
    net = Telling()
    params = {name: p.detach() for name, p in net.named_parameters()}
    public = torch.full((1, 6), 0.25), Y[:1]
    clipped_sum = TappedSum(net, cross_entropy_of(net), 8, public)
    clipped_sum.scripts = tuple(clipped_sum.scripts_of(params, public))
    clipped_sum._loop = lambda params, x, y, request: (request.zeros(params), torch.zeros(len(y)))
    seen().values = []
    clipped_sum(params, X, Y, ClipRequest(1.0))
    assert set(map(str, seen().values)) == {str((1.5, [0.25] * 6, 0.25, True, True))}


class Remembering(Small):
    """It keeps a tensor where only its life shows it, and brings it into the next pass."""

    def hidden(self, x):
        found = self.first(x) + getattr(seen(), "last", 0)
        if (x > 0).all():
            found = found * 2
        if seen().keeps:
            seen().last = found.detach()
        return found


@pytest.mark.e2e
def test_records_that_differ_hide_nothing_that_is_kept():
    net = Remembering()
    params = {name: p.detach() for name, p in net.named_parameters()}
    public = torch.full((1, 6), 0.25), Y[:1]
    clipped_sum, seen().keeps = TappedSum(net, cross_entropy_of(net), 8, public), False
    clipped_sum.scripts = tuple(clipped_sum.scripts_of(params, public))
    seen().keeps = True
    with pytest.raises(UserError, match="must keep nothing of a pass"):
        clipped_sum(params, X, Y, ClipRequest(1.0))
    seen().last = 0


@pytest.mark.e2e
def test_which_records_go_alone_depends_on_each_of_them_alone():
    net = Lengths()
    params, alone = {name: p.detach() for name, p in net.named_parameters()}, []
    clipped_sum = TappedSum(net, cross_entropy_of(net), 8, (WORDS[3:4], Y[3:4]))
    clipped_sum.scripts = tuple(clipped_sum.scripts_of(params, (WORDS[3:4], Y[3:4])))
    loop = clipped_sum._loop

    def watched(params, x, y, request):
        alone.append(x.clone())
        return loop(params, x, y, request)

    clipped_sum._loop = watched
    for rows in (torch.arange(40), torch.arange(39, -1, -1), torch.arange(0, 40, 3)):
        alone.clear()
        clipped_sum(params, WORDS[rows], Y[rows], ClipRequest(1.0))
        assert torch.equal(alone[0], WORDS[rows][(WORDS[rows] > 0).sum(1) != 4])


class Later(Small):
    """It reads records with large weights only."""

    def hidden(self, x):
        if self.first.weight.abs().max() > 10 and (x > 0).all():
            return self.second(x)
        return self.first(x)


@pytest.mark.e2e
def test_reads_that_begin_with_other_weights_are_those_of_a_public_record():
    torch.manual_seed(0)
    net = Later()
    clipped_sum, reason = clipped_sum_for(net, None, X[:0], Y[:0])
    assert reason.startswith("vmap")
    params = {name: 60 * p.detach() for name, p in net.named_parameters()}
    expected = gradients(LoopClippedSum(net, cross_entropy_of(net)), params, X, Y)
    torch.testing.assert_close(gradients(clipped_sum, params, X, Y), expected, rtol=1e-4, atol=1e-5)


class Dropping(Small):
    """A coin for each record."""

    def hidden(self, x):
        return self.first(x) if torch.rand(()) < 0.5 else self.second(x)


class Measured(Small):
    """It reads another number of every record."""

    def hidden(self, x):
        return self.first(x) / x.abs().max().item()


class Selecting(Small):
    def hidden(self, x):
        return self.first(x)[x[:, 0] > 0].sum(0, keepdim=True) + self.second(x)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", [Dropping, Measured, Selecting])
def test_what_no_public_record_can_stand_for_goes_alone(kind):
    assert clipped_sum_for(kind(), None, X[:0], Y[:0])[1].startswith("loop")


def ctc(output, y):
    steps = torch.full((len(y),), output.shape[1])
    return F.ctc_loss(output.log_softmax(-1).transpose(0, 1), y, steps, torch.full((len(y),), 3), reduction="none")


class Spelling(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x)


def test_checks_for_the_memory_of_a_kernel_are_none_that_a_public_record_passes():
    """torch's kernel writes beyond its memory for labels that a public record does not have."""
    module = ClientModule(Spelling(), loss=ctc)
    clipped_sum = TappedSum(module.net, module.sample_loss, 2)
    x, y = torch.randn(2, 12, 6), torch.tensor([[1, 2, 3], [1, 100_000, 3]])
    with pytest.raises((UserError, ValueError), match="ctc_loss needs numbers"):
        clipped_sum(module.named_trainable, x, y, ClipRequest(1.0))


class Elsewhere(nn.Module):
    """Weights move the second read of records whose first number is small to another place."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.gate = nn.Linear(6, 40), nn.Linear(40, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        hidden = self.first(x)
        if x[0, 0] > -1.5:
            if hidden[0, 0] > 0:
                hidden = hidden * 1.5
        elif self.gate > 5:
            if x[0, 2] > 0:
                hidden = hidden * 2
        elif x[0, 1] > 0:
            hidden = hidden * 3
        return self.last(hidden.tanh()) + self.gate * 0


@pytest.mark.e2e
def test_a_record_that_takes_another_script_changes_no_bit_of_the_others():
    torch.manual_seed(0)
    net, x, y = Elsewhere(), torch.randn(60, 6), torch.randint(0, 3, (60,))
    x[:, 0], x[:, 1] = x[:, 0].abs() + 0.1, 5
    clipped_sum, reason = clipped_sum_for(net, None, x[:1] * 0, y[:1])
    assert reason.startswith("vmap") and len(clipped_sum.choose().scripts) > 1
    params = {name: p.detach().clone() for name, p in net.named_parameters()}
    params["gate"].fill_(6.0)
    params["first.weight"][0] = torch.tensor([0.0, 1, 0, 0, 0, 0])
    params["first.bias"][0] = -3.0
    before = gradients(clipped_sum, params, x, y).clone()
    x[0, 0] = -9.0  # its script has changed with the weights
    after = gradients(clipped_sum, params, x, y)
    assert torch.equal(after[1:], before[1:])
    expected = gradients(LoopClippedSum(net, cross_entropy_of(net)), params, x, y)
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)


class Listing(Small):
    """It changes a list of public numbers."""

    def hidden(self, x):
        found = (x.abs() < 1e20).all(-1).tolist()
        found.append(True)
        return self.first(x) * len(found)


@pytest.mark.e2e
def test_a_list_of_public_numbers_is_another_one_in_every_pass():
    torch.manual_seed(0)
    net = Listing()
    clipped_sum, reason = clipped_sum_for(net, None, X[:0], Y[:0])
    assert reason.startswith("vmap")
    params = {name: p.detach() for name, p in net.named_parameters()}
    expected = gradients(LoopClippedSum(net, cross_entropy_of(net)), params, X, Y)
    for _ in range(2):
        torch.testing.assert_close(gradients(clipped_sum, params, X, Y), expected, rtol=1e-4, atol=1e-5)
