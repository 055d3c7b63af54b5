"""Data of a run: public data sets, their division among clients, and a user's data."""

import importlib
from typing import TYPE_CHECKING

from dpfl_lightning.data.population import Population

if TYPE_CHECKING:
    from dpfl_lightning.data.datasets import Dataset, load

__all__ = ["Dataset", "Population", "load"]


def __getattr__(name: str) -> object:
    if name not in ("Dataset", "load"):  # of public data sets, which a site with records of its own does not need
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.datasets"), name)
