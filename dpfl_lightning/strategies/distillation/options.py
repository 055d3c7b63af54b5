"""What the distillation strategy can be told: names, defaults by mode, and what excludes each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dpfl_lightning.algorithms.gradient_matching import MATCHINGS
from dpfl_lightning.errors import nearest, require
from dpfl_lightning.models.augmentation import OPERATIONS

KEY = "strategies.distillation"

AUGMENTATIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "dsa": tuple(OPERATIONS),
    "dsa_without_flip": tuple(name for name in OPERATIONS if name != "flip"),
}
_CHOICES: dict[str, Iterable[str]] = {
    "mode": ("default", "paper_literal"),
    "matching": MATCHINGS,
    "row_weights": ("equal", "noise_aware"),
    "augmentation": AUGMENTATIONS,
    "net_update": ("synthetic", "aggregate"),
    "aggregation": ("sampled", "uniform", "class_count", "median", "by_base_rule"),
    "sampling": ("full", "poisson", "fixed"),
    "noise_scale": ("sum", "paper_mean"),
}
#: the condensation paper's learning rate of the images, for ten times as many steps as a few hundred rounds have
CONDENSATION_RATE = 0.1
#: what an option that is left out is, by mode; None: see `Distillation`
_DEFAULTS: dict[str, dict[str, Any]] = {
    "default": {"aggregation": "sampled", "sampling": None, "reinit_every": None, "image_learning_rate": 1.0},
    "paper_literal": {
        "aggregation": "uniform",
        "sampling": "fixed",
        "reinit_every": 0,
        "image_learning_rate": CONDENSATION_RATE,
    },
}
#: images per class -> (rounds from one initialisation to the next, epochs on the set after a round)
_LOOPS = {1: (1, 1), 10: (10, 50), 20: (20, 25), 30: (30, 20), 40: (40, 15), 50: (50, 10)}


def switches(given: Mapping[str, Any]) -> dict[str, Any]:
    """All options, with the mode's value for those that were left out.

    Raises:
        UserError: an unknown name, a number out of range, or options that contradict each other.
    """
    mode = given["mode"]
    require(mode in _DEFAULTS, f"{KEY}.mode", f"be one of {', '.join(_DEFAULTS)}", mode, nearest(mode, _DEFAULTS))
    own = {**given, **{name: value for name, value in _DEFAULTS[mode].items() if given[name] is None}}
    _check(own)
    return own


def loops(images_per_class: int) -> tuple[int, int]:
    """The condensation paper's loops: rounds from one initialisation to the next, epochs on the set after a round.

    A number that its code does not know takes those of the next larger one, and above 50 those of 50.

    >>> loops(1), loops(10), loops(12), loops(100)
    ((1, 1), (10, 50), (20, 25), (50, 10))
    """
    return _LOOPS[min((known for known in _LOOPS if known >= images_per_class), default=50)]


def participants(num_clients: int, fraction: float) -> int:
    """Clients of a round: the fraction of all, a half rounded up, at least one.

    >>> participants(5, 0.5), participants(20, 0.5), participants(3, 0.1)
    (3, 10, 1)
    """
    return max(1, math.floor(fraction * num_clients + 0.5))


def _check(given: Mapping[str, Any]) -> None:
    """Every option by itself, and those that exclude each other."""
    for name, choices in _CHOICES.items():
        value, known = given[name], list(choices)
        ok = value in known or (value is None and name == "sampling")
        require(ok, f"{KEY}.{name}", f"be one of {', '.join(known)}", value, nearest(str(value), known))
    for name, least in (
        ("images_per_class", 1),
        ("image_steps", 1),
        ("reinit_every", 0),
        ("net_epochs", 0),
        ("records_per_class", 1),
        ("min_participants", 1),
        ("min_records_per_target", 1),
        ("evaluation_epochs", 1),
    ):
        require(given[name] is None or given[name] >= least, f"{KEY}.{name}", f"be >= {least}", given[name])
    for name in ("image_learning_rate", "net_learning_rate"):
        require(0 < given[name] < math.inf, f"{KEY}.{name}", "be above 0", given[name])
    require(0 <= given["image_momentum"] < 1, f"{KEY}.image_momentum", "be in [0, 1)", given["image_momentum"])
    fraction = given["participation_fraction"]
    require(0 < fraction <= 1, f"{KEY}.participation_fraction", "be in (0, 1]", fraction)
    rows = given["row_weights"] == "equal" or (
        given["matching"] == "layerwise_cosine" and given["aggregation"] != "median"
    )
    must = "be equal unless matching is layerwise_cosine and the target is a mean"
    require(rows, f"{KEY}.row_weights", must, given["row_weights"])
