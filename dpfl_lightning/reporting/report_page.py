"""`report.html`: runs, seeds and searches side by side, as one self-contained page with interactive charts."""

import base64
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from jinja2 import Environment, PackageLoader

from dpfl_lightning.config.public import published
from dpfl_lightning.federated.messages.evaluation import known_values
from dpfl_lightning.federated.server.run import Run
from dpfl_lightning.federated.server.scores import (
    Rows,
    aligned,
    badged,
    bound,
    client_columns,
    client_scores,
    formatted,
    in_words,
    measure_of,
    remarks,
    rows_of,
    score_cells,
    scores_of,
    seed_rows,
    spread,
    stated,
    title,
)
from dpfl_lightning.reporting.charts import Chart, Series
from dpfl_lightning.reporting.curves import history, over_seeds
from dpfl_lightning.reporting.figures import figures, missing_letters_allowed
from dpfl_lightning.reporting.run_files import RunGroup, Search, scored
from dpfl_lightning.runtime.text import at_most, counted, distinct, flattened

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
_UNFINISHED = "No guarantee is stated yet. `dpfl ledger {}` states what every client has spent so far."


def report_page(parts: Sequence[RunGroup | Search], ledgers: Mapping[str, str]) -> str:
    """Return the page as HTML text. It loads nothing from elsewhere, and escapes every value.

    `ledgers` maps the folder of each run to the outcome of the verification of its ledger, in words.

    **Privacy** Shows the content of `result.json`, `options.yaml` and `metrics.jsonl`.
    """
    groups = [part for part in parts if isinstance(part, RunGroup)]
    names = distinct([group.name for group in groups])
    charts = [
        *_charts(names, groups),
        *(chart for part in parts if isinstance(part, Search) for chart in _scatters(part)),
    ]
    shown = dict.fromkeys(one.name for chart in charts for one in chart.series)
    return _TEMPLATES.get_template("report_page.html").render(
        title=", ".join(part.name for part in parts),
        runs=[_run(name, group, ledgers) for name, group in zip(names, groups, strict=True)],
        summary=_summaries(names, groups, ledgers),
        options=_options(names, groups),
        charts=charts,
        fairness=_fairness(names, groups),
        searches=[_search(part) for part in parts if isinstance(part, Search)],
        colours=dict(zip(shown, itertools.cycle(_COLOURS))),
    )


# ---- runs


def _run(name: str, group: RunGroup, ledgers: Mapping[str, str]) -> dict[str, Any]:
    results = group.results
    bad = next((ledgers[str(run.folder)] for run in group.runs if ledgers[str(run.folder)] != "verified"), "")
    return {
        "name": name,
        "badges": _badges(group),
        "ledger": bad,
        "guarantee": group.guarantee,
        "unfinished": f"{group.runs[0].ending}. {_UNFINISHED.format(group.runs[0].folder)}",
        "remarks": [*map(in_words, results if len(group.runs) == 1 else ()), *remarks(results)],
        "seeds": _seeds(group, results) if len(group.runs) > 1 else [],
        "no_curves": any(run.result is not None and run.result.rounds and not run.rounds for run in group.runs),
        "clients": rows_of(client_columns(results))[:_MOST_ROWS] if results else [],
        "more": max(0, max((len(result["clients"]) for result in results), default=0) - _MOST_ROWS),
        "confusion": _confusion(group.runs[0]) if len(group.runs) == 1 else [],
        "figures": _figures(group.runs[0]) if len(group.runs) == 1 else {},
    }


def _seeds(group: RunGroup, results: Sequence[Mapping[str, Any]]) -> Rows:
    seeds = [run.info.options.get("seed", "") for run in group.runs if run.result is not None]
    return seed_rows(seeds, results, _epsilon(group, results))


def _badges(group: RunGroup) -> list[str]:
    """Return the warnings that every mention of the run has to carry."""
    first, results = group.runs[0], group.results
    unbounded = any(client["epsilon_spent"] is None for result in results for client in result["clients"])
    return [
        *(["unfinished"] if len(results) < len(group.runs) else []),
        *sorted({run.info.source.badge for run in group.runs} - {""}),
        *(["no privacy"] if _privacy(first) is None and first.info.options else []),
        *(["epsilon without a bound"] if unbounded and _privacy(first) is not None else []),
    ]


def _privacy(run: Run) -> Mapping[str, Any] | None:
    return run.info.options.get("privacy")


def _summaries(names: Sequence[str], groups: Sequence[RunGroup], ledgers: Mapping[str, str]) -> Rows:
    """Return one row for each group; the columns of scores stand together."""
    scores = [score_cells([scored(run) for run in group.runs]) for group in groups]
    titles = list(dict.fromkeys(title for cells in scores for title in cells))
    every = [{title: cells.get(title, "") for title in titles} for cells in scores]
    rows = zip(names, groups, every, strict=True)
    return aligned([_summary(name, group, cells, ledgers) for name, group, cells in rows])


def _summary(name: str, group: RunGroup, scores: Mapping[str, str], ledgers: Mapping[str, str]) -> dict[str, str]:
    results = group.results
    seeds = f"{len(results)} of {len(group.runs) + group.missing} seeds finished" if len(group.runs) > 1 else ""
    seeds += f", {counted(group.missing, 'folder')} missing" if group.missing else ""
    state = seeds or ("finished" if results else group.runs[0].ending)
    verified = sum(ledgers[str(run.folder)] == "verified" for run in group.runs)
    score, values = client_scores(results)
    worst = [measure_of(results[0], score).worst(one) for one in values if one]
    return {
        "run": name,
        "": ", ".join(_badges(group)),
        "state": state,
        "largest epsilon": _epsilon(group, results),
        **scores,
        "worst client": f"{score} {spread(score, worst, len(results))}" if worst else "",
        "all runs on the same data, at the end of this one": _all_runs(group),
        "clients": f"{len(results[0]['clients']):,}" if results else "",
        "ledger": "verified" if verified == len(group.runs) else "not verified",
    }


def _all_runs(group: RunGroup) -> str:
    """Return the largest epsilon of all runs in the account; empty without an account."""
    together = None if group.guarantee is None else group.guarantee.together
    if together is None:
        return ""
    limit = "" if together.limit is None else f" of {at_most(together.limit)}"
    return f"{bound(together.epsilon)}{limit} at delta {at_most(together.delta)}"


def _last(run: Run, name: str) -> float | None:
    return next(reversed(history(run.rounds, name).values()), None)


def _epsilon(group: RunGroup, results: Sequence[Mapping[str, Any]]) -> str:
    """Return the largest epsilon: of a run, of all seeds composed, or so far.

    A round that was charged and not finished adds to the one so far.
    """
    if group.guarantee is not None and len(results) == len(group.runs):
        return stated(group.guarantee)
    source = group.runs[0].info.source
    known = [epsilon for run in group.runs if (epsilon := _last(run, "train_epsilon_max")) is not None]
    return badged(f"at least {at_most(max(known))} so far" if known else "see the ledger", source)


def _options(names: Sequence[str], groups: Sequence[RunGroup]) -> Rows:
    """Return the parameters that differ between runs; of one run, all of them."""
    every = [_params(group.runs[0]) for group in groups]
    seeds = any(len(group.runs) > 1 for group in groups)
    changed = [group.runs[0].about.get("params", {}) for group in groups]
    keys = dict.fromkeys(key for params in changed for key in params if key != "seed" or not seeds)
    rows = [(key, [params.get(key, "") for params in every]) for key in keys]
    return [
        {"option": key, **dict(zip(names, texts, strict=True))}
        for key, texts in rows
        if len(every) == 1 or len({*texts}) > 1
    ]


def _params(run: Run) -> dict[str, str]:
    """Return the parameters of a run, and all its other options, at their defaults."""
    return {**flattened(published(run.info.options)), **run.about.get("params", {})}


def _fairness(names: Sequence[str], groups: Sequence[RunGroup]) -> Rows:
    rows = []
    for name, group in zip(names, groups, strict=True):
        results = group.results
        score, every = client_scores(results)
        known = [values for values in every if values]
        if not known:
            continue
        measure, of_groups = measure_of(results[0], score), [one.get("accuracy_of_groups") or {} for one in results]
        functions: dict[str, Callable[[Sequence[float]], float]] = {
            "mean": fmean,
            "std over clients": pstdev,
            "worst": measure.worst,
            "gap": measure.gap,
        }
        values = {title: spread(score, [*map(of, known)], len(results)) for title, of in functions.items()}
        parts = {
            f"group {part}" if part.isdigit() else part: spread("accuracy", [one[part] for one in of_groups])
            for part in sorted(set.intersection(*map(set, of_groups)))
        }
        gaps = {
            one.replace("_", " "): spread(one, known)
            for one, known in known_values([result.get("fairness") or {} for result in results]).items()
        }
        rows.append({"run": name, "score": score, **values, **gaps, **parts})
    return aligned(rows)


def _confusion(run: Run) -> Rows:
    """Return a row for each label, with the number of test records for each prediction."""
    counts = [] if run.result is None else run.result.test_tables.get("confusion", [])
    given = ((run.info.options.get("data") or {}).get("init_args") or {}).get("classes") or ()
    names = list(map(str, given if len(given) == len(counts) else range(len(counts))))
    of_labels = zip(names, counts, strict=True)
    return [
        {"label": name, **{f"predicted {one}": str(n) for one, n in zip(names, row, strict=True)}}
        for name, row in of_labels
    ]


def _figures(run: Run) -> dict[str, str]:
    """Return title -> PNG as base64, of the figures of a finished run."""
    if run.result is None:
        return {}
    drawn: dict[str, str] = {}
    for name, figure in figures(run.rounds, run.result).items():
        buffer = io.BytesIO()
        with missing_letters_allowed():
            figure.savefig(buffer, format="png")
        drawn[name.replace("_", " ")] = base64.b64encode(buffer.getvalue()).decode()
    return drawn


# ---- charts


def _charts(names: Sequence[str], groups: Sequence[RunGroup]) -> list[Chart]:
    """Return curves of test scores over rounds, and of main scores over epsilon and of each client over its epsilon."""
    epsilons = {"largest epsilon spent by a client": "train_epsilon_max", "mean epsilon": "train_epsilon_mean"}
    curves = [run.score_curves for group in groups for run in group.runs]
    main = dict.fromkeys(pair for one in curves for pair in list(one.items())[:1])
    charts = []
    for score, curve in dict.fromkeys([*main, *(pair for one in curves for pair in one.items())]):
        heading = _capital(title(score, held_out=curve.startswith("val_")))
        for x, x_curve in {"round": None, **(epsilons if (score, curve) in main else {})}.items():
            lines = [_line(name, group, curve, x_curve) for name, group in zip(names, groups, strict=True)]
            charts.append(Chart(f"{heading} over {x}", x, heading, [line for line in lines if line.x]))
    points: dict[str, list[Series]] = {}
    for name, group in zip(names, groups, strict=True):
        score, _ = client_scores(group.results)
        points.setdefault(score, []).append(_client_points(name, group, score))
    for score, of_groups in points.items():
        heading = title(score, held_out=True)
        known = [one for one in of_groups if one.x]
        charts.append(Chart(f"{_capital(score)} of each client over its epsilon", "epsilon spent", heading, known))
    return [chart for chart in charts if chart.series]


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _line(name: str, group: RunGroup, score: str, x_curve: str | None) -> Series:
    """Return the mean over seeds, with one standard deviation where there are several."""
    with_rounds = [run.rounds for run in group.runs if history(run.rounds, score)]
    points = over_seeds(with_rounds, score)
    places = over_seeds(with_rounds, x_curve) if x_curve else {step: (step, 0.0) for step in points}
    steps = [step for step in points if step in places]
    x, mean, std = [places[s][0] for s in steps], [points[s][0] for s in steps], [points[s][1] for s in steps]
    return Series(name, x, mean, std if any(std) else ())


def _client_points(name: str, group: RunGroup, score: str) -> Series:
    rows = [client for result in group.results for client in result["clients"]]
    rows = [client for client in rows if None not in (client["epsilon_spent"], scores_of(client).get(score))]
    x, y = [float(at_most(one["epsilon_spent"])) for one in rows], [float(scores_of(one)[score] or 0) for one in rows]
    return Series(name, x, y, labels=[str(one["name"]) for one in rows], joined=False)


# ---- searches


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
            **{score: formatted(score, value) for score, value in trial["scores"].items()},
            **{key: _text(trial["params"].get(key, "")) for key in keys},
        }
        for trial in order[:_MOST_ROWS]
    ]
    cost = search.result.get("cost") or {"epsilon": [], "delta": []}
    names = cost.get("names") or map(str, range(len(cost["epsilon"])))
    sums = [
        {
            "client": name,
            "epsilon": bound(epsilon),
            "delta": at_most(delta),
        }
        for name, epsilon, delta in zip(names, cost["epsilon"], cost["delta"], strict=True)
    ]
    return {
        "name": search.name,
        "rows": aligned(rows),
        "guarantee": search.result.get("guarantee", []),
        "clients": sums[:_MOST_ROWS],
        "more": max(0, len(sums) - _MOST_ROWS),
    }


def _scatters(search: Search) -> list[Chart]:
    """Return one chart for each searched key: the first score of each trial over the key's value."""
    trials = [trial for trial in search.result["trials"] if trial["scores"]]
    keys, best = dict.fromkeys(key for trial in trials for key in trial["params"]), {*search.result.get("best", ())}
    charts = []
    for key in keys:
        having = [trial for trial in trials if key in trial["params"]]
        score = next(iter(having[0]["scores"]))
        having = [trial for trial in having if trial["scores"].get(score) is not None]
        values = [trial["params"][key] for trial in having]
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        points = Series(
            search.name,
            x=values if numbers else list(map(str, values)),
            y=[trial["scores"][score] for trial in having],
            labels=[f"trial {trial['number']}{' (best)' * (trial['number'] in best)}" for trial in having],
            marked=[trial["number"] in best for trial in having],
            joined=False,
        )
        charts.append(Chart(f"{search.name}: {score} over {key}", key, score, [points]))
    return charts


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_TEMPLATES = Environment(loader=PackageLoader(__name__, "."), autoescape=True)
