"""The page on which the operator of a site sees what a plan means, before it is accepted and after the run.

It is made from the plan as data and from the site's own facts: nothing that a plan names is built, imported or opened.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import dpfl_lightning
from dpfl_lightning.errors import shortened
from dpfl_lightning.privacy.clipping.inputs import record_shape
from dpfl_lightning.privacy.ledger.verify import read
from dpfl_lightning.reporting.odds import Odds
from dpfl_lightning.reporting.site_page import SitePlan, SiteScores, site_page
from dpfl_lightning.runtime.spoken import SHORTEST, words_of
from dpfl_lightning.runtime.text import at_most, counted, flattened
from dpfl_lightning.sites.exchange import Site, Terms
from dpfl_lightning.sites.node.state import Reservation, Settings, StateFolder
from dpfl_lightning.sites.terms import client_of, cost_of, model_words, privacy_of, read_terms, server_words
from dpfl_lightning.sites.wire import digest

_MOST_SITES = 50  # in the table
_MOST_CHANGES = 30  # in the table
_SHOWN = 200  # characters of a text of the server in a table
_NO_CONTACT = "Contact for questions about this study: ____________________________________________"


def consent_page(state: StateFolder, terms: Terms, verdict: str, contact: str = "") -> str:
    """Return the page of a plan as HTML text, before and after it is accepted.

    `verdict` says whether the plan fits the site and its limits. Raises UserError if the plan does not have this site,
    or plans anything without noise.
    """
    return site_page(_plan(state, terms, verdict, contact))


def completed_page(folder: Path, scores: SiteScores) -> str:
    """Return the page of the accepted plan in `folder`, with what was released and the scores that stay here."""
    state, terms = StateFolder(folder.parents[1]), read_terms(folder / "plan.json")
    return site_page(_plan(state, terms), scores)


def _plan(state: StateFolder, terms: Terms, verdict: str = "", contact: str = "") -> SitePlan:
    settings, plans, hashed = state.settings(), state.plans(), digest(terms)
    client = client_of(terms, settings.name)
    planned, plan = cost_of(terms, client), terms.plan
    cost = planned.guarantee
    is_accepted = hashed in plans
    since, changes = _changes(state, terms, client)
    strategies = ", ".join(name.partition(" ")[2] for name in plan.strategies)
    others = [_row(terms, other) for other in range(len(terms.sites)) if other != client]
    stated = len(others) > _MOST_SITES
    key = "Not for this node: its noise follows from a test key, so that nobody is protected."
    return SitePlan(
        site=settings.name,
        node=shlex.quote(str(state.path)),
        folder=shlex.quote(str(state.plan_folder(hashed))),
        digest=hashed,
        spoken=words_of(hashed[:SHORTEST]),
        date=date.today().isoformat(),
        stage=_stage(is_accepted and plans[hashed]),
        warning=key if settings.test_key is not None else "",
        guarantee=cost,
        records=f"{planned.num_records:,} {cost.unit}s of this site, for training",
        columns=_columns(state.site()),
        label=_label(state.site()),
        model=_model(plan.options.get("model"), settings),
        options=[line.strip() for line in model_words(plan)[1:]],
        server_words=[*map(server_words, [f"This run uses {strategies}.", *plan.caveats])],
        releases=cost.covers,
        others=others[:_MOST_SITES],
        more_others=f"{len(others) - _MOST_SITES:,} more are in the plan. " if stated else "",
        together=_together(state, Reservation(cost.epsilon, cost.delta, client, 0), is_accepted),
        verdict=verdict,
        since=since,
        changes=changes,
        contact=f"Contact for questions about this study: {contact}." if contact else _NO_CONTACT,
        run=f"{terms.run}, at most {counted(plan.rounds, 'round')}; each {cost.unit}'s part is clipped to "
        f"{plan.settings[client].clip_norm:g}",
        version=dpfl_lightning.__version__,
        spent=_spent(state, hashed) if is_accepted else "",
    )


def _stage(reserved: Reservation | bool) -> str:
    """Return in words how far the consent of the site has come."""
    if not isinstance(reserved, Reservation):
        return "This site has not accepted this plan: nothing of it happens before it does."
    return "This site has withdrawn from this plan." if reserved.withdrawn else "This site has accepted this plan."


def _columns(site: Site) -> str:
    columns = site.schema.get("columns")
    if columns:
        besides = "beside them only the label and, if there is one, the column that names persons"
        return f"{', '.join(map(str, columns))}; {besides}"
    return f"none by name: records are numbers of shape {record_shape(site.inputs)}"


def _label(site: Site) -> str:
    labels = ", ".join(map(str, site.schema.get("label") or ())) or "what the site's data give as the label"
    classes = ", ".join(map(str, site.schema.get("classes") or ())) or f"{site.num_classes} classes"
    return f"{labels} ({'a number' if site.num_classes == 1 else classes})"


def _model(model: Any, settings: Settings) -> str:
    """Return in words which model a plan names and who chose it; what the server wrote is a literal."""
    given: Mapping[str, Any] = model if isinstance(model, Mapping) else {"name": model}
    path = given.get("class_path")
    if path is None:
        return f"{shortened(repr(given.get('name')), _SHOWN)}, a model of dpfl_lightning, which the server chose"
    named = shortened(repr(path), _SHOWN)
    if path == settings.model:
        return f"{named}, a class that this site has fixed with its arguments; the server cannot choose another"
    return f"{named}, which the server names and this site has not fixed: the node refuses it"


def _row(terms: Terms, client: int) -> tuple[str, str, str]:
    site, settings, schedule = terms.sites[client], terms.plan.settings[client], terms.plan.schedule.clients[client]
    budget = min(schedule.target_epsilon, settings.epsilon)
    epsilon = at_most(budget) if math.isfinite(budget) else "without a bound"
    return (
        site.name,
        f"{site.num_records:,} {privacy_of(terms)['unit']}s",
        f"epsilon {epsilon}, delta {at_most(settings.delta)}",
    )


def _together(state: StateFolder, reservation: Reservation, is_accepted: bool) -> str:
    """Return what all plans of the node cost together with this one."""
    others = len(state.plans()) - is_accepted
    epsilon, delta = state.reserved(*([] if is_accepted else [reservation]))
    odds = Odds.of(epsilon, delta)
    return (
        f"With {counted(others, 'other plan')} that this node has accepted, all plans together cost epsilon "
        f"{at_most(epsilon)} and delta {at_most(delta)}: at most {odds.factor} times as likely, "
        f"except with probability {odds.exception}, and right in at most {odds.guesses}."
    )


def _spent(state: StateFolder, plan: str) -> str:
    schedule = state.terms(plan).plan.schedule.clients[state.plans()[plan].client]
    paid, planned = state.released(plan), sum(schedule.releases)
    words = f"{paid} of {counted(planned, 'planned release')} were made"
    if not paid:
        return f"{words}."
    spent = max(total.epsilon for total in read([state.plan_folder(plan) / "ledger.jsonl"]).paid)
    return f"{words}, which cost epsilon {at_most(spent)}."


def _changes(state: StateFolder, terms: Terms, client: int) -> tuple[str, list[tuple[str, str, str]]]:
    """Return in words with which plan this one is compared, and what differs: (what, in that plan, in this one)."""
    this = digest(terms)
    files = [file for file in state.path.glob("plans/*/plan.json") if file.parent.name != this]
    accepted = [file for file in files if file.parent.name in state.plans()]
    own = state.plan_folder(this) / "plan.json"
    before = [file for file in accepted if not own.exists() or file.stat().st_mtime < own.stat().st_mtime]
    if not before:
        return "This is the first plan at this node.", []
    last = max(before, key=lambda file: file.stat().st_mtime)
    old = read_terms(last)
    one, other = _compared(old, client_of(old, state.settings().name)), _compared(terms, client)
    both = [*dict.fromkeys([*one, *other])]
    changes = [(what, one.get(what, "-"), other.get(what, "-")) for what in both if one.get(what) != other.get(what)]
    compared = f"Compared with the plan {last.parent.name[:12]}, which this node accepted last"
    if digest(dataclasses.replace(terms, run=old.run)) == digest(old):
        return f"{compared}, only the name of the run differs.", []
    more = f" {counted(len(changes) - _MOST_CHANGES, 'further option')} differ, too." * (len(changes) > _MOST_CHANGES)
    differ = (
        "these points differ:" if changes else "no option differs, but facts about sites or the code of a strategy do."
    )
    return f"{compared}, {differ}{more}", changes[:_MOST_CHANGES]


def _compared(terms: Terms, client: int) -> dict[str, str]:
    """Return what of a plan is compared with another one, as texts; options, which the server wrote, as literals."""
    plan, site, schedule = terms.plan, terms.sites[client], terms.plan.schedule.clients[client]
    options = {f"option {name}": shortened(repr(value), _SHOWN) for name, value in flattened(plan.options).items()}
    lines = [f"{line.count} {line.purpose} ({', '.join(map(str, line.event.cells()))})" for line in schedule.planned]
    return {
        "budget": _row(terms, client)[2],
        "records": _row(terms, client)[1],
        "rounds": str(plan.rounds),
        "releases (sample rate, noise multiplier, steps each)": "; ".join(lines),
        "clipped to": f"{plan.settings[client].clip_norm:g}",
        "code and layers of the model, by digest": terms.module[:12],
        "strategies": shortened(repr([name.partition(" ")[2] for name in plan.strategies]), _SHOWN),
        "other sites": ", ".join(one.name for one in terms.sites if one.name != site.name),
        **options,
    }
