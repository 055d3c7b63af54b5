"""`guarantee.html`: what a run promises, for a data protection officer: a self-contained page, two pages of paper."""

import math
import platform
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader

import dpfl_lightning
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.run import Run
from dpfl_lightning.federated.server.scores import Column, bound, in_words, number, remarks, rows_of, summarised
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.privacy.accounting.units import unit_named
from dpfl_lightning.reporting.odds import Odds, anybody_words, likelihood_ratio, of_several, without_exponents
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.runtime.text import at_most, counted, span

_MOST_ROWS = 200  # clients in the table
_MOST_KINDS, _MOST_GAPS = 8, 30  # shown lists of releases, and shown statements about what is not covered
_MOST_NAMES = 12
_LIBRARIES = ("dp-accounting", "opacus", "numpy", "scipy", "torch", "lightning")


class GuaranteePage(Callback):
    """Writes `guarantee.html` into the folder of a finished run."""

    def on_fit_end(self, view: View, result: RunResult) -> None:
        if result.finished:
            write_text(view.run.output_dir / "guarantee.html", guarantee_page(Run.ended(view, result)))


def guarantee_page(run: Run) -> str:
    """Return the page of a finished run as HTML text. It loads nothing, runs no scripts, and escapes every value.

    **Privacy** Shows the content of `result.json` and `guarantees.json`. Accuracies are on held-out records.
    """
    result, guarantees = run.result, run.guarantees
    assert result is not None, "the run has finished"
    order = sorted(range(len(guarantees)), key=lambda client: (-guarantees[client].epsilon, client))
    weakest, first = guarantees[order[0]], result.clients[order[0]]
    columns, kind = _columns(result, guarantees), unit_named(weakest.unit)
    rows, several = rows_of(columns), len(guarantees) > 1
    place = run.folder
    noisy = sum(bool(row["noise_multiplier"]) for row in result.clients)
    folder, finite = shlex.quote(place.name if place.is_absolute() else str(place)), math.isfinite(weakest.epsilon)
    versions = [f"dpfl_lightning {dpfl_lightning.__version__}", f"Python {platform.python_version()}"]
    return _TEMPLATES.get_template("guarantee_page.html").render(
        name=place.name,
        result=result,
        run=run.info,
        guarantees=guarantees,
        warning=_warning(guarantees, weakest),
        weakest=weakest,
        bare=weakest.words(),
        statement=without_exponents(weakest.words()),
        released=_Released.by(noisy, len(order), weakest.unit, result.at_sites),
        group=anybody_words([row["num_records"] for row in result.clients], guarantees) if finite else "",
        unit=weakest.unit,
        odds=Odds.of(weakest.epsilon, weakest.delta) if finite else None,
        largest=f"This is the weakest promise, that of client {first['name']} (epsilon {at_most(weakest.epsilon)}). "
        if several
        else "",
        kind=kind,
        several=of_several(weakest) if finite and not kind.is_group else [],
        clients_in_words=counted(len(order), "client") + (f" ({_named(result)})" if several else ""),
        together=_together(result, guarantees, order),
        units=[f"one {guarantee.unit} of one client" for guarantee in guarantees],
        covered=_covered(guarantees),
        gaps=_gaps(guarantees),
        counts=any(one.covers_scores for one in guarantees),
        num_clients=f"{len(order):,}",
        scores=in_words(vars(result)),
        remarks=remarks([vars(result)]),
        summary=summarised(columns) if len(order) > _MOST_ROWS else None,
        rows=[rows[client] for client in order[:_MOST_ROWS]],
        overspent={row["share of budget"] for row, one in zip(rows, result.clients, strict=True) if _is_above(one)},
        folder=folder,
        versions=[*versions, *(f"{name} {version(name)}" for name in _LIBRARIES)],
    )


class _Released(NamedTuple):
    """What the page says of releases, by how many clients add noise to theirs: all of them, none, or some.

    Args:
        sums: completes "sums over its records".
        release: what a server gets of a client.
        hidden: what it does not see.
        others_hidden: what readers of pages do not see.
    """

    sums: str
    release: str
    hidden: str
    others_hidden: str

    @classmethod
    def by(cls, noisy: int, clients: int, unit: str, at_sites: bool) -> "_Released":
        """Describe the releases of `clients`, of whom so many are `noisy`."""
        bounded = f"in which each {unit} has a bounded part, with random noise"
        kept = f"records, noise, {'exact scores of sites, ' * at_sites}anything before noise was added"
        exact = "nothing that exact releases show: records can be reconstructed from them"
        if not noisy:
            return cls(", without noise", "release, without noise,", exact, "single updates")
        if noisy == clients:
            return cls(f", {bounded}", "noisy release", kept, "records, noise, and single updates")
        of_some, others = f"of {noisy:,} of the {clients:,} clients", "of the others"
        return cls(
            f": {of_some} sums {bounded}, and {others} sums without noise",
            f"release (noisy {of_some}, and without noise {others})",
            f"{of_some} {kept}; {others} {exact}",
            f"single updates; {of_some} also records and noise",
        )


def _columns(result: RunResult, guarantees: Sequence[Guarantee]) -> list[Column]:
    """Return the columns of the table of clients."""
    odds = [Odds.of(one.epsilon, one.delta) if math.isfinite(one.epsilon) else None for one in guarantees]
    clients, spent = result.clients, [one.epsilon for one in guarantees]
    shares = [_share(one.epsilon, row["epsilon_budget"]) for one, row in zip(guarantees, clients, strict=True)]
    return [
        Column("client", [str(row["name"]) for row in clients]),
        Column(f"{guarantees[0].unit}s trained on", [row["num_records"] for row in clients], "{:,}".format),
        Column("times as likely, at most", [None if one is None else one.factor for one in odds]),
        Column("right guesses, at most", [None if one is None else one.guesses for one in odds]),
        Column("exception", [None if one is None else one.exception for one in odds]),
        Column("epsilon", spent, bound),
        Column("share of budget", [None if share is None else f"{share:.1%}" for share in shares]),
        Column("budget", [number(row["epsilon_budget"]) for row in clients], bound),
        Column("releases", [row["releases"] for row in clients], "{:,}".format),
        Column("noise multiplier", [row["noise_multiplier"] for row in clients], "{:.5g}".format),
    ]


def _together(result: RunResult, guarantees: Sequence[Guarantee], order: Sequence[int]) -> list[dict[str, str]]:
    """Return what the account of each data holder says about all runs; empty without an account."""
    rows = []
    for client in order[:_MOST_ROWS]:
        one = guarantees[client].together
        if one is not None:
            finite = math.isfinite(one.epsilon)
            rows.append(
                {
                    "client": str(result.clients[client]["name"]),
                    "other runs": f"{one.runs:,}",
                    "this run, epsilon": bound(guarantees[client].epsilon),
                    "all runs, epsilon": bound(one.epsilon),
                    "at delta": without_exponents(at_most(one.delta)),
                    "limit": "none" if one.limit is None else at_most(one.limit),
                    "all runs, times as likely": likelihood_ratio(one.epsilon) if finite else "no bound",
                    "exception": Odds.of(one.epsilon, one.delta).exception if finite else "",
                }
            )
    return rows


def _named(result: RunResult) -> str:
    names = [str(row["name"]) for row in result.clients]
    return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES:,} more" * (len(names) > _MOST_NAMES))


def _warning(guarantees: Sequence[Guarantee], weakest: Guarantee) -> str:
    """Say which clients have no guarantee; empty if all have one."""
    if math.isinf(weakest.epsilon):
        bare = sum(math.isinf(guarantee.epsilon) for guarantee in guarantees)
        whose = "No client has" if bare == len(guarantees) else f"{bare:,} of {len(guarantees):,} clients do not have"
        return f"{whose} differential privacy. {weakest.words()}"
    return "" if weakest.source.protects else weakest.words()


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


def _share(spent: float, budget: float | None) -> float | None:
    return spent / budget if budget is not None and math.isfinite(spent) else None


def _is_above(client: Mapping[str, Any]) -> bool:
    return number(client["epsilon_spent"]) > number(client["epsilon_budget"])


def _listed(words: Iterable[str]) -> str:
    different = list(dict.fromkeys(words))
    more = f"; and {len(different) - _MOST_KINDS} more" if len(different) > _MOST_KINDS else ""
    return "; ".join(different[:_MOST_KINDS]) + more


_TEMPLATES = Environment(loader=PackageLoader(__name__, "."), autoescape=True)
_TEMPLATES.filters |= {
    "listed": _listed,
    "span": lambda values: without_exponents(span(values, at_most)),
    "at_most": lambda value: without_exponents(at_most(value)),
}
