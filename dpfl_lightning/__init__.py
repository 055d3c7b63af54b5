"""Differentially private federated learning on PyTorch Lightning. The public names are imported on first use."""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

#: public name -> module that defines it; lazily, so that `--help` needs no torch
_HOME = {
    "ClientModule": "client",
    "ClientOptions": "options",
    "Facts": "data",
    "FederatedLoop": "federated.loop",
    "Guarantee": "privacy.guarantee",
    "Population": "data",
    "PrivacyOptions": "options",
    "RunResult": "federated.state",
    "ServerCallback": "federated.callback",
    "UserError": "errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
