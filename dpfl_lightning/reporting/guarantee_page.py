"""`guarantee.html`: the guarantee of a run as a self-contained page for a browser or MLflow."""

import math
import platform
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, PackageLoader

import dpfl_lightning
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RunInfo, RunResult
from dpfl_lightning.federated.server.scores import Column, client_columns, in_words, remarks, rows_of, summarised
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.runtime.text import at_most, counted, span

_MOST_ROWS = 200  # clients in the table
_MOST_KINDS, _MOST_GAPS = 8, 30  # shown lists of releases, and shown statements about what is not covered
_LIBRARIES = ("dp-accounting", "opacus", "numpy", "scipy", "torch", "lightning")


class GuaranteePage(Callback):
    """Writes `guarantee.html` into the folder of a finished run."""

    def on_fit_end(self, view: View, result: RunResult) -> None:
        if result.finished:
            page = guarantee_page(result, view.guarantees(), view.run)
            path = view.run.output_dir / "guarantee.html"
            write_text(path, page)


def guarantee_page(result: RunResult, guarantees: Sequence[Guarantee], run: RunInfo) -> str:
    """Return the page of a finished run as HTML text. It loads nothing, runs no scripts, and escapes every value.

    **Privacy** Shows the content of `result.json` and `guarantees.json`. Accuracies are on held-out records.
    """
    columns = {
        **client_columns([vars(result)]),
        "releases": Column([row["releases"] for row in result.clients], "{:,}".format),
        "steps": Column([row["steps"] for row in result.clients], "{:,}".format),
    }
    rows = [
        {**row, "share of budget": _share(promise.epsilon, client["epsilon_budget"])}
        for row, promise, client in zip(rows_of(columns), guarantees, result.clients, strict=True)
    ]
    order = sorted(range(len(guarantees)), key=lambda client: (-guarantees[client].epsilon, client))
    weakest = guarantees[order[0]]
    ledger = shlex.quote(f"{result.output_dir}/ledger.jsonl")
    versions = [f"dpfl_lightning {dpfl_lightning.__version__}", f"Python {platform.python_version()}"]
    return _TEMPLATES.get_template("guarantee_page.html").render(
        name=Path(result.output_dir).name,
        result=result,
        run=run,
        guarantees=guarantees,
        warning=_warning(guarantees, weakest),
        weakest=weakest,
        client=result.clients[order[0]]["name"],
        spent=at_most(weakest.epsilon),
        units=[f"one {guarantee.unit} of one client" for guarantee in guarantees],
        covered=_covered(guarantees),
        gaps=_gaps(guarantees),
        num_clients=f"{len(order):,}",
        scores=in_words(vars(result)),
        remarks=remarks([vars(result)]),
        summary=summarised(columns) if len(order) > _MOST_ROWS else None,
        rows=[rows[client] for client in order[:_MOST_ROWS]],
        command=f"python -m dpfl_lightning.ledger {ledger}",
        versions=[*versions, *(f"{name} {version(name)}" for name in _LIBRARIES)],
    )


def _warning(guarantees: Sequence[Guarantee], weakest: Guarantee) -> str:
    """Say which clients have no guarantee; empty if all have one."""
    if math.isinf(weakest.epsilon):
        bare = sum(math.isinf(guarantee.epsilon) for guarantee in guarantees)
        whose = "No client has" if bare == len(guarantees) else f"{bare:,} of {len(guarantees):,} clients do not have"
        return f"{whose} differential privacy. {weakest.words()}"
    return weakest.words() if weakest.simulated else ""


def _covered(guarantees: Sequence[Guarantee]) -> list[str]:
    """List the releases with the number of clients that make them, most clients first."""
    counts = Counter(", ".join(guarantee.covers) or "nothing" for guarantee in guarantees).most_common()
    lines = [f"{counted(count, 'client')}: {words}" for words, count in counts[:_MOST_KINDS]]
    rest = counted(sum(count for _, count in counts[_MOST_KINDS:]), "client")
    more = [f"{rest}: other numbers of releases; see guarantees.json for each client"]
    return lines + (more if len(counts) > _MOST_KINDS else [])


def _gaps(guarantees: Sequence[Guarantee]) -> list[str]:
    """List what is not covered; what applies to all clients comes first."""
    lacking = Counter(words for guarantee in guarantees for words in guarantee.not_covered).most_common()
    every = len(guarantees)
    lines = [words if count == every else f"{words} ({counted(count, 'client')})" for words, count in lacking]
    more = len(lines) - _MOST_GAPS
    return [*lines[:_MOST_GAPS], f"{more:,} more; see guarantees.json for each client"] if more > 0 else lines


def _share(spent: float, budget: float | None) -> float | str:
    return spent / budget if budget is not None and math.isfinite(spent) else ""


def _listed(words: Iterable[str]) -> str:
    different = list(dict.fromkeys(words))
    more = f"; and {len(different) - _MOST_KINDS} more" if len(different) > _MOST_KINDS else ""
    return "; ".join(different[:_MOST_KINDS]) + more


_TEMPLATES = Environment(loader=PackageLoader(__name__, "."), autoescape=True)
_TEMPLATES.filters |= {"listed": _listed, "span": partial(span, shown=at_most), "at_most": at_most}
