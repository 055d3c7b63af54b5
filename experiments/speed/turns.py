"""Two ways to do the same step, timed in turns, so that a busy machine slows both."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], Tensor]


def in_turns(name: str, ours: Step, loop: Step, repeats: int, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of a step, ours and the loop's, in turns.

    Args:
        name: of the case.
        ours, loop: one step each; what it returns is waited for.
        repeats: timed turns of each, after one that does not count; >= 1.
        steps: of a turn.
        say: told what is done.

    Returns:
        `seconds` and `loop_seconds` of one step in each turn, `ratio_vs_loop` (median over turns), `range_vs_loop`, and
        torch's `threads`.
    """
    found: dict[str, list[float]] = {"seconds": [], "loop_seconds": []}
    for repeat in range(repeats + 1):
        for who, step, times in zip(("ours", "loop"), (ours, loop), found.values(), strict=True):
            begun = time.perf_counter()
            for _ in range(steps):
                done = step()
            float(done.sum())  # waits for a GPU
            took = (time.perf_counter() - begun) / steps
            if repeat:
                times.append(round(took, 4))
            say(f"{name}: {who}, {f'{repeat} of {repeats}' if repeat else 'warm-up'}, {took:.3f} s a step")
    ratios = [theirs / own for own, theirs in zip(found["seconds"], found["loop_seconds"], strict=True)]
    return {
        "ratio_vs_loop": round(median(ratios), 3),
        "range_vs_loop": [round(min(ratios), 3), round(max(ratios), 3)],
        "threads": torch.get_num_threads(),
        **found,
    }
