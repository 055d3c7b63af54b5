"""What the paper leaves out: estimators where signals grow, learning rates for each method, and false claims."""

import math

import pytest
import torch

from dpfl_lightning.config.load import load
from experiments.papers.cells import RESULTS, Cell, finished
from experiments.papers.noise_aware.ablation import updates
from experiments.papers.registry import experiments
from experiments.papers.run import RunnerOptions, options_of

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository")]
ABLATION, TUNING, TUNED, FALSIFIED = (
    experiments()[f"noise_aware.{name}"] for name in ("ablation", "tuning", "tuned", "falsified")
)
RATES = ("0.02", "0.05", "0.1", "0.2", "0.4")


def options(cell: Cell):
    return options_of(cell, RunnerOptions(None, RESULTS, RESULTS))


# ---- estimators


def test_simulated_updates_have_the_noise_and_the_ratio_they_say():
    """28,938 coordinates: a sampled variance is within 4 % with a false alarm once in 10^6."""
    for signal, spread in (("equal", 1), ("steps", 8)):
        silent, truth = updates(signal, 0.0, seed=1)
        assert torch.allclose(silent.double().square().sum(dim=1), torch.tensor(truth).double(), rtol=0.04)
        loud, _ = updates(signal, 3.0, seed=1)
        added, quietest = (loud - silent).norm(dim=1), truth.index(min(truth))
        assert float(added[quietest]) == pytest.approx(3 * 1.005 * truth[quietest] ** 0.5, rel=0.01)
        assert float(added.max() / added.min()) == pytest.approx(spread, rel=0.02)


def test_the_length_of_an_update_serves_only_where_signals_are_small():
    small, large = (ABLATION.cells["all"].compute(column, {}) for column in ("equal_0.1", "equal_10"))
    assert max(small[name] for name in ("rpca", "hetero_pca", "raw_norm")) < 1.01 < small["mean_residual"]
    assert large["hetero_pca"] < large["rpca"] < 1.3 < 2 < large["raw_norm"] < large["uniform"]


# ---- learning rates


def test_tuning_sees_public_records_only():
    for row in TUNING.rows:
        data = options(Cell(TUNING.name, row, "dist1", "small", 0)).data
        assert data.use_public and data.public_records == 12_000 and data.partition["name"] == "overlapping"
    for row in TUNED.rows:
        assert not options(Cell(TUNED.name, row, "dist1", "small", 0)).data.use_public


def test_chosen_rates_did_best_on_public_records():
    """The least rate within a standard error of the best (Breiman), of the methods and budgets that were tuned."""
    found, tuned = finished(RESULTS, TUNING, "small"), []
    for name in TUNED.rows:
        for column in TUNED.columns:
            chosen = f"{options(Cell(TUNED.name, name, column, 'small', 0)).clients.learning_rate:g}"
            seen = {
                rate: cells[0]["values"]["test_accuracy"]
                for rate in RATES
                if (cells := found.get((f"{name}_{rate}", column)))
            }
            if seen:
                tuned.append((name, column))
                best = max(seen.values())
                good = [rate for rate in seen if seen[rate] >= best - math.sqrt(best * (100 - best) / 2000)]
                place = RATES.index(good[0])
                assert chosen == good[0], (name, column, seen)
                assert {RATES[i] for i in (place - 1, place + 1) if 0 <= i < len(RATES)} <= set(seen), "its neighbours"
    assert ("ours", "dist1") in tuned


def test_tuned_runs_differ_in_strategy_and_learning_rate_alone_and_the_main_job_is_one_of_them():
    runs = [options(Cell(TUNED.name, row, "dist7", "small", 0)) for row in TUNED.rows]
    assert len({str(sorted(run.strategies)) for run in runs}) == 2  # epsilon_weighted, and noise_aware twice
    assert len({repr((run.privacy, run.data, run.rounds, run.clients.batch_size)) for run in runs}) == 1
    cell = options(Cell(TUNED.name, "ours", "dist1", "small", 0))
    job, _ = load(["--config", "conf/fmnist.yaml"])
    assert job.clients == cell.clients and job.strategies == cell.strategies == {"noise_aware": {}}
    assert (job.rounds, job.privacy.epsilon, job.data) == (cell.rounds, cell.privacy.epsilon, cell.data)


# ---- claims


def test_a_claim_changes_what_is_reported_and_nothing_else():
    true, false = (options(Cell(FALSIFIED.name, "weiavg", column, "small", 0)) for column in ("claim0.95", "claim100"))
    assert true.privacy == false.privacy and true.privacy.epsilon == {"name": "dist5"}
    changed = [a != b for a, b in zip(true.clients.reported_epsilon, false.clients.reported_epsilon, strict=True)]
    assert sum(changed) == 1 and false.clients.reported_epsilon[changed.index(True)] == 100
