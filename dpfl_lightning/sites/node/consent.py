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
from typing import Any, NamedTuple

from torch import Tensor

import dpfl_lightning
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, require, shortened
from dpfl_lightning.privacy.accounting.accountant import exact_sum
from dpfl_lightning.privacy.accounting.client_plan import ClientPlan
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.guarantee import (
    EXACT_SCORES,
    NOT_COVERED,
    OTHER_RUNS,
    SCORED_RECORDS,
    Guarantee,
    public_facts,
    released_words,
)
from dpfl_lightning.privacy.accounting.planned import Planned
from dpfl_lightning.privacy.accounting.units import ID_KEY, Unit, unit_of
from dpfl_lightning.privacy.clipping.inputs import record_shape
from dpfl_lightning.privacy.ledger.account_file import AccountFile, users_file
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.ledger.verify import read
from dpfl_lightning.reporting.odds import Odds, without_exponents
from dpfl_lightning.reporting.site_page import SitePlan, SiteScores, scores_page, site_page
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.runtime.spoken import in_both_forms
from dpfl_lightning.runtime.text import at_least, at_most, counted, flattened
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Site, Terms
from dpfl_lightning.sites.node.scores import FILE, PAGE, REPORT, KeptScores
from dpfl_lightning.sites.node.state import Reservation, Settings, StateFolder, kept_releases
from dpfl_lightning.sites.terms import client_of, cost_of, model_words, privacy_of, read_terms, server_words

_MOST_SITES = 50  # in the table
_MOST_CHANGES = 30  # in the table
_SHOWN = 200  # characters of a text of the server in a table
_NO_CONTACT = (
    "No contact for questions about this study was named.",
    " Before you sign, ask the operator for one, or write it into section 8.",
)
#: options of a plan that other rows of the comparison state
_STATED = "rounds", "privacy.epsilon", "privacy.delta"


class Counts(NamedTuple):
    """How many rows of a site train, are held out, and are there, and of how many ids if these are known."""

    training: str
    held_out: str
    together: str

    @classmethod
    def of(cls, population: Population) -> Counts:
        """Return those of the only client of a population."""
        (train,), (held_out,) = population.train_of, population.held_out_of

        def words(*parts: Tensor) -> str:
            rows = counted(sum(map(len, parts)), "row")
            if population.unit_ids is None:
                return rows
            ids = {code for part in parts for code in population.unit_ids[part].tolist()}
            return f"{rows} of {counted(len(ids), population.unit.group)}"

        return cls(words(train), words(held_out) if len(held_out) else "", words(train, held_out))


def write_report(folder: Path, population: Population) -> None:
    """Write the page of the accepted plan in `folder`, with what was sent; `population` has the site's records only."""
    state, terms = StateFolder(folder.parents[1]), read_terms(folder / "plan.json")
    settings = state.settings()
    counts = Counts.of(population)
    page = site_page(site_plan(state, terms, (settings.epsilon_limit, settings.delta_limit), counts))
    write_text(folder / REPORT, page, private=True)


def write_scores(folder: Path, scores: KeptScores, promise: Guarantee) -> None:
    """Write scores and a page of them into the folder of a plan, for the operator of the site alone."""
    write_text(folder / FILE, wire.to_text(scores), private=True)
    name, shown = StateFolder(folder.parents[1]).settings().name, SiteScores(**vars(scores), released=promise)
    write_text(folder / PAGE, scores_page(name, folder.name, shown), private=True)


def site_plan(
    state: StateFolder, terms: Terms, limits: tuple[float, float], counts: Counts | None, contact: str = ""
) -> SitePlan:
    """Return what a plan means for a site, but not whether it fits.

    `counts` are None if the rows do not fit the plan. `contact` is whom to ask; if it is empty, the one that was named
    before. Raises UserError if the plan does not have this site, or plans anything without noise.
    """
    settings, plans, hashed = state.settings(), state.plans(), wire.digest(terms)
    client = client_of(terms, settings.name)
    planned, plan = cost_of(terms, client), terms.plan
    cost, unit = planned.guarantee, unit_of(privacy_of(terms))
    reserved = plans.get(hashed)
    strategies = ", ".join(name.partition(" ")[2] for name in plan.strategies)
    others = [_row(terms, other) for other in range(len(terms.sites)) if other != client]
    stated = len(others) > _MOST_SITES
    asked = contact or state.contact(hashed)
    since, changes = _changes(state, terms, client, asked)
    return SitePlan(
        site=settings.name,
        node=shlex.quote(str(state.path)),
        folder=shlex.quote(str(state.plan_folder(hashed))),
        name=f"Plan {in_both_forms(hashed)}.",
        digest=hashed,
        date=date.today().isoformat(),
        stage=_stage(reserved),
        warning=f"This node has a {warning}. It is not for a study." if (warning := settings.source.warning) else "",
        contact=f"Contact for questions about this study: {asked}." if asked else "",
        no_contact="" if asked else _NO_CONTACT[0] + _NO_CONTACT[1] * (reserved is None),
        guarantee=cost,
        data=(
            ("Training", counts.training if counts else counted(planned.num_records, unit.name)),
            *_held_out(state, planned, counts),
            ("Columns", _columns(state.site())),
            ("Label", _label(state.site())),
            ("Model", _model(plan.options.get("model"), settings)),
        ),
        options=[line.strip() for line in model_words(plan)[1:]],
        server_words=[*map(server_words, [f"This run uses {strategies}.", *plan.caveats])],
        others=others[:_MOST_SITES],
        more_others=f"{len(others) - _MOST_SITES:,} more are in the plan. " if stated else "",
        everywhere=_everywhere(terms, alone=not plans.keys() - {hashed}) if others else "",
        uncovered=_uncovered(planned, unit, counts, tables=bool(state.site().schema.get("columns"))),
        totals=_totals(state, hashed, Reservation(cost.epsilon, cost.delta, client, 0), limits, terms),
        since=since,
        changes=changes,
        files=_files(bool(state.site().schema.get(ID_KEY)), _personal(plan.options.get("model"))),
        num_sites=len(terms.sites),
        holds_out=counts is None or bool(counts.held_out),
        num_records=planned.num_records,
        run=f"{terms.run}, of {counted(len(terms.sites), 'site')}, at most {counted(plan.rounds, 'round')}; "
        f"{unit.clipped} is clipped to {plan.settings[client].clip_norm:g}",
        version=dpfl_lightning.__version__,
        accepted="" if reserved is None else reserved.accepted,
        spent="" if reserved is None else _spent(state, hashed),
    )


def _stage(reserved: Reservation | None) -> str:
    """Return in words how far the consent of the site has come."""
    if reserved is None:
        return "This site has not accepted this plan: nothing of it happens before it does."
    ended = f" and withdrew from it on {reserved.ended}" * reserved.withdrawn
    return f"This site accepted this plan on {reserved.accepted}{ended}."


def _columns(site: Site) -> str:
    columns, ids = (site.schema.get(name) for name in ("columns", ID_KEY))
    if not columns:
        return f"none by name: records are numbers of shape {record_shape(site.inputs)}"
    named = f" and {ids}, which names {site.unit.group}s" if isinstance(ids, str) else ""
    return f"{', '.join(map(str, columns))}; beside them only the label{named}"


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
    site, settings = terms.sites[client], terms.plan.settings[client]
    return site.name, f"{settings.num_records:,} {unit_of(privacy_of(terms))}s", _in_words(*_budget(terms, client))


def _in_words(epsilon: float, delta: float) -> str:
    bound = at_most(epsilon) if math.isfinite(epsilon) else "without a bound"
    return without_exponents(f"epsilon {bound}, delta {at_most(delta)}")


def _budget(terms: Terms, client: int) -> tuple[float, float]:
    settings = terms.plan.settings[client]
    return min(terms.plan.schedule.clients[client].target_epsilon, settings.epsilon), settings.delta


def _everywhere(terms: Terms, alone: bool) -> str:
    """Return in words what is promised to one unit at all sites of a plan; `alone` if the node has no other plan."""
    budgets = [_budget(terms, client) for client in range(len(terms.sites))]
    epsilon, delta = (exact_sum([budget[place] for budget in budgets]) for place in (0, 1))
    whose, plans = unit_of(privacy_of(terms)).at_each_place, ", in all plans of this node," * alone
    who = f"For {whose} at each of the {len(budgets)} sites{plans}"
    if not math.isfinite(epsilon):
        return f"{who} there is no bound."
    odds, cost = Odds.of(epsilon, delta), _in_words(epsilon, delta)
    chance = f"{odds.times} as likely, except with probability {odds.exception}"
    return f"{who} the budgets add up to {cost}: {chance}, and right guesses in at most {odds.guesses}."


def _held_out(state: StateFolder, planned: ClientPlan, number: Counts | None) -> list[tuple[str, str]]:
    """Return what held-out records are used for, what of them leaves, and how to ask about one id."""
    title = "Held out"
    if number is None:
        return [(title, "not counted, because the plan does not fit")]
    if not number.held_out:
        return [(title, "no row")]
    lines = [line for line in planned.schedule.planned if line.event.scores]
    counts = released_words([line.event for line in lines], [line.count for line in lines])
    leaves = (
        f"What leaves of them is planned and has random noise: {'; '.join(counts)}. The promise covers it."
        if counts
        else "In this plan nothing of them leaves this site: no score, no count, not even their number."
    )
    use = "No training uses them. They score models that the server sends, in general the final one."
    settings = state.settings()
    named = bool(state.site().schema.get(ID_KEY))
    own, made = settings.config["data"]["class_path"], "dpfl_lightning.Population."
    group = settings.unit.group
    by = f"{group}'s id" if named else "record (equal records stay together)"
    if own is None:
        rule = "Rows are drawn by the seed, a number in the configuration of this site."
    else:
        unless = "" if own.startswith(made) else f"Unless the class {own} of this site divides its data itself, it is "
        rule = (
            f"{unless or 'It is '}computed from the {by} and the seed, a number in this site's configuration, in each "
            "run in the same way; who knows both can compute it, too."
        )
    ask = (
        f"dpfl node status {shlex.quote(str(state.path))} --{ID_KEY} tells it to the operator, and reads the id from "
        "the keyboard, so that no history of commands keeps it."
        if named
        else f"The data name no {group}s, so no command tells it of one {group}; in Python, held_out_of of the "
        "Population has the numbers of the rows."
    )
    return [
        (title, f"{number.held_out}. {use} The exact scores stay here. {leaves}"),
        ("Together", number.together),
        ("Who is held out", f"{rule} {ask}"),
    ]


def _uncovered(planned: ClientPlan, unit: Unit, counts: Counts | None, tables: bool) -> list[tuple[str, str]]:
    """Return what the promise does not cover, and of each whether it leaves this site and what protects there."""
    cost, number = planned.guarantee, counted(planned.num_records, unit.name)
    none = counts is not None and not counts.held_out
    known = {
        SCORED_RECORDS: (
            "held-out records",
            "there are none" if none else "no: in this plan nothing of them is sent",
        ),
        EXACT_SCORES: ("exact scores on held-out records", "no: only noisy counts, which the promise covers"),
        public_facts(unit): (
            f"the number of {unit}s in training, and all options",
            f"yes: {number}, exactly: who knows all other {unit}s can count, and so knows whether this one is "
            "in the data; options hold no data",
        ),
        NOT_COVERED[2]: (
            "how records were prepared before",
            "no: the study states scales, categories and values for gaps"
            if tables
            else "no, if nothing in site.json was computed from records",
        ),
        NOT_COVERED[3]: (
            "times, memory, sizes and errors",
            "only when a reply comes, in fixed steps (--slot); errors are one of a few words",
        ),
        OTHER_RUNS: ("other studies on the same records", "section 5 adds up those of this node"),
        **dict.fromkeys(unit.not_covered, (f"what other sites send of the same {unit}", "section 4 adds it up")),
    }
    return [known.get(gap, (gap, "-")) for gap in cost.not_covered if gap not in cost.caveats]


def _totals(
    state: StateFolder, plan: str, planned: Reservation, limits: tuple[float, float], terms: Terms
) -> list[tuple[str, ...]]:
    """Return what the plans of a node cost together, without and with this one, and what the limits leave."""
    accepted = state.plans()
    this, more = (accepted[plan], ()) if plan in accepted else (planned, (planned,))
    others = counted(len(accepted.keys() - {plan}), "plan")
    left = state.left(limits, *more)
    rest: tuple[str, ...] = ("none: above your limit", "", "", "", "")
    if min(left) >= 0:
        rest = (*Odds.left(*left), *(without_exponents(at_least(one)) for one in left))
    before, together, after = "Before this plan", "Together, if you sign", "Left afterwards"
    if plan in accepted:
        before, together, after = "All other plans", "Together", "Left now"
    return [
        (f"{before} ({others}; this one not counted)", *_cost(*state.reserved(without=plan))),
        ("This plan alone", *_cost(this.epsilon, this.delta)),
        (f"{together} (this plan counted)", *_cost(*state.reserved(*more))),
        ("Your limit", *_cost(*limits)),
        (after, *rest),
        *_everywhere_ever(state, plan, terms),
    ]


def _everywhere_ever(state: StateFolder, this: str, terms: Terms) -> list[tuple[str, ...]]:
    """Return what all sites of all accepted plans and of this one may spend on one who is at each.

    None if there is no other plan, see `_everywhere`, or no other site.
    """
    at_each = unit_of(privacy_of(terms)).at_each_place
    who = f"{at_each[0].upper()}{at_each[1:]} at every site of every plan here (budgets added up)"
    accepted, budgets, alone = state.plans(), list[tuple[float, float]](), True
    if not accepted.keys() - {this}:
        return []
    try:
        for plan in {**accepted, this: None}:
            one = terms if plan == this else state.terms(plan)
            require(wire.digest(one) == plan, "PLAN", "have its hash", "another one")
            unused = plan in accepted and accepted[plan].withdrawn and not accepted[plan].epsilon
            own = client_of(one, state.settings().name) if unused else None
            budgets += [_budget(one, client) for client in range(len(one.sites)) if client != own]
            alone = alone and len(one.sites) == 1
    except UserError:  # a file of an accepted plan is gone or damaged
        return [(who, "not known: a plan.json is missing or changed", "", "", "", "")]
    epsilon, delta = (exact_sum([budget[place] for budget in budgets]) for place in (0, 1))
    if not math.isfinite(epsilon):
        return [(who, "no bound", "", "", "", "")]
    return [] if alone else [(who, *_cost(epsilon, delta))]


def _cost(epsilon: float, delta: float) -> tuple[str, ...]:
    """Return a cost in the words of the promise, in the order of `TOTALS`."""
    odds = Odds.of(epsilon, delta)
    return odds.factor, odds.exception, odds.guesses, at_most(epsilon), without_exponents(at_most(delta))


def _personal(model: Any) -> str:
    """Return in words what kept releases have of a personalised model, if the plan may have one."""
    given: Mapping[str, Any] = model if isinstance(model, Mapping) else {}
    if given.get("class_path") is not None:
        return ", and, if the class of the model has personal parameters, these without noise"
    return ", and the personal parameters of the model without noise" * bool(given.get("personal_input"))


def _files(has_ids: bool, personal: str) -> list[tuple[str, str, str, str]]:
    """Return where a node leaves which files, what of one unit they have, and whether to keep or delete each."""
    folder, node, account = "folder of the plan", "folder of the node", AccountFile(users_file())
    ended, ids = "delete once the study has ended", " and of up to 256 ids" * has_ids
    keep = "keep as long as ledger.jsonl"
    return [
        ("at the site", "the records", "all", "delete at any time: there is no copy, and without them no reply"),
        (
            folder,
            "report.html, contact.txt",
            "nothing: figures of all",
            "keep: a later edition of this page",
        ),
        (
            folder,
            "scores.json, scores.html, private.json, error.log",
            "exact figures, also of those who have left; error.log may have values of records",
            ended,
        ),
        (
            folder,
            "data_key, releases/",
            "who has the key and all other training records can test a guess of one on ledger.jsonl; last replies"
            f"{personal}",
            ended,
        ),
        (
            folder,
            "plan.json, reserved.json, ledger.jsonl, ledger.head",
            "one fingerprint of all training records, which tells nothing without data_key",
            "keep while plans may be accepted on these records: it shows what was spent",
        ),
        (
            node,
            "node.json, node.key, site.json",
            "nothing; node.json is this site's configuration, with the seed",
            keep,
        ),
        (node, "serving.lock, socket", "nothing", "delete while the node is not running"),
        (
            "the account of the user who runs the node",
            f"{account.path}, {account.state_file}",
            f"fingerprints (keyed digests) of up to 256 rows, whole and without each column{ids}, also of those who "
            "have left. The key is beside them: who has the file can test guesses",
            f"{keep}; no single line can be deleted",
        ),
    ]


def _spent(state: StateFolder, plan: str) -> str:
    folder, schedule = state.plan_folder(plan), state.terms(plan).plan.schedule.clients[state.plans()[plan].client]
    paid, planned = state.released(plan), sum(schedule.releases)
    words = f"{paid} of {counted(planned, 'planned release')} were made"
    if state.plans()[plan].withdrawn:
        ended = "As the site has withdrawn, files that section 7 keeps until the study has ended may be deleted now."
    elif paid >= planned:
        ended = (
            "All are made: once the server has ended the run, files that section 7 keeps until the study has ended may "
            "be deleted."
        )
    else:
        ended = (
            "Not all are made: keep the files of section 7, unless the operator of the server says that the study has "
            "ended."
        )
    ended += " Nothing is deleted by itself."
    if not paid:
        return f"{words}. {ended}"
    if files := kept_releases(folder):
        words += f", the last on {date.fromtimestamp(files[-1].stat().st_mtime).isoformat()}"
    spent = max(read([folder / "ledger.jsonl"]).paid, key=lambda total: total.epsilon)
    sent = "; ".join(released_words([charge.event for charge in read_ledger(folder / "ledger.jsonl")]))
    return f"{words}: {sent}. They cost {_in_words(spent.epsilon, spent.delta)}. {ended}"


def _changes(state: StateFolder, terms: Terms, client: int, contact: str) -> tuple[str, list[tuple[str, str, str]]]:
    """Return in words with which plan this one is compared, and what differs: (what, in that plan, in this one)."""
    this = wire.digest(terms)
    files = [file for file in state.path.glob("plans/*/plan.json") if file.parent.name != this]
    accepted = [file for file in files if file.parent.name in state.plans()]
    own = state.plan_folder(this) / "plan.json"
    before = [file for file in accepted if not own.exists() or file.stat().st_mtime < own.stat().st_mtime]
    if not before:
        return "This is the first plan at this node.", []
    last = max(before, key=lambda file: file.stat().st_mtime)
    old = read_terms(last)
    before_site = client_of(old, state.settings().name)
    site = terms.sites[client] if this in state.plans() else state.site()
    one = _compared(old, before_site, old.sites[before_site], state.contact(last.parent.name))
    other = _compared(terms, client, site, contact)
    both = [*dict.fromkeys([*one, *other])]
    changes = [(what, one.get(what, "-"), other.get(what, "-")) for what in both if one.get(what) != other.get(what)]
    compared = f"Compared with the plan {last.parent.name[:12]}, which this node accepted last"
    if wire.digest(dataclasses.replace(terms, run=old.run)) == wire.digest(old):
        return f"{compared}, only the name of the run{' and the contact' * bool(changes)} differs.", changes
    costs = [cost_of(plan, client_of(plan, state.settings().name)).guarantee.epsilon for plan in (old, terms)]
    compared += f", this one costs {_times(*costs)}."
    more = f" {counted(len(changes) - _MOST_CHANGES, 'further point')} differ, too." * (len(changes) > _MOST_CHANGES)
    if not changes:
        compared += " No option differs, but facts about sites or the code of a strategy do."
    same = [what for what in both if one.get(what) == other.get(what) and not what.startswith("option ")]
    if not any(what.startswith("option model.") or what == "option model" for what, *_ in changes):
        same.append("options of the model")
    rule = "Who is held out follows from section 2, which no plan changes; how many were then is not recorded."
    return f"{compared}{more} The same are: {', '.join(same)}. {rule}", changes[:_MOST_CHANGES]


def _times(before: float, now: float) -> str:
    """Return in words how a cost compares with one of before.

    >>> _times(0.5, 1.0), _times(2.0, 2.0), _times(2.0, 1.0), _times(1.0, 1.5)
    ('twice as much', 'as much', 'half as much', '1.5 times as much')
    """
    ratio = f"{now / before:.2g}" if before else "inf"
    return {"1": "as much", "2": "twice as much", "0.5": "half as much"}.get(ratio, f"{ratio} times as much")


def _compared(terms: Terms, client: int, site: Site, contact: str) -> dict[str, str]:
    """Return what of a plan is compared with another one, as texts; options, which the server wrote, as literals."""
    plan, schedule, unit = terms.plan, terms.plan.schedule.clients[client], unit_of(privacy_of(terms))
    others = [_row(terms, other) for other in range(len(terms.sites)) if other != client]
    options = {
        f"option {name}": shortened(repr(value), _SHOWN)
        for name, value in flattened(plan.options).items()
        if not any(name == stated or name.startswith(f"{stated}.") for stated in _STATED)
    }
    return {
        "budget": _row(terms, client)[2],
        f"number of {unit}s in training": _row(terms, client)[1],
        "columns": _columns(site),
        "label": _label(site),
        "contact": contact or "none",
        "rounds": str(plan.rounds),
        "releases": "; ".join(_line_words(line, unit) for line in schedule.planned),
        f"limit of the part of one {unit}": f"{plan.settings[client].clip_norm:g}",
        "layers and code of the model (a fingerprint)": terms.module[:12],
        "strategies of the server": shortened(repr([name.partition(" ")[2] for name in plan.strategies]), _SHOWN),
        "other sites": "; ".join(f"{name}: {number}, {budget}" for name, number, budget in others),
        **options,
    }


def _line_words(line: Planned, unit: Unit) -> str:
    """Return releases of one kind in words."""
    event, times = line.event, f"{counted(line.count, 'release')} for {shortened(repr(line.purpose), _SHOWN)}"
    if not isinstance(event, NoisedEvent):
        return f"{times}: {', '.join(event.cells())}"
    drawn = f"each with about {event.sample_rate:.3g} of the {unit}s" if event.is_sampled else f"each with all {unit}s"
    noise = f"noise of {event.noise_multiplier:.3g} times the limit of one {unit}"
    return f"{times} of {counted(event.steps, 'step')}, {drawn}, {noise}"
