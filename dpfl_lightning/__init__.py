"""Differentially private federated learning on PyTorch Lightning. The public names, imported on first use."""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOME = {
    "ClientModule": "client",
    "ClientOptions": "config",
    "Dataset": "data",
    "Facts": "data",
    "FederatedLoop": "federated.loop",
    "Guarantee": "privacy.guarantee",
    "Population": "data",
    "PrivacyOptions": "config",
    "RunResult": "federated.state",
    "ServerCallback": "federated.callback",
    "UserError": "errors",
    "load_dataset": "data",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 (names are imported lazily, so that `--help` needs no torch)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    return getattr(module, "load" if name == "load_dataset" else name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
