"""What decides a release bit for bit: a release that is made again from the same is the same, and is paid once."""

from __future__ import annotations

import hashlib
import inspect
import secrets
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import dpfl_lightning
from dpfl_lightning.client import ClientModule
from dpfl_lightning.data import Population
from dpfl_lightning.federated.engine import Engine
from dpfl_lightning.federated.synthetic import draws_random_numbers, synthetic_batch

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OF_A_ROUND = ("task", "local_optimizer", "net")  # of a `ClientModule`: what begins anew, and what is read apart


def repeats(module: ClientModule, population: Population) -> bool:
    """Whether a release can be made again bit for bit: on a CPU, by a net that draws no random numbers of its own.

    Kernels of accelerators may add up in any order, and nobody keys the generators that layers such as dropout draw
    from.
    """
    if module.device.type != "cpu":
        return False
    return not draws_random_numbers(module, *synthetic_batch(population, records=2, device=module.device))


def fingerprints(engine: Engine, population: Population, module: ClientModule) -> dict[str, str]:
    """All that is constant in a run and decides a release bit for bit, by name; not who is trained beside whom.

    **Privacy** Private, as it holds `data_fingerprint`.
    """
    device = module.device
    own = torch.cuda.get_device_name() if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "code": code_fingerprint(),
        "model": module_fingerprint(module),
        "data": data_fingerprint(population),
        "engine": f"{engine.name} ({engine.description})",
        "device": f"{device.type} {own}",  # another one has other kernels
    }


def code_fingerprint() -> str:
    """Digest of this package's source and of the libraries that decide a release bit for bit."""
    libraries = f"torch {torch.__version__} numpy {version('numpy')} numba {version('numba')}"
    how = f"threads {torch.get_num_threads()} products {torch.get_float32_matmul_precision()}"
    digest = hashlib.sha256(f"{libraries} {how}".encode())
    for source in sorted(Path(dpfl_lightning.__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def data_fingerprint(population: Population) -> str:
    """Digest of every client's records: another data set is another release.

    **Privacy** Private: it goes into keyed digests only (`Budgets`), never into a file.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (population.x, population.y, *population.train_of):
        digest.update(memory_of(tensor))
    return digest.hexdigest()


def module_fingerprint(module: ClientModule) -> str:
    """Digest of the owner's module, but for the parameters that are trained: layers, their settings, frozen parameters
    and buffers, and the source of their classes and of all that the owner's files refer to.

    Code without a file (typed into an interpreter) has a random one: nothing that it releases is a replay.
    """
    digest = hashlib.blake2b(digest_size=16)
    modules: set[str] = set()
    for name, part in module.named_modules():
        classes = type(part).__mro__
        modules |= {one.__module__ for one in classes}
        digest.update(repr((name, [one.__qualname__ for one in classes], part.extra_repr())).encode())
        for key, value in sorted(_settings(part)):
            digest.update(key.encode())
            digest.update(memory_of(value) if isinstance(value, Tensor) else _words(value).encode())
            modules |= {value.__module__} if isinstance(getattr(value, "__module__", None), str) else set()
    fixed = {name: one for name, one in module.named_parameters() if not one.requires_grad}
    for name, value in sorted({**fixed, **dict(module.named_buffers())}.items()):
        digest.update(name.encode())
        digest.update(memory_of(value))
    for source in _sources(modules):
        digest.update(source)
    return digest.hexdigest()


def _settings(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """What an owner keeps in a module beside parameters, buffers and modules."""
    skipped = _OF_A_ROUND if isinstance(part, ClientModule) else ()
    return ((key, value) for key, value in vars(part).items() if not key.startswith("_") and key not in skipped)


def _words(value: object) -> str:
    """Of a setting, without its place in memory."""
    if callable(value):
        return f"{getattr(value, '__module__', '')} {getattr(value, '__qualname__', type(value).__qualname__)}"
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _sources(names: Iterable[str]) -> Iterator[bytes]:
    """The files of Python modules and, where they are nobody's installed package, of those that they refer to."""
    found: dict[str, bytes] = {}
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        python = sys.modules.get(name)
        if name in found or name in sys.builtin_module_names or name.split(".")[0] == "dpfl_lightning":
            continue
        file = getattr(python, "__file__", None)
        found[name] = Path(file).read_bytes() if file else secrets.token_bytes(16)
        if python is not None and file and not file.startswith(_INSTALLED):
            waiting |= set(_neighbours(python))
    return (found[name] for name in sorted(found))


def _neighbours(python: ModuleType) -> Iterator[str]:
    """The modules whose names, classes and functions this one has imported, but for installed ones."""
    for value in vars(python).values():
        other = value if isinstance(value, ModuleType) else _home(value)
        file = getattr(other, "__file__", None)
        if other is not None and file and not file.startswith(_INSTALLED):
            yield other.__name__


def _home(value: object) -> ModuleType | None:
    return inspect.getmodule(value) if inspect.isclass(value) or inspect.isfunction(value) else None


def memory_of(value: Tensor) -> memoryview:
    """A tensor's bytes, wherever it lies."""
    return value.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data
