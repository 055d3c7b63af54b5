"""One planted record moves no engine's sum by more than the clip norm, for nets of several layers.

The rule of every layer is held to the clip norm by `privacy/test_sensitivity.py`.
"""

import mutants
import pytest
import torch
from conftest import small_loop
from torch import Tensor, nn

from dpfl_lightning.auditing import exact
from dpfl_lightning.auditing.harness import most_opposed
from dpfl_lightning.auditing.target import subjects
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.loop import FederatedLoop

pytestmark = pytest.mark.e2e


class Rows(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(8, 4, batch_first=True), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x[:, 0])[0].flatten(1))


class Tempered(nn.Module):
    """A layer with a parameter that no rule covers."""

    def __init__(self):
        super().__init__()
        self.heat = nn.Parameter(torch.zeros(2, 1, 1))

    def forward(self, x):
        return x / self.heat.exp()


NETS = {
    nn.LSTM: Rows,
    nn.Linear: lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3)),
    nn.Conv2d: lambda: nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(4, 3, 3, bias=False), nn.Flatten(), nn.Linear(12, 3)),
    ),
    "no rule": lambda: nn.Sequential(
        *(nn.Conv2d(1, 2, 5), Tempered(), nn.Flatten(), nn.Linear(32, 3)),
    ),
}


def loop_of(net: nn.Module, **privacy) -> FederatedLoop:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 1, 8, 8, generator=generator), torch.randint(3, (30,), generator=generator)
    options = {"epsilon": 2.0, "delta": 1e-3, "clip_norm": 0.7, **privacy}
    return small_loop(
        Population.from_datasets([(x, y)], held_out=0.0, num_classes=3),
        ClientModule(net),
        clients=ClientOptions(count=1, batch_size=10),
        privacy=PrivacyOptions(**options),
    )


def moves(net: nn.Module, engine: str) -> exact.Finding:
    loop = loop_of(net)
    ((subject,), _) = subjects(loop, [0])
    return exact.sensitivity(subject, engine, loop.module, loop.population, seed=0)


#: which sums these nets have
WORDS = {nn.LSTM: "vmap: `layer` (LSTM)", "no rule": "vmap: `1` (Tempered) has no rule"}
CASES = [*((kind, "fast") for kind in NETS), (nn.Linear, "serial")]


@pytest.mark.parametrize("kind, engine", CASES, ids=lambda one: getattr(one, "__name__", one))
@pytest.mark.usefixtures("code_was_read")
def test_one_record_moves_a_release_by_at_most_the_clip_norm(kind, engine, monkeypatch):
    torch.manual_seed(0)
    net = NETS[kind]()
    found = moves(net, engine)
    assert not found.refuted and found.confidence is None
    for noise in ("without", "with"):  # the grid adds a little
        assert 0.99 < found.figures[f"most_{noise}_noise"] <= 1.004, "or nothing had to be clipped"
    if engine == "fast":
        assert found.figures["sums"].startswith(WORDS.get(kind, "exact rules for all layers"))
    mutants.no_clipping(monkeypatch)
    monkeypatch.setattr(exact, "SIZES", (5,))  # one data set is enough to see it
    assert moves(net, engine).figures["most_without_noise"] > 1.5


def test_a_gradient_that_is_not_finite_is_not_let_through(monkeypatch):
    """A build that lets a broken record in loses its release: no number, and refuted."""
    torch.manual_seed(0)
    monkeypatch.setattr("dpfl_lightning.privacy.clipping.reference.kept", lambda values, factors: values)
    found = moves(NETS[nn.Linear](), "serial")
    assert found.refuted and found.figures["most_without_noise"] is None


def test_the_canary_and_its_opposite():
    """Full gradients only for the canary; the opposite points away most; nothing to choose is no error."""
    gradients = torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.0, 1.0], [0.6, -0.8], [-0.1, 0.0]])
    assert most_opposed(gradients) == (2, 3)
    assert most_opposed(torch.zeros(3, 2))[0] in range(3)
