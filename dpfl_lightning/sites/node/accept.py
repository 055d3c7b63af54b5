"""A site of a real federation: whether its operator can accept a plan, and the client that then answers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from dpfl_lightning.build import build_engine, build_module
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.config.names import check_names
from dpfl_lightning.config.options import Options
from dpfl_lightning.data import Population
from dpfl_lightning.errors import require, shortened, warn_user
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.holders import DataHolders
from dpfl_lightning.federated.client.identity import module_digest
from dpfl_lightning.federated.client.local_clients import LocalClients
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.transport.threads import Threads
from dpfl_lightning.privacy.clipping.inputs import record_shape
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.ledger.verify import read
from dpfl_lightning.runtime.text import at_most
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Site, Terms, client_names, most_numbers
from dpfl_lightning.sites.node.records import only, site_population
from dpfl_lightning.sites.node.state import Reservation, Settings, StateFolder
from dpfl_lightning.sites.node.study import Study
from dpfl_lightning.sites.receipt import new_key, public_key
from dpfl_lightning.sites.terms import check_version, client_of, cost_of, difference, privacy_of


def site_of(settings: Settings, population: Population, client: int, key: bytes) -> Site:
    """Return the public facts about a site, its records, and the key with which its node signs."""
    inputs, labels = population.empty_batch
    size, classes, features = population.num_records[client], population.num_classes, population.features
    schema = population.form, population.schema
    return Site(settings.name, size, classes, inputs, labels, features, public_key(key), *schema, settings.unit)


class Offer(NamedTuple):
    """A plan that fits the records and the rules of a site, of which nothing was imported, built or opened.

    Args:
        client: the number of the site's client.
        population: the records of this client alone.
        options: the model, with the arguments that the site has fixed, and how releases are made.
        facts: what decides the shape of the model.
        reserves: what it would reserve; the size of its requests is known once the model is built.
    """

    terms: Terms
    client: int
    population: Population
    options: Options
    facts: Facts
    reserves: Reservation

    def outlook(self) -> str:
        """Return what the run would cost together with those in the account of this machine, in words."""
        held = HeldClients(self.population, (self.client,), len(self.terms.sites))
        return DataHolders(held, client_names(self.terms.sites), self.options.privacy).outlook(self.terms.plan)

    def clients(self) -> LocalClients:
        """Build the model of the plan, and return the clients that train it.

        Raises UserError if it is not the model of the plan. Call it for a plan that the operator accepts: a model is
        code, and its arguments may be names of files.
        """
        plan = self.terms.plan
        module = build_module(self.options, self.facts)
        names, count = client_names(self.terms.sites), len(self.terms.sites)
        seat = names, (self.client,), count
        clients = LocalClients(self.population, module, Threads(build_engine("fast")), self.options.privacy, *seat)
        counts = any(line.event.scores for line in plan.schedule.clients[self.client].planned)
        task, must = module.task, "count held-out records of a task with one class for each record"
        known = task is not None and task.one_class
        require(known or not counts, "PLAN", must, task and task.name, "Refuse the plan.")
        module.check_optimizer(plan.rounds, [one.steps for one in plan.settings])
        must, digest = "train the model that this installation builds from it", module_digest(module)
        advice = "Code or libraries differ: install the same versions on all sides."
        require(digest == self.terms.module, "PLAN", f"{must}, of digest {digest}", self.terms.module, advice)
        return clients


def offer_of(terms: Terms, state: StateFolder) -> Offer:
    """Return a plan as one that this site can accept.

    `site.json` is brought up to date with the records. Raises UserError if the plan does not fit the records, the key,
    the model that the site has fixed, or this installation.
    """
    check_version(terms)
    settings = state.settings()
    population, own = site_population(settings)
    site = site_of(settings, population, own, state.key())
    state.renew(site)
    client = client_of(terms, settings.name)
    fields, advice = wire.different_fields(site, terms.sites[client]), "Give its author the site.json of this node."
    other = fields and (difference(terms.sites[client], site) or f"other {fields}")
    require(not other, "PLAN", "have the public facts of this site", other, advice)
    stated = terms.plan.settings[client].num_records
    require(stated == site.num_records, "PLAN", f"state the {site.num_records} {site.unit}s of this site", stated)
    advice = "Refuse the plan: the limits of `dpfl node init` are on sums of this kind."
    decided = {"adjacency": settings.adjacency, **settings.unit.options()}
    for key, ours in decided.items():
        planned = privacy_of(terms)[key]
        require(planned == ours, "PLAN", f"have the privacy.{key} of this site, {ours}", planned, advice)
    options, cost = _options(terms, settings), cost_of(terms, client).guarantee
    sizes, names = tuple(one.num_records for one in terms.plan.settings), client_names(terms.sites)
    shape = record_shape(site.inputs)
    facts = Facts(sizes, site.num_classes, shape, names=names, features=site.features, empty_x=site.inputs)
    return Offer(
        terms,
        client,
        only(population, own, names[client : client + 1]).checked(),
        options,
        facts,
        Reservation(cost.epsilon, cost.delta, client, most_numbers=0),
    )


def open_study(state: StateFolder, plan: str, score_every: int = 0) -> Study:
    """Return the study of an accepted plan, ready to answer; call it under `locked`. For `score_every` see `Study`.

    Raises UserError, before anything is written, unless the plan is unchanged and its ledger whole.
    """
    terms = state.terms(plan)
    client = state.plans()[plan].client
    file = state.plan_folder(plan) / "plan.json"
    require(
        wire.digest(terms) == plan, str(file), f"have the hash {plan[:12]}", "another one", "Restore it from a copy."
    )
    state.released(plan)
    clients = offer_of(terms, state).clients()
    study = Study(state.plan_folder(plan), terms, client, clients, score_every)
    state.begin(plan)
    return study


def limits_of(
    settings: Settings, epsilon_limit: float | None = None, delta_limit: float | None = None, may_rise: bool = False
) -> tuple[float, float]:
    """Return the limits (epsilon, delta) on the sums over all plans that a node accepts; None is the one of before.

    Raises UserError if a limit is out of range, or above the one of before although it `may_rise` not.
    """
    given = {"epsilon": epsilon_limit, "delta": delta_limit}
    limits = {key: getattr(settings, f"{key}_limit") if one is None else one for key, one in given.items()}
    for key, limit in limits.items():
        before, flag = getattr(settings, f"{key}_limit"), f"--{key}_limit"
        fits, must = (0 < limit < math.inf, "above 0 and finite") if key == "epsilon" else (0 <= limit < 1, "in [0, 1)")
        require(fits, flag, f"be {must}", limit)
        advice = "To raise the limit, which the people in the records rely on, add --raise_limits."
        require(may_rise or limit <= before, flag, f"be at most {before}, the limit that was set", limit, advice)
    return limits["epsilon"], limits["delta"]


def accept(
    state: StateFolder,
    terms: Terms,
    epsilon_limit: float | None = None,
    delta_limit: float | None = None,
    may_rise: bool = False,
) -> str:
    """Check a plan against the records, this installation and the limits, store it, and return its hash.

    Its model is built after all other checks. Raises UserError if the plan does not fit, a sum would exceed its limit,
    or a limit is refused, see `limits_of`. Nothing is stored then.
    """
    offer = offer_of(terms, state)
    limits = limits_of(state.settings(), epsilon_limit, delta_limit, may_rise)
    state.check(terms, offer.reserves, *limits)
    flat = offer.clients().module.flat
    numbers = most_numbers(terms.plan.schedule.clients[offer.client], flat)
    with state.locked():
        return state.reserve(terms, dataclasses.replace(offer.reserves, most_numbers=numbers), *limits)


def _options(terms: Terms, settings: Settings) -> Options:
    """Return the options of a plan that a node uses: the model, and how releases are made."""
    model = terms.plan.options.get("model")
    require(isinstance(model, dict), "PLAN", "name a model", model)
    assert isinstance(model, dict)  # for mypy
    if (path := model.get("class_path")) is not None:
        _check_fixed(path, model.get("init_args") or {}, settings)
        model = {**model, "init_args": settings.model_args}
    values = {**{key: terms.plan.options.get(key) for key in ("seed", "task")}, "model": model}
    privacy = settings.with_key({**privacy_of(terms), "epsilon": 1.0})  # budgets are those of the plan
    count = {"count": len(terms.plan.settings)}
    return from_mapping({**values, "privacy": privacy, "clients": count})


def _check_fixed(path: object, arguments: object, settings: Settings) -> None:
    """Raise UserError unless these are the class and the arguments of the model that the site has fixed."""
    must, ours = "name a model of dpfl_lightning", settings.model
    advice = "To allow a class that you have read, give model.class_path and model.init_args to `dpfl node init`."
    require(path == ours, "PLAN", must if ours is None else f"{must}, or the class {ours} of this site", path, advice)
    require(isinstance(arguments, dict), "PLAN", "have a mapping model.init_args", arguments)
    assert isinstance(arguments, dict)  # for mypy
    left_out, fixed = object(), settings.model_args
    for name in {**fixed, **arguments}:
        one, other = fixed.get(name, left_out), arguments.get(name, left_out)
        texts = [json.dumps(value, sort_keys=True) for value in (one, other) if value is not left_out]  # 1 is not true
        same = len(texts) == 2 and texts[0] == texts[1]
        must = "without it" if one is left_out else f"of {shortened(repr(one))}"
        must = f"have model.init_args.{shortened(name)} as this site has fixed it by `dpfl node init`, {must}"
        advice = "Ask the plan's author for it, or allow the other by model_args in node.json of this node."
        require(same, "PLAN", must, "none" if other is left_out else other, advice)


def new_node(path: Path, settings: Settings) -> tuple[StateFolder, Site]:
    """Create the folder of a node after its records were read once."""
    check_names("--name", [settings.name])
    population, client = site_population(settings)
    if held_out := population.num_held_out[client] if settings.config["data"]["class_path"] else 0:
        advice = "held_out: 0 trains on all, and lets no server have models scored here"
        warn_user(f"{held_out} records are held out to score models at this site; {advice}")
    key = new_key()
    site = site_of(settings, population, client, key)
    return StateFolder.create(path, settings, site, key), site


def verified(state: StateFolder, plan: str) -> float:
    """Return the epsilon that a plan has spent, recomposed from its ledger.

    Raises UserError if the plan or the ledger was changed, or pays for anything that the plan does not have.
    """
    terms, reserved = state.terms(plan), state.plans()[plan]
    folder = state.plan_folder(plan)
    require(wire.digest(terms) == plan, str(folder / "plan.json"), f"have the hash {plan[:12]}", "another one")
    spent = 0.0
    if state.released(plan):
        spent = max(total.epsilon for total in read([folder / "ledger.jsonl"]).paid)
    schedule = terms.plan.schedule.clients[reserved.client]
    known = {line.purpose: line for line in schedule.planned}
    paid: Counter[str] = Counter()
    for charge in read_ledger(folder / "ledger.jsonl") if spent else ():
        line = known.get(charge.purpose)
        paid[charge.purpose] += 1
        fits = charge.client == reserved.client and line is not None and line.event == charge.event
        fits = fits and line is not None and paid[charge.purpose] <= line.count
        require(fits, str(folder / "ledger.jsonl"), "pay for planned releases of this site only", charge)
    within = spent <= max(reserved.epsilon, cost_of(terms, reserved.client).guarantee.epsilon)
    require(within, "STATE_DIR", f"have spent at most {at_most(reserved.epsilon)}", spent)
    return spent
