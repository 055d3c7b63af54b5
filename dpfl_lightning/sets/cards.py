"""The cards of a distilled set, one for programs and one for people: where it comes from and what it guarantees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import dpfl_lightning
from dpfl_lightning.config.options import changed_options
from dpfl_lightning.config.yaml_text import dump
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.runtime.text import at_most, markdown, without_secrets
from dpfl_lightning.sets.distilled_set import CARD, TENSORS, DistilledSet

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
    return without_secrets(public) or None


def data_card(made: DistilledSet, options: Mapping[str, Any]) -> str:
    """Return the data card of a set with a complete card, in Markdown; `options` are the configuration of its run.

    **Privacy** Post-processing: it reads images, labels and public facts.
    """
    card = made.card
    name = card["origin"].get("name") or "records of the clients"
    parts = (
        f"# Data card: {len(made)} synthetic images made from {name}",
        f"This is {card['what']}.",
        "## Content",
        _content(made),
        "## How it was made",
        _making(card),
        _command(options),
        "## Privacy",
        *_privacy(card),
        "## Use",
        _USE.format(tensors=TENSORS, card=CARD),
        *_limits(card),
    )
    return "\n\n".join(parts) + "\n"


def _content(made: DistilledSet) -> str:
    card, origin = made.card, made.card["origin"]
    low, high, std = float(made.x.min()), float(made.x.max()), float(made.x.std())
    values = "as the clients' records were given to the run"
    if "scale" in origin:
        mean, divisor, scale = (f"{origin[name]:g}" for name in ("mean", "std", "scale"))
        values = f"(raw / {scale} - {mean}) / {divisor}; x * {divisor} + {mean} is in [0, 1] for a record"
    return markdown(
        ["", ""],
        [
            ["images", f"{len(made)}, {card['images_per_class']} of each of {card['num_classes']} classes"],
            ["shape", f"{card['shape']}, {str(made.x.dtype).removeprefix('torch.')}"],
            ["labels", f"0 to {card['num_classes'] - 1}, int64"],
            ["scaling", values],
            ["range of the images", f"{low:.2f} to {high:.2f}, standard deviation {std:.2f}; not clamped"],
            ["made from", f"{origin.get('name') or 'data of the clients'}"],
            ["licence of the source data", origin.get("licence") or "not known to the program"],
        ],
    )


def _making(card: Mapping[str, Any]) -> str:
    rows = [
        ["strategy", ", ".join(card["strategy"])],
        ["its options", ", ".join(f"{name}: {value}" for name, value in card["options"].items() if value is not None)],
        ["records of a release", _SAMPLINGS[card["sampling"]]],
        ["clients", f"{card['clients']} with {card['records']:,} records"],
        ["rounds", str(card["rounds"])],
        ["model", ", ".join(f"{name}: {value}" for name, value in (card["model"] or {}).items()) or "built in Python"],
        ["seed of public randomness", str(card["seed"])],
        ["program", f"dpfl_lightning {card['dpfl_lightning']}"],
    ]
    return markdown(["", ""], rows)


_SAMPLINGS = {
    "full": "all records of a client",
    "poisson": "Poisson batches",
    "fixed": "a fixed number of each class, drawn without replacement",
}


def _command(options: Mapping[str, Any]) -> str:
    if not options:
        return "The run was built in Python, so there is no command that repeats it."
    changed = changed_options(options)
    kept = {name: without_secrets(_public(changed[name])) for name in _SECTIONS if name in changed}
    return (
        "This command makes a set in the same way, with fresh noise, from a file `set.yaml` with this content:\n\n"
        f"```bash\npython -m dpfl_lightning.fit --config set.yaml\n```\n\n```yaml\n{dump(kept).rstrip()}\n```"
    )


def _public(section: Any) -> Any:
    if not isinstance(section, Mapping):
        return section
    return {name: value for name, value in section.items() if name not in _LEFT_OUT}


def _privacy(card: Mapping[str, Any]) -> tuple[str, ...]:
    privacy, most, guarantee = card["privacy"], card["epsilon_max"], card["guarantee"]
    promise, points = guarantee["words"], "\n".join(f"- {point}" for point in guarantee["not_covered"])
    rest = f"Not covered:\n\n{points}"
    if most is None:
        warning = "**This set has no guarantee.** Images of classes with few records can be close to these records."
        return (warning, promise, rest)
    facts = [
        ["largest epsilon of a client", at_most(most)],
        ["largest delta", at_most(card["delta_max"])],
        ["unit of privacy", guarantee["unit"]],
        ["neighbouring data sets", guarantee["adjacency"]],
        ["sampling", guarantee["sampling"]],
        ["accountant", guarantee["accountant"]],
        ["noise", privacy["noise"]],
        ["ledger", f"run {card['ledger']['run']}, {card['ledger']['lines']} lines"],
    ]
    clients = [
        [str(one["name"]), f"{one['num_records']:,}", at_most(_number(one["epsilon_spent"])), at_most(one["delta"])]
        for one in privacy["clients"]
    ]
    table = markdown(["client", "records", "epsilon", "delta"], clients)
    return (promise, markdown(["", ""], facts), table, rest)


def _number(epsilon: float | None) -> float:
    return math.inf if epsilon is None else epsilon


_USE = """\
The set is for training, tuning and comparing models of this task. Everything that is computed from it is
post-processing: it costs no further privacy.

```python
import lightning
from dpfl_lightning import DistilledDataModule

data = DistilledDataModule("FOLDER")  # the folder of {tensors} and {card}, or runs:/ID of an MLflow run
trainer = lightning.Trainer(max_epochs=100)
trainer.fit(your_lightning_module, data)
trainer.test(your_lightning_module, data)
```

Limits:"""


def _limits(card: Mapping[str, Any]) -> tuple[str, ...]:
    score = card["test_accuracy"]
    on = "on the test set" if card["test_set"] else "on held-out records of the clients, on average"
    trained = [] if score is None else [f"A new model of the run that was trained on it has {score:.1%} accuracy {on}."]
    guaranteed = (
        "A further set, model or run made from the same records adds its epsilon and delta."
        if card["epsilon_max"] is not None
        else "Treat it as confidential as the records themselves."
    )
    limits = [
        *trained,
        "Where labelled public records of the task exist, train on these, too.",
        "Every class has the same number of images, whatever the clients have, and also if no client has it.",
        "Counts, shares and correlations of the records cannot be read from it.",
        guaranteed,
        "The licence of the source data may hold for what is made from them.",
    ]
    return ("\n".join(f"- {one}" for one in limits),)
