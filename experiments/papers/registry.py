"""Every experiment by its name."""

import functools
from collections.abc import Sequence

from dpfl_lightning.errors import nearest, require
from experiments.papers.declarations import declared
from experiments.papers.experiment import Experiment

#: papers, each with a YAML file here
PAPERS = (
    "noise_aware",
    "clustered",
    "selection",
    "distillation",
    "accountants",
    "leaderboard",
    "robustness",
    "example",
)


@functools.cache
def experiments() -> dict[str, Experiment]:
    """Name -> experiment, of all papers."""
    return {experiment.name: experiment for paper in PAPERS for experiment in declared(paper)}


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
        allowed, near = [*known, *PAPERS], nearest(name, [*known, *PAPERS, "list"])
        require(name in allowed, "NAME", "be one that `list` shows, or a paper's", name, near)
        chosen |= {full: known[full] for full in known if full == name or full.partition(".")[0] == name}
    return list(chosen.values())
