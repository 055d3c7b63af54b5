"""The numbers that papers print, test accuracies in %: Table 1, and two other papers' of the centralised method."""

from __future__ import annotations

Numbers = dict[str, tuple[float | None, ...]]

# fmt: off
TABLE1: Numbers = {  # MNIST, Fashion-MNIST, CIFAR-10, each by Dirichlet 1, 0.5 and 0.1
    "fedavg":     (98.8, 94.3, 92.5,  92.5, 86.3, 74.3,  86.3, 75.3, 65.9),
    "fedprox":    (99.1, 95.7, 93.8,  92.6, 90.7, 86.2,  86.5, 80.1, 72.1),
    "distdd_10":  (94.1, 90.3, 82.3,  82.1, 75.3, 67.6,  51.3, 47.4, 41.5),
    "distdd_50":  (95.6, 92.8, 83.1,  84.7, 82.5, 69.3,  75.2, 62.4, 51.5),
    "distdd_100": (96.9, 93.2, 84.0,  90.1, 84.3, 72.5,  78.2, 69.2, 57.3),
}
TABLE1_CENTRALISED: Numbers = {  # one value a data set
    "whole": (99.3, 93.6, 87.2),
    "gm":    (97.2, 91.1, 80.7),
}
PUBLISHED: Numbers = {  # Fashion-MNIST, 1, 10 and 50 images a class
    "dc":  (70.5, 82.3, 83.6),
    "dsa": (70.6, 84.6, 88.7),
}
# fmt: on
