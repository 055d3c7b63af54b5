"""The server of a real federation: the plan that sites accept, the loop over their nodes, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import dpfl_lightning
from dpfl_lightning.build import FederatedLoop, build_loop, build_population
from dpfl_lightning.config.options import Options
from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.federated.client.identity import deciding_options, module_digest
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import Strategy, overrides
from dpfl_lightning.privacy.accounting.guarantee import leaks_of
from dpfl_lightning.privacy.clipping.inputs import record_shape
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Site, Terms, client_names
from dpfl_lightning.sites.server.clients import Channel, RemoteClients, Sites
from dpfl_lightning.sites.server.records import AbsentRecords, alike
from dpfl_lightning.sites.terms import check_version, read_terms


def remote_population(options: Options, sites: Sequence[Site]) -> AbsentRecords:
    """Return the clients of a run, whose records are at the sites, with the test set that `data.*` names.

    Raises UserError if the records of the sites or the test set are not alike, or two sites have one key.
    """
    first = sites[0]
    owners: dict[str, str] = {}
    for site in sites:
        if (owner := owners.get(site.public_key)) is not None:
            must, advice = "be of different nodes, each with a key of its own", "Run `dpfl node init` at each site."
            require(False, "--sites", must, f"one key of {owner} and {site.name}", f"{advice} Do not copy its folder.")
        owners[site.public_key] = site.name
        same = alike((site.inputs, site.labels), (first.inputs, first.labels))
        same = same and (site.num_classes, site.features) == (first.num_classes, first.features)
        must = f"be of sites with records like those of {first.name}, of shape {record_shape(first.inputs)}"
        require(same, "--sites", must, f"{site.name}: {record_shape(site.inputs)}, {site.num_classes} classes")
    shape, sizes = (first.inputs, first.labels), [site.num_records for site in sites]
    public = build_population(options)
    return AbsentRecords.of(sizes, client_names(sites), shape, first.num_classes, first.features, public)


def planning_loop(options: Options, sites: Sequence[Site]) -> FederatedLoop:
    """Return the loop of a configuration over these sites, to plan the run only."""
    return build_loop(options, population=remote_population(options, sites))


def export(loop: FederatedLoop, sites: Sequence[Site], file: str) -> Terms:
    """Write the plan of a loop for its sites, and return it. Raises UserError if the run cannot be deployed."""
    advice = "A plan holds the public keys of the nodes, which `dpfl node init` writes into site.json."
    require(bool(sites), "--sites", "be given with --export", None, advice)
    terms, path = terms_of(loop, sites), Path(file)
    require(path.parent.is_dir(), "--export", "be a file in a folder that exists", file)
    write_text(path, wire.to_text(terms))
    return terms


def remote_loop(
    options: Options,
    plan: str,
    connect: Callable[[int], Sequence[Channel]],
    more: Sequence[Strategy | Callback] = (),
) -> FederatedLoop:
    """Return the loop of a configuration over the sites that have accepted the file `plan`.

    `connect(count)` returns a channel to the node of each of the `count` clients. Raises UserError if the run cannot
    be deployed, or the configuration gives another plan.
    """
    terms = read_terms(Path(plan))
    return loop_over(options, Sites(terms, tuple(connect(len(terms.plan.settings)))), more)


def loop_over(options: Options, sites: Sites, more: Sequence[Strategy | Callback] = ()) -> FederatedLoop:
    """Return the loop of a configuration over `sites`."""
    terms = sites.terms
    check_version(terms)
    remote = functools.partial(RemoteClients, sites=sites)
    loop = build_loop(options, more, remote_population(options, terms.sites), remote)
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
    given = options.get("privacy") or {}
    advice = "The operator of a test node gives it: `dpfl node init --test_key`."
    require(given.get("noise_key") is None, "privacy.noise_key", "be null: each site draws its noise", "a key", advice)
    require(not privacy.diagnostics, "privacy.diagnostics", "be false: sites show no counts", True)
    require(privacy.sampling == "poisson", "privacy.sampling", "be poisson: sites sample so", privacy.sampling)
    for section, key, why in (
        ("data", "groups", "only a simulation knows true groups"),
        ("data", "label_noise", "sites do not falsify labels"),
        ("clients", "reported_epsilon", "sites report the budgets of the plan"),
    ):
        value = (options.get(section) or {}).get(key)
        require(value is None, f"{section}.{key}", f"be null: {why}", value)
    for strategy in loop.config.strategies:
        name = f"strategies: {type(strategy).__name__}"
        must = "keep its schedule during the run, as sites accept it beforehand"
        require(not overrides(strategy, "replan"), name, must, "a strategy with `replan`", "Choose another strategy.")
    for schedule in loop.schedule.clients:
        plain = [line for line in schedule.planned if not line.event.private and line.count]
        if plain:
            advice = "Choose its form with noise, or another strategy."
            require(False, "strategies", "plan noised releases only", leaks_of([plain[0].event])[0], advice)
