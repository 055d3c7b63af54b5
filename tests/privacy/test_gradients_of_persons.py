"""Gradients of persons: the mean loss of each one's rows, clipped once, by the loop over persons and by faster sums."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for, vmap_or_loop
from dpfl_lightning.privacy.clipping.inputs import Block, take
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum
from dpfl_lightning.privacy.clipping.trial_records import moved_parameters

pytestmark = pytest.mark.usefixtures("code_was_read")  # of rules, and of trials of code

PERSONS, ROWS = 21, 4


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.table, self.cells, self.head = nn.Embedding(11, 6), kind(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.cells(self.table(ids))[0][:, -1])


class Attending(nn.Module):
    """A transformer whose padding, token 0, is masked; its first token is never masked."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        padding = (ids == 0) & (torch.arange(ids.shape[1]) > 0)
        return self.head(self.layer(self.table(ids), src_key_padding_mask=padding).mean(1))


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(12, 9), nn.Linear(9, 3)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 12)), nn.Parameter(torch.randn(9, 2))

    def forward(self, x):
        return self.head(F.relu(self.base(x) + F.linear(F.linear(x, self.down), self.up)))


def convolutions(*more):
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), *more, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 3)
    )


MODELS = {
    "linear": lambda: nn.Linear(12, 3),
    "tabular": lambda: nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3)),
    "wide": lambda: nn.Sequential(nn.Linear(12, 600), nn.Tanh(), nn.Linear(600, 200), nn.ReLU(), nn.Linear(200, 3)),
    "rms": lambda: nn.Sequential(nn.Linear(12, 16), nn.RMSNorm(16), nn.GELU(), nn.Linear(16, 3)),
    "cnn": lambda: convolutions(),
    "group_norm": lambda: convolutions(nn.GroupNorm(2, 8)),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "transformer": Attending,
    "lora": LoRA,
}


def persons(name: str) -> tuple[Block, torch.Tensor]:
    """Persons with one to four rows; of the last one all tokens are padding, or all numbers 0."""
    generator = torch.Generator().manual_seed(2)
    present = torch.arange(ROWS) < torch.tensor([1 + number % ROWS for number in range(PERSONS)])[:, None]
    if name in ("lstm", "gru", "transformer"):
        x = torch.randint(11, (PERSONS, ROWS, 5), generator=generator)
    else:
        shape = (2, 6, 6) if name in ("cnn", "group_norm") else (12,)
        x = 3 * torch.randn(PERSONS, ROWS, *shape, generator=generator)
    x[-1] = 0
    return Block.of(x.flatten(0, 1), present), torch.randint(3, (PERSONS, ROWS), generator=generator)


def module_of(name: str) -> ClientModule:
    torch.manual_seed(0)
    return ClientModule(MODELS[name]())


def by_hand(module: ClientModule, x: Block, y: torch.Tensor) -> torch.Tensor:
    """The gradient of each person `[B, P]`, by plain autograd over its own rows alone."""
    params = {name: p.detach().requires_grad_() for name, p in moved_parameters(module.net).items()}
    gradients = []
    for rows, labels, weights in zip(x.x, y, x.weights, strict=True):
        loss = module.sample_loss(params, rows[weights > 0], labels[weights > 0]).mean()
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        gradients.append(torch.cat([one.flatten() for one in grads]))
    return torch.stack(gradients).double()


@pytest.mark.e2e
@pytest.mark.parametrize("name", MODELS)
def test_sums_of_persons_equal_those_of_the_loop(name):
    module, (x, y) = module_of(name), persons(name)
    params, example = moved_parameters(module.net), (take(x, slice(0)), y[:0])
    fast, reason = clipped_sum_for(module.net, module.sample_loss, *example)
    vmap = vmap_or_loop(module.net, module.sample_loss, *example)
    assert reason.startswith("vmap" if name in ("lora", "lstm", "gru") else "fast")
    gradients = by_hand(module, x, y)
    clip_norm = float(gradients.norm(dim=1).median())
    factors = (clip_norm / gradients.norm(dim=1)).clamp(max=1)
    exact = (gradients * factors[:, None]).sum(0)
    for clipped_sum in (LoopClippedSum(module.net, module.sample_loss), vmap, fast):
        sums, norms = clipped_sum(params, x, y, ClipRequest(clip_norm))
        torch.testing.assert_close(sums[0], exact, rtol=0, atol=1e-5 * clip_norm)
        torch.testing.assert_close(norms.double(), gradients.norm(dim=1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_person_contributes_has_the_same_bits_in_every_company(name):
    module, (x, y) = module_of(name), persons(name)
    params = moved_parameters(module.net)
    clipped_sum, _ = clipped_sum_for(module.net, module.sample_loss, take(x, slice(0)), y[:0])

    def contribution(numbers: list[int], watched: int) -> tuple[torch.Tensor, torch.Tensor]:
        group = (torch.arange(len(numbers)) != watched).long()
        sums, norms = clipped_sum(params, take(x, numbers), y[numbers], ClipRequest(0.5, group=group, num_groups=2))
        return sums[0], norms[watched]

    alone = contribution([6], 0)
    for numbers, watched in (([6, 20, 3], 0), ([*range(PERSONS)], 6), ([20, 19, 18, 6], 3), ([6] * 40, 39)):
        assert all(map(torch.equal, contribution(numbers, watched), alone))


def test_a_person_with_infinite_rows_contributes_nothing():
    module, (x, y) = module_of("tabular"), persons("tabular")
    x.x[3, 0, 0] = math.inf
    fast, _ = clipped_sum_for(module.net, module.sample_loss, take(x, slice(0)), y[:0])
    sums, norms = fast(moved_parameters(module.net), x, y, ClipRequest(1.0))
    assert sums.isfinite().all() and norms.isfinite().logical_not().nonzero().flatten().tolist() == [3]
