"""A trainable model: a net, the loss of each record, and its parameters as one flat vector."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dpfl_lightning.errors import require
from dpfl_lightning.models import check_net
from dpfl_lightning.privacy.clipping.reference import Params

FORWARD_CHUNK = 100  # records of a forward pass without gradients, so that activations stay in the caches
DEVICE_FORWARD_CHUNK = 1000  # on other devices than a CPU: few, large kernels


def forward_chunk(device: torch.device) -> int:
    """Return the number of records of a forward pass of an evaluation."""
    return FORWARD_CHUNK if device.type == "cpu" else DEVICE_FORWARD_CHUNK


class Model(nn.Module):
    """A net with a loss for each record, `[B, *X]` -> `[B, num_classes]`, or `[B, 1]` for a regression.

    `ClientModule` adds the private training step to it. Raises UserError if a layer mixes records (BatchNorm), no
    parameter is trainable, or `personal` names no parameter.

    >>> Model(nn.Linear(4, 3)).num_params
    15
    """

    #: names of parameters of `net` that never leave the client; the engine stores them for each client. If it is empty,
    #: the net's attribute `personal` is used, if there is one
    personal: tuple[str, ...] = ()

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        check_net(net)
        self.net = net
        self.personal = self.personal or tuple(getattr(net, "personal", ()))
        self._shares = _shares_tensors(net)  # known once, because finding it out takes half of a call
        self._shapes = {name: p.shape for name, p in net.named_parameters() if p.requires_grad}
        for name in self.personal:
            require(name in self._shapes, "personal", f"name parameters of the net ({', '.join(self._shapes)})", name)

    def sample_loss(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        """Return one loss per record `[B]` for `x [B, *X]`, `y [B]`; it may depend on that record alone.

        Every engine differentiates it: the reference by `vmap` over batches of one, the fast engine by chunks.
        """
        return self.loss(self.output(params, x), y)

    def output(self, params: Params, x: Tensor) -> Tensor:
        """Return the outputs `[B, ...]` of the net with parameters `params` for `x [B, *X]`."""
        return functional_call(self.net, dict(params), (x,), tie_weights=self._shares)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return one loss per record `[B]`: cross entropy for integer targets, squared error for real ones."""
        if y.is_floating_point():
            return F.mse_loss(output.reshape(y.shape), y, reduction="none")
        return F.cross_entropy(output, y, reduction="none")

    @property
    def num_params(self) -> int:
        """P, the number of trainable parameters of the net."""
        return sum(shape.numel() for shape in self._shapes.values())

    @property
    def named_trainable(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    @property
    def trainable(self) -> list[Tensor]:
        return list(self.named_trainable.values())

    @property
    def flat(self) -> Tensor:
        """All trainable parameters as one new vector `[P]`, detached."""
        return torch.cat([p.detach().reshape(-1) for p in self.trainable])

    @torch.no_grad()
    def load(self, flat: Tensor) -> None:
        """Set all trainable parameters from one vector `[P]`."""
        for parameter, value in zip(self.trainable, self.unflatten(flat).values(), strict=True):
            parameter.copy_(value)

    @property
    def personal_mask(self) -> Tensor:
        """Mask `[P]` (bool) of the entries of the flat vector that stay with the client."""
        parts = [torch.full((shape.numel(),), name in self.personal) for name, shape in self._shapes.items()]
        return torch.cat(parts)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Return `flat` `[P]` as named views that share its memory."""
        parts = flat.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


def _shares_tensors(net: nn.Module) -> bool:
    """Return whether a tensor has several names, as parameter or buffer."""
    kinds = (net.named_parameters, net.named_buffers)
    tensors = [tensor for named in kinds for _, tensor in named(remove_duplicate=False)]
    return len(set(tensors)) < len(tensors)
