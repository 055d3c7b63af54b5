"""Declared cells of the papers' tables, and the runs that they stand for."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from dpfl_lightning.config.options import Options
from experiments.papers.cells import Cell, wanted
from experiments.papers.experiment import Experiment, Training
from experiments.papers.run import Work, how, options_of


def some_cells(experiments: Iterable[Experiment]) -> list[Cell]:
    """Trained ones: of every experiment and row the first and the last column, at each scale, seed 0."""
    cells: dict[Cell, None] = {}
    for experiment in experiments:
        ends = [next(iter(experiment.columns)), list(experiment.columns)[-1]]
        for scale in experiment.scales:
            cells |= dict.fromkeys(wanted(experiment.restricted(None, ends), scale, None))
    return [cell for cell in cells if isinstance(how(cell), Training) and not cell.seed]


@functools.cache
def options(cell: Cell) -> Options:
    """Of a cell's run."""
    return options_of(cell, Work(None, Path("results"), Path("runs")))
