"""Server optimisers, robust means and PFA, held to their formulas."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FIXED_KEY, blobs, small_net
from fakes import changed_releases
from scipy.optimize import minimize
from torch import nn

from dpfl_lightning import strategies
from dpfl_lightning.algorithms.cohorts import larger_budgets
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.models.model import Model
from dpfl_lightning.papers.baselines.pfa import Pfa
from dpfl_lightning.strategies.aggregation.fedadam import FedAdam
from dpfl_lightning.strategies.aggregation.fedyogi import FedYogi
from dpfl_lightning.strategies.aggregation.geometric_median import GeometricMedian
from dpfl_lightning.strategies.aggregation.median import Median
from dpfl_lightning.strategies.aggregation.multi_krum import MultiKrum
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware
from dpfl_lightning.strategies.aggregation.noise_floor import NoiseFloor, lowest_share
from dpfl_lightning.strategies.aggregation.norm_bound import NormBound
from dpfl_lightning.strategies.aggregation.server_momentum import ServerMomentum
from dpfl_lightning.strategies.aggregation.trimmed_mean import TrimmedMean
from experiments.papers.noise_aware.pfa import WholeUpdatePfa

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


def test_a_robust_mean_is_not_scaled_by_weights_that_it_ignores(make_loop):
    robust, scaled = Median(), []
    combined, combine = [], robust.combine
    robust.__dict__["combine"] = lambda *args: combined.append(combine(*args)) or combined[-1]
    base = NoiseAware()
    base.__dict__["scale"] = lambda *args: scaled.append(args)
    loop = make_loop(blobs(records=40), parts=[base, robust], rounds=1)
    before = loop.module.flat.clone()
    loop.run()
    assert not scaled
    torch.testing.assert_close(loop.state.models[0], before + combined[0][0])


def of(deltas):
    return ClientUpdates(
        tuple(range(len(deltas))),
        steps=(1,) * len(deltas),
        noise_std=(0.0,) * len(deltas),
        deltas=deltas,
        model_of=(0,) * len(deltas),
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


ROBUST = [GeometricMedian(), Median(), NormBound(), TrimmedMean(0.2)]


@pytest.mark.parametrize("strategy", ROBUST, ids=lambda strategy: type(strategy).__name__)
@pytest.mark.parametrize("size", [1e6, 1e30])
def test_one_of_five_clients_cannot_carry_the_model_away(strategy, size):
    deltas = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    deltas[3] = size
    found = strategy.combine(of(deltas), torch.full((1, 5), 0.2), None)
    assert found.dtype == deltas.dtype and found.abs().max() < 4


@pytest.mark.parametrize("spread", [0.0, 1e6, 1e30])
def test_many_clients_with_little_weight_cannot_carry_the_geometric_median_away(spread):
    deltas = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    deltas[2:] = 1e6 + spread * deltas[2:]
    found = GeometricMedian().combine(of(deltas), torch.tensor([[0.45, 0.45, 0.04, 0.03, 0.03]]), None)
    assert found.abs().max() < 4


def test_the_geometric_median_has_the_smallest_sum_of_distances():
    deltas = torch.randn(7, 4, generator=torch.Generator().manual_seed(5)).double()
    weights = torch.tensor([0.3, 0.1, 0.1, 0.2, 0.1, 0.2, 0.0]).double()
    found = GeometricMedian().combine(of(deltas.view(7, 2, 2)), weights[None], None)
    best = minimize(lambda x: float(weights @ (deltas - torch.from_numpy(x)).norm(dim=1)), deltas.mean(0), tol=1e-12)
    assert found.shape == (1, 2, 2)
    np.testing.assert_allclose(found.flatten(), best.x, atol=1e-4)


@pytest.mark.parametrize("equal", [1, 3, 5])
def test_the_geometric_median_of_equal_updates_is_that_update(equal):
    deltas = torch.randn(5, 4, generator=torch.Generator().manual_seed(6))
    deltas[:equal] = 2.0
    found = GeometricMedian().combine(of(deltas), torch.full((1, 5), 0.2), None)
    assert bool(found.isfinite().all())
    if equal > 1:
        torch.testing.assert_close(found[0], deltas[0], atol=1e-4, rtol=0)


def test_a_norm_bound_shortens_only_updates_above_the_median_length():
    deltas = torch.tensor([[1.0, 0.0], [0.0, 2.0], [8.0, 0.0]])
    weights = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    found = NormBound().combine(of(deltas), weights, None)
    torch.testing.assert_close(found, torch.tensor([[0.5 + 0.25 * 2, 0.5], [1.0, 0.0]]))
    torch.testing.assert_close(NormBound(0.5).combine(of(deltas), weights, None)[0], torch.tensor([0.75, 0.25]))


def krum(deltas, left_out):
    """Blanchard et al. (2017), Section 4, client by client: the clients that are kept."""
    scores = []
    for one in deltas:
        distances = sorted(float((one - other).square().sum()) for other in deltas)[1:]
        scores.append(sum(distances[: len(deltas) - left_out - 2]))
    return sorted(range(len(deltas)), key=scores.__getitem__)[: len(deltas) - left_out]


@pytest.mark.parametrize(("share", "left_out"), [(0.0, 0), (0.2, 2), (0.3, 3), (0.49, 4)])
def test_multi_krum_is_that_of_the_paper(share, left_out):
    deltas = torch.randn(10, 6, generator=torch.Generator().manual_seed(7)).double()
    deltas[8:] *= 5
    found = MultiKrum(share).weigh(of(deltas), None)
    expected = krum(deltas, left_out) if left_out else range(10)
    assert found.nonzero().flatten().tolist() == sorted(expected)


def test_multi_krum_judges_the_clients_of_each_model_alone_and_keeps_few():
    deltas = torch.cat([torch.zeros(5, 3), torch.full((5, 3), 9.0)]) + torch.eye(10, 3)
    deltas[2] += 4
    updates = dataclasses.replace(of(deltas), model_of=(0,) * 5 + (1,) * 5)
    kept = MultiKrum(0.2).weigh(updates, None)
    assert kept[2] == 0 and kept[:5].sum() == 4 and kept[5:].sum() == 4
    assert MultiKrum(0.4).weigh(of(deltas[:3]), None).tolist() == [1, 1, 1]


def of_2000(personal=()):
    """A model of 2,000 parameters, of which the last 1,000 are `1.weight`."""
    net = nn.Sequential(nn.Linear(10, 100, bias=False), nn.Linear(100, 10, bias=False))
    return Model(net, personal=personal)


def test_updates_below_the_noise_floor_are_left_out_and_no_weight_is_raised():
    generator = torch.Generator().manual_seed(8)
    std = torch.tensor([0.1, 0.1, 1.0, 1.0, 0.0])
    deltas = std[:, None] * torch.randn(5, 2000, generator=generator)
    deltas[1] *= 0.5  # announces more noise than it has
    deltas[2] += 1.0
    updates = dataclasses.replace(of(deltas), noise_std=tuple(std.tolist()))
    floor, view = NoiseFloor(), SimpleNamespace(module=of_2000())
    assert floor.weigh(updates, view).tolist() == [1, 0, 1, 1, 1]
    assert floor.metrics(None) == {"below_noise_floor": 1.0}


@pytest.mark.parametrize("name", ["trimmed_mean", "multi_krum"])
def test_a_share_of_less_than_one_client_is_told(name, make_loop):
    with pytest.warns(UserNotice, match=f"strategies.{name}.share 0.2 of 4 clients is less than one client"):
        make_loop(parts=strategies.build({"size_weighted": None, name: {"share": 0.2}})).run()


def test_a_noise_floor_that_leaves_out_every_client_says_so():
    updates = dataclasses.replace(of(torch.full((3, 2000), 0.1)), noise_std=(1.0,) * 3)
    view = SimpleNamespace(module=of_2000(), round=4)
    with pytest.warns(UserNotice, match="round 4: noise_floor left out every client"):
        assert NoiseFloor().weigh(updates, view).tolist() == [0, 0, 0]


def test_no_client_raises_the_noise_floor_of_others_by_personal_parameters():
    """Honest updates are zero there; one that is not would make all others seem too short for their noise."""
    deltas = torch.randn(4, 2000, generator=torch.Generator().manual_seed(10))
    mask = torch.arange(2000) >= 1000
    deltas[:, mask] = 0.0
    deltas[0] = mask * 9.0
    view = SimpleNamespace(module=of_2000(personal=("1.weight",)))
    updates = dataclasses.replace(of(deltas), noise_std=(1.0,) * 4)
    assert NoiseFloor().weigh(updates, view).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_false_update_of_personal_parameters_does_not_reach_the_model(streamed, make_loop):
    """The server's are the start of clients that join later."""
    rules = {"size_weighted": None, **({} if streamed else {"noise_floor": None})}
    net = small_net()
    name = next(iter(dict(net.named_parameters())))
    module = ClientModule(net, personal=[name])
    loop = make_loop(module=module, parts=strategies.build(rules))
    mask = module.personal_mask
    changed_releases(loop, lambda round, client, delta: delta.masked_fill(mask, 9.0))
    before = module.flat
    loop.run()
    model = loop.state.models[0]
    assert torch.equal(model[mask], before[mask]) and not torch.equal(model[~mask], before[~mask])


@pytest.mark.parametrize("laplace", [False, True])
def test_the_noise_floor_holds_for_both_kinds_of_noise(laplace):
    rng = np.random.default_rng(9)
    draws = rng.laplace(scale=0.5**0.5, size=(20_000, 50)) if laplace else rng.normal(size=(20_000, 50))
    below = (np.square(draws).mean(axis=1) < lowest_share(50, 0.05)).mean()
    assert lowest_share(50, 0.05) > 0.1 and below <= 0.05


@pytest.mark.parametrize("name", ["fedprox", "mr_mtl"])
def test_a_noise_floor_is_refused_beside_a_pull(name, make_loop):
    with pytest.raises(
        UserError, match=f"for one job .* got {name}, for which clients train with a proximal term, beside noise_floor"
    ):
        make_loop(parts=strategies.build({"size_weighted": None, name: None, "noise_floor": None}))


def test_a_noise_floor_is_refused_beside_weight_decay(make_loop):
    """After many steps it would leave out all honest clients: the noise of early steps has shrunk."""
    decaying = ClientOptions(count=4, batch_size=16, optimizer={"name": "sgd", "weight_decay": 0.01})
    loop = make_loop(parts=strategies.build({"size_weighted": None, "noise_floor": None}), clients=decaying)
    with pytest.raises(UserError, match=r"`clients.optimizer.weight_decay` must be 0 with noise_floor, got 0.01"):
        loop.plan_schedule()


DIST2 = np.array([5.45, 1, 1.15, 0.2, 4.52, 4.88, 0.98, 0.2, 1.05, 0.93, 1, 0.21, 0.21, 1.27, 0.89, 1.17])


def combined(deltas, weights, public, kind=Pfa, **options):
    """PFA's updates `[K, P]` of the models of `small_net`, if the `public` clients claim the larger budgets."""
    pfa = kind(grouping="kmeans", **options)
    facts = SimpleNamespace(reported_epsilon=[8.0 if one else 1.0 for one in public])
    view = SimpleNamespace(facts=facts, seed=0, module=Model(small_net()))
    pfa.plan_run(None, view)
    return pfa.combine(of(deltas), weights, view)


def dense(deltas, weights, public, kind, components):
    """The update of one model, by a P x P projection of each private client's update of each tensor."""
    count = [one.numel() for one in small_net().parameters()] if kind is Pfa else [deltas.shape[1]]
    takes_part = weights > 0
    deltas, weights, public = deltas[takes_part], weights[takes_part], public[takes_part]
    if public.all() or not public.any():
        return weights @ deltas
    parts = []
    for part in deltas.split(count, dim=1):
        shift, scale = torch.zeros(part.shape[1]), torch.ones(part.shape[1])
        rows = part[public]
        if public.sum() > 1:
            shift = part[public].mean(0)
            scale = scale if kind is Pfa else part[public].std(0, correction=0)
            rows = (part[public] - shift) / scale
        directions = torch.linalg.svd(rows, full_matrices=False).Vh[:components]
        total = weights[public] @ part[public]
        for weight, delta in zip(weights[~public], part[~public], strict=True):
            total = total + weight * (directions.T @ (directions @ ((delta - shift) / scale)) * scale + shift)
        parts.append(total)
    return torch.cat(parts)


@pytest.mark.parametrize("kind", [Pfa, WholeUpdatePfa])
@pytest.mark.parametrize("components", [1, 2])
def test_pfa_is_the_dense_projection_for_the_clients_of_each_model(kind, components):
    deltas = torch.randn(8, 83, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    public = torch.tensor([False, False, False, True, True, True, True, False])
    weights = torch.tensor(
        [
            [0.1, 0.2, 0.1, 0.1, 0.1, 0.2, 0.1, 0.1],
            [0.0, 0.3, 0.2, 0.0, 0.1, 0.2, 0.2, 0.0],
            [0.2, 0.0, 0.3, 0.5, 0.0, 0.0, 0.0, 0.0],  # one public client
            [0.1, 0.6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.3],  # private clients alone
            [0.0, 0.0, 0.0, 0.5, 0.0, 0.1, 0.4, 0.0],  # public clients alone
            [0.0] * 8,
        ],
        dtype=torch.float64,
    )
    expected = torch.stack([dense(deltas, row, public, kind, components) for row in weights])
    found = combined(deltas, weights, public, kind, components=components)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_identical_public_updates_have_no_direction_but_a_mean():
    deltas = torch.randn(6, 83, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    public = torch.arange(6) >= 3
    deltas[public] = deltas[-1].clone()
    weights = torch.full((1, 6), 1 / 6, dtype=torch.float64)
    torch.testing.assert_close(combined(deltas, weights, public)[0], deltas[-1])


@pytest.mark.parametrize("grouping", ["mixture", "kmeans", "hierarchical"])
def test_a_share_of_clients_is_refused_where_budgets_group_them(grouping):
    with pytest.raises(UserError, match=rf"pfa\.top_fraction` must be null with grouping {grouping}, got 0.1\. .*top"):
        Pfa(grouping=grouping, top_fraction=0.1)


@pytest.mark.parametrize("grouping", ["mixture", "kmeans", "hierarchical"])
def test_groups_by_budget(grouping):
    assert np.flatnonzero(larger_budgets(DIST2, grouping, 0.1, 0)).tolist() == [0, 4, 5]


def test_top_budgets():
    assert np.flatnonzero(larger_budgets(DIST2, "top", 0.1, 0)).tolist() == [0, 5]
    assert np.flatnonzero(larger_budgets(np.array([1.0, 1.0, 1.0, 2.0]), "top", 0.1, 0)).tolist() == [3]
    assert larger_budgets(np.ones(4), "mixture", 0.1, 0).all()


@pytest.mark.e2e
def test_it_is_weiavg_when_all_claim_the_same(make_loop):
    def trained(name):
        privacy = PrivacyOptions(epsilon=5.0, delta=1e-3, noise_key=FIXED_KEY)
        loop = make_loop(parts=strategies.build({name: None}), privacy=privacy, rounds=2)
        loop.run()
        return loop.state.models

    torch.testing.assert_close(trained("pfa"), trained("epsilon_weighted"))
