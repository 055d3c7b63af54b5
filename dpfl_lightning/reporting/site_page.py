"""What a plan means for a site: the page before it is accepted and after the run, and the same words on a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader

from dpfl_lightning.federated.messages.evaluation import Score
from dpfl_lightning.federated.server.scores import formatted, scores_of
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.reporting.odds import Odds, of_several
from dpfl_lightning.runtime.text import at_most

#: columns of `SitePlan.totals`, and what a limit is
TOTALS = ("plans", "times as likely, at most", "except with probability", "right guesses, at most", "epsilon", "delta")
LIMIT = "Your limit is the most that all plans of this node may ever cost together: the node refuses a plan above it."


@dataclass(frozen=True)
class SitePlan:
    """What a plan means for a site, in words; `guarantee` is that of all that it plans, which has a finite epsilon."""

    site: str
    node: str
    folder: str
    name: str
    digest: str
    date: str
    stage: str
    warning: str
    contact: str
    no_contact: str
    guarantee: Guarantee
    data: Sequence[tuple[str, str]]
    options: Sequence[str]
    server_words: Sequence[str]
    others: Sequence[Sequence[str]]
    more_others: str
    totals: Sequence[Sequence[str]]
    since: str
    changes: Sequence[Sequence[str]]
    files: Sequence[Sequence[str]]
    run: str
    version: str
    spent: str = ""
    verdict: str = ""
    account: str = ""

    @property
    def unit(self) -> str:
        return self.guarantee.unit

    @property
    def epsilon(self) -> str:
        return at_most(self.guarantee.epsilon)

    @property
    def delta(self) -> str:
        return at_most(self.guarantee.delta)

    @property
    def odds(self) -> Odds:
        return Odds.of(self.guarantee.epsilon, self.guarantee.delta)

    @property
    def sent(self) -> str:
        """Return what the promise is about."""
        return "this site sends in this run" if self.spent else "this site would send in this run"

    @property
    def receivers(self) -> Sequence[tuple[str, str, str]]:
        """Return who receives what, and what they do not receive."""
        return (
            (
                "you, at this site",
                "your own records, noise, ledger and exact scores",
                "records and updates of other sites",
            ),
            (
                "the server, which is not trusted",
                f"every noisy update of this site, its name, its number of {self.unit}s for training, names and "
                "scales of columns, classes, its budget, that it takes part, and when it answers",
                "records, noise, exact scores, anything before noise was added",
            ),
            (
                "the other sites",
                "models, and with the plan the same facts about this site as the server",
                "records, and, unless the server passes it on or there are two sites only, what this site alone sent",
            ),
            (
                "everybody who gets the results",
                "names, numbers of records, budgets, epsilons, the trained model, and scores and noisy counts if they "
                "are planned",
                "records, noise, and, unless the server passes them on, single updates",
            ),
        )


@dataclass(frozen=True)
class SiteScores:
    """The scores of the model of `round` on held-out `records`, and what the site has `released` so far."""

    round: int
    records: int
    score: Score
    baseline: Mapping[str, float | None]
    released: Guarantee


def site_page(plan: SitePlan, scores: SiteScores | None = None) -> str:
    """Return the page as HTML text. It loads nothing, runs no scripts, and escapes every value.

    **Privacy** With `scores` it shows exact scores on held-out records, which are private.
    """
    several = of_several(plan.guarantee) if plan.unit == "record" else []
    return _TEMPLATES.get_template("site_page.html").render(
        plan=plan,
        totals=TOTALS,
        limit=LIMIT,
        several=several,
        several_rows=[[*row.values()] for row in several],
        released=None if scores is None else scores.released,
        scores=None if scores is None else _of_scores(scores),
    )


def site_text(plan: SitePlan) -> str:
    """Return what a terminal shows of the page, in its words. Texts of the server come last, each as a literal."""
    promise: Any = _TEMPLATES.get_template("promise.html").module
    lines = [
        plan.name,
        plan.stage,
        plan.warning,
        plan.contact,
        plan.no_contact,
        promise.big(plan.odds, plan.unit, plan.sent).striptags(),
        str(plan.guarantee),
        *(f"{title}: {words}" for title, words in plan.data),
        f"What leaves this site: {'; '.join(plan.guarantee.covers)}.",
        *(f"Received by {who}: {some}. Not received: {others}." for who, some, others in plan.receivers),
        *map(_line, plan.totals),
        LIMIT,
        plan.verdict,
        plan.account,
        plan.since,
        *(f"  {what}: {before} -> {now}" for what, before, now in plan.changes),
        f"Run: {plan.run}.",
        "Once the plan is accepted, and not before, the node builds a model with these options:",
        *(f"  {option}" for option in plan.options),
        *plan.server_words,
    ]
    return "\n".join(filter(None, lines))


def _line(row: Sequence[str]) -> str:
    """Return a row of `SitePlan.totals` as a line."""
    return f"{row[0]}: {'; '.join(map(' '.join, zip(TOTALS[1:], row[1:], strict=True)))}."


def _of_scores(kept: SiteScores) -> dict[str, Any]:
    """Return what the page shows of scores."""
    tables = kept.score.tables
    return {
        "round": kept.round,
        "records": f"{kept.records:,}",
        "counts_held_out": kept.released.counts_held_out,
        "rows": [
            {"score": name, "model": formatted(name, value), "best constant": _constant(name, kept.baseline)}
            for name, value in scores_of(vars(kept.score)).items()
        ],
        "undefined": [f"{name}: the records {words}." for name, words in kept.score.undefined.items()],
        "confusion": [
            {"label": label, **{f"predicted {other}": f"{count:.0f}" for other, count in enumerate(row)}}
            for label, row in enumerate(tables.get("confusion", ()))
        ],
        "calibration": [
            {"records": f"{count:.0f}", "stated": f"{stated:.1%}", "observed": f"{observed:.1%}"}
            for count, stated, observed in tables.get("calibration", ())
        ],
    }


def _constant(name: str, baseline: Mapping[str, float | None]) -> str:
    return formatted(name, baseline[name]) if baseline.get(name) is not None else "-"


_TEMPLATES = Environment(loader=PackageLoader(__name__, "."), autoescape=True)
