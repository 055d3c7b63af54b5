"""The numbers that the paper prints: means of Table I, and Table III."""

from __future__ import annotations

#: data set -> (PRIVATEFL, PRIVATEFL-BCS) with Gaussian noise, the same with Laplace noise; accuracy in per cent. The
#: paper's Lending Club (mean squared error) and FEMNIST have no cells here.
TABLE1 = {
    "mnist": ((22.95, 91.84), (12.91, 81.25)),
    "fashion_mnist": ((57.12, 80.73), (14.94, 69.42)),
    "cifar10": ((40.49, 56.13), (10.28, 46.41)),
}

#: data set -> rho_min, gamma, L, mu with Gaussian noise, the same with Laplace noise
TABLE3 = {
    "mnist": ((1.063, 1.960, 5.514, 4.986), (1.039, 53.565, 106.463, 55.018)),
    "fashion_mnist": ((1.050, 12.117, 18.062, 14.198), (0.962, 144.688, 406.756, 200.645)),
    "cifar10": ((1.097, 1.958, 5.859, 5.678), (1.109, 66.112, 125.825, 63.722)),
}


def deciding(gamma: float, smoothness: float, convexity: float) -> dict[str, float]:
    """What gamma must be, and the one number that decides quotas, from the paper's constants.

    >>> {name: round(value, 2) for name, value in deciding(0.277, 0.997, 0.239).items()}
    {'offset': 33.37, 'decides': 18.05}
    """
    return {"offset": 8 * smoothness / convexity, "decides": smoothness + 3 / 8 * convexity * (gamma + 190)}
