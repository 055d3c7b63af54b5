"""The distilled set in the folder of a run, for reports and trackers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dpfl_lightning.papers.sets.distilled_set import CARD, DATA_CARD, TENSORS, DistilledSet
from dpfl_lightning.runtime.launcher import invocation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Product:
    files = (TENSORS, CARD, DATA_CARD)

    def contents(self) -> str:
        return f"{TENSORS} and {DATA_CARD}: the distilled set, and its data card"

    def next_steps(self, folder: Path) -> list[str]:
        return [f"{invocation('sweep')} --config SWEEP.yaml --sweep.distilled {folder}: search on the set"]

    def figures(self, folder: Path) -> Mapping[str, Figure]:
        if not (folder / TENSORS).is_file():
            return {}
        grid = DistilledSet.load(folder).grid()
        if grid is None:
            return {}
        from matplotlib.figure import Figure

        height, width = grid.shape[:2]
        figure = Figure(figsize=(6.5, max(1.5, 6.5 * height / width) + 0.8), dpi=150, layout="constrained")
        axes = figure.add_subplot(title="Synthetic images, one row per class")
        axes.imshow(grid.squeeze(2).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_axis_off()
        return {"distilled_images": figure}
