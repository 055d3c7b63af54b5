"""`report.html` of a node: what its site has released, in all studies too, and the scores that it keeps."""

import math
from collections.abc import Mapping

from jinja2 import Environment, PackageLoader

from dpfl_lightning.federated.messages.evaluation import Score
from dpfl_lightning.federated.server.scores import formatted, scores_of
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.reporting.odds import Odds


def site_page(
    site: str,
    plan: str,
    round: int,
    records: int,
    score: Score,
    baseline: Mapping[str, float | None],
    promise: Guarantee,
) -> str:
    """Return the page as HTML text. It loads nothing, runs no scripts, and escapes every value.

    `promise` is about all that the site has released in this run so far.

    **Privacy** Shows exact scores on held-out records, which are private.
    """
    confusion, calibration = (score.tables.get(name, ()) for name in ("confusion", "calibration"))
    return _TEMPLATES.get_template("site_page.html").render(
        site=site,
        plan=plan[:12],
        round=round,
        promise=promise,
        odds=Odds.of(promise.epsilon, promise.delta) if math.isfinite(promise.epsilon) else None,
        records=f"{records:,}",
        scores=[
            {"score": name, "model": formatted(name, value), "best constant": _constant(name, baseline)}
            for name, value in scores_of(vars(score)).items()
        ],
        undefined=[f"{name}: the records {words}." for name, words in score.undefined.items()],
        confusion=[
            {"label": label, **{f"predicted {other}": f"{count:.0f}" for other, count in enumerate(row)}}
            for label, row in enumerate(confusion)
        ],
        calibration=[
            {"records": f"{count:.0f}", "stated": f"{stated:.1%}", "observed": f"{observed:.1%}"}
            for count, stated, observed in calibration
        ],
    )


def _constant(name: str, baseline: Mapping[str, float | None]) -> str:
    return formatted(name, baseline[name]) if baseline.get(name) is not None else "-"


_TEMPLATES = Environment(loader=PackageLoader(__name__, "."), autoescape=True)
