"""The precision of a release tells no more than its claim: bits of a noisy sum, in every way that a client releases.

Noise that is added in floating point has the precision of the noise where the sum is zero, and that of a coarser grid
elsewhere (Haney et al. 2022, https://arxiv.org/abs/2207.13793). The attacker here is the server: it sends a model of
zeros, so that a release is the noisy sum but for public powers of two, and looks at the lowest set bits alone.
"""

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from attack_tools import Asks, Releases, attack, finest_bit
from conftest import small_loop
from scipy.special import ndtr
from torch import nn

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.jobs import ClassGradients
from dpfl_lightning.federated.messages.query import MeanLoss
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent

NOISE = 2.0  # noise multiplier of every release; the clip norm is 1
DELTA = 1e-5
FEATURES = 1024
RECORDS = 2  # of each client: a power of two, so that the division keeps every bit
LEARN = 30  # releases of each kind that teach the attacker its threshold

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore::UserWarning")]


class Zeros(nn.Linear):
    """Linear without bias, all weights zero."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 2, bias=False)
        nn.init.zeros_(self.weight)


class WithOwn(Zeros):
    """A personal parameter keeps a client out of the batches that several clients share."""

    personal = ("own",)

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return super().forward(x) + 0 * self.own


class Second(torch.optim.SGD):
    """An optimiser that takes the second step alone: post-processing, so it must not give more away."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step() if self.steps == 2 else None


def plain() -> ClientModule:
    return ClientModule(Zeros())


def alone() -> ClientModule:
    return ClientModule(WithOwn())


def last_step() -> ClientModule:
    return ClientModule(Zeros(), optimizer=functools.partial(Second, lr=1.0))


class Classes(Releases):
    """Asks for class gradients in place of training."""

    def __init__(self) -> None:
        super().__init__(fixed=True)

    def plan_round(self, plan, view):
        return dataclasses.replace(plan, job=ClassGradients(2))


@dataclasses.dataclass(frozen=True)
class Way:
    """One way in which clients release, in so many local steps; the kind is "training", "classes" or "loss"."""

    engine: str = "fast"
    module: Callable[[], ClientModule] = plain
    steps: int = 1
    kind: str = "training"
    mechanism: str = "gaussian"

    def events(self) -> list:
        """What one release is charged as."""
        kind = LaplaceEvent if self.mechanism == "laplace" else functools.partial(GaussianEvent, 1.0)
        return [kind(NOISE, self.steps)]

    def success(self) -> float:
        """The most that the claimed mechanism lets anybody guess right, of releases with a record and without."""
        if self.mechanism == "laplace":
            return 1 / (1 + math.exp(-self.steps / NOISE))
        return float(ndtr(math.sqrt(self.steps) / (2 * NOISE)))

    @property
    def trials(self) -> int:
        """Releases of each kind that are quickly made, and show an attack on floating-point noise."""
        return 250 if self.mechanism == "laplace" else 80

    @property
    def delta(self) -> float:
        return 0.0 if self.mechanism == "laplace" else DELTA

    @property
    def epsilon(self) -> float:
        return get_accountant("rdp").epsilon(self.events(), self.delta)


WAYS = {
    "fast, clients in one batch": Way(),
    "fast, one client": Way(module=alone),
    "fast, two steps": Way(steps=2),
    "serial": Way("serial"),
    "serial, second of two steps": Way("serial", last_step, steps=2),
    "class gradients": Way(kind="classes"),
    "class gradients, serial": Way("serial", kind="classes"),
    "Laplace": Way(mechanism="laplace"),
    "a question": Way(kind="loss"),
}
#: variations of others
_LATER = {"fast, one client", "serial, second of two steps", "class gradients, serial"}
MARKED = [pytest.param(name, marks=[pytest.mark.e2e] * (name in _LATER)) for name in WAYS]


@functools.cache
def noisy_sums(name: str, trials: int) -> tuple[np.ndarray, np.ndarray]:
    """What `trials` clients with the record and as many without it release, times the public divisor, `[n, P]`."""
    way = WAYS[name]
    x = torch.zeros(2 * trials, RECORDS, FEATURES)  # a record of zeros has a gradient of zeros
    x[:trials, 0] = 1.0
    y = torch.tensor([0, 1])  # the other record is of another class
    callback = {
        "training": lambda: Releases(fixed=True),
        "classes": Classes,
        "loss": lambda: Asks([MeanLoss], NOISE, fixed=True),
    }[way.kind]()
    with tempfile.TemporaryDirectory() as folder:
        small_loop(
            Population.from_datasets([(own, y) for own in x], held_out=0.0, num_classes=2),
            way.module(),
            clients=ClientOptions(2 * trials, batch_size=None, learning_rate=1.0, local_epochs=way.steps),
            privacy=PrivacyOptions(noise_multiplier=NOISE, delta=way.delta, mechanism=way.mechanism, clip_norm=1.0),
            engine=ENGINES[way.engine](),
            parts=[callback],
            output_dir=Path(folder) / "run",
        ).run()
    if isinstance(callback, Asks):  # 1 is the middle of its range
        sums = np.array([[callback.answers[0][client] - 1.0] for client in range(2 * trials)])
    elif isinstance(callback, Classes):
        sums = callback.of_round[1][:, 0].double().numpy()
    else:
        sums = callback.of_round[1].double().numpy()
        sums = sums[:, (sums != 0).any(axis=0)]  # a personal parameter is not sent
    sums = sums * RECORDS
    return sums[:trials], sums[trials:]


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "a thousand"])
@pytest.mark.parametrize("name", MARKED)
def test_bits_tell_no_more_than_the_claim(name, more):
    """Guess from the finest bit of each release, and compare with what the claimed mechanism allows."""
    way = WAYS[name]
    trials = 1000 if more else way.trials
    with_record, without = (finest_bit(own) for own in noisy_sums(name, trials + LEARN))
    usual, sure = (attack(with_record, without, LEARN, sure) for sure in (False, True))
    assert usual.success_low() <= way.success(), f"{usual.successes} of {2 * trials} guessed right"
    assert max(one.epsilon_low(way.delta) for one in (usual, sure)) <= way.epsilon, (usual, sure)


@pytest.mark.parametrize("name", MARKED)
def test_every_release_lies_on_one_public_grid(name):
    """A grid of a power of two, far finer than the noise, and the same whatever the records are."""
    with_record, without = noisy_sums(name, WAYS[name].trials + LEARN)
    grids = [finest_bit(own.reshape(1, -1))[0] for own in (with_record, without)]
    # Many numbers: an odd multiple of the grid is among them, whether the record is there or not.
    assert grids[0] == grids[1], f"2^{grids[0]:g} with the record, 2^{grids[1]:g} without"
    assert math.log2(NOISE) - 24 <= grids[0] <= math.log2(NOISE) - 10, f"2^{grids[0]:g}"
