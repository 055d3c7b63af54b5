"""Time over the numbers of ranks, clients, parameters and records of a batch: a table and a figure of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfl_lightning.runtime.text import markdown


@dataclass(frozen=True)
class Scaling:
    """A table, whose figure shows the columns `drawn` (`form` is theirs) over `x`; `words` say how it was measured."""

    title: str
    x: str
    y: str
    form: str
    drawn: Mapping[str, str]
    others: Mapping[str, tuple[str, str]]  # key -> heading, form
    words: str


SCALINGS = {
    "ranks": Scaling(
        "Records a second by ranks",
        "ranks",
        "records/s",
        "{:,}",
        {"rate": "records/s"},
        {"speedup": ("times one rank", "{:.2f} x")},
        "Processes of one thread each, which torchrun starts: wall clock of the fastest round of {clients} clients "
        "x {records} records; net, batch and privacy of the common round.",
    ),
    "clients": Scaling(
        "CPU time of the parts of a run",
        "clients",
        "seconds",
        "{:.2f} s",
        {"setup": "set-up", "round": "a round", "end": "end of the run"},
        {"peak_mib": ("peak memory", "{:,} MiB")},
        "Runs with many clients, {cohort} of them in each round: CPU seconds, without imports ({measured}; {data}, "
        "logistic regression, {records} records a client, overlapping draws, given noise multiplier). The end "
        "evaluates every client and writes results and guarantees.",
    ),
    "parameters": Scaling(
        "CPU time of a step by parameters",
        "parameters",
        "milliseconds",
        "{:,.2f} ms",
        {"step": "private step", "plain": "plain SGD", "noise": "noise and update of the private step"},
        {"share": ("their share", "{:.0%}"), "ratio": ("ours is", "{:.2f} x")},
        "One step of an MLP of three layers, batch {batch}, on one thread: CPU time of the fastest of a few, in turns. "
        "The check at the start of a run is left out: it holds 18 gradients of the net in float64.",
    ),
    "batch": Scaling(
        "Records a second by the size of a batch",
        "records of a batch",
        "records/s",
        "{:,}",
        {"step": "private step", "plain": "plain SGD"},
        {"ratio": ("ours is", "{:.2f} x")},
        "Steps of {model} on one thread, CPU time: the fastest of a few, in turns.",
    ),
}


def scaling_times(say: Callable[[str], None]) -> dict[str, Any]:
    """All measurements, by name: `of` has the row of each size, beside facts of the measurement."""
    from experiments.speed import clients, ranks, sizes

    return {
        "ranks": ranks.rank_times(say),
        "clients": clients.client_times(say),
        "parameters": sizes.parameter_times(say),
        "batch": sizes.batch_times(say),
    }


def scaling_report(results: Mapping[str, Any]) -> str:
    """Table, words and figure of each measurement."""
    parts = []
    for name, found in results.items():
        one = SCALINGS[name]
        forms = {**dict.fromkeys(one.drawn, one.form), **{key: form for key, (_, form) in one.others.items()}}
        headings = [one.x, *one.drawn.values(), *(heading for heading, _ in one.others.values())]
        rows = [
            [f"{int(size):,}", *(form.format(row[key]) for key, form in forms.items())]
            for size, row in found["of"].items()
        ]
        parts += [markdown(headings, rows), one.words.format(**found), f"![{one.title}]({_figure(name)})"]
    return "\n\n".join(parts)


def draw_scalings(results: Mapping[str, Any], folder: Path) -> None:
    """Draw each measurement over a logarithmic scale: times on another one, rates from 0."""
    from dpfl_lightning.reporting.figures import log_scale, new_axes  # imports matplotlib

    for name, found in results.items():
        one = SCALINGS[name]
        figure, axes = new_axes(one.title, one.x, one.y)
        sizes = [int(size) for size in found["of"]]
        for key, words in one.drawn.items():
            axes.plot(sizes, [row[key] for row in found["of"].values()], marker="o", label=words)
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.set_xticks([], minor=True)
        if one.y == "records/s":
            axes.set_ylim(0, 1.1 * axes.dataLim.y1)
        else:
            log_scale(axes, "y")
        axes.legend()
        figure.savefig(folder / _figure(name))


def _figure(name: str) -> str:
    return f"scaling_{name}.svg"
