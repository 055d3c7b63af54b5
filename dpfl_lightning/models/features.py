"""Random features of records: the outputs of models with random parameters, each record by itself."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpfl_lightning.models.model import Model
from dpfl_lightning.privacy.clipping.stateless import call, further_names

COUNT_WEIGHT = 0.2  # of the constant feature, whose sum counts records


def record_features(module: Model, nets: Tensor, x: Tensor) -> list[Tensor]:
    """Return parts `[B, d]` of each record of `x [B, *X]`: its values, and its features in each of `nets` `[M, P]`.

    Each row has norm 1, or 0 if all its features are 0. Features are the inputs of the last layer of a model that is an
    `nn.Sequential` with a linear last layer, and otherwise the model's outputs.
    """
    features = _features(module)
    return [_normalised(x), *(_normalised(features(net, x)) for net in nets)]


def feature_row(parts: list[Tensor]) -> Tensor:
    """Return a constant and the parts of each record in one row of norm at most 1, `[B, 1 + sum d]`."""
    constant = parts[0].new_full((len(parts[0]), 1), COUNT_WEIGHT)
    return torch.cat([constant, *(part_weight(len(parts)) * part for part in parts)], dim=1)


def part_weight(parts: int) -> float:
    """Return the factor of each of this number of parts in a row."""
    return float(((1 - COUNT_WEIGHT**2) / parts) ** 0.5)


def _features(module: Model) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the features as a function of the parameters `[P]` and `x`."""
    net = module.net
    if not (type(net) is nn.Sequential and len(net) > 1 and isinstance(net[-1], nn.Linear)):
        return lambda flat, x: module.output(module.unflatten(flat), x)
    layers = net[:-1]
    further = further_names(layers)

    def of_layers(flat: Tensor, x: Tensor) -> Tensor:
        params = module.unflatten(flat)
        trained = {name: params[name] for name, _ in layers.named_parameters() if name in params}  # others are frozen
        return call(layers, trained, further, (x,))

    return of_layers


def _normalised(values: Tensor) -> Tensor:
    rows = values.flatten(1)
    return rows / (rows.square().sum(dim=1, keepdim=True) + 1e-12).sqrt()
