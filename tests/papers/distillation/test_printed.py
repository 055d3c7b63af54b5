"""DistDD as the paper prints it: clients' means."""

import pytest
import torch
from conftest import private
from few_digits import CLASSES, NOTICE, SMALL, UNEQUAL, class_means, digits, few

from dpfl_lightning.errors import UserError
from experiments.papers.distillation.printed import AsPrinted

pytestmark = [pytest.mark.e2e, NOTICE, pytest.mark.filterwarnings("ignore:strategy distillation. .*reinit_every")]


def first_target(make_loop, population):
    """The target of a first round, which classes have one, and the parameters it was computed at."""
    kept = []

    class Kept(AsPrinted):
        def _target(self, combined):
            kept.append(super()._target(combined))
            return kept[-1]

    sizes = list(population.num_records)
    loop = few(make_loop, Kept(**SMALL), counts=[[size] for size in sizes], population=population, rounds=1)
    params = {name: value.clone() for name, value in loop.module.unflatten(loop.module.flat).items()}
    loop.run()
    return *kept[0], params


def test_means_of_the_clients_that_hold_a_class_count_alike(make_loop):
    population = digits([*UNEQUAL[:3], [3, 2, 0]])
    target, present, params = first_target(make_loop, population)
    each = [class_means(population, params, client) for client in range(4)]
    holders = [torch.stack([means[label] for means in each if means[label] is not None]) for label in range(CLASSES)]
    assert list(map(len, holders)) == [4, 4, 3] and present.all()
    centre = torch.stack([rows.mean(dim=0) for rows in holders])
    torch.testing.assert_close(target, centre, rtol=1e-4, atol=1e-6)
    union = torch.stack(class_means(population, params))
    assert float((target - union).norm() / union.norm()) > 0.01


def test_clients_means_are_refused_with_noise(make_loop):
    with pytest.raises(UserError, match="`privacy` must be null for clients' means"):
        few(make_loop, AsPrinted(**SMALL), privacy=private()).plan_schedule()
