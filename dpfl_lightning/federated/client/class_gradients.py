"""What a client computes and sends for the job `ClassGradients`."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfl_lightning.federated.client.module import LocalTask
from dpfl_lightning.federated.messages.jobs import ClassGradients


def augmented(job: ClassGradients, x: Tensor, y: Tensor) -> Tensor:
    """The records `x` `[B, *X]` of classes `y` `[B]`, augmented as the job asks."""
    return x if job.augmentation is None else job.augmentation(x, y)


def release(
    job: ClassGradients, sums: Tensor, task: LocalTask, dtype: torch.dtype, drawn: Tensor, held: Tensor
) -> Tensor:
    """What the client sends, in `dtype`: noised and divided sums, and counts of records if the job asks for them.

    Args:
        sums: `[num_classes, p]`, clipped.
        task: the client's, with its mechanism and its generator.
        drawn: labels of the records in `sums`, `[B]`.
        held: labels of all its records, `[n]`.

    **Privacy** One step of the task's mechanism; counts are exact (see `ClassGradients.counts`).
    """
    noised = task.mechanism.privatise(sums, task.noise, dtype)
    if not job.counts:
        return noised
    numbers = torch.stack([labels.bincount(minlength=job.num_classes) for labels in (drawn, held)], dim=1)
    return torch.cat([noised, numbers.to(noised.dtype) / task.mechanism.expected_batch_size], dim=1)
