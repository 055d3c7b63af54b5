"""A model's loss for several threads."""

import copy
import threading

from torch import Tensor

from dpfl_lightning.models.model import Model
from dpfl_lightning.privacy.clipping.inputs import Inputs
from dpfl_lightning.privacy.clipping.reference import Params


class ThreadSafeLoss:
    """`module.sample_loss`, which every thread computes with a copy of the module, as it swaps parameters in."""

    def __init__(self, module: Model) -> None:
        self.module = copy.deepcopy(module)  # never computes, so that its parameters are not swapped while it is copied
        self._of_thread = threading.local()

    def __call__(self, params: Params, x: Inputs, y: Tensor) -> Tensor:
        if not hasattr(self._of_thread, "module"):
            self._of_thread.module = copy.deepcopy(self.module)
        return self._of_thread.module.sample_loss(params, x, y)
