"""Figures in words: the same table for the terminal and for the docs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from dpfl_lightning.runtime.text import markdown
from experiments.pages import fill_page
from experiments.speed.cases import CASES, CLIP_NORM, HEAVY, NOISE_MULTIPLIER, STEP_PARTS
from experiments.speed.scaling import scaling_report

#: the name of the marks of its page
PAGE = "bench"

RIVALS = {
    "nonprivate": "plain SGD without privacy",
    "opacus": "Opacus' loop",
    "flower": "Flower (Ray) with Opacus clients",
    "pfl": "pfl-research without privacy",
}

COLUMNS = ["ours is", "over repeats", "round", "compared with", "ours", "theirs"]

#: what was done beside a loop over classes
_STEPS = {
    "matching": "a step of gradient matching, {images} images of 10 classes",
    "class_gradients": "a client's gradients of each of 10 classes without privacy, {records} records",
}


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
    if "robust_pca" in results:
        parts += ["\n".join(_robust_pca(name, found) for name, found in results["robust_pca"].items())]
        parts += _share_of_a_round(results)
    loops = [_beside_a_loop(words, results[name]) for name, words in _STEPS.items() if name in results]
    parts += ["\n".join(loops)] if loops else []
    if "layers" in results:
        parts += [_layers(results["layers"])]
    if "kernels" in results:
        parts += [_kernels(results["kernels"])]
    if "startup" in results:
        parts.append(_startup(results["startup"]))
    if "parts" in results:
        parts.append(_parts(results["parts"]))
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


def write_page(path: Path, results: Mapping[str, Any]) -> None:
    """Put the report between the marks of the page."""
    fill_page(path, PAGE, report(results))


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


def _robust_pca(shape: str, found: Mapping[str, Any]) -> str:
    ours, theirs = (median(found[key]) for key in ("seconds", "svd_seconds"))
    return (
        f"- robust PCA of {shape} updates: {ours:.2f} s, {found['iterations']} iterations (median of "
        f"{len(found['seconds'])}); the textbook's by singular value decompositions takes about {theirs:.0f} s, "
        f"{found['ratio_vs_svd']:.1f} times as long."
    )


def _share_of_a_round(results: Mapping[str, Any]) -> list[str]:
    """Robust PCA of as many clients and parameters as the common work has."""
    common = results.get("common", {})
    found = results["robust_pca"].get(f"{common.get('clients')} x {common.get('parameters', 0):,}")
    if not found:
        return []
    share = median(found["seconds"]) / median(common["seconds_per_round"]["ours"])
    return [f"Robust PCA of that many updates is {share:.1%} of a round of the common work."]


def _beside_a_loop(words: str, found: Mapping[str, Any]) -> str:
    ours, theirs = (1000 * median(found[key]) for key in ("seconds", "loop_seconds"))
    return (
        f"- {words.format(**found)}, ConvNet of {found['parameters']:,} parameters: {ours:,.0f} ms (median of "
        f"{len(found['seconds'])}); a plain loop over the classes takes {theirs:,.0f} ms, "
        f"**{found['ratio_vs_loop']:.2f} times** as long "
        f"({found['range_vs_loop'][0]:.2f} to {found['range_vs_loop'][1]:.2f}; {found['threads']} threads)."
    )


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


def _kernels(found: Mapping[str, Any]) -> str:
    rows = []
    for kernel, nets in found.items():
        for net, ratios in nets.items():
            low, _, high = quantiles(ratios, n=4)
            rows.append([kernel, net, f"**{median(ratios):.2f} x**", f"{low:.2f} to {high:.2f}"])
    words = "CPU time of a training step without a compiled loop / with it, on one thread, in turns:\n\n"
    return words + markdown(["loop", "net", "median", "quartiles"], rows)


def _startup(found: Mapping[str, Any]) -> str:
    def loads(names: Sequence[str]) -> str:
        return f"imports {', '.join(names)}" if names else f"imports none of {', '.join(HEAVY)}"

    return (
        f"Start-up: `python -m dpfl_lightning.fit --help` takes {found['fit_help_seconds']:.2f} s and "
        f"{loads(found['fit_help_imports'])}; `import dpfl_lightning` takes {found['import_seconds']:.2f} s and "
        f"{loads(found['import_imports'])}."
    )


def _parts(found: Mapping[str, Any]) -> str:
    peak, rows = max(found["gemm"], found["convolution"]), []
    for row in found["of"].values():
        shares = (f"{row['mflop'] / row[step] * 1000 / peak:.0%}" for step in ("step", "plain"))
        times = (f"{row[part]:,.0f}" for part in (*STEP_PARTS, "step", "python", "plain"))
        rows.append([row["model"], str(row["batch"]), *times, f"{row['mflop']:,.1f}", *shares])
    headings = ["net", "batch", *STEP_PARTS, "**step**", "Python at most", "plain SGD"]
    return (
        markdown([*headings, "MFLOP", "of the peak", "plain SGD of it"], rows)
        + "\n\nMicroseconds of CPU time a record, on one thread: the fastest step of the engine `fast` in "
        f"{found['repeats']} x 3 steps, beside plain SGD steps. Backward holds the gradients of single records, "
        "which a convolution computes in its backward pass, and the hooks; norms hold the clip factors; update holds "
        "the engine's loop. Python is wall clock outside of torch's operators, our compiled loops and the cipher, so "
        "also torch's autograd engine (least of as many steps under torch's profiler, with the profiler's time). MFLOP "
        "a record are the fewest: forward pass, input gradients and weight gradients, without those that 2 x 2 "
        "max-pooling zeroes. The peak is this core's most float32 GFLOP/s in the same turns: "
        f"{found['gemm']:.0f} in a product, {found['convolution']:.0f} in a convolution."
    )


def _machine(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    gpu = "on a GPU: not measured" if machine["device"] == "cpu" else f"on {machine['device']}"
    return (
        "{date}: {cores} cores ({cpu}), load {load_before} before the run; torch {torch} with {threads} threads by "
        "default, Opacus {opacus}, Python {python}; "
    ).format(date=results["date"], **machine) + f"{gpu}."
