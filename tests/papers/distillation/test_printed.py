"""DistDD as the paper prints it: clients' means and their median, noise on means, and eq. 41 beside true epsilons."""

import pytest
import torch
from conftest import FIXED_KEY, private
from few_digits import CLASSES, EQUAL, NOTICE, SMALL, UNEQUAL, class_means, digits, few

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from experiments.papers.distillation.printed import AsPrinted, MedianOfMeans, NoiseOnMeans, paper_epsilon

pytestmark = [NOTICE, pytest.mark.filterwarnings("ignore:strategy distillation. .*reinit_every")]
EXACT = get_accountant("pld")


def first_target(make_loop, kind, population):
    """The target of a first round, which classes have one, and the parameters it was computed at."""
    kept = []

    class Kept(kind):
        def _target(self, combined):
            kept.append(super()._target(combined))
            return kept[-1]

    sizes = list(population.num_records)
    loop = few(make_loop, Kept(**SMALL), counts=[[size] for size in sizes], population=population, rounds=1)
    params = {name: value.clone() for name, value in loop.module.unflatten(loop.module.flat).items()}
    loop.run()
    return *kept[0], params


@pytest.mark.parametrize("kind", [AsPrinted, MedianOfMeans])
def test_means_of_the_clients_that_hold_a_class_count_alike(kind, make_loop):
    population = digits([*UNEQUAL[:3], [3, 2, 0]])
    target, present, params = first_target(make_loop, kind, population)
    each = [class_means(population, params, client) for client in range(4)]
    holders = [torch.stack([means[label] for means in each if means[label] is not None]) for label in range(CLASSES)]
    assert list(map(len, holders)) == [4, 4, 3] and present.all()
    centre = [rows.mean(dim=0) if kind is AsPrinted else rows.quantile(0.5, dim=0) for rows in holders]
    torch.testing.assert_close(target, torch.stack(centre), rtol=1e-4, atol=1e-6)
    union = torch.stack(class_means(population, params))
    assert float((target - union).norm() / union.norm()) > 0.01


def test_the_median_takes_the_middle_of_two_and_no_outlier_and_the_mean_of_few():
    blocks = torch.randn(6, 2, 9, generator=torch.Generator().manual_seed(0))
    centre, everybody = MedianOfMeans()._centre, torch.ones(6, 2)
    torch.testing.assert_close(centre(blocks, everybody), blocks.sort(dim=0).values[2:4].mean(dim=0))
    spoilt = torch.cat([torch.full((2, 2, 9), 1e9), blocks[2:]])
    assert bool((centre(spoilt, everybody) <= blocks[2:].amax(dim=0)).all())
    two, nobody = everybody * torch.tensor([1.0, 1, 0, 0, 0, 0])[:, None], torch.zeros(6, 2)
    torch.testing.assert_close(centre(blocks, two), blocks[:2].mean(dim=0))
    for strategy in (MedianOfMeans(), AsPrinted()):
        assert not strategy._centre(blocks, nobody).any()


def test_clients_means_are_refused_with_noise(make_loop):
    with pytest.raises(UserError, match="`privacy` must be null for clients' means"):
        few(make_loop, AsPrinted(**SMALL), privacy=private()).plan_schedule()


def given_noise(noise):
    return PrivacyOptions(noise_multiplier=noise, delta=1e-3, noise_key=FIXED_KEY)


@pytest.mark.parametrize(
    "options, mean_of",
    [({}, 4), ({"sampling": "fixed", "records_per_class": 2}, 2), ({"sampling": "fixed", "records_per_class": 100}, 4)],
)
def test_noise_of_a_mean_is_charged_as_what_it_is_on_the_sum(options, mean_of, make_loop):
    loop = few(make_loop, NoiseOnMeans(**SMALL | options), counts=EQUAL, privacy=given_noise(0.5), rounds=2)
    for client in loop.plan_schedule().clients:
        assert client.planned[0].event == GaussianEvent(1.0, 0.5 * mean_of, 1) and client.planned[0].count == 2


def test_noise_of_a_mean_must_be_given(make_loop):
    with pytest.raises(UserError, match=r"`privacy\.noise_multiplier` must be given for noise on means, got None"):
        few(make_loop, NoiseOnMeans(**SMALL), privacy=private()).plan_schedule()


#: sigma -> eq. 41 at clip norm 1 and delta 1e-5, and exact epsilons of 500 and 250 rounds of full batches
TABLE = {
    0.01: (969, 2.51e6, 1.26e6),
    0.1: (96.9, 25_953, 13_173),
    1: (9.69, 344.5, 191.5),
    2: (4.84, 109.3, 64.2),
    5: (1.94, 28.4, 17.9),
    10: (0.969, 11.48, 7.51),
    100: (0.0969, 0.82, 0.56),
}


def test_the_papers_epsilon_is_far_below_the_true_one_and_follows_the_clip_norm():
    for sigma, (of_paper, *true) in TABLE.items():
        assert paper_epsilon(sigma, 1e-5) == pytest.approx(of_paper, rel=2e-3)
        exact = [EXACT.epsilon([GaussianEvent(1.0, sigma, rounds)], 1e-5) for rounds in (500, 250)]
        assert exact == pytest.approx(true, rel=5e-3)
        assert exact[0] > 8 * paper_epsilon(sigma, 1e-5)
    assert paper_epsilon(10.0, 1e-5, 3.0) == pytest.approx(3.0 * paper_epsilon(10.0, 1e-5), rel=1e-15)
    assert EXACT.epsilon([GaussianEvent(1.0, 0.01 * 256, 500)], 1e-5) == pytest.approx(74.59, abs=0.01)
