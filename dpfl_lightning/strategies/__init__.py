"""Registry of the server strategies: the name that a configuration uses -> class."""

import importlib
from collections.abc import Mapping
from typing import Any

from dpfl_lightning.config.registry import call, check_names, imported
from dpfl_lightning.federated.server.strategy import Strategy

#: registry name -> (module, class); those of `papers` serve their systems, and nothing else imports them
STRATEGIES = {
    "biased_selection": ("strategies.selection.biased_selection", "BiasedSelection"),
    "clustered": ("papers.clustered.clustered", "Clustered"),
    "distillation": ("papers.distillation.distillation", "Distillation"),
    "distillation_as_printed": ("papers.distillation.distillation_as_printed", "DistillationAsPrinted"),
    "early_stopping": ("strategies.selection.early_stopping", "EarlyStopping"),
    "epsilon_weighted": ("papers.baselines.epsilon_weighted", "EpsilonWeighted"),
    "feature_means": ("papers.distillation.feature_means", "FeatureMeans"),
    "fedadam": ("strategies.aggregation.fedadam", "FedAdam"),
    "fedprox": ("strategies.aggregation.fedprox", "FedProx"),
    "fedyogi": ("strategies.aggregation.fedyogi", "FedYogi"),
    "geometric_median": ("strategies.aggregation.geometric_median", "GeometricMedian"),
    "ifca": ("papers.baselines.ifca", "Ifca"),
    "kmeans_clusters": ("papers.baselines.kmeans_clusters", "KMeansClusters"),
    "local": ("strategies.clustering.local", "Local"),
    "local_distillation": ("papers.distillation.local_distillation", "LocalDistillation"),
    "median": ("strategies.aggregation.median", "Median"),
    "minimum_epsilon": ("papers.baselines.minimum_epsilon", "MinimumEpsilon"),
    "mixed_effects": ("strategies.clustering.mixed_effects", "MixedEffects"),
    "mr_mtl": ("strategies.clustering.mr_mtl", "MrMtl"),
    "multi_krum": ("strategies.aggregation.multi_krum", "MultiKrum"),
    "noise_aware": ("strategies.aggregation.noise_aware", "NoiseAware"),
    "noise_floor": ("strategies.aggregation.noise_floor", "NoiseFloor"),
    "norm_bound": ("strategies.aggregation.norm_bound", "NormBound"),
    "oracle_clusters": ("papers.baselines.oracle_clusters", "OracleClusters"),
    "pfa": ("papers.baselines.pfa", "Pfa"),
    "released_scores": ("strategies.selection.released_scores", "ReleasedScores"),
    "robust_hdp": ("papers.robust_hdp.robust_hdp", "RobustHdp"),
    "server_momentum": ("strategies.aggregation.server_momentum", "ServerMomentum"),
    "size_weighted": ("strategies.aggregation.size_weighted", "SizeWeighted"),
    "trimmed_mean": ("strategies.aggregation.trimmed_mean", "TrimmedMean"),
    "two_stage_selection": ("papers.selection.two_stage_selection", "TwoStageSelection"),
    "two_stages_as_printed": ("papers.selection.two_stages_as_printed", "TwoStagesAsPrinted"),
    "uniform": ("strategies.aggregation.uniform", "Uniform"),
    "uniform_selection": ("papers.baselines.uniform_selection", "UniformSelection"),
}


def build(strategies: Mapping[str, Mapping[str, Any] | None]) -> list[Strategy]:
    """Build the strategies of a configuration, in its order: name or package.module.Class -> options (or None).

    >>> [type(s).__name__ for s in build({"size_weighted": None, "fedprox": {"pull": 0.1}})]
    ['SizeWeighted', 'FedProx']
    """
    check_names("strategies", strategies)
    return [
        call(f"strategies.{name}", {name: _class(name)}, name, **(options or {}))
        for name, options in strategies.items()
    ]


def classes() -> dict[str, type[Strategy]]:
    """Return all strategies: registry name -> class."""
    return {name: _class(name) for name in STRATEGIES}


def _class(name: str) -> type[Strategy]:
    if name in STRATEGIES:
        file, attribute = STRATEGIES[name]
        return getattr(importlib.import_module(f"dpfl_lightning.{file}"), attribute)
    return imported(f"strategies.{name}", name, Strategy)
