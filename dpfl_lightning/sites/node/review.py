"""What the operator of a site asks before and after a decision: whether a plan fits, and who is held out."""

from __future__ import annotations

import dataclasses

from dpfl_lightning.data import Population
from dpfl_lightning.data.ids import ids_of
from dpfl_lightning.data.unit_ids import codes
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.accounting.units import ID_KEY
from dpfl_lightning.reporting.odds import without_exponents
from dpfl_lightning.reporting.site_page import SitePlan
from dpfl_lightning.runtime.text import counted
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Terms
from dpfl_lightning.sites.node.accept import offer_of
from dpfl_lightning.sites.node.consent import Counts, site_plan
from dpfl_lightning.sites.node.state import StateFolder


def reviewed(state: StateFolder, terms: Terms, limits: tuple[float, float], contact: str = "") -> SitePlan:
    """Return what a plan means for a site, and whether it fits the site and the limits (epsilon, delta).

    Raises UserError as `site_plan`.
    """
    counts, outlook = None, ""
    try:
        offer = offer_of(terms, state)
        counts = Counts.of(offer.population)
        if wire.digest(terms) in state.plans():
            verdict = "This site has accepted the plan, and it fits the records."
        else:
            state.check(terms, offer.reserves, *limits)
            verdict = "It fits. Once it is accepted, the node builds its model, and refuses another one than planned."
            outlook = offer.outlook()
    except UserError as error:
        verdict = f"It does not fit: {error}"
    plan = site_plan(state, terms, limits, counts, contact)
    return dataclasses.replace(plan, verdict=verdict, account=without_exponents(outlook))


def place_of(population: Population, client: int, id: str) -> str:
    """Return in words whether the rows of one id at a client train or are held out.

    Raises UserError if the data have no ids.

    **Privacy** The answer is about one id: it is for the operator of the site alone.
    """
    group, advice = population.unit.group, f"Name the column of their ids: data.init_args.{ID_KEY} of `dpfl node init`."
    require(population.unit_ids is not None, f"--{ID_KEY}", f"be given for data that name {group}s", id, advice)
    assert population.unit_ids is not None  # for mypy
    (code,) = codes(ids_of([id], 1, f"--{ID_KEY}"))
    train, held_out = (
        int((population.unit_ids[rows] == code).sum())
        for rows in (population.train_of[client], population.held_out_of[client])
    )
    name = f"{group.capitalize()} {id}"
    if held_out:
        return f"{name}: held out, {counted(held_out, 'row')}. No training uses them."
    if train:
        return f"{name}: used for training, {counted(train, 'row')}."
    return f"{name}: no row at this site."
