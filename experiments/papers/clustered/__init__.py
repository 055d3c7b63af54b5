"""Malekmohammadi, Taik and Farnadi (2024), "Mitigating Disparate Impact of Differential Privacy in Federated Learning
through Robust Clustering", and its revision, "A Provably Robust Algorithm for Differentially Private Clustered
Federated Learning": their tables and figures."""

from experiments.papers.clustered.accuracy import REFERENCE, TABLES
from experiments.papers.clustered.beyond import BEYOND
from experiments.papers.clustered.first_round_figures import MEASURED
from experiments.papers.clustered.formula_figures import COMPUTED
from experiments.papers.clustered.simulation_tables import SIMULATED
from experiments.papers.clustered.training_figures import TRAINED

EXPERIMENTS = (*TABLES, REFERENCE, *TRAINED, *MEASURED, *COMPUTED, *SIMULATED, *BEYOND)
