"""`dpfl fit` as the server app of Flower, whose SuperNodes carry the messages to the nodes of sites."""

from __future__ import annotations

import functools
import os
import shlex
from typing import TYPE_CHECKING

from dpfl_lightning.commands.fit import run
from dpfl_lightning.errors import command

if TYPE_CHECKING:
    from dpfl_lightning.sites.server.flower import Grid


def fit(grid: Grid, folder: str, arguments: str) -> None:
    """Run `dpfl fit` in `folder` with `arguments`, among them --plan; Flower has one SuperNode for each site.

    Raises RuntimeError, so that Flower marks its run as failed, if the command fails.
    """
    from dpfl_lightning.sites.server.flower import connected

    os.chdir(folder)
    status = command(functools.partial(run, connect=functools.partial(connected, grid)))(shlex.split(arguments))
    if status:
        raise RuntimeError(f"`dpfl fit {arguments}` has ended with status {status}; see its messages above")
