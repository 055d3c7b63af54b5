"""The mixed-effects model: its formulas beside slow ones, what products of rounds show, and the strategy in runs."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import private
from fakes import Absent, Recorder
from safetensors.torch import load_file
from torch import nn

from dpfl_lightning.algorithms.mixed_effects import (
    RoundProducts,
    blup_weights,
    layers_of,
    limited_weights,
    main_inputs,
)
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware
from dpfl_lightning.strategies.clustering.mixed_effects import MixedEffects

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
    count, draw = len(effects), torch.Generator().manual_seed(1000 + seed)  # other numbers than those of effects
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


@pytest.mark.parametrize("kind", ["each", "dose"])
@pytest.mark.parametrize("size", [0.08, 0.11, 0.15, 0.3])
def test_clients_that_differ_by_one_gaussian_form_no_groups(kind, size):
    """Each for itself, or all along one line, up to where differences are plain."""
    layer, named = nn.Linear(39, 10), []
    for seed in range(12):
        draw = torch.Generator().manual_seed(seed)
        if kind == "each":
            own = size * torch.randn(15, 400, generator=draw)
        else:
            along = nn.functional.normalize(torch.randn(400, generator=draw), dim=0)
            own = 100 * size**2 * torch.randn(15, 1, generator=draw) * along
        effects = 0.5 * torch.randn(400, generator=draw) + own
        named.append(len(in_rounds(layer, effects, np.ones(15), 20, seed).effects().groups()) > 1)
    assert sum(named) <= 1


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
    expected, pairs, variance, later = np.zeros((4, count, count))
    for now in range(1, len(here)):
        before = np.zeros((count, 12))
        for earlier in range(now):
            before[here[earlier]] += drawn[earlier].numpy()
        rounds = np.array([sum(client in clients for clients in here[:now]) for client in range(count)])
        mean = (before / noise[:, None]).sum(axis=0)
        without = lambda one, mean=mean: one - max(one @ mean, 0) / (mean @ mean) * mean  # noqa: E731
        for row, i in enumerate(here[now]):
            for j in range(count):
                expected[i, j] += without(drawn[now][row].numpy()) @ without(before[j])
                variance[i, j] += noise[i] * (without(before[j]) ** 2).sum()
                pairs[i, j] += 12 * rounds[j]
                later[i, j] += rounds[j]
    np.testing.assert_array_equal(products.later, later)
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


@pytest.mark.parametrize("most", [1 << 25, 12 * 2000])
def test_layers_that_are_folded_keep_the_variance_of_noise(most, monkeypatch):
    """1,501 inputs do not fill sums of 1,024 evenly; of the second limit outputs are folded, too."""
    monkeypatch.setattr("dpfl_lightning.algorithms.mixed_effects._KEPT", most)
    wide = nn.Linear(1500, 10)
    products = in_rounds(wide, torch.zeros(12, 15010), NOISE, 6, seed=0)
    assert products.sums[0].shape[1:] in ((10, 1024), (1, 1024))
    assert products.pairs.max() <= 100, "noise has no main inputs, but for chance"
    monkeypatch.setattr(
        "dpfl_lightning.algorithms.mixed_effects.main_inputs", lambda sums, noise: torch.eye(sums.shape[2]).double()
    )
    products = in_rounds(wide, torch.zeros(12, 15010), NOISE, 6, seed=0)
    off = ~np.eye(12, dtype=bool)
    assert (products.products[0][off] ** 2 / products.variance[0][off]).mean() == pytest.approx(1, abs=0.35)
    effects = effects_of([0] * 12, wide, alone=1.0)
    found = in_rounds(wide, effects, NOISE, 6, seed=0).effects().variance
    assert found == pytest.approx(float(effects.var(dim=0).sum()), rel=0.15), "of all numbers, folded or not"


def test_a_client_that_was_not_seen_twice_is_taken_to_differ_as_much_as_others():
    layer, clients = nn.Linear(39, 10), [[*range(12)]] * 8
    clients[-1] = [*range(13)]
    effects = effects_of([0] * 13, layer, alone=1.0)
    (covariance,) = in_rounds(layer, effects, np.ones(13), 8, 0, clients).effects().covariance
    assert covariance[12, 12] == pytest.approx(covariance.diagonal()[:12].mean()) and covariance[12, 12] > 0.5
    assert not covariance[12, :12].any() and not covariance[:12, 12].any()


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


def of_clients(view, count, clip_norm=1e-6):
    """The view of a run of so many clients, with 100 records each."""
    facts = dataclasses.replace(view.facts, num_records=(100,) * count)
    return dataclasses.replace(view, facts=facts, clip_norm=(clip_norm,) * count)


def test_clients_that_agree_hardly_ever_show_groups(net):
    effects = effects_of([0] * 12, net)
    found = [in_rounds(net, effects, NOISE, 5, seed).effects() for seed in range(100)]
    assert sum(one.positions.shape[1] > 0 for one in found) <= 5
    weights = [blup_weights(one.covariance[0], NOISE / 5, np.arange(12)) for one in found]
    assert np.mean([np.diag(one).mean() for one in weights]) < 0.2


def test_groups_and_single_clients_are_found_with_their_strengths(net):
    groups = np.array([0] * 5 + [1] * 4 + [2] * 3)
    found = in_rounds(net, effects_of(groups, net, between=1.0), NOISE, 8, seed=0).effects()
    assert [group.tolist() for group in found.groups()] == [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]
    for covariance in found.covariance:
        weights = blup_weights(covariance, NOISE / 8, np.arange(12))
        own = np.array([row[groups == group].sum() for row, group in zip(weights, groups, strict=True)])
        assert own.min() > 0.8
    alone = in_rounds(net, effects_of([0] * 12, net, alone=1.0), NOISE, 8, seed=0).effects()
    for covariance in alone.covariance:
        assert np.diag(covariance).mean() == pytest.approx(11 / 12, rel=0.3)
        assert np.diag(blup_weights(covariance, NOISE / 8, np.arange(12))).min() > 0.45


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


@pytest.mark.parametrize(
    ("groups", "alone", "words"),
    [
        ([0] * 12, 0.0, "no differences"),
        ([0] * 12, 0.2, "few differences between clients: a client's own updates have 2"),
        ([0] * 3, 0.0, "no differences"),
        ([0] * 6 + [1] * 6, 0.0, "2 groups of clients: 0, 1, 2, 3, 4, 5; 6, 7, 8, 9, 10, 11."),
        ([0, 0, 1, 1], 0.0, "2 groups of clients: 0, 1; 2, 3."),
        ([0] * 10 + [1] * 2, 0.0, "2 groups of clients: 0, 1, 2, 3, 4, 5, and 4 others; 10, 11."),
        ([0, 1, 2, 3] * 3, 0.0, "4 groups of clients: 0, 4, 8; 1, 5, 9; 2, 6, 10; 3, 7, 11."),
        ([0] * 5 + [1] * 4 + [2] * 3, 0.0, "3 groups of clients"),
        ([0] * 12, 1.0, "no groups: a client's own updates have 85% of the weight"),
        ([0] * 4, 1.0, "have 90% of the weight"),
        (range(8), 0.0, "have 87% of the weight"),
    ],
)
def test_a_run_says_in_words_how_much_its_clients_differ(groups, alone, words, net, view):
    strategy, noise = MixedEffects(), np.geomspace(0.5, 2.0, len(groups))
    strategy._products = in_rounds(net, effects_of(groups, net, between=1.0, alone=alone), noise, 6, seed=0)
    (sentence,) = strategy.remarks(of_clients(view, len(groups)))
    assert words in sentence
    embedding = strategy.client_embedding(of_clients(view, len(groups)))
    assert (embedding is None) == ("no differences" in words or "few differences" in words)
    if "groups of clients" in words:
        assert embedding.num_clusters == int(words[0]) and embedding.confident and len(embedding.points) == len(groups)


@pytest.mark.e2e
def test_differences_that_small_random_samples_may_have_lead_to_no_advice(net, view):
    """Unless they form groups, which independent samples do not."""
    few, many = of_clients(view, 12, clip_norm=1e6), of_clients(view, 12)
    for strategy, small in ((NoiseAware(), True), (NoiseAware(noise="estimated"), False), (MixedEffects(), False)):
        strategy._products = in_rounds(net, effects_of([0] * 12, net, alone=1.0), np.ones(12), 6, seed=0)
        (of_few,), (of_many,) = strategy.remarks(few), strategy.remarks(many)
        assert ("no more than random samples" in of_few) == small and "differ, and no groups" in of_many
        assert (strategy.client_embedding(few) is None) == small
        groups = effects_of([0] * 6 + [1] * 6, net, between=1.0)
        strategy._products = in_rounds(net, groups, np.ones(12), 6, seed=0)
        assert "2 groups" in strategy.remarks(few)[0] and strategy.client_embedding(few).num_clusters == 2


@pytest.mark.parametrize(
    ("groups", "between", "alone", "noise"),
    [
        *(([0, 1, 2, 3] * 5, 0.2, 0.0, [ratio**2] + [1] * 19) for ratio in (0.3, 1, 10, 100)),
        *(([0] * 20, 0.0, 0.5, [ratio**2] + [1] * 19) for ratio in (0.3, 1, 10, 100)),
        ([0, 1, 2, 3] * 5, 0.2, 0.0, [100] * 5 + [1] * 15),
        ([0] * 12, 0.0, 3.0, [0.01] * 6 + [1] * 6),
    ],
)
def test_no_client_is_worse_off_than_with_the_mean_of_all_or_alone(groups, between, alone, noise):
    """By more than a third of the squared error, however much noise it has, and others."""
    layer, noise, every, wrong = nn.Linear(39, 10), np.array(noise, dtype=float), np.arange(len(groups)), 0.0
    for seed in range(4):
        effects = effects_of(groups, layer, between=between, alone=alone, seed=seed)
        (covariance,) = in_rounds(layer, effects, noise, 10, seed).effects().covariance
        mean = np.tile(1 / noise / (1 / noise).sum(), (len(groups), 1))
        for weights in (ways := (blup_weights(covariance, noise / 10, every), mean, np.eye(len(groups)))):
            bias = (weights @ effects.double().numpy() - effects.double().numpy()) ** 2
            weights[:] = weights**2 * noise / 10 * bias.shape[1] + bias.sum(axis=1)[:, None] / len(groups)
        wrong = wrong + np.stack([one.sum(axis=1) for one in ways])
    assert (wrong[0] < 4 / 3 * wrong[1:].min(axis=0)).all(), wrong.round(1)


def test_groups_that_models_have_come_to_fit_are_still_reported_after_a_resume(net, view, tmp_path):
    first, resumed, view = MixedEffects(), MixedEffects(), of_clients(view, 12)
    first._products = in_rounds(net, effects_of([0] * 6 + [1] * 6, net, between=1.0), np.ones(12), 6, seed=0)
    sentence, embedding = first.remarks(view), first.client_embedding(view)
    first._products = in_rounds(net, effects_of([0] * 12, net), np.ones(12), 6, seed=0)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for strategy in (first, resumed):
        assert strategy.remarks(view) == sentence and "2 groups" in sentence[0]
        assert strategy.client_embedding(view) == embedding and embedding.num_clusters == 2


# ---- the strategy


def moved(view, net, updates, **more):
    """By how much the strategy moves each model in the first round; updates `[C, P]` are of one step of length 1."""
    count = view.facts.num_clients
    view = dataclasses.replace(
        view,
        module=ClientModule(net, **more),
        state=ServerState(torch.zeros(count, updates.shape[1]), tuple(range(count))),
        learning_rate=(1.0,) * count,
    )
    clients = tuple(range(len(updates)))
    seen = ClientUpdates(clients, (1,) * len(updates), (0.1,) * len(updates), updates, model_of=clients)
    strategy = MixedEffects()
    return strategy.combine(seen, torch.eye(count)[:, : len(updates)], view), strategy


def test_in_the_first_round_all_models_move_by_the_mean_of_those_that_do_not_point_away(view, net):
    size = sum(p.numel() for p in net.parameters())
    updates = 0.01 * torch.randn(4, size, generator=torch.Generator().manual_seed(0)) + 0.1
    found, _ = moved(view, net, updates[:3])
    torch.testing.assert_close(found, updates[:3].mean(0).expand(4, -1))  # also of the client without an update
    updates[1] *= -1
    found, _ = moved(view, net, updates)
    honest = [0, 2, 3]
    torch.testing.assert_close(found[honest], updates[honest].mean(0).expand(3, -1))
    assert not torch.equal(found[1], found[0])


def test_what_a_client_sends_for_personal_parameters_or_much_too_long_counts_for_no_other(view, net):
    size = sum(p.numel() for p in net.parameters())
    updates = 0.1 * torch.randn(4, size, generator=torch.Generator().manual_seed(0)) + 0.1
    honest, _ = moved(view, net, updates, personal=["0.weight"])
    updates[0, :120] = 99
    again, _ = moved(view, net, updates, personal=["0.weight"])
    assert torch.equal(honest, again) and not honest[:, :120].any() and honest[:, 120:].all()
    updates[0, 120:] = 1e5 * torch.randn(size - 120, generator=torch.Generator().manual_seed(1))
    assert float(moved(view, net, updates)[0][1:].norm(dim=1).max()) < 2 * float(honest.norm(dim=1).max())


@pytest.mark.e2e
@pytest.mark.parametrize("absent", [{}, {2: (0, 5), 3: (1, 2, 7), 5: (4,)}], ids=["all", "drop-outs"])
def test_clients_with_other_labels_get_models_of_their_own(absent, make_loop):
    """Four of eight clients have exchanged labels, so that one model is wrong for half of the records."""
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(3, 6, generator=generator)

    def draw(client):
        y = torch.randint(3, (200,), generator=generator)
        return centres[y] + torch.randn(200, 6, generator=generator), (y + (client >= 4)) % 3

    loop = make_loop(
        Population.from_datasets([draw(client) for client in range(8)], held_out=0.25, num_classes=3),
        parts=[MixedEffects(), Absent(absent)],
        clients=ClientOptions(count=8, batch_size=25, learning_rate=0.3),
        privacy=private(None, noise_multiplier=0.8),
        rounds=8,
    )
    result = loop.run()
    assert result.headline_worst > 0.8 and result.metrics["group"] == [0.0] * 4 + [1.0] * 4
    assert result.remarks == ("The updates show 2 groups of clients: 0, 1, 2, 3; 4, 5, 6, 7.",)
    assert result.client_embedding.cluster == (0, 0, 0, 0, 1, 1, 1, 1)
    flat = torch.cat([one.flatten() for one in result.model.parameters()])
    torch.testing.assert_close(flat, loop.state.models.mean(dim=0))
    saved = load_file(loop.output_dir / "model.safetensors")
    assert torch.equal(saved["0.bias"], result.model[0].bias) and (loop.output_dir / "model_7.safetensors").is_file()


def test_without_noise_every_client_trains_alone(make_loop):
    make_loop(parts=[MixedEffects(), seen := Recorder(updates=True)], privacy=None, rounds=2).run()
    torch.testing.assert_close(seen.models[1] - seen.models[0], seen.updates[1].deltas)


def test_a_thousand_clients_share_products_of_layers_and_folded_sums(monkeypatch, net):
    monkeypatch.setattr("dpfl_lightning.algorithms.mixed_effects._PRODUCTS", 150)
    monkeypatch.setattr("dpfl_lightning.algorithms.mixed_effects._KEPT", 12 * 60)
    products = in_rounds(net, effects_of([0] * 6 + [1] * 6, net, between=2.0), np.ones(12), 6, seed=0)
    assert products.products.shape == (1, 12, 12) and sum(one[0].numel() for one in products.sums) <= 60
    assert sorted(products.columns_of(0).tolist()) == list(range(184))
    assert [group.tolist() for group in products.effects().groups()] == [[*range(6)], [*range(6, 12)]]


@pytest.mark.e2e
def test_more_clients_than_numbers_show_their_groups_and_no_others(net):
    """Products of noise are then far from a Wigner matrix."""
    groups, noise = np.arange(200) % 4, np.full(200, 9.0)
    found = in_rounds(net, effects_of(groups, net, between=1.0), noise, 4, seed=0).effects()
    assert found.positions.shape[1] == 3
    assert [group.tolist() for group in found.groups()] == [np.flatnonzero(groups == one).tolist() for one in range(4)]
    assert in_rounds(net, effects_of(0 * groups, net), noise, 4, seed=0).effects().positions.shape[1] == 0
