"""Gradient matching: how far apart two sets' gradients are, class by class, and images moved to bring them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap

from dpfl_lightning.models.fast_loss import FastLoss
from dpfl_lightning.models.model import Model
from dpfl_lightning.privacy.clipping.reference import Params, SampleLoss
from dpfl_lightning.runtime.threads import side_by_side

MATCHINGS = ("layerwise_cosine", "cos", "mse")
_GUARD = 1e-6  # added to the product of two norms, as in the condensation paper's code
_NEAR_ZERO = 1e-24  # under a root, whose slope at 0 is infinite
_ALIKE = 1e-3  # relative: rounding in float32 is far below, a wrong second derivative far above
_IMAGES_AT_ONCE = 128  # of a vectorised pass: more fill an accelerator's memory

ByClass = Mapping[str, Tensor]  # parameter name -> [G, *shape], one gradient a class


def matched_names(shapes: Mapping[str, Sequence[int]], matching: str) -> tuple[str, ...]:
    """Parameters that `distances` reads: those with two dimensions or more for `layerwise_cosine`, else all.

    >>> matched_names({"0.weight": (4, 3), "0.bias": (4,)}, "layerwise_cosine")
    ('0.weight',)
    """
    every = matching != "layerwise_cosine"
    return tuple(name for name, shape in shapes.items() if every or len(shape) >= 2)


def num_rows(shapes: Mapping[str, Sequence[int]]) -> int:
    """Output nodes whose cosines `layerwise_cosine` adds up: half the largest distance of a class."""
    return sum(shape[0] for shape in shapes.values() if len(shape) >= 2)


def distances(ours: ByClass, theirs: ByClass, matching: str, row_weights: ByClass | None = None) -> Tensor:
    """The distance of each class's two gradients, `[G]`; differentiable in `ours`.

    - layerwise_cosine: `sum_rows 1 - <a, b> / (|a| |b| + 1e-6)`, in [0, 2 rows]; a row is what enters one output node
      of a layer. Parameters of one dimension (biases, norms) count nothing.
    - cos: the same with all parameters as one row, in [0, 2].
    - mse: `|a - b|^2` over all parameters; the only one that depends on the length of the gradients.

    Args:
        ours: of the synthetic set.
        theirs: the target, of the same names.
        matching: one of `MATCHINGS`.
        row_weights: of layerwise_cosine: `[G, rows]` for each name, in [0, 1].

    Reference: Zhao, Mopuri and Bilen (2021), their code (layerwise_cosine); Wang and Wang (2024), eq. 27 (mse).

    >>> ours, theirs = {"w": torch.tensor([[[3.0, 0.0], [0.0, 2.0]]])}, {"w": torch.tensor([[[1.0, 0.0], [0.0, -1.0]]])}
    >>> distances(ours, theirs, "mse"), round(float(distances(ours, theirs, "layerwise_cosine")), 4)
    (tensor([13.]), 2.0)
    """
    if matching == "layerwise_cosine":
        parts = []
        for name, one in ours.items():
            if one.dim() >= 3:
                apart = 1 - _cosine(one.flatten(2), theirs[name].flatten(2))
                parts.append((apart if row_weights is None else apart * row_weights[name]).sum(dim=1))
        return torch.stack(parts).sum(dim=0)
    a, b = _flat(ours), _flat({name: theirs[name] for name in ours})
    return (a - b).square().sum(dim=1) if matching == "mse" else 1 - _cosine(a, b)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Over the last dimension."""
    norms = [(one.square().sum(dim=-1) + _NEAR_ZERO).sqrt() for one in (a, b)]
    return (a * b).sum(dim=-1) / (norms[0] * norms[1] + _GUARD)


def _flat(by_class: ByClass) -> Tensor:
    """`[G, d]`."""
    return torch.cat([one.flatten(1) for one in by_class.values()], dim=1)


def noise_aware_rows(target: ByClass, noise_std: float) -> dict[str, Tensor]:
    """Weights of the target's rows, `[G, rows]` for each name: ~ `max(0, 1 - n s^2 / |row|^2)` for a row of n numbers.

    A row that is all noise has a random direction and should not drive the images. A class's weights add up to its
    number of rows, so that the images move no slower; where all rows are noise, they are zeros.

    Args:
        target: released gradients.
        noise_std: s, of one number of `target`, >= 0: public, for the mechanism is.

    **Privacy** Post-processing.
    """
    weights = {}
    for name, one in target.items():
        if one.dim() >= 3:
            rows = one.flatten(2)
            size = rows.square().sum(dim=-1)
            weights[name] = (1 - rows.shape[-1] * noise_std**2 / size.clamp_min(_NEAR_ZERO)).clamp_min(0.0)
    mean = torch.cat(list(weights.values()), dim=1).mean(dim=1, keepdim=True)
    return {name: torch.where(mean > 0, one / mean.clamp_min(_NEAR_ZERO), 0.0) for name, one in weights.items()}


def coordinate_median(blocks: Tensor, holds: Tensor, fewest: int = 3) -> Tensor:
    """The median of every coordinate over the clients that hold the class, `[G, d]`.

    An even number of them gives the mean of the two in the middle. Fewer than `fewest` give their plain mean; none
    gives zeros.

    Args:
        blocks: `[C, G, d]`, each client's mean gradient of each class.
        holds: `[C, G]` bool.

    Reference: Yin et al. (2018), coordinate-wise median.
    """
    rows = []
    for own, held in zip(blocks.unbind(dim=1), holds.unbind(dim=1), strict=True):
        some = own[held]
        if len(some) >= fewest:
            # in pieces: torch.quantile takes 16 million numbers at most
            rows.append(torch.cat([_median(part) for part in some.split(1 << 16, dim=1)]))
        else:
            rows.append(some.mean(dim=0) if len(some) else torch.zeros_like(own[0]))
    return torch.stack(rows)


def _median(rows: Tensor) -> Tensor:
    """`torch.median` would give the lower of two in the middle."""
    return rows.quantile(0.5, dim=0)


class ClassGradientsOf(Protocol):
    """The gradient of the mean loss of each class's images, by name `[g, *shape]`; differentiable in `images`.

    Args (of a call):
        loss: `(params, x [B, *X], y [B]) -> [B]`.
        params: all parameters of the net.
        names: those whose gradients are wanted.
        images: `[g, n, *X]`.
        classes: `[g]`, of which class each row is.
    """

    def __call__(
        self, loss: SampleLoss, params: Params, names: Sequence[str], images: Tensor, classes: Tensor
    ) -> dict[str, Tensor]: ...


def class_by_class(
    loss: SampleLoss, params: Params, names: Sequence[str], images: Tensor, classes: Tensor
) -> dict[str, Tensor]:
    """The reference `ClassGradientsOf`: one class after the other by plain autograd."""
    everything = {name: value.detach() for name, value in params.items()}
    wanted = {name: everything[name].requires_grad_() for name in names}
    rows = []
    with torch.enable_grad():
        for own, label in zip(images, classes, strict=True):
            mean = loss(everything, own, label.expand(len(own))).mean()
            rows.append(torch.autograd.grad(mean, list(wanted.values()), create_graph=True, materialize_grads=True))
    return {name: torch.stack(parts) for name, parts in zip(names, zip(*rows, strict=True), strict=True)}


def all_classes_at_once(
    loss: SampleLoss, params: Params, names: Sequence[str], images: Tensor, classes: Tensor
) -> dict[str, Tensor]:
    """The same in one pass, by `vmap` over classes; use it through `fastest_class_gradients`."""
    fixed = {name: value.detach() for name, value in params.items()}

    def mean_loss(wanted: Params, x: Tensor, label: Tensor) -> Tensor:
        return loss({**fixed, **wanted}, x, label.expand(len(x))).mean()

    by_class = vmap(grad(mean_loss), in_dims=(None, 0, 0), randomness="different")
    return by_class({name: fixed[name] for name in names}, images, classes)


def fastest_class_gradients(
    loss: SampleLoss, params: Params, names: Sequence[str], input_shape: Sequence[int]
) -> ClassGradientsOf:
    """`all_classes_at_once` if it moves random images of this very net as `class_by_class` does, which else it is.

    What it guards against is silent: under `vmap`, torch's LayerNorm takes its mean and deviation for constants in
    second derivatives.

    Args:
        loss, params, names: see `ClassGradientsOf`.
        input_shape: X.
    """
    like, generator = next(iter(params.values())), torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(like.device, like.dtype)

    images, classes = draw(2, 2, *input_shape), torch.arange(2, device=like.device)
    directions = {name: draw(2, *params[name].shape) for name in names}

    def slope(gradients: ClassGradientsOf) -> Tensor:
        """Of the gradients along random directions, each parameter's by its own length: small ones count, too."""
        own = images.clone().requires_grad_()
        with torch.enable_grad():
            by_class = gradients(loss, params, names, own, classes)
            whole = _flat(by_class).detach().norm()
            parts = [
                (one * directions[name]).sum() / (one.detach().norm() + 0.01 * whole) for name, one in by_class.items()
            ]
            return torch.autograd.grad(torch.stack(parts).sum(), own)[0]

    expected = slope(class_by_class)
    try:
        apart = (slope(all_classes_at_once) - expected).norm()
    except Exception:  # a user's forward may raise anything under vmap
        return class_by_class
    return all_classes_at_once if bool(apart <= _ALIKE * expected.norm()) else class_by_class


@dataclass(frozen=True)
class SyntheticSet:
    """Images of every class and the momentum of their gradient descent.

    Args:
        images: `[G, n, *X]`, normalised as the records are; class g at row g.
        velocity: likewise.
    """

    images: Tensor
    velocity: Tensor

    @classmethod
    def of_noise(
        cls, num_classes: int, images_per_class: int, shape: Sequence[int], generator: torch.Generator
    ) -> SyntheticSet:
        """Standard normal images, which need nobody's data."""
        images = torch.randn(num_classes, images_per_class, *shape, generator=generator)
        return cls(images, torch.zeros_like(images))

    def to(self, device: torch.device, dtype: torch.dtype) -> SyntheticSet:
        return SyntheticSet(self.images.to(device, dtype), self.velocity.to(device, dtype))

    @property
    def records(self) -> tuple[Tensor, Tensor]:
        """All images `[G n, *X]` and their labels `[G n]`, class by class."""
        labels = torch.arange(len(self.images), device=self.images.device)
        return self.images.flatten(0, 1), labels.repeat_interleave(self.images.shape[1])

    @property
    def is_finite(self) -> bool:
        return bool(self.images.isfinite().all()) and bool(self.velocity.isfinite().all())

    def moved(self, rows: Tensor, slope: Tensor, learning_rate: float, momentum: float) -> SyntheticSet:
        """One step of gradient descent with momentum of the classes at `rows`; the others and their momentum stay.

        Args:
            rows: `[g]` classes.
            slope: `[g, n, *X]`.
        """
        velocity, images = self.velocity.clone(), self.images.clone()
        velocity[rows] = momentum * velocity[rows] + slope
        images[rows] -= learning_rate * velocity[rows]
        return SyntheticSet(images, velocity)


@dataclass(frozen=True)
class Matching:
    """How images are moved towards a target.

    Args:
        loss: `(params, x [B, *X], y [B]) -> [B]`.
        names: parameters whose gradients are matched.
        distance: one of `MATCHINGS`.
        learning_rate: of the images, > 0.
        momentum: of the images, in [0, 1).
        gradients: of the synthetic set; see `fastest_class_gradients`.
        augment: `(x [B, *X], y [B]) -> x`, what was done to the clients' records, or None.
        at_once: images of a pass, >= 1; a pass has one class at least.
        threads: whether passes run side by side; `loss` must then serve several threads, and `gradients` autograd's.
    """

    loss: SampleLoss
    names: tuple[str, ...]
    distance: str
    learning_rate: float
    momentum: float
    gradients: ClassGradientsOf = class_by_class
    augment: Callable[[Tensor, Tensor], Tensor] | None = None
    at_once: int = _IMAGES_AT_ONCE
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
        """What is fastest on the module's device: one class after the other on each core, or vectorised passes.

        Args:
            module: whose loss; its own parameters are neither read nor changed.
            names, distance, learning_rate, momentum: see above.
            input_shape: X.
        """
        chosen = (tuple(names), distance, learning_rate, momentum)
        if module.flat.device.type == "cpu":
            like = torch.empty(0, *input_shape), torch.empty(0, dtype=torch.long)
            return cls(FastLoss(module, *like), *chosen, at_once=1, threads=True)
        params = module.unflatten(module.flat)
        gradients = fastest_class_gradients(module.sample_loss, params, names, input_shape)
        return cls(module.sample_loss, *chosen, gradients=gradients)

    def slope(
        self,
        images: Tensor,
        classes: Tensor,
        params: Params,
        target: ByClass,
        row_weights: ByClass | None = None,
    ) -> tuple[Tensor, Tensor]:
        """How the distance changes with the images, `[g, n, *X]`, and the distance of each class, `[g]`.

        Args:
            images: `[g, n, *X]`.
            classes: `[g]`, of which class each row is.
            params: all parameters of the net.
            target: `[g, *shape]` for each name.
            row_weights: see `distances`.
        """
        with torch.enable_grad():
            own = images.detach().requires_grad_()
            seen = own
            if self.augment is not None:
                labels = classes.repeat_interleave(own.shape[1])
                seen = self.augment(own.flatten(0, 1), labels).view_as(own)
            ours = self.gradients(self.loss, params, self.names, seen, classes)
            apart = distances(ours, target, self.distance, row_weights)
            (slope,) = torch.autograd.grad(apart.sum(), own)
        return slope, apart.detach()

    def step(
        self,
        synthetic: SyntheticSet,
        params: Params,
        target: ByClass,
        present: Tensor,
        row_weights: ByClass | None = None,
    ) -> tuple[SyntheticSet, Tensor]:
        """The set after one step towards `target`, and each class's distance before it, `[G]` with NaN where absent.

        A class's images do not touch another's distance, so that passes may have any number of classes.

        Args:
            params: all parameters of the net.
            target: `[G, *shape]` for each name.
            present: `[G]` bool; absent classes and their momentum stay exactly as they are.
        """

        def one_pass(classes: Tensor) -> tuple[Tensor, Tensor]:
            weights = None if row_weights is None else {name: one[classes] for name, one in row_weights.items()}
            own = {name: target[name][classes] for name in self.names}
            return self.slope(synthetic.images[classes], classes, params, own, weights)

        apart = target[self.names[0]].new_full((len(present),), math.nan)
        rows = present.nonzero().flatten()
        if len(rows) == 0:  # before the passes: `split` of nothing is one pass of no class
            return synthetic, apart
        passes = rows.split(max(1, self.at_once // synthetic.images.shape[1]))
        found = side_by_side(one_pass, passes) if self.threads else list(map(one_pass, passes))
        slopes, distances_before = zip(*found, strict=True)
        apart[rows] = torch.cat(distances_before)
        return synthetic.moved(rows, torch.cat(slopes), self.learning_rate, self.momentum), apart
