"""Malekmohammadi, Taik and Farnadi (2024), "Mitigating Disparate Impact of Differential Privacy in Federated Learning
through Robust Clustering", and its revision, "A Provably Robust Algorithm for Differentially Private Clustered
Federated Learning": their tables and figures."""

from dpfl_lightning.reproduction.clustered.accuracy import REFERENCE, TABLES

EXPERIMENTS = (*TABLES, REFERENCE)
