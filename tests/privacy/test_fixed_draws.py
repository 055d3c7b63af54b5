"""Fixed draws are numbers that an operator could have drawn, the same for each record, and depend on nothing else."""

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Binomial, Dirichlet, Gamma, Normal, Poisson, Uniform
from torch.func import vmap
from torch.nn import functional

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.clipping.fixed_draws import FixedDraws

CLIENTS, PRIVACY = ClientOptions(batch_size=8), PrivacyOptions(epsilon=8.0, delta=1e-3)
VALUES = torch.tensor([[0.5, 1.5], [2.5, 3.0]])
DRAWS = {
    "bernoulli": (lambda: Bernoulli(VALUES.sigmoid()).sample(), lambda one: bool(((one == 0) | (one == 1)).all())),
    "binomial": (lambda: Binomial(5, VALUES.sigmoid()).sample(), lambda one: bool(((one >= 0) & (one <= 5)).all())),
    "dirichlet": (lambda: Dirichlet(VALUES).sample(), lambda one: torch.allclose(one.sum(1), torch.ones(2))),
    "gamma": (lambda: Gamma(VALUES, 1.0).sample(), lambda one: bool((one > 0).all())),
    "poisson": (lambda: Poisson(VALUES).sample(), lambda one: torch.equal(one, one.round())),
    "uniform": (lambda: Uniform(2.0, 3.0).sample((2, 2)), lambda one: bool(((one >= 2) & (one < 3)).all())),
    "uniform_": (lambda: torch.empty(2, 2).uniform_(2, 3), lambda one: bool(((one >= 2) & (one < 3)).all())),
    "normal": (lambda: torch.normal(VALUES, 0.1), lambda one: bool(((one - VALUES).abs() < 0.4).all())),
    "randint": (lambda: torch.randint(1, 4, (2, 2)), lambda one: bool(((one >= 1) & (one < 4)).all())),
    "random_": (lambda: torch.empty(2, 2).random_(3, 5), lambda one: bool(((one >= 3) & (one < 5)).all())),
    "randperm": (lambda: torch.randperm(4).view(2, 2), lambda one: sorted(one.flatten().tolist()) == [0, 1, 2, 3]),
    "multinomial": (lambda: torch.multinomial(VALUES, 2), lambda one: one.sort().values.tolist() == [[0, 1]] * 2),
    "multinomial of one": (lambda: torch.multinomial(torch.tensor([[0.0, 1.0]]), 1), lambda one: one.tolist() == [[1]]),
    "multinomial again": (
        lambda: torch.multinomial(torch.tensor([0.0, 1.0, 1.0]), 9, replacement=True),
        lambda one: bool((one > 0).all()),
    ),
    "never": (lambda: torch.bernoulli(torch.zeros(9)), lambda one: bool((one == 0).all())),
    "normals": (lambda: torch.randn(100, 100), lambda one: one.mean().abs() < 0.05 and (one.std() - 1).abs() < 0.05),
    "uniforms": (
        lambda: torch.rand(100, 100),
        lambda one: abs(one.mean() - 0.5) < 0.02 and one.min() > 0,
    ),
    "exponential": (lambda: torch.empty(2, 2).exponential_(2.0), lambda one: bool((one > 0).all())),
    "geometric": (lambda: torch.empty(2, 2).geometric_(0.3), lambda one: bool((one >= 1).all())),
    "log_normal": (lambda: torch.empty(2, 2).log_normal_(), lambda one: bool((one > 0).all())),
    "cauchy": (lambda: torch.empty(2, 2).cauchy_(), lambda one: bool(one.isfinite().all())),
    "rrelu": (
        lambda: functional.rrelu(torch.tensor([[-1.0, 2.0]]), training=True),
        lambda one: float(one[0, 1]) == 2 and -1 / 3 <= float(one[0, 0]) <= -1 / 8,
    ),
    "rrelu in evaluation": (
        lambda: nn.RReLU().eval()(torch.tensor([[-1.0, 2.0]])),
        lambda one: torch.allclose(one, torch.tensor([[-11 / 48, 2.0]])),
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_constant_could_have_been_drawn_and_does_not_change(name):
    draw, is_possible = DRAWS[name]
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with FixedDraws():
            results.append(draw())
    assert torch.equal(*results), name
    assert is_possible(results[0]), results[0]


def test_nothing_is_dropped_and_attention_is_itself():
    x = torch.randn(2, 1, 3, 4)
    expected = functional.scaled_dot_product_attention(x, x, x)
    with FixedDraws():
        for dropout in (0.0, 0.5):
            found = functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)
            scale = 1 if dropout == 0 else 1 / (1 - dropout)
            torch.testing.assert_close(found, scale * expected if dropout else expected)
        assert bool((functional.dropout(x, 0.5) != 0).all())


SAMPLERS = {
    "a circle": lambda: 0 < float((2 * torch.rand(2) - 1).square().sum()) < 1,
    "a negative sample": lambda: int(torch.randint(0, 3, (1,))) == 0,
    "a tail": lambda: float(torch.randn(())) < -1,
    "a coin": lambda: float(torch.bernoulli(torch.tensor(0.5))) == 0,
    "all but the most likely": lambda: int(torch.distributions.Categorical(torch.tensor([0.2, 0.8])).sample()) == 0,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_that_rejects_ends(name):
    with FixedDraws():
        assert any(SAMPLERS[name]() for _ in range(200))


def drawn(x):
    """Draws of a record, of all kinds, several times."""
    found = []
    for _ in range(3):
        found += [torch.randn(2, 3), torch.randn(()), torch.rand_like(x), torch.randperm(5), torch.randint(0, 9, (4,))]
        found += [Bernoulli(x.sigmoid()).sample(), torch.multinomial(x.exp(), 2), torch.empty_like(x).normal_()]
        found += [functional.dropout(x, 0.5), torch.normal(x, 1.0), torch.empty_like(x).exponential_()]
    return [one.flatten().float() for one in found]


def test_records_draw_the_same_alone_and_in_a_pass():
    x = torch.linspace(-1, 1, 4).expand(5, 4).clone()
    with FixedDraws() as mode:
        alone = []
        for row in x:
            mode.begin(1)
            alone.append(torch.cat(drawn(row)))
        mode.begin(5)
        together = vmap(lambda row: torch.cat(drawn(row)), randomness="different")(x)
    torch.testing.assert_close(torch.stack(alone), together)
    assert torch.equal(together, together[:1].expand_as(together))


def test_draws_of_a_record_differ():
    with FixedDraws():
        one, other = torch.randn(8, 8), torch.randn(8, 8)
    assert not torch.equal(one, other)
    assert torch.linalg.cond(one) < 1e4


class Vae(nn.Module):
    """A model whose scale is 0 for extreme records, of which torch's distributions raise an error."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(4, 3)

    def forward(self, x):
        mean, scale = self.inner(x).chunk(2, -1)
        return self.head(Normal(mean, scale.exp()).rsample())


class Vector(nn.Module):
    """Noise of weights, which a batch draws once."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x):
        return self.inner(x @ torch.linalg.inv(torch.randn(6, 6)))


class Rejecting(nn.Module):
    """Noise that is drawn until all of it is small."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x):
        noise = torch.randn_like(x)
        while bool((noise.abs() > 0.5).any()):
            noise = noise.where(noise.abs() <= 0.5, torch.randn_like(x))
        return self.inner(x + noise)


class Pairs(L.LightningModule):
    """Negative samples that are drawn until they are no labels."""

    def __init__(self):
        super().__init__()
        self.user, self.items = nn.Linear(6, 4), nn.Embedding(3, 4)

    def forward(self, x):
        return self.user(x) @ self.items.weight.T

    def training_step(self, batch, index):
        x, y = batch
        other = torch.randint(0, 3, y.shape)
        while bool((other == y).any()):
            other = torch.where(other == y, torch.randint(0, 3, y.shape), other)
        user = self.user(x)
        return -functional.logsigmoid((user * (self.items(y) - self.items(other))).sum(-1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Halves(L.LightningModule):
    """A step in bfloat16, whose products are rounded otherwise for other numbers of rows."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 64), nn.Linear(64, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x)))

    def training_step(self, batch, index):
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16):
            output = self(x)
        return functional.cross_entropy(output.float(), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Leaky(nn.Sequential):
    """Slopes are drawn for negative numbers alone, so that a batch draws other ones than its records."""

    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 3))


@pytest.mark.e2e
@pytest.mark.parametrize("kind", [Vae, Vector, Rejecting, Pairs, Halves, Leaky])
def test_models_that_draw_or_round_are_trained(kind):
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    population = Population.from_datasets([(x, y), (x, y)], num_classes=3)
    FederatedLoop(population, ClientModule(kind()), rounds=1, clients=CLIENTS, privacy=PRIVACY).run()


class Teacher(Halves):
    """A step that updates a teacher, which the next one meets."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.inner).requires_grad_(False)

    def training_step(self, batch, index):
        x, y = batch
        with torch.no_grad():
            for kept, new in zip(self.teacher.parameters(), self.inner.parameters(), strict=True):
                kept.mul_(0.9).add_(new, alpha=0.1)
        return functional.cross_entropy(self(x), y) + functional.mse_loss(self.inner(x), self.teacher(x))


def test_a_step_that_updates_what_it_keeps_is_told_so():
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    population = Population.from_datasets([(x, y), (x, y)], num_classes=3)
    with pytest.raises(UserError, match="the same loss for the same batch"):
        FederatedLoop(population, ClientModule(Teacher()), rounds=1, clients=CLIENTS, privacy=PRIVACY).run()
