"""Options of the distillation strategy: their names, their defaults by mode, and their checks."""

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
#: the condensation paper's learning rate of the images; it takes ten times as many steps as a few hundred rounds have
CONDENSATION_RATE = 0.1
#: mode -> defaults of options that are not set; for None see `Distillation`
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
    """Return all options, with the defaults of the mode for those that are None.

    Raises:
        UserError: a name is unknown, a number is out of range, or options contradict each other.
    """
    mode = given["mode"]
    require(mode in _DEFAULTS, f"{KEY}.mode", f"be one of {', '.join(_DEFAULTS)}", mode, nearest(mode, _DEFAULTS))
    options = {**given, **{name: value for name, value in _DEFAULTS[mode].items() if given[name] is None}}
    _check(options)
    return options


def loops(images_per_class: int) -> tuple[int, int]:
    """Return the condensation paper's loops: rounds between two initialisations, and epochs on the set after a round.

    A number of images that its code does not list uses the values of the next larger one; above 50 those of 50.

    >>> loops(1), loops(10), loops(12), loops(100)
    ((1, 1), (10, 50), (20, 25), (50, 10))
    """
    return _LOOPS[min((known for known in _LOOPS if known >= images_per_class), default=50)]


def participants(num_clients: int, fraction: float) -> int:
    """Return the number of clients in a round: the fraction of all, with halves rounded up, and at least one.

    >>> participants(5, 0.5), participants(20, 0.5), participants(3, 0.1)
    (3, 10, 1)
    """
    return max(1, math.floor(fraction * num_clients + 0.5))


def _check(given: Mapping[str, Any]) -> None:
    """Check each option, and the combinations that exclude each other."""
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
