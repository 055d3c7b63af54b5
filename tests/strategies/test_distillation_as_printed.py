"""DistDD as printed against a plain transcription of Algorithm 1, and its noise with the epsilon of each form."""

import json
import math

import pytest
import reference
import torch
from conftest import FIXED_KEY
from few_digits import CLASSES, EQUAL, NOTICE, SHAPE, SMALL, UNEQUAL, a_net, digits, few, images_of

from dpfl_lightning.algorithms.server_training import public_generator, torch_seed
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.papers.distillation.distillation_as_printed import DistillationAsPrinted, paper_epsilon
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.runtime.text import at_most

pytestmark = NOTICE


def algorithm_1(population, rounds: int, image_rate: float, epochs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lines 1 to 16 with eqs. 1 to 7 and 27, client by client and class by class: the images and theta_T."""
    net, theta = a_net().net, a_net().flat
    generator = torch.Generator().manual_seed(torch_seed(public_generator(0, "images")))
    images = [one.requires_grad_() for one in torch.randn(CLASSES, 2, *SHAPE, generator=generator)]
    optimizers = [torch.optim.SGD([leaf], image_rate, momentum=0.5) for leaf in images]
    for round in range(1, rounds + 1):
        torch.nn.utils.vector_to_parameters(theta.clone(), net.parameters())
        params = {name: p.detach() for name, p in net.named_parameters()}
        for label in range(CLASSES):
            total = [torch.zeros_like(p) for p in params.values()]
            for rows in population.train_of:
                of_class = rows[population.y[rows] == label]
                if len(of_class):
                    mean = reference.class_gradient(net, params, population.x[of_class], label)
                    total = [a + b for a, b in zip(total, mean, strict=True)]
            ours = reference.class_gradient(net, params, images[label], label, create_graph=True)
            optimizers[label].zero_grad()
            sum((a - b).square().sum() for a, b in zip(total, ours, strict=True)).backward()
            optimizers[label].step()
        x, y = torch.cat([leaf.detach() for leaf in images]), torch.arange(CLASSES).repeat_interleave(2)
        theta = reference.sgd_epochs(net, theta, x, y, epochs, 0.01, torch_seed(public_generator(0, "net", round)))
    return torch.stack([leaf.detach() for leaf in images]), theta


def test_without_noise_it_is_algorithm_1_of_the_paper(make_loop):
    population = digits([*UNEQUAL[:3], [3, 2, 0]])
    # a rate is multiplied by images of a class / 10
    strategy = DistillationAsPrinted(**{**SMALL, "net_epochs": 3}, image_learning_rate=5.0)
    clients = ClientOptions(count=4, batch_size=list(population.num_records))
    loop = few(make_loop, strategy, population=population, clients=clients, rounds=3)
    result = loop.run()
    images, theta = algorithm_1(population, 3, image_rate=1.0, epochs=3)
    torch.testing.assert_close(images_of(strategy), images, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loop.state.models[0], theta, rtol=1e-4, atol=1e-5)
    start = torch.randn(
        CLASSES, 2, *SHAPE, generator=torch.Generator().manual_seed(torch_seed(public_generator(0, "images")))
    )
    assert float((images - start).abs().max()) > 0.01
    assert math.isinf(result.guarantee.epsilon) and "epsilon_of_eq_41" not in result.metrics
    assert any("eq. 41 says nothing" in words for words in loop.describe())


@pytest.mark.parametrize(
    ("options", "on_the_sum"),
    [
        ({"sampling": "full"}, 6.0),
        ({"sampling": "full", "noise_on": "mean"}, 6.0 * 12 / CLASSES),
        ({"records_per_class": 2}, 3.0),
        ({"records_per_class": 2, "noise_on": "mean"}, 3.0 * 2),
        ({"records_per_class": 100, "noise_on": "mean"}, 3.0 * 12 / CLASSES),
    ],
    ids=["eq 10", "appendix C", "eq 10, fixed", "appendix C, fixed", "appendix C, more than there are"],
)
def test_the_papers_sigma_is_charged_as_noise_on_the_sum(options, on_the_sum, make_loop):
    """12 records of a client, 4 of each class. The epsilon is the accountant's; that of eq. 41 stands beside it."""
    privacy = PrivacyOptions(noise_multiplier=6.0, delta=1e-3, clip_norm=0.5, noise_key=FIXED_KEY)
    loop = few(make_loop, DistillationAsPrinted(**SMALL, **options), counts=EQUAL, privacy=privacy, rounds=2)
    result = loop.run()
    for client in range(4):
        assert loop.clients.budgets.ledger.events(client) == [GaussianEvent(1.0, pytest.approx(on_the_sum), 1)] * 2
    exact, _ = get_accountant("pld").bound([GaussianEvent(1.0, on_the_sum, 2)], 1e-3)
    assert result.guarantee.epsilon == pytest.approx(exact, rel=1e-3)
    clip_norm = 0.5 if options.get("sampling") == "full" else 0.25
    expected = math.sqrt(2 * math.log(1.25 / 1e-3)) * 2 * clip_norm / 6.0
    assert result.metrics["epsilon_of_eq_41"] == pytest.approx(expected)
    assert json.loads((loop.output_dir / "result.json").read_text())["metrics"]["epsilon_of_eq_41"] == pytest.approx(
        expected
    )
    assert any(f"eq. 41 says epsilon {at_most(expected, 3)}" in words for words in loop.describe())
    assert len(read_ledger(loop.clients.folder.ledger_file)) == 8


def test_noise_on_a_mean_needs_noise_that_is_given(make_loop):
    loop = few(
        make_loop, DistillationAsPrinted(**SMALL, noise_on="mean"), privacy=PrivacyOptions(epsilon=8, delta=1e-3)
    )
    with pytest.raises(UserError, match=r"`privacy.noise_multiplier` must be given with .*noise_on mean, got None"):
        loop.plan_schedule()


def test_eq_41_is_twelve_times_below_the_epsilon_of_500_rounds():
    """Noise multiplier 10, full batches, delta 1e-5; and it grows with the clip norm, on which no epsilon depends."""
    exact, _ = get_accountant("pld").bound([GaussianEvent(1.0, 10.0, 500)], 1e-5)
    assert paper_epsilon(10.0, 1e-5) == pytest.approx(0.969, abs=1e-3)
    assert exact / paper_epsilon(10.0, 1e-5) == pytest.approx(11.9, abs=0.1)
    assert paper_epsilon(10.0, 1e-5, clip_norm=3.0) == pytest.approx(3 * paper_epsilon(10.0, 1e-5))


@pytest.mark.parametrize(("sigma", "expected"), [(0.01, 74.6), (0.1, 3.75), (1.0, 0.294)])
def test_noise_on_means_of_256_records_costs_that_of_256_times_sigma_on_sums(sigma, expected):
    """500 rounds of full batches at delta 1e-5, where the paper reports its method to work up to sigma 0.01."""
    exact, _ = get_accountant("pld").bound([GaussianEvent(1.0, 256 * sigma, 500)], 1e-5)
    assert exact == pytest.approx(expected, rel=0.01)
