"""What a user's code keeps shows in gradients that are computed again, wherever it is kept."""

import concurrent.futures
import copy
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.clipping import repeated
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.privacy.clipping.watched import Watch

KEPT: dict[str, float] = {}


class Kept(nn.Module):
    """Its `update` keeps something that no walk is to find here."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(3, 8), nn.Dropout(dropout), nn.Linear(8, 2)

    def forward(self, x):
        factor = self.factor(x)
        turned_on = float(self.first.weight.detach().abs().max()) > 20  # after all checks, by the weights of a server
        return self.second(self.dropout(torch.relu(self.first(x))) * (factor if turned_on else 1.0))

    def factor(self, x):
        return 1.0


class CountsPasses(Kept):
    def factor(self, x):
        KEPT["passes"] = KEPT.get("passes", 0.0) + 1
        return 1 + KEPT["passes"] / 10


class RunningMean(Kept):  # by numbers of a record, so that it goes by the loop
    def factor(self, x):
        size = float(np.abs(x.detach().numpy()).mean())
        KEPT["mean"] = 0.9 * KEPT.get("mean", size) + 0.1 * size
        return KEPT["mean"]


class LastRecord(Kept):
    def factor(self, x):
        last, KEPT["last"] = KEPT.get("last", 0.0), float(np.abs(x.detach().numpy()).mean())
        return 1 + last


def summed(net, sums=1, records=6, scale=100.0):
    """Return what a run computes, without the walk through what code keeps."""
    torch.manual_seed(1)
    x, y = torch.randn(records, 3), torch.arange(records) % 2
    clipped_sum, reason = clipped_sum_for(net, None, x[:1], y[:1])
    params = {name: scale * p.detach() for name, p in net.named_parameters()}
    for _ in range(sums):
        found = clipped_sum(params, x, y, ClipRequest(1.0, released=True))
    return *found, reason


@pytest.fixture
def no_walk(monkeypatch):
    monkeypatch.setattr(Watch, "check", lambda self: self.calls.kept())
    KEPT.clear()


@pytest.mark.e2e
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("kind", "way"), [(CountsPasses, "vmap"), (RunningMean, "loop"), (LastRecord, "loop")])
def test_what_is_kept_anywhere_ends_a_sum(kind, way, dropout, no_walk, monkeypatch):
    torch.manual_seed(0)
    net = kind(dropout)
    monkeypatch.setattr(repeated, "ALWAYS", 0)
    monkeypatch.setattr(repeated, "SHARE", 0.0)
    *_, reason = summed(net)
    assert reason.startswith(way), "without the repetition it is computed"
    monkeypatch.setattr(repeated, "ALWAYS", 40)  # a record with a loss of 0 has no gradient and shows nothing
    with pytest.raises(UserError, match="same gradient whenever it is computed"):
        summed(net, sums=40)


@pytest.mark.e2e
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_honest_model_is_repeated_in_every_sum(dropout, monkeypatch):
    monkeypatch.setattr(repeated, "ALWAYS", math.inf)
    torch.manual_seed(0)
    net = Kept(dropout)
    summed(net, sums=5)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:  # of clients, which share torch's generators
        for one in [threads.submit(summed, copy.deepcopy(net), sums=20) for _ in range(3)]:
            one.result()


def test_repetitions_change_no_bit_and_no_draw(monkeypatch):
    results = []
    for always in (0, 10):
        monkeypatch.setattr(repeated, "ALWAYS", always)
        monkeypatch.setattr(repeated, "SHARE", 0.0)
        torch.manual_seed(0)
        results.append([*summed(Kept(0.5), sums=3)[:2], torch.rand(1)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("size", [1, 8])
def test_later_sums_repeat_a_share_of_their_passes_and_others_none(size):
    """Of 400 sums of 1,024 records, one pass in 48, twice; loops compare at least two records."""
    calls = []

    def sum_of(x, y, request):
        calls.append(len(y))
        return torch.zeros(1, 2), torch.ones(len(y))

    repeats, x, y = repeated.Repeated(nullcontext), torch.zeros(1024, 2), torch.zeros(1024)
    for _ in range(402):
        repeats.check(sum_of, x, y, ClipRequest(1.0), size)
    expected = 2 * 402 * 1024 / max(size, 2) * max(size, 2) / 48 * (2 if size == 1 else 1)
    assert sum(calls) == pytest.approx(expected, rel=0.1)
    calls.clear()
    repeated.Repeated(nullcontext).check(sum_of, x[:0], y[:0], ClipRequest(1.0), size)
    repeated.Repeated(nullcontext).check(sum_of, x, y, ClipRequest(math.inf), size)
    assert not calls


def test_gradients_that_are_not_finite_are_compared_as_such():
    def sum_of(x, y, request):
        return torch.zeros(1, 2), x[:, 0] / torch.ones(1)

    x = torch.tensor([[math.nan], [math.inf], [1.0]])
    repeated.Repeated(nullcontext).check(sum_of, x, torch.zeros(3), ClipRequest(1.0), size=2)


@pytest.mark.parametrize(
    "mixing",
    [
        lambda x, calls: x * (1 - 2 * (calls % 2)),  # as long as before, in the opposite direction
        lambda x, calls: x * (1 + calls % 2),
        lambda x, calls: x.flip(1) if calls % 3 else x,  # turned
        lambda x, calls: x - x.mean(dim=0),  # within a pass
    ],
    ids=["sign", "period of two", "turned", "within a pass"],
)
def test_directions_periods_and_company_are_seen_in_what_a_sum_compares(mixing):
    calls = []

    def sum_of(x, y, request):
        calls.append(len(y))
        gradients = mixing(x, len(calls))
        return gradients.sum(dim=0)[None], gradients.norm(dim=1)

    torch.manual_seed(0)
    x, repeats = torch.randn(64, 2, dtype=torch.float64), repeated.Repeated(nullcontext)
    with pytest.raises(UserError, match="same gradient whenever"):
        for _ in range(2000):
            repeats.check(sum_of, x, torch.zeros(64), ClipRequest(1e6), size=8)
    assert len(calls) < 200


@pytest.mark.e2e
def test_dummy_records_of_a_start_take_no_turn_of_the_first_sums(monkeypatch, tmp_path):
    """Two passes are compared in the first two sums that a run releases."""
    compared = []
    check = repeated.Repeated.check
    monkeypatch.setattr(
        repeated.Repeated, "check", lambda self, *given: (compared.append(given[3].expected), check(self, *given))
    )
    x, y = torch.randn(60, 3), torch.arange(60) % 2
    population = Population.from_datasets([(x[:30], y[:30]), (x[30:], y[30:])], held_out=0.0, num_classes=2)
    loop = FederatedLoop(
        population,
        ClientModule(Kept()),
        rounds=1,
        clients=ClientOptions(batch_size=15),
        privacy=PrivacyOptions(epsilon=4.0, delta=1e-3),
        output_dir=tmp_path / "run",
    )
    loop.run()
    assert compared == [15.0] * 4, "the steps of two clients, and nothing else"


class DrawsForSome(Kept):
    """Drops words of some records only, none of which is among those of the start."""

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        if float(x[0, 0].detach()) > 2:
            hidden = hidden * (torch.rand(1, 8) > 0.3)
        return self.second(hidden)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", [DrawsForSome])
def test_a_model_that_draws_for_some_records_only_is_not_refused(kind, monkeypatch):
    monkeypatch.setattr(repeated, "ALWAYS", math.inf)
    torch.manual_seed(0)
    net, x, y = kind(), 3 * torch.randn(40, 3), torch.arange(40) % 2
    clipped_sum, _ = clipped_sum_for(net, None, x[:0], y[:0])
    for _ in range(10):
        clipped_sum(dict(net.named_parameters()), x, y, ClipRequest(1.0, released=True))


class FrozenAttention(nn.Module):
    """Has an attention without dropout, which torch lists among operators that draw, behind a count of passes."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.head = nn.Linear(3, 24).requires_grad_(False), nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, x):
        KEPT["passes"] = KEPT.get("passes", 0.0) + 1
        turned_on = float(self.head.weight.detach().abs().max()) > 5
        parts = self.first(x * (1 + 3 * (KEPT["passes"] % 3) if turned_on else 1))
        q, k, v = parts[:, None, None].expand(-1, 1, 4, -1).chunk(3, -1)
        return self.head(self.dropout(nn.functional.scaled_dot_product_attention(q, k, v).mean((1, 2))))


def test_attention_is_computed_where_draws_are_constant(no_walk, monkeypatch):
    monkeypatch.setattr(repeated, "ALWAYS", 40)
    torch.manual_seed(0)
    with pytest.raises(UserError, match="same gradient whenever"):
        summed(FrozenAttention(), sums=40)
