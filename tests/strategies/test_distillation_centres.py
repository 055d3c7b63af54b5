"""Centres of clients' class gradients, against loops over classes, clients and coordinates."""

import math
import statistics

import pytest
import torch
from conftest import private
from fakes import Recorder
from few_digits import CLASSES, NOTICE, SMALL, UNEQUAL, Target, class_means, digits, few, target_of

from dpfl_lightning.errors import UserError
from dpfl_lightning.papers.distillation.centres import CENTRES
from dpfl_lightning.papers.distillation.distillation import Distillation
from dpfl_lightning.papers.distillation.distillation_as_printed import DistillationAsPrinted

pytestmark = NOTICE
SHARE = 0.3
OPTIONS = {name: {"aggregation": name} for name in CENTRES}
OPTIONS["trimmed_mean"]["trimmed_share"] = SHARE


def plain_centre(name: str, values: list[float]) -> float:
    """One coordinate of one class over the clients that hold it."""
    if name == "median":
        return statistics.median(values)
    if name == "trimmed_mean":
        dropped = math.floor(SHARE * len(values))
        values = sorted(values)[dropped : len(values) - dropped]
    return math.fsum(values) if name == "sum_of_client_means" else statistics.fmean(values)


def plain_target(name: str, of_clients: list[list[torch.Tensor | None]]) -> torch.Tensor:
    """`[G, d]` of the clients' gradients, client by client and class by class, None where a class is not held."""
    rows = []
    for label in range(CLASSES):
        held = [means[label].tolist() for means in of_clients if means[label] is not None]
        rows.append([plain_centre(name, list(values)) for values in zip(*held, strict=True)])
    return torch.tensor(rows)


@pytest.mark.parametrize("name", CENTRES)
def test_without_noise_the_clients_that_hold_a_class_count_alike(name, make_loop):
    population = digits([*UNEQUAL, [3, 2, 0]])
    target, present, params = target_of(make_loop, population, **OPTIONS[name])
    of_clients = [class_means(population, params, client) for client in range(5)]
    assert present.all() and sum(means[2] is not None for means in of_clients) == 4
    torch.testing.assert_close(target, plain_target(name, of_clients), rtol=1e-4, atol=1e-6)
    union = torch.stack(class_means(population, params))
    assert float((target - union).norm() / union.norm()) > 0.01


@pytest.mark.e2e
@pytest.mark.parametrize("name", CENTRES)
def test_with_noise_all_clients_count_and_nothing_more_is_sent_or_charged(name, make_loop):
    def run(**options):
        strategy, seen = Target(**SMALL | options), Recorder(updates=True)
        loop = few(make_loop, strategy, seen, counts=UNEQUAL, privacy=private(), rounds=1)
        loop.run()
        return strategy.kept[0][0], seen.updates[0], loop.clients.budgets.spent()

    target, updates, spent = run(**OPTIONS[name])
    _, usual, usual_spent = run()
    assert spent == usual_spent and torch.equal(updates.released, usual.released)
    means = (updates.released * CLASSES).unbind()  # times the public share of a class
    torch.testing.assert_close(target, plain_target(name, [list(one) for one in means]), rtol=1e-4, atol=1e-6)


def test_a_minority_that_sends_anything_stays_within_the_others():
    values = torch.randn(5, 2, 7, generator=torch.Generator().manual_seed(0))
    values[3:] = 1e6
    for name in ("median", "trimmed_mean"):
        centre = CENTRES[name](values[:, 0], 0.4)
        honest = values[:3, 0]
        assert bool(((centre >= honest.min(dim=0).values) & (centre <= honest.max(dim=0).values)).all()), name


@pytest.mark.parametrize("kind", [Distillation, DistillationAsPrinted])
@pytest.mark.parametrize("name", ["sum", *(one for one in CENTRES if one != "trimmed_mean")])
def test_a_share_that_no_trimmed_mean_would_drop_is_refused(name, kind):
    words = rf"trimmed_share` must be null with aggregation {name}, got 0.2\. It is of trimmed_mean"
    with pytest.raises(UserError, match=words):
        kind(**SMALL, aggregation=name, trimmed_share=0.2)
