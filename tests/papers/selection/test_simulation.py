"""The simulated problem: its runs are those of the real loop, and its kept cells are as their notes say."""

import numpy as np
import pytest
import torch
from torch import nn

from dpfl_lightning import strategies
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from experiments.papers.cells import RESULTS, finished
from experiments.papers.registry import experiments
from experiments.papers.selection import simulation
from experiments.papers.selection.simulation import Problem, Setting, noise_of, quotas

pytestmark = pytest.mark.e2e

NOISY = Setting("gaussian", 0.5, 0.1, 3)


def population(problem: Problem) -> Population:
    x, y = torch.from_numpy(problem.x).float(), torch.from_numpy(problem.y)
    pairs = [(x[rows], y[rows]) for rows in problem.rows_of]
    return Population.from_datasets(pairs, test=(x[problem.test], y[problem.test]), held_out=0.0, num_classes=10)


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_quotas_and_noise_are_those_that_a_run_plans(mechanism, make_loop):
    setting = Setting(mechanism, 0.5, 0.5, 15)
    problem, pure = Problem.drawn(setting, 0), mechanism == "laplace"
    loop = make_loop(
        population=population(problem),
        module=ClientModule(nn.Linear(65, 10, bias=False)),
        rounds=simulation.ROUNDS,
        clients=ClientOptions(count=simulation.CLIENTS, batch_size=None, learning_rate=4.0),
        privacy=PrivacyOptions(
            epsilon=tuple(problem.epsilon.tolist()),
            delta=0.0 if pure else simulation.DELTA,
            mechanism=mechanism,
            clip_norm=setting.clip,
            adjacency="replace_one",
        ),
        parts=strategies.build({"biased_selection": {"clients_per_round": simulation.COHORT}}),
    )
    planned = loop.plan_schedule()
    quota = quotas("anchored", problem, setting)
    assert [schedule.count_of("train") for schedule in planned.clients] == quota.tolist()
    std = np.sqrt(noise_of(problem, setting).variance(quota) / 650)
    for client, schedule in enumerate(planned.clients):
        if quota[client]:
            scale = schedule.noise_multiplier("train") * setting.clip / len(problem.rows_of[client])
            assert scale * (np.sqrt(2) if pure else 1) == pytest.approx(std[client], rel=1e-4)


def test_clipped_gradients_are_those_of_each_record():
    problem = Problem.drawn(NOISY, 0)
    rows, model = problem.rows_of[0][:9], np.random.default_rng(0).standard_normal((65, 10))
    x, y = torch.from_numpy(problem.x[rows]), torch.from_numpy(problem.y[rows])
    for order in (1, 2):
        total = torch.zeros(65, 10, dtype=torch.float64)
        for one, label in zip(x, y, strict=True):
            w = torch.from_numpy(model).requires_grad_()
            (gradient,) = torch.autograd.grad(nn.functional.cross_entropy((one @ w)[None], label[None]), w)
            total += gradient / max(1.0, float(torch.linalg.vector_norm(gradient, order)) / 0.7)
        np.testing.assert_allclose(problem.gradient(model, rows, 0.7, order), total.numpy() / 9, rtol=1e-9)


# ---- what is kept


def kept(name, request) -> dict:
    experiment = experiments()[f"selection.{name}"]
    found = finished(request.config.rootpath / RESULTS, experiment, "paper")
    assert {column for _, column in found} == set(experiment.columns)
    return {place: cells[0]["values"] for place, cells in found.items()}


def test_the_kept_verification_holds_what_its_page_says(request):
    found = kept("verification", request)

    def at(method: str, column: str) -> float:
        return found["fedsgd", column][method]

    noisy, quiet, pure = "gaussian_a0.5_0.1", "gaussian_a0.5_10", ("laplace_a0.5_0.5", "laplace_a0.5_5")
    assert min(at(method, noisy) for method in ("least_noise", "anchored", "effects")) > at("uniform", noisy) + 20
    assert at("least_noise", quiet) < at("uniform", quiet) - 1 < min(at("anchored", quiet), at("effects", quiet))
    for column in ("gaussian_a0.5_0.1", "gaussian_a3_0.1"):
        assert at("uniform", column) + 10 < at("weiavg", column) < at("inverse", column) < at("effects", column)
    for _, column in found:
        if column.startswith("gaussian"):
            assert at("weight_regret", column) < 0.5, "the estimate is as good as the best constant"
            assert abs(at("gain", column)) < 1, "quotas gain nothing with Gaussian noise"
            assert all(abs(at(f"effects{size}", column) - at("effects", column)) < 1.5 for size in (2, 12))
    assert at("quota_regret", "clip4") > 2 and at("gain", "clip4") > 2, "a constant depends on the clip norm"
    for column in pure:
        assert at("weight_regret", column) < 1.5
        assert at("effects2", column) > at("effects", column) + 2 > at("effects12", column)


def test_a_rate_is_chosen_on_other_draws(monkeypatch):
    """The best of two rates on draws 20 to 39 is used on draws 0 to 19."""
    drawn, rates = [], (0.5, 4.0)

    def accuracies(setting, runs_of, seeds=simulation.SEEDS):
        drawn.append((setting.rate, seeds[0]))
        better = setting.rate if seeds[0] == 20 else 0.0
        uniform = 2 - 8 * (setting.rate > 1)
        return {name: [better + (name == "uniform") * uniform, 50.0] for name in simulation.METHODS}

    monkeypatch.setattr(simulation, "RATES", rates)
    monkeypatch.setattr(simulation, "_accuracies", accuracies)
    values = simulation.tuned_of(mechanism="gaussian", alpha=0.5, low=0.1, high=3.0)
    assert values["uniform_rate"] == 0.5 and values["weiavg_rate"] == 4.0
    assert drawn[:2] == [(rate, 20) for rate in rates] and {seed for _, seed in drawn[2:]} == {0}
