"""What a plan means for a site: the page before it is accepted and after the run, the same words on a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader

from dpfl_lightning.federated.messages.evaluation import Score
from dpfl_lightning.federated.server.scores import formatted, measure_of, scores_of
from dpfl_lightning.models.tasks import Measure
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.privacy.accounting.units import unit_named
from dpfl_lightning.reporting.odds import Odds, anybody_words, of_several, without_exponents
from dpfl_lightning.runtime.text import at_most

#: columns of `SitePlan.totals`, and what a limit is
TOTALS = ("plans", "times as likely, at most", "except with probability", "right guesses, at most", "epsilon", "delta")
LIMIT = (
    "Your limit is the most that all plans of this node may ever cost together: the node refuses a plan above it. The "
    "operator sets it, and can raise it by --raise_limits."
)
#: columns of `SitePlan.uncovered` and of `SitePlan.withdrawal`
UNCOVERED = ("what", "does it leave this site, and what protects")
WITHDRAWAL = ("when", "of a {} in training", "of a held-out {}", "what stays counted in section 5")


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
    everywhere: str
    uncovered: Sequence[tuple[str, str]]
    totals: Sequence[Sequence[str]]
    since: str
    changes: Sequence[Sequence[str]]
    files: Sequence[Sequence[str]]
    num_sites: int
    holds_out: bool
    num_records: int
    run: str
    version: str
    accepted: str = ""
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
        return without_exponents(at_most(self.guarantee.delta))

    @property
    def odds(self) -> Odds:
        return Odds.of(self.guarantee.epsilon, self.guarantee.delta)

    @property
    def group(self) -> str:
        """Return how likely the exception hits anybody."""
        return anybody_words([self.num_records], [self.guarantee])

    @property
    def statement(self) -> str:
        return without_exponents(self.guarantee.words())

    @property
    def sent(self) -> str:
        """Return what the promise is about."""
        return "this site sends in this run" if self.spent else "this site would send in this run"

    @property
    def receivers(self) -> Sequence[tuple[str, str, str]]:
        """Return who receives what, and what they do not receive."""
        counts = " and noisy counts of held-out records" * self.guarantee.covers_scores
        with_two = " (with two sites, they tell what this site sent)" * (self.num_sites == 2)
        alone = "" if with_two else ", and, unless the server passes it on, what this site alone sent"
        others = (
            "the other sites",
            f"models{with_two}, and with the plan the same facts about this site as the server",
            f"records{alone}",
        )
        return (
            (
                "the operator of this site",
                f"its records{', exact scores' * self.holds_out}, and the ledger (section 8)",
                "records and updates of other sites, noise",
            ),
            ("the data protection officer", "this page", "by the program: records, exact scores"),
            (
                "the server, which is not trusted",
                f"every noisy update of this site, with a signed receipt, its name, its number of {self.unit}s for "
                "training, names, scales and classes of columns as the study states them, its budget, that it takes "
                "part, and when it answers",
                "records, noise, exact scores, anything before noise was added",
            ),
            *(others,) * (self.num_sites > 1),
            (
                "everybody who gets the results",
                f"names of the sites, numbers of {self.unit}s, budgets, epsilons, the trained model, and its "
                f"scores on records of the server{counts}",
                "records, noise, and, unless the server passes them on, single updates",
            ),
        )

    @property
    def asks(self) -> str:
        """Return who has the configuration of the run, or gets it."""
        return "the operator asks the server for" if self.no_contact else "the contact has"

    @property
    def withdrawal(self) -> Sequence[tuple[str, str, str, str]]:
        """Return what the withdrawal of one unit means before, during and after a run."""
        return (
            ("before acceptance", "a plan with the new number is needed", "the plan stays as it is", "nothing"),
            (
                "accepted, nothing sent",
                "the node refuses the plan: the site withdraws from it, and needs a new plan",
                "the study goes on without them",
                "nothing, once the site has withdrawn",
            ),
            (
                "during the run",
                "the same; what was sent shows no more of them than section 1 allows",
                "the study goes on without them",
                "the whole budget of the plan",
            ),
            (
                "after the run",
                "models keep what they learnt, within the promise; fingerprints and their key stay in the account of "
                "the user; delete data_key, releases/, private.json and error.log, if any",
                "the same fingerprints stay; delete scores.json, scores.html and error.log, if any",
                "the whole budget of the plan",
            ),
        )

    @property
    def renewal(self) -> str:
        """Return how a new plan comes about, and what it shows."""
        one, fewer = (f"{self.num_records - less:,}" for less in (0, 1))
        return (
            "For a new plan the node writes the new number into site.json; its limit and all that is counted stay. The "
            f"number is exact and public: {fewer} {self.unit}s after {one} tell that one has left. With corrected "
            "training rows the node refuses a plan that it has started."
        )


@dataclass(frozen=True)
class SiteScores:
    """The scores of the model of `round` on held-out `records`, and what the site has `released` so far."""

    round: int
    records: int
    score: Score
    baseline: Mapping[str, float | None]
    measures: Mapping[str, Measure]
    released: Guarantee


def site_page(plan: SitePlan) -> str:
    """Return the page as HTML text. It loads nothing, runs no scripts, and escapes every value."""
    kind = unit_named(plan.unit)
    several = [] if kind.is_group else of_several(plan.guarantee, client="site")
    return _TEMPLATES.get_template("site_page.html").render(
        plan=plan,
        totals=TOTALS,
        limit=LIMIT,
        uncovered=UNCOVERED,
        withdrawal=[title.format(plan.unit) for title in WITHDRAWAL],
        statement=plan.statement,
        kind=kind,
        several=several,
        several_rows=[[*row.values()] for row in several],
    )


def scores_page(site: str, plan: str, scores: SiteScores) -> str:
    """Return the page of a site's scores in the plan with this hash, as `site_page` does.

    **Privacy** It shows exact scores on held-out records, which are private.
    """
    return _TEMPLATES.get_template("scores_page.html").render(site=site, digest=plan, scores=_of_scores(scores))


def site_text(plan: SitePlan) -> str:
    """Return what a terminal shows of the page, in its words. Texts of the server come last, each as a literal."""
    promise: Any = _TEMPLATES.get_template("promise.html").module
    lines = [
        plan.name,
        plan.stage,
        plan.warning,
        plan.contact,
        plan.no_contact,
        promise.big(plan.odds, plan.unit, f"{plan.sent}, except what section 3 lists,", plan.group).striptags(),
        plan.statement,
        *(f"{title}: {words}" for title, words in plan.data),
        f"What leaves this site: {'; '.join(plan.guarantee.covers)}.",
        *(f"Received by {who}: {some}. Not received: {others}." for who, some, others in plan.receivers),
        *(f"Not covered: {what}: {words}" for what, words in plan.uncovered),
        plan.everywhere,
        *map(_line, plan.totals),
        LIMIT,
        plan.verdict,
        plan.account,
        plan.since,
        *(f"  {what}: {before} -> {now}" for what, before, now in plan.changes),
        f"Run: {plan.run}.",
        "Options of the model:",
        *(f"  {option}" for option in plan.options),
        *plan.server_words,
    ]
    return "\n".join(filter(None, lines))


def _line(row: Sequence[str]) -> str:
    """Return a row of `SitePlan.totals` as a line."""
    cells = (f"{title} {cell}" for title, cell in zip(TOTALS[1:], row[1:], strict=True) if cell)
    return f"{row[0]}: {'; '.join(cells)}."


def _of_scores(kept: SiteScores) -> dict[str, Any]:
    """Return what the page shows of scores."""
    tables = kept.score.tables
    return {
        "round": kept.round,
        "records": f"{kept.records:,}",
        "counts_held_out": kept.released.covers_scores,
        "verdict": _verdict(kept),
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


def _verdict(kept: SiteScores) -> str:
    """Return in words whether the model is better than the best constant prediction; by the accuracy if it has one."""
    known = {name: (one, kept.baseline.get(name)) for name, one in scores_of(vars(kept.score)).items()}
    named = [(name, one, other) for name, (one, other) in known.items() if one is not None and other is not None]
    if not named:
        return "Nothing says whether the model is better than giving all records one answer."
    name, model, constant = next((one for one in named if one[0] == "accuracy"), named[0])
    measure = measure_of(vars(kept), name)
    better = measure.merit(model) > measure.merit(constant)
    figures = f"{name} {formatted(name, model)} against {formatted(name, constant)}"
    return f"The model is {'better' if better else 'no better'} than giving all records one answer: {figures}."


def _constant(name: str, baseline: Mapping[str, float | None]) -> str:
    return formatted(name, baseline[name]) if baseline.get(name) is not None else "-"


_TEMPLATES = Environment(loader=PackageLoader(__name__, "."), autoescape=True)
