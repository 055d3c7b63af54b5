"""What a plan means for a site, in words: for the operator's terminal, and for the page before and after the run.

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
from dpfl_lightning.data import Population
from dpfl_lightning.errors import shortened
from dpfl_lightning.privacy.accounting.client_plan import ClientPlan
from dpfl_lightning.privacy.accounting.guarantee import released_words
from dpfl_lightning.privacy.clipping.inputs import record_shape
from dpfl_lightning.privacy.ledger.account_file import AccountFile, users_file
from dpfl_lightning.privacy.ledger.verify import read
from dpfl_lightning.reporting.odds import Odds
from dpfl_lightning.reporting.site_page import SitePlan, SiteScores, site_page
from dpfl_lightning.runtime.spoken import in_both_forms
from dpfl_lightning.runtime.text import at_least, at_most, counted, flattened
from dpfl_lightning.sites.exchange import Site, Terms
from dpfl_lightning.sites.node.state import Reservation, Settings, StateFolder
from dpfl_lightning.sites.terms import client_of, cost_of, model_words, privacy_of, read_terms, server_words
from dpfl_lightning.sites.wire import digest

_MOST_SITES = 50  # in the table
_MOST_CHANGES = 30  # in the table
_SHOWN = 200  # characters of a text of the server in a table
_NO_ROW = "no row"  # is held out
_TEST_KEY = "Not for this node: its noise follows from a test key, so that nobody is protected."
_NO_CONTACT = "No contact for questions about this study was named: name one by --contact before you sign."


def held_out_words(population: Population, client: int) -> str:
    """Return in words how many rows of a client are held out, and of how many persons if ids are known."""
    rows = population.held_out_of[client]
    words = counted(len(rows), "row") if len(rows) else _NO_ROW
    if population.persons is None or not len(rows):
        return words
    return f"{words} of {counted(len(population.persons.cpu()[rows.cpu()].unique()), 'person')}"


def completed_page(folder: Path, scores: SiteScores, population: Population) -> str:
    """Return the page of the accepted plan in `folder`, with what was released and the scores that stay here."""
    state, terms = StateFolder(folder.parents[1]), read_terms(folder / "plan.json")
    settings = state.settings()
    held_out = held_out_words(population, client_of(terms, settings.name))
    return site_page(site_plan(state, terms, (settings.epsilon_limit, settings.delta_limit), held_out), scores)


def site_plan(
    state: StateFolder, terms: Terms, limits: tuple[float, float], held_out: str, contact: str = ""
) -> SitePlan:
    """Return what a plan means for a site, but not whether it fits.

    `held_out` says in words how many rows are held out; empty if they were not counted. `contact` is whom to ask; if it
    is empty, the one that was named before. Raises UserError if the plan does not have this site, or plans anything
    without noise.
    """
    settings, plans, hashed = state.settings(), state.plans(), digest(terms)
    client = client_of(terms, settings.name)
    planned, plan = cost_of(terms, client), terms.plan
    cost = planned.guarantee
    is_accepted = hashed in plans
    since, changes = _changes(state, terms, client)
    strategies = ", ".join(name.partition(" ")[2] for name in plan.strategies)
    others = [_row(terms, other) for other in range(len(terms.sites)) if other != client]
    stated = len(others) > _MOST_SITES
    asked = contact or state.contact(hashed)
    clipped = f"each {cost.unit}'s gradient"
    if cost.unit == "person":
        clipped += f", the mean over at most {settings.rows_per_person} of the person's rows,"
    return SitePlan(
        site=settings.name,
        node=shlex.quote(str(state.path)),
        folder=shlex.quote(str(state.plan_folder(hashed))),
        name=f"Plan {in_both_forms(hashed)}.",
        digest=hashed,
        date=date.today().isoformat(),
        stage=_stage(is_accepted and plans[hashed]),
        warning=_TEST_KEY if settings.test_key is not None else "",
        contact=f"Contact for questions about this study: {asked}." if asked else "",
        no_contact="" if asked else _NO_CONTACT,
        guarantee=cost,
        data=(
            ("Training", f"{counted(planned.num_records, cost.unit)} of this site"),
            *_held_out(state, planned, held_out),
            ("Columns", _columns(state.site())),
            ("Label", _label(state.site())),
            ("Model", _model(plan.options.get("model"), settings)),
        ),
        options=[line.strip() for line in model_words(plan)[1:]],
        server_words=[*map(server_words, [f"This run uses {strategies}.", *plan.caveats])],
        others=others[:_MOST_SITES],
        more_others=f"{len(others) - _MOST_SITES:,} more are in the plan. " if stated else "",
        totals=_totals(state, hashed, Reservation(cost.epsilon, cost.delta, client, 0), limits),
        since=since,
        changes=changes,
        files=_files(),
        run=f"{terms.run}, of {counted(len(terms.sites), 'client')}, at most {counted(plan.rounds, 'round')}; "
        f"{clipped} is clipped to {plan.settings[client].clip_norm:g}",
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


def _held_out(state: StateFolder, planned: ClientPlan, number: str) -> list[tuple[str, str]]:
    """Return what held-out records are used for, what of them leaves, and how to ask about one person."""
    title = "Held out"
    if not number:
        return [(title, "not counted, because the plan does not fit")]
    if number == _NO_ROW:
        return [(title, _NO_ROW)]
    lines = [line for line in planned.schedule.planned if line.event.counts_held_out]
    counts = released_words([line.event for line in lines], [line.count for line in lines])
    leaves = (
        f"What leaves of them is planned and has random noise: {'; '.join(counts)}. The promise covers it."
        if counts
        else "Nothing of them leaves this site: no score, no count, not even their number."
    )
    use = "No training uses them. They score models that the server sends, in general the final one."
    settings = state.settings()
    named = bool(state.site().schema.get("person"))
    own, made = settings.config["data"]["class_path"], "dpfl_lightning.Population."
    by = "person's id" if named else "record (equal records stay together)"
    if own is None:
        rule = "Rows are drawn by the seed in the configuration of this site."
    else:
        unless = "" if own.startswith(made) else f"Unless the class {own} of this site divides its data itself, a "
        rule = (
            f"{unless or 'A '}digest of the {by} and of the seed in this site's configuration decides it: in each run "
            f"in the same way. This is no secret: who knows the {'id' if named else 'record'} and the seed can compute "
            "it."
        )
    ask = (
        f"dpfl node status {shlex.quote(str(state.path))} --person ID tells the operator, on this machine alone, "
        "whether one person is held out."
        if named
        else "The data name no persons, so no command tells it of one person; in Python, held_out_of of the "
        "Population has the numbers of the rows."
    )
    return [(title, f"{number}. {use} The exact scores stay here. {leaves}"), ("Who is held out", f"{rule} {ask}")]


def _totals(state: StateFolder, plan: str, planned: Reservation, limits: tuple[float, float]) -> list[tuple[str, ...]]:
    """Return what the plans of a node cost together, without and with this one, and what the limits leave."""
    accepted = state.plans()
    this, more = (accepted[plan], ()) if plan in accepted else (planned, (planned,))
    others = counted(len(accepted.keys() - {plan}), "plan")
    left = state.left(limits, *more)
    rest = _cost(*(float(at_least(one)) for one in left)) if min(left) >= 0 else ("none: above your limit", *"----")
    before, together, after = "Before this plan", "Together, if you sign", "Left afterwards"
    if plan in accepted:
        before, together, after = "All other plans", "Together", "Left now"
    return [
        (f"{before} ({others}; this one not counted)", *_cost(*state.reserved(without=plan))),
        ("This plan alone", *_cost(this.epsilon, this.delta)),
        (f"{together} (this plan counted)", *_cost(*state.reserved(*more))),
        ("Your limit", *_cost(*limits)),
        (after, *rest),
    ]


def _cost(epsilon: float, delta: float) -> tuple[str, ...]:
    """Return a cost in the words of the promise, in the order of `TOTALS`."""
    odds = Odds.of(epsilon, delta)
    return odds.factor, odds.exception, odds.guesses, at_most(epsilon), at_most(delta)


def _files() -> list[tuple[str, str, str]]:
    """Return where a node leaves which files, and when each may be deleted."""
    folder, node, account = "folder of the plan", "folder of the node", AccountFile(users_file())
    counted_there = "only when no plan is ever accepted on these records again: without it nobody knows what was spent"
    return [
        ("at the site", "the records", "at any time: the node keeps no copy, and without them it refuses to answer"),
        ("where you put them", "the plan as it was sent, this page", "at any time: the node keeps what it accepted"),
        (
            folder,
            "data_key, releases/, scores.json, report.html, private.json, error.log, contact.txt",
            "once the study has ended; do so then, because data_key lets its reader test guesses of records",
        ),
        (folder, "plan.json, reserved.json, ledger.jsonl, ledger.head", counted_there),
        (node, "node.json, node.key, site.json", counted_there),
        (node, "serving.lock, socket", "while the node is not running"),
        (
            "the account of the user who runs the node",
            f"{account.path}, {account.state_file}",
            f"{counted_there}. It has keyed digests of some records, by which it recognises them",
        ),
    ]


def _spent(state: StateFolder, plan: str) -> str:
    schedule = state.terms(plan).plan.schedule.clients[state.plans()[plan].client]
    paid, planned = state.released(plan), sum(schedule.releases)
    words = f"{paid} of {counted(planned, 'planned release')} were made"
    if not paid:
        return f"{words}."
    spent = max(read([state.plan_folder(plan) / "ledger.jsonl"]).paid, key=lambda total: total.epsilon)
    return f"{words}, which cost {spent.beside(None).cost()}."


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
