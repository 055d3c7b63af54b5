"""Figures of panels, drawn with matplotlib."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from dpfl_lightning.reporting.figures import log_scale, quiet
from experiments.papers.experiment import Panel


def panels_figure(title: str, panels: Sequence[Panel]) -> Figure:
    """Draw panels side by side; more than four are arranged in rows of three."""
    across = len(panels) if len(panels) <= 4 else 3
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(max(7.5, 5.0 * across), 4.8 * down), dpi=120, layout="constrained")
    figure.suptitle(textwrap.fill(title, 60 * across), fontsize=10)
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(down, across, place, title=panel.title, xlabel=panel.x, ylabel=panel.y)
        quiet(axes)
        _draw(axes, panel)
        for which in panel.log:
            log_scale(axes, which)
        if len(panel.series) > 1:
            axes.legend(fontsize=7)
    return figure


def _draw(axes: Any, panel: Panel) -> None:
    if panel.kind == "bars":
        _bars(axes, panel)
        return
    for name, points in panel.series.items():
        x, y, *band = zip(*points, strict=True)
        if panel.kind == "points":
            axes.scatter(x, y, s=30, alpha=0.7, linewidth=0, label=name)
            continue
        axes.plot(x, y, label=name, linewidth=1.2, marker="o" if len(x) <= 30 else None, markersize=3)
        if band:
            low, high = np.subtract(y, band[0]), np.add(y, band[0])
            axes.fill_between(x, low, high, alpha=0.2, linewidth=0)


def _bars(axes: Any, panel: Panel) -> None:
    names = list(dict.fromkeys(point[0] for points in panel.series.values() for point in points))
    width = 0.8 / len(panel.series)
    for number, (name, points) in enumerate(panel.series.items()):
        places = [names.index(point[0]) + (number + 0.5) * width - 0.4 for point in points]
        axes.bar(places, [point[1] for point in points], width, label=name)
    axes.set_xticks(range(len(names)), [str(name) for name in names], fontsize=7 if len(names) > 12 else None)


def save_svg(figure: Figure, path: Path) -> None:
    """Save the figure as SVG; equal figures give equal bytes."""
    with rc_context({"svg.hashsalt": "dpfl_lightning", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
