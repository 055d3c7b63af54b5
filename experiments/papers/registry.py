"""Every experiment by its name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence

from dpfl_lightning.errors import nearest, require
from experiments.papers.experiment import Experiment

#: papers, each a module here with its `EXPERIMENTS`
PAPERS = ("noise_aware", "clustered", "selection", "distillation", "example")


@functools.cache
def experiments() -> dict[str, Experiment]:
    """Name -> experiment, of all papers."""
    modules = [importlib.import_module(f"experiments.papers.{paper}") for paper in PAPERS]
    return {one.name: one for module in modules for one in module.EXPERIMENTS}


def find(names: Sequence[str]) -> list[Experiment]:
    """The experiments of these names; a paper's name stands for all of its own.

    Raises:
        UserError: an unknown name.

    >>> [one.name for one in find(["example"])]
    ['example.digits']
    """
    known = experiments()
    chosen: dict[str, Experiment] = {}
    for name in names:
        there, near = [*known, *PAPERS], nearest(name, [*known, *PAPERS, "list"])
        require(name in there, "NAME", "be one that `list` shows, or a paper's", name, near)
        chosen |= {one: known[one] for one in known if one == name or one.partition(".")[0] == name}
    return list(chosen.values())
