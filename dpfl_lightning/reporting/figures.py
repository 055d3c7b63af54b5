"""Figures of a run in matplotlib."""

import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from dpfl_lightning.federated.server.curves import MOST_CLIENTS
from dpfl_lightning.federated.server.history import Round
from dpfl_lightning.federated.server.results import ClientEmbedding, RunResult
from dpfl_lightning.federated.server.summary import smallest
from dpfl_lightning.reporting.curves import history
from dpfl_lightning.runtime.text import counted

_MARKERS = "osD^vP*X<>hp"


def figures(
    rounds: Sequence[Round], result: RunResult, products: Mapping[str, Figure] | None = None
) -> dict[str, Figure]:
    """Return name -> figure, for the figures that have data, and those of what strategies have made."""
    drawn: dict[str, Any] = {
        "accuracy_of_groups": _groups_figure(rounds, result),
        "epsilon_over_rounds": _epsilon_figure(rounds),
        "accuracy_over_budget": _budget_figure(result),
        "calibration": _calibration_figure(result),
        "weights": _weights_figure(result),
        "noise_estimated": _noise_figure(result),
        "participation": _participation_figure(result),
        "clients": None if result.client_embedding is None else _clients_figure(result.client_embedding, result),
        **(products or {}),
    }
    drawn = {name: figure for name, figure in drawn.items() if figure is not None}
    shared = {"epsilon_over_rounds", "accuracy_over_budget", "participation", *(products or {})}
    for name in sorted(shared & drawn.keys()):
        # figures are shared without context, so they carry the guarantee
        width = round(20 * drawn[name].get_figwidth())  # characters of this size in a line
        drawn[name].supxlabel(textwrap.fill(str(result.guarantee), width), fontsize=6, color="gray")
    return drawn


def _groups_figure(rounds: Sequence[Round], result: RunResult) -> Figure | None:
    """Draw the accuracy of each true group over rounds; minorities are dashed."""
    true = _true_groups(result)
    curves = {group: history(rounds, f"val_accuracy_group_{group}") for group in sorted(set(true.values()))}
    if not any(curves.values()):
        return None
    figure, axes = new_axes("Accuracy of each true group on the clients' held-out records", "round", "accuracy")
    few = smallest(list(true.values()))
    for group, curve in curves.items():
        style = "--" if group in few else "-"
        axes.plot(list(curve), list(curve.values()), style, color=f"C{group % 10}", label=f"group {group}")
    if matched := history(rounds, "train_clustering_accuracy"):
        look = {"color": "gray", "linewidth": 1, "zorder": 1, "label": "clients in the right cluster"}
        axes.step(list(matched), list(matched.values()), where="post", **look)
    axes.legend(fontsize=8)
    return figure


def _epsilon_figure(rounds: Sequence[Round]) -> Figure | None:
    spent = {one.round: one.clients.get("train_epsilon", {}) for one in rounds}
    curves = {
        name: {round: value for round, of in spent.items() if (value := of.get(name)) is not None}
        for name in (spent[rounds[-1].round] if rounds else ())
    }
    curves = curves or {end: history(rounds, f"train_epsilon_{end}") for end in ("min", "mean", "max")}
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        return None
    figure, axes = new_axes("Epsilon spent, by client", "round", "epsilon")
    names_at: dict[tuple[int, float], list[str]] = {}
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), linewidth=1.2)
        names_at.setdefault((max(curve), curve[max(curve)]), []).append(name)
    ends = [epsilon for _, epsilon in names_at]
    if max(ends) > 10 * min(ends) > 0:
        log_scale(axes, "y")
    for end, names in names_at.items():  # clients with the same curve share a label
        label = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        axes.annotate(label, end, (4, -2), textcoords="offset points", fontsize=7)
    return figure


def _budget_figure(result: RunResult) -> Figure | None:
    points = [(c["epsilon_budget"], c["accuracy"], _name(result, c["client"])) for c in result.clients]
    points = [point for point in points if None not in point]
    if not points:
        return None
    figure, axes = new_axes("Accuracy of each client on its held-out records", "epsilon budget", "accuracy")
    budgets, accuracies, _ = zip(*points, strict=True)
    axes.scatter(budgets, accuracies, s=18)
    if max(budgets) > 10 * min(budgets):
        log_scale(axes, "x")
    for budget, accuracy, name in points if len(points) <= MOST_CLIENTS else []:
        axes.annotate(name, (budget, accuracy), (4, 3), textcoords="offset points", fontsize=7)
    return figure


def _calibration_figure(result: RunResult) -> Figure | None:
    """Draw how often the stated probabilities were right on the test set; the area is the number of records."""
    if not (bins := result.test_tables.get("calibration")):
        return None
    several = len(result.test_tables["confusion"]) > 2
    stated = f"stated probability of {'the predicted class' if several else 'class 1'}"
    figure, axes = new_axes("Calibration on the test set", stated, "how often it was right")
    figure.set_size_inches(5.5, 5.5)
    counts, x, y = zip(*bins, strict=True)
    axes.plot([0, 1], [0, 1], color="gray", linewidth=1, linestyle="--", zorder=1)
    axes.plot(x, y, linewidth=1)
    axes.scatter(x, y, [20 + 400 * count / sum(counts) for count in counts], alpha=0.6)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    return figure


def _weights_figure(result: RunResult) -> Figure | None:
    """Draw the weights of the last round, least noise first; None if all weights are equal."""
    weights = _client_metric(result, "weight")
    if not weights or max(weights.values()) <= 1.001 * min(weights.values()):
        return None
    order = sorted(weights, key=lambda client: (result.clients[client]["noise_std"] or 0.0, client))
    figure, axes = new_axes(f"Weight of each client in round {result.rounds}", "client, least noise first", "weight")
    axes.grid(visible=False, axis="x")
    if len(order) > MOST_CLIENTS:
        axes.stairs([weights[client] for client in order], fill=True)
        return figure
    models = sorted({result.clients[client]["model"] for client in order})
    for model in models:
        places = [place for place, client in enumerate(order) if result.clients[client]["model"] == model]
        axes.bar(places, [weights[order[place]] for place in places], label=f"model {model}")
    _name_ticks(axes, order, result)
    if len(models) > 1:
        axes.legend()
    else:
        equal = axes.axhline(1 / len(order), color="gray", linewidth=1, linestyle="--")
        axes.legend([equal], ["equal weights"])
    return figure


def _name(result: RunResult, client: int) -> str:
    return result.clients[client]["name"].replace("$", r"\$")  # which would begin a formula


def _name_ticks(axes: Any, clients: Sequence[int], result: RunResult) -> None:
    names = [_name(result, client) for client in clients]
    turned = 90 if sum(map(len, names)) > 80 else 0
    axes.set_xticks(range(len(names)), names, fontsize=8 if len(names) <= 40 else 4, rotation=turned)


def _noise_figure(result: RunResult) -> Figure | None:
    """Draw the noise that a strategy estimated for each client against the noise of the client's mechanism."""
    estimated = _client_metric(result, "estimated_noise_std")
    true = {client: result.clients[client]["noise_std"] for client in estimated}
    clients = sorted((i for i in true if estimated[i] > 0 and (true[i] or 0) > 0), key=true.__getitem__)
    if not clients:
        return None
    figure, axes = new_axes("Noise in each client's update: estimated against true", "true", "estimated")
    figure.set_size_inches(6.5, 6.5)
    x, y = [true[client] for client in clients], [estimated[client] for client in clients]
    weights = _client_metric(result, "weight")
    sizes = [20 + 1500 * weights.get(client, 0.0) for client in clients]  # square points
    axes.scatter(x, y, s=sizes, alpha=0.4, linewidth=0.8, edgecolor="black", zorder=3)
    ends = [0.75 * min(x + y), 1.35 * max(x + y)]
    axes.plot(ends, ends, color="gray", linewidth=1, linestyle="--", zorder=1)
    for row, client in enumerate(clients if len(clients) <= MOST_CLIENTS else ()):  # labels alternate between sides
        away = (0.7 * math.sqrt(sizes[row] / math.pi) + 6) * (1 if row % 2 else -1)
        style = {"textcoords": "offset points", "fontsize": 8, "ha": "center", "va": "center"}
        axes.annotate(_name(result, client), (x[row], y[row]), (away, -away), **style)
    ratios = [estimate / truth for estimate, truth in zip(y, x, strict=True)]
    words = (
        "standard deviation of one parameter\narea: weight in the last round\nestimated / true: "
        f"median {median(ratios):.3g}, from {min(ratios):.3g} to {max(ratios):.3g}"
    )
    axes.annotate(words, (0.98, 0.02), xycoords="axes fraction", ha="right", va="bottom", fontsize=8, color="dimgray")
    log_scale(axes, "x")
    log_scale(axes, "y")
    axes.set(xlim=ends, ylim=ends)
    return figure


def _participation_figure(result: RunResult) -> Figure | None:
    """Draw participations and spent epsilon beside quota and budget; None if all clients took part equally often."""
    quota, taken = _client_metric(result, "quota"), _client_metric(result, "participations")
    if len({*quota.values(), *taken.values()}) < 2:
        return None
    budget = {client: result.clients[client]["epsilon_budget"] for client in quota}
    spent = {client: result.clients[client]["epsilon_spent"] for client in quota}
    private = None not in (*budget.values(), *spent.values())
    order = sorted(quota, key=lambda client: (-quota[client], -(budget[client] or 0.0), client))
    figure = Figure(figsize=(7.5, 6.0 if private else 3.5), dpi=120, layout="constrained")
    axes = figure.subplots(2 if private else 1, 1, sharex=True, squeeze=False)[:, 0]
    axes[0].set(ylabel="rounds")
    axes[0].yaxis.set_major_locator(MaxNLocator(integer=True))
    _filled(axes[0], [quota[i] for i in order], [taken[i] for i in order], ("quota", "took part"))
    equal = fmean(quota.values())
    axes[0].axhline(equal, color="gray", linewidth=1, linestyle="--", label=f"equal quotas, {equal:.3g}")
    if private:
        axes[1].set(ylabel="epsilon")
        _filled(axes[1], [budget[i] for i in order], [spent[i] for i in order], ("budget", "spent"))
    axes[-1].set(xlabel="client, largest quota first")
    if len(order) <= 40:
        _name_ticks(axes[-1], order, result)
    for panel, title in zip(axes, ("Participations of each client", "Budget of each client"), strict=False):
        panel.set_title(title, loc="left")
        panel.legend(fontsize=8, ncols=3, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderpad=0.1)
        quiet(panel)
        panel.grid(visible=False, axis="x")
        panel.set_axisbelow(True)
    return figure


def _filled(axes: Any, whole: Sequence[float], part: Sequence[float], labels: tuple[str, str]) -> None:
    """Draw pale bars of `whole`, filled up to `part`; many clients become one area."""
    edges = [place - 0.5 for place in range(len(whole) + 1)]
    for values, alpha, label in ((whole, 0.3, labels[0]), (part, 1.0, labels[1])):
        if len(whole) <= MOST_CLIENTS:
            axes.bar(range(len(whole)), values, color="C0", alpha=alpha, label=label)
        else:
            axes.stairs(values, edges, fill=True, color="C0", alpha=alpha, label=label)
    axes.set_xlim(edges[0], edges[-1])


def _clients_figure(embedding: ClientEmbedding, result: RunResult) -> Figure:
    """Draw the clients as the server saw them; the colour is the true group if it is known, else the cluster."""
    apart = "" if embedding.separation is None else f", separation {embedding.separation:.3g}"
    sure = "confident" if embedding.confident else "uncertain"
    title = f"{embedding.title}\n{counted(embedding.num_clusters, 'cluster')}{apart}: {sure}"
    figure, axes = new_axes(title, "first direction", "second direction")
    figure.set_size_inches(8.0, 6.0)
    true = _true_groups(result)
    rows = list(zip(embedding.clients, embedding.points, embedding.cluster, embedding.membership, strict=True))
    for cluster in sorted(set(embedding.cluster)):
        members = [row for row in rows if row[2] == cluster]
        x, y = zip(*(point for _, point, _, _ in members), strict=True)
        style = {"marker": _MARKERS[cluster % len(_MARKERS)], "edgecolor": "black", "linewidth": 0.6, "alpha": 0.65}
        sizes = [20 + 100 * membership for *_, membership in members]
        axes.scatter(x, y, sizes, [f"C{true.get(client, cluster) % 10}" for client, *_ in members], zorder=3, **style)
        axes.scatter(fmean(x), fmean(y), 90, "black", "+", linewidth=1.2, zorder=4)
        axes.scatter([], [], 70, "white" if true else f"C{cluster % 10}", label=f"cluster {cluster}", **style)
    for group in sorted(set(true.values())):
        axes.scatter([], [], 70, f"C{group % 10}", "o", linewidth=0, alpha=0.65, label=f"true group {group}")
    for client, point, _, _ in rows if len(rows) <= 40 else ():
        axes.annotate(_name(result, client), point, (6, 5), textcoords="offset points", fontsize=6, color="dimgray")
    words = "size: confidence\n+: mean of a cluster"
    figure.legend(fontsize=7, loc="outside right upper", title=words, title_fontsize=7)
    return figure


def _true_groups(result: RunResult) -> dict[int, int]:
    return {row["client"]: row["true_group"] for row in result.clients if row.get("true_group") is not None}


def _client_metric(result: RunResult, name: str) -> dict[int, float]:
    values = result.metrics.get(name)
    known = enumerate(values if isinstance(values, list) else ())
    return {client: value for client, value in known if value is not None}


def new_axes(title: str, x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x, ylabel=y)
    quiet(axes)
    return figure, axes


@contextmanager
def missing_letters_allowed() -> Iterator[None]:
    """Draw letters that no font has, as in names of clients, as boxes, without a warning for each of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)
        yield


def quiet(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def log_scale(axes: Any, which: str) -> None:
    """Set a logarithmic scale with plain numbers at its ticks."""
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # powers of ten may give fewer than two ticks
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")
