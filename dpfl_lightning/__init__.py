"""Differentially private federated learning on PyTorch Lightning. The public names are imported on first use."""

import importlib
import os

# Products of MKL then do not depend on the alignment of memory; it reads this before its first product.
os.environ.setdefault("MKL_CBWR", "AUTO")

__version__ = "0.1.0"

#: public name -> module that defines it; imported on first use, so that `--help` does not import torch
_HOME = {
    "Callback": "federated.server.callback",
    "ClientModule": "federated.client.module",
    "ClientOptions": "config.options",
    "DistilledDataModule": "papers.distilled_data",
    "DistilledSet": "papers.sets.distilled_set",
    "Facts": "federated.messages.facts",
    "FederatedLoop": "loop",
    "Guarantee": "privacy.accounting.guarantee",
    "Population": "data",
    "PrivacyOptions": "config.options",
    "Progress": "reporting.progress",
    "RunResult": "federated.server.results",
    "Strategy": "federated.server.strategy",
    "UserError": "errors",
    "load_distilled": "papers.distilled_data",
    "load_model": "models.saved",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
