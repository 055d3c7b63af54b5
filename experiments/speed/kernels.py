"""What each compiled loop saves of a training step of the engine `fast`: CPU time without it / with it, in turns."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

from dpfl_lightning.kernels import dense_conv, sparse_conv
from dpfl_lightning.privacy.clipping import fast, gradient_sums
from dpfl_lightning.runtime.threads import one_thread_an_operator
from experiments.speed.baselines import build_net, random_records
from experiments.speed.cases import CASES
from experiments.speed.parts import PrivateStep, Unchecked

#: kernel -> the nets that use it, and what switches it off: a place, a name and the answer that stands there instead
KERNELS: dict[str, tuple[tuple[str, ...], Any, str, Any]] = {
    "dense_conv": (("convnet", "resnet20", "resnet18"), dense_conv, "_has_blocks", False),
    "sparse_conv": (("common", "batch_16", "lenet5"), sparse_conv, "suits", False),
    "pooling": (("common", "batch_16", "lenet5"), fast, "stages_of", ()),
    "float64_sums": (("common", "batch_16", "convnet"), gradient_sums, "_float32_pair", None),
}
_STEPS = 2  # in a turn
_PASS = 32  # records of a pass at most, so that none is padded


def kernel_times(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """For each kernel and net: 4 `repeats` ratios in order."""
    found: dict[str, Any] = {}
    with one_thread_an_operator():
        for kernel, (nets, owner, attribute, value) in KERNELS.items():
            found[kernel] = {}
            for name in nets:
                found[kernel][name] = ratios = _ratios(name, owner, attribute, value, 4 * repeats)
                say(f"{kernel}: {name} takes {median(ratios):.2f} times as long without")
    return found


def _ratios(name: str, owner: Any, attribute: str, value: Any, turns: int) -> list[float]:
    case = dataclasses.replace(CASES[name], clients=1, records=CASES[name].batch_size)
    ((x, y),) = random_records(case)

    @contextmanager
    def without() -> Iterator[None]:
        with patch.object(owner, attribute, lambda *args: value):
            yield

    def seconds(step: PrivateStep) -> float:
        return min(parts["step"] for parts in step.run(_STEPS))

    def prepared() -> PrivateStep:
        engine = Unchecked(1)
        engine.size = min(_PASS, case.batch_size)
        return PrivateStep(build_net(case), x, y, engine)

    ours = prepared()
    with without():
        plain = prepared()
    ratios = []
    for _ in range(turns + 1):  # the first turn is a warm-up
        before = seconds(ours)
        with without():
            taken = seconds(plain)
        ratios.append(2 * taken / (before + seconds(ours)))
    return sorted(ratios[1:])
