"""The files that cross between a server and its sites: the plan of a run, and the public facts about a site."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch.utils._pytree import tree_flatten

import dpfl_lightning
from dpfl_lightning.config.names import check_columns, check_names
from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.config.reading import read_bytes
from dpfl_lightning.config.yaml_text import inline
from dpfl_lightning.errors import UserError, require, shortened
from dpfl_lightning.federated.messages.clients import RunPlan
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.client_plan import ClientPlan, client_plans
from dpfl_lightning.privacy.accounting.units import ID_KEY, RECORD, unit_of
from dpfl_lightning.privacy.clipping.inputs import record_shape
from dpfl_lightning.privacy.sampling import SAMPLERS
from dpfl_lightning.runtime.text import at_most, counted
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Site, Terms
from dpfl_lightning.sites.receipt import is_public_key

T = TypeVar("T")

_MOST_TEXT = 1 << 28  # bytes of a plan's file
_MOST_WORDS = 1000  # characters of a caveat
_MOST_PARTS = 50  # options of a model that are shown
_MOST_SCHEMA = 1 << 16  # characters
#: options of the section privacy that say how releases are made, and what they protect
_OF_RELEASES = ("mechanism", "accountant", "adjacency", "sampling", "reserve_rounds", *RECORD.options())


def check_version(terms: Terms) -> None:
    here, must = dpfl_lightning.__version__, "be of the version of dpfl_lightning that is installed here"
    require(terms.version == here, "PLAN", f"{must}, {here}", terms.version, "Install the same version on all sides.")


def read_terms(path: Path) -> Terms:
    """Return the plan of a run from its file.

    Raises UserError if it is none, of another version, or has text that could be taken for words of this program.
    """
    terms = read_message(Terms, path, "PLAN", "be a file that `dpfl plan --export` wrote")
    plan = terms.plan
    agree = len(plan.schedule.clients) == len(terms.sites) and plan.schedule.rounds == plan.rounds
    agree = agree and [one.num_records for one in plan.settings] == [site.num_records for site in terms.sites]
    require(agree, "PLAN", "have one number of clients, of their records, and of rounds", "several")
    sizes = [min(one.num_records, one.batch_size, one.local_epochs) for one in plan.settings]
    require(min(sizes, default=0) >= 1, "PLAN", "have clients with at least one record, in a batch, and epoch", sizes)
    purposes = [line.purpose for client in plan.schedule.clients for line in client.planned]
    require(re.fullmatch("[0-9a-f]{32}", terms.run) is not None, "PLAN", "have a run of 32 digits", terms.run)
    for texts, pattern in ((purposes, r"\w[\w ]{0,59}"), (plan.strategies, r"\d+ [\w.<>]{1,200}")):
        for text in texts:
            fits = re.fullmatch(pattern, text, re.ASCII) is not None
            require(fits, "PLAN", "have names of letters and digits for purposes and strategies", text)
    for text in (*plan.caveats, plan.accountant, *_names_in(plan.options)):
        require(text.isprintable() and len(text) <= _MOST_WORDS, "PLAN", "have short texts of one line each", text)
    for site in terms.sites:
        _check_site("PLAN", site)
    return terms


def server_words(text: str) -> str:
    """Mark a free text of a plan, so that it cannot be taken for words of this program.

    >>> server_words("This is perfectly safe.")
    "The server writes: 'This is perfectly safe.'"
    """
    return f"The server writes: {text!r}"


def model_words(plan: RunPlan) -> list[str]:
    """Return what a node builds of a plan once its operator has accepted it, one line for each option and argument.

    They are literals of at most 1,000 characters, so that none can be taken for words of this program.
    """
    model: Any = plan.options.get("model")
    parts: list[object] = [{"task": plan.options.get("task")}, {"optimizer": plan.optimizer}]
    for name, one in (model if isinstance(model, Mapping) else {"model": model}).items():
        each = name == "init_args" and isinstance(one, Mapping)
        parts += [{name: {key: value}} for key, value in one.items()] if each else [{name: one}]
    lines = [f"  {shortened(repr(part), _MOST_WORDS)}" for part in parts[:_MOST_PARTS]]
    more = len(parts) - len(lines)
    lines += [f"  and {counted(more, 'option')} more, which are in the file"] if more else []
    return ["Once the plan is accepted, and not before, the node builds a model with these options in it:", *lines]


def _names_in(value: Any) -> Iterator[str]:
    """Yield the names of options at all depths."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    yield from value if isinstance(value, Mapping) else ()
    for one in inner:
        yield from _names_in(one)


def read_site(path: Path, key: str = "--sites") -> Site:
    """Return the facts of a site from its file. Raises UserError, about `key`, if it is none, or has odd names."""
    site = read_message(Site, path, key, "be files site.json that `dpfl node init` wrote")
    _check_site(key, site)
    return site


def _check_site(key: str, site: Site) -> None:
    check_names(f"{key}: name", [site.name])
    check_columns(f"{key}: features", [site.features, site.form.label or "label"])
    advice = "`dpfl node init` draws one."
    must = "be 64 hexadecimal digits of a key with which only its owner can sign"
    require(is_public_key(site.public_key), f"{key}: public_key", must, site.public_key, advice)
    try:
        schema = json.dumps(site.schema, allow_nan=False, ensure_ascii=False)
    except ValueError:
        raise UserError(f"`{key}: schema` must have finite numbers, got others.") from None
    fits = len(schema) <= _MOST_SCHEMA and schema.isprintable() and "\\u" not in schema
    must = f"have at most {_MOST_SCHEMA} characters as JSON, all of them printable"
    require(fits, f"{key}: schema", must, f"others, or {len(schema)}")


def difference(site: Site, known: Site) -> str:
    """Return in words how the records of a site differ from the known ones; empty if they do not."""
    ours, theirs = ({**one.schema, **(one.features or {}), **one.unit.options()} for one in (site, known))
    columns, expected = (facts.get("columns", facts.get("names", [])) for facts in (ours, theirs))
    more, fewer = ([one for one in a if one not in b] for a, b in ((columns, expected), (expected, columns)))
    if more or fewer:
        parts = ["more columns " * bool(more) + ", ".join(more), "no columns " * bool(fewer) + ", ".join(fewer)]
        return " and ".join(filter(None, parts))
    if columns != expected:
        return f"the columns in the order {', '.join(columns)} instead of {', '.join(expected)}"
    for key in sorted({**ours, **theirs}, key=lambda key: key == "names"):  # which follow from the others
        one, other = ours.get(key), theirs.get(key)
        one, other = _what_differs(one, other)
        if one != other:
            return f"{key} {inline(one)} instead of {inline(other)}"
    if site.num_classes != known.num_classes:
        return f"{site.num_classes} classes instead of {known.num_classes}"
    if site.form != known.form:
        return f"records of the form {site.form} instead of {known.form}"
    kinds = [
        (structure, [(leaf.dtype, leaf.shape[1:]) for leaf in leaves])
        for leaves, structure in (tree_flatten((one.inputs, one.labels)) for one in (site, known))
    ]
    shapes = (f"{record_shape(one.inputs)} and labels of {one.labels.dtype}" for one in (site, known))
    return "" if kinds[0] == kinds[1] else "inputs of shape " + " instead of ".join(shapes)


def _what_differs(one: Any, other: Any) -> tuple[Any, Any]:
    """Return the parts of two facts that differ."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return one, other
    differ = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    parts = {name: _what_differs(one.get(name), other.get(name)) for name in differ}
    return {name: part for name, (part, _) in parts.items()}, {name: part for name, (_, part) in parts.items()}


def several_records(site: Site) -> tuple[str, ...]:
    """Return the caveat of an epsilon of records of which one id may have several, as in a simulation."""
    return site.unit.caveats(bool(site.schema.get(ID_KEY)))


def client_of(terms: Terms, name: str) -> int:
    """Return the number of the client of the site `name` in a plan. Raises UserError if the plan does not have it."""
    names = tuple(site.name for site in terms.sites)
    must = f"have a client named {name} (its clients: {', '.join(names)})"
    require(name in names, "PLAN", must, "none", "Names of sites are given by `dpfl node init --name`.")
    return names.index(name)


def cost_of(terms: Terms, client: int) -> ClientPlan:
    """Return the releases of a client in a plan, and what they cost, composed again by this installation.

    Of its caveats none is of the plan, as they are words of the server. Raises UserError if something is released
    without noise, or the cost is above the budget that the plan states.
    """
    schedule, settings = terms.plan.schedule.clients[client], terms.plan.settings[client]
    for line in schedule.planned:
        require(line.event.private or line.count <= 0, "PLAN", "plan noisy releases only", line.event)
        require(line.count >= 0 and line.event.total >= 1, "PLAN", "plan releases of at least one step", line)
    privacy = PrivacyOptions(**privacy_of(terms))
    accountant = get_accountant(terms.plan.accountant, privacy.adjacency)
    size, words = [(settings.num_records, settings.batch_size)], SAMPLERS["poisson"].words
    caveats = several_records(terms.sites[client])
    (planned,) = client_plans([schedule], accountant, size, words, caveats, unit=unit_of(privacy))
    epsilon, budget = planned.guarantee.epsilon, min(schedule.target_epsilon, settings.epsilon)
    require(math.isfinite(epsilon), "PLAN", "be a finite cost of noisy releases", epsilon, "Some release has no noise.")
    within = epsilon <= budget * (1 + 1e-6) + 2e-6 and schedule.delta <= settings.delta
    must = f"cost at most the budget that it states, ({at_most(budget)}, {at_most(settings.delta)})"
    require(within, "PLAN", must, (epsilon, schedule.delta))
    return planned


def privacy_of(terms: Terms) -> dict[str, Any]:
    """Return how releases are made, as a plan states it."""
    given, names = terms.plan.options.get("privacy"), _OF_RELEASES
    if not isinstance(given, dict) or not {*names} <= given.keys():
        raise UserError(f"`PLAN` must state the options of privacy ({', '.join(names)}), got others.")
    require(given["sampling"] == "poisson", "PLAN", "draw Poisson samples", given["sampling"])
    require(given["accountant"] == terms.plan.accountant, "PLAN", "name one accountant", given["accountant"])
    return {name: given[name] for name in names}


def read_message(kind: type[T], path: Path, key: str, must: str) -> T:
    """Return the message in a text file. Raises UserError, about `key`, if it is another one, or of another format."""
    content = read_bytes(path, key, _MOST_TEXT, f"It must {must}.")
    try:
        return wire.from_text(kind, content)
    except wire.WireError as error:
        raise UserError(f"`{key}` must {must} with the same version of this package, got {path}: {error}.") from None
