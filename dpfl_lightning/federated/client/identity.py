"""What makes a run this run: sealed in its ledger's header, so that it goes on as it began or not at all."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

import dpfl_lightning
from dpfl_lightning.config.options import FREE, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.plan import RunSchedule
from dpfl_lightning.federated.server.settings import ClientSettings
from dpfl_lightning.federated.server.strategy import ServerCallback

if TYPE_CHECKING:
    from dpfl_lightning.federated.client.engines.serial import Engine

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OF_A_ROUND = ("task", "local_optimizer", "net")  # of a `ClientModule`: what begins anew, and what is read apart
_OF_TORCH = frozenset(vars(ClientModule(nn.LayerNorm(1))))  # of a layer that draws no random numbers to begin with


def configuration(
    rounds: int,
    seed: int,
    settings: Sequence[ClientSettings],
    privacy: PrivacyOptions | None,
    strategies: Sequence[str],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """What was configured, ready for JSON: options that decide releases, also of a loop that was built in Python.

    It names the random streams of a simulation: another configuration has other noise.
    """
    columns = {name: [_number(getattr(one, name.rpartition(".")[2])) for one in settings] for name in _COLUMNS}
    return _for_json(
        {
            **deciding_options(options),
            "rounds": rounds,
            "seed": seed,
            **{name: values[0] if len(set(values)) == 1 else values for name, values in columns.items()},
            **{f"privacy.{name}": None if privacy is None else getattr(privacy, name) for name in _SHARED},
            **({} if "strategies" in options else {"strategies": _classes(strategies)}),
        }
    )


def deciding_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a resolved configuration that decide releases, ready for JSON."""
    chosen = {key: value for key, value in options.items() if key not in FREE}
    if "data" in chosen:
        chosen["data"] = {key: value for key, value in options["data"].items() if key not in _WHERE_FILES_LIE}
    return _for_json(chosen)


def identity(
    configured: Mapping[str, Any],
    schedule: RunSchedule,
    module: ClientModule,
    strategies: Mapping[str, str],
    population: Population,
    data_key: bytes,
) -> dict[str, Any]:
    """All that decides a run's releases, ready for JSON.

    Args:
        configured: from `configuration`.
        data_key: keys the digests of private records; a plain digest would tell whoever can guess them.

    **Privacy** The digests mean nothing without the key, which stays with the client.
    """
    lines = [[repr(line) for line in client.planned] for client in schedule.clients]
    return {
        **configured,
        "versions": f"dpfl_lightning {dpfl_lightning.__version__}, torch {torch.__version__}",
        "schedule": _hex(json.dumps(lines).encode()),
        "strategy": strategies,
        "module": module_digest(module),
        "records": [digest.hex() for digest in data_digests(population, data_key)],
    }


def strategy_digests(callbacks: Sequence[ServerCallback]) -> dict[str, str]:
    """A digest of each callback that decides anything, by its class and number: its settings and the source of both.

    To be taken before the first round, as a strategy may remember rounds among its settings.
    """
    deciding = [one for one in callbacks if any(_overrides(one, verb) for verb in _VERBS)]
    return {f"{number} {type(one).__qualname__}": object_digest(one) for number, one in enumerate(deciding)}


def _overrides(callback: ServerCallback, verb: str) -> bool:
    return getattr(type(callback), verb) is not getattr(ServerCallback, verb)


def equal_ranks(engine: Engine, population: Population, module: ClientModule) -> dict[str, str]:
    """What must be equal on all ranks, by name.

    **Privacy** Private: holds a plain digest of all records; ranks share their memory.
    """
    device = module.device
    own = torch.cuda.get_device_name() if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "code": package_digest(),
        "model": module_digest(module),
        "data": _hex(b"".join(data_digests(population, b""))),
        "engine": f"{engine.name} ({engine.description})",
        "device": f"{device.type} {own}",
    }


def package_digest() -> str:
    """Digest of this package's source, of the libraries that compute, and of how they are set."""
    libraries = f"torch {torch.__version__} numpy {version('numpy')} numba {version('numba')}"
    how = f"threads {torch.get_num_threads()} products {torch.get_float32_matmul_precision()}"
    digest = hashlib.sha256(f"{libraries} {how}".encode())
    for source in sorted(Path(dpfl_lightning.__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def data_digests(population: Population, key: bytes) -> Iterator[bytes]:
    """A keyed digest of each client's training records, 8 bytes, in the client's order."""
    for client, rows in enumerate(population.train_of):
        digest = hashlib.blake2b(f"client {client};".encode(), key=key, digest_size=8)
        for tensor in (population.x[rows], population.y[rows]):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(memory_of(tensor))
        yield digest.digest()


def module_digest(module: ClientModule) -> str:
    """Digest of the owner's module but for the parameters that are trained: layers, their settings, frozen parameters
    and buffers, and the source of their classes and of all that the owner's files refer to.
    """
    words: list[Any] = [list(module.personal)]
    classes: list[type] = []
    for name, part in module.named_modules():
        classes += type(part).__mro__
        kinds = [one.__qualname__ for one in type(part).__mro__]
        words.append([name, kinds, part.extra_repr(), part.training, _settings(part)])
    fixed = {name: one for name, one in module.named_parameters() if not one.requires_grad}
    words += [[name, _value(tensor)] for name, tensor in sorted({**fixed, **dict(module.named_buffers())}.items())]
    return _with_sources(words, classes)


def object_digest(value: object) -> str:
    """Digest of a strategy before its first round: its class, its settings and the source of both."""
    return _with_sources([_value(vars(value))], type(value).__mro__)


def memory_of(value: Tensor) -> memoryview:
    """A tensor's bytes, wherever it lies."""
    if value.numel() == 0:  # torch refuses to view some empty tensors
        return memoryview(b"")
    return value.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data


_VERBS = ("plan_run", "initialise", "replan", "plan_round", "weigh", "combine", "step", "refine", "deliver", "stop")
_COLUMNS = (
    "clients.num_records",
    "clients.batch_size",
    "clients.local_epochs",
    "clients.learning_rate",
    "privacy.epsilon",
    "privacy.delta",
    "privacy.clip_norm",
    "privacy.noise_multiplier",
)
_WHERE_FILES_LIE = ("folder", "download")
_SHARED = ("mechanism", "accountant", "adjacency", "sampling", "reserve_rounds", "noise_key", "diagnostics")


def _classes(strategies: Sequence[str]) -> str:
    return ", ".join(one.partition(" ")[2] for one in strategies)


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _for_json(value: Any) -> Any:
    """As it comes back from a file: tuples are lists."""
    return json.loads(json.dumps(value, default=str))


def _hex(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _with_sources(words: list[Any], classes: Iterable[type]) -> str:
    classes = list(classes)
    scripts = [_code_of(one) for one in classes if one.__module__ == "__main__"]  # a script may change elsewhere
    digest = hashlib.blake2b(json.dumps([words, scripts]).encode(), digest_size=16)
    for name, source in _sources({one.__module__ for one in classes} - {"__main__"}):
        digest.update(json.dumps([name, len(source)]).encode())
        digest.update(source)
    return digest.hexdigest()


def _code_of(kind: type) -> str | None:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # typed into an interpreter
        return None


def _settings(part: nn.Module) -> dict[str, Any]:
    """What an owner keeps in a module beside parameters, buffers and modules."""
    skipped = (*_OF_TORCH, *(_OF_A_ROUND if isinstance(part, ClientModule) else ()))
    return {key: _value(value) for key, value in sorted(vars(part).items()) if key not in skipped}


def _value(value: object, seen: dict[int, int] | None = None) -> Any:
    """A setting, ready for JSON and without places in memory.

    Args:
        seen: the objects that were met already: each is told once. Not tuples, of which Python may keep equal ones
            once or twice.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Tensor | np.ndarray | np.generic):
        tensor = torch.as_tensor(value)
        return [str(tensor.dtype), list(tensor.shape), _hex(bytes(memory_of(tensor)))]
    if value is None or isinstance(value, str | int | float | complex | bytes):
        return repr(value)
    if isinstance(value, functools.partial):
        return ["partial", *(_value(one, seen) for one in (value.func, value.args, value.keywords))]
    if isinstance(value, type) or inspect.isroutine(value):
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        return [f"{value.__module__}.{value.__qualname__}", _value(cells, seen) if cells else None]
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, tuple):
        return [name, [_value(one, seen) for one in value]]
    if id(value) in seen:
        return [name, seen[id(value)]]
    seen[id(value)] = len(seen)
    if isinstance(value, Mapping):
        return [name, [[_value(key, seen), _value(one, seen)] for key, one in value.items()]]
    if isinstance(value, set | frozenset):
        return [name, sorted(json.dumps(_value(one, seen)) for one in value)]
    if isinstance(value, list):
        return [name, [_value(one, seen) for one in value]]
    if hasattr(value, "__dict__"):
        return [name, _value(vars(value), seen)]
    text = repr(value)
    return [name, None if " at 0x" in text else text]


def _sources(names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """The files of Python modules and, where they are nobody's installed package, of those that they refer to.

    A module without a file (an interpreter) has none: its code cannot be compared.
    """
    found: dict[str, bytes] = {}
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        python = sys.modules.get(name)
        file = getattr(python, "__file__", None)
        if name in found or python is None or not file or _installed(name, file):
            continue
        found[name] = Path(file).read_bytes()
        waiting |= set(_neighbours(python))
    return ((name, found[name]) for name in sorted(found))


def _installed(name: str, file: str) -> bool:
    packages = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return name.split(".")[0] in ("dpfl_lightning", "__main__") or file.startswith(_INSTALLED) or bool(packages)


def _neighbours(python: ModuleType) -> Iterator[str]:
    """The modules whose names, classes and functions this one has imported."""
    for value in vars(python).values():
        other = value if isinstance(value, ModuleType) else _home(value)
        if other is not None:
            yield other.__name__


def _home(value: object) -> ModuleType | None:
    return inspect.getmodule(value) if inspect.isclass(value) or inspect.isfunction(value) else None
