"""`guarantee.html`: the guarantee of a run as a self-contained page for a browser or MLflow."""

from __future__ import annotations

import html
import math
import platform
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dpfl_lightning
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RunInfo, RunResult
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.guarantee import Guarantee, shown_epsilon
from dpfl_lightning.runtime.files import write_atomically

_MOST_ROWS = 200  # clients in the table
_MOST_KINDS, _MOST_GAPS = 8, 30  # shown lists of releases, and shown statements about what is not covered
_LIBRARIES = ("opacus", "numpy", "scipy", "torch", "lightning")


class GuaranteePage(Callback):
    """Writes `guarantee.html` into the folder of a finished run."""

    def on_fit_end(self, view: View, result: RunResult) -> None:
        if result.finished:
            page = guarantee_page(result, view.guarantees(), view.run)
            path = view.run.output_dir / "guarantee.html"
            write_atomically(path, lambda partial: partial.write_text(page, encoding="utf-8"))


def guarantee_page(result: RunResult, guarantees: Sequence[Guarantee], run: RunInfo) -> str:
    """Return the page as HTML text. It loads nothing, runs no scripts, and escapes every value.

    Args:
        result: result of the finished run.
        guarantees: guarantee of each client, from the ledger.
        run: engine, device and accountant.

    **Privacy** Shows the content of `result.json` and `guarantees.json`. Accuracies are on held-out records.
    """
    name = Path(result.output_dir).name
    sections = [
        _headline(result, guarantees),
        _section("What epsilon means", _pairs(_frame(guarantees))),
        _section("What is covered", _covered(guarantees)),
        _section("What is not covered", _list(_gaps(guarantees))),
        _section("Clients", _clients(result, guarantees)),
        _section("How to verify", _verify(result)),
        _section("The run", _pairs(_run(result, run))),
    ]
    title = _escaped(f"Guarantee of {name}")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n<main>\n<h1>{title}</h1>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


# ---- sections


def _headline(result: RunResult, guarantees: Sequence[Guarantee]) -> str:
    client, weakest = max(enumerate(guarantees), key=lambda pair: pair[1].epsilon)
    if math.isinf(weakest.epsilon):
        bare = sum(math.isinf(one.epsilon) for one in guarantees)
        whose = "No client has" if bare == len(guarantees) else f"{bare:,} of {len(guarantees):,} clients do not have"
        return f'<p class="bad">{_escaped(f"{whose} differential privacy. {weakest.words()}")}</p>\n'
    if weakest.simulated:
        return f'<p class="bad">{_escaped(weakest.words())}</p>\n'
    row = result.clients[client]
    spent = _number(shown_epsilon(weakest.epsilon, _or_inf(row["epsilon_budget"])))
    largest = f"<strong>&epsilon; &le; {spent}</strong> at &delta; = {_escaped(f'{weakest.delta:g}')}"
    of_all = f" is the largest of {len(guarantees):,} clients (client {client})" if len(guarantees) > 1 else ""
    return f'<p class="big">{largest}{of_all}.</p>\n<p>{_escaped(weakest.words())}</p>\n'


def _frame(guarantees: Sequence[Guarantee]) -> list[tuple[str, str]]:
    deltas = sorted({one.delta for one in guarantees})
    who = "everyone who sees what a client sends, including the server; participation is not assumed to be secret"
    return [
        ("Unit", _all_of(f"one {one.unit} of one client" for one in guarantees)),
        ("Neighbouring data sets", _all_of(one.adjacency for one in guarantees)),
        ("Against", who),
        ("Sampling", _all_of(one.sampling for one in guarantees)),
        ("Accountant", _all_of(one.accountant for one in guarantees)),
        ("Delta", f"{deltas[0]:g}" if len(deltas) == 1 else f"{deltas[0]:g} to {deltas[-1]:g}"),
        ("Rounding", "every epsilon is rounded up"),
    ]


def _covered(guarantees: Sequence[Guarantee]) -> str:
    """List the releases with the number of clients that make them, most clients first."""
    counts = Counter(", ".join(one.covers) or "nothing" for one in guarantees).most_common()
    lines = [f"{_clients_of(count)}: {words}" for words, count in counts[:_MOST_KINDS]]
    rest = sum(count for _, count in counts[_MOST_KINDS:])
    lines += [f"{_clients_of(rest)}: other numbers of releases; see guarantees.json for each client"] if rest else []
    return _list(lines)


def _gaps(guarantees: Sequence[Guarantee]) -> list[str]:
    """List what is not covered; what applies to all clients comes first."""
    lacking = Counter(words for one in guarantees for words in one.not_covered).most_common()
    every = len(guarantees)
    lines = [words if count == every else f"{words} ({_clients_of(count)})" for words, count in lacking]
    more = len(lines) - _MOST_GAPS
    return [*lines[:_MOST_GAPS], f"{more:,} more; see guarantees.json for each client"] if more > 0 else lines


def _clients(result: RunResult, guarantees: Sequence[Guarantee]) -> str:
    order = sorted(range(len(guarantees)), key=lambda client: (-guarantees[client].epsilon, client))
    head = (
        "client",
        "records",
        "batch",
        "noise multiplier",
        "releases",
        "steps",
        "epsilon spent",
        "of budget",
        "delta",
    )
    rows = [_client_row(result.clients[client], guarantees[client]) for client in order[:_MOST_ROWS]]
    table = _table((*head, "share of budget"), rows)
    if len(order) <= _MOST_ROWS:
        return table
    words = f"The table shows the {_MOST_ROWS} of {len(order):,} clients with the largest epsilon; result.json has all."
    return f"{_summary(result, guarantees)}<p>{_escaped(words)}</p>\n{table}"


def _client_row(row: dict[str, Any], promise: Guarantee) -> list[str]:
    budget = _or_inf(row["epsilon_budget"])
    cells = [
        _escaped(str(row["client"])),
        *(_escaped(f"{row[key]:,}") for key in ("num_records", "batch_size")),
        "-" if row["noise_multiplier"] is None else _number(row["noise_multiplier"]),
        *(_escaped(f"{row[key]:,}") for key in ("releases", "steps")),
        _epsilon(shown_epsilon(promise.epsilon, budget)),
        _budget(budget),
        _escaped(f"{promise.delta:g}"),
    ]
    return [*cells, _bar(promise.epsilon / budget) if math.isfinite(promise.epsilon) and math.isfinite(budget) else ""]


def _summary(result: RunResult, guarantees: Sequence[Guarantee]) -> str:
    """Return smallest, median and largest value over all clients, separately for each column."""
    noises = [row["noise_multiplier"] for row in result.clients]
    columns = {
        "epsilon spent": ([shown_epsilon(one.epsilon) for one in guarantees], _epsilon),
        "of budget": ([_or_inf(row["epsilon_budget"]) for row in result.clients], _budget),
        "noise multiplier": ([noise for noise in noises if noise is not None] or [0.0], _number),
        "records": ([row["num_records"] for row in result.clients], _number),
        "releases": ([row["releases"] for row in result.clients], _number),
    }
    picks: dict[str, Callable[[list[float]], float]] = {
        "smallest": min,
        "median": statistics.median_high,
        "largest": max,
    }
    rows = [[name, *(text(pick(column)) for column, text in columns.values())] for name, pick in picks.items()]
    return _table(("", *columns), rows) + "<p>Each column is summarised separately.</p>\n"


def _verify(result: RunResult) -> str:
    command = f"python -m dpfl_lightning.plan --ledger {shlex.quote(f'{result.output_dir}/ledger.jsonl')}"
    return (
        "<p>Every release was charged to the ledger before it was made. This command reads only the ledger, verifies "
        f"it and composes each client's charges again:</p>\n<pre>{_escaped(command)}</pre>\n"
        "<p>MLflow stores the ledger together with this page. A ledger shows what was charged. That the program adds "
        "the noise it charges for is shown by its tests.</p>\n"
    )


def _run(result: RunResult, run: RunInfo) -> list[tuple[str, str]]:
    accuracy = result.test_accuracy
    versions = [f"dpfl_lightning {dpfl_lightning.__version__}", f"Python {platform.python_version()}"]
    return [
        ("Clients", f"{len(result.clients):,}"),
        ("Rounds", f"{result.rounds:,} of {run.rounds:,}"),
        ("Ended", result.reason),
        *([] if accuracy is None else [("Test accuracy", f"{accuracy:.2%} (test records: not covered)")]),
        ("Engine", run.engine),
        ("Device", run.device),
        ("Folder", result.output_dir),
        ("Versions", ", ".join([*versions, *(f"{name} {version(name)}" for name in _LIBRARIES)])),
    ]


# ---- texts


def _all_of(words: Iterable[str]) -> str:
    """Join the distinct texts; if there are many, state how many more exist."""
    different = list(dict.fromkeys(words))
    more = f"; and {len(different) - _MOST_KINDS} more" if len(different) > _MOST_KINDS else ""
    return "; ".join(different[:_MOST_KINDS]) + more


def _clients_of(count: int) -> str:
    return f"{count:,} client{'' if count == 1 else 's'}"


def _or_inf(epsilon: float | None) -> float:
    return math.inf if epsilon is None else epsilon


# ---- HTML


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


def _number(value: float) -> str:
    return f"{value:.6g}"


def _epsilon(value: float) -> str:
    return _number(value) if math.isfinite(value) else "&infin;"


def _budget(value: float) -> str:
    return _number(value) if math.isfinite(value) else "none"


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{_escaped(title)}</h2>\n{content}</section>\n"


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{_escaped(key)}</dt><dd>{_escaped(value)}</dd>\n" for key, value in pairs)
    return f"<dl>\n{rows}</dl>\n"


def _list(lines: Iterable[str]) -> str:
    return "<ul>\n" + "".join(f"<li>{_escaped(line)}</li>\n" for line in lines) + "</ul>\n"


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are HTML."""
    top = "".join(f'<th scope="col">{_escaped(title)}</th>' for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n'


def _bar(share: float) -> str:
    shown = min(max(share, 0.0), 1.0)
    over = ' class="over"' if share > 1 else ""
    return f'<span class="bar"><i{over} style="width:{shown:.1%}"></i></span><span class="share">{share:.1%}</span>'


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6576; --line: #dfe3ea; --page: #ffffff; --card: #f5f7fa;
  --bar: #2f6fde; --bad: #b3261e; --bad-card: #fdeceb; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa5b8; --line: #333b49; --page: #14181f;
  --card: #1c222c; --bar: #6ea0ff; --bad: #ff9a92; --bad-card: #3a1d1c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.55 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1.25rem 3rem; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
p, li { max-width: 50rem; }
ul { padding-left: 1.2rem; margin: .4rem 0; }
.big { font-size: 1.15rem; margin: 0 0 .4rem; }
.big strong { font-size: 1.5rem; }
.bad { background: var(--bad-card); color: var(--bad); border-left: 4px solid var(--bad); padding: .8rem 1rem;
  font-weight: 600; }
dl { display: grid; grid-template-columns: minmax(9rem, max-content) 1fr; gap: .3rem 1.5rem; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem; margin: .6rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, monospace; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { color: var(--soft); font-weight: 500; background: var(--page); }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
tbody tr:hover { background: var(--card); }
.bar { display: inline-block; width: 5rem; height: .55rem; border-radius: 3px; background: var(--line);
  overflow: hidden; vertical-align: baseline; text-align: left; }
.share { display: inline-block; width: 4rem; }
.bar i { display: block; height: 100%; background: var(--bar); }
.bar i.over { background: var(--bad); }
@media print { body { font-size: 11px; } .wide { overflow: visible; } }
"""
