"""Data of a run: public data sets, their division among clients, and a user's data."""

from dpfl_lightning.data.datasets import Dataset, load
from dpfl_lightning.data.population import Population

__all__ = ["Dataset", "Population", "load"]
