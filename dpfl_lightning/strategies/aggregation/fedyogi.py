"""FedYogi: Yogi on the server."""

from torch import Tensor

from dpfl_lightning.strategies.aggregation.fedadam import FedAdam


class FedYogi(FedAdam):
    """FedYogi: FedAdam with an additive second moment, `v -= (1 - beta2) * update^2 * sign(v - update^2)`.

    One noisy round changes the size of later steps less than in Adam.

    **Privacy** Post-processing.

    Reference: Reddi et al. (2021), Algorithm 2.
    """

    def _second(self, second: Tensor, square: Tensor) -> Tensor:
        return second - (1 - self.beta2) * square * (second - square).sign()
