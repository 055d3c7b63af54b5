"""No record moves a sum by more than the clip norm: tiny norms, and nets that mix records of large batches."""

import math

import pytest
import torch
from attack_tools import Releases
from conftest import blobs, small_loop
from reference import Net
from torch import Tensor, nn

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.module import ClientModule

pytestmark = pytest.mark.e2e

NOISE = 1e-3  # noise multiplier: hardly any, so that the sum is seen


class Steep(nn.Module):
    """A linear layer, or a convolution with several positions, whose logits are public and constant.

    The record's features are huge and its loss gradient is as small as `margin` says: e^-margin.
    """

    def __init__(self, layer: nn.Module, margin: float) -> None:
        super().__init__()
        self.layer = layer
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        self.register_buffer("logits", torch.tensor([margin, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return self.logits + (out if out.dim() == 2 else out.flatten(2).sum(dim=2))


def over_positions() -> nn.Module:
    return Net(lambda net, x: net.layer(x).transpose(1, 2), layer=nn.Linear(64, 2, bias=False))


LAYERS = {
    "linear": (lambda: nn.Linear(36, 2, bias=False), (36,)),
    "linear with bias": (lambda: nn.Linear(36, 2), (36,)),
    "linear over positions": (over_positions, (4, 64)),
    "convolution": (lambda: nn.Conv2d(1, 2, 3, bias=False), (1, 6, 6)),
    "convolution of few positions": (lambda: nn.Conv2d(16, 2, 3, bias=False), (16, 4, 4)),
}


def sent(layer: str, engine: str, margin: float, size: float, clip_norm: float, folder) -> Tensor:
    """The noisy sum `[P]` of one record with one feature of that size, whose label is the likely one."""
    make, shape = LAYERS[layer]
    seen = Releases()
    x, y = torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long)
    x.flatten()[14] = size
    train(x, y, 2, Steep(make(), margin), engine, clip_norm, folder, seen)
    return seen.of_round[1][0].double()


def train(x, y, num_classes, net, engine, clip_norm, folder, seen) -> None:
    """One round of one client with hardly any noise."""
    small_loop(
        Population.from_datasets([(x, y)], held_out=0.0, num_classes=num_classes),
        net if isinstance(net, ClientModule) else ClientModule(net),
        clients=ClientOptions(1, batch_size=None, learning_rate=1.0),
        privacy=PrivacyOptions(noise_multiplier=NOISE, delta=1e-3, clip_norm=clip_norm),
        engine=ENGINES[engine](),
        parts=[seen],
        output_dir=folder,
    ).run()


#: margin, feature, clip norm
CASES = [(52.0, 1e19, 1e-5), (60.0, 1e19, 1e-8)]


@pytest.mark.parametrize(
    "layer, engine",
    [*((layer, "fast") for layer in LAYERS), ("convolution of few positions", "serial")],
)
def test_a_tiny_gradient_of_huge_features_is_clipped(layer, engine, tmp_path):
    """The squares of the gradient or of its factors leave the range of float32."""
    for number, (margin, size, clip_norm) in enumerate(CASES):
        noisy = sent(layer, engine, margin, size, clip_norm, tmp_path / str(number))
        noise = NOISE * clip_norm * (math.sqrt(len(noisy)) + 6)
        moved = float(noisy.norm())
        assert moved <= 1.01 * clip_norm + noise, f"{moved / clip_norm:.3g} clip norms: {margin, size, clip_norm}"


def rescaled(net, x: Tensor) -> Tensor:
    """Divides the batch by its largest value, where something exceeds 8."""
    largest = x.abs().max() if len(x) else x.new_ones(())
    return torch.where(largest > 8, x * 8 / largest, x)


def capacity(net, x: Tensor) -> Tensor:
    """Two experts of one layer each, which take 16 records of a batch each and pass over the others."""
    out = x
    for number, expert in enumerate((net.first, net.second)):
        mine = (x[:, 0] > 0) == bool(number)
        taken = mine & (mine.cumsum(dim=0) <= 16)
        out = torch.where(taken[:, None], expert(x), out)
    return out


def centred(net, x: Tensor) -> Tensor:
    """Subtracts the mean of a batch of more than 32 records."""
    return x - x.mean(dim=0) if len(x) > 32 else x


class Entangled(torch.autograd.Function):
    """The identity, whose gradient in a batch of more than 32 records is that of all of them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient + 100 * gradient.sum(dim=0) if len(gradient) > 32 else gradient


def loop_of(mixing: nn.Module, folder):
    torch.manual_seed(0)
    net = nn.Sequential(mixing, nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return small_loop(module=ClientModule(net), privacy=PrivacyOptions(epsilon=4.0, delta=1e-3), output_dir=folder)


def test_a_net_that_mixes_records_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"`net\.0` must give a record the same loss"):
        loop_of(Net(rescaled, first=nn.Linear(6, 6), second=nn.Linear(6, 6)), tmp_path / "run")
    assert not (tmp_path / "run").exists(), "before anything is charged"


@pytest.mark.parametrize("mixing", [lambda net, x: Entangled.apply(x), capacity, centred, rescaled])
def test_what_mixes_the_records_of_a_batch_moves_no_sum_too_far(mixing, tmp_path):
    """Of 48 records one is another: the releases differ by two clipped gradients and hardly any noise."""
    sums = []
    for number in range(2):
        x, y = blobs(num_clients=1, records=60).records(0, torch.arange(48))
        if number:
            x[0], y[0] = 100 * x[0], (y[0] + 1) % 3
        seen = Releases()
        torch.manual_seed(0)
        inner = Net(mixing, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
        net = nn.Sequential(nn.Linear(6, 8), inner, nn.Linear(8, 3))
        model = ClientModule(net, per_record=mixing is rescaled)
        train(x, y, 3, model, "fast", 1.0, tmp_path / str(number), seen)
        sums.append(seen.of_round[1][0].double() * 48)
    noise = 2 * NOISE * (math.sqrt(len(sums[0])) + 6)
    assert float((sums[1] - sums[0]).norm()) <= 2.01 + noise


def test_a_net_that_does_not_is_not_refused(tmp_path):
    loop_of(nn.LayerNorm(6), tmp_path / "run")
