"""Data of a run: public data sets, how clients share them, and a user's own data."""

from dpfl_lightning.data.datasets import Dataset, load
from dpfl_lightning.data.population import Population

__all__ = ["Dataset", "Population", "load"]
