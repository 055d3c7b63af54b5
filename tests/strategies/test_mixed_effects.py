"""The mixed-effects model: its formulas beside slow ones, what products of rounds show, and the strategy in runs."""

import numpy as np
import pytest
import torch
from torch import nn

from dpfl_lightning.algorithms.mixed_effects import (
    RoundProducts,
    blup_weights,
    layers_of,
    limited_weights,
    main_inputs,
)

rng = np.random.default_rng


def some_covariance(count, seed=0):
    """Of groups, and of what each client has alone."""
    columns = rng(seed).normal(size=(count, 2))
    return columns @ columns.T + np.diag(rng(seed).uniform(0.1, 0.5, count))


# ---- prediction


@pytest.mark.parametrize("clients", [range(6), (0, 2, 5)])
def test_weights_solve_hendersons_equations_and_no_others_predict_better(clients):
    covariance, noise = some_covariance(6), rng(1).uniform(0.2, 2.0, 6)[list(clients)]
    weights = blup_weights(covariance, noise, np.array(clients))
    design = np.eye(6)[list(clients)]  # Z, of the updates
    residual = np.diag(1 / noise)
    ones = np.ones((len(noise), 1))
    equations = np.block(
        [
            [ones.T @ residual @ ones, ones.T @ residual @ design],
            [design.T @ residual @ ones, design.T @ residual @ design + np.linalg.inv(covariance)],
        ]
    )
    solved = np.linalg.solve(equations, np.vstack([ones.T @ residual, design.T @ residual]))
    np.testing.assert_allclose(weights, solved[0] + solved[1:], atol=1e-10)

    def error(row, client):
        bias = row @ design - np.eye(6)[client]
        return row**2 @ noise + bias @ covariance @ bias

    for client, row in enumerate(weights):
        for step in rng(client).normal(size=(20, len(noise))):
            other = row + 0.1 * (step - step.mean())
            assert other.sum() == pytest.approx(1) and error(other, client) > error(row, client)


def test_weights_are_those_of_universal_kriging():
    """W = V^(1/2) (e e' + F) V^(-1/2), with F the shrinkage of each contrast between clients."""
    covariance, noise = some_covariance(5), rng(2).uniform(0.2, 2.0, 5)
    root = np.sqrt(noise)
    shared = (1 / root) / np.linalg.norm(1 / root)
    rest = np.linalg.svd(np.eye(5) - np.outer(shared, shared))[0][:, :4]
    ratio, vectors = np.linalg.eigh(rest.T @ (covariance / np.outer(root, root)) @ rest)
    contrasts = rest @ vectors
    shrinkage = contrasts * (ratio / (1 + ratio)) @ contrasts.T
    expected = root[:, None] * (np.outer(shared, shared) + shrinkage) / root
    np.testing.assert_allclose(blup_weights(covariance, noise, np.arange(5)), expected, atol=1e-10)


def test_weights_are_those_of_one_model_of_groups_and_of_local():
    noise, everyone = np.array([1.0, 2.0, 4.0, 4.0]), np.arange(4)
    share = 1 / noise / (1 / noise).sum()
    np.testing.assert_allclose(blup_weights(np.zeros((4, 4)), noise, everyone), np.tile(share, (4, 1)))
    group = np.array([1.0, 1.0, -1.0, -1.0])
    together = blup_weights(1e9 * np.outer(group, group), noise, everyone)
    expected = [[2 / 3, 1 / 3, 0, 0]] * 2 + [[0, 0, 0.5, 0.5]] * 2
    np.testing.assert_allclose(together, expected, atol=1e-6)
    np.testing.assert_allclose(blup_weights(1e9 * np.eye(4), noise, everyone), np.eye(4), atol=1e-6)


@pytest.mark.parametrize("largest", [0.25, 0.4])
def test_limits_hold_for_all_but_a_clients_own_update(largest):
    own = np.eye(12, dtype=bool)
    weights = blup_weights(0.1 * some_covariance(12), np.geomspace(0.01, 10, 12), np.arange(12))
    limited = limited_weights(weights, own, largest)
    assert np.abs(weights[~own]).max() > largest >= np.abs(limited[~own]).max() * (1 - 1e-6)
    np.testing.assert_allclose(limited.sum(axis=1), 1)
    np.testing.assert_allclose(limited_weights(limited, own, largest), limited)


# ---- products of rounds


def in_rounds(net, effects, noise, rounds, seed, taking_part=None):
    """Products of so many rounds of updates `effects + noise` [N, P] of a net."""
    count, draw = len(effects), torch.Generator().manual_seed(seed)
    products = RoundProducts(layers_of(dict(net.named_parameters())), count)
    for number in range(rounds):
        clients = np.arange(count) if taking_part is None else np.array(taking_part[number])
        std = torch.from_numpy(np.sqrt(noise[clients])).float()[:, None]
        products.add(
            effects[clients] + std * torch.randn(len(clients), effects.shape[1], generator=draw),
            noise[clients],
            clients,
        )
    return products


def test_products_of_different_rounds_are_added_up(monkeypatch):
    """Beside loops over pairs of rounds, clients that miss rounds included, without what all clients share."""
    monkeypatch.setattr(
        "dpfl_lightning.algorithms.mixed_effects.main_inputs", lambda sums, noise: torch.eye(sums.shape[2]).double()
    )
    count, noise = 4, np.array([1.0, 2.0, 3.0, 4.0])
    here = [[0, 1, 2, 3], [3, 1], [0, 2, 3], [1, 0]]
    drawn = [torch.randn(len(clients), 12, generator=torch.Generator().manual_seed(7)) for clients in here]
    products = RoundProducts(layers_of({"a.weight": torch.zeros(3, 4)}), count)
    for clients, updates in zip(here, drawn, strict=True):
        products.add(updates, noise[clients], np.array(clients))
    expected, pairs, variance = np.zeros((3, count, count))
    for now in range(1, len(here)):
        before = np.zeros((count, 12))
        for earlier in range(now):
            before[here[earlier]] += drawn[earlier].numpy()
        rounds = np.array([sum(client in clients for clients in here[:now]) for client in range(count)])
        mean = (before / noise[:, None]).sum(axis=0)
        apart = np.eye(12) - np.outer(mean, mean) / (mean @ mean)
        for row, i in enumerate(here[now]):
            for j in range(count):
                expected[i, j] += drawn[now][row].numpy() @ apart @ before[j]
                variance[i, j] += noise[i] * before[j] @ apart @ before[j]
                pairs[i, j] += 12 * rounds[j]
    for found, slow in ((products.products, expected), (products.variance, variance), (products.pairs, pairs)):
        np.testing.assert_allclose(found[0], slow, rtol=1e-4, atol=1e-5)


def test_main_inputs_are_singular_vectors_above_the_edge_of_noise():
    draw = torch.Generator().manual_seed(0)
    signal = torch.zeros(5)
    signal[2] = 1
    noise = torch.tensor([1.0, 4.0, 9.0])
    sums = torch.randn(3, 40, 5, generator=draw) * noise.sqrt()[:, None, None]
    assert main_inputs(sums, noise).shape[1] == 0
    for matrices in (sums, sums[:, :1]):  # more rows than columns, and fewer
        found = main_inputs(matrices + 30 * signal, noise)
        white = (matrices + 30 * signal) / noise.sqrt()[:, None, None]
        best = np.linalg.svd(white.flatten(0, 1).numpy())[2][0]
        assert found.shape == (5, 1) and abs(best @ found[:, 0].numpy()) == pytest.approx(1)


@pytest.fixture(scope="module")
def net():
    return nn.Sequential(nn.Linear(10, 12), nn.Linear(12, 4))


def effects_of(groups, net, between=0.3, alone=0.0, seed=0):
    """Mean gradients [N, P] of clients: of all, of each group, and of each client."""
    size, draw = sum(p.numel() for p in net.parameters()), torch.Generator().manual_seed(seed)
    drawn = torch.randn(max(groups) + 1, size, generator=draw)
    own = torch.randn(len(groups), size, generator=draw)
    return torch.randn(size, generator=draw) + between * drawn[list(groups)] + alone * own


NOISE = np.geomspace(0.3, 3.0, 12)


def test_clients_that_agree_hardly_ever_show_groups(net):
    effects = effects_of([0] * 12, net)
    found = [in_rounds(net, effects, NOISE, 5, seed).effects() for seed in range(100)]
    assert sum(one.contrasts.shape[1] > 0 for one in found) <= 5
    weights = [blup_weights(one.covariance[0], NOISE / 5, np.arange(12)) for one in found]
    assert np.mean([np.diag(one).mean() for one in weights]) < 0.2


def test_groups_and_single_clients_are_found_with_their_strengths(net):
    groups = np.array([0] * 5 + [1] * 4 + [2] * 3)
    found = in_rounds(net, effects_of(groups, net, between=1.0), NOISE, 8, seed=0).effects()
    assert found.contrasts.shape[1] == 2, "three groups"
    for covariance in found.covariance:
        weights = blup_weights(covariance, NOISE / 8, np.arange(12))
        own = np.array([row[groups == group].sum() for row, group in zip(weights, groups, strict=True)])
        assert own.min() > 0.8
    alone = in_rounds(net, effects_of([0] * 12, net, alone=1.0), NOISE, 8, seed=0).effects()
    for covariance in alone.covariance:
        assert np.diag(covariance).mean() == pytest.approx(11 / 12, rel=0.3)
        assert np.diag(blup_weights(covariance, NOISE / 8, np.arange(12))).min() > 0.6


def test_layers_are_matrices_of_every_kind_of_parameter():
    shapes = {
        "conv.weight": (8, 3, 3, 3),
        "conv.bias": (8,),
        "norm.weight": (8,),
        "norm.bias": (8,),
        "head.weight": (5, 8),
        "head.bias": (5,),
        "word.weight": (50, 8),
        "lora.a": (2, 8),
        "lora.b": (5, 2),
        "scale": (),
    }
    layers = layers_of({name: torch.zeros(shape) for name, shape in shapes.items()}, personal=["head.weight"])
    updates = torch.arange(2.0 * sum(int(np.prod(shape)) for shape in shapes.values())).view(2, -1)
    matrices = [layer.matrices(updates, 10**6) for layer in layers]
    expected = [(8, 28), (8, 2), (5, 1), (50, 8), (2, 8), (5, 2), (1, 1)]
    assert [tuple(one.shape[1:]) for one in matrices] == expected
    assert torch.equal(matrices[0][:, :, -1], updates[:, 216:224]), "a bias is one more input"
    assert sorted(np.concatenate([layer.places for layer in layers]).tolist()) == [
        *range(240),
        *range(280, updates.shape[1]),
    ]
    assert layers[3].matrices(updates, 40).shape == (2, 5, 8), "folded"
