"""The server of a real federation: the plan that sites accept, the loop over their nodes, and what it refuses."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dpfl_lightning
from dpfl_lightning.build import build_test_set
from dpfl_lightning.config.options import Options, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.data.arrival import arrival_of
from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.federated.client.answers import is_answerable
from dpfl_lightning.federated.client.identity import deciding_options, module_digest
from dpfl_lightning.federated.client.local_clients import facts_of
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.messages.query import Query
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import Strategy, overrides
from dpfl_lightning.loop import FederatedLoop, build_loop
from dpfl_lightning.privacy.accounting.guarantee import leaks_of
from dpfl_lightning.privacy.accounting.noise_source import source_of
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Site, Terms, client_names
from dpfl_lightning.sites.server.channel import Sites
from dpfl_lightning.sites.server.clients import RemoteClients
from dpfl_lightning.sites.terms import check_version, difference, several_records


@dataclass(frozen=True)
class AtSites:
    """Clients whose records are at `sites`, one for each; `nodes` are None while the run is only planned."""

    sites: Sequence[Site]
    nodes: Sites | None = None

    def facts(self, test: Population) -> Facts:
        sizes, names = tuple(site.num_records for site in self.sites), client_names(self.sites)
        known = facts_of(test, at_sites=True)
        return dataclasses.replace(known, num_records=sizes, names=names, unit=self.sites[0].unit)

    def clients(self, test: Population, module: ClientModule, privacy: PrivacyOptions | None) -> RemoteClients:
        return RemoteClients(test, module, privacy, self.sites, self.nodes)


def server_population(options: Options, sites: Sequence[Site]) -> Population:
    """Return the test set that `data.*` names, in the form of the sites' records; it may be empty, and has no clients.

    Raises UserError if the records of the sites or the test set differ in form, two sites have one key, or the run
    protects another unit than the sites.
    """
    first, owners = sites[0], dict[str, str]()
    for key, theirs in first.unit.options().items() if options.privacy else ():
        ours = getattr(options.privacy, key)
        advice = "Sites state it by `dpfl node init`."
        require(ours == theirs, f"privacy.{key}", f"be that of site {first.name}, {theirs}", ours, advice)
    for site in sites:
        if (owner := owners.get(site.public_key)) is not None:
            must, advice = "be of different nodes, each with a key of its own", "Run `dpfl node init` at each site."
            require(False, "--sites", must, f"one key of {owner} and {site.name}", f"{advice} Do not copy its folder.")
        owners[site.public_key] = site.name
        other = difference(site, first)
        require(not other, "--sites", f"be of sites with records like those of {first.name}", f"{site.name}: {other}")
    x, y, test = first.inputs, first.labels, None
    public = build_test_set(options)
    if public is not None and (records := public.test_records()) is not None:
        x, y = records
        schema = public.schema or first.schema
        these = dataclasses.replace(first, inputs=x, labels=y, num_classes=public.num_classes, form=public.form)
        these = dataclasses.replace(these, features=public.features or first.features, schema=schema)
        other = difference(these, first)
        require(not other, "test set", "have records like those of the sites", other)
        test = torch.arange(len(y))
    known: dict[str, Any] = {"features": first.features, "form": first.form, "schema": first.schema}
    return Population(x, y, [], [], test, first.num_classes, **known, caveats=several_records(first))


def with_columns(options: Options, sites: Sequence[Site]) -> Options:
    """Return options whose test table has the columns of the sites in their order, unless others are named."""
    columns = sites[0].schema.get("columns")
    return options if columns is None else dataclasses.replace(options, data=arrival_of(options.data).ordered(columns))


def planning_loop(options: Options, sites: Sequence[Site]) -> FederatedLoop:
    """Return the loop of a configuration over these sites, to plan the run only."""
    options = with_columns(options, sites)
    return build_loop(options, population=server_population(options, sites), remote=AtSites(sites))


def export(loop: FederatedLoop, sites: Sequence[Site], file: str) -> Terms:
    """Write the plan of a loop for its sites, and return it. Raises UserError if the run cannot be deployed."""
    advice = "A plan holds the public keys of the nodes, which `dpfl node init` writes into site.json."
    require(bool(sites), "--sites", "be given with --export", None, advice)
    terms, path = terms_of(loop, sites), Path(file)
    require(path.parent.is_dir(), "--export", "be a file in a folder that exists", file)
    write_text(path, wire.to_text(terms))
    return terms


def loop_over(options: Options, sites: Sites, more: Sequence[Strategy | Callback] = ()) -> FederatedLoop:
    """Return the loop of a configuration over `sites`.

    Raises UserError if the run cannot be deployed, or the configuration gives another plan.
    """
    terms = sites.terms
    check_version(terms)
    options = with_columns(options, terms.sites)
    loop = build_loop(options, more, server_population(options, terms.sites), AtSites(terms.sites, sites))
    loop.plan_schedule()
    check_deployable(loop)
    if personal := ", ".join(loop.module.personal):
        warn_user(f"personal parameters ({personal}) stay at the nodes: test scores are those of their initial values")
    return loop


def terms_of(loop: FederatedLoop, sites: Sequence[Site]) -> Terms:
    """Return the plan of a loop as its sites accept it. Raises UserError if the run cannot be deployed."""
    loop.plan_schedule()
    check_deployable(loop)
    plan = loop.run_plan()
    return Terms(
        version=dpfl_lightning.__version__,
        run=secrets.token_hex(16),
        sites=tuple(sites),
        module=module_digest(loop.module),
        plan=dataclasses.replace(plan, options=deciding_options(plan.options)),
    )


def check_deployable(loop: FederatedLoop) -> None:
    """Raise UserError, which names the option or strategy, unless sites can accept the run; call `plan_schedule` first.

    A site accepts a plan that is complete before the run and in which every release is noised.
    """
    options, privacy = loop.config.options, loop.config.privacy
    require(bool(options), "--config", "be the configuration of the run", None, "Nodes build the model from it.")
    require(privacy is not None, "privacy", "be given: sites release nothing without noise", None)
    assert privacy is not None  # for mypy
    source = source_of(options.get("privacy") or {})
    advice = f"The operator of a test node gives it: {source.option} of `dpfl node init`."
    require(source.protects, source.option, f"{source.must}: each site draws its noise", "a key", advice)
    require(not privacy.diagnostics, "privacy.diagnostics", "be false: sites show no counts", True)
    require(privacy.sampling == "poisson", "privacy.sampling", "be poisson: sites sample so", privacy.sampling)
    for section, key, why in (
        ("data", "groups", "only a simulation knows true groups"),
        ("data", "label_noise", "sites do not falsify labels"),
        ("clients", "reported_epsilon", "sites report the budgets of the plan"),
    ):
        value = (options.get(section) or {}).get(key)
        require(value is None, f"{section}.{key}", f"be null: {why}", value)
    for metric in (options.get("evaluation") or {}).get("metrics", ()):
        known = loop.population.test is not None or (isinstance(metric, str) and "." not in metric)
        scored = "name metrics of dpfl_lightning without a test set: no node imports the class of another metric"
        require(known, "evaluation.metrics", scored, metric, "Name a test set, such as data.init_args.test.")
    for strategy in loop.config.strategies:
        name = f"strategies.{strategy.config_name}"
        must = "keep its schedule during the run, as sites accept it beforehand"
        require(not overrides(strategy, "replan"), name, must, "a strategy with `replan`", "Choose another strategy.")
        for kind in vars(sys.modules[type(strategy).__module__]).values():
            own = isinstance(kind, type) and issubclass(kind, Query) and kind is not Query
            readable = not own or wire.MESSAGES.get(kind.__name__) is kind
            advice = "Call `dpfl_lightning.sites.wire.register` in the module of the model that the sites allow."
            require(readable, name, "ask questions that nodes can read", getattr(kind, "__name__", None), advice)
            advice = "Register its function by `dpfl_lightning.federated.client.answers.rows_of` in the same module."
            answerable = not own or is_answerable(kind)
            require(answerable, name, "ask questions that nodes can answer", getattr(kind, "__name__", None), advice)
    for schedule in loop.schedule.clients:
        plain = [line for line in schedule.planned if not line.event.private and line.count]
        if plain:
            advice = "Choose its form with noise, or another strategy."
            require(False, "strategies", "plan noisy releases only", leaks_of([plain[0].event])[0], advice)
