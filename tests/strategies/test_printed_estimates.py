"""Equations 8 to 10 and the problem P2 of the selection paper, against numbers by hand and the equations in loops."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import brentq

from dpfl_lightning.papers.selection.printed_estimates import (
    Constants,
    FirstStage,
    NoiseModel,
    bias_noise_ratio,
    estimated_skew,
    fit_constants,
    least_differences,
    predicted_loss,
)

#: |w_0 - w*|^2 = 5, gamma = 1, sigma^2 = 2, L = 4, mu = 2
CONSTANTS = Constants(5.0, 1.0, 2.0, 4.0, 2.0)
#: tau = 3, K = 2, C = (4, 2), Gamma = (1/2, 1/4), rho = 1/2, Lambda = 3, z = 1, Phi = (1, 2)
STAGE = FirstStage(
    3, 2, np.array([4.0, 2.0]), np.array([0.5, 0.25]), 0.5, NoiseModel(3.0, 1.0, np.array([1.0, 2.0])), 12.0
)


def equation_10(constants, stage) -> Fraction:
    """F~ as printed, client by client, in exact fractions; F* = 0."""
    distance, gamma, sigma2, smooth, mu = (Fraction(value) for value in vars(constants).values())
    tau, cohort, count = Fraction(stage.rounds), Fraction(stage.cohort_size), len(stage.counts)
    z, scale, rho = int(stage.noise.exponent), Fraction(stage.noise.scale), Fraction(stage.least_skew)
    clients = [
        tuple(Fraction(float(one)) for one in row)
        for row in zip(stage.counts, stage.heterogeneity, stage.noise.factor, strict=True)
    ]
    initial = distance / (gamma + tau) * smooth * gamma / 2
    best = 3 * smooth * rho / (2 * mu * count) * sum(unlike for _, unlike, _ in clients)
    gradient = 1 / (gamma + tau) * 4 * smooth * sigma2 / (mu**2 * cohort)
    noise = sum(taken ** (z + 1) * phi for taken, _, phi in clients) / ((gamma + tau) * tau)
    noise *= 4 * smooth * scale / (cohort**2 * mu**2)
    bias = sum(taken * unlike for taken, unlike, _ in clients) / tau
    bias *= 1 / (gamma + tau) * 4 * smooth**2 / (cohort * mu**2) + 3 * smooth / (2 * cohort * mu)
    return initial - best + gradient + noise + bias


def drawn(seed: int, z: int) -> tuple[Constants, FirstStage]:
    draw = np.random.default_rng(seed)
    constants = Constants(
        *draw.uniform(0.5, 9, 3), smoothness=draw.uniform(3, 9), strong_convexity=draw.uniform(0.1, 2)
    )
    count = int(draw.integers(2, 9))
    noise = NoiseModel(draw.uniform(0.1, 3), float(z), draw.uniform(0, 2, count))
    counts, unlike = draw.integers(0, 6, count).astype(float), draw.uniform(0, 2, count)
    return constants, FirstStage(int(draw.integers(1, 9)), 3, counts, unlike, draw.uniform(0, 1), noise, 20.0)


def test_the_predicted_loss_of_an_example_by_hand():
    """5/4 * 4/2 = 5/2; - 3*4*(1/2)/(2*2*2) * 3/4 = - 9/16; 1/4 * 32/8 = 1; 24/12 * 48/16 = 6; 5/6 * (2 + 3/2)."""
    by_hand = Fraction(5, 2) - Fraction(9, 16) + 1 + 6 + Fraction(5, 6) * Fraction(7, 2)
    assert predicted_loss(CONSTANTS, STAGE) == pytest.approx(float(by_hand), rel=1e-14)
    assert equation_10(CONSTANTS, STAGE) == by_hand


@pytest.mark.parametrize("z", [1, 2], ids=["gaussian", "laplace"])
@pytest.mark.parametrize("seed", range(5))
def test_the_predicted_loss_is_equation_10(seed, z):
    constants, stage = drawn(seed, z)
    assert predicted_loss(constants, stage) == pytest.approx(float(equation_10(constants, stage)), rel=1e-12)


def test_heterogeneity_is_the_least_difference_of_two_losses():
    """Equation 8: whichever is larger, over a client's rounds; the others have the mean of these values."""
    reports = [(0, 2.0, 1.5), (2, 0.2, 1.2), (0, 1.0, 1.3), (2, 3.0, 2.3), (0, 4.0, 0.0)]
    assert least_differences(reports, 4).tolist() == pytest.approx([0.3, 0.5, 0.7, 0.5])
    assert least_differences([], 3).tolist() == [0, 0, 0]
    assert least_differences([(1, 1.0, 1.0)], 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({0: 3.0, 2: 1.0}, Fraction(4 * 3 + 1 * 2 + 2 * 1, 7 * 2)),  # client 1 was not in the last round: the mean, 2
        ({0: 9.0, 2: 1.0}, Fraction(4 * 5 + 1 * 3 + 2 * 1, 7 * 3)),  # clipped to the bound 5
        ({0: -1.0, 2: 1.0}, Fraction(4 * 0 + Fraction(1, 2) + 2 * 1, 7) / Fraction(1, 2)),  # clipped to 0
        ({1: 2.0}, Fraction(1)),
        ({0: -1.0, 2: -3.0}, Fraction(1)),  # no loss is left: as for equal clients
    ],
)
def test_the_skew_is_equation_9(losses, expected):
    """C = (4, 1, 2), whose sum is K (T_0 - 1)."""
    assert estimated_skew([4, 1, 2], losses, max_loss=5.0) == pytest.approx(float(expected), rel=1e-14)


def test_the_skew_without_earlier_rounds_is_that_of_equal_clients():
    assert estimated_skew([0, 0], {0: 1.0, 1: 2.0}, max_loss=5.0) == 1


def test_the_first_search_solves_for_the_distance_alone():
    """By hand F~ = distance / 2 + 449/48, which is the loss 12 at the distance 127/24; the others stay."""
    fitted, residual = fit_constants(STAGE, CONSTANTS)
    assert residual < 1e-6 and fitted.start_distance == pytest.approx(127 / 24, abs=1e-5)
    assert dataclasses.replace(fitted, start_distance=5.0) == CONSTANTS


def test_a_loss_that_no_distance_explains_is_explained_by_the_next_constant():
    """The distance is as small as it may be; then gamma is the root that another solver finds."""
    stage = dataclasses.replace(STAGE, loss=7.0)
    least = dataclasses.replace(CONSTANTS, start_distance=1e-6)
    assert equation_10(least, stage) > 7
    fitted, residual = fit_constants(stage, CONSTANTS)
    assert residual < 1e-6 and fitted.start_distance == pytest.approx(1e-6, abs=1e-5)

    def left(gamma: float) -> float:
        return float(equation_10(dataclasses.replace(fitted, lr_offset=gamma), stage)) - 7

    assert fitted.lr_offset == pytest.approx(brentq(left, 1e-6, 1e3), rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_fitted_constants_satisfy_p2_and_are_not_unique(seed):
    """One equation, five unknowns: another start gives another solution, and so another weight of bias."""
    start, stage = drawn(seed, z=1)
    ratios = []
    for constants in (None, start):
        fitted, residual = fit_constants(stage, constants)
        assert abs(float(equation_10(fitted, stage)) - stage.loss) == pytest.approx(residual, abs=1e-9)
        assert residual < 1e-6
        assert all(1e-6 <= value <= 1e3 for value in vars(fitted).values())
        assert fitted.smoothness > fitted.strong_convexity
        ratios.append(bias_noise_ratio(fitted, 90, 3))
    assert abs(ratios[0] / ratios[1] - 1) > 0.05


def test_a_loss_out_of_reach_leaves_a_residual_that_is_told():
    """All terms but one are positive: with equal clients no constants give a negative loss."""
    stage = dataclasses.replace(STAGE, heterogeneity=np.zeros(2), loss=-1.0)
    fitted, residual = fit_constants(stage, CONSTANTS)
    assert residual == pytest.approx(float(equation_10(fitted, stage)) + 1) and residual >= 1
    assert residual < float(equation_10(CONSTANTS, stage)) + 1


def test_the_ratio_is_that_of_the_two_coefficients_of_p1():
    """Omega_B / Omega_A, times Lambda."""
    gamma, smooth, mu, cohort, rounds, scale = (Fraction(one) for one in (7, 4, 2, 3, 50, 5))
    omega_a = 4 * smooth * scale / ((gamma + rounds) * rounds * cohort**2 * mu**2)
    omega_b = 4 * smooth**2 / ((gamma + rounds) * rounds * cohort * mu**2) + 3 * smooth / (2 * rounds * cohort * mu)
    ratio = bias_noise_ratio(Constants(lr_offset=7, smoothness=4, strong_convexity=2), 50, 3)
    assert ratio == pytest.approx(float(omega_b / omega_a * scale), rel=1e-14)
