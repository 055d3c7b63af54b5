"""The tests of Opacus' accountants, noise multipliers and Poisson samples, with ours in their place."""

import hypothesis
import pytest
from conformance.adapters import UpperBounds, calibrated

from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.privacy.noise import RandomGenerator
from dpfl_lightning.privacy.sampling import Poisson as PoissonSampler

usual = hypothesis.settings.get_current_profile_name()
hypothesis.settings.load_profile("conformance")
from opacus.tests import accountants_test, poisson_test  # noqa: E402

hypothesis.settings.load_profile(usual)
pytestmark = pytest.mark.e2e

BELOW_THE_TRUTH = "Opacus' Gaussian accountant is below the truth for sampled batches; ours refuses them"
STATE = "it tests how Opacus registers and stores its accountants"


class Steps:
    """One of our accountants as one of Opacus."""

    def __init__(self, name: str) -> None:
        self.ours, self.history = get_accountant(name), []

    def step(self, noise_multiplier: float, sample_rate: float) -> None:
        self.history.append((noise_multiplier, sample_rate, 1))

    def get_epsilon(self, delta: float) -> float:
        return self.ours.epsilon([GaussianEvent(rate, noise, steps) for noise, rate, steps in self.history], delta)


def noise_multiplier(target_epsilon, target_delta, sample_rate, epochs=None, steps=None, accountant="rdp"):
    event = GaussianEvent(sample_rate, None, steps or int(epochs / sample_rate))
    return calibrated(get_accountant({"prv": "pld"}.get(accountant, accountant)), event, target_epsilon, target_delta)


class Accountants(UpperBounds, accountants_test.AccountingTest):
    """Opacus' PRV values lie up to 0.01 above the tight epsilon, its noise as much as 0.01 of epsilon demands."""

    module = accountants_test
    names = {  # noqa: RUF012
        "RDPAccountant": lambda: Steps("rdp"),
        "PRVAccountant": lambda: Steps("pld"),
        "create_accountant": lambda mechanism: Steps({"prv": "pld"}.get(mechanism, mechanism)),
        "get_noise_multiplier": noise_multiplier,
    }
    left_out = {".*gdp": BELOW_THE_TRUTH, ".*state_dict": STATE}  # noqa: RUF012

    @property
    def below(self) -> float:
        return {"test_prv_accountant": 0.02, "test_rdp_accountant": 0.0}.get(self._testMethodName, 2e-3)


class Registry(accountants_test.AccountantRegistryTest):
    left_out = {"test": STATE}  # noqa: RUF012


class Sampler:
    """Our Poisson samples as a sampler of batches; the seed of the given generator is our key."""

    def __init__(self, num_samples, sample_rate, generator) -> None:
        self.num_samples, self.sample_rate, self.key = num_samples, sample_rate, generator.initial_seed()

    def __len__(self) -> int:
        return int(1 / self.sample_rate)

    def __iter__(self):
        generator = RandomGenerator(self.key.to_bytes(32, "big"))
        sampler = PoissonSampler(Gaussian(1.0, 1.0, self.sample_rate, 1.0), len(self))
        for rows in sampler.draws(self.num_samples, generator):
            yield rows.tolist()


class Poisson(poisson_test.PoissonSamplingTest):
    def setUp(self):
        patch = pytest.MonkeyPatch()
        self.addCleanup(patch.undo)
        patch.setattr(poisson_test, "UniformWithReplacementSampler", Sampler)
        super().setUp()
