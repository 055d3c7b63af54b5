"""Whole runs over the numbers of ranks and of clients: a table of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experiments.pages import markdown

#: name -> first heading; key of a row -> heading and form; how it was measured
_TABLES: dict[str, tuple[str, dict[str, tuple[str, str]], str]] = {
    "ranks": (
        "ranks",
        {"rate": ("records/s", "{:,}"), "speedup": ("times one rank", "{:.2f} x")},
        "Processes of one thread each, which torchrun starts: wall clock of the fastest round of {clients} clients "
        "x {records} records; model, batch and privacy of the common round.",
    ),
    "clients": (
        "clients",
        {
            "setup": ("set-up", "{:.2f} s"),
            "round": ("a round", "{:.2f} s"),
            "end": ("end of the run", "{:.2f} s"),
            "peak_mib": ("peak memory", "{:,} MiB"),
        },
        "Runs with many clients, {cohort} of them in each round: CPU seconds, without imports ({measured}; {data}, "
        "logistic regression, {records} records a client, overlapping draws, given noise multiplier). The end "
        "evaluates every client and writes results and guarantees.",
    ),
}


def scaling_times(say: Callable[[str], None]) -> dict[str, Any]:
    """Both measurements, by name: `of` has the row of each size, beside facts of the measurement."""
    from experiments.speed import clients, ranks

    return {"ranks": ranks.rank_times(say), "clients": clients.client_times(say)}


def scaling_report(results: Mapping[str, Any]) -> str:
    """Table and words of each measurement."""
    parts = []
    for name, found in results.items():
        first, columns, words = _TABLES[name]
        rows = [
            [f"{int(size):,}", *(form.format(row[key]) for key, (_, form) in columns.items())]
            for size, row in found["of"].items()
        ]
        parts += [markdown([first, *(heading for heading, _ in columns.values())], rows), words.format(**found)]
    return "\n\n".join(parts)
