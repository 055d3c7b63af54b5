"""Clients that take one step from one model are one batch: a pass's fixed cost is paid once, not by each client."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from dpfl_lightning.client import ClientModule, LocalTask
from dpfl_lightning.federated.engine import SerialEngine
from dpfl_lightning.federated.state import ClassGradients, RoundPlan, ServerState

MOST_CLIENTS = 64  # a batch: with more the fixed cost is small already, and workers need several batches
MOST_RECORDS = 512  # expected in a batch, for the same reason
MOST_BYTES = 64 << 20  # of the sums `[clients * G, P]` in float64


def groups(plan: RoundPlan, module: ClientModule) -> list[list[int]]:
    """The rows of the plan, those together that make one batch: one step, one start, one clip norm.

    A function of the plan and the module's size alone, so the bits of a release do not depend on workers or memory.
    """
    if module.personal or any(steps != 1 for steps in plan.steps):
        return [[row] for row in range(len(plan.clients))]
    alike = defaultdict(list)
    for row, (model, mechanism) in enumerate(zip(plan.model_of, plan.mechanism_of, strict=True)):
        alike[model, mechanism.clip_norm].append(row)
    most = max(1, min(MOST_CLIENTS, MOST_BYTES // (8 * module.num_params * blocks(plan))))
    return [group for rows in alike.values() for group in _cut(plan, rows, most)]


def releases(
    engine: SerialEngine, plan: RoundPlan, rows: Sequence[int], state: ServerState, attempts: Sequence[int]
) -> list[Tensor]:
    """What each client of one group sends: draws, noise and meaning of `engine.release`, row by row.

    Args:
        rows: one of `groups(plan, engine.module)`.
        attempts: `[C]`, of all clients of the plan.
    """
    if len(rows) == 1:
        return [engine.release(plan, row, state, attempts[row]) for row in rows]
    tasks, starts, drawn = zip(*(engine.local_task(plan, row, state, attempts[row]) for row in rows), strict=True)
    xs, ys = zip(*(batches[0] for batches in drawn), strict=True)
    x, y, num_blocks = torch.cat(xs), torch.cat(ys), blocks(plan)
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(own) for own in ys])).to(y.device)
    group = owner * num_blocks + y if isinstance(plan.job, ClassGradients) else owner
    params = engine.module.unflatten(starts[0])
    sums = engine.clipped_sum(params, x, y, tasks[0].mechanism.clip_norm, group, len(rows) * num_blocks)
    return [_release(plan, *own) for own in zip(tasks, starts, sums.split(num_blocks), strict=True)]


def _release(plan: RoundPlan, task: LocalTask, start: Tensor, clipped: Tensor) -> Tensor:
    """One client's release from its clipped sums `[G, P]`."""
    noised = task.mechanism.privatise(clipped, task.noise)
    if isinstance(plan.job, ClassGradients):
        return noised
    step = noised[0]
    if task.anchor is not None:
        step.add_(start - task.anchor, alpha=task.pull)
    return step.mul_(-task.learning_rate)


def blocks(plan: RoundPlan) -> int:
    """G: rows of one client's sums, one or one for each class."""
    return plan.job.num_classes if isinstance(plan.job, ClassGradients) else 1


def _cut(plan: RoundPlan, rows: Sequence[int], most: int) -> list[list[int]]:
    """`rows` in order, a new group where the next client would be one too many, or its expected records."""
    cut: list[list[int]] = []
    records = 0.0
    for row in rows:
        expected = plan.mechanism_of[row].expected_batch_size
        if not cut or len(cut[-1]) == most or records + expected > MOST_RECORDS:
            cut.append([])
            records = 0.0
        cut[-1].append(row)
        records += expected
    return cut
