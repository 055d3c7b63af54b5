"""Every experiment by its name."""

import functools
import importlib
from collections.abc import Sequence

from dpfl_lightning.errors import nearest, require
from experiments.papers.experiment import Experiment

#: papers; each has a list TABLES in a module of experiments/papers/tables
PAPERS = (
    "noise_aware",
    "clustered",
    "selection",
    "distillation",
    "accountants",
    "robustness",
    "persons",
    "federations",
    "example",
)


@functools.cache
def experiments() -> dict[str, Experiment]:
    """Name -> experiment, of all papers."""
    modules = (importlib.import_module(f"experiments.papers.tables.{paper}") for paper in PAPERS)
    return {experiment.name: experiment for module in modules for experiment in module.TABLES}


def find(names: Sequence[str]) -> list[Experiment]:
    """The experiments of these names; the name of a paper stands for all its experiments.

    Raises:
        UserError: an unknown name.

    >>> [experiment.name for experiment in find(["example"])]
    ['example.digits']
    """
    known = experiments()
    chosen: dict[str, Experiment] = {}
    for name in names:
        allowed = [*known, *PAPERS]
        require(
            name in allowed, "NAME", "be one that `list` shows, or a paper's", name, nearest(name, [*allowed, "list"])
        )
        chosen |= {full: known[full] for full in known if full == name or full.partition(".")[0] == name}
    return list(chosen.values())
