"""What a launcher (torchrun, or SLURM's srun) tells a process in its environment. Needs neither torch nor lightning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class Launch(NamedTuple):
    """This process among those that were started together.

    Args:
        command: what started it, to be shown to a person who starts it again.
        rank: in [0, size); rank 0 leads.
        local_rank: in [0, local_size), among the ranks of this host.
    """

    command: str = "python"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def launched(environment: Mapping[str, str] = os.environ) -> Launch:
    """What the environment says; a process alone if no launcher speaks.

    A shell within a SLURM allocation is alone too: only in a step of several tasks has somebody started the others.

    >>> launched({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"})
    Launch(command='python', rank=0, size=1, local_rank=0, local_size=1)
    """

    def numbers(*names: str) -> list[int]:
        return [int(environment[name]) for name in names]

    if "TORCHELASTIC_RUN_ID" in environment:
        return Launch("torchrun ...", *numbers("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        rank, size, local_rank, hosts = numbers("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES")
        return Launch("srun ... python", rank, size, local_rank, size // hosts)
    return Launch()
