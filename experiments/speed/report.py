"""Figures in words: the same table for the terminal and for the docs."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from experiments.pages import RESULTS, markdown, written
from experiments.speed.cases import CASES, CLIP_NORM, HEAVY, NOISE_MULTIPLIER
from experiments.speed.scaling import scaling_report

PAGE = RESULTS / "bench.md"

RIVALS = {
    "nonprivate": "plain SGD without privacy",
    "opacus": "Opacus' loop",
    "records": "ours with `privacy.unit: record`",
    "flower": "Flower (Ray) with Opacus clients",
    "pfl": "pfl-research without privacy",
}

COLUMNS = ["ours is", "over repeats", "round", "compared with", "ours", "theirs"]


def report(results: Mapping[str, Any]) -> str:
    """The whole report as Markdown.

    >>> machine = {"cores": 2, "cpu": "arm64", "device": "cpu", "load_before": 0.1, "threads": 2, "torch": 2.9}
    >>> machine |= {"opacus": 1.6, "python": 3.12}
    >>> print(report({"machine": machine, "date": "2026-01-31"}))  # doctest: +NORMALIZE_WHITESPACE
    2026-01-31: 2 cores (arm64), load 0.1 before the run; torch 2.9 with 2 threads by default, Opacus 1.6, Python 3.12;
    on a GPU: not measured.
    """
    measured = {name: results[name] for name in CASES if name in results}
    parts = []
    if measured:
        rows = [row for name, found in measured.items() for row in rows_of(name, found)]
        parts += [markdown(COLUMNS, rows)]
        parts += ["\n".join(work_of(name, found) for name, found in measured.items())]
    if "layers" in results:
        parts += [_layers(results["layers"])]
    if "startup" in results:
        parts.append(_startup(results["startup"]))
    if "scaling" in results:
        parts.append(scaling_report(results["scaling"]))
    missing = [reason for found in measured.values() for reason in found.get("not_measured", {}).values()]
    parts += [f"Not measured: {reason}." for reason in missing]
    parts.append(_machine(results))
    if measured:
        parts.append(
            "Ratios are rates, ours / theirs: the median, and the range, over the repeats of one run in which the "
            "contestants take turns. All are whole rounds, from one model to the mean. A wide range is a busy machine, "
            "on which operators of several threads, the loops', suffer most: such a run flatters ours."
        )
    return "\n\n".join(parts)


def page(results: Mapping[str, Any]) -> str:
    """The report as a file."""
    command = "python -m experiments.speed --load experiments/results/bench.json --page"
    return written("Speed", command, report(results))


def rows_of(name: str, found: Mapping[str, Any]) -> list[list[str]]:
    (unit,) = (key.removesuffix("_per_second") for key in found if key.endswith("_per_second"))
    rates = found[f"{unit}_per_second"]
    return [
        [
            f"**{found[f'ratio_vs_{rival}']:.2f} x**",
            "{:.2f} to {:.2f}".format(*found[f"range_vs_{rival}"]),
            name,
            words,
            _rate(rates.get(f"ours_beside_{rival}", rates["ours"]), unit),
            _rate(rates[rival], unit),
        ]
        for rival, words in RIVALS.items()
        if rival in rates
    ]


def _rate(value: float, unit: str) -> str:
    return f"{value:,.{0 if value >= 100 else 1}f} {unit}/s"


def work_of(name: str, found: Mapping[str, Any]) -> str:
    shape = " x ".join(map(str, found["input_shape"])) + (" words" if found["words"] else "")
    repeats = len(found["seconds_per_round"]["ours"])
    return (
        f"- {name}: {found['clients']} clients x {found['records']:,} random records of {shape}; "
        f"{found['model']} ({found['parameters']:,} parameters), one local epoch, batch {found['batch_size']}, "
        f"clip {CLIP_NORM:g}, noise multiplier {NOISE_MULTIPLIER:g}; median of {repeats}"
        + "".join(f"; {who}: {_gpu(use)}" for who, use in found.get("gpu", {}).items())
        + "".join(
            f"; {who}: {', '.join(map(' '.join, versions.items()))}"
            for who, versions in found.get("versions", {}).items()
        )
    )


def _gpu(use: Mapping[str, float]) -> str:
    busy = f", {use['utilisation_percent']} % busy" if "utilisation_percent" in use else ""
    return f"{use['peak_memory_mib']:,} MiB of GPU memory{busy}"


def _layers(found: Mapping[str, Any]) -> str:
    rows = []
    for layer, batches in found.items():
        for batch, times in batches.items():
            ours, theirs = (1e6 * median(times[key]) / int(batch) for key in ("seconds", "opacus_seconds"))
            ratio = f"**{times['ratio_vs_opacus']:.1f} x**", "{:.1f} to {:.1f}".format(*times["range_vs_opacus"])
            rows.append([layer, batch, f"{ours:,.0f} us", f"{theirs:,.0f} us", *ratio])
    return (
        "Per record, one clipped sum over one layer beside the same sum of Opacus' per-record gradients, on one "
        "thread:\n\n" + markdown(["layer", "batch", "ours", "Opacus", "ours is", "over repeats"], rows)
    )


def _startup(found: Mapping[str, Any]) -> str:
    def loads(names: Sequence[str]) -> str:
        return f"imports {', '.join(names)}" if names else f"imports none of {', '.join(HEAVY)}"

    return (
        f"Start-up: `python -m dpfl_lightning.fit --help` takes {found['fit_help_seconds']:.2f} s and "
        f"{loads(found['fit_help_imports'])}; `import dpfl_lightning` takes {found['import_seconds']:.2f} s and "
        f"{loads(found['import_imports'])}."
    )


def _machine(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    gpu = "on a GPU: not measured" if machine["device"] == "cpu" else f"on {machine['device']}"
    return (
        "{date}: {cores} cores ({cpu}), load {load_before} before the run; torch {torch} with {threads} threads by "
        "default, Opacus {opacus}, Python {python}; "
    ).format(date=results["date"], **machine) + f"{gpu}."
