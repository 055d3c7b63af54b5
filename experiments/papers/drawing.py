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

_MARKERS = "osD^v"  # of ten series each, as there are ten colours


def panels_figure(title: str, panels: Sequence[Panel]) -> Figure:
    """Draw panels side by side; more than four are arranged in rows of three."""
    across = len(panels) if len(panels) <= 4 else 3
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(max(7.5, 5.0 * across), 4.8 * down), dpi=120, layout="constrained")
    figure.suptitle(textwrap.fill(title, 60 * across), fontsize=10)
    names = max((list(panel.series) for panel in panels), key=len)
    common = len(names) > 1 and all(panel.series.keys() <= set(names) for panel in panels)
    first: dict[tuple, Any] = {}  # panels of one quantity have one scale
    for place, panel in enumerate(panels, start=1):
        quantity = panel.y, panel.log, panel.kind
        words = {"title": textwrap.fill(panel.title, 50), "xlabel": panel.x, "ylabel": panel.y}
        axes = figure.add_subplot(down, across, place, sharey=first.get(quantity), **words)
        first.setdefault(quantity, axes)
        quiet(axes)
        _draw(axes, panel, names if common else list(panel.series))
        for which in panel.log:
            log_scale(axes, which)
        if len(panel.series) > 1 and not common:
            axes.legend(fontsize=7)
    if common:
        drawn = dict(
            reversed(pair) for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)
        )
        handles = {name: drawn[name] for name in names if name in drawn}
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=2 * across, fontsize=7)
    return figure


def _draw(axes: Any, panel: Panel, names: Sequence[str]) -> None:
    """`names` of series decide on colours and markers."""
    looks = {name: {"color": f"C{names.index(name) % 10}", "label": name} for name in panel.series}
    series = {name: list(zip(*points, strict=True)) for name, points in panel.series.items() if points}
    if panel.kind in ("bars", "dots"):
        _side_by_side(axes, panel.kind, series, looks, names)
        return
    for name, (x, y, *band) in series.items():
        if panel.kind == "points":
            axes.scatter(x, y, s=30, alpha=0.7, linewidth=0, **looks[name])
            continue
        axes.plot(x, y, linewidth=1.2, marker="o" if len(x) <= 30 else None, markersize=3, **looks[name])
        if band:
            low, high = np.subtract(y, band[0]), np.add(y, band[0])
            axes.fill_between(x, low, high, alpha=0.2, linewidth=0, color=looks[name]["color"])


def _side_by_side(axes: Any, kind: str, series: dict, looks: dict, names: Sequence[str]) -> None:
    """Draw bars, or dots with bars of error, of all series at each text."""
    width, texts = 0.8 / len(names), list(dict.fromkeys(text for x, *_ in series.values() for text in x))
    for name, (x, y, *error) in series.items():
        number = names.index(name)
        places = [texts.index(text) + (number + 0.5) * width - 0.4 for text in x]
        if kind == "bars":
            axes.bar(places, y, width, **looks[name])
        else:
            axes.errorbar(places, y, *error, fmt=_MARKERS[number // 10], markersize=4, elinewidth=1, **looks[name])
    axes.set_xticks(range(len(texts)), [str(text) for text in texts], fontsize=7 if len(texts) > 12 else None)


def save_svg(figure: Figure, path: Path) -> None:
    """Save the figure as SVG; equal figures give equal bytes."""
    with rc_context({"svg.hashsalt": "dpfl_lightning", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
