"""Whole runs against plain transcriptions of the papers' boxes, client by client: Robust-HDP, RC-DPFL and f-CDPFL.

With noise the noisy updates, lines of DPSGD, are those of the run, and all else is computed here. Without noise the
local steps are computed here, too.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import reference
import torch
from conftest import blobs, private
from fakes import Recorder
from sklearn.decomposition import PCA
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from strategies.test_clustered import COUNT, UNEQUAL, kinds_of_clients
from torch import nn
from torch.nn.functional import cross_entropy

from dpfl_lightning.algorithms.server_training import public_generator
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.papers.baselines.ifca import Ifca
from dpfl_lightning.papers.clustered.clustered import Clustered
from dpfl_lightning.papers.robust_hdp import noise_estimators
from dpfl_lightning.papers.robust_hdp.robust_hdp import RobustHdp
from dpfl_lightning.papers.robust_hdp.robust_pca import PcpSettings
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted

RATE, EPOCHS = 0.5, 2
Dpsgd = Callable[[int, int, np.ndarray], np.ndarray]  # (round, client, its model) -> its update


def own_records(population, client):
    rows = population.train_of[client]
    return population.x[rows], population.y[rows]


def of_the_run(seen: Recorder) -> Dpsgd:
    """The noisy updates that arrived."""
    return lambda e, i, theta: seen.updates[e - 1].deltas[seen.updates[e - 1].clients.index(i)].double().numpy()


def full_batches(net, population) -> Dpsgd:
    """Equation 1 with z = 0, no clipping and b = N_i: one step in each of K epochs."""

    def step(e: int, i: int, theta: np.ndarray) -> np.ndarray:
        batch, start = own_records(population, i), torch.from_numpy(theta).float()
        moved = reference.fedavg_round(net, start, [[batch] * EPOCHS], [RATE], [len(batch[1])], [1.0])
        return (moved - start).double().numpy()

    return step


def mean_loss(net, population, client: int, theta: np.ndarray) -> float:
    """f_i(theta), over the client's training records."""
    torch.nn.utils.vector_to_parameters(torch.from_numpy(theta).float(), net.parameters())
    x, y = own_records(population, client)
    return float(cross_entropy(net(x), y).detach())


# ---- Robust-HDP


def algorithm_1(theta: np.ndarray, rounds: int, clients: int, dpsgd: Dpsgd) -> tuple[np.ndarray, list[np.ndarray]]:
    """Lines 7 to 11 of each round, with Algorithm 3 until L + S = M to 1e-9: theta^E, and the weights."""
    weights = []
    for e in range(1, rounds + 1):
        matrix = np.stack([dpsgd(e, i, theta) for i in range(clients)], axis=1)  # line 7, [p, n]
        mu = matrix.size / (4 * np.abs(matrix).sum())
        low, noise, _ = reference.principal_component_pursuit(matrix, mu, 3000)  # line 8
        assert np.linalg.norm(matrix - low - noise) <= 1e-9 * np.linalg.norm(matrix)
        variance = [sum(entry**2 for entry in noise[:, i]) for i in range(clients)]  # line 9
        share = [(1 / one) / sum(1 / other for other in variance) for one in variance]  # line 10
        theta = theta + sum(share[i] * matrix[:, i] for i in range(clients))  # line 11
        weights.append(np.array(share))
    return theta, weights


#: the default, which stops early, and one that goes on to the solution
STOPS = {"early": PcpSettings(), "at the solution": PcpSettings(1.0, 1e-10, math.inf, 0.0, 5000, double=True)}


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:strategy robust_hdp.*clients count:UserWarning")
@pytest.mark.parametrize(("stop", "within"), [("early", 0.02), ("at the solution", 1e-6)])
def test_robust_hdp_is_algorithm_1(stop, within, make_loop, monkeypatch):
    """`within` is of the weights, in total variation; they are used in float32."""
    solver = functools.partial(noise_estimators.robust_pca, settings=STOPS[stop])
    monkeypatch.setattr(noise_estimators, "robust_pca", solver)
    count, rounds, seen = 8, 3, Recorder(updates=True)
    loop = make_loop(
        blobs(num_clients=count, records=60),
        privacy=private([2.0, 16.0, 4.0, 8.0, 1.0, 16.0, 8.0, 4.0]),
        clients=ClientOptions(count=count, batch_size=[8, 16, 32, 16, 8, 32, 8, 16], learning_rate=0.3),
        parts=[RobustHdp("rpca", row_choice="head"), seen],
        rounds=rounds,
    )
    start = loop.module.flat.double().numpy()
    loop.run()
    theta, weights = algorithm_1(start, rounds, count, of_the_run(seen))
    for report, share in zip(seen.reports, weights, strict=True):
        assert share.max() > 2 / count, "clients with less noise count more"
        assert np.abs(report.weights[0].numpy() - share).sum() / 2 < within
    apart = np.linalg.norm(loop.state.models[0].double().numpy() - theta)
    assert apart < max(within, 1e-5) * np.linalg.norm(theta - start)


# ---- RC-DPFL


def mixture(updates: np.ndarray, count: int) -> tuple[np.ndarray, float]:
    """pi `[n, M]` and MSS of line 6: the released code's spherical mixture in two scaled principal coordinates."""
    scaled = StandardScaler().fit_transform(updates)
    points = MinMaxScaler().fit_transform((updates @ PCA(len(updates)).fit(scaled).components_.T)[:, :2])
    equal = np.full(count, 1 / count)
    fit = GaussianMixture(
        count, covariance_type="spherical", init_params="k-means++", tol=1e-6, weights_init=equal, random_state=0
    ).fit(points)
    fit.weights_ = equal
    pairs = [(a, b) for a in range(count) for b in range(a)]
    separation = min(
        np.linalg.norm(fit.means_[a] - fit.means_[b]) / (2 * math.sqrt(max(fit.covariances_[a], fit.covariances_[b])))
        for a, b in pairs
    )
    return fit.predict_proba(points), separation


def rc_dpfl(theta_init: np.ndarray, count: int | None, rounds: int, sizes: list[int], dpsgd: Dpsgd, loss):
    """Lines 1 to 17 of the revised paper; count is M or None. Returns the models, R of each round, and E_c."""
    clients, chosen = range(len(sizes)), []
    for e in range(1, rounds + 1):
        if e == 1:
            first = np.stack([dpsgd(e, i, theta_init) for i in clients])  # line 4, b_i = N_i
            if count is None:  # line 5
                count = max(range(2, min(10, len(sizes) - 1) + 1), key=lambda m: mixture(first, m)[1])
            pi, separation = mixture(first, count)  # line 6
            overlap = math.erfc(separation / math.sqrt(2))  # MPO = 2 Q(MSS)
            last_drawn = max(1, math.floor((1 - overlap) * rounds / 2 + 1e-6))  # line 7
            models = [theta_init.copy() for _ in range(count)]  # lines 1 and 8
            continue
        if e <= last_drawn:  # line 10, by the public stream of each client and round
            of_client = [int(public_generator(0, "stage2", e, i).choice(count, p=pi[i] / pi[i].sum())) for i in clients]
        else:  # lines 12 and 13; of equal losses the first
            of_client = [min(range(count), key=lambda m, i=i: loss(i, models[m])) for i in clients]
        updates = [dpsgd(e, i, models[of_client[i]]) for i in clients]  # line 14
        for m in range(count):  # lines 15 and 16
            members = [i for i in clients if of_client[i] == m]
            records = sum(sizes[i] for i in members)
            models[m] = models[m] + sum(sizes[i] / records * updates[i] for i in members)
        chosen.append(of_client)
    return np.stack(models), chosen, last_drawn


def clients_of_kinds(make_loop, *parts, noise: bool, **options):
    """Nine clients of three kinds and 200 to 264 records, and what was seen of a run."""
    seen, population = Recorder(updates=True), kinds_of_clients(more=10)
    batch = 40 if noise else None
    loop = make_loop(
        population,
        ClientModule(nn.Linear(6, 3)),
        parts=[SizeWeighted(), *parts, seen],
        privacy=private(UNEQUAL, clip_norm=0.5) if noise else None,
        clients=ClientOptions(count=COUNT, batch_size=batch, learning_rate=RATE, local_epochs=EPOCHS),
        new_net=small_linear,
        **options,
    )
    start = loop.module.flat.double().numpy()
    loop.run()
    net = nn.Linear(6, 3)
    return loop, seen, start, (of_the_run(seen) if noise else full_batches(net, population)), net


def small_linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(6, 3)


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:strategy clustered")
@pytest.mark.parametrize("noise", [False, True], ids=["plain", "noisy"])
@pytest.mark.parametrize("count", [3, 4, None])
def test_rc_dpfl_as_published_is_its_box(count, noise, make_loop):
    strategy = Clustered(
        num_clusters="auto" if count is None else count,
        mixture="paper",
        first_round_noise_multiplier="same",
        reuse_first_round=False,
        selection="paper_argmin",
    )
    loop, seen, start, dpsgd, net = clients_of_kinds(make_loop, strategy, noise=noise, rounds=8)
    models, chosen, last_drawn = rc_dpfl(
        start,
        count,
        8,
        list(loop.population.num_records),
        dpsgd,
        lambda i, theta: mean_loss(net, loop.population, i, theta),
    )
    assert strategy.last_drawn_round == last_drawn and 1 < last_drawn <= 4
    assert [list(updates.model_of) for updates in seen.updates[1:]] == chosen
    np.testing.assert_allclose(loop.state.models.double().numpy(), models, rtol=1e-4, atol=1e-5)
    assert len(models) >= 3 and list(loop.state.model_of) == chosen[-1]


# ---- f-CDPFL


def f_cdpfl(models: list[np.ndarray], rounds: int, sizes: list[int], dpsgd: Dpsgd, loss):
    """Section 5, IFCA with model averaging: each client trains the model of its lowest loss. Models, and choices."""
    clients, chosen = range(len(sizes)), []
    for e in range(1, rounds + 1):
        losses = [[loss(i, theta) for theta in models] for i in clients]
        of_client = [of_one.index(min(of_one)) for of_one in losses]
        updates = [dpsgd(e, i, models[of_client[i]]) for i in clients]
        models = [
            theta
            + sum(
                sizes[i] * updates[i] / sum(sizes[j] for j in clients if of_client[j] == m)
                for i in clients
                if of_client[i] == m
            )
            for m, theta in enumerate(models)
        ]
        chosen.append(of_client)
    return np.stack(models), chosen


@pytest.mark.e2e
@pytest.mark.parametrize("noise", [False, True], ids=["plain", "noisy"])
@pytest.mark.parametrize("count", [3, 4])
def test_f_cdpfl_as_published_is_its_box(count, noise, make_loop):
    strategy = Ifca(num_clusters=count, selection="paper_argmin")
    loop, seen, _, dpsgd, net = clients_of_kinds(make_loop, strategy, noise=noise, rounds=6)
    initial = list(seen.start.models.double().numpy())
    assert all(np.abs(a - b).max() > 0.1 for k, a in enumerate(initial) for b in initial[:k]), "M random models"
    models, chosen = f_cdpfl(
        initial,
        6,
        list(loop.population.num_records),
        dpsgd,
        lambda i, theta: mean_loss(net, loop.population, i, theta),
    )
    assert [list(updates.model_of) for updates in seen.updates] == chosen
    assert len({*chosen[-1]}) > 1, "clients part"
    np.testing.assert_allclose(loop.state.models.double().numpy(), models, rtol=1e-4, atol=1e-5)
