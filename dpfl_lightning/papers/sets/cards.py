"""The cards of a distilled set, one for programs and one for people: where it comes from and what it guarantees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import dpfl_lightning
from dpfl_lightning.config.options import changed_options
from dpfl_lightning.config.public import published, published_data
from dpfl_lightning.config.yaml_text import dump
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.scores import bound
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.papers.sets.distilled_set import CARD, TENSORS, DistilledSet
from dpfl_lightning.runtime.text import at_most

#: sections of a configuration that determine a set; paths, keys and tracking are left out
_SECTIONS = ("rounds", "seed", "data", "model", "task", "clients", "privacy", "strategies")
_LEFT_OUT = ("folder", "noise_key")
_OF_CLIENTS = ("name", "num_records", "epsilon_spent", "delta")


def card(view: View, result: RunResult, what: str, options: Mapping[str, Any], sampling: str) -> dict[str, Any]:
    """Return the card for programs: `what` the set is, the `options` and `sampling` that made it, and its cost."""
    facts, run = view.facts, view.run.options
    spent = [client["epsilon_spent"] for client in result.clients]
    return {
        "what": f"a distilled set: {what}",
        "strategy": view.run.strategies,
        "origin": facts.origin,
        "images_per_class": options["images_per_class"],
        "num_classes": facts.num_classes,
        "shape": list(facts.input_shape),
        "options": dict(options),
        "sampling": sampling,
        "data": data_of_card(run.get("data")),
        "model": run.get("model"),
        "seed": view.seed,
        "rounds": result.rounds,
        "clients": facts.num_clients,
        "records": sum(facts.num_records),
        "guarantee": result.guarantee.as_dict(),
        "privacy": {
            "noise": view.run.noise,
            "clients": [{name: client[name] for name in _OF_CLIENTS} for client in result.clients],
        },
        "epsilon_max": None if None in spent else max(spent),
        "delta_max": max(client["delta"] for client in result.clients),
        "ledger": result.ledger,
        "test_accuracy": result.test_accuracy,
        "test_set": result.test_set,
        "dpfl_lightning": dpfl_lightning.__version__,
    }


def data_of_card(data: Mapping[str, Any] | None) -> Any:
    """Return the options of the data as the card has them, which is given away: without secrets and local paths."""
    public = {name: one for name, one in (data or {}).items() if name not in ("folder", "download")}
    return published_data(public) or None


def data_card(made: DistilledSet, options: Mapping[str, Any]) -> str:
    """Return the data card of a set with a complete card, in Markdown; `options` are the configuration of its run.

    **Privacy** Post-processing: it reads images, labels and public facts.
    """
    return _TEMPLATES.get_template("data_card.md").render(
        made=made,
        card=made.card,
        sampling=_SAMPLINGS[made.card["sampling"]],
        values=[float(value) for value in (made.x.min(), made.x.max(), made.x.std())],
        command=_command(options),
        tensors=TENSORS,
        card_file=CARD,
    )


_SAMPLINGS = {
    "full": "all records of a client",
    "poisson": "Poisson batches",
    "fixed": "a fixed number of each class, drawn without replacement",
}


def _command(options: Mapping[str, Any]) -> str:
    if not options:
        return "The run was built in Python, so there is no command that repeats it."
    changed = changed_options(options)
    public = {name: _public(changed[name]) for name in _SECTIONS if name in changed}
    kept = {name: published_data(one) if name == "data" else published(one) for name, one in public.items()}
    return (
        "This command makes a set in the same way, with fresh noise, from a file `set.yaml` with this content:\n\n"
        f"```bash\npython -m dpfl_lightning.fit --config set.yaml\n```\n\n```yaml\n{dump(kept).rstrip()}\n```"
    )


def _public(section: Any) -> Any:
    if not isinstance(section, Mapping):
        return section
    return {name: value for name, value in section.items() if name not in _LEFT_OUT}


_TEMPLATES = Environment(loader=PackageLoader(__name__, "."), undefined=StrictUndefined, trim_blocks=True)
_TEMPLATES.filters |= {"bound": bound, "at_most": at_most}
