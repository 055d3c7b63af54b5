"""Server optimisers, robust means and PFA, held to their formulas."""

import numpy as np
import pytest
import torch
from conftest import FIXED_KEY, blobs

from dpfl_lightning import strategies
from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.strategies.aggregation.fedadam import FedAdam
from dpfl_lightning.strategies.aggregation.fedyogi import FedYogi
from dpfl_lightning.strategies.aggregation.median import Median
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware
from dpfl_lightning.strategies.aggregation.pfa import larger_budgets, projected_mean
from dpfl_lightning.strategies.aggregation.server_momentum import ServerMomentum
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted
from dpfl_lightning.strategies.aggregation.trimmed_mean import TrimmedMean

OPTIMIZERS = ("fedadam", "fedyogi", "server_momentum")


def stepped(optimizer, updates):
    """The models after each of the updates `[T, K, P]`, from zero."""
    state, models = ServerState(torch.zeros_like(updates[0]), (0,)), []
    for update in updates:
        state = optimizer.step(state, update, None)
        models.append(state.models)
    return models


def test_momentum_is_that_of_torch():
    updates = torch.randn(5, 1, 7, generator=torch.Generator().manual_seed(0))
    model = torch.zeros(1, 7, requires_grad=True)
    reference = torch.optim.SGD([model], lr=0.5, momentum=0.9)
    for update, ours in zip(updates, stepped(ServerMomentum(0.9, 0.5), updates), strict=True):
        model.grad = -update
        reference.step()
        torch.testing.assert_close(ours, model.detach())


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_moments_are_those_of_the_paper(kind):
    """Algorithm 2 of Reddi et al. (2021), number by number."""
    updates = torch.randn(6, 1, 3, generator=torch.Generator().manual_seed(1)).double()
    found = stepped(kind(learning_rate=0.1, beta1=0.8, beta2=0.95, epsilon=0.01), updates)
    x, m, v = [0.0] * 3, [0.0] * 3, [1e-4] * 3
    for round, update in enumerate(updates[:, 0].tolist()):
        for i, d in enumerate(update):
            m[i] = 0.8 * m[i] + 0.2 * d
            sign = (v[i] > d * d) - (v[i] < d * d)
            v[i] = 0.95 * v[i] + 0.05 * d * d if kind is FedAdam else v[i] - 0.05 * d * d * sign
            x[i] += 0.1 * m[i] / (v[i] ** 0.5 + 0.01)
        torch.testing.assert_close(found[round][0], torch.tensor(x, dtype=torch.float64))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_without_updates_stays_and_other_shapes_begin_anew(name):
    (optimizer,) = strategies.build({name: None})
    updates = torch.ones(3, 2, 4)
    updates[1:, 1] = 0.0
    first, second, third = stepped(optimizer, updates)
    assert torch.equal(first[1], third[1]) and not torch.equal(second[0], third[0])
    (fresh,) = strategies.build({name: None})
    more = torch.ones(1, 3, 4)
    assert torch.equal(stepped(optimizer, more)[0], stepped(fresh, more)[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_with_noise_aware_weights(name, make_loop):
    """Unequal steps scale the sum, which the optimiser then receives."""
    (optimizer,) = strategies.build({name: None})
    received, step = [], optimizer.step
    loop = make_loop(blobs(records=40), parts=[NoiseAware(), optimizer], rounds=2)
    optimizer.__dict__["step"] = lambda *args: received.append(args[1]) or step(*args)
    result = loop.run()
    assert result.finished and len(received) == 2 and all(bool(one.isfinite().all()) for one in received)


@pytest.mark.parametrize("kind", [Median, TrimmedMean])
def test_a_robust_mean_is_not_scaled_by_weights_that_it_ignores(kind, make_loop):
    robust, scaled = kind(), []
    combined, combine = [], robust.combine
    robust.__dict__["combine"] = lambda *args: combined.append(combine(*args)) or combined[-1]
    base = NoiseAware()
    base.__dict__["scale"] = lambda *args: scaled.append(args)
    loop = make_loop(blobs(records=40), parts=[base, robust], rounds=1)
    before = loop.module.flat.clone()
    loop.run()
    assert not scaled
    torch.testing.assert_close(loop.state.models[0], before + combined[0][0])


def test_two_optimizers_are_refused(make_loop):
    with pytest.raises(UserError, match="`step` must be answered by one strategy, got FedAdam and ServerMomentum"):
        make_loop(parts=[SizeWeighted(), FedAdam(), ServerMomentum()])


def of(deltas):
    return ClientUpdates(
        tuple(range(len(deltas))), steps=(1,) * len(deltas), noise_std=(0.0,) * len(deltas), deltas=deltas
    )


def test_the_median_is_that_of_numpy_over_the_clients_of_each_model():
    deltas = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    weights = torch.tensor([[0.2] * 5, [0.5, 0.5, 0, 0, 0], [0.0] * 5])
    found = Median().combine(of(deltas), weights, None)
    expected = [deltas.quantile(0.5, dim=0), deltas[:2].mean(dim=0), torch.zeros(6)]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize(("share", "dropped"), [(0.0, 0), (0.1, 0), (0.2, 1), (0.4, 2), (0.49, 2)])
def test_a_trimmed_mean_drops_the_smallest_and_the_largest(share, dropped):
    deltas = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
    found = TrimmedMean(share).combine(of(deltas), torch.full((1, 5), 0.2), None)
    expected = torch.stack([column.sort().values[dropped : 5 - dropped].mean() for column in deltas.T])
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("strategy", [Median(), TrimmedMean(0.2)], ids=["median", "trimmed mean"])
def test_one_of_five_clients_cannot_carry_the_model_away(strategy):
    deltas = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    deltas[3] = 1e6
    assert strategy.combine(of(deltas), torch.full((1, 5), 0.2), None).abs().max() < 4


DIST2 = np.array([5.45, 1, 1.15, 0.2, 4.52, 4.88, 0.98, 0.2, 1.05, 0.93, 1, 0.21, 0.21, 1.27, 0.89, 1.17])


def setting(clients=6, params=40, public=3, seed=0):
    deltas = torch.randn(clients, params, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    weights = torch.arange(1, clients + 1, dtype=torch.float64)
    return deltas, weights / weights.sum(), torch.arange(clients) >= clients - public


def dense(deltas, weights, public, variant, components):
    """By dense P x P projections, one private client at a time."""
    mean, std = deltas[public].mean(0), deltas[public].std(0, correction=0)
    if variant == "liu_printed":
        shift, scale = torch.zeros_like(mean), torch.ones_like(mean)
        rows = (weights[public] @ deltas[public])[None]
    else:
        shift, scale = mean, std if variant == "hdpfl" else torch.ones_like(mean)
        rows = (deltas[public] - shift) / scale
    directions = torch.linalg.svd(rows, full_matrices=False).Vh[: min(components, len(rows))]
    projection = directions.T @ directions
    total = weights[public] @ deltas[public]
    for weight, delta in zip(weights[~public], deltas[~public], strict=True):
        total = total + weight * (projection @ ((delta - shift) / scale) * scale + shift)
    return total


@pytest.mark.parametrize("variant", ["liu_code", "liu_printed", "hdpfl"])
@pytest.mark.parametrize("components", [1, 2])
def test_the_gram_trick_is_the_dense_projection(variant, components):
    if variant == "liu_printed" and components > 1:
        return
    own = setting()
    expected = dense(*own, variant, components)
    torch.testing.assert_close(projected_mean(*own, variant, components), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("variant", ["liu_code", "hdpfl"])
def test_one_public_client_is_its_own_direction(variant):
    deltas, weights, public = setting(public=1)
    direction = deltas[-1] / deltas[-1].norm()
    private = weights[:-1] @ deltas[:-1]
    expected = weights[-1] * deltas[-1] + direction * (direction @ private)
    torch.testing.assert_close(projected_mean(deltas, weights, public, variant), expected)


@pytest.mark.parametrize("public", [0, 6])
def test_one_kind_alone_is_the_weighted_mean(public):
    deltas, weights, _ = setting()
    kind = torch.full((6,), public > 0)
    torch.testing.assert_close(projected_mean(deltas, weights, kind, "liu_code"), weights @ deltas)


def test_identical_public_updates_have_no_direction_but_a_mean():
    deltas, weights, public = setting()
    deltas[public] = deltas[-1].clone()
    torch.testing.assert_close(projected_mean(deltas, weights, public, "liu_code"), deltas[-1])


@pytest.mark.parametrize("grouping", ["mixture", "kmeans", "hierarchical"])
def test_groups_by_budget(grouping):
    assert np.flatnonzero(larger_budgets(DIST2, grouping, 0.1, 0)).tolist() == [0, 4, 5]


def test_top_budgets():
    assert np.flatnonzero(larger_budgets(DIST2, "top", 0.1, 0)).tolist() == [0, 5]
    assert np.flatnonzero(larger_budgets(np.array([1.0, 1.0, 1.0, 2.0]), "top", 0.1, 0)).tolist() == [3]
    assert larger_budgets(np.ones(4), "mixture", 0.1, 0).all()


def test_it_is_weiavg_when_all_claim_the_same(make_loop):
    def trained(name):
        privacy = PrivacyOptions(epsilon=5.0, delta=1e-3, noise_key=FIXED_KEY)
        loop = make_loop(parts=strategies.build({name: None}), privacy=privacy, rounds=2)
        loop.run()
        return loop.state.models

    torch.testing.assert_close(trained("pfa"), trained("epsilon_weighted"))
