"""Registry of the server strategies: the name that a configuration uses -> class."""

import importlib
from collections.abc import Mapping
from typing import Any

from dpfl_lightning.config.registry import call, check_names, imported
from dpfl_lightning.federated.server.strategy import Strategy

#: registry name -> (file, class)
STRATEGIES = {
    "biased_selection": ("selection.biased_selection", "BiasedSelection"),
    "clustered": ("clustering.clustered", "Clustered"),
    "distillation": ("distillation.distillation", "Distillation"),
    "early_stopping": ("selection.early_stopping", "EarlyStopping"),
    "epsilon_weighted": ("baselines.epsilon_weighted", "EpsilonWeighted"),
    "feature_means": ("distillation.feature_means", "FeatureMeans"),
    "fedadam": ("aggregation.fedadam", "FedAdam"),
    "fedprox": ("aggregation.fedprox", "FedProx"),
    "fedyogi": ("aggregation.fedyogi", "FedYogi"),
    "geometric_median": ("aggregation.geometric_median", "GeometricMedian"),
    "ifca": ("baselines.ifca", "Ifca"),
    "kmeans_clusters": ("baselines.kmeans_clusters", "KMeansClusters"),
    "local": ("clustering.local", "Local"),
    "median": ("aggregation.median", "Median"),
    "minimum_epsilon": ("baselines.minimum_epsilon", "MinimumEpsilon"),
    "mixed_effects": ("clustering.mixed_effects", "MixedEffects"),
    "mr_mtl": ("clustering.mr_mtl", "MrMtl"),
    "multi_krum": ("aggregation.multi_krum", "MultiKrum"),
    "noise_aware": ("aggregation.noise_aware", "NoiseAware"),
    "noise_floor": ("aggregation.noise_floor", "NoiseFloor"),
    "norm_bound": ("aggregation.norm_bound", "NormBound"),
    "oracle_clusters": ("baselines.oracle_clusters", "OracleClusters"),
    "pfa": ("baselines.pfa", "Pfa"),
    "released_scores": ("selection.released_scores", "ReleasedScores"),
    "robust_hdp": ("aggregation.robust_hdp", "RobustHdp"),
    "server_momentum": ("aggregation.server_momentum", "ServerMomentum"),
    "size_weighted": ("aggregation.size_weighted", "SizeWeighted"),
    "trimmed_mean": ("aggregation.trimmed_mean", "TrimmedMean"),
    "two_stage_selection": ("selection.two_stage_selection", "TwoStageSelection"),
    "uniform": ("aggregation.uniform", "Uniform"),
    "uniform_selection": ("baselines.uniform_selection", "UniformSelection"),
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
        return getattr(importlib.import_module(f"{__name__}.{file}"), attribute)
    return imported(f"strategies.{name}", name, Strategy)
