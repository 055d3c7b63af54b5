"""Convolutions and pooling by compiled loops where they suit, as `privacy.clipping.convolutions` finds them."""

from __future__ import annotations

from torch import Tensor, nn

from dpfl_lightning.kernels import dense_conv, pooling, sparse_conv
from dpfl_lightning.privacy.clipping.convolutions import Convolutions, Form, SparseGradients


class CompiledConvolutions(Convolutions):
    """Winograd's algorithm for many channels, windows for sparse gradients, and ReLU with pooling in one loop."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form, count: int) -> Tensor:
        return dense_conv.conv2d(x, weight, bias, *form, count)

    def input_gradient(self, x: Tensor, weight: Tensor, dy: Tensor, form: Form, count: int) -> Tensor:
        return dense_conv.input_gradient(x, weight, dy, *form, count)

    def weight_gradients(self, x: Tensor, weight: Tensor, dy: Tensor, form: Form, count: int) -> Tensor | None:
        return dense_conv.weight_gradients(x, weight, dy, *form, count)

    def gains_from_channels_last(self, layer: nn.Module) -> bool:
        return dense_conv.gains_in_blocks(layer)

    def sparse_backward(
        self,
        layer: nn.Conv2d,
        weight: Tensor,
        x: Tensor,
        dy: Tensor,
        need_dx: bool,
        winners: Tensor | None,
        count: int,
    ) -> SparseGradients | None:
        if not sparse_conv.suits(layer, x, winners is not None):
            return None
        return sparse_conv.sparse_backward(layer, weight, x, dy, need_dx, winners, count)

    def is_sparse(self, dy: Tensor) -> bool:
        return sparse_conv.mostly_zeros(dy)

    def max_relu(self, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return pooling.max_relu(y, count)
