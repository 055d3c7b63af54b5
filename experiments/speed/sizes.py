"""Steps of growing nets and of growing batches beside plain steps, in turns, on one thread."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import nn

from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.runtime.threads import one_thread_an_operator
from experiments.speed.baselines import build_net, random_records
from experiments.speed.cases import CASES, NUM_CLASSES
from experiments.speed.parts import PrivateStep, Unchecked, plain_step

PARAMETERS = (10**4, 10**5, 10**6, 10**7, 10**8)
BATCHES = (8, 16, 32, 64, 128, 256, 512)
COMMON = CASES["common"]


def parameter_times(
    say: Callable[[str], None], parameters: Sequence[int] = PARAMETERS, batch: int = 16, repeats: int = 4
) -> dict[str, Any]:
    """Milliseconds of the fastest private step of an MLP, of its noise and update, and of the plain step."""
    found = {}
    with one_thread_an_operator():
        for wanted in parameters:
            net = mlp(wanted)
            exact = sum(parameter.numel() for parameter in net.parameters())
            best = _fastest(net, batch, Unchecked(1), repeats)
            noise, step, plain = (round(1000 * best[part], 3) for part in ("noise, update", "step", "plain"))
            row = {"step": step, "plain": plain, "noise": noise, "share": round(noise / step, 3)}
            found[str(exact)] = {**row, "ratio": round(plain / step, 3)}
            say(f"parameters: {exact:,}, {step:,.1f} ms a step, plain {plain:,.1f} ms")
    return {"of": found, "batch": batch}


def batch_times(say: Callable[[str], None], batches: Sequence[int] = BATCHES, repeats: int = 6) -> dict[str, Any]:
    """Records a second of the fastest step of the common net with batches of these sizes, private and plain."""
    found = {}
    with one_thread_an_operator():
        for batch in batches:
            best = _fastest(build_net(COMMON), batch, FastEngine(1), repeats)
            step, plain = (round(batch / best[part]) for part in ("step", "plain"))
            found[str(batch)] = {"step": step, "plain": plain, "ratio": round(step / plain, 3)}
            say(f"batch: {batch}, {step:,} records/s, plain {plain:,}")
    return {"of": found, "model": COMMON.model}


def mlp(parameters: int) -> nn.Module:
    """A net of three linear layers with about this many parameters."""
    inputs = math.prod(COMMON.input_shape)
    linear = inputs + 2 + NUM_CLASSES  # w^2 + linear w + classes
    width = round((math.sqrt(linear**2 + 4 * (parameters - NUM_CLASSES)) - linear) / 2)
    layers = nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, NUM_CLASSES)
    return nn.Sequential(nn.Flatten(), *layers)


def _fastest(net: nn.Module, batch: int, engine: FastEngine, repeats: int) -> dict[str, float]:
    """Seconds of the parts of the fastest step after a warm-up, and of the fastest `plain` step, in turns."""
    ((x, y),) = random_records(dataclasses.replace(COMMON, clients=1, records=batch))
    ours, plain = PrivateStep(net, x, y, engine), plain_step(net, x, y)
    turns = [(ours.run()[0], plain()) for _ in range(repeats + 1)][1:]
    return {**min((step for step, _ in turns), key=itemgetter("step")), "plain": min(plain for _, plain in turns)}
