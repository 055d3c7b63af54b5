"""Options of the distillation strategy: their names, their defaults by mode, and their checks."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dpfl_lightning.algorithms.gradient_matching import MATCHINGS
from dpfl_lightning.errors import require, require_one_of, require_whole
from dpfl_lightning.models.augmentation import OPERATIONS

KEY = "strategies.distillation"

AUGMENTATIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "dsa": tuple(OPERATIONS),
    "dsa_without_flip": tuple(name for name in OPERATIONS if name != "flip"),
}
_CHOICES: dict[str, Iterable[str]] = {
    "matching": MATCHINGS,
    "row_weights": ("equal", "noise_aware"),
    "augmentation": AUGMENTATIONS,
    "net_update": ("synthetic", "aggregate"),
    "aggregation": ("sampled", "uniform", "class_count", "median", "by_base_rule"),
    "sampling": ("full", "poisson", "fixed"),
    "noise_scale": ("sum", "paper_mean"),
}
#: lower bound -> options; those from 0 may be None
_AT_LEAST = {
    1: ("images_per_class", "image_steps", "records_per_class", "min_participants", "min_records_per_target"),
    0: ("reinit_every", "net_epochs"),
}
#: mode -> defaults of options that are not set; for None see `Distillation`
_DEFAULTS: dict[str, dict[str, Any]] = {
    "default": {"aggregation": "sampled", "sampling": None, "reinit_every": None, "image_learning_rate": 100.0},
    "paper_literal": {
        "aggregation": "uniform",
        "sampling": "fixed",
        "reinit_every": 0,
        "image_learning_rate": 39.4,  # the condensation paper's 0.1 for ten images a class and a net of 394 rows
    },
}
#: images per class -> (rounds from one initialisation to the next, epochs on the set after a round), as in the
#: condensation paper
_LOOPS = {1: (1, 1), 10: (10, 50), 20: (20, 25), 30: (30, 20), 40: (40, 15), 50: (50, 10)}


def switches(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options, checked, with the defaults of the mode for those that are None."""
    require_one_of(_DEFAULTS, f"{KEY}.mode", given["mode"])
    defaults = _DEFAULTS[given["mode"]]
    options = {**given, **{name: value for name, value in defaults.items() if given[name] is None}}
    for name, choices in _CHOICES.items():
        if options[name] is not None or name != "sampling":
            require_one_of(choices, f"{KEY}.{name}", options[name])
    for least, names in _AT_LEAST.items():
        for name in names:
            if options[name] is not None or least:
                require_whole(f"{KEY}.{name}", options[name], least)
    for name in ("image_learning_rate", "net_learning_rate"):
        require(0 < options[name] < math.inf, f"{KEY}.{name}", "be above 0", options[name])
    require(0 <= options["image_momentum"] < 1, f"{KEY}.image_momentum", "be in [0, 1)", options["image_momentum"])
    fraction = options["participation_fraction"]
    require(0 < fraction <= 1, f"{KEY}.participation_fraction", "be in (0, 1]", fraction)
    of_a_mean = options["matching"] == "layerwise_cosine" and options["aggregation"] != "median"
    must = "be equal unless matching is layerwise_cosine and the target is a mean"
    require(of_a_mean or options["row_weights"] == "equal", f"{KEY}.row_weights", must, options["row_weights"])
    return options


def loops(images_per_class: int) -> tuple[int, int]:
    """Return the entry of `_LOOPS`, or that of the next larger number of images; above 50 that of 50."""
    return _LOOPS[min((known for known in _LOOPS if known >= images_per_class), default=50)]


def participants(num_clients: int, fraction: float) -> int:
    """Return the number of clients in a round: the fraction of all, with halves rounded up, and at least one."""
    return max(1, math.floor(fraction * num_clients + 0.5))
