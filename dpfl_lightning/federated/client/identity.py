"""The identity of a run, which its ledger's header contains, so that only the same run can be resumed."""

import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import dpfl_lightning
from dpfl_lightning.config.options import FREE, PrivacyOptions
from dpfl_lightning.config.public import published_data
from dpfl_lightning.data.lazy import LazyInputs
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.engines.engine import Engine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.clients import RunPlan
from dpfl_lightning.models.learning_rates import CONSTANT
from dpfl_lightning.models.optimizers import PLAIN_SGD
from dpfl_lightning.privacy.accounting.events import Release
from dpfl_lightning.privacy.accounting.guarantee import ENDS_BY_RESULTS
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, numbered, once_each
from dpfl_lightning.privacy.accounting.units import RECORD
from dpfl_lightning.privacy.clipping.inputs import take
from dpfl_lightning.runtime.devices import products
from dpfl_lightning.runtime.digests import described, digest_with_sources, hex_digest, memory_of

#: what a user gives a `ClientModule`; its other attributes follow from its model and the records, or are of a round
_GIVEN = ("given_loss", "given_output", "given_optimizer", "named_task", "probabilities")
_OF_TORCH = frozenset(vars(L.LightningModule()))
_COLUMNS = {
    "clients": ("num_records", "batch_size", "local_epochs", "learning_rate"),
    "privacy": ("epsilon", "delta", "clip_norm", "noise_multiplier"),
}
_SHARED = ("mechanism", "accountant", "adjacency", "sampling", "reserve_rounds", "noise_key", "diagnostics")


def configuration(plan: RunPlan, privacy: PrivacyOptions | None) -> dict[str, Any]:
    """The options that decide releases, ready for JSON, also of a loop that was built in Python.

    They select the random streams of a simulation: another configuration has other noise.
    """
    columns = {
        f"{section}.{name}": ["inf" if value == math.inf else value for value in map(attrgetter(name), plan.settings)]
        for section, names in _COLUMNS.items()
        for name in names
    }
    strategies = ", ".join(name.partition(" ")[2] for name in plan.strategies)
    local_steps = (("clients.optimizer", plan.optimizer, PLAIN_SGD), ("clients.schedule", plan.rates, CONSTANT))
    return _for_json(
        {
            **deciding_options(plan.options),
            "rounds": plan.rounds,
            "seed": plan.seed,
            **{name: values[0] if len(set(values)) == 1 else values for name, values in columns.items()},
            **{f"privacy.{name}": None if privacy is None else getattr(privacy, name) for name in _SHARED},
            **_changed(privacy, (*RECORD.options(),)),
            **({} if "strategies" in plan.options else {"strategies": strategies}),
            **{key: repr(value) for key, value, default in local_steps if value != default},
        }
    )


def deciding_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a resolved configuration that decide releases, ready for JSON."""
    chosen = {key: value for key, value in options.items() if key not in FREE}
    if chosen.get("data") is not None:  # but not where its files are
        chosen["data"] = {key: value for key, value in options["data"].items() if key not in ("folder", "download")}
    if chosen.get("privacy") is not None:  # nor where charges are counted, too
        chosen["privacy"] = {key: value for key, value in options["privacy"].items() if key != "account"}
    return _for_json(chosen)


def identity(
    plan: RunPlan,
    privacy: PrivacyOptions | None,
    module: ClientModule,
    names: Sequence[str],
    records: Sequence[str],
    data_key: bytes,
    filters: Sequence[Release | None],
) -> dict[str, Any]:
    """Everything that decides the releases of a run, ready for JSON.

    `names` are those of all clients, `records` are `data_digests`, and `filters` bound the releases of each client.

    **Privacy** A plain digest of the records would confirm a guess of them. The digests mean nothing without
    `data_key`, which stays with the client.
    """
    lines = once_each(lambda client: [repr(line) for line in client.planned], plan.schedule.clients)
    return {
        **_without_tables(configuration(plan, privacy), data_key),
        "versions": f"dpfl_lightning {dpfl_lightning.__version__}, torch {torch.__version__}",
        "schedule": hex_digest(json.dumps(lines).encode()),
        "strategy": plan.strategies,
        "changes_mechanisms": plan.changes_mechanisms,
        "module": module_digest(module),
        "names": list(names),
        **({"planned": _by_place(plan.schedule.clients, _events)} if ENDS_BY_RESULTS in plan.caveats else {}),
        **({"filter": _by_place(filters, lambda one: one and one.as_dict())} if plan.changes_mechanisms else {}),
        "records": list(records),
    }


def _without_tables(configured: dict[str, Any], data_key: bytes) -> dict[str, Any]:
    """Return a configuration as a ledger has it, which is published: how tables are written is a keyed digest."""
    data = configured.get("data")
    public = published_data(data)
    if public == data:
        return configured
    digest = hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), key=data_key, digest_size=8)
    return {**configured, "data": public, "tables": digest.hexdigest()}


def _by_place(values: Sequence[Any], as_json: Callable[[Any], Any]) -> dict[str, Any]:
    """The different values, and the place of each client's among them, as `Header` reads them."""
    different, places = numbered(values)
    return {"events": [*map(as_json, different)], "of": places}


def _events(client: ClientSchedule) -> list[dict[str, Any]]:
    return [event.as_dict() for event in client.events()]


def equal_ranks(engine: Engine, module: ClientModule) -> dict[str, str]:
    """Values that must be equal on all ranks, by name.

    **Privacy** Private: contains a plain digest of all records.
    """
    libraries = f"torch {torch.__version__} numpy {version('numpy')} numba {version('numba')}"
    settings = f"threads {torch.get_num_threads()} products {products()}"
    code = hashlib.sha256(f"{libraries} {settings}".encode())
    for source in sorted(Path(dpfl_lightning.__file__).parent.rglob("*.py")):
        code.update(source.read_bytes())
    device = module.device
    kind = torch.cuda.get_device_name() if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "code": code.hexdigest(),
        "model": module_digest(module),
        "data": hex_digest(b"".join(data_digests(engine.clients, b""))),
        "engine": f"{engine.name} ({engine.description})",
        "device": f"{device.type} {kind}",
    }


def data_digests(clients: HeldClients, key: bytes) -> Iterator[bytes]:
    """A keyed digest of each client's training records, 8 bytes, in the client's order."""
    population = clients.population
    for client, rows in zip(clients.numbers, population.train_of, strict=True):
        digest = hashlib.blake2b(f"client {client};".encode(), key=key, digest_size=8)
        x = population.x
        ids = [] if population.unit_ids is None else [population.unit_ids[rows]]
        inputs = [x.digests[rows.cpu()]] if isinstance(x, LazyInputs) else tree_leaves(take(x, rows))
        for tensor in (*inputs, population.y[rows], *ids):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(memory_of(tensor))
        yield digest.digest()


def module_digest(module: ClientModule) -> str:
    """Digest of layers, settings, frozen parameters, buffers, and the source of their classes and the user's files."""
    words: list[Any] = [list(module.personal)]
    classes = [_defining(getattr(module, name)) for name in _GIVEN]
    for name, part in module.named_modules():
        classes += type(part).__mro__
        kinds = [kind.__qualname__ for kind in type(part).__mro__]
        words.append([name, kinds, part.extra_repr(), part.training, _settings(part)])
    fixed = {name: value for name, value in module.named_parameters() if not value.requires_grad}
    words += [[name, described(tensor)] for name, tensor in sorted({**fixed, **dict(module.named_buffers())}.items())]
    return digest_with_sources(words, classes)


def _defining(value: object) -> Any:
    """The class or function whose source defines a value."""
    while isinstance(value, functools.partial):
        value = value.func
    return value if inspect.isroutine(value) or isinstance(value, type) else type(value)


def _settings(part: nn.Module) -> dict[str, Any]:
    """The attributes of a module other than parameters, buffers and modules.

    Of a given method also the object that it is bound to.
    """
    if isinstance(part, ClientModule):
        given = {name: vars(part)[name] for name in _GIVEN if name in vars(part)}
        return {name: [described(one), described(getattr(one, "__self__", None))] for name, one in given.items()}
    return {name: described(vars(part)[name]) for name in sorted(vars(part).keys() - _OF_TORCH)}


def _changed(privacy: PrivacyOptions | None, names: Sequence[str]) -> dict[str, Any]:
    """Those of these options that differ from their defaults."""
    usual = PrivacyOptions()
    values = {name: getattr(privacy or usual, name) for name in names}
    return {f"privacy.{name}": value for name, value in values.items() if value != getattr(usual, name)}


def _for_json(value: Any) -> Any:
    """The value as a JSON file returns it: tuples become lists, and numbers that are not finite texts."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)
