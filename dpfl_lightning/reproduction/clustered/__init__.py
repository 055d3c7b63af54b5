"""Malekmohammadi, Taik and Farnadi (2024), "Mitigating Disparate Impact of Differential Privacy in Federated Learning
through Robust Clustering", and its revision, "A Provably Robust Algorithm for Differentially Private Clustered
Federated Learning": their tables and figures."""

from dpfl_lightning.reproduction.clustered.accuracy import REFERENCE, TABLES
from dpfl_lightning.reproduction.clustered.beyond import BEYOND
from dpfl_lightning.reproduction.clustered.first_round_figures import MEASURED
from dpfl_lightning.reproduction.clustered.formula_figures import COMPUTED
from dpfl_lightning.reproduction.clustered.simulation_tables import SIMULATED
from dpfl_lightning.reproduction.clustered.training_figures import TRAINED

EXPERIMENTS = (*TABLES, REFERENCE, *TRAINED, *MEASURED, *COMPUTED, *SIMULATED, *BEYOND)
