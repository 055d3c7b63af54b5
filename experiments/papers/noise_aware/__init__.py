"""Malekmohammadi, Yu and Cao (2024), "Noise-Aware Algorithm for Heterogeneous Differentially Private Federated
Learning": its tables and figures."""

from experiments.papers.noise_aware.ablation import ABLATION
from experiments.papers.noise_aware.accuracy import TABLES
from experiments.papers.noise_aware.beyond import BEYOND
from experiments.papers.noise_aware.first_round_figures import MEASURED
from experiments.papers.noise_aware.formula_figures import COMPUTED
from experiments.papers.noise_aware.training_figures import TRAINED

EXPERIMENTS = (*COMPUTED, *TABLES, *TRAINED, *MEASURED, ABLATION, *BEYOND)
