"""A step of gradient matching beside the same step as it is usually written, one class after the other."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpfl_lightning import models
from dpfl_lightning.algorithms.gradient_matching import Matching, SyntheticSet, matched_names
from dpfl_lightning.federated.client.module import ClientModule
from experiments.speed.cases import NUM_CLASSES

Step = Callable[[], Tensor]
SHAPE, IMAGES_PER_CLASS = (1, 28, 28), 10
LEARNING_RATE, MOMENTUM = 10.0, 0.5


def matching_times(
    repeats: int, device: torch.device, say: Callable[[str], None], width: int = 128, steps: int = 3
) -> dict[str, Any]:
    """A step on the images of all classes, ours and the loop's: as `in_turns`, `parameters` and `images`."""
    return {
        **in_turns("matching", ours(width, device), loop(width, device), repeats, steps, say),
        "parameters": num_parameters(width),
        "images": NUM_CLASSES * IMAGES_PER_CLASS,
    }


def build(width: int) -> nn.Module:
    """The net, with the same initial parameters every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return models.build("convnet", SHAPE, NUM_CLASSES, width=width)


def num_parameters(width: int) -> int:
    return sum(parameter.numel() for parameter in build(width).parameters())


def first_images() -> SyntheticSet:
    return SyntheticSet.of_noise(NUM_CLASSES, IMAGES_PER_CLASS, SHAPE, torch.Generator().manual_seed(0))


def target_of(net: nn.Module) -> dict[str, Tensor]:
    """A random gradient for each class and matched parameter, `[G, *shape]`, the same every time."""
    shapes = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(NUM_CLASSES, *shapes[name], generator=generator)
        for name in matched_names(shapes, "layerwise_cosine")
    }


def ours(width: int, device: torch.device) -> Step:
    """Moves the images by a step of the strategy, and returns them `[G, n, *X]`."""
    module = ClientModule(build(width)).to(device)
    params = module.unflatten(module.flat)
    target = {name: one.to(device) for name, one in target_of(module.net).items()}
    matching = Matching.of(
        module, tuple(target), SHAPE, "layerwise_cosine", learning_rate=LEARNING_RATE, momentum=MOMENTUM
    )
    present = torch.ones(NUM_CLASSES, dtype=torch.bool, device=device)
    synthetic = first_images().to(device, torch.float32)

    def step() -> Tensor:
        nonlocal synthetic
        synthetic, _ = matching.step(synthetic, params, target, present)
        return synthetic.images

    return step


def loop(width: int, device: torch.device) -> Step:
    """The same as in the condensation paper's code: a gradient with a graph and its distance for each class."""
    net = build(width).to(device)
    weights = {name: parameter for name, parameter in net.named_parameters() if parameter.dim() >= 2}
    target = {name: one.to(device) for name, one in target_of(net).items()}
    images = first_images().images.to(device).requires_grad_()
    rows = sum(len(parameter) for parameter in weights.values())  # ours is the step for a mean over rows
    optimizer = torch.optim.SGD([images], lr=LEARNING_RATE / rows, momentum=MOMENTUM)

    def step() -> Tensor:
        apart = images.new_zeros(())
        for label in range(NUM_CLASSES):
            labels = torch.full((IMAGES_PER_CLASS,), label, device=device)
            loss = cross_entropy(net(images[label]), labels)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            for name, gradient in zip(weights, gradients, strict=True):
                a, b = gradient.flatten(1), target[name][label].flatten(1)
                norms = (a.square().sum(dim=1) + 1e-24).sqrt() * b.norm(dim=1)
                apart = apart + (1 - (a * b).sum(dim=1) / (norms + 1e-6)).sum()
        optimizer.zero_grad()
        apart.backward()
        optimizer.step()
        return images.detach()

    return step


def in_turns(
    name: str, ours: Step, theirs: Step, repeats: int, steps: int, say: Callable[[str], None], rival: str = "loop"
) -> dict[str, Any]:
    """Seconds of a step, ours and the rival's, in turns of `steps` steps, after a warm-up, and their ratios."""
    found: dict[str, list[float]] = {"seconds": [], f"{rival}_seconds": []}
    for repeat in range(repeats + 1):
        for who, step, times in zip(("ours", rival), (ours, theirs), found.values(), strict=True):
            begun = time.perf_counter()
            for _ in range(steps):
                done = step()
            float(done.sum())  # waits for a GPU
            took = (time.perf_counter() - begun) / steps
            if repeat:
                times.append(round(took, 6))
            say(f"{name}: {who}, {f'{repeat} of {repeats}' if repeat else 'warm-up'}, {took:.3f} s a step")
    ratios = [b / a for a, b in zip(*found.values(), strict=True)]
    return {
        f"ratio_vs_{rival}": round(median(ratios), 3),
        f"range_vs_{rival}": [round(min(ratios), 3), round(max(ratios), 3)],
        "threads": torch.get_num_threads(),
        **found,
    }
