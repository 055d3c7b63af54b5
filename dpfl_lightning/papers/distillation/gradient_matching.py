"""Gradient matching: distances between the gradients of two sets by class, and images moved to reduce them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from dpfl_lightning.models.model import Model
from dpfl_lightning.models.thread_safe_loss import ThreadSafeLoss
from dpfl_lightning.privacy.clipping.reference import Params, SampleLoss
from dpfl_lightning.runtime.threads import side_by_side

_GUARD = 1e-6  # added to the product of two norms, as in the condensation paper's code
_NEAR_ZERO = 1e-24  # added under a root, whose slope at 0 is infinite
_ALIKE = 1e-3  # relative tolerance: far above float32 rounding, far below the effect of a wrong second derivative
_IMAGES_AT_ONCE = 128  # images in a vectorised pass: more fill an accelerator's memory

ByClass = Mapping[str, Tensor]  # parameter name -> [G, *shape], one gradient for each class
#: (loss, all parameters, names, images `[g, n, *X]`, classes `[g]`) -> the gradient of the mean loss of each
#: class's images, by name `[g, *shape]`, differentiable in the images
ClassGradientsOf = Callable[[SampleLoss, Params, Sequence[str], Tensor, Tensor], dict[str, Tensor]]


def matched_names(shapes: Mapping[str, Sequence[int]], matching: str) -> tuple[str, ...]:
    """Return the parameters that `distances` reads: all for `mse`, otherwise those of two or more dimensions.

    >>> matched_names({"0.weight": (4, 3), "0.bias": (4,)}, "layerwise_cosine")
    ('0.weight',)
    """
    return tuple(name for name, shape in shapes.items() if matching == "mse" or len(shape) >= 2)


def num_rows(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the number of output nodes whose cosines `layerwise_cosine` sums: half the largest distance of a class."""
    return sum(shape[0] for shape in shapes.values() if len(shape) >= 2)


def distances(ours: ByClass, theirs: ByClass, matching: str, row_weights: ByClass | None = None) -> Tensor:
    """Return the distance D between the two gradients of each class, `[G]`; differentiable in `ours`.

    - layerwise_cosine: `sum_rows 1 - <a, b> / (|a| |b| + 1e-6)`, in [0, 2 rows], weighted by `row_weights` (`[G, rows]`
      by name, in [0, 1]); a row holds the inputs of an output node. One-dimensional parameters are ignored.
    - mse: `|a - b|^2` over all parameters; depends on the length of the gradients.

    Reference: Zhao, Mopuri and Bilen (2021), their code (layerwise_cosine); Wang and Wang (2024), eq. 27 (mse).

    >>> ours, theirs = {"w": torch.tensor([[[3.0, 0.0], [0.0, 2.0]]])}, {"w": torch.tensor([[[1.0, 0.0], [0.0, -1.0]]])}
    >>> distances(ours, theirs, "mse"), round(float(distances(ours, theirs, "layerwise_cosine")), 4)
    (tensor([13.]), 2.0)
    """
    if matching == "mse":
        return (_flat(ours) - _flat({name: theirs[name] for name in ours})).square().sum(dim=1)
    parts = []
    for name, ours_of_class in ours.items():
        if ours_of_class.dim() >= 3:
            distance = 1 - _cosine(ours_of_class.flatten(2), theirs[name].flatten(2))
            parts.append((distance if row_weights is None else distance * row_weights[name]).sum(dim=1))
    return torch.stack(parts).sum(dim=0)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine over the last dimension."""
    norms = [(vector.square().sum(dim=-1) + _NEAR_ZERO).sqrt() for vector in (a, b)]
    return (a * b).sum(dim=-1) / (norms[0] * norms[1] + _GUARD)


def _flat(by_class: ByClass) -> Tensor:
    return torch.cat([gradients.flatten(1) for gradients in by_class.values()], dim=1)


def noise_aware_rows(target: ByClass, noise_std: float) -> dict[str, Tensor]:
    """Return weights of the target's rows, `[G, rows]` for each name: ~ `max(0, 1 - n s^2 / |row|^2)` for n numbers.

    A row of pure noise has a random direction and should not move the images. The weights of a class sum to its number
    of rows, or are zeros if all rows are noise. s is the public `noise_std` >= 0 of one number. Post-processing.
    """
    weights = {}
    for name, gradient in target.items():
        if gradient.dim() >= 3:
            rows = gradient.flatten(2)
            size = rows.square().sum(dim=-1)
            weights[name] = (1 - rows.shape[-1] * noise_std**2 / size.clamp_min(_NEAR_ZERO)).clamp_min(0.0)
    mean = torch.cat(list(weights.values()), dim=1).mean(dim=1, keepdim=True)
    return {name: torch.where(mean > 0, weight / mean.clamp_min(_NEAR_ZERO), 0.0) for name, weight in weights.items()}


def class_by_class(
    loss: SampleLoss, params: Params, names: Sequence[str], images: Tensor, classes: Tensor
) -> dict[str, Tensor]:
    """The reference `ClassGradientsOf`: one class after another by plain autograd."""
    everything = {name: value.detach() for name, value in params.items()}
    wanted = {name: everything[name].requires_grad_() for name in names}
    rows = []
    with torch.enable_grad():
        for class_images, label in zip(images, classes, strict=True):
            mean = loss(everything, class_images, label.expand(len(class_images))).mean()
            rows.append(torch.autograd.grad(mean, list(wanted.values()), create_graph=True, materialize_grads=True))
    return {name: torch.stack(parts) for name, parts in zip(names, zip(*rows, strict=True), strict=True)}


def all_classes_at_once(
    loss: SampleLoss, params: Params, names: Sequence[str], images: Tensor, classes: Tensor
) -> dict[str, Tensor]:
    """`ClassGradientsOf` in one pass, by `vmap` over classes; use it through `fastest_class_gradients`."""
    fixed = {name: value.detach() for name, value in params.items()}

    def mean_loss(wanted: Params, x: Tensor, label: Tensor) -> Tensor:
        return loss({**fixed, **wanted}, x, label.expand(len(x))).mean()

    by_class = vmap(grad(mean_loss), in_dims=(None, 0, 0), randomness="different")
    return by_class({name: fixed[name] for name in names}, images, classes)


def fastest_class_gradients(
    loss: SampleLoss, params: Params, names: Sequence[str], input_shape: Sequence[int]
) -> ClassGradientsOf:
    """Return `all_classes_at_once` if it moves random images of this model like `class_by_class`, otherwise the latter.

    Under `vmap`, torch's LayerNorm silently treats its mean and deviation as constants in second derivatives.
    """
    like, generator = next(iter(params.values())), torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(like.device, like.dtype)

    images, classes = draw(2, 2, *input_shape), torch.arange(2, device=like.device)
    directions = {name: draw(2, *params[name].shape) for name in names}

    def slope(gradients: ClassGradientsOf) -> Tensor:
        """Return the slope of the gradients along random directions, normalised for each parameter."""
        moved_images = images.clone().requires_grad_()
        with torch.enable_grad():
            by_class = gradients(loss, params, names, moved_images, classes)
            total_norm = _flat(by_class).detach().norm()
            parts = [
                (g * directions[name]).sum() / (g.detach().norm() + 0.01 * total_norm) for name, g in by_class.items()
            ]
            return torch.autograd.grad(torch.stack(parts).sum(), moved_images)[0]

    expected = slope(class_by_class)
    try:
        difference = (slope(all_classes_at_once) - expected).norm()
    except Exception:  # a user's forward pass may raise anything under vmap
        return class_by_class
    return all_classes_at_once if bool(difference <= _ALIKE * expected.norm()) else class_by_class


@dataclass(frozen=True)
class SyntheticSet:
    """Images of every class `[G, n, *X]`, normalised like the records, and the momentum of their gradient descent."""

    images: Tensor
    velocity: Tensor

    @classmethod
    def of_noise(
        cls, num_classes: int, images_per_class: int, shape: Sequence[int], generator: torch.Generator
    ) -> SyntheticSet:
        """Return standard normal images, which need no data."""
        images = torch.randn(num_classes, images_per_class, *shape, generator=generator)
        return cls(images, torch.zeros_like(images))

    def to(self, device: torch.device, dtype: torch.dtype) -> SyntheticSet:
        return SyntheticSet(self.images.to(device, dtype), self.velocity.to(device, dtype))

    @property
    def records(self) -> tuple[Tensor, Tensor]:
        """All images `[G n, *X]` and their labels `[G n]`, ordered by class."""
        labels = torch.arange(len(self.images), device=self.images.device)
        return self.images.flatten(0, 1), labels.repeat_interleave(self.images.shape[1])

    @property
    def is_finite(self) -> bool:
        return bool(self.images.isfinite().all()) and bool(self.velocity.isfinite().all())


@dataclass(frozen=True)
class Matching:
    """Moves images towards target gradients.

    Args:
        names: parameters whose gradients are matched.
        distance: of gradients, see `distances`.
        learning_rate: for ten images a class, > 0. A step is by `learning_rate * images of the class / 10 / rows`: a
            class gradient is a mean over images, and `layerwise_cosine` is a sum over rows (otherwise rows is 1).
        augment: `(x [B, *X], y [B]) -> x`, the augmentation of the clients' records, or None.
        threads: process one class at a time in parallel threads, for which `loss` must be thread-safe and `gradients`
            use autograd; otherwise classes are processed together.
    """

    loss: SampleLoss
    names: tuple[str, ...]
    distance: str
    learning_rate: float
    momentum: float
    gradients: ClassGradientsOf = class_by_class
    augment: Callable[[Tensor, Tensor], Tensor] | None = None
    threads: bool = False

    @classmethod
    def of(
        cls,
        module: Model,
        names: Sequence[str],
        input_shape: Sequence[int],
        distance: str,
        learning_rate: float,
        momentum: float,
    ) -> Matching:
        """Create the fastest form for the module's device: one class on each core at a time, or vectorised passes.

        The module defines the loss; its parameters are neither read nor changed.
        """
        settings = (tuple(names), distance, learning_rate, momentum)
        if module.flat.device.type == "cpu":
            return cls(ThreadSafeLoss(module), *settings, threads=True)
        params = module.unflatten(module.flat)
        gradients = fastest_class_gradients(module.sample_loss, params, names, input_shape)
        return cls(module.sample_loss, *settings, gradients=gradients)

    def slope(
        self, images: Tensor, classes: Tensor, params: Params, target: ByClass, row_weights: ByClass | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the slope `[g, n, *X]` of the distances by the images of `classes` `[g]`, and each distance `[g]`."""
        with torch.enable_grad():
            leaf = images.detach().requires_grad_()
            net_input = leaf
            if self.augment is not None:
                labels = classes.repeat_interleave(leaf.shape[1])
                net_input = self.augment(leaf.flatten(0, 1), labels).view_as(leaf)
            ours = self.gradients(self.loss, params, self.names, net_input, classes)
            distance = distances(ours, target, self.distance, row_weights)
            (slope,) = torch.autograd.grad(distance.sum(), leaf)
        return slope, distance.detach()

    def step(
        self,
        synthetic: SyntheticSet,
        params: Params,
        target: ByClass,
        present: Tensor,
        row_weights: ByClass | None = None,
    ) -> tuple[SyntheticSet, Tensor]:
        """Return the set after one step towards `target`, and the distances before it, `[G]`, NaN for absent classes.

        Absent classes (False in `present` `[G]`) and their momentum stay exactly unchanged. The images of a class do
        not influence the distances of other classes, so passes may have any number of classes.
        """

        def one_pass(classes: Tensor) -> tuple[Tensor, Tensor]:
            weights = None if row_weights is None else {name: w[classes] for name, w in row_weights.items()}
            class_target = {name: target[name][classes] for name in self.names}
            return self.slope(synthetic.images[classes], classes, params, class_target, weights)

        distance = target[self.names[0]].new_full((len(present),), math.nan)
        rows = present.nonzero().flatten()
        if len(rows) == 0:  # `split` of an empty tensor would give one pass without classes
            return synthetic, distance
        passes = rows.split(1 if self.threads else max(1, _IMAGES_AT_ONCE // synthetic.images.shape[1]))
        results = side_by_side(one_pass, passes) if self.threads else list(map(one_pass, passes))
        slopes, distances_before = zip(*results, strict=True)
        distance[rows] = torch.cat(distances_before)
        velocity, images = synthetic.velocity.clone(), synthetic.images.clone()
        velocity[rows] = self.momentum * velocity[rows] + torch.cat(slopes)
        summed = num_rows({name: part.shape[1:] for name, part in target.items()})
        terms = summed if self.distance == "layerwise_cosine" else 1
        images[rows] -= self.learning_rate * images.shape[1] / 10 / terms * velocity[rows]
        return SyntheticSet(images, velocity), distance
