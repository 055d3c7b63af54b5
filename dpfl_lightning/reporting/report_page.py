"""`report.html`: runs, seeds, searches and tables side by side, as one self-contained page with interactive charts."""

import base64
import dataclasses
import html
import io
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from jinja2 import Environment, PackageLoader
from plotly.offline import get_plotlyjs

from dpfl_lightning.config.options import Options
from dpfl_lightning.federated.server.results import ClientEmbedding, RunResult
from dpfl_lightning.privacy.accounting.accountant import delta_text, epsilon_text
from dpfl_lightning.reporting.curves import history, over_seeds
from dpfl_lightning.reporting.figures import figures
from dpfl_lightning.reporting.run_files import RunFiles, RunGroup, Search, Table
from dpfl_lightning.runtime.text import counted, distinct, flattened

_COLOURS = (
    "#2f6fde",
    "#d9622b",
    "#2a9d55",
    "#8e44ad",
    "#c0392b",
    "#16869c",
    "#b8860b",
    "#d6589f",
    "#6b7280",
    "#5f7a1f",
)
_MOST_ROWS = 200  # clients in a table, and trials
_NOT_COMPARED = ("tracking", "output_dir")
_UNFINISHED = (
    "Unfinished: no guarantee is stated yet. `dpfl plan --ledger {}` states what every client has spent so far."
)
_DRAWN_HERE = ("accuracy_over_rounds",)  # figures that the page has as charts

Rows = list[dict[str, str]]


def report_page(parts: Sequence[RunGroup | Search | Table], ledgers: Mapping[str, str]) -> str:
    """Return the page as HTML text. It loads nothing from elsewhere, and escapes every value.

    `ledgers` maps the folder of each run to the outcome of the verification of its ledger, in words.

    **Privacy** Shows the content of `result.json`, `options.yaml` and `metrics.jsonl`.
    """
    groups = [part for part in parts if isinstance(part, RunGroup)]
    names = distinct([group.name for group in groups])
    return _TEMPLATES.get_template("report_page.html").render(
        title=", ".join(part.name for part in parts),
        runs=[_run(name, group, ledgers) for name, group in zip(names, groups, strict=True)],
        summary=_aligned([_summary(name, group, ledgers) for name, group in zip(names, groups, strict=True)]),
        options=_options(names, groups),
        charts=[
            *_charts(names, groups),
            *(chart for part in parts if isinstance(part, Search) for chart in _scatters(part)),
        ],
        fairness=_fairness(names, groups),
        searches=[_search(part) for part in parts if isinstance(part, Search)],
        tables=[_table(part) for part in parts if isinstance(part, Table)],
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
    )


# ---- runs


def _run(name: str, group: RunGroup, ledgers: Mapping[str, str]) -> dict[str, Any]:
    results = [run.result for run in group.runs if run.result is not None]
    bad = next((ledgers[str(run.folder)] for run in group.runs if ledgers[str(run.folder)] != "verified"), "")
    return {
        "name": name,
        "badges": _badges(group),
        "ledger": bad,
        "guarantee": group.guarantee or _UNFINISHED.format(group.runs[0].folder),
        "clients": _clients(results),
        "more": max(0, max((len(result["clients"]) for result in results), default=0) - _MOST_ROWS),
        "figures": _figures(group.runs[0]) if len(group.runs) == 1 else {},
    }


def _badges(group: RunGroup) -> list[str]:
    """Return the warnings that every mention of the run has to carry."""
    first, results = group.runs[0], [run.result for run in group.runs if run.result is not None]
    simulated = any(result.get("simulated") for result in results) or bool((_privacy(first) or {}).get("noise_key"))
    unbounded = any(client["epsilon_spent"] is None for result in results for client in result["clients"])
    return [
        *(["unfinished"] if len(results) < len(group.runs) else []),
        *(["simulated: nobody is protected"] if simulated else []),
        *(["no privacy"] if _privacy(first) is None and first.options else []),
        *(["epsilon without a bound"] if unbounded and _privacy(first) is not None else []),
    ]


def _privacy(run: RunFiles) -> Mapping[str, Any] | None:
    return run.options.get("privacy")


def _summary(name: str, group: RunGroup, ledgers: Mapping[str, str]) -> dict[str, str]:
    finished = [run for run in group.runs if run.result is not None]
    results = [run.result for run in finished if run.result is not None]
    done = [run.rounds[-1].round if run.rounds else 0 for run in group.runs]
    seeds = f"{len(finished)} of {len(group.runs) + group.missing} seeds finished" if len(group.runs) > 1 else ""
    seeds += f", {counted(group.missing, 'folder')} missing" if group.missing else ""
    state = seeds or (
        "finished" if finished else f"unfinished after {done[0]} of {group.runs[0].options.get('rounds', '?')} rounds"
    )
    verified = sum(ledgers[str(run.folder)] == "verified" for run in group.runs)
    accuracy = [run.result["test_accuracy"] if run.result else _last(run, "test_accuracy") for run in group.runs]
    metrics = sorted({key for result in results for key in result.get("test_metrics") or {}})
    return {
        "run": name,
        "": ", ".join(_badges(group)),
        "state": state,
        "test accuracy": _spread(accuracy, percent=True),
        **{key: _spread([result["test_metrics"].get(key) for result in results]) for key in metrics},
        "worst client": _spread([result.get("accuracy_worst") for result in results], percent=True),
        "largest epsilon": _largest(results) if len(finished) == len(group.runs) else _largest_so_far(group),
        "clients": f"{len(results[0]['clients']):,}" if results else "",
        "ledger": "verified" if verified == len(group.runs) else "not verified",
    }


def _last(run: RunFiles, name: str) -> float | None:
    return next(reversed(history(run.rounds, name).values()), None)


def _largest(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the largest epsilon of any client and seed, and its delta."""
    rows = [client for result in results for client in result["clients"]]
    if not rows:
        return ""
    worst = max(rows, key=lambda client: math.inf if client["epsilon_spent"] is None else client["epsilon_spent"])
    if worst["epsilon_spent"] is None:
        return "\N{INFINITY}"
    return f"{epsilon_text(worst['epsilon_spent'])} at delta {delta_text(worst['delta'])}"


def _largest_so_far(group: RunGroup) -> str:
    """Return the largest epsilon after the finished rounds; a round that was charged and not finished adds to it."""
    known = [epsilon for run in group.runs if (epsilon := _last(run, "train_epsilon_max")) is not None]
    return f"at least {epsilon_text(max(known))} so far" if known else "see the ledger"


def _spread(values: Sequence[float | None], percent: bool = False) -> str:
    """Return the mean, with several values also their standard deviation; empty without values."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    shown = "{:.2%}".format if percent else "{:.4g}".format
    return shown(fmean(known)) + (f" \N{PLUS-MINUS SIGN} {shown(stdev(known))}" if len(known) > 1 else "")


def _options(names: Sequence[str], groups: Sequence[RunGroup]) -> Rows:
    """Return the options that differ between runs; of one run, those that differ from the defaults."""
    default = _flat(dataclasses.asdict(Options()))
    every = [_flat(group.runs[0].options) for group in groups]
    every += [default] if len(every) == 1 else []
    columns = [*names, "default"][: len(every)]
    hidden = (*_NOT_COMPARED, *(["seed"] if any(len(group.runs) > 1 for group in groups) else []))
    rows = []
    for key in dict.fromkeys(key for flat in every for key in flat):
        given = [flat.get(key, "") for flat in every]
        changed = any(text not in ("", default.get(key)) for text in given)  # else a section is only missing in a run
        if key.split(".")[0] not in hidden and len(set(given)) > 1 and changed:
            rows.append({"option": key, **dict(zip(columns, given, strict=True))})
    return rows


def _flat(options: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key -> text, with the names of the strategies as one value."""
    given = options.get("strategies") or {}
    flat = {
        key: text for key, text in flattened(options).items() if not (key.startswith("strategies.") and text == "{}")
    }
    return {**flat, "strategies": ", ".join(given)} if isinstance(given, Mapping) and given else flat


def _fairness(names: Sequence[str], groups: Sequence[RunGroup]) -> Rows:
    rows = []
    for name, group in zip(names, groups, strict=True):
        results = [run.result for run in group.runs if run.result is not None]
        if any(result.get("accuracy_mean") is not None for result in results):
            titles = {"mean": "mean", "std": "std over clients", "worst": "worst", "gap": "best - worst"}
            values = {
                title: _spread([result.get(f"accuracy_{key}") for result in results], percent=True)
                for key, title in titles.items()
            }
            parts = sorted({part for result in results for part in result.get("accuracy_of_groups") or {}})
            of_groups = {
                f"group {part}" if part.isdigit() else part: _spread(
                    [result["accuracy_of_groups"].get(part) for result in results], percent=True
                )
                for part in parts
            }
            rows.append({"run": name, **values, **of_groups})
    return _aligned(rows)


def _aligned(rows: Rows) -> Rows:
    """Give all rows the same columns; a cell that a row does not have is empty."""
    columns = list(dict.fromkeys(title for row in rows for title in row))
    return [{title: row.get(title, "") for title in columns} for row in rows]


def _clients(results: Sequence[Mapping[str, Any]]) -> Rows:
    """Return one row for each client; over seeds, the mean of its accuracy and its largest epsilon."""
    rows = []
    for client, first in enumerate(results[0]["clients"][:_MOST_ROWS] if results else ()):
        same = [result["clients"][client] for result in results if client < len(result["clients"])]
        rows.append(
            {
                "client": str(first.get("name", first["client"])),
                "records": f"{first['num_records']:,}",
                "batch size": f"{first['batch_size']:,}",
                "noise multiplier": _number(first["noise_multiplier"], "-"),
                "epsilon": _largest([{"clients": same}]).partition(" ")[0],
                "budget": _number(first["epsilon_budget"], "none"),
                "delta": f"{first['delta']:g}",
                "accuracy": _spread([one["accuracy"] for one in same], percent=True),
                **{key: _spread([one["metrics"].get(key) for one in same]) for key in first.get("metrics") or {}},
            }
        )
    return _aligned(rows)


def _number(value: float | None, missing: str) -> str:
    return missing if value is None else f"{value:.5g}"


def _figures(run: RunFiles) -> dict[str, str]:
    """Return title -> PNG as base64, of the figures of a finished run."""
    if run.result is None:
        return {}
    known = {field.name for field in dataclasses.fields(RunResult)}
    fields = {key: value for key, value in run.result.items() if key in known}
    embedding = fields.get("client_embedding")
    fields["client_embedding"] = None if embedding is None else ClientEmbedding(**embedding)
    drawn: dict[str, str] = {}
    for name, figure in figures(run.rounds, RunResult(**fields)).items():
        if name not in _DRAWN_HERE:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png")
            drawn[name.replace("_", " ")] = base64.b64encode(buffer.getvalue()).decode()
    return drawn


# ---- charts, as the data and layout of plotly.js


def _charts(names: Sequence[str], groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Return curves of test scores over rounds and over epsilon, and the accuracy of each client over its epsilon."""
    curves = list(dict.fromkeys(n for g in groups for r in g.runs for one in r.rounds for n in one.values))
    scores = [name for name in curves if name.startswith("test_")]
    charts = []
    for score in scores:
        title = score.replace("_", " ").capitalize()
        over = {
            "round": None,
            "largest epsilon spent by a client": "train_epsilon_max",
            "mean epsilon": "train_epsilon_mean",
        }
        for x, x_curve in over.items() if score == "test_accuracy" else [("round", None)]:
            data = []
            for number, (name, group) in enumerate(zip(names, groups, strict=True)):
                data += _band(html.escape(name, quote=False), group, score, x_curve, _COLOURS[number % len(_COLOURS)])
            if data:
                charts.append({"title": f"{title} over {x}", "data": data, "layout": _layout(x, title)})
    points = [
        _client_points(name, group, number) for number, (name, group) in enumerate(zip(names, groups, strict=True))
    ]
    if any(one["x"] for one in points):
        layout = _layout("epsilon spent", "accuracy on held-out records")
        charts.append({"title": "Accuracy of each client over its epsilon", "data": points, "layout": layout})
    return charts


def _band(name: str, group: RunGroup, score: str, x_curve: str | None, colour: str) -> list[dict[str, Any]]:
    """Return the line of the mean over seeds, and the band of one standard deviation around it."""
    with_rounds = [run.rounds for run in group.runs if history(run.rounds, score)]
    points = over_seeds(with_rounds, score)
    places = over_seeds(with_rounds, x_curve) if x_curve else {step: (float(step), 0.0) for step in points}
    steps = [step for step in points if step in places]
    if not steps:
        return []
    x, mean, std = [places[s][0] for s in steps], [points[s][0] for s in steps], [points[s][1] for s in steps]
    line = {"x": x, "y": mean, "name": name, "mode": "lines+markers", "line": {"color": colour}, "legendgroup": name}
    if not any(std):
        return [line]
    upper, lower = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (1, -1))
    band = {
        "x": x + x[::-1],
        "y": upper + lower[::-1],
        "fill": "toself",
        "fillcolor": f"{colour}33",
        "legendgroup": name,
    }
    return [{**band, "line": {"width": 0}, "mode": "lines", "hoverinfo": "skip", "showlegend": False}, line]


def _client_points(name: str, group: RunGroup, number: int) -> dict[str, Any]:
    rows = [client for run in group.runs if run.result is not None for client in run.result["clients"]]
    rows = [client for client in rows if None not in (client["epsilon_spent"], client["accuracy"])]
    return {
        "x": [client["epsilon_spent"] for client in rows],
        "y": [client["accuracy"] for client in rows],
        "text": [html.escape(str(client.get("name", client["client"])), quote=False) for client in rows],
        "name": html.escape(name, quote=False),
        "mode": "markers",
        "marker": {"color": _COLOURS[number % len(_COLOURS)], "size": 8, "opacity": 0.7},
    }


def _layout(x: str, y: str) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}


# ---- searches and tables of experiments


def _search(search: Search) -> dict[str, Any]:
    best = set(search.result.get("best", ()))
    trials = search.result["trials"]
    keys = list(dict.fromkeys(key for trial in trials for key in trial["params"]))
    scores = list(dict.fromkeys(key for trial in trials for key in trial["scores"]))
    complete = [trial for trial in trials if scores and scores[0] in trial["scores"]]
    order = sorted(complete, key=lambda trial: trial["scores"][scores[0]])
    order = order[::-1] if order and order[0]["number"] not in best else order
    order += [trial for trial in trials if trial not in complete]
    rows = [
        {
            "trial": str(trial["number"]) + (" (best)" if trial["number"] in best else ""),
            "state": trial["state"] + (f": {trial['reason']}" if trial.get("reason") else ""),
            **{score: _number(trial["scores"].get(score), "") for score in scores},
            **{key: _text(trial["params"].get(key, "")) for key in keys},
        }
        for trial in order[:_MOST_ROWS]
    ]
    return {"name": search.name, "rows": rows, "lines": search.result.get("report", [])[-2:], "charts": len(keys)}


def _scatters(search: Search) -> list[dict[str, Any]]:
    """Return one chart for each searched key: the first score of each trial over the key's value."""
    trials = [trial for trial in search.result["trials"] if trial["scores"]]
    keys, best = (
        list(dict.fromkeys(key for trial in trials for key in trial["params"])),
        set(search.result.get("best", ())),
    )
    charts = []
    for key in keys:
        having = [trial for trial in trials if key in trial["params"]]
        score = next(iter(having[0]["scores"]))
        values = [trial["params"][key] for trial in having]
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        data = {
            "x": values if numbers else [html.escape(str(value), quote=False) for value in values],
            "y": [trial["scores"].get(score) for trial in having],
            "text": [f"trial {trial['number']}" for trial in having],
            "mode": "markers",
            "showlegend": False,
            "marker": {"size": 9, "color": [_COLOURS[trial["number"] in best] for trial in having]},
        }
        layout = _layout(html.escape(key, quote=False), score)
        charts.append({"title": f"{search.name}: {score} over {key}", "data": [data], "layout": layout})
    return charts


def _table(table: Table) -> dict[str, Any]:
    """Return rows of an experiment's table: our mean and standard deviation, and the published number."""
    numbers = table.content["numbers"]
    columns = list(dict.fromkeys(str(number["column"]) for number in numbers))
    rows: dict[str, dict[str, str]] = {}
    for number in numbers:
        spread = f" \N{PLUS-MINUS SIGN} {number['std']:.4g}" if number.get("std") is not None else ""
        ours = "" if number.get("ours") is None else f"{number['ours']:.4g}{spread}"
        paper = "" if number.get("paper") is None else f" (paper {number['paper']:.4g})"
        rows.setdefault(str(number["row"]), dict.fromkeys(columns, ""))[str(number["column"])] = (
            f"{ours}{paper}".strip()
        )
    title = str(table.content.get("title", table.name))
    return {"name": title, "rows": [{"": row, **cells} for row, cells in rows.items()]}


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_TEMPLATES = Environment(loader=PackageLoader(__name__, "."), autoescape=True)
