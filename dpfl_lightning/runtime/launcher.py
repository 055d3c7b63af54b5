"""The rank of a process, read from the environment of a launcher (torchrun or srun), without torch or lightning."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Launch(NamedTuple):
    """Position of this process among those that `command` started together, and (local) among those of this host."""

    command: str = "python"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def launched(environment: Mapping[str, str] = os.environ) -> Launch:
    """Return the position of this process; without a launcher, or in a shell of a SLURM allocation, it is single.

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


def invocation(command: str, launcher: str = "python") -> str:
    """Return how to call a command, for printed command lines: by `dpfl` if this process was started by it.

    >>> invocation("evaluate"), invocation("fit", "torchrun ...")
    ('python -m dpfl_lightning evaluate', 'torchrun ... -m dpfl_lightning fit')
    """
    by_script = launcher == "python" and Path(sys.argv[0]).stem == "dpfl"
    return f"dpfl {command}" if by_script else f"{launcher} -m dpfl_lightning {command}"
