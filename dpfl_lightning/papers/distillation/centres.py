"""Centres of clients' class gradients, in which each client counts once, whatever it has of the class."""

from collections.abc import Callable

import torch
from torch import Tensor

from dpfl_lightning.strategies.aggregation.robust_mean import coordinate_median, coordinate_trimmed_mean

#: (values of clients `[C, d]`, C > 0, the share that a trimmed mean drops at each end) -> `[d]`
Centre = Callable[[Tensor, float], Tensor]

#: `aggregation` of the strategy -> centre. Eq. 3 of Wang and Wang (2024) is the sum; their defence is the median of Yin
#: et al. (2018), whose trimmed mean is beside it. A median of two values is their mean.
CENTRES: dict[str, Centre] = {
    "client_means": lambda values, share: values.mean(dim=0),
    "sum_of_client_means": lambda values, share: values.sum(dim=0),
    "median": lambda values, share: coordinate_median(values),
    "trimmed_mean": coordinate_trimmed_mean,
}


def class_centres(centre: Centre, means: Tensor, holders: Tensor, share: float) -> Tensor:
    """Return the centre `[G, d]` of each class over the clients that hold it; zeros for a class that nobody holds.

    `means` are the clients' gradients `[C, G, d]`; `holders` `[C, G]` says who holds which class. Post-processing.
    """
    nothing = torch.zeros_like(means[0, 0])
    by_class = zip(means.unbind(dim=1), holders.unbind(dim=1), strict=True)
    return torch.stack([centre(values[holds], share) if holds.any() else nothing for values, holds in by_class])
