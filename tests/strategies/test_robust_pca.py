"""Principal component pursuit against the textbook algorithm, and shortcuts that would be wrong."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from noisy_updates import excess, noisy_updates, total_variation
from reference import principal_component_pursuit

from dpfl_lightning.errors import UserNotice
from dpfl_lightning.papers.robust_hdp import robust_pca as module
from dpfl_lightning.papers.robust_hdp.robust_pca import PcpSettings, robust_pca, shrinkage
from dpfl_lightning.runtime.devices import products

FAST = PcpSettings()


def precise(primal, dual=math.inf, mu_scale=1.0):
    return PcpSettings(mu_scale, primal_tol=primal, dual_tol=dual, weight_tol=0.0, max_iterations=5000, double=True)


def run_exactly(deltas, iterations, mu_scale=1.0):
    """So many iterations: the settings never converge."""
    never = dataclasses.replace(precise(0.0, 0.0, mu_scale), max_iterations=iterations)
    words = rf"robust PCA did not converge in {iterations} iterations \(primal residual .*, dual .*\)"
    with pytest.warns(UserNotice, match=words):
        split = robust_pca(deltas, never)
    assert not split.converged and split.iterations == iterations
    return split


def low_rank_and_outliers(seed=0, shape=(400, 40), rank=2):
    """L `[p, n]` of Gaussian factors and S with 5 % of entries +-10."""
    draw = np.random.default_rng(seed)
    low = draw.standard_normal((shape[0], rank)) @ draw.standard_normal((rank, shape[1]))
    sparse = np.where(draw.random(shape) < 0.05, draw.choice([-10.0, 10.0], shape), 0.0)
    return low, sparse


def quiet_and_loud(clients=20, params=4000, seed=0):
    """Updates `[C, P]` with one shared direction and noise of very unequal size."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.logspace(-1.5, 0.5, clients, dtype=torch.float64)
    shared = torch.randn(params, generator=generator, dtype=torch.float64)
    return 0.3 * shared + noise[:, None] * torch.randn(clients, params, generator=generator, dtype=torch.float64)


def relative(ours, truth):
    return float(np.linalg.norm(ours - truth) / np.linalg.norm(truth))


# ---- the right algorithm


def test_low_rank_and_sparse_parts_are_recovered():
    for seed in range(3):
        low, sparse = low_rank_and_outliers(seed)
        split = robust_pca(torch.from_numpy((low + sparse).T), precise(1e-9))
        assert split.iterations <= 100 and split.rank == 2
        assert relative(split.low_rank.T.numpy(), low) < 1e-8 > relative(split.sparse.T.numpy(), sparse)
        assert split.noise_var.numpy() == pytest.approx((sparse**2).sum(axis=0), rel=1e-6)


@pytest.mark.parametrize(
    ("iterations", "mu_scale"), [(1, 1.0), (2, 0.1), (7, 1.0), pytest.param(40, 0.3, marks=pytest.mark.e2e)]
)
def test_one_pass_is_algorithm_3(iterations, mu_scale):
    """S is never stored, Y is one clip, and singular values come from the Gram matrix: still L, S and Y, to 1e-10."""
    deltas = quiet_and_loud(clients=12, params=1000)
    mu = mu_scale * deltas.numel() / (4 * float(deltas.abs().sum()))
    split = run_exactly(deltas, iterations, mu_scale)
    _, sparse, dual = principal_component_pursuit(deltas.T.numpy(), mu, iterations)
    next_low, _, _ = principal_component_pursuit(deltas.T.numpy(), mu, iterations + 1)
    assert relative(split.dual.T.numpy(), dual) < 1e-10
    assert np.linalg.norm(split.sparse.T.numpy() - sparse) < 1e-10 * float(deltas.norm())
    ahead = deltas - split.sparse + split.dual / mu
    assert relative((shrinkage(ahead @ ahead.T, 1 / mu)[0] @ ahead).T.numpy(), next_low) < 1e-10


@pytest.mark.slow
def test_the_dual_certifies_the_optimum_which_does_not_depend_on_the_penalty():
    deltas, _ = noisy_updates("dist1", 5e-3, num_params=4000)
    bound = 1 / math.sqrt(4000)
    for iterations in (1, 2, 10):
        assert float(run_exactly(deltas, iterations).dual.abs().max()) <= bound * (1 + 1e-12)
    splits = [robust_pca(deltas, precise(1e-7, 1e-4, mu_scale)) for mu_scale in (0.3, 1.0, 0.1)]
    assert all(split.converged for split in splits)
    assert float(splits[0].dual.abs().max()) <= bound * (1 + 1e-12) and 0.999 < splits[0].dual_norm < 1.001
    assert splits[0].dual_norm == pytest.approx(float(torch.linalg.matrix_norm(splits[0].dual, 2)), rel=1e-6)
    assert all(total_variation(split.noise_var, splits[1].noise_var) < 1e-3 for split in splits)


@pytest.mark.slow
def test_the_early_stop_is_near_the_optimum():
    deltas = quiet_and_loud(clients=8, params=400)
    fast, exact = robust_pca(deltas), robust_pca(deltas, precise(1e-7))
    assert fast.converged and exact.converged and fast.iterations < exact.iterations / 3
    assert total_variation(fast.noise_var, exact.noise_var) < 5e-3


def test_diagnostics_are_of_the_split_and_updates_stay_as_they_were():
    for deltas in (quiet_and_loud(8, 600), quiet_and_loud(8, 600).float()):
        before = deltas.clone()
        split = robust_pca(deltas)
        assert torch.equal(deltas, before)
    deltas = quiet_and_loud(clients=8, params=600)
    split = robust_pca(deltas)
    sparse = split.sparse
    assert split.noise_var.numpy() == pytest.approx((sparse**2).sum(dim=1).numpy(), rel=1e-6)
    assert split.singular_values[0].numpy() == pytest.approx(torch.linalg.svdvals(deltas).numpy())
    assert split.rank == int((split.singular_values[1] > 0).sum()) > 0
    torch.testing.assert_close(split.low_rank + sparse, deltas)


# ---- shortcuts that would be wrong


@pytest.mark.e2e
def test_a_vanishing_primal_residual_is_no_convergence():
    """mu of a widely copied script, p n / (4 |M|_F): M = L + S at once, with weights that are nearly uniform.

    Rules that look at the residual alone, or at weights that do not move, would take it.
    """
    deltas, truth = noisy_updates("dist1", 5e-3)
    too_large = float(deltas.abs().sum() / deltas.norm())
    with pytest.warns(UserNotice, match="did not converge"):
        split = robust_pca(deltas.float(), dataclasses.replace(FAST, mu_scale=too_large, max_iterations=100))
    assert not split.converged and split.dual_residual > 0.3
    assert split.primal_residual < 1e-6 and excess(split.noise_var, truth) > 4


# ---- accuracy


@pytest.mark.slow
def test_workers_blocks_and_layout_do_not_change_the_answer(monkeypatch):
    deltas = quiet_and_loud(params=10_007)
    whole, transposed = robust_pca(deltas), robust_pca(deltas.T.contiguous().T)
    monkeypatch.setattr(module, "_BLOCK", 3000)
    for split in (transposed, robust_pca(deltas)):
        assert split.noise_var.numpy() == pytest.approx(whole.noise_var.numpy(), rel=1e-9)
    threads = torch.get_num_threads()
    splits = [robust_pca(deltas.float(), workers=workers) for workers in (1, 2, 5)]
    assert torch.get_num_threads() == threads
    for split in splits:
        assert torch.equal(split.noise_var, splits[0].noise_var) and torch.equal(split.dual, splits[0].dual)


@pytest.mark.parametrize("newer", [False, True])
def test_coarse_products_are_not_used(newer):
    """Also if they were chosen by the newer setting, after which torch refuses to read the older one."""
    if newer and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch is older")
    try:
        if newer:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("medium")
        assert products() == ("mixed" if newer else "medium")
        assert robust_pca(quiet_and_loud(params=500).float()).dual.dtype == torch.float64
    finally:
        torch.set_float32_matmul_precision("highest")
    assert products() == "highest"


# ---- edges


def test_small_matrices_converge_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for clients in (1, 2, 3):
            split = robust_pca(torch.zeros(clients, 50))
            assert split.converged and split.noise_var.tolist() == [0.0] * clients and split.rank == 0
        split = robust_pca(quiet_and_loud(clients=30, params=7))
        assert split.converged and split.noise_var.shape == (30,) and bool(split.noise_var.isfinite().all())
        robust_pca(quiet_and_loud(params=1000))
