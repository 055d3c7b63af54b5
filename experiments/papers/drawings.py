"""Drawings that tables of several papers share."""

from __future__ import annotations

from experiments.papers.experiment import Found, Panel


def draw_noise_by_sample_rate(found: Found) -> list[Panel]:
    """Noise multipliers, a line for each epsilon: rows are epsN, columns qN."""
    series: dict[str, list[tuple]] = {}
    for (row, column), cells in found.items():
        series.setdefault(f"epsilon {row[3:]}", []).append((float(column[1:]), cells[0]["values"][row]))
    return [Panel("Noise multiplier by sample rate", "sample rate q", "noise multiplier z", series)]
