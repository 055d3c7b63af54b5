"""Malekmohammadi, Yu and Cao (2024), "Noise-Aware Algorithm for Heterogeneous Differentially Private Federated
Learning": its tables and figures."""

from dpfl_lightning.reproduction.noise_aware.ablation import ABLATION
from dpfl_lightning.reproduction.noise_aware.accuracy import TABLES
from dpfl_lightning.reproduction.noise_aware.beyond import BEYOND
from dpfl_lightning.reproduction.noise_aware.first_round_figures import MEASURED
from dpfl_lightning.reproduction.noise_aware.formula_figures import COMPUTED
from dpfl_lightning.reproduction.noise_aware.training_figures import TRAINED

EXPERIMENTS = (*COMPUTED, *TABLES, *TRAINED, *MEASURED, ABLATION, *BEYOND)
