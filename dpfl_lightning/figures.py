"""The curves of a run as matplotlib figures, and the names of the metrics they are drawn from."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from dpfl_lightning.federated.state import RunResult

if TYPE_CHECKING:
    from dpfl_lightning.reproduction.experiment import Panel

MOST_CLIENTS = 100  # more than this are shown as min, mean and max


def per_client(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """`name/07` for each client, or `name/min`, `name/mean`, `name/max` for many.

    >>> per_client("per_client_epsilon", [1.0, 2.0])
    {'per_client_epsilon/00': 1.0, 'per_client_epsilon/01': 2.0}
    """
    if len(values) <= MOST_CLIENTS:
        return {f"{name}/{client:02}": value for client, value in enumerate(values)}
    known = [value for value in values if value is not None]
    return {f"{name}/{how.__name__.removeprefix('f')}": how(known) for how in (min, fmean, max)}


def figures(history: Callable[[str], Mapping[int, float]], result: RunResult) -> dict[str, Figure]:
    """Name -> figure, of those curves that have data.

    Args:
        history: metric name -> {round: value}, as logged.
        result: for budgets and final accuracies.
    """
    drawn = {
        "accuracy_over_rounds": _accuracy_figure(history, len(result.clients)),
        "epsilon_over_rounds": _epsilon_figure(history, len(result.clients)),
        "accuracy_over_budget": _budget_figure(result),
    }
    for name in ("epsilon_over_rounds", "accuracy_over_budget"):
        if (figure := drawn[name]) is not None:  # a picture travels alone: what its epsilons mean goes with it
            figure.supxlabel(textwrap.fill(result.guarantee, 150), fontsize=6, color="gray")
    return {name: figure for name, figure in drawn.items() if figure is not None}


def memory_figure(peak_mib: Mapping[str, float]) -> Figure:
    """Peak memory in MiB by the number of clients."""
    figure, axes = _axes("Peak memory of a run", "clients", "MiB")
    clients = [int(count) for count in peak_mib]
    axes.plot(clients, list(peak_mib.values()), marker="o")
    for count, peak in zip(clients, peak_mib.values(), strict=True):
        axes.annotate(f"{peak:,}", (count, peak), (0, 7), textcoords="offset points", fontsize=8, ha="center")
    axes.set_ylim(0, 1.25 * max(peak_mib.values()))
    _log_scale(axes, "x")
    return figure


def panels_figure(title: str, panels: Sequence[Panel]) -> Figure:
    """Panels side by side."""
    figure = Figure(figsize=(max(7.5, 5.0 * len(panels)), 4.8), dpi=120, layout="constrained")
    figure.suptitle(textwrap.fill(title, 60 * len(panels)), fontsize=10)
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), place, title=panel.title, xlabel=panel.x, ylabel=panel.y)
        _quiet(axes)
        (_bars if panel.kind == "bars" else _lines)(axes, panel)
        for which in panel.log:
            _log_scale(axes, which)
        if len(panel.series) > 1:
            axes.legend(fontsize=7)
    return figure


def _lines(axes: Any, panel: Panel) -> None:
    for name, points in panel.series.items():
        x, y, *band = zip(*points, strict=True)
        axes.plot(x, y, label=name, linewidth=1.2, marker="o" if len(x) <= 30 else None, markersize=3)
        if band:
            low, high = ([value + sign * half for value, half in zip(y, band[0], strict=True)] for sign in (-1, 1))
            axes.fill_between(x, low, high, alpha=0.2, linewidth=0)


def _bars(axes: Any, panel: Panel) -> None:
    names = list(dict.fromkeys(point[0] for points in panel.series.values() for point in points))
    width = 0.8 / len(panel.series)
    for number, (name, points) in enumerate(panel.series.items()):
        places = [names.index(point[0]) + (number + 0.5) * width - 0.4 for point in points]
        axes.bar(places, [point[1] for point in points], width, label=name)
    axes.set_xticks(range(len(names)), [str(name) for name in names], fontsize=7 if len(names) > 12 else None)


def save_svg(figure: Figure, path: Path) -> None:
    """The same bytes for the same figure."""
    with rc_context({"svg.hashsalt": "dpfl_lightning", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def _accuracy_figure(history: Callable[[str], Mapping[int, float]], num_clients: int) -> Figure | None:
    test = history("overall/test_accuracy")
    if not test:
        return None
    figure, axes = _axes("Accuracy over rounds", "round", "accuracy")
    curves = [history(f"per_client_accuracy/{name}") for name in _names(num_clients)]
    rounds = [step for step in test if any(step in curve for curve in curves)]
    if rounds:
        spread = [[curve[step] for curve in curves if step in curve] for step in rounds]
        low, high = [min(values) for values in spread], [max(values) for values in spread]
        axes.fill_between(rounds, low, high, alpha=0.2, linewidth=0, label="clients, on own held-out records")
    axes.plot(
        list(test),
        list(test.values()),
        marker="o" if len(test) <= 30 else None,
        markersize=3,
        label="test set",
    )
    axes.legend()
    return figure


def _epsilon_figure(history: Callable[[str], Mapping[int, float]], num_clients: int) -> Figure | None:
    curves = {name: history(f"per_client_epsilon/{name}") for name in _names(num_clients)}
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        return None
    figure, axes = _axes("Epsilon spent, by client", "round", "epsilon")
    names_at: dict[tuple[int, float], list[str]] = {}
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), linewidth=1.2)
        names_at.setdefault((max(curve), curve[max(curve)]), []).append(name)
    ends = [epsilon for _, epsilon in names_at]
    if max(ends) > 10 * min(ends) > 0:
        _log_scale(axes, "y")
    for end, names in names_at.items():  # clients with the same curve share a label
        label = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        axes.annotate(label, end, (4, -2), textcoords="offset points", fontsize=7)
    return figure


def _budget_figure(result: RunResult) -> Figure | None:
    points = [(c["epsilon_budget"], c["accuracy"], c["client"]) for c in result.clients]
    points = [point for point in points if None not in point]
    if not points:
        return None
    figure, axes = _axes("Accuracy on own held-out records, by client", "epsilon budget", "accuracy")
    axes.scatter([budget for budget, _, _ in points], [accuracy for _, accuracy, _ in points], s=18)
    budgets = [budget for budget, _, _ in points]
    if max(budgets) > 10 * min(budgets):
        _log_scale(axes, "x")
    for budget, accuracy, client in points if len(points) <= MOST_CLIENTS else []:
        axes.annotate(f"{client:02}", (budget, accuracy), (4, 3), textcoords="offset points", fontsize=7)
    return figure


def _names(num_clients: int) -> list[str]:
    """The last part of `per_client`'s names."""
    return [name.partition("/")[2] for name in per_client("", [0.0] * num_clients)]


def _axes(title: str, x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x, ylabel=y)
    _quiet(axes)
    return figure, axes


def _quiet(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _log_scale(axes: Any, which: str) -> None:
    """With plain numbers at its ticks."""
    axes.set(**{f"{which}scale": "log"})
    getattr(axes, f"{which}axis").set_major_formatter("{x:g}")
