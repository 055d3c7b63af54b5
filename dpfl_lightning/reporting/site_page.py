"""The page of a plan at a site: what it means, before it is accepted; afterwards also what was released, and scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader

from dpfl_lightning.federated.messages.evaluation import Score
from dpfl_lightning.federated.server.scores import formatted, scores_of
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.reporting.odds import Odds, of_several
from dpfl_lightning.runtime.text import at_most


@dataclass(frozen=True)
class SitePlan:
    """What a plan means for a site, in words; `guarantee` is that of all that it plans, which has a finite epsilon."""

    site: str
    node: str
    folder: str
    digest: str
    spoken: str
    date: str
    stage: str
    warning: str
    guarantee: Guarantee
    records: str
    columns: str
    label: str
    model: str
    options: Sequence[str]
    server_words: Sequence[str]
    releases: Sequence[str]
    others: Sequence[Sequence[str]]
    more_others: str
    together: str
    verdict: str
    since: str
    changes: Sequence[Sequence[str]]
    contact: str
    run: str
    version: str
    spent: str = ""

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
    def statement(self) -> str:
        return self.guarantee.words()

    @property
    def not_covered(self) -> Sequence[str]:
        return self.guarantee.not_covered


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
    one, accepted = plan.guarantee, bool(plan.spent)
    several = of_several(one) if one.unit == "record" else []
    return _TEMPLATES.get_template("site_page.html").render(
        plan=plan,
        odds=Odds.of(one.epsilon, one.delta),
        sent="this site sends in this run" if accepted else "this site would send in this run",
        several=several,
        several_rows=[[*row.values()] for row in several],
        released=None if scores is None else scores.released,
        scores=None if scores is None else _of_scores(scores),
    )


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
