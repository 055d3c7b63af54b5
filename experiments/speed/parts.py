"""CPU time of one step of training by part, on one thread, beside a plain step and the core's measured peak.

The step is `FastEngine.local_training` itself: what it calls is wrapped from outside while it is timed.
"""

import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import Any
from unittest.mock import patch

import torch
from numba.core.registry import CPUDispatcher
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv2d, cross_entropy
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.dummy_data import dummy_batch
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.federated.client.module import ClientModule, LocalTask
from dpfl_lightning.privacy.clipping.checked import CheckedSum
from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.gradient_sums import Totals
from dpfl_lightning.privacy.clipping.passes import SIZES, FixedPasses
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.privacy.noise import RandomGenerator, Streams
from dpfl_lightning.runtime.threads import one_thread_an_operator
from experiments.speed.baselines import build_net, random_records
from experiments.speed.cases import CASES, CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, NUM_CLASSES, STEP_PARTS

Now = Callable[[], float]
NETS = ("common", "lenet5", "convnet", "resnet20", "resnet18", "lstm", "transformer")
_STEPS = 3  # in a turn
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler tells when it begins and ends


class Unchecked(FastEngine):
    """Takes the layers' rules without their check at the start, which holds 18 gradients of the net in float64."""

    size = SIZES[-1]  # records of a pass

    def choose_clipped_sum(self) -> CheckedSum:
        passes = FixedPasses(dummy_batch(self.population, max(SIZES), self.module.device))
        setattr(passes, "size", lambda what, rows_of, expected: self.size)  # noqa: B010
        return CheckedSum(self.module.net, self.module.sample_loss, passes, FastClippedSum)


class PrivateStep:
    """Steps of one client on a fixed batch x `[B, *X]`, y `[B]`."""

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor, engine: FastEngine) -> None:
        self.x, self.y, self.engine = x, y, engine
        self._seconds: dict[str, float] = {}
        module = ClientModule(net)
        setattr(module, "sample_loss", self._timed("forward", module.sample_loss))  # noqa: B010
        population = Population.from_datasets([(x, y)], held_out=0.0, num_classes=NUM_CLASSES)
        engine.setup(module, population, Streams(), "poisson")
        torch.set_num_threads(1)  # the engine chose for the whole process
        self._start = module.flat
        mechanism = Gaussian(CLIP_NORM, NOISE_MULTIPLIER, 0.1, float(len(x)))
        clipped_sum: Any = self._timed("clipped sum", engine.clipped_sum)
        self._task = LocalTask(clipped_sum, mechanism, RandomGenerator(os.urandom(32)), LEARNING_RATE)

    def run(self, steps: int = 1) -> list[dict[str, float]]:
        """CPU seconds of the parts of each step, and of the `step`, to which they add up."""
        found = []

        @contextmanager
        def clocked() -> Iterator[None]:
            self._seconds.clear()
            begun = time.process_time()
            yield
            step = time.process_time() - begun
            forward, gradients, sums, clipped = (
                self._seconds.get(part, 0.0) for part in ("forward", "gradients", "sums", "clipped sum")
            )
            parts = forward, gradients - forward, clipped - gradients - sums, sums, step - clipped
            found.append(dict(zip(STEP_PARTS, parts, strict=True), step=step))

        places = [(Totals, "__init__"), (Totals, "add"), (Totals, "result"), (ClipRequest, "zeros")]
        of_sums: list[tuple[str, type, str]] = [("sums", *place) for place in places]
        self._train(steps, clocked, [("gradients", FastClippedSum, "_gradients"), *of_sums], time.process_time)
        return found

    def seconds_outside(self) -> float:
        """Seconds of a step outside of torch's operators, compiled loops and the cipher, with the profiler's own."""
        seconds, profiler = [], profile(activities=[ProfilerActivity.CPU], acc_events=True)

        @contextmanager
        def watched() -> Iterator[None]:
            with profiler:
                self._seconds.clear()
                begun = time.perf_counter()
                yield
                seconds.append(time.perf_counter() - begun - self._seconds.get("loops", 0.0))

        loops = [("loops", CPUDispatcher, "__call__"), ("loops", RandomGenerator, "words")]
        self._train(1, watched, loops, time.perf_counter)
        operators = [event for event in profiler.key_averages() if event.key.startswith("aten::")]
        return seconds[0] - sum(event.self_cpu_time_total for event in operators) / 1e6

    def _train(
        self, steps: int, around: Callable[[], Any], places: Sequence[tuple[str, type, str]], clock: Now
    ) -> None:
        """Take steps, each within `around`, while the methods at `places` (part, class, name) are timed."""

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range(steps):
                with around():
                    yield self.x, self.y

        drawn: Any = batches()
        with torch.no_grad(), ExitStack() as stack:
            for part, owner, name in places:
                stack.enter_context(patch.object(owner, name, self._timed(part, getattr(owner, name), clock)))
            self.engine.local_training(self._task, self._start, drawn)

    def _timed(self, part: str, function: Callable[..., Any], clock: Now = time.process_time) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = clock()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[part] = self._seconds.get(part, 0.0) + clock() - begun

        return call


def plain_step(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    """A step of plain SGD; it returns its CPU seconds."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        begun = time.process_time()
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
        return time.process_time() - begun

    return step


def part_times(repeats: int, say: Callable[[str], None], nets: Sequence[str] = NETS) -> dict[str, Any]:
    """For each net: microseconds a record of the fastest step of `repeats` by part, in turns with plain steps.

    `gemm` and `convolution` are the most float32 GFLOP/s of the core in the same turns.
    """
    with one_thread_an_operator():
        found: dict[str, Any] = {"gemm": 0.0, "convolution": 0.0, "repeats": repeats, "of": {}}
        for name in nets:
            case = dataclasses.replace(CASES[name], clients=1, records=CASES[name].batch_size)
            ((x, y),) = random_records(case)
            ours, plain = PrivateStep(build_net(case), x, y, FastEngine(1)), plain_step(build_net(case), x, y)
            steps, outside, plain_seconds = [], [], []
            for _ in range(repeats + 1):
                steps.append(min(ours.run(_STEPS), key=itemgetter("step")))
                outside.append(min(ours.seconds_outside() for _ in range(_STEPS)))
                plain_seconds.append(min(plain() for _ in range(_STEPS)))
                found |= {kind: max(found[kind], round(rate, 1)) for kind, rate in _peaks().items()}
            best = min(steps[1:], key=itemgetter("step"))  # the first turn is a warm-up
            times = {**best, "python": max(0.0, min(outside[1:])), "plain": min(plain_seconds[1:])}
            micros = {part: round(1e6 * seconds / len(x), 1) for part, seconds in times.items()}
            mflop = step_flops(build_net(case), x, y) / len(x) / 1e6
            found["of"][name] = {"model": case.model, "batch": len(x), "mflop": round(mflop, 3), **micros}
            say(f"parts: {name}, {micros['step']:,.0f} us a record, plain {micros['plain']:,.0f} us")
        return found


def step_flops(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Operations of forward pass, input gradients and weight gradients: a record's are as many as its share of the sum.

    Behind 2 x 2 max-pooling three quarters of a gradient are zeros, which are not counted.
    """
    counter = _counted(lambda: cross_entropy(net(x), y).backward())
    counts, zeros = counter.get_flop_counts(), 0.0
    layers = list(net.named_children()) if isinstance(net, nn.Sequential) else []
    for place, (name, layer) in enumerate(layers):
        if isinstance(layer, nn.Conv2d) and any(isinstance(m, nn.MaxPool2d) for _, m in layers[place + 1 : place + 3]):
            zeros += 0.75 * counts[f"Sequential.{name}"][torch.ops.aten.convolution_backward]
    return counter.get_total_flops() - zeros


def _counted(work: Callable[[], Any]) -> FlopCounterMode:
    """Fused operators of LSTM and attention are not counted, so they are computed by their parts."""
    apart = torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH)
    with warnings.catch_warnings(action="ignore"), apart[0], apart[1], FlopCounterMode(display=False) as counter:
        work()
    return counter


def _peaks() -> dict[str, float]:
    """GFLOP/s of a large float32 product and of a large convolution, the best of three."""
    a, form = torch.randn(1024, 1024), torch.channels_last
    x, w = (torch.randn(*shape).to(memory_format=form) for shape in ((8, 128, 32, 32), (128, 128, 3, 3)))
    works: dict[str, Callable[[], Any]] = {"gemm": lambda: a @ a, "convolution": lambda: conv2d(x, w, padding=1)}
    seconds: dict[str, list[float]] = {kind: [] for kind in works}
    for kind in [*works] * 3:
        begun = time.process_time()
        works[kind]()
        seconds[kind].append(time.process_time() - begun)
    return {kind: _counted(work).get_total_flops() / min(seconds[kind]) / 1e9 for kind, work in works.items()}
